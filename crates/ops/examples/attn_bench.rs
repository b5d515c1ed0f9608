//! Speed of attention on this machine: `cargo run --release -p ops --example attn_bench [threads [model [layers]]]`.
//!
//! Each line is one layer's op, the median of repeated runs over a ring of layers; rates are
//! those of the best run. With one thread it
//! is the thread's own CPU time, so that other load on the machine matters less. GB/s count keys and values once per pass, GFLOP/s what the rows
//! see (two multiply-adds per key and element); the first line is the machine's fused multiply-add peak.

use std::time::Instant;

use ops::simd::{Isa, Kernel, LANES, Simd};
use ops::{
    Act, ActDtype, Attention, AttnPrepare, Device, HeadGate, Host, KvPool, LaneStep, Lanes, Op,
    PAGE_TOKENS, Queries, Rope, RopePairing,
};

struct Model {
    name: &'static str,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    rope_dims: usize,
    layers: usize,
}

const MODELS: [Model; 2] = [
    Model { name: "th-tiny", heads: 9, kv_heads: 3, dim: 64, rope_dims: 32, layers: 7 },
    Model { name: "27B", heads: 24, kv_heads: 4, dim: 256, rope_dims: 64, layers: 2 },
];

/// Rows per lane, lanes, position.
const PASSES: [(usize, usize, usize); 11] = [
    (1, 1, 0),
    (1, 1, 512),
    (1, 1, 8192),
    (8, 1, 0),
    (8, 1, 512),
    (8, 1, 2048),
    (8, 1, 8192),
    (8, 4, 2048),
    (512, 1, 0),
    (512, 1, 2048),
    (512, 1, 8192),
];

fn main() {
    let threads = std::env::args().nth(1).and_then(|arg| arg.parse().ok()).unwrap_or(2);
    let isa = Isa::detect();
    println!("{} x{threads}, fma peak of one thread {:.0} GFLOP/s", isa.name(), isa.dispatch(Peak));
    println!(
        "model    rows lanes   pos |  attention us   best us    GB/s  GFLOP/s | prepare us | gate us"
    );
    let only = std::env::args().nth(2);
    let layers: Option<usize> = std::env::args().nth(3).and_then(|arg| arg.parse().ok());
    for model in MODELS.iter().filter(|m| only.as_ref().is_none_or(|only| only == m.name)) {
        let model = &Model { layers: layers.unwrap_or(model.layers), ..*model };
        for (rows, lanes, pos) in PASSES {
            bench(model, isa, threads, rows, lanes, pos);
        }
    }
}

