//! Integer products of quantised weights, and the split of all products over threads.
//!
//! Work is cut by bytes of weights, over all parts at once. A thread goes through its tiles in the
//! order of memory; up to [`Simd::DOT_ROWS`] rows share one reading and unpacking of a tile. With more
//! rows than that, a block of tiles that stays in the second-level cache meets all rows in turn.

use super::layout::{Layout, TILE};
use super::{Linear, LinearPart, dense, exact};
use crate::act::ActRow;
use crate::simd::{Kernel, LANES, Simd};
use crate::{ACT_GROUP, ActDtype, ActGroup, Codes, Cpu, IQ4_TABLE, Mem, ScaleDtype};

/// Chunks for each thread: enough to even out a thread that was slow or late.
const CHUNKS: usize = 6;
/// Bytes of weights below which cutting finer costs more than it evens out.
const MIN_CHUNK: usize = 32 << 10;
/// Bytes of tiles that stay cached while many rows pass.
const CACHED: usize = 512 << 10;
/// How far ahead of its use a line of weights is asked for.
const AHEAD: usize = 2048;

pub(super) fn run(op: &Linear, mem: &Mem, cpu: &Cpu) {
    let total: usize = op.parts().iter().map(|part| part.weight.buf.bytes).sum();
    let threads = cpu.pool.threads();
    let chunks = if threads == 1 { 1 } else { (total / MIN_CHUNK).clamp(1, CHUNKS * threads) };
    let bytes = total.div_ceil(chunks);
    cpu.pool.run(chunks, &|chunk| {
        cpu.isa.dispatch(Chunk { op, mem, start: chunk * bytes, end: (chunk + 1) * bytes });
    });
}

/// The pieces (tiles or rows) that begin in bytes `[start, end)` of all weights laid end to end.
struct Chunk<'a> {
    op: &'a Linear,
    mem: &'a Mem,
    start: usize,
    end: usize,
}

impl Kernel for Chunk<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut base = 0;
        for part in self.op.parts() {
            let weight = &part.weight;
            let bytes = weight.format.piece_bytes(weight.k).unwrap_or(1);
            let pieces = weight.buf.bytes / bytes;
            let piece = |at: usize| at.saturating_sub(base).div_ceil(bytes).min(pieces);
            let (first, last) = (piece(self.start), piece(self.end));
            base += weight.buf.bytes;
            if first == last {
                continue;
            }
            let (op, mem) = (self.op, self.mem);
            match Layout::of(weight.format) {
                None => dense::outputs(s, op, mem, part, first, last),
                Some(layout) if op.x.dtype == ActDtype::F32 => {
                    exact::tiles(s, op, mem, part, &layout, first, last);
                }
                Some(layout) => Tiles { op, mem, part, layout, first, last, bytes }.run(s),
            }
        }
    }
}

/// Tiles `[first, last)` of one weight.
struct Tiles<'a> {
    op: &'a Linear,
    mem: &'a Mem,
    part: &'a LinearPart,
    layout: Layout,
    first: usize,
    last: usize,
    /// Of one tile.
    bytes: usize,
}

