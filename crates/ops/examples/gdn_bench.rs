//! Times the GatedDeltaNet ops against their floors:
//! `cargo run --release -p ops --example gdn_bench [shape [instruction set]]`.
//!
//! Each shape runs all its layers in turn, each with its own state, as a model does. A figure is the
//! best time of one layer, times the layers, since the machine may be shared. Floors: the
//! op's bytes at the read bandwidth, and its vector operations at the multiply-add rate, both
//! measured here with the same threads.

use std::time::Instant;

use ops::simd::{Isa, Kernel, Simd};
use ops::{
    Act, ActDtype, Commit, Cpu, Device, GatedDelta, GatedNorm, GdnGeometry, GdnPrepare, HeadMap,
    Host, LaneStep, Lanes, Op, Pool, SiluMul,
};

const REPEATS: usize = 40;

struct Shape {
    name: &'static str,
    geometry: GdnGeometry,
    layers: usize,
    intermediate: usize,
}

const fn geometry(key_heads: usize, value_heads: usize, dim: usize) -> GdnGeometry {
    let head_map = HeadMap::Grouped;
    GdnGeometry { key_heads, value_heads, key_dim: dim, value_dim: dim, head_map }
}

/// The slice has the heads of one sixteenth of the large model: short enough for an undisturbed run
/// on a busy machine.
const SHAPES: [Shape; 3] = [
    Shape { name: "th-tiny", geometry: geometry(6, 12, 64), layers: 23, intermediate: 1536 },
    Shape { name: "27B/16", geometry: geometry(1, 3, 128), layers: 48, intermediate: 1088 },
    Shape { name: "27B", geometry: geometry(16, 48, 128), layers: 48, intermediate: 17_408 },
];

fn main() {
    let mut args = std::env::args().skip(1);
    let (shape_name, isa_name) = (args.next(), args.next());
    let wanted = |isa: &Isa| isa_name.as_deref().is_none_or(|name| name == isa.name());
    let isa =
        Isa::available().into_iter().find(wanted).expect("an instruction set of this machine");
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    for threads in [1, cores] {
        let cpu = Cpu { isa, pool: Pool::new(threads) };
        let machine = Machine { flops: fma_rate(&cpu), bytes: read_rate(&cpu) };
        println!(
            "{} x{threads}: {:.1} G vector operations/s, {:.1} GB/s read",
            isa.name(),
            machine.flops / 1e9,
            machine.bytes / 1e9
        );
        for shape in &SHAPES {
            if shape_name.as_deref().is_some_and(|name| name != shape.name) {
                continue;
            }
            for (rows, pending, commit) in [
                (1, 1, Commit::Deferred),
                (8, 0, Commit::Deferred),
                (8, 4, Commit::Deferred),
                (8, 8, Commit::Deferred),
                (64, 0, Commit::Immediate),
            ] {
                Bench::new(isa, threads, shape, rows, commit).report(&machine, pending);
            }
        }
    }
}

struct Machine {
    flops: f64,
    bytes: f64,
}

struct Bench<'a> {
    host: Host,
    shape: &'a Shape,
    rows: usize,
    lanes: Lanes,
    prepare: GdnPrepare,
    layers: Vec<GatedDelta>,
    norm: GatedNorm,
    silu: SiluMul,
}

