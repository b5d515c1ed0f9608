//! Items are (lane, block of rows, group of heads of one kind); the last "group" of each block is the
//! gates. A group is wide enough to make the work on a row worth its overhead. An item of the first
//! block also keeps its channels' history.

use std::ops::Range;

use super::{CONV_TAPS, GdnPrepare, L2_EPS};
use crate::geometry::grain;
use crate::simd::math::{sigmoid, silu, softplus};
use crate::simd::{Kernel, LANES, Simd};
use crate::{Buf, Cpu, LaneStep, Mem};

/// Channels of one group, at least, unless its kind has fewer.
const GROUP: usize = 256;
/// Rows of one item, at most.
const BLOCK: usize = 16;
/// Rows times channels of one chunk of work, a few microseconds.
const CHUNK: usize = 4096;

pub(super) fn run(op: &GdnPrepare, mem: &Mem, cpu: &Cpu) {
    let steps = op.lanes.steps(mem);
    let kinds = Kind::all(op);
    let items = Items {
        op,
        mem,
        steps,
        kinds,
        groups: kinds.iter().map(Kind::groups).sum(),
        blocks: op.lanes.max_rows.div_ceil(BLOCK).max(1),
        range: 0..0,
    };
    let grain = grain(CHUNK, op.lanes.max_rows.clamp(1, BLOCK) * GROUP);
    let count = op.lanes.count * items.blocks * (items.groups + 1);
    cpu.pool.ranges(count, grain, &|start, end| {
        cpu.isa.dispatch(Items { range: start..end, ..items.clone() });
    });
}

/// Queries, keys or values.
#[derive(Clone, Copy)]
struct Kind {
    /// `[rows, heads · dim]`.
    out: Buf,
    /// First channel of the first head.
    first: usize,
    heads: usize,
    dim: usize,
    /// What a head of unit length is multiplied by; none if heads keep their length.
    length: Option<f32>,
}

impl Kind {
    fn all(op: &GdnPrepare) -> [Kind; 3] {
        let g = &op.geometry;
        let keys = Kind {
            out: op.k,
            first: g.keys(),
            heads: g.key_heads,
            dim: g.key_dim,
            length: Some(1.0),
        };
        let length = Some(1.0 / (g.key_dim as f32).sqrt());
        let queries = Kind { out: op.q, first: 0, length, ..keys };
        let (heads, dim) = (g.value_heads, g.value_dim);
        [queries, keys, Kind { out: op.v, first: 2 * g.keys(), heads, dim, length: None }]
    }

    fn group_heads(&self) -> usize {
        GROUP.div_ceil(self.dim)
    }

    fn groups(&self) -> usize {
        self.heads.div_ceil(self.group_heads())
    }
}

#[derive(Clone)]
struct Items<'a> {
    op: &'a GdnPrepare,
    mem: &'a Mem,
    steps: &'a [LaneStep],
    kinds: [Kind; 3],
    /// Groups of heads of all kinds.
    groups: usize,
    /// Blocks of rows of one lane.
    blocks: usize,
    range: Range<usize>,
}

impl Kernel for Items<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let per_block = self.groups + 1;
        for item in self.range.clone() {
            let step = &self.steps[item / (self.blocks * per_block)];
            let first = item / per_block % self.blocks * BLOCK;
            let rows = first.min(step.rows as usize)..(first + BLOCK).min(step.rows as usize);
            let mut group = item % per_block;
            if group == self.groups {
                self.gates(s, step, rows);
                continue;
            }
            let mut kind = &self.kinds[0];
            for next in &self.kinds[1..] {
                if group >= kind.groups() {
                    group -= kind.groups();
                    kind = next;
                } else {
                    break;
                }
            }
            let start = group * kind.group_heads();
            let heads = start..(start + kind.group_heads()).min(kind.heads);
            if first == 0 {
                self.keep(step, kind, &heads);
            }
            self.convolve(s, step, rows, kind, heads);
        }
    }
}

