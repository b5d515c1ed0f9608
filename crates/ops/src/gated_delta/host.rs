//! One item is a (lane, value head, group of tiles); its tiles stay in the L1 cache for all rows.
//!
//! The definition sweeps a tile twice a row, once for m and once for the update. Here one sweep does
//! row t's update and output and row t + 1's m, since both want the same elements:
//!
//! ```text
//! taking up   S ← pending rows, element by element in registers; m₀ = Sᵀ k₀
//! row t       d = beta (v − e^g m_t);  per key row  S ← e^g S + k_t d;  out += q_t S;  m_{t+1} += k_{t+1} S
//! ```
//!
//! Four vector operations and one load and store of each element a row. Two accumulators (even and
//! odd key rows) for each sum and tile hide the latency of a fused multiply-add.

use std::mem::MaybeUninit;

use super::{GatedDelta, Half, TILE};
use crate::gdn_prepare::Commit;
use crate::geometry::grain;
use crate::simd::math::exp_f32;
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
    // 32 registers hold two tiles' accumulators; two tiles share the broadcasts of k and q.
    let group = match cpu.isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 if tiles.is_multiple_of(2) => 2,
        _ => 1,
    };
    let items = op.lanes.count * op.geometry.value_heads * (tiles / group);
    let work = (4 * op.lanes.max_rows + op.block) * op.geometry.key_dim * group;
    let grain = grain(CHUNK, work).min(items.div_ceil(2 * cpu.pool.threads()));
    cpu.pool.ranges(items, grain, &|start, end| {
        if group == 2 {
            cpu.isa.dispatch(Items::<2> { op, mem, steps, start, end });
        } else {
            cpu.isa.dispatch(Items::<1> { op, mem, steps, start, end });
        }
    });
}

struct Items<'a, const T: usize> {
    op: &'a GatedDelta,
    mem: &'a Mem,
    steps: &'a [LaneStep],
    start: usize,
    end: usize,
}

/// The elements of one key row in each of `T` tiles.
type Elements<S, const T: usize> = [<S as Simd>::F; T];

impl<const T: usize> Kernel for Items<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let GdnGeometry { value_heads, value_dim, key_dim, .. } = self.op.geometry;
        let groups = value_dim / TILE / T;
        let mut space = [const { MaybeUninit::<Elements<S, T>>::uninit() }; GdnGeometry::MAX_DIM];
        for item in self.start..self.end {
            let step = &self.steps[item / (groups * value_heads)];
            let (head, group) = (item / groups % value_heads, item % groups);
            let part = Part { op: self.op, mem: self.mem, step, head, first: group * T };
            part.run::<S, T>(s, &mut space[..key_dim]);
        }
    }
}

/// `T` tiles of one head of one lane.
struct Part<'a> {
    op: &'a GatedDelta,
    mem: &'a Mem,
    step: &'a LaneStep,
    head: usize,
    first: usize,
}

