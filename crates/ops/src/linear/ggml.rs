//! GGML block formats, read into the codes and scales of a device [`Layout`](super::layout::Layout).

use super::pack::Span;
use crate::{Codes, Format, ScaleDtype};

/// Tensor types of GGUF files that can be loaded.
#[expect(missing_docs, reason = "GGML's own names")]
#[expect(non_camel_case_types, reason = "GGML's own names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GgmlType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
}

impl GgmlType {
    /// Every type.
    pub const ALL: [GgmlType; 15] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ4_NL,
        Self::IQ4_XS,
    ];

    /// The type's number in a GGUF file.
    pub fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q2_K => 10,
            Self::Q3_K => 11,
            Self::Q4_K => 12,
            Self::Q5_K => 13,
            Self::Q6_K => 14,
            Self::IQ4_NL => 20,
            Self::IQ4_XS => 23,
            Self::BF16 => 30,
        }
    }

    /// The type with this number in a GGUF file.
    pub fn from_id(id: u32) -> Option<GgmlType> {
        Self::ALL.into_iter().find(|ty| ty.id() == id)
    }

    /// Elements of one block.
    pub fn block(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::IQ4_NL => 32,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K | Self::IQ4_XS => 256,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 | Self::IQ4_NL => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2_K => 84,
            Self::Q3_K => 110,
            Self::IQ4_XS => 136,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// The device format: every weight is represented exactly.
    pub fn format(self) -> Format {
        let affine = |codes, group, scale| Format::Affine { codes, group, scale };
        let symmetric = |codes, group, scale| Format::Symmetric { codes, group, scale };
        match self {
            Self::F32 => Format::F32,
            Self::F16 => Format::F16,
            Self::BF16 => Format::Bf16,
            Self::Q4_0 => symmetric(Codes::U4, 32, ScaleDtype::F16),
            Self::Q4_1 => affine(Codes::U4, 32, ScaleDtype::F16),
            Self::Q5_0 | Self::Q8_0 => symmetric(Codes::U8, 32, ScaleDtype::F16),
            Self::Q5_1 => affine(Codes::U8, 32, ScaleDtype::F16),
            Self::Q2_K => affine(Codes::U4, 16, ScaleDtype::TwoLevel),
            Self::Q3_K => symmetric(Codes::U4, 16, ScaleDtype::TwoLevel),
            Self::Q4_K => affine(Codes::U4, 32, ScaleDtype::TwoLevel),
            Self::Q5_K => affine(Codes::U8, 32, ScaleDtype::TwoLevel),
            Self::Q6_K => symmetric(Codes::U8, 16, ScaleDtype::TwoLevel),
            Self::IQ4_NL => symmetric(Codes::Iq4, 32, ScaleDtype::F16),
            Self::IQ4_XS => symmetric(Codes::Iq4, 32, ScaleDtype::TwoLevel),
        }
    }
}

fn half_at(block: &[u8], at: usize) -> u32 {
    u32::from(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// 32 codes from 16 bytes: low nibbles, then high nibbles.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    for (j, &b) in bytes[..16].iter().enumerate() {
        codes[j] = b & 15;
        codes[j + 16] = b >> 4;
    }
}

/// Eight 6-bit scales and mins from the 12 bytes of Q4_K and Q5_K.
fn six_bit_scales(s: &[u8], span: &mut Span) {
    for i in 0..4 {
        span.sub_scales[i] = s[i] & 63;
        span.sub_biases[i] = s[i + 4] & 63;
        span.sub_scales[i + 4] = (s[i + 8] & 15) | (s[i] >> 6) << 4;
        span.sub_biases[i + 4] = (s[i + 8] >> 4) | (s[i + 4] >> 6) << 4;
    }
}

/// Reads one block of a quantised type, `block_bytes` long, as one span.
pub(super) fn read_block(ty: GgmlType, b: &[u8], span: &mut Span) {
    match ty {
        GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => {}
        GgmlType::Q4_0 | GgmlType::IQ4_NL => {
            span.scale = half_at(b, 0);
            nibbles(&b[2..], &mut span.codes);
        }
        GgmlType::Q4_1 => {
            (span.scale, span.bias) = (half_at(b, 0), half_at(b, 2));
            nibbles(&b[4..], &mut span.codes);
        }
        GgmlType::Q5_0 => {
            span.scale = half_at(b, 0);
            five_bit(&b[2..], 128 - 16, &mut span.codes);
        }
        GgmlType::Q5_1 => {
            (span.scale, span.bias) = (half_at(b, 0), half_at(b, 2));
            five_bit(&b[4..], 0, &mut span.codes);
        }
        GgmlType::Q8_0 => {
            span.scale = half_at(b, 0);
            for (code, q) in span.codes.iter_mut().zip(&b[2..34]) {
                *code = q ^ 0x80;
            }
        }
        GgmlType::Q2_K => read_q2_k(b, span),
        GgmlType::Q3_K => read_q3_k(b, span),
        GgmlType::Q4_K => read_q4_k(b, span),
        GgmlType::Q5_K => read_q5_k(b, span),
        GgmlType::Q6_K => read_q6_k(b, span),
        GgmlType::IQ4_XS => read_iq4_xs(b, span),
    }
}

