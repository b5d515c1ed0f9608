//! Integer products of quantised weights, and the split of all products over threads.
//!
//! Work is cut by bytes of weights, over all parts at once. A thread goes through its tiles in the
//! order of memory; up to [`Simd::DOT_ROWS`] rows share one reading and unpacking of a tile. With more
//! rows than that, a block of tiles that stays in the second-level cache meets all rows in turn. Where
//! the activations of these rows exceed the first-level cache, a few tiles meet one chunk of inputs
//! before the next. None of this changes the order in which one output's sum grows.

use std::marker::PhantomData;
use std::ops::Range;

use super::layout::{Layout, SUPER, TILE};
use super::{Linear, LinearPart, dense, exact};
use crate::act::ActRow;
use crate::simd::{Isa, Kernel, LANES, Simd};
use crate::{ACT_GROUP, ActDtype, ActGroup, Codes, Cpu, IQ4_TABLE, Mem, ScaleDtype};

/// Chunks for each thread: enough to even out a thread that was slow or late.
const CHUNKS: usize = 6;
/// Bytes of weights below which cutting finer costs more than it evens out.
const MIN_CHUNK: usize = 32 << 10;
/// Bytes of weights that stay in the second-level cache while many rows pass.
pub(super) const CACHED: usize = 1 << 20;
/// Bytes of activations that stay in the first-level cache while some tiles pass.
const ACT_CACHED: usize = 32 << 10;
/// Tiles whose sums are kept on the stack meanwhile.
const TILES: usize = 16;

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
    /// One function for each combination that [`Layout::supported`] lets through.
    fn run(self, tiles: Range<usize>) {
        let Layout { codes, symmetric, group, scale } = self.layout;
        macro_rules! choose {
            ($($codes:ident $symmetric:literal $unit:literal $scale:ident;)*) => {
                match (codes, symmetric, group.min(ACT_GROUP), scale) {
                    $((Codes::$codes, $symmetric, $unit, ScaleDtype::$scale) => {
                        self.rows::<$codes, $scale, $unit, $symmetric>(tiles);
                    })*
                    _ => unreachable!("{:?}, which `Layout::supported` refuses", self.layout),
                }
            };
        }
        choose! {
            U4 false 16 TwoLevel;
            U4 false 32 TwoLevel;
            U4 false 32 F16;
            U4 false 32 Bf16;
            U4 false 32 F32;
            U4 false 64 F16;
            U4 false 64 Bf16;
            U4 false 64 F32;
            U4 true 16 TwoLevel;
            U4 true 32 F16;
            U8 false 32 TwoLevel;
            U8 false 32 F16;
            U8 false 32 Bf16;
            U8 false 32 F32;
            U8 false 64 F16;
            U8 false 64 Bf16;
            U8 false 64 F32;
            U8 true 16 TwoLevel;
            U8 true 32 F16;
            Iq4 true 32 F16;
            Iq4 true 32 TwoLevel;
        }
    }

    /// All rows, in blocks. `U` is the unit (see the module), `SYM` whether there are no biases.
    fn rows<C: Unpack, L: Scales, const U: usize, const SYM: bool>(self, tiles: Range<usize>) {
        let most = self.isa.dot_rows();
        let cached = if self.op.rows <= most { tiles.len() } else { (CACHED / self.bytes).max(1) };
        for first in tiles.clone().step_by(cached) {
            let tiles = first..tiles.end.min(first + cached);
            for row in (0..self.op.rows).step_by(most) {
                let tiles = tiles.clone();
                match (self.op.rows - row).min(most) {
                    1 => self.isa.dispatch(Block::<C, L, U, SYM, 1>::new(self, tiles, row)),
                    2 => self.isa.dispatch(Block::<C, L, U, SYM, 2>::new(self, tiles, row)),
                    3 | 4 => self.isa.dispatch(Block::<C, L, U, SYM, 4>::new(self, tiles, row)),
                    _ => self.isa.dispatch(Block::<C, L, U, SYM, 8>::new(self, tiles, row)),
                }
            }
        }
    }
}

