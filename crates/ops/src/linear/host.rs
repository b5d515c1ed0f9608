//! Integer products of quantised weights, and the split of all products over threads.
//!
//! Work is cut by bytes of weights, over all parts at once. A thread goes through its tiles in the
//! order of memory; up to [`Simd::DOT_ROWS`] rows share one reading and unpacking of a tile. With more
//! rows than that, a block of tiles that stays in the second-level cache meets all rows in turn.

use std::marker::PhantomData;
use std::ops::Range;

use super::layout::{Layout, TILE};
use super::{Linear, LinearPart, dense, exact};
use crate::act::ActRow;
use crate::simd::{Isa, Kernel, LANES, Simd};
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
        let mut base = 0;
        for part in op.parts() {
            // The pieces (tiles or rows) that begin in this chunk's share of all bytes.
            let size = part.weight.format.piece_bytes(part.weight.k).unwrap_or(1);
            let pieces = part.weight.buf.bytes / size;
            let piece = |at: usize| at.saturating_sub(base).div_ceil(size).min(pieces);
            let pieces = piece(chunk * bytes)..piece((chunk + 1) * bytes);
            base += part.weight.buf.bytes;
            if !pieces.is_empty() {
                run_pieces(op, mem, cpu.isa, part, pieces);
            }
        }
    });
}

fn run_pieces(op: &Linear, mem: &Mem, isa: Isa, part: &LinearPart, pieces: Range<usize>) {
    match Layout::of(part.weight.format) {
        None => isa.dispatch(dense::Outputs { op, mem, part, outputs: pieces }),
        Some(layout) if op.x.dtype == ActDtype::F32 => {
            isa.dispatch(exact::Tiles { op, mem, part, layout, tiles: pieces });
        }
        Some(layout) => {
            let bytes = layout.tile_bytes(part.weight.k).unwrap_or_default();
            Tiles { op, mem, isa, part, layout, bytes }.run(pieces);
        }
    }
}

/// A weight of quantised tiles.
#[derive(Clone, Copy)]
struct Tiles<'a> {
    op: &'a Linear,
    mem: &'a Mem,
    isa: Isa,
    part: &'a LinearPart,
    layout: Layout,
    /// Of one tile.
    bytes: usize,
}

impl Tiles<'_> {
    /// Each combination is a function of its own: together they would take minutes to compile.
    fn run(self, tiles: Range<usize>) {
        let unit = self.layout.group.min(ACT_GROUP);
        match (self.layout.codes, self.layout.symmetric, unit) {
            (Codes::U4, false, 16) => self.rows::<U4, 16, false>(tiles),
            (Codes::U4, false, 32) => self.rows::<U4, 32, false>(tiles),
            (Codes::U4, false, 64) => self.rows::<U4, 64, false>(tiles),
            (Codes::U4, true, 16) => self.rows::<U4, 16, true>(tiles),
            (Codes::U4, true, 32) => self.rows::<U4, 32, true>(tiles),
            (Codes::U8, false, 32) => self.rows::<U8, 32, false>(tiles),
            (Codes::U8, false, 64) => self.rows::<U8, 64, false>(tiles),
            (Codes::U8, true, 16) => self.rows::<U8, 16, true>(tiles),
            (Codes::U8, true, 32) => self.rows::<U8, 32, true>(tiles),
            (Codes::Iq4, true, 32) => self.rows::<Iq4, 32, true>(tiles),
            _ => unreachable!("{:?}, which `Layout::supported` refuses", self.layout),
        }
    }

    /// All rows, in blocks. `U` is the unit (see the module), `SYM` whether there are no biases.
    fn rows<C: Unpack, const U: usize, const SYM: bool>(self, tiles: Range<usize>) {
        let most = self.isa.dot_rows();
        let cached = if self.op.rows <= most { tiles.len() } else { (CACHED / self.bytes).max(1) };
        for first in tiles.clone().step_by(cached) {
            let tiles = first..tiles.end.min(first + cached);
            for row in (0..self.op.rows).step_by(most) {
                let tiles = tiles.clone();
                match (self.op.rows - row).min(most) {
                    1 => self.isa.dispatch(Block::<C, U, SYM, 1>::new(self, tiles, row)),
                    2 => self.isa.dispatch(Block::<C, U, SYM, 2>::new(self, tiles, row)),
                    3 | 4 => self.isa.dispatch(Block::<C, U, SYM, 4>::new(self, tiles, row)),
                    5 | 6 => self.isa.dispatch(Block::<C, U, SYM, 6>::new(self, tiles, row)),
                    _ => self.isa.dispatch(Block::<C, U, SYM, 8>::new(self, tiles, row)),
                }
            }
        }
    }
}

