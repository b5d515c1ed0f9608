//! One item is a (lane, value head, group of tiles); its tiles stay in the L1 cache for all rows.
//!
//! The definition sweeps a tile twice a row, once for m and once for the update. Here one sweep does
//! row t's update and output and row t + 1's m, since both want the same elements:
//!
//! ```text
//! taking up   S ← pending rows, element by element in registers; m₀ = Sᵀ k₀
//! row t       d = beta (v − e^g m_t)
//!             per key row   S ← e^g S + k_t d;  out += q_t S;  m_{t+1} += k_{t+1} S
//! ```
//!
//! Four vector operations and one load and store of each element a row. Two accumulators (even and
//! odd key rows) for each sum and tile hide the latency of a fused multiply-add.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::{GatedDelta, Half, TILE};
use crate::gdn_prepare::Commit;
use crate::geometry::grain;
use crate::simd::math::exp;
use crate::simd::{Isa, Kernel, LANES, Simd};
use crate::{Buf, Cpu, GdnGeometry, LaneStep, Mem};

const _: () = assert!(TILE == LANES);

/// Vector operations of one chunk of work, a few microseconds.
const CHUNK: usize = 8192;
/// Key rows whose elements stay in registers while pending rows are taken up.
const UNROLL: usize = 4;

pub(super) fn run(op: &GatedDelta, mem: &Mem, cpu: &Cpu) {
    let steps = op.lanes.steps(mem);
    steps.iter().for_each(|step| op.check_step(step));
    let tiles = op.geometry.value_dim / TILE;
    let items = |group: usize| op.lanes.count * op.geometry.value_heads * (tiles / group);
    let threads = cpu.pool.threads();
    // Tiles side by side share the broadcasts of k and q and hide each other's latency, as far as
    // the registers for their sums and the L1 cache reach and there are items enough for all threads.
    let four = tiles.is_multiple_of(4) && op.geometry.key_dim <= 128 && items(4) >= 2 * threads;
    let group = match one_register_a_row(cpu.isa) {
        true if four => 4,
        true if tiles.is_multiple_of(2) => 2,
        _ => 1,
    };
    // An item asks for the next one's state, so a chunk is several items, but each thread gets a
    // few chunks.
    let items = items(group);
    let work = (4 * op.lanes.max_rows + op.block) * op.geometry.key_dim * group;
    let share = if threads == 1 { items } else { items / (4 * threads) };
    let grain = grain(CHUNK, work).max(share);
    cpu.pool.ranges(items, grain, &|start, end| {
        let items = start..end;
        match group {
            4 => cpu.isa.dispatch(Items::<4> { op, mem, steps, items }),
            2 => cpu.isa.dispatch(Items::<2> { op, mem, steps, items }),
            _ => cpu.isa.dispatch(Items::<1> { op, mem, steps, items }),
        }
    });
}

/// Whether a key row of a tile is one register, so that there are registers for several tiles.
fn one_register_a_row(isa: Isa) -> bool {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => true,
        _ => false,
    }
}

struct Items<'a, const T: usize> {
    op: &'a GatedDelta,
    mem: &'a Mem,
    steps: &'a [LaneStep],
    items: Range<usize>,
}

/// The elements of one key row in each of `T` tiles.
type Elements<S, const T: usize> = [<S as Simd>::F; T];

impl<const T: usize> Kernel for Items<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let GdnGeometry { value_heads, value_dim, key_dim, .. } = self.op.geometry;
        let groups = value_dim / TILE / T;
        let inputs = Inputs::new(self.op, self.mem);
        let mut space = [const { MaybeUninit::<Elements<S, T>>::uninit() }; GdnGeometry::MAX_DIM];
        let part = |item: usize| {
            let step = &self.steps[item / (groups * value_heads)];
            let (head, group) = (item / groups % value_heads, item % groups);
            let key_head = self.op.geometry.key_head(head);
            Part { op: self.op, mem: self.mem, step, head, key_head, first: group * T }
        };
        let end = self.items.end;
        for item in self.items {
            let ahead = match item + 1 {
                next if next < end => self.mem.get(part(next).state(T)),
                _ => &[],
            };
            part(item).run::<S, T>(s, &inputs, ahead, &mut space[..key_dim]);
        }
    }
}

/// What all parts read.
struct Inputs<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    g: &'a [f32],
    beta: &'a [f32],
}

impl<'a> Inputs<'a> {
    fn new(op: &GatedDelta, mem: &'a Mem) -> Inputs<'a> {
        let [q, k, v, g, beta] = [op.q, op.k, op.v, op.g, op.beta].map(|buf| mem.get(buf));
        Inputs { q, k, v, g, beta }
    }
}

/// `T` tiles of one head of one lane.
struct Part<'a> {
    op: &'a GatedDelta,
    mem: &'a Mem,
    step: &'a LaneStep,
    head: usize,
    key_head: usize,
    first: usize,
}

