//! Unquantised weights with f32 activations.

use std::ops::Range;

use super::host::CACHED;
use super::{Linear, LinearPart};
use crate::simd::{Kernel, LANES, Simd};
use crate::{Format, Mem};

/// Some outputs of one weight, all rows.
pub(super) struct Outputs<'a> {
    pub(super) op: &'a Linear,
    pub(super) mem: &'a Mem,
    pub(super) part: &'a LinearPart,
    pub(super) outputs: Range<usize>,
}

impl Kernel for Outputs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.part.weight.format {
            Format::F16 => self.blocks::<S, F16>(s),
            Format::Bf16 => self.blocks::<S, Bf16>(s),
            _ => self.blocks::<S, F32>(s),
        }
    }
}

impl Outputs<'_> {
    #[inline(always)]
    fn blocks<S: Simd, E: Element>(self, s: S) {
        let Outputs { op, mem, part, outputs } = self;
        // As many outputs at a time as stay cached while all rows pass.
        let most = (CACHED / (part.weight.k * size_of::<E::Word>())).max(1).next_multiple_of(8);
        for first in outputs.clone().step_by(most) {
            let cached = first..outputs.end.min(first + most);
            let mut row = 0;
            while row < op.rows {
                // Enough independent sums to hide the latency of a multiply-add.
                row += match op.rows - row {
                    1 => block::<S, E, 1, 8>(s, op, mem, part, cached.clone(), row),
                    2 | 3 => block::<S, E, 2, 8>(s, op, mem, part, cached.clone(), row),
                    _ => block::<S, E, 4, 4>(s, op, mem, part, cached.clone(), row),
                };
            }
        }
    }
}

/// `R` rows and all outputs, `N` at a time; those past the end are copies of the last, not stored.
/// Returns `R`.
#[inline(always)]
fn block<S: Simd, E: Element, const R: usize, const N: usize>(
    s: S,
    op: &Linear,
    mem: &Mem,
    part: &LinearPart,
    outputs: Range<usize>,
    row: usize,
) -> usize {
    let (n, k) = (part.weight.n, part.weight.k);
    let weight = mem.get::<E::Word>(part.weight.buf);
    let x: [&[f32]; R] = std::array::from_fn(|r| op.x.row(mem, row + r).x);
    for output in outputs.clone().step_by(N) {
        let count = N.min(outputs.end - output);
        let w: [&[E::Word]; N] =
            std::array::from_fn(|o| &weight[(output + o.min(count - 1)) * k..][..k]);
        let sums = product::<S, E, R, N>(s, x, w);
        for r in 0..R {
            let out = part.out.slice(4 * ((row + r) * n + output), 4 * count);
            for (out, &sums) in mem.get_mut::<f32>(out).iter_mut().zip(&sums[r]) {
                let sum = s.sum(sums);
                *out = if part.add { *out + sum } else { sum };
            }
        }
    }
    R
}

/// Products of rows and outputs of the same length, in 16 lanes.
#[inline(always)]
fn product<S: Simd, E: Element, const R: usize, const N: usize>(
    s: S,
    x: [&[f32]; R],
    w: [&[E::Word]; N],
) -> [[S::F; N]; R] {
    let k = x[0].len();
    let x = x.map(|x| &x[..k]);
    let w = w.map(|w| &w[..k]);
    let mut sums = [[s.splat(0.0); N]; R];
    let whole = k / LANES * LANES;
    for i in (0..whole).step_by(LANES) {
        let mut v = [s.splat(0.0); N];
        for o in 0..N {
            // SAFETY: `i + LANES <= whole`, and all slices are at least that long.
            v[o] = E::load(s, unsafe { w[o].get_unchecked(i..i + LANES) });
        }
        for r in 0..R {
            // SAFETY: as above.
            let x = s.load(unsafe { x[r].get_unchecked(i..i + LANES) });
            for o in 0..N {
                sums[r][o] = s.fma(x, v[o], sums[r][o]);
            }
        }
    }
    if whole < k {
        let mut v = [s.splat(0.0); N];
        for o in 0..N {
            let mut padded = [bytemuck::Zeroable::zeroed(); LANES];
            padded[..k - whole].copy_from_slice(&w[o][whole..]);
            v[o] = E::load(s, &padded);
        }
        for r in 0..R {
            let mut padded = [0.0; LANES];
            padded[..k - whole].copy_from_slice(&x[r][whole..]);
            let x = s.load(&padded);
            for o in 0..N {
                sums[r][o] = s.fma(x, v[o], sums[r][o]);
            }
        }
    }
    sums
}

/// A dense element type.
trait Element {
    type Word: bytemuck::Pod;
    /// 16 elements.
    fn load<S: Simd>(s: S, x: &[Self::Word]) -> S::F;
}

struct F32;
struct F16;
struct Bf16;

impl Element for F32 {
    type Word = f32;
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[f32]) -> S::F {
        s.load(x)
    }
}

impl Element for F16 {
    type Word = u16;
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[u16]) -> S::F {
        s.load_f16(bytemuck::cast_slice(x))
    }
}

impl Element for Bf16 {
    type Word = u16;
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[u16]) -> S::F {
        s.load_bf16(x)
    }
}