impl<'a> Part<'a> {
    fn key(&self, buf: Buf, row: usize) -> &'a [f32] {
        let g = &self.op.geometry;
        let key_head = g.key_head(self.head);
        self.mem.get(buf.rows(row * g.key_heads + key_head, 1, 4 * g.key_dim))
    }

    fn value(&self, buf: Buf, row: usize, tiles: usize) -> Buf {
        let g = &self.op.geometry;
        let column = self.head * g.value_dim + self.first * TILE;
        buf.slice(4 * (row * g.values() + column), 4 * tiles * TILE)
    }

    fn gate(&self, buf: Buf, row: usize) -> f32 {
        self.mem.get::<f32>(buf)[row * self.op.geometry.value_heads + self.head]
    }

    fn half(&self, half: usize) -> Half {
        self.op.half(self.step.slot as usize, half)
    }

    #[inline(always)]
    fn run<S: Simd, const T: usize>(&self, s: S, space: &mut [MaybeUninit<Elements<S, T>>]) {
        let (rows, row0) = (self.step.rows as usize, self.step.row0 as usize);
        if rows == 0 && self.step.pending == 0 {
            return;
        }
        let (tile, mut m) = self.take_up::<S, T>(s, space);
        let next = self.half(1 - self.step.parity as usize);
        for t in 0..rows {
            let row = row0 + t;
            let decay = s.splat(exp_f32(self.gate(self.op.g, row)));
            let beta = s.splat(self.gate(self.op.beta, row));
            let v = self.mem.get::<f32>(self.value(self.op.v, row, T));
            let d: Elements<S, T> = std::array::from_fn(|j| {
                s.mul(beta, s.sub(s.load(&v[j * TILE..]), s.mul(decay, m[j])))
            });
            if self.op.commit == Commit::Deferred {
                self.store(s, d, self.value(next.d, t, T));
                self.keep(next, t, row);
            }
            let (k, q) = (self.key(self.op.k, row), self.key(self.op.q, row));
            let out;
            if t + 1 < rows {
                let next_k = self.key(self.op.k, row + 1);
                (out, m) = sweep::<S, T, true>(s, tile, decay, k, d, q, next_k);
            } else {
                (out, _) = sweep::<S, T, false>(s, tile, decay, k, d, q, k);
            }
            self.store(s, out, self.value(self.op.out, row, T));
        }
        if self.op.commit == Commit::Immediate && rows > 0 {
            self.write_state(s, tile);
        }
    }

    #[inline(always)]
    fn store<S: Simd, const T: usize>(&self, s: S, x: Elements<S, T>, to: Buf) {
        let to = self.mem.get_mut::<f32>(to);
        for (x, to) in x.into_iter().zip(to.as_chunks_mut::<TILE>().0) {
            s.store(x, to);
        }
    }

    fn state(&self, tiles: usize) -> Buf {
        self.op.tiles(self.step.slot as usize, self.head, self.first, tiles)
    }

    #[inline(always)]
    fn write_state<S: Simd, const T: usize>(&self, s: S, tile: &[Elements<S, T>]) {
        let state = self.mem.get_mut::<f32>(self.state(T));
        for (j, state) in state.chunks_exact_mut(tile.len() * TILE).enumerate() {
            for (from, to) in tile.iter().zip(state.as_chunks_mut::<TILE>().0) {
                s.store(from[j], to);
            }
        }
    }

    /// Loads the tiles with the pending rows taken up, which the state gets too unless this pass
    /// will write it anyway. Also returns Sᵀ k of the first row.
    #[inline(always)]
    fn take_up<'t, S: Simd, const T: usize>(
        &self,
        s: S,
        space: &'t mut [MaybeUninit<Elements<S, T>>],
    ) -> (&'t mut [Elements<S, T>], Elements<S, T>) {
        let key_dim = space.len();
        let kept = self.half(self.step.parity as usize);
        let pending = self.step.pending as usize;
        let mut decays = [0.0; GatedDelta::MAX_BLOCK];
        for (p, decay) in decays.iter_mut().enumerate().take(pending) {
            *decay = exp_f32(self.gate(kept.g, p));
        }
        let state = self.mem.get::<f32>(self.state(T));
        let state: [&[f32]; T] =
            std::array::from_fn(|j| &state[j * key_dim * TILE..][..key_dim * TILE]);
        for (i, to) in space.chunks_exact_mut(UNROLL).enumerate() {
            let mut x: [Elements<S, T>; UNROLL] = std::array::from_fn(|r| {
                std::array::from_fn(|j| s.load(&state[j][(i * UNROLL + r) * TILE..]))
            });
            for p in 0..pending {
                let decay = s.splat(decays[p]);
                let d = self.mem.get::<f32>(self.value(kept.d, p, T));
                let d: Elements<S, T> = std::array::from_fn(|j| s.load(&d[j * TILE..]));
                let k = &self.key(kept.k, p)[i * UNROLL..][..UNROLL];
                for r in 0..UNROLL {
                    let k = s.splat(k[r]);
                    x[r] = std::array::from_fn(|j| s.fma(k, d[j], s.mul(decay, x[r][j])));
                }
            }
            for (to, x) in to.iter_mut().zip(x) {
                to.write(x);
            }
        }
        // SAFETY: `key_dim` is a multiple of 16, so the loop above wrote every element.
        let tile = unsafe { space.assume_init_mut() };
        if pending > 0 && (self.op.commit == Commit::Deferred || self.step.rows == 0) {
            self.write_state(s, tile);
        }
        let mut sums = [[s.splat(0.0); T]; 2];
        if self.step.rows > 0 {
            let k = self.key(self.op.k, self.step.row0 as usize);
            for (i, (x, &k)) in tile.iter().zip(k).enumerate() {
                let (k, sum) = (s.splat(k), &mut sums[i % 2]);
                *sum = std::array::from_fn(|j| s.fma(k, x[j], sum[j]));
            }
        }
        (tile, std::array::from_fn(|j| s.add(sums[0][j], sums[1][j])))
    }

    /// Leaves k and g of a row in the other half: once for each key head and each value head.
    fn keep(&self, half: Half, t: usize, row: usize) {
        if self.first != 0 {
            return;
        }
        let g = &self.op.geometry;
        let gate = half.g.rows(t * g.value_heads + self.head, 1, 4);
        self.mem.get_mut::<f32>(gate)[0] = self.gate(self.op.g, row);
        if self.op.keeps_key(self.head) {
            let to = half.k.rows(t * g.key_heads + g.key_head(self.head), 1, 4 * g.key_dim);
            self.mem.get_mut::<f32>(to).copy_from_slice(self.key(self.op.k, row));
        }
    }
}

/// S ← e^g · S + k dᵀ; returns Sᵀ q and, if `NEXT`, Sᵀ next_k.
#[inline(always)]
fn sweep<S: Simd, const T: usize, const NEXT: bool>(
    s: S,
    tile: &mut [Elements<S, T>],
    decay: S::F,
    k: &[f32],
    d: Elements<S, T>,
    q: &[f32],
    next_k: &[f32],
) -> (Elements<S, T>, Elements<S, T>) {
    let zero = [[s.splat(0.0); T]; 2];
    let (mut out, mut m) = (zero, zero);
    let tile = tile.as_chunks_mut::<2>().0.iter_mut();
    let keys = k.as_chunks::<2>().0.iter().zip(q.as_chunks::<2>().0);
    for ((x, (k, q)), next_k) in tile.zip(keys).zip(next_k.as_chunks::<2>().0) {
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
    let total = |x: [Elements<S, T>; 2]| std::array::from_fn(|j| s.add(x[0][j], x[1][j]));
    (total(out), total(m))
}
