//! Passes one after another in one recording on the card, if there is one. Mixers read, and some write, what the
//! pass before left before they wait for anything (`ops::kernel`), in a chain even before the product that they follow:
//! it has to be there.

mod common;

use common::{card, matrix};
use cuda::Cuda;
use ops::rms_norm::RmsNorm;
use ops::{
    Act, ActDtype, Attention, AttnMix, AttnPrepare, Buf, Commit, Device, Embed, Format, GatedDelta,
    GatedNorm, GdnGeometry, GdnMix, GdnPrepare, HeadGate, HeadMap, KvDtype, KvPool, LaneStep,
    Lanes, Linear, LinearPart, Op, PAGE_TOKENS, Pass, Queries, Rope, RopePairing, Weight,
};

const PASSES: usize = 40;
/// Rows of a lane in a pass, and how many of them the next one takes up; in turns.
const ROWS: [(u32, u32); 6] = [(8, 8), (1, 1), (8, 5), (0, 0), (5, 4), (8, 0)];
const MOST: usize = 8;
const HIDDEN: usize = 1024;
const HEADS: usize = 24;
const KV_HEADS: usize = 4;
const DIM: usize = 256;
const ROPE: usize = 64;
/// Passes go over the ends of pages.
const START: u32 = 50;
const PAGES: usize = 4;

struct Made {
    dev: Cuda,
    at: usize,
    /// With a slot and MOST rows each.
    lanes: usize,
    geometry: GdnGeometry,
    /// What passes change, and what they leave.
    kept: Vec<Buf>,
}

impl Made {
    fn rows(&self) -> usize {
        self.lanes * MOST
    }

    fn alloc(&mut self, bytes: usize) -> Buf {
        self.dev.alloc(bytes, "passes").expect("memory")
    }

    /// f32 in -1..1 times `scale`, plus `plus`.
    fn floats(&mut self, count: usize, scale: f32, plus: f32) -> Buf {
        let buf = self.alloc(4 * count);
        let values: Vec<u8> = (0..count)
            .flat_map(|i| {
                let noise = ((i + self.at).wrapping_mul(0x9E37_79B9) >> 9) as u16;
                ((f32::from(noise) / 32768.0 - 1.0) * scale + plus).to_le_bytes()
            })
            .collect();
        self.at += 7919;
        self.dev.write(buf, &values);
        buf
    }

    fn kept(&mut self, bytes: usize) -> Buf {
        let buf = self.alloc(bytes);
        self.kept.push(buf);
        buf
    }

    /// Of a pass of its own: rows of bf16.
    fn out(&mut self, width: usize) -> Act {
        let dtype = ActDtype::Bf16;
        Act { buf: self.kept(self.rows() * Act::stride(width, dtype)), width, dtype }
    }

    /// Runs the passes from the beginning, and returns all that they left.
    fn run(&mut self, each: impl FnOnce(&mut Cuda)) -> Vec<u8> {
        for buf in &self.kept {
            self.dev.zero(*buf);
        }
        each(&mut self.dev);
        let mut all = Vec::new();
        for buf in &self.kept {
            let mut bytes = vec![0; buf.bytes];
            self.dev.read(*buf, &mut bytes);
            all.extend(bytes);
        }
        assert_eq!(self.dev.sync(), Ok(()));
        all
    }
}

/// The lanes at each pass.
fn steps(made: &mut Made) -> Buf {
    let mut kept: Vec<(u32, u32)> = (0..made.lanes as u32).map(|lane| (START + lane, 0)).collect();
    let mut bytes = Vec::new();
    for pass in 0..PASSES {
        for (lane, (pos, pending)) in kept.iter_mut().enumerate() {
            let (rows, keep) = ROWS[(pass + lane) % ROWS.len()];
            let step = LaneStep {
                row0: (lane * MOST) as u32,
                rows,
                pos: *pos,
                slot: lane as u32,
                pending: *pending,
                parity: pass as u32 % 2,
                reserved: [0; 2],
            };
            bytes.extend_from_slice(bytemuck::bytes_of(&step));
            (*pos, *pending) = (*pos + keep, keep);
            assert!((*pos as usize + MOST) <= PAGES * PAGE_TOKENS);
        }
    }
    let buf = made.alloc(bytes.len());
    made.dev.write(buf, &bytes);
    buf
}

