//! Models that exist only as a seed: published geometries with random weights, for measuring and
//! testing without files. Any rows of any matrix can be made on their own, so a 27B model never has
//! to exist in memory as a whole.

mod geometry;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use geometry::{NAMES, draft, target};

use crate::names::Logical;
use crate::source::{FloatDtype, Source};

/// A model name of the form `synth:<name>` or `synth:<name>:<seed>`, as (name, seed).
///
/// Returns `None` for anything else; an unknown `<name>` is still a synthetic one.
pub fn parse_name(model: &str) -> Option<(&str, u64)> {
    let rest = model.strip_prefix("synth:")?;
    match rest.rsplit_once(':') {
        Some((name, seed)) => Some((name, seed.parse().ok()?)),
        None => Some((rest, 0)),
    }
}

/// How a synthetic matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SynthFormat {
    /// MLX affine: 4 bits, groups of 64, bf16 scales and biases.
    Affine4,
    /// bf16 `[n, k]`.
    Bf16,
}

/// A random matrix. Its rows have mean 0 and a standard deviation that keeps activations near 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SynthMatrix {
    seed: u64,
    k: usize,
    format: SynthFormat,
    deviation: f32,
}

const BITS: usize = 4;
const GROUP: usize = 64;
/// The standard deviation of a code that takes 0 to 15 equally often.
const CODE_DEVIATION: f32 = 4.609_772;
/// The mean of such a code.
const CODE_MEAN: f32 = 7.5;

impl SynthMatrix {
    /// The matrix `[n, k]` of a weight under a model's seed; it is the same for any `n`.
    ///
    /// # Panics
    /// If `k` isn't a multiple of 64 and the weight is quantised.
    pub fn new(weight: Logical, k: usize, seed: u64) -> SynthMatrix {
        let tables = matches!(weight, Logical::SelectorPredecessor | Logical::SelectorSuccessor);
        let format = if tables { SynthFormat::Bf16 } else { SynthFormat::Affine4 };
        assert!(tables || k.is_multiple_of(GROUP), "{k} inputs, not in groups of {GROUP}");
        SynthMatrix { seed: weight_seed(weight, seed), k, format, deviation: deviation(weight, k) }
    }

    /// How it is stored.
    pub fn format(&self) -> SynthFormat {
        self.format
    }

    /// Bytes of one row: codes, scales and biases together.
    pub fn row_bytes(&self) -> usize {
        match self.format {
            SynthFormat::Affine4 => self.k * BITS / 8 + self.k / GROUP * 4,
            SynthFormat::Bf16 => self.k * 2,
        }
    }

    /// Makes rows in `scratch`, as an MLX or dense source.
    pub fn rows<'s>(&self, rows: Range<usize>, scratch: &'s mut Vec<u8>) -> Source<'s> {
        scratch.clear();
        scratch.resize(rows.len() * self.row_bytes(), 0);
        if self.format == SynthFormat::Bf16 {
            for (row, out) in rows.zip(scratch.chunks_exact_mut(self.k * 2)) {
                self.fill_bf16(row, out);
            }
            return Source::Dense { dtype: FloatDtype::Bf16, data: scratch };
        }
        let (codes, rest) = scratch.split_at_mut(rows.len() * self.k * BITS / 8);
        let (scales, biases) = rest.split_at_mut(rest.len() / 2);
        self.fill(rows, codes, scales, biases);
        Source::Mlx {
            bits: BITS as u8,
            group: GROUP as u16,
            scale: FloatDtype::Bf16,
            codes,
            scales,
            biases,
        }
    }

    /// Makes rows of an [`SynthFormat::Affine4`] matrix in place: `codes` is `[rows, k / 8]` words,
    /// `scales` and `biases` are `[rows, k / 64]` bf16.
    ///
    /// # Panics
    /// If a slice has another length.
    pub fn fill(&self, rows: Range<usize>, codes: &mut [u8], scales: &mut [u8], biases: &mut [u8]) {
        let (code_bytes, scale_bytes) = (self.k * BITS / 8, self.k / GROUP * 2);
        assert_eq!(codes.len(), rows.len() * code_bytes, "bytes of codes");
        assert_eq!(scales.len(), rows.len() * scale_bytes, "bytes of scales");
        assert_eq!(biases.len(), rows.len() * scale_bytes, "bytes of biases");
        let parts = codes.chunks_exact_mut(code_bytes);
        let parts = parts.zip(scales.chunks_exact_mut(scale_bytes));
        let parts = parts.zip(biases.chunks_exact_mut(scale_bytes));
        for (row, ((codes, scales), biases)) in rows.zip(parts) {
            let start = mix(self.seed ^ mix(row as u64));
            for (i, word) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                *word = random(start, i as u64).to_le_bytes();
            }
            // Scales differ by group, and some are negative, as in quantised models.
            let start = mix(start);
            let pairs = scales.as_chunks_mut::<2>().0.iter_mut().zip(biases.as_chunks_mut::<2>().0);
            for (g, (scale, bias)) in pairs.enumerate() {
                let bits = random(start, g as u64);
                let size = self.deviation / CODE_DEVIATION * (0.75 + 0.5 * unit(bits));
                let signed = if bits & 7 == 0 { -size } else { size };
                let rounded = half::bf16::from_f32(signed);
                *scale = rounded.to_le_bytes();
                *bias = half::bf16::from_f32(-CODE_MEAN * rounded.to_f32()).to_le_bytes();
            }
        }
    }

    fn fill_bf16(&self, row: usize, out: &mut [u8]) {
        let start = mix(self.seed ^ mix(row as u64));
        let width = self.deviation * 12f32.sqrt();
        for (i, value) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let uniform = width * (unit(random(start, i as u64)) - 0.5);
            *value = half::bf16::from_f32(uniform).to_le_bytes();
        }
    }
}