impl Tiles<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S) {
        let unit = self.layout.group.min(ACT_GROUP);
        match (self.layout.codes, self.layout.symmetric, unit) {
            (Codes::U4, false, 16) => self.rows::<S, U4, 16, false>(s),
            (Codes::U4, false, 32) => self.rows::<S, U4, 32, false>(s),
            (Codes::U4, false, _) => self.rows::<S, U4, 64, false>(s),
            (Codes::U4, true, 16) => self.rows::<S, U4, 16, true>(s),
            (Codes::U4, true, 32) => self.rows::<S, U4, 32, true>(s),
            (Codes::U4, true, _) => self.rows::<S, U4, 64, true>(s),
            (Codes::U8, false, 16) => self.rows::<S, U8, 16, false>(s),
            (Codes::U8, false, 32) => self.rows::<S, U8, 32, false>(s),
            (Codes::U8, false, _) => self.rows::<S, U8, 64, false>(s),
            (Codes::U8, true, 16) => self.rows::<S, U8, 16, true>(s),
            (Codes::U8, true, 32) => self.rows::<S, U8, 32, true>(s),
            (Codes::U8, true, _) => self.rows::<S, U8, 64, true>(s),
            (Codes::Iq4, _, 16) => self.rows::<S, Iq4, 16, true>(s),
            (Codes::Iq4, _, 32) => self.rows::<S, Iq4, 32, true>(s),
            (Codes::Iq4, _, _) => self.rows::<S, Iq4, 64, true>(s),
        }
    }

    /// All rows, in blocks. `U` is the unit (see the module), `SYM` whether there are no biases.
    #[inline(always)]
    fn rows<S: Simd, C: Unpack, const U: usize, const SYM: bool>(&self, s: S) {
        let block = if self.op.rows <= S::DOT_ROWS {
            self.last - self.first
        } else {
            (CACHED / self.bytes).max(1)
        };
        for first in (self.first..self.last).step_by(block) {
            let tiles = first..self.last.min(first + block);
            for row in (0..self.op.rows).step_by(S::DOT_ROWS) {
                // Dead branches for sets that take fewer rows at a time.
                match (self.op.rows - row).min(S::DOT_ROWS) {
                    1 => self.block::<S, C, U, SYM, 1>(s, tiles.clone(), row),
                    2 => self.block::<S, C, U, SYM, 2>(s, tiles.clone(), row),
                    3 | 4 if S::DOT_ROWS >= 4 => {
                        self.block::<S, C, U, SYM, 4>(s, tiles.clone(), row);
                    }
                    5 | 6 if S::DOT_ROWS >= 6 => {
                        self.block::<S, C, U, SYM, 6>(s, tiles.clone(), row);
                    }
                    _ if S::DOT_ROWS >= 8 => self.block::<S, C, U, SYM, 8>(s, tiles.clone(), row),
                    _ => {}
                }
            }
        }
    }

    /// Rows `[row, row + R)`, of which those past the end are copies of the last, not stored.
    #[inline(always)]
    fn block<S: Simd, C: Unpack, const U: usize, const SYM: bool, const R: usize>(
        &self,
        s: S,
        tiles: std::ops::Range<usize>,
        row: usize,
    ) {
        let rows = R.min(self.op.rows - row);
        let x = std::array::from_fn(|r| self.op.x.row(self.mem, row + r.min(rows - 1)));
        let weight = self.mem.get::<u8>(self.part.weight.buf);
        for tile in tiles {
            let bytes = &weight[tile * self.bytes..][..self.bytes];
            let sums = product::<S, C, U, SYM, R>(s, &self.layout, bytes, &x);
            for r in 0..rows {
                store(s, self.part, self.mem, row + r, tile, sums[r]);
            }
        }
    }
}

/// Writes or adds one row's products with one tile.
#[inline(always)]
pub(super) fn store<S: Simd>(
    s: S,
    part: &LinearPart,
    mem: &Mem,
    row: usize,
    tile: usize,
    sums: [S::F; 2],
) {
    let n = part.weight.n;
    let count = TILE.min(n - tile * TILE);
    let out = part.out.slice(4 * (row * n + tile * TILE), 4 * count);
    let out = mem.get_mut::<f32>(out);
    for (sums, out) in sums.into_iter().zip(out.chunks_mut(LANES)) {
        if out.len() == LANES {
            s.store(if part.add { s.add(s.load(out), sums) } else { sums }, out);
        } else {
            for (out, sum) in out.iter_mut().zip(s.lanes(sums)) {
                *out = if part.add { *out + sum } else { sum };
            }
        }
    }
}

/// How codes are read. The products are integers as numbers.
trait Unpack {
    /// What symmetric codes are relative to.
    const ZERO: f32;
    /// By how much the products of outputs 16..32 are too large.
    fn high<S: Simd>() -> f32;
    fn dots<S: Simd, const R: usize, const K: usize>(
        s: S,
        codes: &[u8],
        x: [&[i8]; R],
    ) -> [[S::F; 2]; R];
}

struct U4;
struct U8;
struct Iq4;

impl Unpack for U4 {
    const ZERO: f32 = 8.0;
    #[inline(always)]
    fn high<S: Simd>() -> f32 {
        S::HIGH
    }
    #[inline(always)]
    fn dots<S: Simd, const R: usize, const K: usize>(
        s: S,
        codes: &[u8],
        x: [&[i8]; R],
    ) -> [[S::F; 2]; R] {
        s.dots_u4::<R, K>(codes, x)
    }
}

impl Unpack for U8 {
    const ZERO: f32 = 128.0;
    #[inline(always)]
    fn high<S: Simd>() -> f32 {
        1.0
    }
    #[inline(always)]
    fn dots<S: Simd, const R: usize, const K: usize>(
        s: S,
        codes: &[u8],
        x: [&[i8]; R],
    ) -> [[S::F; 2]; R] {
        s.dots_u8::<R, K>(codes, x)
    }
}

