//! The gated delta rule. Per value head, with state S of `key_dim × value_dim`, row by row:
//!
//! ```text
//! m = e^g · (Sᵀ k)      d = beta · (v − m)      S ← e^g · S + k dᵀ      out = Sᵀ q
//! ```
//!
//! Source: arXiv 2412.06464; `gdn_recurrent` of the numpy reference.
//!
//! [`Commit::Deferred`] (verify): the state first takes up the lane's `pending` rows,
//! `S ← e^g S + k dᵀ` one by one from half `parity` of `pending`, and is written once; this pass's
//! rows then run on a copy that is thrown away, and leave k, d and g in the other half. The state
//! after keeping n rows therefore has the bits of a scan of just those n rows.
//!
//! [`Commit::Immediate`] (prefill): takes up `pending`, then all rows, and writes the state.
//!
//! A lane of 0 rows just takes up its pending rows. A state with nothing to take up is not written.
//!
//! The host scans row by row in both forms, so a row has the same bits in a verify pass, in a prefill
//! cut anywhere, and alone (why: docs/decisions/gated-delta-cpu-scan.md). A device with matrix units
//! may do [`Commit::Immediate`] in chunks (`gdn_chunked` of the numpy reference) that end at absolute
//! multiples of [`crate::PAGE_TOKENS`], so that bits depend on positions alone.
//!
//! Numerics: the state is rounded to f32 once a row, and so is what leaves the op (`out`, d). SIMD
//! sums a column over even and odd key rows, then adds the two; the reference sums in f64.

mod cuda;
mod host;

use crate::gdn_prepare::{Commit, GdnGeometry, HeadMap};
use crate::geometry::{f32_bytes, holds, records};
use crate::kernel::{Card, Plan};
use crate::{Bindings, Buf, Cost, Cpu, Elements, LaneStep, Lanes, Mem, Op, Unsupported};

/// Columns of a state tile.
pub const TILE: usize = 16;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct GatedDelta {
    /// `[rows, keys]` f32, l2-normed and scaled.
    pub q: Buf,
    /// `[rows, keys]` f32, l2-normed.
    pub k: Buf,
    /// `[rows, values]` f32.
    pub v: Buf,
    /// `[rows, value_heads]` f32: log decay.
    pub g: Buf,
    /// `[rows, value_heads]` f32.
    pub beta: Buf,
    /// `[slots][value_heads][value_dim / TILE][key_dim][TILE]` f32: tiles of [`TILE`] value columns,
    /// which are independent of one another, so that each is one contiguous stream.
    pub state: Buf,
    /// `[slots][2]` of `k [block][keys]`, `d [block][values]`, `g [block][value_heads]`, f32.
    pub pending: Buf,
    /// `[rows, values]` f32.
    pub out: Buf,
    /// Working memory of an [`Commit::Immediate`] pass, [`GatedDelta::scratch_bytes`] long.
    pub scratch: Buf,
    /// Rows and their lanes.
    pub lanes: Lanes,
    /// Heads.
    pub geometry: GdnGeometry,
    /// The most rows of a deferred pass.
    pub block: usize,
    /// Which form.
    pub commit: Commit,
}

impl GatedDelta {
    /// The most rows of a deferred pass that the kernels can do.
    pub const MAX_BLOCK: usize = 64;

    /// Bytes of one slot's state.
    pub fn state_bytes(g: &GdnGeometry) -> usize {
        4 * g.value_heads * g.key_dim * g.value_dim
    }

    /// Bytes of one slot's pending rows, both halves.
    pub fn pending_bytes(g: &GdnGeometry, block: usize) -> usize {
        2 * 4 * block * (g.keys() + g.values() + g.value_heads)
    }

    /// Scratch for [`Commit::Immediate`] passes of up to `rows` rows of up to `lanes` lanes.
    pub fn scratch_bytes(rows: usize, lanes: usize, g: &GdnGeometry) -> usize {
        let chunk = g.key_heads * cuda::key_bytes(g.key_dim) + g.value_heads * cuda::VALUE_BYTES;
        cuda::most_chunks(rows, lanes) * chunk
    }

