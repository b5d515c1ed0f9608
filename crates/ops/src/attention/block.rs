//! One tile of queries against one block of keys: scores, online softmax, weighted sum of values.
//!
//! A tile holds the queries of a few rows that read the same key/value head. Each of the three
//! steps walks the tile before the next begins, so that a block of keys, then of values, is in the
//! first-level cache for all of them. Within a step, up to [`MAX_ROWS`] queries share each load.
//!
//! The order of additions of one query is fixed: over `head_dim` for a score, over the keys for
//! an output, both one product at a time, since lanes hold different keys or different elements.
//! The sum of weights is kept as 16 lanes through a split, then added up by [`Simd::sum`].
//! Exponentials are powers of two of scores that are multiplied by log2 e along with the scale.
//!
//! Sums of values keep the order in which bf16 pairs widen: of each 32 elements first the even,
//! then the odd ones ([`finish`] restores theirs). Those of int8 values lie in order.

use super::stored::Stored;
use crate::PAGE_TOKENS;
use crate::simd::{CACHE_LINE, LANES, Simd, math, prefetch};

/// Most queries of a tile.
pub(super) const MAX_QUERIES: usize = super::MAX_GROUP;
/// Most queries that share the loads of an inner loop.
const MAX_ROWS: usize = 8;
/// Up to so many queries, a set of 32 registers works on 4 vectors at once, then on 2: 16 sums either
/// way, enough to hide the latency of the adds, and room for what they are made of.
const WIDE_ROWS: usize = 4;
const KEY_VECTORS: usize = PAGE_TOKENS / LANES;

/// f32 before a partial's sums of values: 16 lanes that add up to the sum of the weights, then the
/// largest score, padding.
pub(super) const HEADER: usize = 2 * LANES;
/// Where the largest score is.
const MAX: usize = LANES;

/// Scores, then weights, of each query of a tile for the keys of a block.
pub(super) type Weights = [[f32; PAGE_TOKENS]; MAX_QUERIES];

/// Keys of a block that a query sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) start: usize,
    pub(super) end: usize,
}

/// A head's keys and values of one page.
#[derive(Clone, Copy)]
pub(super) struct Block<'a, K: Stored> {
    pub(super) keys: &'a [K::Word],
    pub(super) values: &'a [K::Word],
    /// Of each key, and of each value; empty where nothing is scaled.
    pub(super) key_scales: &'a [f32],
    pub(super) value_scales: &'a [f32],
}

impl<K: Stored> Block<'_, K> {
    const LINE: usize = CACHE_LINE / size_of::<K::Word>();

    /// Asks for all keys at once: for the first block, which nobody asked for ahead of time.
    #[inline(always)]
    pub(super) fn prefetch_keys(&self) {
        for line in self.keys.chunks(Self::LINE) {
            prefetch(line.as_ptr());
        }
    }
}

/// The next block, asked for line by line while this one is computed: the machine's own prefetchers
/// stop at every 4 KiB.
struct Ahead<'a, K: Stored> {
    next: Block<'a, K>,
    /// Next element of the keys and of the values.
    at: usize,
    /// Lines of each for a step of [`score`].
    lines: usize,
}

