//! Times of the token-mixing ops and of prefill's matrix products at the 27B shape, next to the time that their bytes or flops need.
//!
//! `mix_bench [decode|gdn|prefill|…]`: the lines whose name contains one of the words.

mod common;

use std::time::Instant;

use common::{BANDWIDTH, BLOCK, Bench, DIM, GDN, HEADS, KV_HEADS, noise};
use cuda::Cuda;
use ops::linear::Source;
use ops::{
    Act, ActDtype, Attention, Commit, Device, GatedDelta, GdnPrepare, KvDtype, KvPool, Linear,
    LinearPart, Op, PAGE_TOKENS, Pass, ScaleDtype, Weight,
};

/// Flops per second that an H200 was measured to reach.
const MATRIX: f64 = 790e12;

impl Bench {
    /// Microseconds per op, median of seven; the ops run one after another in a graph.
    fn time(&mut self, name: &str, ops: &[Box<dyn Op>], floor: f64) {
        self.key += 1;
        let key = self.key;
        let run = |dev: &mut Cuda, times: usize| {
            let start = Instant::now();
            for _ in 0..times {
                dev.replay(key, &mut |dev| ops.iter().for_each(|op| dev.run(&**op)));
            }
            if let Err(why) = dev.sync() {
                println!("{name}: {why}");
                return f64::NAN;
            }
            start.elapsed().as_secs_f64() * 1e6 / (times * ops.len()) as f64
        };
        if run(&mut self.dev, 1).is_nan() {
            return;
        }
        let once = run(&mut self.dev, 1) * ops.len() as f64;
        let times = (10_000.0 / once).clamp(1.0, 200.0) as usize;
        let mut all: Vec<f64> = (0..7).map(|_| run(&mut self.dev, times)).collect();
        all.sort_by(f64::total_cmp);
        let (median, floor) = (all[3], floor * 1e6);
        println!(
            "{name:44} {median:9.2} us  floor {floor:8.2}  {:5.2}x  ({:.2} .. {:.2})",
            median / floor,
            all[0],
            all[6]
        );
    }

    fn attention(
        &mut self,
        name: &str,
        pass: Pass,
        lanes: (usize, usize),
        pos: usize,
        layers: usize,
    ) {
        if !self.wanted(name) {
            return;
        }
        let (count, rows) = lanes;
        let pages = (pos + rows).div_ceil(PAGE_TOKENS);
        let pool = count * pages;
        let table: Vec<u32> = (0..pool).map(|i| (i * 7919 % pool) as u32).collect();
        let table = if pool.is_multiple_of(7919) { (0..pool as u32).collect() } else { table };
        let table = self.pod(&table);
        let lanes = self.lanes(count, rows, pos, 0);
        let total = lanes.rows;
        let scratch = self.alloc(Attention::scratch_bytes(total.min(128), (HEADS, KV_HEADS), DIM));
        let (q, out) = (self.floats(total * HEADS * DIM, 3.0), self.alloc(4 * total * HEADS * DIM));
        let mut ops: Vec<Box<dyn Op>> = Vec::new();
        for _ in 0..layers {
            let elements = pool * KV_HEADS * PAGE_TOKENS * DIM;
            let kv = KvPool {
                keys: self.halves(elements),
                values: self.halves(elements),
                table,
                max_pages: pages,
                kv_heads: KV_HEADS,
                head_dim: DIM,
                dtype: KvDtype::Bf16,
            };
            let (heads, scale) = (HEADS, 1.0 / 16.0);
            let op = Attention {
                q,
                kv,
                out,
                scratch,
                lanes,
                heads,
                scale,
                causal: true,
                window: None,
                pass,
            };
            ops.push(Box::new(op));
        }
        let bytes = (4 * DIM * KV_HEADS * count * (pos + rows) + 8 * total * HEADS * DIM) as f64;
        let pairs = count as f64 * rows as f64 * (pos as f64 + (rows as f64 + 1.0) / 2.0);
        let flops = 4.0 * pairs * (HEADS * DIM) as f64;
        self.time(name, &ops, (bytes / BANDWIDTH).max(flops / MATRIX));
        self.dev.reset().expect("a card that still answers");
    }

