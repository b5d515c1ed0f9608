//! Times of the token mixers in passes of few rows at the 27B shape: each as one op and as its parts,
//! next to the time that their bytes need. Ops run one after another in a recorded sequence; "between
//! products" is what they add to the products before and after them.
//!
//! `few_rows [gdn|attention|products]`: the lines whose name contains one of the words.

mod common;

use std::time::Instant;

use common::{BANDWIDTH, BLOCK, Bench, DIM, GDN, HEADS, KV_HEADS, noise};
use cuda::Cuda;
use ops::{
    Act, ActDtype, Attention, AttnMix, AttnPrepare, Buf, Codes, Commit, Device, Format, GatedDelta,
    GatedNorm, GdnMix, GdnPrepare, HeadGate, KvDtype, KvPool, Linear, LinearPart, Op, PAGE_TOKENS,
    Pass, Queries, Rope, RopePairing, ScaleDtype, Weight,
};

const ROPE_DIMS: usize = 64;
const HIDDEN: usize = 5120;
/// Layers whose products have weights of their own: more than the caches hold.
const PRODUCTS: usize = 12;

impl Bench {
    /// f32 in −0.1..0, so that states stay small.
    fn decays(&mut self, count: usize) -> Buf {
        let buf = self.alloc(4 * count);
        self.dev.upload(buf, 1 << 20, &|_, offset, part| {
            for (i, x) in part.chunks_exact_mut(4).enumerate() {
                x.copy_from_slice(&(-0.1 * noise(offset / 4 + i).abs()).to_le_bytes());
            }
        });
        buf
    }

    fn act(&mut self, rows: usize, width: usize) -> Act {
        let dtype = ActDtype::Bf16;
        Act { buf: self.alloc(rows * Act::stride(width, dtype)), width, dtype }
    }

    /// A 4-bit matrix. Whatever 16 bits of it are taken for a scale are about 0.01.
    fn weight(&mut self, n: usize, k: usize) -> Weight {
        let format = Format::Affine { codes: Codes::U4, group: 64, scale: ScaleDtype::Bf16 };
        let buf = self.alloc(format.packed_bytes(n, k).expect("whole groups"));
        self.dev.upload(buf, 1 << 20, &|_, offset, part| {
            for (i, x) in part.chunks_exact_mut(2).enumerate() {
                x.copy_from_slice(&[(noise(offset / 2 + i) * 128.0) as i8 as u8, 0x3c]);
            }
        });
        Weight { buf, format, n, k }
    }

    /// The products before (into `outs`) and after (of `mixed`) a mixer, for some layers.
    fn products(&mut self, rows: usize, outs: &[(usize, Buf)], mixed: Act) -> Vec<[Linear; 2]> {
        let x = self.act(rows, HIDDEN);
        let residual = self.floats(rows * HIDDEN, 1.0);
        (0..PRODUCTS)
            .map(|_| {
                let parts: Vec<LinearPart> = outs
                    .iter()
                    .map(|&(n, out)| LinearPart { weight: self.weight(n, HIDDEN), out, add: false })
                    .collect();
                let weight = self.weight(HIDDEN, mixed.width);
                let after = LinearPart { weight, out: residual, add: true };
                [
                    Linear::new(x, rows, Pass::Round, &parts),
                    Linear::new(mixed, rows, Pass::Round, &[after]),
                ]
            })
            .collect()
    }

    /// What mixers add to the products around them.
    fn between(
        &mut self,
        name: &str,
        products: &[[Linear; 2]],
        layers: &[Vec<&dyn Op>],
        alone: &mut f64,
    ) {
        let mut ops: Vec<&dyn Op> = Vec::new();
        for (layer, products) in layers.iter().zip(products.iter().cycle()) {
            ops.push(&products[0]);
            ops.extend(layer);
            ops.push(&products[1]);
        }
        let time = self.median(name, &ops, layers.len()).0;
        if layers[0].is_empty() {
            *alone = time;
        }
        println!("  {name:50} {time:8.2} us, {:6.2} more than the products", time - *alone);
    }

    /// Microseconds for each of `layers` layers, median of nine.
    fn time(&mut self, name: &str, ops: &[&dyn Op], layers: usize, floor: f64) {
        let (median, least, most) = self.median(name, ops, layers);
        let floor = floor * 1e6;
        println!("{name:44} {median:8.2} us  floor {floor:7.2}  ({least:.2} .. {most:.2})");
    }