fn gdn(made: &mut Made, lanes: Lanes) -> GdnMix {
    let (geometry, block, commit) = (made.geometry, MOST, Commit::Deferred);
    let heads = geometry.value_heads;
    let (rows, slots) = (made.rows(), made.lanes);
    let [q, k, v, mixed] = [geometry.keys(), geometry.keys(), geometry.values(), geometry.values()]
        .map(|width| made.alloc(4 * rows * width));
    let [g, beta] = [heads; 2].map(|width| made.alloc(4 * rows * width));
    let prepare = GdnPrepare {
        qkv: made.floats(rows * geometry.channels(), 1.0, 0.0),
        a: made.floats(rows * heads, 1.0, 0.0),
        b: made.floats(rows * heads, 1.0, 0.0),
        conv: made.floats(4 * geometry.channels(), 0.5, 0.0),
        decay: made.floats(heads, 0.05, -0.06),
        dt_bias: made.floats(heads, 1.0, 0.0),
        history: made.kept(slots * GdnPrepare::history_bytes(&geometry, block)),
        q,
        k,
        v,
        g,
        beta,
        lanes,
        geometry,
        block,
        commit,
    };
    let delta = GatedDelta {
        q,
        k,
        v,
        g,
        beta,
        state: made.kept(slots * GatedDelta::state_bytes(&geometry)),
        pending: made.kept(slots * GatedDelta::pending_bytes(&geometry, block)),
        out: mixed,
        // A deferred pass needs none.
        scratch: mixed.slice(0, 0),
        lanes,
        geometry,
        block,
        commit,
    };
    let norm = GatedNorm {
        x: mixed,
        gate: made.floats(rows * geometry.values(), 1.0, 0.0),
        weight: made.floats(geometry.value_dim, 1.0, 0.0),
        out: Act { buf: mixed, width: geometry.values(), dtype: ActDtype::Bf16 },
        rows,
        dim: geometry.value_dim,
        eps: 1e-6,
    };
    GdnMix { prepare, delta, norm }
}

fn attention(made: &mut Made, lanes: Lanes) -> AttnMix {
    let (width, rows) = (HEADS * DIM, made.rows());
    let [rotated, mixed] = [width; 2].map(|width| made.alloc(4 * rows * width));
    let q = made.floats(rows * 2 * width, 2.0, 0.0);
    let norm = Some(made.floats(DIM, 1.0, 0.0));
    let table: Vec<u8> =
        (0..(made.lanes * PAGES) as u32).rev().flat_map(u32::to_le_bytes).collect();
    let pages = made.lanes * PAGES * 2 * KV_HEADS * PAGE_TOKENS * DIM;
    let kv = KvPool {
        keys: made.kept(pages),
        values: made.kept(pages),
        table: made.alloc(table.len()),
        max_pages: PAGES,
        kv_heads: KV_HEADS,
        head_dim: DIM,
        dtype: KvDtype::Bf16,
    };
    made.dev.write(kv.table, &table);
    let rope = Rope {
        inv_freq: made.floats(ROPE / 2, 0.4, 0.5),
        dims: ROPE,
        pairing: RopePairing::Halves,
    };
    let prepare = AttnPrepare {
        queries: Some(Queries { q, stride: 2 * DIM, norm, heads: HEADS, out: rotated }),
        k: made.floats(rows * KV_HEADS * DIM, 1.0, 0.0),
        v: made.floats(rows * KV_HEADS * DIM, 1.0, 0.0),
        k_norm: norm,
        rope,
        kv,
        lanes,
        eps: 1e-6,
    };
    let attention = Attention {
        q: rotated,
        kv,
        out: mixed,
        scratch: made.alloc(Attention::scratch_bytes(rows, (HEADS, KV_HEADS), DIM)),
        lanes,
        heads: HEADS,
        scale: 1.0 / 16.0,
        causal: true,
        window: None,
        pass: Pass::Round,
    };
    let gate = HeadGate {
        x: mixed,
        q_gate: Some(q),
        out: Act { buf: mixed, width, dtype: ActDtype::Bf16 },
        rows,
        heads: HEADS,
        dim: DIM,
    };
    AttnMix { prepare, attention, gate }
}

#[test]
fn mixers_find_what_the_pass_before_left() {
    // More heads than even a large card has clusters, so that blocks have several, and some a row to norm besides.
    passes_of(1, 80);
}