    fn gdn(
        &mut self,
        name: &str,
        lanes: (usize, usize),
        pending: usize,
        commit: Commit,
        layers: usize,
    ) {
        let names = [format!("{name} delta"), format!("{name} prepare")];
        if !names.iter().any(|n| self.wanted(n)) {
            return;
        }
        let (count, rows) = lanes;
        let lanes = self.lanes(count, rows, 0, pending);
        let (total, heads) = (lanes.rows, GDN.value_heads);
        let (q, k) =
            (self.floats(total * GDN.keys(), 0.015), self.floats(total * GDN.keys(), 0.15));
        let (v, out) =
            (self.floats(total * GDN.values(), 1.0), self.alloc(4 * total * GDN.values()));
        let (g, beta) = (self.floats(total * heads, 0.01), self.floats(total * heads, 0.5));
        let scratch = self.alloc(GatedDelta::scratch_bytes(total, count, &GDN));
        let qkv = self.floats(total * GDN.channels(), 1.0);
        let conv = self.floats(4 * GDN.channels(), 0.5);
        let (decay, dt_bias) = (self.floats(heads, 1.0), self.floats(heads, 1.0));
        let (mut delta, mut prepare): (Vec<Box<dyn Op>>, Vec<Box<dyn Op>>) =
            (Vec::new(), Vec::new());
        for _ in 0..layers {
            let state = self.floats(count * GatedDelta::state_bytes(&GDN) / 4, 0.5);
            let pending = self.floats(count * GatedDelta::pending_bytes(&GDN, BLOCK) / 4, 0.1);
            let history = self.floats(count * GdnPrepare::history_bytes(&GDN, BLOCK) / 4, 1.0);
            let geometry = GDN;
            delta.push(Box::new(GatedDelta {
                q,
                k,
                v,
                g,
                beta,
                state,
                pending,
                out,
                scratch,
                lanes,
                geometry,
                block: BLOCK,
                commit,
            }));
            prepare.push(Box::new(GdnPrepare {
                qkv,
                a: g,
                b: beta,
                conv,
                decay,
                dt_bias,
                history,
                q,
                k,
                v: out,
                g: self.alloc(4 * total * heads),
                beta: self.alloc(4 * total * heads),
                lanes,
                geometry,
                block: BLOCK,
                commit,
            }));
        }
        if self.wanted(&names[0]) {
            // Chunked: products with the state, within a chunk of 64, and the state's update.
            let flops =
                2.0 * total as f64 * heads as f64 * (3.0 * 128.0 * 128.0 + 5.0 * 64.0 * 128.0);
            let floor = (delta[0].cost().other_bytes as f64 / BANDWIDTH).max(flops / MATRIX);
            self.time(&names[0], &delta, floor);
        }
        if self.wanted(&names[1]) {
            let cost = prepare[0].cost();
            self.time(
                &names[1],
                &prepare,
                (cost.other_bytes + cost.weight_bytes) as f64 / BANDWIDTH,
            );
        }
        self.dev.reset().expect("a card that still answers");
    }
}