impl Part<'_> {
    /// This head's elements of a row of keys.
    #[inline(always)]
    fn key<'k>(&self, keys: &'k [f32], row: usize) -> &'k [f32] {
        let g = &self.op.geometry;
        &keys[(row * g.key_heads + self.key_head) * g.key_dim..][..g.key_dim]
    }

    /// Where this part's columns of a row of values start.
    #[inline(always)]
    fn column(&self, row: usize) -> usize {
        let g = &self.op.geometry;
        row * g.values() + self.head * g.value_dim + self.first * TILE
    }

    #[inline(always)]
    fn run<S: Simd, const T: usize>(
        &self,
        s: S,
        inputs: &Inputs,
        ahead: &[f32],
        space: &mut [MaybeUninit<Elements<S, T>>],
    ) {
        let (rows, row0) = (self.step.rows as usize, self.step.row0 as usize);
        if rows == 0 && self.step.pending == 0 {
            return;
        }
        let (slot, parity) = (self.step.slot as usize, self.step.parity as usize);
        let tile = self.take_up::<S, T>(s, self.op.half(slot, parity), space);
        if self.step.pending > 0 && (self.op.commit == Commit::Deferred || rows == 0) {
            self.write_state(s, tile);
        }
        if rows == 0 {
            return;
        }
        let next = self.op.half(slot, 1 - parity);
        // One cache line for each two key rows of a sweep.
        let mut ahead = ahead.chunks(tile.len() / 2 * LANES);
        let mut m = project(s, tile, self.key(inputs.k, row0));
        for t in (0..rows).step_by(LANES) {
            let batch = row0 + t..row0 + rows.min(t + LANES);
            let decays = self.decays(s, inputs.g, batch.clone());
            for (row, &decay) in batch.zip(&decays) {
                let decay = s.splat(decay);
                let beta = s.splat(inputs.beta[row * self.op.geometry.value_heads + self.head]);
                let v = &inputs.v[self.column(row)..];
                let mut d = m;
                for j in 0..T {
                    d[j] = s.mul(beta, s.sub(s.load(&v[j * TILE..]), s.mul(decay, m[j])));
                }
                if self.op.commit == Commit::Deferred {
                    self.store(s, d, next.d, row - row0);
                    self.keep(inputs, next, row - row0, row);
                }
                let (k, q) = (self.key(inputs.k, row), self.key(inputs.q, row));
                let ahead = ahead.next().unwrap_or(&[]);
                let out;
                if row + 1 < row0 + rows {
                    let next_k = self.key(inputs.k, row + 1);
                    (out, m) = sweep::<S, T, true>(s, tile, decay, k, d, q, next_k, ahead);
                } else {
                    (out, _) = sweep::<S, T, false>(s, tile, decay, k, d, q, k, ahead);
                }
                self.store(s, out, self.op.out, row);
            }
        }
        if self.op.commit == Commit::Immediate {
            self.write_state(s, tile);
        }
    }

    /// e^g of up to 16 rows.
    #[inline(always)]
    fn decays<S: Simd>(&self, s: S, g: &[f32], rows: Range<usize>) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        for (lane, row) in lanes.iter_mut().zip(rows) {
            *lane = g[row * self.op.geometry.value_heads + self.head];
        }
        s.lanes(exp(s, s.load(&lanes)))
    }

    /// Into this part's columns of a row of values.
    #[inline(always)]
    fn store<S: Simd, const T: usize>(&self, s: S, x: Elements<S, T>, rows: Buf, row: usize) {
        let to = self.mem.get_mut::<f32>(rows.slice(4 * self.column(row), 4 * T * TILE));
        for j in 0..T {
            s.store(x[j], &mut to[j * TILE..]);
        }
    }

    fn state(&self, tiles: usize) -> Buf {
        self.op.tiles(self.step.slot as usize, self.head, self.first, tiles)
    }

    #[inline(always)]
    fn write_state<S: Simd, const T: usize>(&self, s: S, tile: &[Elements<S, T>]) {
        let state = self.mem.get_mut::<f32>(self.state(T)).as_chunks_mut::<TILE>().0;
        for (j, state) in state.chunks_exact_mut(tile.len()).enumerate() {
            for (from, to) in tile.iter().zip(state) {
                s.store(from[j], to);
            }
        }
    }

    /// Loads the tiles and takes up the pending rows of `half`.
    #[inline(always)]
    fn take_up<'t, S: Simd, const T: usize>(
        &self,
        s: S,
        half: Half,
        space: &'t mut [MaybeUninit<Elements<S, T>>],
    ) -> &'t mut [Elements<S, T>] {
        let (key_dim, pending) = (space.len(), self.step.pending as usize);
        let [k, d, g] = [half.k, half.d, half.g].map(|buf| self.mem.get::<f32>(buf));
        let mut decays = [0.0; GatedDelta::MAX_BLOCK];
        for p in (0..pending).step_by(LANES) {
            let batch = self.decays(s, g, p..pending.min(p + LANES));
            decays[p..p + LANES].copy_from_slice(&batch);
        }
        let state = self.mem.get::<f32>(self.state(T)).as_chunks::<TILE>().0;
        for (i, to) in space.as_chunks_mut::<UNROLL>().0.iter_mut().enumerate() {
            let mut x = [[s.splat(0.0); T]; UNROLL];
            for r in 0..UNROLL {
                for j in 0..T {
                    x[r][j] = s.load(&state[j * key_dim + i * UNROLL + r]);
                }
            }
            for p in 0..pending {
                let decay = s.splat(decays[p]);
                let k = &self.key(k, p)[i * UNROLL..][..UNROLL];
                let d = &d[self.column(p)..][..T * TILE];
                for r in 0..UNROLL {
                    let k = s.splat(k[r]);
                    for j in 0..T {
                        x[r][j] = s.fma(k, s.load(&d[j * TILE..]), s.mul(decay, x[r][j]));
                    }
                }
            }
            for r in 0..UNROLL {
                to[r].write(x[r]);
            }
        }
        // SAFETY: `key_dim` is a multiple of 16, so the loop above wrote every element.
        unsafe { space.assume_init_mut() }
    }

    /// Leaves k and g of a row in the other half: once for each key head and each value head.
    fn keep(&self, inputs: &Inputs, half: Half, t: usize, row: usize) {
        if self.first != 0 {
            return;
        }
        let g = &self.op.geometry;
        let gate = half.g.rows(t * g.value_heads + self.head, 1, 4);
        self.mem.get_mut::<f32>(gate)[0] = inputs.g[row * g.value_heads + self.head];
        if self.op.keeps_key(self.head) {
            let to = half.k.rows(t * g.key_heads + self.key_head, 1, 4 * g.key_dim);
            self.mem.get_mut::<f32>(to).copy_from_slice(self.key(inputs.k, row));
        }
    }
}