impl Unpack for Iq4 {
    const ZERO: f32 = 128.0;
    #[inline(always)]
    fn high<S: Simd>() -> f32 {
        1.0
    }
    #[inline(always)]
    fn dots<S: Simd, const R: usize, const K: usize>(
        s: S,
        codes: &[u8],
        x: [&[i8]; R],
    ) -> [[S::F; 2]; R] {
        const TABLE: [u8; 16] = {
            let mut table = [0; 16];
            let mut i = 0;
            while i < 16 {
                table[i] = IQ4_TABLE[i].cast_unsigned() ^ 0x80;
                i += 1;
            }
            table
        };
        s.dots_table::<R, K>(codes, &TABLE, x)
    }
}

/// R rows times one tile.
#[inline(always)]
fn product<S: Simd, C: Unpack, const U: usize, const SYM: bool, const R: usize>(
    s: S,
    layout: &Layout,
    tile: &[u8],
    x: &[ActRow; R],
) -> [[S::F; 2]; R] {
    let zero = s.splat(0.0);
    let mut sums = [[zero; 2]; R];
    let units = ACT_GROUP / U;
    let span_bytes = layout.span_bytes();
    let (header, codes) = (layout.header_bytes(), layout.code_bytes(U));
    // Units of one span, and the place of the next unit: its span and the unit in it.
    let span_units = layout.span() / U;
    let (mut span, mut at) = (tile, 0);
    for g in 0..x[0].groups.len() {
        let mut t = [[zero; 2]; R];
        for u in 0..units {
            let [scale, bias] = params::<S, SYM>(s, layout, span, at * U / layout.group);
            let scale = [scale[0], s.mul(scale[1], s.splat(1.0 / C::high::<S>()))];
            let bytes = &span[header + at * codes..][..codes];
            for line in 0..codes / 64 {
                s.prefetch(bytes.as_ptr().wrapping_add(AHEAD + 64 * line));
            }
            let quants = std::array::from_fn(|r| &x[r].quants[g * ACT_GROUP + u * U..][..U]);
            let dots = C::dots::<S, R, U>(s, bytes, quants);
            for r in 0..R {
                let ones = s.splat(x[r].groups[g].sums[ActGroup::sum_index(units, u)]);
                for half in 0..2 {
                    let high = if half == 0 { 1.0 } else { C::high::<S>() };
                    let dot = if SYM {
                        s.fma(s.splat(-C::ZERO * high), ones, dots[r][half])
                    } else {
                        dots[r][half]
                    };
                    t[r][half] = if u == 0 {
                        s.mul(scale[half], dot)
                    } else {
                        s.fma(scale[half], dot, t[r][half])
                    };
                    if !SYM {
                        t[r][half] = s.fma(bias[half], ones, t[r][half]);
                    }
                }
            }
            at += 1;
            if at == span_units {
                at = 0;
                span = &span[span_bytes..];
            }
        }
        for r in 0..R {
            let scale = s.splat(x[r].groups[g].scale);
            for half in 0..2 {
                sums[r][half] = s.fma(scale, t[r][half], sums[r][half]);
            }
        }
    }
    sums
}

/// Scales and biases of both halves of the outputs for group `group` of a span.
#[inline(always)]
pub(super) fn params<S: Simd, const SYM: bool>(
    s: S,
    layout: &Layout,
    span: &[u8],
    group: usize,
) -> [[S::F; 2]; 2] {
    let zero = s.splat(0.0);
    let level_one = |at: usize| match layout.scale {
        ScaleDtype::F32 => {
            let x: &[f32] = bytemuck::cast_slice(&span[at..at + 4 * TILE]);
            [s.load(x), s.load(&x[LANES..])]
        }
        ScaleDtype::Bf16 => s.load_bf16_pairs(&span[at..]),
        ScaleDtype::F16 | ScaleDtype::TwoLevel => {
            [s.load_f16(&span[at..]), s.load_f16(&span[at + 32..])]
        }
    };
    let scale = level_one(0);
    let bias = if SYM { [zero; 2] } else { level_one(layout.scale_bytes()) };
    if layout.scale != ScaleDtype::TwoLevel {
        return [scale, bias];
    }
    let at = layout.sub_scales() + TILE * group;
    if SYM {
        let sub = [s.load_i8(&span[at..]), s.load_i8(&span[at + LANES..])];
        return [[s.mul(scale[0], sub[0]), s.mul(scale[1], sub[1])], bias];
    }
    let sub = [s.load_u8(&span[at..]), s.load_u8(&span[at + LANES..])];
    let at = at + TILE * layout.span_groups();
    let sub_bias = [s.load_u8(&span[at..]), s.load_u8(&span[at + LANES..])];
    let minus = |a, b| s.sub(zero, s.mul(a, b));
    [
        [s.mul(scale[0], sub[0]), s.mul(scale[1], sub[1])],
        [minus(bias[0], sub_bias[0]), minus(bias[1], sub_bias[1])],
    ]
}
