//! Quantised weights with f32 activations.

use std::ops::Range;

use super::host::{params, store};
use super::layout::{Layout, TILE};
use super::{Linear, LinearPart};
use crate::simd::{Kernel, Simd};
use crate::{Codes, IQ4_TABLE, Mem};

/// Rows that share one dequantised tile step.
const ROWS: usize = 4;

/// Some tiles of one weight, all rows.
pub(super) struct Tiles<'a> {
    pub(super) op: &'a Linear,
    pub(super) mem: &'a Mem,
    pub(super) part: &'a LinearPart,
    pub(super) layout: Layout,
    pub(super) tiles: Range<usize>,
}

impl Kernel for Tiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Tiles { op, mem, part, layout, tiles } = self;
        let Some(bytes) = layout.tile_bytes(op.x.width) else { return };
        let weight = mem.get::<u8>(part.weight.buf);
        for tile in tiles {
            let data = &weight[tile * bytes..][..bytes];
            for row in (0..op.rows).step_by(ROWS) {
                let rows = ROWS.min(op.rows - row);
                let x = std::array::from_fn(|r| op.x.row(mem, row + r.min(rows - 1)).x);
                let sums = if layout.symmetric {
                    product::<S, true>(s, &layout, data, x)
                } else {
                    product::<S, false>(s, &layout, data, x)
                };
                for r in 0..rows {
                    store(s, part, mem, row + r, tile, sums[r]);
                }
            }
        }
    }
}

/// Rows times one tile, in ascending order of inputs.
#[inline(always)]
fn product<S: Simd, const SYM: bool>(
    s: S,
    layout: &Layout,
    tile: &[u8],
    x: [&[f32]; ROWS],
) -> [[S::F; 2]; ROWS] {
    let mut sums = [[s.splat(0.0); 2]; ROWS];
    let zero = s.splat(layout.zero() as f32);
    let step = layout.code_bytes(4);
    for (index, span) in tile.chunks_exact(layout.span_bytes()).enumerate() {
        let codes = &span[layout.header_bytes()..];
        for group in 0..layout.span_groups() {
            let [scale, bias] = params::<S, SYM>(s, layout, span, group);
            for k in 0..layout.group {
                let input = group * layout.group + k;
                let four = &codes[input / 4 * step..][..step];
                for half in 0..2 {
                    let code = code(s, layout.codes, four, input % 4, half);
                    let weight = if SYM {
                        s.mul(scale[half], s.sub(code, zero))
                    } else {
                        s.add(s.mul(scale[half], code), bias[half])
                    };
                    for r in 0..ROWS {
                        let x = s.splat(x[r][index * layout.span() + input]);
                        sums[r][half] = s.fma(x, weight, sums[r][half]);
                    }
                }
            }
        }
    }
    sums
}

/// Codes of 16 outputs at input `j` of four.
#[inline(always)]
fn code<S: Simd>(s: S, codes: Codes, four: &[u8], j: usize, half: usize) -> S::F {
    let shift = 8 * j as u32;
    match codes {
        Codes::U4 => s.load_bits(four, shift + 4 * half as u32, 15),
        Codes::U8 => s.load_bits(&four[64 * half..], shift, 255),
        Codes::Iq4 => {
            let mut values = [0.0; TILE / 2];
            for (lane, value) in values.iter_mut().enumerate() {
                let index = (four[4 * lane + j] >> (4 * half)) & 15;
                *value = f32::from(IQ4_TABLE[usize::from(index)]) + 128.0;
            }
            s.load(&values)
        }
    }
}
