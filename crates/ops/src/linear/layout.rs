//! The bytes of quantised weights.
//!
//! A matrix is cut into tiles of [`TILE`] outputs, each one contiguous stream in the order in which
//! a kernel reads it; n is padded to whole tiles with zeros. A tile is a sequence of *spans* of k,
//! each a header and then codes. Every part starts at a multiple of 64 bytes.
//!
//! | scale | span | header |
//! |---|---|---|
//! | `F16`, `F32` | one group | `scale[32]`, then `bias[32]` if affine |
//! | `Bf16` | one group | the same, in the order 0, 16, 1, 17, …, so that one vector of 32-bit words holds outputs 0..16 in its low halves and 16..32 in its high halves |
//! | `TwoLevel` | 256 inputs | f16 `d[32]`, if affine f16 `m[32]`, then `sc[256 / group][32]`, if affine `mn[256 / group][32]`, bytes: scale = d · sc and bias = −(m · mn); sc is signed if symmetric, else unsigned |
//!
//! Codes go four inputs at a time. For `U4` and `Iq4`, 64 bytes: byte `4·(o % 16) + k % 4` holds
//! output o < 16 in its low and output o + 16 in its high nibble. One integer product with the raw
//! bytes then gives `a + 16·b` for a pair of outputs, one with the low nibbles gives `a`, and no
//! shift is needed. For `U8`, 128 bytes: outputs 0..16, then 16..32, at `4·(o % 16) + k % 4`.

use crate::{Codes, Format, ScaleDtype, Weight};

/// Outputs of one tile.
pub const TILE: usize = 32;

/// Inputs under one f16 scale of [`ScaleDtype::TwoLevel`].
pub(crate) const SUPER: usize = 256;

/// Where things lie in a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) codes: Codes,
    pub(crate) symmetric: bool,
    pub(crate) group: usize,
    pub(crate) scale: ScaleDtype,
}

impl Layout {
    /// The layout of a quantised format; `None` for dense ones.
    pub(crate) fn of(format: Format) -> Option<Layout> {
        let (symmetric, codes, group, scale) = match format {
            Format::F32 | Format::F16 | Format::Bf16 => return None,
            Format::Affine { codes, group, scale } => (false, codes, group, scale),
            Format::Symmetric { codes, group, scale } => (true, codes, group, scale),
        };
        Some(Layout { codes, symmetric, group: usize::from(group), scale })
    }

    /// Whether kernels know this combination: those that some checkpoint format needs.
    pub(crate) fn supported(&self) -> bool {
        let two_level = self.scale == ScaleDtype::TwoLevel;
        let half = self.scale == ScaleDtype::F16;
        match (self.codes, self.symmetric, self.group) {
            (Codes::U4, _, 16) | (Codes::U8, true, 16) => two_level,
            (Codes::U4 | Codes::U8, false, 32) => true,
            (Codes::U4 | Codes::U8, true, 32) => half,
            (Codes::Iq4, true, 32) => half || two_level,
            (Codes::U4 | Codes::U8, false, 64 | 128) => !two_level,
            _ => false,
        }
    }

    /// Inputs of one span.
    pub(crate) fn span(&self) -> usize {
        if self.scale == ScaleDtype::TwoLevel { SUPER } else { self.group }
    }

    /// Scale vectors of one kind: 1 (scales) or 2 (scales and biases).
    pub(crate) fn kinds(&self) -> usize {
        if self.symmetric { 1 } else { 2 }
    }

    /// Bytes of one level-one scale for each output.
    pub(crate) fn scale_bytes(&self) -> usize {
        TILE * if self.scale == ScaleDtype::F32 { 4 } else { 2 }
    }

    /// Groups that share one header.
    pub(crate) fn span_groups(&self) -> usize {
        self.span() / self.group
    }

    /// Offset of the byte scales in a two-level header.
    pub(crate) fn sub_scales(&self) -> usize {
        self.kinds() * self.scale_bytes()
    }

    /// Bytes of a header.
    pub(crate) fn header_bytes(&self) -> usize {
        let sub = if self.scale == ScaleDtype::TwoLevel { TILE * self.span_groups() } else { 0 };
        self.kinds() * (self.scale_bytes() + sub)
    }

    /// Bytes of the codes of `inputs` inputs.
    pub(crate) fn code_bytes(&self, inputs: usize) -> usize {
        inputs * if self.codes == Codes::U8 { TILE } else { TILE / 2 }
    }

    /// Bytes of one span.
    pub(crate) fn span_bytes(&self) -> usize {
        self.header_bytes() + self.code_bytes(self.span())
    }

    /// Bytes of 64 inputs of 16 outputs with what of their headers they need, as `wide.cuh` has them in shared memory.
    pub(crate) fn cell_bytes(&self) -> usize {
        (64usize.div_ceil(self.span()) * self.header_bytes() + self.code_bytes(64)) / 2
    }

    /// Bytes of one tile, if `k` is whole spans and the number fits.
    pub(crate) fn tile_bytes(&self, k: usize) -> Option<usize> {
        if !self.supported() || k == 0 || !k.is_multiple_of(self.span()) {
            return None;
        }
        (k / self.span()).checked_mul(self.span_bytes())
    }