/// Up to R rows from `row` and some tiles.
struct Block<'a, C, L, const U: usize, const SYM: bool, const R: usize> {
    tiles: Tiles<'a>,
    range: Range<usize>,
    row: usize,
    kind: PhantomData<(C, L)>,
}

impl<'a, C, L, const U: usize, const SYM: bool, const R: usize> Block<'a, C, L, U, SYM, R> {
    fn new(tiles: Tiles<'a>, range: Range<usize>, row: usize) -> Self {
        Block { tiles, range, row, kind: PhantomData }
    }
}

impl<C: Unpack, L: Scales, const U: usize, const SYM: bool, const R: usize> Kernel
    for Block<'_, C, L, U, SYM, R>
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
        let x: [Row; R] = std::array::from_fn(|r| {
            let ActRow { quants, groups, .. } = op.x.row(mem, self.row + r.min(rows - 1));
            Row { quants: quants.as_ptr(), groups: groups.as_ptr() }
        });
        let weight = mem.get::<u8>(part.weight.buf);
        let chunk = chunk_groups(op.x.width, R);
        let mut kept = [[[s.splat(0.0); 2]; R]; TILES];
        let groups = op.x.width / ACT_GROUP;
        for first in self.range.clone().step_by(TILES) {
            let tiles = first..self.range.end.min(first + TILES);
            for start in (0..groups).step_by(chunk) {
                let groups = start..groups.min(start + chunk);
                for tile in tiles.clone() {
                    let data = &weight[tile * bytes..][..bytes];
                    let sums = &mut kept[tile - first];
                    if start == 0 {
                        *sums = [[s.splat(0.0); 2]; R];
                    }
                    // SAFETY: rows of an `Act` have `width` quants and a group for each 64 of them.
                    unsafe {
                        product::<S, C, L, U, SYM, R>(s, &layout, data, x, groups.clone(), sums);
                    }
                    if start + chunk >= op.x.width / ACT_GROUP {
                        for r in 0..rows {
                            store(s, part, mem, self.row + r, tile, sums[r]);
                        }
                    }
                }
            }
        }
    }
}