/// The tail of Q5_0 and Q5_1: a word of fifth bits, then nibbles.
fn five_bit(b: &[u8], offset: u8, codes: &mut [u8]) {
    let high = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    nibbles(&b[4..], codes);
    for (j, code) in codes[..32].iter_mut().enumerate() {
        *code = (*code | (((high >> j) & 1) as u8) << 4) + offset;
    }
}

fn read_q2_k(b: &[u8], span: &mut Span) {
    for (i, s) in b[..16].iter().enumerate() {
        span.sub_scales[i] = s & 15;
        span.sub_biases[i] = s >> 4;
    }
    for (e, code) in span.codes.iter_mut().enumerate() {
        *code = (b[16 + 32 * (e / 128) + e % 32] >> (2 * (e % 128 / 32))) & 3;
    }
    (span.scale, span.bias) = (half_at(b, 80), half_at(b, 82));
}

fn read_q3_k(b: &[u8], span: &mut Span) {
    let (high, low, scales) = (&b[..32], &b[32..96], &b[96..108]);
    for i in 0..16 {
        let nibble = if i < 8 { scales[i] & 15 } else { scales[i - 8] >> 4 };
        let top = (scales[8 + i % 4] >> (2 * (i / 4))) & 3;
        span.sub_scales[i] = (nibble | top << 4).wrapping_sub(32);
    }
    for (e, code) in span.codes.iter_mut().enumerate() {
        let q = (low[32 * (e / 128) + e % 32] >> (2 * (e % 128 / 32))) & 3;
        // The value is q, less 4 where the high bit is clear; stored relative to 8.
        *code = q + if high[e % 32] >> (e / 32) & 1 == 1 { 8 } else { 4 };
    }
    span.scale = half_at(b, 108);
}

fn read_q4_k(b: &[u8], span: &mut Span) {
    (span.scale, span.bias) = (half_at(b, 0), half_at(b, 2));
    six_bit_scales(&b[4..16], span);
    for (e, code) in span.codes.iter_mut().enumerate() {
        *code = (b[16 + 32 * (e / 64) + e % 32] >> (4 * (e % 64 / 32))) & 15;
    }
}

fn read_q5_k(b: &[u8], span: &mut Span) {
    (span.scale, span.bias) = (half_at(b, 0), half_at(b, 2));
    six_bit_scales(&b[4..16], span);
    for (e, code) in span.codes.iter_mut().enumerate() {
        let low = (b[48 + 32 * (e / 64) + e % 32] >> (4 * (e % 64 / 32))) & 15;
        *code = low | (b[16 + e % 32] >> (e / 32) & 1) << 4;
    }
}

fn read_q6_k(b: &[u8], span: &mut Span) {
    let (low, high) = (&b[..128], &b[128..192]);
    for (e, code) in span.codes.iter_mut().enumerate() {
        let (half, t, l) = (e / 128, e % 128 / 32, e % 32);
        let nibble = (low[64 * half + 32 * (t % 2) + l] >> (4 * (t / 2))) & 15;
        let top = (high[32 * half + l] >> (2 * t)) & 3;
        *code = (nibble | top << 4) + (128 - 32);
    }
    span.sub_scales.copy_from_slice(&b[192..208]);
    span.scale = half_at(b, 208);
}

fn read_iq4_xs(b: &[u8], span: &mut Span) {
    span.scale = half_at(b, 0);
    let high = half_at(b, 2);
    for i in 0..8 {
        let nibble = (b[4 + i / 2] >> (4 * (i % 2))) & 15;
        let top = ((high >> (2 * i)) & 3) as u8;
        span.sub_scales[i] = (nibble | top << 4).wrapping_sub(32);
        nibbles(&b[8 + 16 * i..], &mut span.codes[32 * i..]);
    }
}