fn bench(m: &Model, isa: Isa, threads: usize, rows: usize, lanes: usize, pos: usize) {
    let mut host = Host::new(isa, threads);
    let all = rows * lanes;
    let width = m.heads * m.dim;
    let kv_width = m.kv_heads * m.dim;
    let max_pages = (pos + rows).div_ceil(PAGE_TOKENS);
    let bf16 = 0x3c00u16.to_le_bytes().repeat(lanes * max_pages * PAGE_TOKENS * kv_width);
    let mut alloc = |bytes: &[u8]| {
        let buf = host.alloc(bytes.len(), "bench").expect("memory");
        host.write(buf, bytes);
        buf
    };
    let floats = |n: usize| -> Vec<u8> {
        (0..n).flat_map(|i| ((i * 7919 % 1000) as f32 / 1000.0 - 0.5).to_le_bytes()).collect()
    };
    let table: Vec<u8> = (0..(lanes * max_pages) as u32).flat_map(u32::to_le_bytes).collect();
    let step: Vec<u8> = (0..lanes as u32)
        .flat_map(|lane| {
            let step = LaneStep {
                row0: lane * rows as u32,
                rows: rows as u32,
                pos: pos as u32,
                slot: lane,
                ..Default::default()
            };
            bytemuck::bytes_of(&step).to_vec()
        })
        .collect();
    let table = alloc(&table);
    let lanes = Lanes { step: alloc(&step), count: lanes, rows: all, max_rows: rows };
    let pools: Vec<KvPool> = (0..m.layers)
        .map(|_| KvPool {
            keys: alloc(&bf16),
            values: alloc(&bf16),
            table,
            max_pages,
            kv_heads: m.kv_heads,
            head_dim: m.dim,
        })
        .collect();
    let q_gate = alloc(&floats(2 * all * width));
    let (k, v) = (alloc(&floats(all * kv_width)), alloc(&floats(all * kv_width)));
    let norm = Some(alloc(&floats(m.dim)));
    let inv_freq = alloc(&floats(m.rope_dims / 2));
    let (q, out) = (alloc(&floats(all * width)), alloc(&floats(all * width)));
    let scratch = alloc(&vec![0; Attention::scratch_bytes(all.min(32), m.heads, m.dim)]);
    let act = alloc(&vec![0; all * Act::stride(width, ActDtype::I8)]);
    let act = Act { buf: act, width, dtype: ActDtype::I8 };

    let prepare = |kv: KvPool| AttnPrepare {
        queries: Some(Queries { q: q_gate, stride: 2 * m.dim, norm, heads: m.heads, out: q }),
        k,
        v,
        k_norm: norm,
        rope: Rope { inv_freq, dims: m.rope_dims, pairing: RopePairing::Halves },
        kv,
        lanes,
        eps: 1e-6,
    };
    let attention = |kv: KvPool| Attention {
        q,
        kv,
        out,
        scratch,
        lanes,
        heads: m.heads,
        scale: (m.dim as f32).powf(-0.5),
        causal: true,
        window: None,
    };
    let gate =
        HeadGate { x: out, q_gate: Some(q_gate), out: act, rows: all, heads: m.heads, dim: m.dim };

    let (prepare_us, _) = median(&mut host, &pools, prepare);
    let (attention_us, best) = median(&mut host, &pools, attention);
    let (gate_us, _) = median(&mut host, &pools, |_| gate);
    let bytes = lanes.count * (pos + rows) * 4 * kv_width;
    let keys_seen: usize = (0..rows).map(|r| pos + r + 1).sum::<usize>() * lanes.count;
    let flops = 4 * keys_seen * width;
    println!(
        "{:8} {rows:4} {:5} {pos:5} | {attention_us:13.1} {best:9.1} {:7.2} {:8.1} | {prepare_us:10.1} | {gate_us:7.1}",
        m.name,
        lanes.count,
        bytes as f64 / best / 1e3,
        flops as f64 / best / 1e3,
    );
}

/// Median and best time of one op in microseconds, over rounds through all layers.
fn median<O: Op>(host: &mut Host, pools: &[KvPool], op: impl Fn(KvPool) -> O) -> (f64, f64) {
    let clock = if host.cpu().pool.threads() == 1 { cpu_seconds } else { wall_seconds };
    let start = wall_seconds();
    let mut times = Vec::new();
    while times.len() < 5 || (wall_seconds() - start < 0.6 && times.len() < 400) {
        let round = clock();
        pools.iter().for_each(|kv| host.run(&op(*kv)));
        times.push((clock() - round) * 1e6 / pools.len() as f64);
    }
    host.sync().expect("a bench that runs");
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[0])
}

fn wall_seconds() -> f64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_secs_f64()
}

/// CPU time of this thread.
#[cfg(unix)]
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

#[cfg(not(unix))]
fn cpu_seconds() -> f64 {
    wall_seconds()
}

/// Independent fused multiply-adds in registers.
struct Peak;

impl Kernel for Peak {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        const CHAINS: usize = 12;
        let mut rates = Vec::new();
        for _ in 0..21 {
            let x = s.splat(std::hint::black_box(0.5));
            let mut sums = [x; CHAINS];
            let start = cpu_seconds();
            for _ in 0..100_000 {
                for sum in &mut sums {
                    *sum = s.fma(*sum, x, x);
                }
            }
            let seconds = cpu_seconds() - start;
            std::hint::black_box(sums.map(|sum| s.lanes(sum)[0]));
            rates.push((100_000 * CHAINS * 2 * LANES) as f64 / seconds / 1e9);
        }
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    }
}