/// So many rows have wide products on some cards, and beside them mixers, if all heads have a place.
#[test]
fn mixers_of_several_lanes_do_too() {
    for (lanes, value_heads) in [(2, 80), (4, 48), (8, 16), (3, 80)] {
        passes_of(lanes, value_heads);
    }
}

fn passes_of(lanes: usize, value_heads: usize) {
    let Some(dev) = card() else { return };
    let (key_heads, key_dim, value_dim, head_map) = (16, 128, 128, HeadMap::Grouped);
    let geometry = GdnGeometry { key_heads, value_heads, key_dim, value_dim, head_map };
    let mut made = Made { dev, at: 0, lanes, geometry, kept: Vec::new() };
    let rows = made.rows();
    let steps = steps(&mut made);
    let lanes_of = |pass: usize| {
        let step = steps.rows(pass * lanes, lanes, size_of::<LaneStep>());
        Lanes { step, count: lanes, rows, max_rows: MOST }
    };
    let ids = made.alloc(4 * rows);
    let table = Weight { buf: made.floats(HIDDEN, 1.0, 0.0), format: Format::F32, n: 1, k: HIDDEN };
    let (x, weight) = (made.alloc(4 * rows * HIDDEN), made.floats(HIDDEN, 1.0, 0.0));
    let xn = made.out(HIDDEN);
    let cells = [(); 4].map(|()| gdn(&mut made, lanes_of(0)));
    // The second mixer follows a product, so that it begins before that; the others don't, but for the third, whose product is
    // of few outputs: blocks share its inputs.
    let input = matrix(&mut made.dev, (geometry.channels(), HIDDEN), 0x3c80, 0xbdf0);
    let part = LinearPart { weight: input, out: cells[1].prepare.qkv, add: false };
    let product = Linear::new(xn, rows, Pass::Round, &[part]);
    let small = matrix(&mut made.dev, (HIDDEN, HIDDEN), 0x3c80, 0xbdf0);
    let part = LinearPart { weight: small, out: made.kept(4 * rows * HIDDEN), add: false };
    let shared = Linear::new(xn, rows, Pass::Round, &[part]);
    let pages = [attention(&mut made, lanes_of(0)), attention(&mut made, lanes_of(0))];
    // An odd number of rows: one block of a cluster norms, the other does not.
    let norm = RmsNorm { x, weight, out: xn, rows: rows - 3, pass: Pass::Round, eps: 1e-6 };
    let mut ops: Vec<Box<dyn Op>> = Vec::new();
    for pass in 0..PASSES {
        let lanes = lanes_of(pass);
        let mut mixer = |cell: GdnMix| GdnMix {
            prepare: GdnPrepare { lanes, ..cell.prepare },
            delta: GatedDelta { lanes, ..cell.delta },
            norm: GatedNorm { out: made.out(geometry.values()), ..cell.norm },
        };
        let mixers = cells.map(&mut mixer);
        let attentions = pages.map(|layer| AttnMix {
            prepare: AttnPrepare { lanes, ..layer.prepare },
            attention: Attention { lanes, ..layer.attention },
            gate: HeadGate { out: made.out(HEADS * DIM), ..layer.gate },
        });
        // Three mixers in a chain, and one between two launches of others.
        ops.push(Box::new(Embed { ids, table, out: x, rows }));
        ops.push(Box::new(norm));
        ops.push(Box::new(mixers[0]));
        ops.push(Box::new(norm));
        ops.push(Box::new(product));
        ops.push(Box::new(mixers[1]));
        ops.push(Box::new(norm));
        ops.push(Box::new(shared));
        ops.push(Box::new(mixers[2]));
        ops.push(Box::new(attentions[0]));
        ops.push(Box::new(norm));
        ops.push(Box::new(mixers[3]));
        ops.push(Box::new(attentions[1]));
    }
    let apart = made.run(|dev| {
        for op in &ops {
            dev.run(op.as_ref());
            assert_eq!(dev.sync(), Ok(()), "{op:?}");
        }
    });
    assert!(apart.iter().any(|byte| *byte != 0), "nothing was computed");
    for replay in 0..5 {
        let recorded = made.run(|dev| {
            dev.replay(1, &mut |dev| ops.iter().for_each(|op| dev.run(op.as_ref())));
        });
        let at = recorded.iter().zip(&apart).position(|(a, b)| a != b);
        assert!(at.is_none(), "{lanes} lanes, replay {replay}: byte {at:?}");
    }
}
