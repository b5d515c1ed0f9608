//! Random checkpoint matrices of every kind, for tests.

use crate::linear::{DenseDtype, GgmlType, Source};
use crate::testing::Builder;
use crate::{Format, ScaleDtype, TileOrder, Weight};

/// What to make.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Dense(DenseDtype),
    Mlx(u8, usize, ScaleDtype),
    Ggml(GgmlType),
}

impl Kind {
    /// Every quantised kind.
    pub(crate) fn quantized() -> Vec<Kind> {
        let mut kinds: Vec<Kind> =
            GgmlType::ALL.into_iter().filter(|ty| ty.block() > 1).map(Kind::Ggml).collect();
        for bits in [2, 3, 4, 5, 6, 8] {
            kinds.push(Kind::Mlx(bits, 64, ScaleDtype::Bf16));
        }
        for bits in [4, 8] {
            for group in [32, 64, 128] {
                for scale in [ScaleDtype::F16, ScaleDtype::Bf16, ScaleDtype::F32] {
                    kinds.push(Kind::Mlx(bits, group, scale));
                }
            }
        }
        kinds
    }

    /// Every dense kind.
    pub(crate) fn dense() -> Vec<Kind> {
        let ggml = [GgmlType::F32, GgmlType::F16, GgmlType::BF16].map(Kind::Ggml);
        let dense = [DenseDtype::F32, DenseDtype::F16, DenseDtype::Bf16].map(Kind::Dense);
        ggml.into_iter().chain(dense).collect()
    }

    /// What k must be a multiple of.
    pub(crate) fn unit(self) -> usize {
        match self {
            Kind::Dense(_) => 1,
            Kind::Mlx(_, group, _) => group,
            Kind::Ggml(ty) => ty.block(),
        }
    }
}

/// A checkpoint matrix that owns its bytes.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) kind: Kind,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) data: Vec<u8>,
    pub(crate) scales: Vec<u8>,
    pub(crate) biases: Vec<u8>,
}

impl Sample {
    pub(crate) fn source(&self) -> Source<'_> {
        match self.kind {
            Kind::Dense(dtype) => Source::Dense { dtype, data: &self.data },
            Kind::Ggml(ty) => Source::Ggml { ty, data: &self.data },
            Kind::Mlx(bits, group, scale) => Source::Mlx {
                bits,
                group,
                scale,
                codes: &self.data,
                scales: &self.scales,
                biases: &self.biases,
            },
        }
    }

    /// The packed matrix, made in pieces of `pieces` rows or tiles.
    pub(crate) fn pack(&self, order: TileOrder, pieces: usize) -> (Format, Vec<u8>) {
        let (n, k) = (self.n, self.k);
        let format = self.source().check(n, k).expect("a sound sample");
        let piece = format.piece_bytes(k).expect("k in whole groups");
        let mut packed = vec![0xEE; format.packed_bytes(n, k).expect("a size")];
        for (i, out) in packed.chunks_mut(pieces * piece).enumerate() {
            let offset = i * pieces * piece;
            self.source().pack_piece(order, (n, k), offset, out).expect("whole pieces");
        }
        (format, packed)
    }

    /// The packed matrix on a device.
    pub(crate) fn weight(&self, b: &mut Builder) -> Weight {
        let (format, packed) = self.pack(b.tile_order(), 3);
        Weight { buf: b.bytes(&packed), format, n: self.n, k: self.k }
    }
}

pub(crate) fn float(scale: ScaleDtype, value: f32) -> Vec<u8> {
    match scale {
        ScaleDtype::F32 => value.to_le_bytes().to_vec(),
        ScaleDtype::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        ScaleDtype::F16 | ScaleDtype::TwoLevel => half::f16::from_f32(value).to_le_bytes().to_vec(),
    }
}

/// A random matrix with weights of order 1.
pub(crate) fn sample(b: &mut Builder, kind: Kind, n: usize, k: usize) -> Sample {
    let mut random = |count: usize| -> Vec<u8> { (0..count).map(|_| b.random() as u8).collect() };
    let (mut scales, mut biases) = (Vec::new(), Vec::new());
    let data = match kind {
        Kind::Dense(dtype) => {
            let scale = match dtype {
                DenseDtype::F32 => ScaleDtype::F32,
                DenseDtype::F16 => ScaleDtype::F16,
                DenseDtype::Bf16 => ScaleDtype::Bf16,
            };
            b.normal_values(n * k, 1.0).into_iter().flat_map(|v| float(scale, v)).collect()
        }
        Kind::Mlx(bits, group, scale) => {
            let data = random(n * k * usize::from(bits) / 8);
            let width = f32::from(1u16 << bits);
            for _ in 0..n * k / group {
                let step = (b.uniform() + 0.1) * if b.random() & 1 == 0 { 1.0 } else { -1.0 };
                scales.extend(float(scale, 2.0 * step / width));
                biases.extend(float(scale, -step + 0.1 * b.uniform()));
            }
            data
        }
        Kind::Ggml(ty) if ty.block() == 1 => {
            let scale = match ty {
                GgmlType::F32 => ScaleDtype::F32,
                GgmlType::F16 => ScaleDtype::F16,
                _ => ScaleDtype::Bf16,
            };
            b.normal_values(n * k, 1.0).into_iter().flat_map(|v| float(scale, v)).collect()
        }
        Kind::Ggml(ty) => {
            let bytes = ty.block_bytes();
            let mut data = random(n * k / ty.block() * bytes);
            for block in data.chunks_exact_mut(bytes) {
                for at in half_fields(ty) {
                    let value = half::f16::from_f32((b.uniform() + 0.1) * 0.02);
                    block[*at..at + 2].copy_from_slice(&value.to_le_bytes());
                }
            }
            data
        }
    };
    Sample { kind, n, k, data, scales, biases }
}