/// Sᵀ k.
#[inline(always)]
fn project<S: Simd, const T: usize>(s: S, tile: &[Elements<S, T>], k: &[f32]) -> Elements<S, T> {
    let mut sums = [[s.splat(0.0); T]; 2];
    for (x, k) in tile.as_chunks::<2>().0.iter().zip(k.as_chunks::<2>().0) {
        for r in 0..2 {
            let k = s.splat(k[r]);
            for j in 0..T {
                sums[r][j] = s.fma(k, x[r][j], sums[r][j]);
            }
        }
    }
    total(s, sums)
}

/// S ← e^g · S + k dᵀ; returns Sᵀ q and, if `NEXT`, Sᵀ next_k. Asks for `ahead`, a line for each
/// two key rows.
#[inline(always)]
fn sweep<S: Simd, const T: usize, const NEXT: bool>(
    s: S,
    tile: &mut [Elements<S, T>],
    decay: S::F,
    k: &[f32],
    d: Elements<S, T>,
    q: &[f32],
    next_k: &[f32],
    ahead: &[f32],
) -> (Elements<S, T>, Elements<S, T>) {
    let zero = [[s.splat(0.0); T]; 2];
    let (mut out, mut m) = (zero, zero);
    let tile = tile.as_chunks_mut::<2>().0.iter_mut();
    let keys = k.as_chunks::<2>().0.iter().zip(q.as_chunks::<2>().0);
    let keys = keys.zip(next_k.as_chunks::<2>().0);
    for (i, (x, ((k, q), next_k))) in tile.zip(keys).enumerate() {
        if let Some(line) = ahead.get(i * LANES) {
            crate::simd::prefetch(line);
        }
        for r in 0..2 {
            let (k, q, next_k) = (s.splat(k[r]), s.splat(q[r]), s.splat(next_k[r]));
            for j in 0..T {
                let y = s.fma(k, d[j], s.mul(decay, x[r][j]));
                x[r][j] = y;
                out[r][j] = s.fma(q, y, out[r][j]);
                if NEXT {
                    m[r][j] = s.fma(next_k, y, m[r][j]);
                }
            }
        }
    }
    (total(s, out), total(s, m))
}

/// The sums over even and over odd key rows, added.
#[inline(always)]
fn total<S: Simd, const T: usize>(s: S, sums: [Elements<S, T>; 2]) -> Elements<S, T> {
    let [mut total, odd] = sums;
    for j in 0..T {
        total[j] = s.add(total[j], odd[j]);
    }
    total
}