    /// What symmetric codes are relative to.
    pub(crate) fn zero(&self) -> i32 {
        if self.codes == Codes::U4 { 8 } else { 128 }
    }

    /// Offset in a tile of the code of output `o` (of the tile) at input `k`, and its shift.
    pub(crate) fn code_at(&self, o: usize, k: usize) -> (usize, u32) {
        let (span, k) = (k / self.span(), k % self.span());
        let base = span * self.span_bytes() + self.header_bytes() + self.code_bytes(k / 4 * 4);
        let byte = 4 * (o % 16) + k % 4;
        match self.codes {
            Codes::U8 => (base + 64 * (o / 16) + byte, 0),
            Codes::U4 | Codes::Iq4 => (base + byte, 4 * (o / 16) as u32),
        }
    }

    /// Offset, from the start of a vector of level-one scales, of the scale of output `o`.
    pub(crate) fn scale_at(&self, o: usize) -> usize {
        match self.scale {
            ScaleDtype::F32 => 4 * o,
            ScaleDtype::Bf16 => 4 * (o % 16) + 2 * (o / 16),
            ScaleDtype::F16 | ScaleDtype::TwoLevel => 2 * o,
        }
    }

    /// Scale and bias of output `o` (of the tile) and group `g`.
    pub(crate) fn params(&self, tile: &[u8], o: usize, g: usize) -> (f32, f32) {
        let span = &tile[g / self.span_groups() * self.span_bytes()..];
        let level_one = |kind: usize| {
            let at = &span[kind * self.scale_bytes() + self.scale_at(o)..];
            match self.scale {
                ScaleDtype::F32 => f32::from_le_bytes([at[0], at[1], at[2], at[3]]),
                ScaleDtype::Bf16 => half::bf16::from_le_bytes([at[0], at[1]]).to_f32(),
                ScaleDtype::F16 | ScaleDtype::TwoLevel => {
                    half::f16::from_le_bytes([at[0], at[1]]).to_f32()
                }
            }
        };
        let (scale, bias) = (level_one(0), if self.symmetric { 0.0 } else { level_one(1) });
        if self.scale != ScaleDtype::TwoLevel {
            return (scale, bias);
        }
        let row = TILE * (g % self.span_groups()) + o;
        let sub = span[self.sub_scales() + row];
        if self.symmetric {
            return (scale * f32::from(sub.cast_signed()), 0.0);
        }
        let sub_bias = span[self.sub_scales() + TILE * self.span_groups() + row];
        (scale * f32::from(sub), -(bias * f32::from(sub_bias)))
    }

    /// The unsigned code of output `o` (of the tile) at input `k`; table codes as value + 128.
    pub(crate) fn code(&self, tile: &[u8], o: usize, k: usize) -> u8 {
        let (at, shift) = self.code_at(o, k);
        match self.codes {
            Codes::U8 => tile[at],
            Codes::U4 => (tile[at] >> shift) & 15,
            Codes::Iq4 => {
                let index = usize::from((tile[at] >> shift) & 15);
                crate::IQ4_TABLE[index].cast_unsigned() ^ 0x80
            }
        }
    }

    /// The weight of output `o` (of the tile) at input `k`: product and sum rounded apart.
    pub(crate) fn weight(&self, tile: &[u8], o: usize, k: usize) -> f32 {
        let (scale, bias) = self.params(tile, o, k / self.group);
        let code = i32::from(self.code(tile, o, k));
        if self.symmetric {
            scale * (code - self.zero()) as f32
        } else {
            scale * code as f32 + bias
        }
    }
}

impl Format {
    /// Bytes of one dense element; `None` for quantised formats.
    pub(crate) fn element_bytes(self) -> Option<usize> {
        match self {
            Format::F32 => Some(4),
            Format::F16 | Format::Bf16 => Some(2),
            Format::Affine { .. } | Format::Symmetric { .. } => None,
        }
    }

    /// Bytes of the smallest part of a packed matrix with `k` inputs that can be made on its own:
    /// a row if dense, else a tile of [`TILE`] rows. `None` if k does not suit the format.
    pub fn piece_bytes(self, k: usize) -> Option<usize> {
        match Layout::of(self) {
            Some(layout) => layout.tile_bytes(k),
            None => self.element_bytes()?.checked_mul(k).filter(|&bytes| bytes > 0),
        }
    }

    /// Outputs of one piece.
    pub fn piece_rows(self) -> usize {
        if self.element_bytes().is_some() { 1 } else { TILE }
    }

    /// Bytes of a packed `[n, k]` matrix; `None` if k does not suit the format.
    pub fn packed_bytes(self, n: usize, k: usize) -> Option<usize> {
        n.div_ceil(self.piece_rows()).checked_mul(self.piece_bytes(k)?)
    }
}

impl Weight {
    /// Whether the format is one that kernels know and the buffer has its exact size.
    pub(crate) fn fits(&self) -> bool {
        self.n > 0 && self.format.packed_bytes(self.n, self.k) == Some(self.buf.bytes)
    }
}
