//! From the bytes of a checkpoint to the bytes that kernels read ([`super::layout`],
//! [`super::fragments`]).
//!
//! Nothing is requantised: the packed matrix holds exactly the checkpoint's weights, but for
//! f32 and bf16 scales below 2⁻¹⁰⁰, which become 0. (Such a scale contributes nothing, and
//! kernels may then divide scales by small powers of two without meeting subnormal numbers.)

use super::fragments;
use super::ggml::{GgmlType, read_block};
use super::layout::{Layout, SUPER, TILE};
use crate::{Codes, Format, ScaleDtype, TileOrder};

/// Storage of an unquantised matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DenseDtype {
    /// 32-bit IEEE.
    F32,
    /// 16-bit IEEE.
    F16,
    /// 16-bit brain float.
    Bf16,
}

/// A matrix `[n, k]` as a checkpoint stores it, row by row, little endian.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Plain elements.
    Dense {
        /// Element type.
        dtype: DenseDtype,
        /// `[n, k]`.
        data: &'a [u8],
    },
    /// MLX affine quantisation: `w = scale · code + bias`.
    Mlx {
        /// Bits of one code: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Inputs of one group: 32, 64 or 128.
        group: usize,
        /// Storage of scales and biases; not two-level.
        scale: ScaleDtype,
        /// `[n, k · bits / 8]`: one bit stream a row, least significant bit first.
        codes: &'a [u8],
        /// `[n, k / group]`.
        scales: &'a [u8],
        /// `[n, k / group]`.
        biases: &'a [u8],
    },
    /// GGML blocks.
    Ggml {
        /// Block type.
        ty: GgmlType,
        /// `[n, k / block]` blocks.
        data: &'a [u8],
    },
}

/// A checkpoint matrix that can't be packed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// A quantisation that no format covers.
    #[error("{what} {found} (supported: {supported})")]
    Unsupported {
        /// The quantity.
        what: &'static str,
        /// Its value.
        found: usize,
        /// What would do.
        supported: &'static str,
    },
    /// k is not whole groups or blocks.
    #[error("{k} inputs are not a multiple of {unit}")]
    Inputs {
        /// Inputs.
        k: usize,
        /// What they must be a multiple of.
        unit: usize,
    },
    /// A tensor of the wrong size.
    #[error("{what} of a [{n}, {k}] matrix: expected {expected} bytes, found {found}")]
    Size {
        /// Which tensor.
        what: &'static str,
        /// Outputs.
        n: usize,
        /// Inputs.
        k: usize,
        /// Bytes expected.
        expected: usize,
        /// Bytes found.
        found: usize,
    },
    /// Not whole pieces of the packed matrix.
    #[error("bytes {offset}..{offset}+{bytes} are not pieces of a matrix of {total} bytes")]
    Piece {
        /// First byte.
        offset: usize,
        /// Bytes asked for.
        bytes: usize,
        /// Bytes of the packed matrix.
        total: usize,
    },
}

/// What one row holds of one span. Which fields count depends on the layout.
pub(super) struct Span {
    /// Codes as the layout stores them.
    pub(super) codes: [u8; SUPER],
    /// Bits of the level-one scale.
    pub(super) scale: u32,
    /// Bits of the level-one bias.
    pub(super) bias: u32,
    pub(super) sub_scales: [u8; 16],
    pub(super) sub_biases: [u8; 16],
}

impl Span {
    fn new() -> Span {
        Span { codes: [0; SUPER], scale: 0, bias: 0, sub_scales: [0; 16], sub_biases: [0; 16] }
    }
}

