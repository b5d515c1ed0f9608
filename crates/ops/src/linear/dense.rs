//! Unquantised weights with f32 activations.

use std::ops::Range;

use super::{Linear, LinearPart};
use crate::simd::{Kernel, LANES, Simd};
use crate::{Format, Mem};

/// Outputs and rows of one block: enough independent sums to hide the latency of a multiply-add.
const OUTPUTS: usize = 4;
const ROWS: usize = 4;

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
        for output in outputs.clone().step_by(OUTPUTS) {
            let count = OUTPUTS.min(outputs.end - output);
            for row in (0..op.rows).step_by(ROWS) {
                match op.rows - row {
                    1 => block::<S, E, 1>(s, op, mem, part, output, count, row),
                    2 => block::<S, E, 2>(s, op, mem, part, output, count, row),
                    _ => block::<S, E, ROWS>(s, op, mem, part, output, count, row),
                }
            }
        }
    }
}

/// Up to `R` rows and [`OUTPUTS`] outputs; those past the end are copies of the last, not stored.
#[inline(always)]
fn block<S: Simd, E: Element, const R: usize>(
    s: S,
    op: &Linear,
    mem: &Mem,
    part: &LinearPart,
    output: usize,
    outputs: usize,
    row: usize,
) {
    let (n, k) = (part.weight.n, part.weight.k);
    let rows = R.min(op.rows - row);
    let weight = mem.get::<E::Word>(part.weight.buf);
    let w: [&[E::Word]; OUTPUTS] =
        std::array::from_fn(|o| &weight[(output + o.min(outputs - 1)) * k..][..k]);
    let x: [&[f32]; R] = std::array::from_fn(|r| op.x.row(mem, row + r.min(rows - 1)).x);
    let mut sums = [[s.splat(0.0); OUTPUTS]; R];
    let whole = k / LANES * LANES;
    for i in (0..whole).step_by(LANES) {
        let mut v = [s.splat(0.0); OUTPUTS];
        for o in 0..OUTPUTS {
            v[o] = E::load(s, &w[o][i..]);
        }
        for r in 0..R {
            let x = s.load(&x[r][i..]);
            for o in 0..OUTPUTS {
                sums[r][o] = s.fma(x, v[o], sums[r][o]);
            }
        }
    }
    if whole < k {
        let mut v = [s.splat(0.0); OUTPUTS];
        for o in 0..OUTPUTS {
            let mut padded = [bytemuck::Zeroable::zeroed(); LANES];
            padded[..k - whole].copy_from_slice(&w[o][whole..]);
            v[o] = E::load(s, &padded);
        }
        for r in 0..R {
            let mut padded = [0.0; LANES];
            padded[..k - whole].copy_from_slice(&x[r][whole..]);
            let x = s.load(&padded);
            for o in 0..OUTPUTS {
                sums[r][o] = s.fma(x, v[o], sums[r][o]);
            }
        }
    }
    for r in 0..rows {
        let out = part.out.slice(4 * ((row + r) * n + output), 4 * outputs);
        for (out, &sums) in mem.get_mut::<f32>(out).iter_mut().zip(&sums[r]) {
            let sum = s.sum(sums);
            *out = if part.add { *out + sum } else { sum };
        }
    }
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