impl<'a, K: Stored> Ahead<'a, K> {
    /// Plans for a tile of so many queries.
    fn new<S: Simd>(next: Block<'a, K>, queries: usize) -> Ahead<'a, K> {
        let walks = if S::REGISTERS < 32 {
            KEY_VECTORS * queries.div_ceil(rows::<S>())
        } else {
            2 * (queries / MAX_ROWS) + if queries % MAX_ROWS > WIDE_ROWS { 2 } else { 1 }
        };
        // A walk takes head_dim / 2 steps; a block has head_dim lines of keys for each byte of an element.
        Ahead { next, at: 0, lines: (2 * size_of::<K::Word>()).div_ceil(walks) }
    }

    #[inline(always)]
    fn step(&mut self) {
        if self.at < self.next.keys.len() {
            for _ in 0..self.lines {
                prefetch(self.next.keys.as_ptr().wrapping_add(self.at));
                prefetch(self.next.values.as_ptr().wrapping_add(self.at));
                self.at += Block::<K>::LINE;
            }
        }
    }
}

/// Queries that share the loads of an inner loop: as many as leave registers for what they load.
const fn rows<S: Simd>() -> usize {
    if S::REGISTERS >= 32 { MAX_ROWS } else { 6 }
}

/// Calls `$f::<S, K, n>` for a number of queries known only at run time.
macro_rules! for_rows {
    ($n:expr, $f:ident::<$s:ident, $k:ident>($($arg:expr),*)) => {
        match $n {
            1 => $f::<$s, $k, 1>($($arg),*),
            2 => $f::<$s, $k, 2>($($arg),*),
            3 => $f::<$s, $k, 3>($($arg),*),
            4 => $f::<$s, $k, 4>($($arg),*),
            5 => $f::<$s, $k, 5>($($arg),*),
            6 => $f::<$s, $k, 6>($($arg),*),
            7 => $f::<$s, $k, 7>($($arg),*),
            _ => $f::<$s, $k, MAX_ROWS>($($arg),*),
        }
    };
}

/// An empty partial result: nothing seen yet.
pub(super) fn clear(partials: &mut [f32], stride: usize) {
    partials.fill(0.0);
    for partial in partials.chunks_exact_mut(stride) {
        partial[MAX] = f32::NEG_INFINITY;
    }
}

/// Takes a block into the partial results of `queries`. All slices have an entry per query;
/// `partials` has `stride` f32 for each. `next` is the block that comes after.
#[inline(always)]
pub(super) fn take_block<S: Simd, K: Stored>(
    s: S,
    queries: &[&[f32]],
    seen: &[Seen],
    block: Block<K>,
    next: Block<K>,
    scale: f32,
    weights: &mut [[f32; PAGE_TOKENS]],
    partials: &mut [f32],
    stride: usize,
) {
    let range = Seen {
        start: seen.iter().map(|s| s.start).min().unwrap_or(0),
        end: seen.iter().map(|s| s.end).max().unwrap_or(0),
    };
    let mut ahead = Ahead::new::<S>(next, queries.len());
    let rows = rows::<S>();
    for (queries, weights) in queries.chunks(rows).zip(weights.chunks_mut(rows)) {
        for_rows!(queries.len(), scores::<S, K>(s, queries, block, range, &mut ahead, weights));
    }
    for (i, partial) in partials.chunks_exact_mut(stride).enumerate() {
        soften(s, seen[i], scale, &mut weights[i], partial);
        if K::SCALED {
            scale_by(s, &mut weights[i], block.value_scales);
        }
    }
    let tiles = partials.chunks_mut(rows * stride).zip(weights.chunks(rows)).zip(seen.chunks(rows));
    for ((partials, weights), seen) in tiles {
        add_values::<S, K>(s, seen, block.values, weights, partials, stride);
    }
}

/// Scores of R queries for a block of keys, at least those in `range`.
#[inline(always)]
fn scores<S: Simd, K: Stored, const R: usize>(
    s: S,
    queries: &[&[f32]],
    block: Block<K>,
    range: Seen,
    ahead: &mut Ahead<K>,
    out: &mut [[f32; PAGE_TOKENS]],
) {
    let (first, last) = (range.start / LANES, range.end.div_ceil(LANES));
    if S::REGISTERS < 32 {
        for v in first..last {
            score::<S, K, R, 1>(s, queries, block, ahead, v, out);
        }
    } else if R <= WIDE_ROWS && last - first > KEY_VECTORS / 2 {
        score::<S, K, R, 4>(s, queries, block, ahead, 0, out);
    } else {
        for v in (first / 2 * 2..last).step_by(2) {
            score::<S, K, R, 2>(s, queries, block, ahead, v, out);
        }
    }
}

/// Scores of R queries for C vectors of keys from vector `first` on.
#[inline(always)]
fn score<S: Simd, K: Stored, const R: usize, const C: usize>(
    s: S,
    queries: &[&[f32]],
    block: Block<K>,
    ahead: &mut Ahead<K>,
    first: usize,
    out: &mut [[f32; PAGE_TOKENS]],
) {
    let keys = block.keys;
    let count = keys.len() / (2 * PAGE_TOKENS);
    let mut pairs: [&[[f32; 2]]; R] = [&[]; R];
    for r in 0..R {
        pairs[r] = &queries[r].as_chunks().0[..count];
    }
    let mut sums = [[s.splat(0.0); C]; R];
    let mut k = [s.splat(0.0); C];
    for i in 0..count {
        ahead.step();
        let words = &keys[i * 2 * PAGE_TOKENS..][..2 * PAGE_TOKENS];
        for half in 0..2 {
            for c in 0..C {
                k[c] = K::key(s, words, half, LANES * (first + c));
            }
            for r in 0..R {
                let q = s.splat(pairs[r][i][half]);
                for c in 0..C {
                    sums[r][c] = s.fma(q, k[c], sums[r][c]);
                }
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            let at = LANES * (first + c);
            let sum = sums[r][c];
            let scaled = if K::SCALED { s.mul(sum, s.load(&block.key_scales[at..])) } else { sum };
            s.store(scaled, &mut out[r][at..]);
        }
    }
}

/// Multiplies weights by the scales of their values. What is unseen may become NaN: nobody looks at it.
#[inline(always)]
fn scale_by<S: Simd>(s: S, weights: &mut [f32; PAGE_TOKENS], scales: &[f32]) {
    for (weights, scales) in weights.chunks_exact_mut(LANES).zip(scales.chunks_exact(LANES)) {
        s.store(s.mul(s.load(weights), s.load(scales)), weights);
    }
}

/// Scores to weights `2^(scale · score − max)`, with the partial's maximum raised to the block's and
/// what it holds scaled down accordingly.
#[inline(always)]
fn soften<S: Simd>(
    s: S,
    seen: Seen,
    scale: f32,
    weights: &mut [f32; PAGE_TOKENS],
    partial: &mut [f32],
) {
    let mut v = [s.splat(0.0); KEY_VECTORS];
    for c in 0..KEY_VECTORS {
        v[c] = s.load(&weights[LANES * c..]);
    }
    if seen != (Seen { start: 0, end: PAGE_TOKENS }) {
        let (start, end) = (s.splat(seen.start as f32), s.splat(seen.end as f32));
        let unseen = s.splat(f32::NEG_INFINITY);
        for c in 0..KEY_VECTORS {
            let index = s.add(s.load(&INDEX), s.splat((LANES * c) as f32));
            v[c] = s.select_lt(index, end, v[c], unseen);
            v[c] = s.select_lt(index, start, unseen, v[c]);
        }
    }
    let block_max = scale * s.reduce_max(s.max(s.max(v[0], v[1]), s.max(v[2], v[3])));
    let old = partial[MAX];
    let max = if block_max > old { block_max } else { old };
    let (scale, minus_max) = (s.splat(scale), s.splat(-max));
    for c in 0..KEY_VECTORS {
        v[c] = math::exp2(s, s.fma(v[c], scale, minus_max));
        s.store(v[c], &mut weights[LANES * c..]);
    }
    let mut sums = s.load(partial);
    if max != old {
        let down = math::exp2(s, s.splat(old - max));
        sums = s.mul(sums, down);
        for x in partial[HEADER..].chunks_exact_mut(LANES) {
            s.store(s.mul(s.load(x), down), x);
        }
        partial[MAX] = max;
    }
    let block = s.add(s.add(v[0], v[1]), s.add(v[2], v[3]));
    s.store(s.add(sums, block), partial);
}

const INDEX: [f32; LANES] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

/// Adds the values that each query sees, weighted: those that all see together; what lies before and
/// after, a row at a time. An unseen value is never touched, not even with weight 0: it may
/// be NaN.
#[inline(always)]
fn add_values<S: Simd, K: Stored>(
    s: S,
    seen: &[Seen],
    values: &[K::Word],
    weights: &[[f32; PAGE_TOKENS]],
    partials: &mut [f32],
    stride: usize,
) {
    let start = seen.iter().map(|s| s.start).max().unwrap_or(0);
    let end = seen.iter().map(|s| s.end).min().unwrap_or(0);
    let all = Seen { start, end: end.max(start) };
    for part in [Part::Before, Part::Shared, Part::After] {
        let mut at = 0;
        for run in seen.chunk_by(|a, b| matches!(part, Part::Shared) || a == b) {
            let keys = match part {
                Part::Before => Seen { start: run[0].start, end: run[0].end.min(all.start) },
                Part::Shared => all,
                Part::After => Seen { start: run[0].start.max(all.end), end: run[0].end },
            };
            let (weights, partials) = (&weights[at..], &mut partials[at * stride..]);
            for_rows!(run.len(), add_range::<S, K>(s, keys, values, weights, partials, stride));
            at += run.len();
        }
    }
}

/// The keys of a block, as a few queries see them.
enum Part {
    Before,
    Shared,
    After,
}

/// How a group of columns is widened.
pub(super) const LOADS_PAIRS: u8 = 0;
pub(super) const EVEN: u8 = 1;
pub(super) const ODD: u8 = 2;
const PLAIN: u8 = 3;

/// Adds `weight · value` over a range of keys to the sums of R queries.
#[inline(always)]
fn add_range<S: Simd, K: Stored, const R: usize>(
    s: S,
    keys: Seen,
    values: &[K::Word],
    weights: &[[f32; PAGE_TOKENS]],
    partials: &mut [f32],
    stride: usize,
) {
    if keys.start >= keys.end {
        return;
    }
    let dim = stride - HEADER;
    let mut at = 0;
    while S::REGISTERS >= 32 && R <= WIDE_ROWS && at + 4 * LANES <= dim {
        add_columns::<S, K, R, 4, LOADS_PAIRS>(s, keys, values, weights, partials, stride, at);
        at += 4 * LANES;
    }
    while at + 2 * LANES <= dim {
        if S::REGISTERS >= 32 {
            add_columns::<S, K, R, 2, LOADS_PAIRS>(s, keys, values, weights, partials, stride, at);
        } else {
            add_columns::<S, K, R, 1, EVEN>(s, keys, values, weights, partials, stride, at);
            add_columns::<S, K, R, 1, ODD>(s, keys, values, weights, partials, stride, at);
        }
        at += 2 * LANES;
    }
    if at < dim {
        add_columns::<S, K, R, 1, PLAIN>(s, keys, values, weights, partials, stride, at);
    }
}

/// C vectors of columns from element `at` on, widened as LOAD says.
#[inline(always)]
fn add_columns<S: Simd, K: Stored, const R: usize, const C: usize, const LOAD: u8>(
    s: S,
    keys: Seen,
    values: &[K::Word],
    weights: &[[f32; PAGE_TOKENS]],
    partials: &mut [f32],
    stride: usize,
    at: usize,
) {
    let dim = stride - HEADER;
    let to = HEADER + at + if LOAD == ODD { LANES } else { 0 };
    let mut sums = [[s.splat(0.0); C]; R];
    for r in 0..R {
        for c in 0..C {
            sums[r][c] = s.load(&partials[r * stride + to + c * LANES..]);
        }
    }
    let mut v = [s.splat(0.0); C];
    let rows = values[keys.start * dim..keys.end * dim].chunks_exact(dim);
    for (key, row) in (keys.start..keys.end).zip(rows) {
        let row = &row[at..];
        for c in 0..C {
            v[c] = K::value::<S, LOAD>(s, row, c);
        }
        for r in 0..R {
            let weight = s.splat(weights[r][key]);
            for c in 0..C {
                sums[r][c] = s.fma(weight, v[c], sums[r][c]);
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            s.store(sums[r][c], &mut partials[r * stride + to + c * LANES..]);
        }
    }
}

/// The largest score and the sum of weights of a row's splits so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Total {
    pub(super) max: f32,
    pub(super) sum: f32,
}

/// Takes a split's partial result into the row's: `out` holds the sums.
#[inline(always)]
pub(super) fn merge<S: Simd>(
    s: S,
    total: &mut Total,
    out: &mut [f32],
    partial: &[f32],
    first: bool,
) {
    let (max, sum) = (partial[MAX], s.sum(s.load(partial)));
    let sums = &partial[HEADER..];
    if first {
        *total = Total { max, sum };
        out.copy_from_slice(sums);
        return;
    }
    let new = if total.max > max { total.max } else { max };
    let mut differences = [0.0; LANES];
    (differences[0], differences[1]) = (total.max - new, max - new);
    let factors = s.lanes(math::exp2(s, s.load(&differences)));
    let (a, b) = (factors[0], factors[1]);
    *total = Total { max: new, sum: b.mul_add(sum, a * total.sum) };
    for (out, x) in out.chunks_exact_mut(LANES).zip(sums.chunks_exact(LANES)) {
        let scaled = s.mul(s.load(out), s.splat(a));
        s.store(s.fma(s.load(x), s.splat(b), scaled), out);
    }
}

/// Divides by the sum of weights and restores the order of elements.
#[inline(always)]
pub(super) fn finish<S: Simd, K: Stored>(s: S, total: Total, out: &mut [f32]) {
    let sum = s.splat(total.sum);
    let paired = if K::INTERLEAVED { out.len() } else { 0 };
    let (out, plain) = out.split_at_mut(paired);
    let (pairs, rest) = out.as_chunks_mut::<{ 2 * LANES }>();
    for out in pairs {
        let even = s.lanes(s.div(s.load(&out[..LANES]), sum));
        let odd = s.lanes(s.div(s.load(&out[LANES..]), sum));
        for i in 0..LANES {
            (out[2 * i], out[2 * i + 1]) = (even[i], odd[i]);
        }
    }
    for out in rest.chunks_exact_mut(LANES).chain(plain.chunks_exact_mut(LANES)) {
        s.store(s.div(s.load(out), sum), out);
    }
}