impl Bench {
    /// An affine 4-bit matrix: 64 random rows again and again.
    fn weight(&mut self, n: usize, k: usize) -> Weight {
        const ROWS: usize = 64;
        let noisy = |count: usize, f: &dyn Fn(f32) -> f32| -> Vec<u8> {
            let half = |i| (f(noise(i)).to_bits() >> 16) as u16;
            (0..count).flat_map(|i| half(i).to_le_bytes()).collect()
        };
        let codes: Vec<u8> = (0..ROWS * k / 2).map(|i| (noise(i) * 128.0) as i8 as u8).collect();
        let scales = noisy(ROWS * k / 64, &|x| 0.002 + 0.001 * x);
        let biases = noisy(ROWS * k / 64, &|x| -0.015 + 0.001 * x);
        let (bits, group, scale) = (4, 64, ScaleDtype::Bf16);
        let source =
            Source::Mlx { bits, group, scale, codes: &codes, scales: &scales, biases: &biases };
        let format = source.check(ROWS, k).expect("a sound matrix");
        let mut packed = vec![0; format.packed_bytes(ROWS, k).expect("a size")];
        let order = self.dev.info().tiles;
        source.pack_piece(order, (ROWS, k), 0, &mut packed).expect("whole tiles");
        let buf = self.alloc(format.packed_bytes(n, k).expect("a size"));
        self.dev
            .upload(buf, packed.len(), &|_, _, part| part.copy_from_slice(&packed[..part.len()]));
        Weight { buf, format, n, k }
    }

    /// Products of `rows` rows of `k` inputs with matrices of `outputs`.
    fn linear(&mut self, name: &str, rows: usize, k: usize, outputs: &[usize], layers: usize) {
        if !self.wanted(name) {
            return;
        }
        let x = Act { buf: self.halves(rows * k), width: k, dtype: ActDtype::Bf16 };
        let mut ops: Vec<Box<dyn Op>> = Vec::new();
        for _ in 0..layers {
            let part = |n: &usize| LinearPart {
                weight: self.weight(*n, k),
                out: self.alloc(4 * rows * n),
                add: false,
            };
            let parts: Vec<LinearPart> = outputs.iter().map(part).collect();
            ops.push(Box::new(Linear::new(x, rows, Pass::Prompt, &parts)));
        }
        let flops = 2.0 * rows as f64 * k as f64 * outputs.iter().sum::<usize>() as f64;
        self.time(name, &ops, flops / MATRIX);
        self.dev.reset().expect("a card that still answers");
    }
}

fn main() {
    let Some(mut bench) = Bench::open() else { return };
    for (lanes, rows) in [(1, 1), (1, 8), (4, 8), (16, 8)] {
        for (pos, layers) in [(0, 16), (1000, 16), (8192, 8), (32_768, 4)] {
            if lanes * pos <= 4 * 32_768 {
                let name = format!("decode attention {lanes} x {rows} at {pos}");
                bench.attention(&name, Pass::Round, (lanes, rows), pos, layers);
            }
        }
    }
    for (lanes, rows, pending) in
        [(1, 1, 1), (1, 8, 0), (1, 8, 4), (1, 8, 8), (4, 8, 4), (16, 8, 4)]
    {
        let name = format!("decode gdn {lanes} x {rows}, {pending} pending");
        bench.gdn(&name, (lanes, rows), pending, Commit::Deferred, 48 / lanes.min(8));
    }
    // What a hit in the prefix cache leaves of a prompt may be few rows.
    for rows in [8, 64, 512, 2048] {
        for (what, k, outputs) in [
            ("gdn in", 5120, &[10_240, 6144, 48, 48][..]),
            ("attention in", 5120, &[12_288, 1024, 1024]),
            ("out", 6144, &[5120]),
            ("gate and up", 5120, &[17_408, 17_408]),
            ("down", 17_408, &[5120]),
        ] {
            bench.linear(&format!("prefill linear {rows} {what}"), rows, k, outputs, 3);
        }
    }
    for (rows, pos) in [(8, 6144), (64, 6144), (2048, 0), (2048, 6144), (2048, 30_720), (8192, 0)] {
        let name = format!("prefill attention {rows} at {pos}");
        bench.attention(&name, Pass::Prompt, (1, rows), pos, 2);
    }
    for rows in [64, 512, 2048, 8192] {
        bench.gdn(&format!("prefill gdn {rows}"), (1, rows), 0, Commit::Immediate, 4);
    }
}