    fn median(&mut self, name: &str, ops: &[&dyn Op], layers: usize) -> (f64, f64, f64) {
        self.key += 1;
        let key = self.key;
        let run = |dev: &mut Cuda, times: usize| {
            let start = Instant::now();
            for _ in 0..times {
                dev.replay(key, &mut |dev| ops.iter().for_each(|op| dev.run(*op)));
            }
            if let Err(why) = dev.sync() {
                println!("{name}: {why}");
                return f64::NAN;
            }
            start.elapsed().as_secs_f64() * 1e6 / (times * layers) as f64
        };
        if run(&mut self.dev, 1).is_nan() {
            return (f64::NAN, f64::NAN, f64::NAN);
        }
        let once = run(&mut self.dev, 1) * layers as f64;
        let times = (8_000.0 / once).clamp(1.0, 200.0) as usize;
        let mut all: Vec<f64> = (0..9).map(|_| run(&mut self.dev, times)).collect();
        all.sort_by(f64::total_cmp);
        (all[4], all[0], all[8])
    }

    fn gdn(&mut self, (count, rows): (usize, usize), pending: usize) {
        let name = format!("gdn {count} x {rows}, {pending} pending");
        if !self.wanted(&name) {
            return;
        }
        let layers = 48 / count.min(8);
        let lanes = self.lanes(count, rows, 0, pending);
        let (total, heads, geometry) = (lanes.rows, GDN.value_heads, GDN);
        let (block, commit) = (BLOCK, Commit::Deferred);
        let [q, k, v, mixed] = [GDN.keys(), GDN.keys(), GDN.values(), GDN.values()]
            .map(|width| self.alloc(4 * total * width));
        let (g, beta) = (self.alloc(4 * total * heads), self.alloc(4 * total * heads));
        let (a, b) = (self.floats(total * heads, 1.0), self.floats(total * heads, 1.0));
        let (qkv, z) =
            (self.floats(total * GDN.channels(), 1.0), self.floats(total * GDN.values(), 1.0));
        let out = self.act(total, GDN.values());
        let mixes: Vec<GdnMix> = (0..layers)
            .map(|_| {
                let state = self.floats(count * GatedDelta::state_bytes(&GDN) / 4, 0.5);
                let pending = self.decays(count * GatedDelta::pending_bytes(&GDN, BLOCK) / 4);
                let history = self.floats(count * GdnPrepare::history_bytes(&GDN, BLOCK) / 4, 1.0);
                let conv = self.floats(4 * GDN.channels(), 0.5);
                let (decay, dt_bias) = (self.floats(heads, 1.0), self.floats(heads, 1.0));
                let weight = self.floats(GDN.value_dim, 1.0);
                GdnMix {
                    prepare: GdnPrepare {
                        qkv,
                        a,
                        b,
                        conv,
                        decay,
                        dt_bias,
                        history,
                        q,
                        k,
                        v,
                        g,
                        beta,
                        lanes,
                        geometry,
                        block,
                        commit,
                    },
                    delta: GatedDelta {
                        q,
                        k,
                        v,
                        g,
                        beta,
                        state,
                        pending,
                        out: mixed,
                        // A deferred pass needs none.
                        scratch: mixed.slice(0, 0),
                        lanes,
                        geometry,
                        block,
                        commit,
                    },
                    norm: GatedNorm {
                        x: mixed,
                        gate: z,
                        weight,
                        out,
                        rows: total,
                        dim: GDN.value_dim,
                        eps: 1e-6,
                    },
                }
            })
            .collect();
        let cost = mixes[0].cost();
        let floor = (cost.other_bytes + cost.weight_bytes) as f64 / BANDWIDTH;
        let whole: Vec<&dyn Op> = mixes.iter().map(|mix| mix as &dyn Op).collect();
        let parts: Vec<&dyn Op> =
            mixes.iter().flat_map(|mix| [&mix.prepare as &dyn Op, &mix.delta, &mix.norm]).collect();
        self.time(&name, &whole, layers, floor);
        self.time(&format!("  parts of {name}"), &parts, layers, floor);
        if !self.wanted("products") {
            return self.dev.reset().expect("a card that still answers");
        }
        let outs = [(GDN.channels(), qkv), (GDN.values(), z), (heads, a), (heads, b)];
        let products = self.products(total, &outs, out);
        let mut alone = 0.0;
        let none = vec![Vec::new(); layers];
        self.between("products", &products, &none, &mut alone);
        let one: Vec<Vec<&dyn Op>> = mixes.iter().map(|mix| vec![mix as &dyn Op]).collect();
        self.between(&format!("{name} between products"), &products, &one, &mut alone);
        let three: Vec<Vec<&dyn Op>> =
            mixes.iter().map(|mix| vec![&mix.prepare as &dyn Op, &mix.delta, &mix.norm]).collect();
        self.between("  its parts", &products, &three, &mut alone);
        self.dev.reset().expect("a card that still answers");
    }