/// A random matrix whose weights are bf16 numbers, of order 1: 64ths of whole numbers that have eight bits beside powers of two. Scales
/// and biases differ between outputs and between groups.
pub(crate) fn exact_sample(b: &mut Builder, kind: Kind, n: usize, k: usize) -> Sample {
    let mut sample = sample(b, kind, n, k);
    match kind {
        Kind::Dense(_) => unreachable!("dense weights are never rounded"),
        Kind::Mlx(bits, _, dtype) => {
            let scales = sample.scales.chunks_exact_mut(float(dtype, 0.0).len());
            let biases = sample.biases.chunks_exact_mut(float(dtype, 0.0).len());
            for (scale, bias) in scales.zip(biases) {
                let values = exact_scales(b, (1 << bits) - 1, true);
                scale.copy_from_slice(&float(dtype, values[0]));
                bias.copy_from_slice(&float(dtype, values[1]));
            }
        }
        Kind::Ggml(ty) => {
            for block in sample.data.chunks_exact_mut(ty.block_bytes()) {
                shorten_sub_scales(ty, block);
                let values = match ty {
                    GgmlType::Q4_0 => exact_scales(b, 8, false),
                    GgmlType::Q5_0 => exact_scales(b, 16, false),
                    GgmlType::Q4_1 => exact_scales(b, 15, true),
                    GgmlType::Q5_1 => exact_scales(b, 31, true),
                    // Codes of eight bits, or with their group's scale.
                    _ => exact_scales(b, 255, false),
                };
                for (&at, value) in half_fields(ty).iter().zip(values) {
                    block[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
                }
            }
        }
    }
    sample
}

/// A scale for codes of up to `most` and a bias: of 0 to `most`, or else of the magnitude of the scale or twice that.
fn exact_scales(b: &mut Builder, most: i32, affine: bool) -> [f32; 2] {
    let mut below = |end: i32| (b.random() % end as u64) as i32;
    let scale = 1 + below(255 / most);
    let bias =
        if affine { below(511 - scale * most) - 255 } else { [1, -1, 2, -2][below(4) as usize] };
    let unit = [1.0, -1.0, 2.0, -2.0, 4.0, -4.0][below(6) as usize] / 64.0;
    [unit * scale as f32, unit * bias as f32]
}

/// Leaves as many bits of a block's scales of groups as make eight with those of its codes and biases.
fn shorten_sub_scales(ty: GgmlType, block: &mut [u8]) {
    let mut mask = |bytes: std::ops::Range<usize>, bits: u8| {
        block[bytes].iter_mut().for_each(|byte| *byte &= bits);
    };
    match ty {
        // The first four groups' scales and biases have low bits of zeros; the others' are in the last four bytes.
        GgmlType::Q4_K => mask(4..12, 0x3c),
        GgmlType::Q5_K => {
            mask(4..12, 0x38);
            mask(12..16, 0xf7);
        }
        GgmlType::Q6_K => mask(192..208, 0xf0),
        GgmlType::IQ4_XS => {
            // Powers of two, plus 32: the low four bits of each, and the high two.
            const SCALES: [u8; 8] = [31, 33, 30, 34, 28, 36, 24, 48];
            let scale =
                |i: usize, block: &[u8]| SCALES[usize::from(block[4 + i / 2] >> (4 * (i % 2)) & 7)];
            let scales: [u8; 8] = std::array::from_fn(|i| scale(i, block));
            block[2..8].fill(0);
            for (i, scale) in scales.into_iter().enumerate() {
                block[2 + i / 4] |= (scale >> 4) << (2 * (i % 4));
                block[4 + i / 2] |= (scale & 15) << (4 * (i % 2));
            }
        }
        _ => {}
    }
}

/// Where a block has IEEE halves.
fn half_fields(ty: GgmlType) -> &'static [usize] {
    match ty {
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4_K | GgmlType::Q5_K => &[0, 2],
        GgmlType::Q2_K => &[80, 82],
        GgmlType::Q3_K => &[108],
        GgmlType::Q6_K => &[208],
        _ => &[0],
    }
}