/// A random vector of a weight, in the form that the ops read.
pub fn vector(weight: Logical, len: usize, seed: u64) -> Vec<f32> {
    let seed = weight_seed(weight, seed);
    // From −1 to 1.
    let uniform = |i: usize| 2.0 * unit(random(seed, i as u64)) - 1.0;
    // The static kernels [2, taps, hidden] of DFlash 2 start as the identity: tap 0 is 1. Two taps.
    let first_tap = |i: usize| (i / (len / 4)).is_multiple_of(2);
    let value = |i: usize| match weight {
        Logical::GdnConv(_) => 0.5 * uniform(i),
        Logical::GdnDecay(_) => -(1.125 + 0.875 * uniform(i)),
        Logical::GdnDtBias(_) => -1.75 + 1.25 * uniform(i),
        Logical::AttnConvBase(_) | Logical::MlpConvBase(_) if first_tap(i) => {
            1.0 + 0.05 * uniform(i)
        }
        Logical::AttnConvBase(_) | Logical::MlpConvBase(_) => 0.1 * uniform(i),
        _ => 1.0 + 0.1 * uniform(i),
    };
    (0..len).map(value).collect()
}

/// The standard deviation of a weight's elements: outputs near 1 for inputs near 1, halves where a
/// layer adds to the residual stream, logits near 3.
fn deviation(weight: Logical, k: usize) -> f32 {
    let gain = match weight {
        Logical::Embed | Logical::LmHead => 3.0,
        Logical::O(_) | Logical::GdnOut(_) | Logical::Down(_) => 0.5,
        Logical::AttnConvProj(_) | Logical::MlpConvProj(_) => 0.1,
        // Tables, not products: a score sums `k` products of two entries and a number near 1.
        Logical::SelectorPredecessor | Logical::SelectorSuccessor => (k as f32).powf(0.25),
        _ => 1.0,
    };
    gain / (k as f32).sqrt()
}

/// A seed of its own for each weight: the model's, and the weight's name (FNV-1a).
fn weight_seed(weight: Logical, seed: u64) -> u64 {
    let name = format!("{weight:?}");
    let step = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3);
    mix(name.bytes().fold(0xCBF2_9CE4_8422_2325, step) ^ mix(seed))
}

/// Number `i` of the stream that starts at `start` (SplitMix64).
fn random(start: u64, i: u64) -> u64 {
    mix(start.wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
}

/// SplitMix64's finaliser: every input bit changes every output bit with probability near ½.
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// The top 24 bits as a number in [0, 1).
fn unit(bits: u64) -> f32 {
    (bits >> 40) as f32 / (1u32 << 24) as f32
}