    fn attention(&mut self, (count, rows): (usize, usize), pos: usize, layers: usize) {
        let name = format!("attention {count} x {rows} at {pos}");
        if !self.wanted(&name) {
            return;
        }
        let pages = (pos + rows).div_ceil(PAGE_TOKENS);
        let pool = count * pages;
        let stride = if pool.is_multiple_of(7919) { 1 } else { 7919 };
        let table: Vec<u32> = (0..pool).map(|i| (i * stride % pool) as u32).collect();
        let table = self.pod(&table);
        let lanes = self.lanes(count, rows, pos, 0);
        let (total, width) = (lanes.rows, HEADS * DIM);
        let scratch = self.alloc(Attention::scratch_bytes(total, (HEADS, KV_HEADS), DIM));
        let (rotated, mixed) = (self.alloc(4 * total * width), self.alloc(4 * total * width));
        let q = self.floats(total * 2 * width, 3.0);
        let (k, v) =
            (self.floats(total * KV_HEADS * DIM, 1.0), self.floats(total * KV_HEADS * DIM, 1.0));
        let norm = Some(self.floats(DIM, 1.0));
        let freq: Vec<f32> =
            (0..ROPE_DIMS / 2).map(|i| 1e7f32.powf(-2.0 * i as f32 / ROPE_DIMS as f32)).collect();
        let rope =
            Rope { inv_freq: self.pod(&freq), dims: ROPE_DIMS, pairing: RopePairing::Halves };
        let out = self.act(total, width);
        let mixes: Vec<AttnMix> = (0..layers)
            .map(|_| {
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
                AttnMix {
                    prepare: AttnPrepare {
                        queries: Some(Queries {
                            q,
                            stride: 2 * DIM,
                            norm,
                            heads: HEADS,
                            out: rotated,
                        }),
                        k,
                        v,
                        k_norm: norm,
                        rope,
                        kv,
                        lanes,
                        eps: 1e-6,
                    },
                    attention: Attention {
                        q: rotated,
                        kv,
                        out: mixed,
                        scratch,
                        lanes,
                        heads: HEADS,
                        scale: 1.0 / 16.0,
                        causal: true,
                        window: None,
                        pass: Pass::Round,
                    },
                    gate: HeadGate {
                        x: mixed,
                        q_gate: Some(q),
                        out,
                        rows: total,
                        heads: HEADS,
                        dim: DIM,
                    },
                }
            })
            .collect();
        let bytes = 4 * DIM * KV_HEADS * count * (pos + rows) + 10 * total * width;
        let floor = bytes as f64 / BANDWIDTH;
        let whole: Vec<&dyn Op> = mixes.iter().map(|mix| mix as &dyn Op).collect();
        let parts: Vec<&dyn Op> = mixes
            .iter()
            .flat_map(|mix| [&mix.prepare as &dyn Op, &mix.attention, &mix.gate])
            .collect();
        self.time(&name, &whole, layers, floor);
        self.time(&format!("  parts of {name}"), &parts, layers, floor);
        if !self.wanted("products") {
            return self.dev.reset().expect("a card that still answers");
        }
        let kv = KV_HEADS * DIM;
        let products = self.products(total, &[(2 * width, q), (kv, k), (kv, v)], out);
        let mut alone = 0.0;
        let none = vec![Vec::new(); layers];
        self.between("products", &products, &none, &mut alone);
        let one: Vec<Vec<&dyn Op>> = mixes.iter().map(|mix| vec![mix as &dyn Op]).collect();
        self.between(&format!("{name} between products"), &products, &one, &mut alone);
        let three: Vec<Vec<&dyn Op>> = mixes
            .iter()
            .map(|mix| vec![&mix.prepare as &dyn Op, &mix.attention, &mix.gate])
            .collect();
        self.between("  its parts", &products, &three, &mut alone);
        self.dev.reset().expect("a card that still answers");
    }
}

fn main() {
    let Some(mut bench) = Bench::open() else { return };
    for (lanes, pending) in [((1, 1), 1), ((1, 8), 0), ((1, 8), 4), ((1, 8), 8), ((4, 8), 4)] {
        bench.gdn(lanes, pending);
    }
    bench.gdn((16, 8), 4);
    for lanes in [(1, 1), (1, 8), (4, 8)] {
        for (pos, layers) in [(0, 16), (1000, 16), (8192, 8), (32_000, 4), (128_000, 2)] {
            if lanes.0 == 1 || pos <= 8192 {
                bench.attention(lanes, pos, layers);
            }
        }
    }
}