/// Groups of inputs to take before going on to the next tile: as many as keep the activations of
/// R rows in the first-level cache, in nearly equal chunks of whole spans.
fn chunk_groups(width: usize, rows: usize) -> usize {
    let most = ACT_CACHED / (rows * (ACT_GROUP + size_of::<ActGroup>()));
    let groups = width / ACT_GROUP;
    let chunks = groups.div_ceil(most.max(1));
    groups.div_ceil(chunks).next_multiple_of(SUPER / ACT_GROUP)
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
    /// # Safety
    /// That of [`Simd::dots_u4`] or its like.
    unsafe fn dots<S: Simd, const R: usize, const K: usize>(
        s: S,
        codes: *const u8,
        x: [*const i8; R],
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
    unsafe fn dots<S: Simd, const R: usize, const K: usize>(
        s: S,
        codes: *const u8,
        x: [*const i8; R],
    ) -> [[S::F; 2]; R] {
        // SAFETY: the caller's.
        unsafe { s.dots_u4::<R, K>(codes, x) }
    }
}

impl Unpack for U8 {
    const ZERO: f32 = 128.0;
    #[inline(always)]
    fn high<S: Simd>() -> f32 {
        1.0
    }
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const K: usize>(
        s: S,
        codes: *const u8,
        x: [*const i8; R],
    ) -> [[S::F; 2]; R] {
        // SAFETY: the caller's.
        unsafe { s.dots_u8::<R, K>(codes, x) }
    }
}

impl Unpack for Iq4 {
    const ZERO: f32 = 128.0;
    #[inline(always)]
    fn high<S: Simd>() -> f32 {
        1.0
    }
    #[inline(always)]
    unsafe fn dots<S: Simd, const R: usize, const K: usize>(
        s: S,
        codes: *const u8,
        x: [*const i8; R],
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
        // SAFETY: the caller's.
        unsafe { s.dots_table::<R, K>(codes, &TABLE, x) }
    }
}

/// The activations of one row.
#[derive(Clone, Copy)]
struct Row {
    quants: *const i8,
    groups: *const ActGroup,
}

/// Adds the products of R rows with one tile over `groups`, which begin with a span.
///
/// # Safety
/// The rows are that long.
#[inline(always)]
unsafe fn product<
    S: Simd,
    C: Unpack,
    L: Scales,
    const U: usize,
    const SYM: bool,
    const R: usize,
>(
    s: S,
    layout: &Layout,
    tile: &[u8],
    x: [Row; R],
    groups: Range<usize>,
    sums: &mut [[S::F; 2]; R],
) {
    let zero = s.splat(0.0);
    let (span_bytes, header) = (layout.span_bytes(), layout.header_bytes());
    let codes = layout.code_bytes(U);
    // Units of one span, and the place of the next unit: its span and the unit in it.
    let span_units = layout.span() / U;
    let spans = |groups: usize| (groups * ACT_GROUP).div_ceil(layout.span());
    assert!(spans(groups.end) * span_bytes <= tile.len(), "{groups:?} of {layout:?}");
    let (mut span, mut at) = (tile[spans(groups.start) * span_bytes..].as_ptr(), 0);
    let mut shared = [[zero; 2]; 2];
    let mut kept = *sums;
    for g in groups {
        let mut t = [[zero; 2]; R];
        for u in 0..ACT_GROUP / U {
            // SAFETY: the tile holds all units of all spans, checked above; rows are the caller's.
            let dots = unsafe {
                let codes = span.add(header + at * codes);
                let mut quants = [x[0].quants; R];
                for r in 0..R {
                    quants[r] = x[r].quants.add(g * ACT_GROUP + u * U);
                }
                C::dots::<S, R, U>(s, codes, quants)
            };
            // SAFETY: as above.
            let [scale, bias] = unsafe {
                if at == 0 {
                    shared = L::header::<S, SYM>(s, span);
                }
                L::group::<S, SYM>(s, layout, span, shared, at)
            };
            let scale = [scale[0], s.mul(scale[1], s.splat(1.0 / C::high::<S>()))];
            for r in 0..R {
                // SAFETY: the caller's.
                let group = unsafe { &*x[r].groups.add(g) };
                let ones = s.splat(group.sums[ActGroup::sum_index(ACT_GROUP / U, u)]);
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
                // SAFETY: at most one past the end of the tile.
                span = unsafe { span.add(span_bytes) };
            }
        }
        for r in 0..R {
            // SAFETY: the caller's.
            let scale = s.splat(unsafe { (*x[r].groups.add(g)).scale });
            for half in 0..2 {
                kept[r][half] = s.fma(scale, t[r][half], kept[r][half]);
            }
        }
    }
    *sums = kept;
}

/// How scales are read: at the start of a span what its units share, then what each unit needs.
pub(super) trait Scales {
    /// Level-one scales and biases of both halves of the outputs, from the header of a span.
    ///
    /// # Safety
    /// `span` points to the header of a span with these scales.
    unsafe fn header<S: Simd, const SYM: bool>(s: S, span: *const u8) -> [[S::F; 2]; 2];

    /// Scales and biases of group `group` of the span; for one level those of the header.
    ///
    /// # Safety
    /// `span` points to the header of a span of this layout, which has that group.
    #[inline(always)]
    unsafe fn group<S: Simd, const SYM: bool>(
        _: S,
        _: &Layout,
        _: *const u8,
        header: [[S::F; 2]; 2],
        _: usize,
    ) -> [[S::F; 2]; 2] {
        header
    }
}

struct F32;
struct F16;
struct Bf16;
struct TwoLevel;

/// `N` bytes.
///
/// # Safety
/// They are there.
#[inline(always)]
unsafe fn bytes<'a, const N: usize>(x: *const u8) -> &'a [u8; N] {
    // SAFETY: the caller's.
    unsafe { &*x.cast() }
}

macro_rules! one_level {
    ($name:ident, $size:literal, |$s:ident, $x:ident| $load:expr) => {
        impl Scales for $name {
            #[inline(always)]
            unsafe fn header<S: Simd, const SYM: bool>($s: S, span: *const u8) -> [[S::F; 2]; 2] {
                // SAFETY: the caller's.
                let $x = unsafe { bytes::<{ TILE * $size }>(span) };
                let scale = $load;
                if SYM {
                    return [scale, [$s.splat(0.0); 2]];
                }
                // SAFETY: the caller's.
                let $x = unsafe { bytes::<{ TILE * $size }>(span.add(TILE * $size)) };
                [scale, $load]
            }
        }
    };
}

one_level!(F16, 2, |s, x| [s.load_f16(x), s.load_f16(&x[2 * LANES..])]);
one_level!(Bf16, 2, |s, x| s.load_bf16_pairs(x));
one_level!(F32, 4, |s, x| [s.load_f32(x), s.load_f32(&x[4 * LANES..])]);

impl Scales for TwoLevel {
    #[inline(always)]
    unsafe fn header<S: Simd, const SYM: bool>(s: S, span: *const u8) -> [[S::F; 2]; 2] {
        // SAFETY: the caller's.
        let [scale, bias] = unsafe { F16::header::<S, SYM>(s, span) };
        // A group's bias is minus the product of this and a byte.
        let zero = s.splat(0.0);
        [scale, [s.sub(zero, bias[0]), s.sub(zero, bias[1])]]
    }

    #[inline(always)]
    unsafe fn group<S: Simd, const SYM: bool>(
        s: S,
        layout: &Layout,
        span: *const u8,
        [scale, bias]: [[S::F; 2]; 2],
        group: usize,
    ) -> [[S::F; 2]; 2] {
        // SAFETY: the caller's.
        let sub = unsafe { span.add(layout.sub_scales() + TILE * group) };
        // SAFETY: the caller's.
        let x = unsafe { bytes::<TILE>(sub) };
        if SYM {
            let sub = [s.load_i8(x), s.load_i8(&x[LANES..])];
            return [[s.mul(scale[0], sub[0]), s.mul(scale[1], sub[1])], bias];
        }
        let sub_scale = [s.load_u8(x), s.load_u8(&x[LANES..])];
        // SAFETY: the caller's.
        let x = unsafe { bytes::<TILE>(sub.add(TILE * layout.span_groups())) };
        let sub_bias = [s.load_u8(x), s.load_u8(&x[LANES..])];
        [
            [s.mul(scale[0], sub_scale[0]), s.mul(scale[1], sub_scale[1])],
            [s.mul(bias[0], sub_bias[0]), s.mul(bias[1], sub_bias[1])],
        ]
    }
}

/// Scales and biases of group `group` of a span, where speed does not matter.
#[inline(always)]
pub(super) fn params<S: Simd, const SYM: bool>(
    s: S,
    layout: &Layout,
    span: &[u8],
    group: usize,
) -> [[S::F; 2]; 2] {
    assert!(span.len() >= layout.header_bytes() && group < layout.span_groups());
    let at = span.as_ptr();
    // SAFETY: the header is there, and it has that group.
    unsafe {
        match layout.scale {
            ScaleDtype::F16 => F16::header::<S, SYM>(s, at),
            ScaleDtype::Bf16 => Bf16::header::<S, SYM>(s, at),
            ScaleDtype::F32 => F32::header::<S, SYM>(s, at),
            ScaleDtype::TwoLevel => {
                let header = TwoLevel::header::<S, SYM>(s, at);
                TwoLevel::group::<S, SYM>(s, layout, at, header, group)
            }
        }
    }
}