    /// `count` tiles of a head's state, from tile `first`.
    fn tiles(&self, slot: usize, head: usize, first: usize, count: usize) -> Buf {
        let g = &self.geometry;
        let per_head = g.value_dim / TILE;
        let tile = (slot * g.value_heads + head) * per_head + first;
        self.state.rows(tile, count, 4 * g.key_dim * TILE)
    }

    /// One half of a slot's pending rows.
    fn half(&self, slot: usize, half: usize) -> Half {
        let (g, block) = (&self.geometry, self.block);
        assert!(half < 2, "parity {half}");
        let rows = self.pending.rows(slot * 2 + half, 1, Self::pending_bytes(g, block) / 2);
        let (k, d) = (4 * block * g.keys(), 4 * block * g.values());
        Half {
            k: rows.slice(0, k),
            d: rows.slice(k, d),
            g: rows.slice(k + d, 4 * block * g.value_heads),
        }
    }

    /// Whether this value head is the one that keeps its key head's rows.
    fn keeps_key(&self, head: usize) -> bool {
        let g = &self.geometry;
        match g.head_map {
            HeadMap::Grouped => head.is_multiple_of(g.value_heads / g.key_heads),
            HeadMap::Tiled => head < g.key_heads,
        }
    }

    fn check_step(&self, step: &LaneStep) {
        let fits = step.pending as usize <= self.block && step.parity < 2;
        assert!(fits, "{step:?} with a block of {} rows", self.block);
    }
}

/// Pending rows of one pass: k `[block][keys]`, d `[block][values]`, g `[block][value_heads]`.
#[derive(Clone, Copy)]
struct Half {
    k: Buf,
    d: Buf,
    g: Buf,
}

impl Op for GatedDelta {
    fn name(&self) -> &'static str {
        "gated_delta"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("q", self.q);
        b.read("k", self.k);
        b.read("v", self.v);
        b.read("g", self.g);
        b.read("beta", self.beta);
        b.read("step", self.lanes.step);
        b.update("state", self.state);
        b.update("pending", self.pending);
        if self.commit == Commit::Immediate {
            b.write_as("scratch", self.scratch, Elements::Scratch);
        }
        b.write("out", self.out);
    }

    fn check(&self) -> Result<(), Unsupported> {
        let (op, g, rows, block) = (self.name(), &self.geometry, self.lanes.rows, self.block);
        g.check(op)?;
        self.lanes.check(op)?;
        let blocks = (1..=Self::MAX_BLOCK).contains(&block);
        Unsupported::unless(blocks, op, || format!("a block of {block} rows"), "1 to 64")?;
        let fits = self.commit == Commit::Immediate || self.lanes.max_rows <= block;
        let what = || format!("{} rows of a lane", self.lanes.max_rows);
        Unsupported::unless(fits, op, what, "at most `block` when deferred")?;
        let state = f32_bytes(&[g.value_heads, g.key_dim, g.value_dim]);
        let pending = f32_bytes(&[2, block, g.keys() + g.values() + g.value_heads]);
        let slots = (records(self.state, state), records(self.pending, pending));
        let slots = matches!(slots, (Some(a), Some(b)) if a > 0 && a == b);
        let what = || format!("{} and {} bytes", self.state.bytes, self.pending.bytes);
        Unsupported::unless(slots, op, what, "state and pending rows of the same slots")?;
        let sizes = [self.q, self.k].iter().all(|&x| holds(x, &[rows, g.keys()]))
            && [self.v, self.out].iter().all(|&x| holds(x, &[rows, g.values()]))
            && [self.g, self.beta].iter().all(|&x| holds(x, &[rows, g.value_heads]));
        Unsupported::unless(sizes, op, || format!("{self:?}"), "matching buffer sizes")?;
        let (count, room) = (self.lanes.count, self.scratch.bytes);
        let scratch =
            self.commit == Commit::Deferred || room >= Self::scratch_bytes(rows, count, g);
        let what = || format!("{room} bytes of scratch for {rows} rows of {count} lanes");
        Unsupported::unless(scratch, op, what, "GatedDelta::scratch_bytes")
    }

    fn cost(&self) -> Cost {
        let (g, rows) = (&self.geometry, self.lanes.rows);
        let row = 4 * (2 * g.keys() + 2 * g.values() + 2 * g.value_heads);
        // A deferred row is written as pending and read by the next pass, at most once each.
        let (pending, commit_flops) = match self.commit {
            Commit::Deferred => (2 * 4 * (g.keys() + g.values() + g.value_heads), 3),
            Commit::Immediate => (0, 0),
        };
        let elements = g.value_heads * g.key_dim * g.value_dim;
        Cost {
            weight_bytes: 0,
            other_bytes: (2 * self.lanes.count * Self::state_bytes(g) + rows * (row + pending))
                as u64,
            flops: (rows * elements * (7 + commit_flops)) as u64,
        }
    }

    fn reference(&self, mem: &Mem) {
        for step in self.lanes.steps(mem) {
            self.check_step(step);
            for head in 0..self.geometry.value_heads {
                for tile in 0..self.geometry.value_dim / TILE {
                    self.reference_tile(mem, step, head, tile);
                }
            }
        }
    }

    fn host(&self, mem: &Mem, cpu: &Cpu) {
        host::run(self, mem, cpu);
    }

    fn cuda(&self, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
        cuda::plan(self, card, plan)
    }
}