impl Items<'_> {
    /// `g` and `beta` of the lane's rows.
    #[inline(always)]
    fn gates<S: Simd>(&self, s: S, step: &LaneStep, rows: Range<usize>) {
        let heads = self.op.geometry.value_heads;
        let decay = self.mem.get::<f32>(self.op.decay);
        let dt_bias = self.mem.get::<f32>(self.op.dt_bias);
        for row in rows {
            let part = |buf: Buf| buf.rows(step.row0 as usize + row, 1, 4 * heads);
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

    /// Convolution, SiLU and norm of a group of heads.
    #[inline(always)]
    fn convolve<S: Simd>(
        &self,
        s: S,
        step: &LaneStep,
        rows: Range<usize>,
        kind: &Kind,
        heads: Range<usize>,
    ) {
        let (start, width) = (kind.first + heads.start * kind.dim, heads.len() * kind.dim);
        let conv = self.mem.get::<f32>(self.op.conv);
        let channels = self.op.geometry.channels();
        let weights = [0, 1, 2, 3].map(|j| &conv[j * channels + start..][..width]);
        let stream =
            |t: isize| self.mem.get(self.op.stream_row(step, t).slice(4 * start, 4 * width));
        let t = rows.start as isize;
        let mut u: [&[f32]; CONV_TAPS] = [&[], stream(t - 3), stream(t - 2), stream(t - 1)];
        for row in rows {
            u = [u[1], u[2], u[3], stream(row as isize)];
            let at = (step.row0 as usize + row) * kind.heads + heads.start;
            let out = self.mem.get_mut::<f32>(kind.out.slice(4 * at * kind.dim, 4 * width));
            taps(s, weights, u, out);
            if let Some(length) = kind.length {
                out.chunks_exact_mut(kind.dim).for_each(|head| normalize(s, head, length));
            }
        }
    }

    /// Writes a group's channels of the other half of the history.
    #[inline(always)]
    fn keep(&self, step: &LaneStep, kind: &Kind, heads: &Range<usize>) {
        let (start, width) = (kind.first + heads.start * kind.dim, heads.len() * kind.dim);
        let (first, count) = self.op.kept_rows(step);
        for i in 0..count {
            let from = self.op.stream_row(step, first + i as isize);
            let to = self.op.history_row(step.slot as usize, 1 - step.parity as usize, i);
            let part = |row: Buf| row.slice(4 * start, 4 * width);
            self.mem.get_mut::<f32>(part(to)).copy_from_slice(self.mem.get(part(from)));
        }
    }
}

/// silu(Σ_j weights[j] · u[j]), taps in ascending order.
#[inline(always)]
fn taps<S: Simd>(s: S, weights: [&[f32]; CONV_TAPS], u: [&[f32]; CONV_TAPS], out: &mut [f32]) {
    let out = out.as_chunks_mut::<LANES>().0;
    let n = out.len();
    let (w, u) = (weights.map(|w| vectors(w, n)), u.map(|u| vectors(u, n)));
    for (i, out) in out.iter_mut().enumerate() {
        let mut sum = s.mul(s.load(&w[0][i]), s.load(&u[0][i]));
        for j in 1..CONV_TAPS {
            sum = s.fma(s.load(&w[j][i]), s.load(&u[j][i]), sum);
        }
        s.store(silu(s, sum), out);
    }
}

/// The first `n` vectors.
#[inline(always)]
fn vectors(x: &[f32], n: usize) -> &[[f32; LANES]] {
    &x.as_chunks::<LANES>().0[..n]
}

/// Scales a head to this length.
#[inline(always)]
fn normalize<S: Simd>(s: S, head: &mut [f32], length: f32) {
    let head = head.as_chunks_mut::<LANES>().0;
    let mut squares = s.splat(0.0);
    for x in head.iter() {
        let x = s.load(x);
        squares = s.fma(x, x, squares);
    }
    let scale = s.splat(length / (s.sum(squares) + L2_EPS).sqrt());
    for x in head {
        s.store(s.mul(s.load(x), scale), x);
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
