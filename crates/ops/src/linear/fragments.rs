//! The bytes of quantised weights for matrix instructions.
//!
//! The pieces of [`super::layout`] with their bytes in another order: a tile of 32 outputs is two
//! half tiles of 16 one after the other, and a half tile is the tile's spans of k, each a header
//! and then codes. So [`Layout::tile_bytes`] holds, and a half tile's bytes of any range of spans
//! are contiguous.
//!
//! A lane of a warp is called `4 g + t` (g < 8, t < 4), as in the fragments of `mma.m16n8k16`: it
//! needs outputs g and g + 8 together. Outputs of a header go in the order 0, 8, 1, 9, …
//!
//! | scale | header |
//! |---|---|
//! | `F16`, `Bf16`, `F32` | for each output its scale and, if affine, its bias |
//! | `TwoLevel` | for each output f16 d and, if affine, m; then for each group and output byte sc and, if affine, mn |
//!
//! Codes of a span come in units of 64 inputs (or the span, if that is 32), a unit in steps of 16
//! inputs. In a step, lane 4 g + t has the inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of outputs g and
//! g + 8, called `a0..a3` and `b0..b3`:
//!
//! | codes | bytes, each from its high half to its low |
//! |---|---|
//! | `U4`, `Iq4` | `a2 a0`, `b2 b0`, `a3 a1`, `b3 b1` |
//! | `U8` | `a0`, `b0`, `a1`, `b1`, `a2`, `b2`, `a3`, `b3` |
//!
//! so that masks and one shift of a word give pairs of inputs in its two halves. The steps of a
//! lane are cut into chunks of at most 16 bytes: first the first chunk of each lane, then the second.

use super::layout::{Layout, TILE};
use super::pack::Span;
use crate::{Codes, ScaleDtype};

/// Outputs of a half tile.
pub(crate) const HALF: usize = TILE / 2;

/// Inputs of one unit of codes.
fn unit(layout: &Layout) -> usize {
    layout.span().min(64)
}

/// Where an output's scales lie in a half tile's list of 16.
fn entry(o: usize) -> usize {
    o % 8 * 2 + o / 8
}

/// Where, in a half tile's span, the codes of step `s` (inputs 16 s and on) of lane 0 lie, and the bytes
/// from lane to lane.
fn step_at(layout: &Layout, s: usize) -> (usize, usize) {
    let (unit, step_bytes) = (unit(layout), if layout.codes == Codes::U8 { 8 } else { 4 });
    let chunk = (unit / 16 * step_bytes).min(16);
    let of_lane = s % (unit / 16) * step_bytes;
    let at = 16 * s / unit * layout.code_bytes(unit) / 2 + of_lane / chunk * (32 * chunk);
    (layout.header_bytes() / 2 + at + of_lane % chunk, chunk)
}

/// The span `index` of the half tile that holds output `o` of a tile.
fn span_at(layout: &Layout, tile_bytes: usize, o: usize, index: usize) -> usize {
    o / HALF * (tile_bytes / 2) + index * (layout.span_bytes() / 2)
}

/// Writes output `o`'s share of a tile's span `index`.
pub(super) fn write_span(layout: &Layout, tile: &mut [u8], o: usize, index: usize, span: &Span) {
    let at = span_at(layout, tile.len(), o, index);
    let bytes = &mut tile[at..][..layout.span_bytes() / 2];
    let (o, kinds) = (o % HALF, layout.kinds());
    let element = layout.scale_bytes() / TILE;
    for (kind, bits) in [span.scale, span.bias][..kinds].iter().enumerate() {
        let at = (entry(o) * kinds + kind) * element;
        bytes[at..][..element].copy_from_slice(&bits.to_le_bytes()[..element]);
    }
    if layout.scale == ScaleDtype::TwoLevel {
        let sub = HALF * kinds * element;
        for g in 0..layout.span_groups() {
            for (kind, bytes_of) in [&span.sub_scales, &span.sub_biases][..kinds].iter().enumerate()
            {
                bytes[sub + (g * HALF + entry(o)) * kinds + kind] = bytes_of[g];
            }
        }
    }
    for (s, codes) in span.codes[..layout.span()].as_chunks::<16>().0.iter().enumerate() {
        let (at, stride) = step_at(layout, s);
        for t in 0..4 {
            // The four inputs of lane 4 (o % 8) + t.
            let [i0, i1, i2, i3] = [0, 1, 8, 9].map(|i| codes[2 * t + i]);
            let to = &mut bytes[at + (4 * (o % 8) + t) * stride + o / 8..];
            if layout.codes == Codes::U8 {
                (to[0], to[2], to[4], to[6]) = (i0, i1, i2, i3);
            } else {
                (to[0], to[2]) = (i0 | i2 << 4, i1 | i3 << 4);
            }
        }
    }
}

/// The weight of output `o` (of the tile) at input `k`: product and sum rounded apart.
#[cfg(test)]
pub(super) fn weight(layout: &Layout, tile: &[u8], o: usize, k: usize) -> f32 {
    let bytes = &tile[span_at(layout, tile.len(), o, k / layout.span())..];
    let (o, i, kinds) = (o % HALF, k % layout.span(), layout.kinds());
    let element = layout.scale_bytes() / TILE;
    let level_one = |kind: usize| {
        let at = &bytes[(entry(o) * kinds + kind) * element..];
        match layout.scale {
            ScaleDtype::F32 => f32::from_le_bytes([at[0], at[1], at[2], at[3]]),
            ScaleDtype::Bf16 => half::bf16::from_le_bytes([at[0], at[1]]).to_f32(),
            ScaleDtype::F16 | ScaleDtype::TwoLevel => {
                half::f16::from_le_bytes([at[0], at[1]]).to_f32()
            }
        }
    };
    let (mut scale, mut bias) = (level_one(0), if kinds == 2 { level_one(1) } else { 0.0 });
    if layout.scale == ScaleDtype::TwoLevel {
        let sub = HALF * kinds * element + (i / layout.group * HALF + entry(o)) * kinds;
        if layout.symmetric {
            scale *= f32::from(bytes[sub].cast_signed());
        } else {
            scale *= f32::from(bytes[sub]);
            bias = -(bias * f32::from(bytes[sub + 1]));
        }
    }
    let (at, stride) = step_at(layout, i / 16);
    let (quad, i4) = (i % 8 / 2, i % 16 / 8 * 2 + i % 2);
    let at = at + (4 * (o % 8) + quad) * stride + o / 8;
    let (at, shift) = match layout.codes {
        Codes::U8 => (at + 2 * i4, 0),
        Codes::U4 | Codes::Iq4 => (at + i4 % 2 * 2, i4 / 2 * 4),
    };
    let code = match layout.codes {
        Codes::U8 => i32::from(bytes[at]),
        Codes::U4 => i32::from(bytes[at] >> shift & 15),
        Codes::Iq4 => i32::from(crate::IQ4_TABLE[usize::from(bytes[at] >> shift & 15)]) + 128,
    };
    if layout.symmetric {
        scale * (code - layout.zero()) as f32
    } else {
        scale * code as f32 + bias
    }
}