impl GatedDelta {
    fn reference_tile(&self, mem: &Mem, step: &LaneStep, head: usize, tile: usize) {
        let g = &self.geometry;
        let (slot, rows, key_head) = (step.slot as usize, step.rows as usize, g.key_head(head));
        let column = head * g.value_dim + tile * TILE;
        let key = |buf: Buf, row: usize| -> &[f32] {
            mem.get(buf.rows(row * g.key_heads + key_head, 1, 4 * g.key_dim))
        };
        let value = |buf: Buf, row: usize| buf.slice(4 * (row * g.values() + column), 4 * TILE);
        let gate = |buf: Buf, row: usize| buf.rows(row * g.value_heads + head, 1, 4);
        let one = |buf: Buf| mem.get::<f32>(buf)[0];

        let state = mem.get_mut::<f32>(self.tiles(slot, head, tile, 1));
        let kept = self.half(slot, step.parity as usize);
        let next = self.half(slot, 1 - step.parity as usize);
        for p in 0..step.pending as usize {
            let d = mem.get::<f32>(value(kept.d, p));
            take_up(state, one(gate(kept.g, p)), key(kept.k, p), d);
        }
        let mut copy = state.to_vec();
        for t in 0..rows {
            let row = step.row0 as usize + t;
            let (decay, beta) = (one(gate(self.g, row)), one(gate(self.beta, row)));
            let (k, v) = (key(self.k, row), mem.get::<f32>(value(self.v, row)));
            let m = columns(&copy, k);
            let d: [f32; TILE] = std::array::from_fn(|c| {
                let m = f64::from(decay).exp() * m[c];
                (f64::from(beta) * (f64::from(v[c]) - m)) as f32
            });
            take_up(&mut copy, decay, k, &d);
            let out = columns(&copy, key(self.q, row)).map(|x| x as f32);
            mem.get_mut::<f32>(value(self.out, row)).copy_from_slice(&out);
            if self.commit == Commit::Deferred {
                mem.get_mut::<f32>(value(next.d, t)).copy_from_slice(&d);
                mem.get_mut::<f32>(gate(next.g, t))[0] = decay;
                let to = next.k.rows(t * g.key_heads + key_head, 1, 4 * g.key_dim);
                mem.get_mut::<f32>(to).copy_from_slice(k);
            }
        }
        if self.commit == Commit::Immediate {
            state.copy_from_slice(&copy);
        }
    }
}

/// S ← e^g · S + k dᵀ on one tile, rounded to f32.
fn take_up(state: &mut [f32], g: f32, k: &[f32], d: &[f32]) {
    let decay = f64::from(g).exp();
    for (row, &k) in state.chunks_exact_mut(TILE).zip(k) {
        for (s, &d) in row.iter_mut().zip(d) {
            *s = (decay * f64::from(*s) + f64::from(k) * f64::from(d)) as f32;
        }
    }
}

/// Sᵀ x on one tile.
fn columns(state: &[f32], x: &[f32]) -> [f64; TILE] {
    let mut sums = [0.0; TILE];
    for (row, &x) in state.chunks_exact(TILE).zip(x) {
        for (sum, &s) in sums.iter_mut().zip(row) {
            *sum += f64::from(s) * f64::from(x);
        }
    }
    sums
}

#[cfg(any(test, feature = "cases"))]
pub(crate) mod cases;