impl<'a> Bench<'a> {
    fn new(isa: Isa, threads: usize, shape: &'a Shape, rows: usize, commit: Commit) -> Bench<'a> {
        let mut host = Host::new(isa, threads);
        let g = shape.geometry;
        let block = 8;
        let mut buf = |floats: usize, value: f32| {
            let buf = host.alloc(4 * floats, "bench").expect("memory");
            host.write(buf, bytemuck::cast_slice(&vec![value; floats]));
            buf
        };
        let step = buf(8, 0.0);
        let lanes = Lanes { step, count: 1, rows, max_rows: rows };
        let prepare = GdnPrepare {
            qkv: buf(rows * g.channels(), 0.3),
            a: buf(rows * g.value_heads, 0.1),
            b: buf(rows * g.value_heads, 0.1),
            conv: buf(4 * g.channels(), 0.5),
            decay: buf(g.value_heads, -0.5),
            dt_bias: buf(g.value_heads, 0.2),
            history: buf(GdnPrepare::history_bytes(&g, block) / 4, 0.1),
            q: buf(rows * g.keys(), 0.0),
            k: buf(rows * g.keys(), 0.0),
            v: buf(rows * g.values(), 0.0),
            g: buf(rows * g.value_heads, 0.0),
            beta: buf(rows * g.value_heads, 0.0),
            lanes,
            geometry: g,
            block,
            commit,
        };
        let out = buf(rows * g.values(), 0.0);
        let scratch = buf(GatedDelta::scratch_bytes(rows, 1, &g) / 4, 0.0);
        let layers = (0..shape.layers)
            .map(|_| GatedDelta {
                q: prepare.q,
                k: prepare.k,
                v: prepare.v,
                g: prepare.g,
                beta: prepare.beta,
                state: buf(GatedDelta::state_bytes(&g) / 4, 0.01),
                pending: buf(GatedDelta::pending_bytes(&g, block) / 4, 0.01),
                out,
                scratch,
                lanes,
                geometry: g,
                block,
                commit,
            })
            .collect();
        let mut act = |width: usize| {
            let bytes = rows * Act::stride(width, ActDtype::I8);
            Act { buf: buf(bytes / 4, 0.0), width, dtype: ActDtype::I8 }
        };
        let (norm_out, silu_out) = (act(g.values()), act(shape.intermediate));
        let gate = buf(rows * g.values(), 0.4);
        let norm = GatedNorm {
            x: out,
            gate,
            weight: buf(g.value_dim, 1.0),
            out: norm_out,
            rows,
            dim: g.value_dim,
            eps: 1e-6,
        };
        let silu = SiluMul {
            gate: buf(rows * shape.intermediate, 0.4),
            up: buf(rows * shape.intermediate, 0.4),
            out: silu_out,
            rows,
        };
        Bench { host, shape, rows, lanes, prepare, layers, norm, silu }
    }

    fn report(&mut self, machine: &Machine, pending: u32) {
        let mut step = LaneStep { rows: self.rows as u32, pending, ..LaneStep::default() };
        let mut times = [f64::INFINITY; 4];
        for _ in 0..REPEATS {
            step.parity ^= 1;
            self.host.write(self.lanes.step, bytemuck::bytes_of(&step));
            for layer in &self.layers {
                let ops: [&dyn Op; 4] = [&self.prepare, layer, &self.norm, &self.silu];
                for (op, times) in ops.into_iter().zip(&mut times) {
                    let start = Instant::now();
                    self.host.run(op);
                    *times = start.elapsed().as_secs_f64().min(*times);
                }
            }
            self.host.sync().expect("the ops ran");
        }
        let [prepare, delta, norm, silu] = times.map(|t| t * self.shape.layers as f64);
        let (g, layers) = (&self.shape.geometry, self.shape.layers as f64);
        let elements = (g.value_heads * g.key_dim * g.value_dim) as f64;
        let operations = layers * elements / 16.0 * (4 * self.rows + 2 * pending as usize) as f64;
        let written = if pending > 0 || self.rows > 8 { 2.0 } else { 1.0 };
        let bytes = layers * written * GatedDelta::state_bytes(g) as f64;
        let (compute, memory) = (operations / machine.flops, bytes / machine.bytes);
        println!(
            "{:8} rows {:3} pending {pending}: delta {:8.3} ms, floors {:.3} compute {:.3} \
             memory, {:4.0} % of compute, {:8.0} rows/s; prepare {:.3} norm {:.3} silu_mul {:.3} ms",
            self.shape.name,
            self.rows,
            1e3 * delta,
            1e3 * compute,
            1e3 * memory,
            100.0 * compute / delta,
            self.rows as f64 / delta,
            1e3 * prepare,
            1e3 * norm,
            1e3 * silu,
        );
    }
}

/// Fused multiply-adds of 16 lanes a second, all threads together: with 12 independent sums, which
/// fill wide registers' pipelines, or 6, which fit narrow registers.
fn fma_rate(cpu: &Cpu) -> f64 {
    const STEPS: usize = 1 << 14;
    struct Fmas<const N: usize>;
    impl<const N: usize> Kernel for Fmas<N> {
        type Output = f32;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> f32 {
            let mut sums = [s.splat(1.0); N];
            let [a, b] = std::hint::black_box([0.999, 0.001]).map(|x| s.splat(x));
            for _ in 0..STEPS {
                for sum in &mut sums {
                    *sum = s.fma(*sum, a, b);
                }
            }
            sums.into_iter().map(|x| s.sum(x)).sum()
        }
    }
    fn rate<const N: usize>(cpu: &Cpu) -> f64 {
        let threads = cpu.pool.threads();
        best(|| {
            cpu.pool.run(threads, &|_| {
                std::hint::black_box(cpu.isa.dispatch(Fmas::<N>));
            });
            (threads * STEPS * N) as f64
        })
    }
    rate::<6>(cpu).max(rate::<12>(cpu))
}

/// Bytes read a second, all threads together.
fn read_rate(cpu: &Cpu) -> f64 {
    struct Sum<'a>(&'a [f32]);
    impl Kernel for Sum<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> f32 {
            let mut sums = [s.splat(0.0); 4];
            for x in self.0.as_chunks::<64>().0 {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = s.add(*sum, s.load(&x[16 * i..]));
                }
            }
            sums.into_iter().map(|x| s.sum(x)).sum()
        }
    }
    let data = vec![1.0f32; 16 << 20];
    let chunk = 1 << 20;
    best(|| {
        cpu.pool.run(data.len() / chunk, &|i| {
            std::hint::black_box(cpu.isa.dispatch(Sum(&data[i * chunk..][..chunk])));
        });
        (4 * data.len()) as f64
    })
}

fn best(mut work: impl FnMut() -> f64) -> f64 {
    (0..40)
        .map(|_| {
            let start = Instant::now();
            work() / start.elapsed().as_secs_f64()
        })
        .fold(0.0, f64::max)
}