/// Up to R rows from `row` and some tiles.
struct Block<'a, C, const U: usize, const SYM: bool, const R: usize> {
    tiles: Tiles<'a>,
    range: Range<usize>,
    row: usize,
    codes: PhantomData<C>,
}

impl<'a, C, const U: usize, const SYM: bool, const R: usize> Block<'a, C, U, SYM, R> {
    fn new(tiles: Tiles<'a>, range: Range<usize>, row: usize) -> Self {
        Block { tiles, range, row, codes: PhantomData }
    }
}

impl<C: Unpack, const U: usize, const SYM: bool, const R: usize> Kernel
    for Block<'_, C, U, SYM, R>
{
    type Output = ();

    /// Rows past the end are copies of the last, not stored.
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if R > S::DOT_ROWS {
            // `Isa::dot_rows` says so; spares the compiler kernels that never run.
            return;
        }
        let Tiles { op, mem, part, layout, bytes, .. } = self.tiles;
        let rows = R.min(op.rows - self.row);
        let x = std::array::from_fn(|r| op.x.row(mem, self.row + r.min(rows - 1)));
        let weight = mem.get::<u8>(part.weight.buf);
        for tile in self.range {
            let bytes = &weight[tile * bytes..][..bytes];
            let sums = product::<S, C, U, SYM, R>(s, &layout, bytes, &x);
            for r in 0..rows {
                store(s, part, mem, self.row + r, tile, sums[r]);
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
            let mut quants: [&[i8]; R] = [&[]; R];
            for r in 0..R {
                quants[r] = &x[r].quants[g * ACT_GROUP + u * U..][..U];
            }
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
    let scale = level_one(s, layout, span);
    let bias = if SYM { [zero; 2] } else { level_one(s, layout, &span[layout.scale_bytes()..]) };
    if layout.scale != ScaleDtype::TwoLevel {
        return [scale, bias];
    }
    let sub = &span[layout.sub_scales() + TILE * group..];
    if SYM {
        let sub = [s.load_i8(sub), s.load_i8(&sub[LANES..])];
        return [[s.mul(scale[0], sub[0]), s.mul(scale[1], sub[1])], bias];
    }
    let sub_bias = &sub[TILE * layout.span_groups()..];
    let sub = [s.load_u8(sub), s.load_u8(&sub[LANES..])];
    let sub_bias = [s.load_u8(sub_bias), s.load_u8(&sub_bias[LANES..])];
    let bias = [s.mul(bias[0], sub_bias[0]), s.mul(bias[1], sub_bias[1])];
    [
        [s.mul(scale[0], sub[0]), s.mul(scale[1], sub[1])],
        [s.sub(zero, bias[0]), s.sub(zero, bias[1])],
    ]
}

/// A vector of level-one scales, for both halves of the outputs.
#[inline(always)]
fn level_one<S: Simd>(s: S, layout: &Layout, x: &[u8]) -> [S::F; 2] {
    match layout.scale {
        ScaleDtype::F32 => {
            let x: &[f32] = bytemuck::cast_slice(&x[..4 * TILE]);
            [s.load(x), s.load(&x[LANES..])]
        }
        ScaleDtype::Bf16 => s.load_bf16_pairs(x),
        ScaleDtype::F16 | ScaleDtype::TwoLevel => [s.load_f16(x), s.load_f16(&x[2 * LANES..])],
    }
}