impl Source<'_> {
    /// The device format that represents this matrix exactly.
    pub fn format(&self) -> Result<Format, PackError> {
        match *self {
            Source::Dense { dtype: DenseDtype::F32, .. } => Ok(Format::F32),
            Source::Dense { dtype: DenseDtype::F16, .. } => Ok(Format::F16),
            Source::Dense { dtype: DenseDtype::Bf16, .. } => Ok(Format::Bf16),
            Source::Ggml { ty, .. } => Ok(ty.format()),
            Source::Mlx { bits, group, scale, .. } => {
                let unsupported =
                    |what, found, supported| Err(PackError::Unsupported { what, found, supported });
                let codes = match bits {
                    2..=4 => Codes::U4,
                    5 | 6 | 8 => Codes::U8,
                    _ => return unsupported("bits", usize::from(bits), "2, 3, 4, 5, 6, 8"),
                };
                if !matches!(group, 32 | 64 | 128) {
                    return unsupported("group size", group, "32, 64, 128");
                }
                if scale == ScaleDtype::TwoLevel {
                    return unsupported("scale levels", 2, "1");
                }
                Ok(Format::Affine { codes, group: group as u16, scale })
            }
        }
    }

    /// Checks the tensors against the shape and returns the format.
    pub fn check(&self, n: usize, k: usize) -> Result<Format, PackError> {
        let format = self.format()?;
        let unit = match *self {
            Source::Dense { .. } => 1,
            Source::Mlx { group, .. } => group,
            Source::Ggml { ty, .. } => ty.block(),
        };
        if k == 0 || !k.is_multiple_of(unit) {
            return Err(PackError::Inputs { k, unit });
        }
        // Sizes that overflow can't be found in memory either.
        let size = |what, row: Option<usize>, found| {
            let expected = row.and_then(|row| row.checked_mul(n)).unwrap_or(usize::MAX);
            let wrong = PackError::Size { what, n, k, expected, found };
            if expected == found { Ok(()) } else { Err(wrong) }
        };
        match *self {
            Source::Dense { data, .. } => size("data", format.piece_bytes(k), data.len())?,
            Source::Ggml { ty, data } => {
                size("data", (k / unit).checked_mul(ty.block_bytes()), data.len())?;
            }
            Source::Mlx { bits, group, scale, codes, scales, biases } => {
                let bytes = k.checked_mul(usize::from(bits)).map(|b| b / 8);
                size("codes", bytes, codes.len())?;
                let element = if scale == ScaleDtype::F32 { 4 } else { 2 };
                let params = (k / group).checked_mul(element);
                size("scales", params, scales.len())?;
                size("biases", params, biases.len())?;
            }
        }
        Ok(format)
    }

    /// Writes bytes `[offset, offset + out.len())` of the packed matrix: whole pieces
    /// ([`Format::piece_bytes`]). A piece depends on its own rows only, so pieces can be made in
    /// parallel.
    pub fn pack_piece(
        &self,
        order: TileOrder,
        (n, k): (usize, usize),
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), PackError> {
        let format = self.check(n, k)?;
        let whole = format.piece_bytes(k).zip(format.packed_bytes(n, k));
        let (piece, total) = whole.ok_or(PackError::Inputs { k, unit: SUPER })?;
        let inside = offset.checked_add(out.len()).is_some_and(|end| end <= total);
        if !inside || !offset.is_multiple_of(piece) || !out.len().is_multiple_of(piece) {
            return Err(PackError::Piece { offset, bytes: out.len(), total });
        }
        let (Some(layout), false) = (Layout::of(format), self.dense().is_some()) else {
            if let Some(data) = self.dense() {
                out.copy_from_slice(&data[offset..][..out.len()]);
            }
            return Ok(());
        };
        let mut span = Span::new();
        for (i, tile) in out.chunks_exact_mut(piece).enumerate() {
            tile.fill(0);
            let first = (offset / piece + i) * TILE;
            for row in first..n.min(first + TILE) {
                for index in 0..k / layout.span() {
                    self.read_span(k, row, index, &mut span);
                    match order {
                        TileOrder::Vectors => write_span(&layout, tile, row - first, index, &span),
                        TileOrder::Fragments => {
                            fragments::write_span(&layout, tile, row - first, index, &span);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// One row of a checked matrix in f32; the product with a scale and the sum with a bias are
    /// rounded apart.
    pub fn dequantize_row(&self, n: usize, k: usize, row: usize) -> Result<Vec<f32>, PackError> {
        let format = self.check(n, k)?;
        if row >= n {
            return Err(PackError::Unsupported { what: "row", found: row, supported: "below n" });
        }
        let Some(layout) = Layout::of(format) else {
            let data = self.dense().unwrap_or_default();
            let bytes = &data[row * (data.len() / n)..][..data.len() / n];
            return Ok(dense_row(format, bytes));
        };
        let mut span = Span::new();
        let mut out = Vec::with_capacity(k);
        for index in 0..k / layout.span() {
            self.read_span(k, row, index, &mut span);
            for i in 0..layout.span() {
                let (scale, bias) = span_params(&layout, &span, i / layout.group);
                let code = i32::from(span.codes[i]);
                out.push(match (layout.symmetric, layout.codes) {
                    (false, _) => scale * code as f32 + bias,
                    (true, Codes::Iq4) => scale * f32::from(crate::IQ4_TABLE[code as usize]),
                    (true, _) => scale * (code - layout.zero()) as f32,
                });
            }
        }
        Ok(out)
    }

    /// The elements, if they are plain.
    fn dense(&self) -> Option<&[u8]> {
        match *self {
            Source::Dense { data, .. }
            | Source::Ggml { ty: GgmlType::F32 | GgmlType::F16 | GgmlType::BF16, data } => {
                Some(data)
            }
            Source::Mlx { .. } | Source::Ggml { .. } => None,
        }
    }

    /// Reads a span of a row of a checked, quantised matrix.
    fn read_span(&self, k: usize, row: usize, index: usize, span: &mut Span) {
        match *self {
            Source::Dense { .. } => {}
            Source::Ggml { ty, data } => {
                let at = (row * (k / ty.block()) + index) * ty.block_bytes();
                read_block(ty, &data[at..][..ty.block_bytes()], span);
            }
            Source::Mlx { bits, group, scale, codes, scales, biases } => {
                let at = row * (k / group) + index;
                span.scale = flush_tiny(scale, param_bits(scale, scales, at));
                span.bias = param_bits(scale, biases, at);
                let bytes = group * usize::from(bits) / 8;
                unpack_bits(bits, &codes[at * bytes..][..bytes], &mut span.codes[..group]);
            }
        }
    }
}

/// Elements of a dense row, widened.
pub(crate) fn dense_row(format: Format, bytes: &[u8]) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match format {
        Format::F16 => pairs().map(|b| half::f16::from_le_bytes(b).to_f32()).collect(),
        Format::Bf16 => pairs().map(|b| half::bf16::from_le_bytes(b).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

fn param_bits(scale: ScaleDtype, bytes: &[u8], at: usize) -> u32 {
    if scale == ScaleDtype::F32 {
        let b = &bytes[4 * at..];
        u32::from_le_bytes([b[0], b[1], b[2], b[3]])
    } else {
        u32::from(u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]))
    }
}

/// Zero for scales below 2⁻¹⁰⁰; IEEE halves are never that small.
fn flush_tiny(scale: ScaleDtype, bits: u32) -> u32 {
    let value = match scale {
        ScaleDtype::F32 => f32::from_bits(bits),
        ScaleDtype::Bf16 => f32::from_bits(bits << 16),
        ScaleDtype::F16 | ScaleDtype::TwoLevel => return bits,
    };
    if value.abs() < f32::from_bits((127 - 100) << 23) { 0 } else { bits }
}

/// Codes of `bits` bits each from a bit stream, least significant bit first.
fn unpack_bits(bits: u8, bytes: &[u8], codes: &mut [u8]) {
    match bits {
        4 => {
            for (pair, &b) in codes.chunks_exact_mut(2).zip(bytes) {
                (pair[0], pair[1]) = (b & 15, b >> 4);
            }
        }
        8 => codes.copy_from_slice(bytes),
        _ => {
            let (mut held, mut count, mut bytes) = (0u32, 0, bytes.iter());
            for code in codes {
                while count < bits {
                    held |= bytes.next().map_or(0, |&b| u32::from(b)) << count;
                    count += 8;
                }
                *code = (held & ((1 << bits) - 1)) as u8;
                held >>= bits;
                count -= bits;
            }
        }
    }
}

/// Scale and bias of group `g` of a span.
fn span_params(layout: &Layout, span: &Span, g: usize) -> (f32, f32) {
    let half = |bits: u32| half::f16::from_bits(bits as u16).to_f32();
    match layout.scale {
        ScaleDtype::F32 => (f32::from_bits(span.scale), f32::from_bits(span.bias)),
        ScaleDtype::Bf16 => (f32::from_bits(span.scale << 16), f32::from_bits(span.bias << 16)),
        ScaleDtype::F16 => (half(span.scale), half(span.bias)),
        ScaleDtype::TwoLevel if layout.symmetric => {
            (half(span.scale) * f32::from(span.sub_scales[g].cast_signed()), 0.0)
        }
        ScaleDtype::TwoLevel => (
            half(span.scale) * f32::from(span.sub_scales[g]),
            -(half(span.bias) * f32::from(span.sub_biases[g])),
        ),
    }
}

/// Writes output `o`'s share of a tile's span `index`.
fn write_span(layout: &Layout, tile: &mut [u8], o: usize, index: usize, span: &Span) {
    let bytes = &mut tile[index * layout.span_bytes()..][..layout.span_bytes()];
    let (header, codes) = bytes.split_at_mut(layout.header_bytes());
    let element = layout.scale_bytes() / TILE;
    let at = layout.scale_at(o);
    header[at..][..element].copy_from_slice(&span.scale.to_le_bytes()[..element]);
    if !layout.symmetric {
        let at = layout.scale_bytes() + at;
        header[at..][..element].copy_from_slice(&span.bias.to_le_bytes()[..element]);
    }
    if layout.scale == ScaleDtype::TwoLevel {
        let groups = layout.span_groups();
        let sub = &mut header[layout.sub_scales()..];
        for g in 0..groups {
            sub[TILE * g + o] = span.sub_scales[g];
            if !layout.symmetric {
                sub[TILE * (groups + g) + o] = span.sub_biases[g];
            }
        }
    }
    let (lane, half) = (4 * (o % 16), o / 16);
    let step = layout.code_bytes(4);
    let steps = codes.chunks_exact_mut(step).zip(span.codes.chunks_exact(4));
    for (bytes, four) in steps {
        if layout.codes == Codes::U8 {
            bytes[64 * half + lane..][..4].copy_from_slice(four);
        } else {
            for (byte, code) in bytes[lane..lane + 4].iter_mut().zip(four) {
                *byte |= code << (4 * half);
            }
        }
    }
}
