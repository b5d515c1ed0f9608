//! Items are (lane, block of rows, head); the last "head" of each block is the gates. An item of
//! the first block also keeps its channels' history.

use super::{CONV_TAPS, GdnPrepare, Head, L2_EPS};
use crate::geometry::grain;
use crate::simd::math::{sigmoid, silu, softplus};
use crate::simd::{Kernel, LANES, Simd};
use crate::{Cpu, LaneStep, Mem};

/// Rows of one item, at most.
const BLOCK: usize = 64;
/// Rows times channels of one chunk of work, a few microseconds.
const CHUNK: usize = 2048;

pub(super) fn run(op: &GdnPrepare, mem: &Mem, cpu: &Cpu) {
    let steps = op.lanes.steps(mem);
    let (heads, max_rows) = (op.conv_heads() + 1, op.lanes.max_rows);
    let blocks = max_rows.div_ceil(BLOCK).max(1);
    let dim = op.geometry.key_dim.max(op.geometry.value_dim);
    let grain = grain(CHUNK, max_rows.min(BLOCK) * dim);
    cpu.pool.ranges(op.lanes.count * blocks * heads, grain, &|start, end| {
        cpu.isa.dispatch(Items { op, mem, steps, blocks, start, end });
    });
}

struct Items<'a> {
    op: &'a GdnPrepare,
    mem: &'a Mem,
    steps: &'a [LaneStep],
    blocks: usize,
    start: usize,
    end: usize,
}

impl Kernel for Items<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let heads = self.op.conv_heads() + 1;
        for item in self.start..self.end {
            let step = &self.steps[item / (self.blocks * heads)];
            let first = item / heads % self.blocks * BLOCK;
            let rows = first.min(step.rows as usize)..(first + BLOCK).min(step.rows as usize);
            if item % heads == self.op.conv_heads() {
                self.gates(s, step, rows);
                continue;
            }
            let head = self.op.conv_head(item % heads);
            self.convolve(s, step, rows, head);
            if first == 0 {
                self.keep(step, head);
            }
        }
    }
}

impl Items<'_> {
    /// `g` and `beta` of the lane's rows.
    #[inline(always)]
    fn gates<S: Simd>(&self, s: S, step: &LaneStep, rows: std::ops::Range<usize>) {
        let heads = self.op.geometry.value_heads;
        let decay = self.mem.get::<f32>(self.op.decay);
        let dt_bias = self.mem.get::<f32>(self.op.dt_bias);
        for row in rows {
            let part = |buf: crate::Buf| buf.rows(step.row0 as usize + row, 1, 4 * heads);
            let (a, b) = (self.mem.get(part(self.op.a)), self.mem.get(part(self.op.b)));
            let g = self.mem.get_mut(part(self.op.g));
            let beta = self.mem.get_mut(part(self.op.beta));
            for h in (0..heads).step_by(LANES) {
                let x = s.add(load_part(s, &a[h..]), load_part(s, &dt_bias[h..]));
                let log_decay = s.mul(load_part(s, &decay[h..]), softplus(s, x));
                store_part(s, log_decay, &mut g[h..]);
                store_part(s, sigmoid(s, load_part(s, &b[h..])), &mut beta[h..]);
            }
        }
    }

    /// Convolution, SiLU and norm of one head.
    #[inline(always)]
    fn convolve<S: Simd>(&self, s: S, step: &LaneStep, rows: std::ops::Range<usize>, head: Head) {
        let (start, dim) = self.op.channels_of(head);
        let conv = self.mem.get::<f32>(self.op.conv);
        let weights: [&[f32]; CONV_TAPS] =
            std::array::from_fn(|j| &conv[j * self.op.geometry.channels() + start..][..dim]);
        let stream = |t: isize| self.mem.get(self.op.stream_row(step, t).slice(4 * start, 4 * dim));
        let t = rows.start as isize;
        let mut u: [&[f32]; CONV_TAPS] = [&[], stream(t - 3), stream(t - 2), stream(t - 1)];
        for row in rows {
            u = [u[1], u[2], u[3], stream(row as isize)];
            let out = self.mem.get_mut::<f32>(self.op.out_row(head, step.row0 as usize + row));
            let mut squares = s.splat(0.0);
            for (i, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                let c = i * LANES;
                let mut sum = s.mul(s.load(&weights[0][c..]), s.load(&u[0][c..]));
                for j in 1..CONV_TAPS {
                    sum = s.fma(s.load(&weights[j][c..]), s.load(&u[j][c..]), sum);
                }
                let y = silu(s, sum);
                squares = s.fma(y, y, squares);
                s.store(y, out);
            }
            let norm = 1.0 / (s.sum(squares) + L2_EPS).sqrt();
            let scale = match head {
                Head::Query(_) => norm / (dim as f32).sqrt(),
                Head::Key(_) => norm,
                Head::Value(_) => continue,
            };
            for out in out.as_chunks_mut::<LANES>().0 {
                s.store(s.mul(s.load(out), s.splat(scale)), out);
            }
        }
    }

    /// Writes one head's channels of the other half of the history.
    #[inline(always)]
    fn keep(&self, step: &LaneStep, head: Head) {
        let (start, dim) = self.op.channels_of(head);
        let (first, count) = self.op.kept_rows(step);
        for i in 0..count {
            let from = self.op.stream_row(step, first + i as isize);
            let to = self.op.history_row(step.slot as usize, 1 - step.parity as usize, i);
            let part = |row: crate::Buf| row.slice(4 * start, 4 * dim);
            self.mem.get_mut::<f32>(part(to)).copy_from_slice(self.mem.get(part(from)));
        }
    }
}

/// Up to 16 elements; the lanes beyond are 0.
#[inline(always)]
fn load_part<S: Simd>(s: S, x: &[f32]) -> S::F {
    if x.len() >= LANES {
        return s.load(x);
    }
    let mut lanes = [0.0; LANES];
    lanes[..x.len()].copy_from_slice(x);
    s.load(&lanes)
}

/// The first lanes, as many as `out` has elements, up to 16.
#[inline(always)]
fn store_part<S: Simd>(s: S, v: S::F, out: &mut [f32]) {
    if out.len() >= LANES {
        return s.store(v, out);
    }
    out.copy_from_slice(&s.lanes(v)[..out.len()]);
}
