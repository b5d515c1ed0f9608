//! Dequantisation against an independent implementation (numpy, itself bit-equal to gguf-py): for
//! fixed bytes of every type, a hash of the bits of all values.

use super::ggml::GgmlType;
use super::pack::Source;
use crate::ScaleDtype;

/// Bytes that look random; the same formula made the hashes.
fn data(count: usize) -> Vec<u8> {
    (0..count).map(|i| (i * 131 + 89 + ((i * i) >> 3)) as u8).collect()
}

/// FNV-1a of the bits.
fn hash(values: &[f32]) -> u64 {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn ggml_blocks() {
    let cases: [(GgmlType, &[usize], u64); 12] = [
        (GgmlType::Q4_0, &[0], 0x74f3_d468_2f8f_1029),
        (GgmlType::Q4_1, &[0, 2], 0x561a_451a_b3e7_80ec),
        (GgmlType::Q5_0, &[0], 0x247e_09b6_46f6_2353),
        (GgmlType::Q5_1, &[0, 2], 0x7bda_5b80_b36a_fde7),
        (GgmlType::Q8_0, &[0], 0x3f20_e56d_cb60_9482),
        (GgmlType::Q2_K, &[80, 82], 0x6bc4_d697_d5ae_97f3),
        (GgmlType::Q3_K, &[108], 0x3637_2898_5720_990f),
        (GgmlType::Q4_K, &[0, 2], 0x93c2_c528_708e_feee),
        (GgmlType::Q5_K, &[0, 2], 0x1aee_8caa_0fe5_280f),
        (GgmlType::Q6_K, &[208], 0x8353_fc39_1f1a_8d06),
        (GgmlType::IQ4_NL, &[0], 0x2b8e_4476_fd68_e986),
        (GgmlType::IQ4_XS, &[0], 0x8180_4e2e_fb48_1c23),
    ];
    for (ty, halves, want) in cases {
        let mut data = data(3 * ty.block_bytes());
        for (i, block) in data.chunks_exact_mut(ty.block_bytes()).enumerate() {
            for (j, &at) in halves.iter().enumerate() {
                let sign = if j == 0 { 1.0 } else { -1.0 };
                let value = half::f16::from_f64(0.0123 * (i + 1) as f64 * sign);
                block[at..at + 2].copy_from_slice(&value.to_le_bytes());
            }
        }
        let source = Source::Ggml { ty, data: &data };
        let row = source.dequantize_row(1, 3 * ty.block(), 0).expect("a row");
        assert_eq!(hash(&row), want, "{ty:?}: {:?}", &row[..4]);
    }
}

#[test]
fn mlx_groups() {
    let floats = |v: [f32; 2]| v.map(f32::to_le_bytes).concat();
    let (scales, biases) = (floats([0.0123, -0.5]), floats([-1.25, 0.33]));
    for (bits, want) in [
        (2, 0xdf7e_0e14_3902_c2a6),
        (3, 0xcfbb_7875_2efc_8f86),
        (4, 0x238d_5a8c_b7be_50ca),
        (5, 0x0858_0551_d209_ce4c),
        (6, 0x5018_c53c_cf93_fd84),
        (8, 0xe5c5_2e09_5870_0af2),
    ] {
        let codes = data(128 * usize::from(bits) / 8);
        let source = Source::Mlx {
            bits,
            group: 64,
            scale: ScaleDtype::F32,
            codes: &codes,
            scales: &scales,
            biases: &biases,
        };
        let row = source.dequantize_row(1, 128, 0).expect("a row");
        assert_eq!(hash(&row), want, "{bits} bits: {:?}", &row[..4]);
    }
}
