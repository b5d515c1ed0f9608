use super::*;
use crate::source::Matrix;

/// The values of an affine source, as f32.
fn values(source: &Source, rows: usize, k: usize) -> Vec<f32> {
    let Source::Mlx { bits: 4, group: 64, codes, scales, biases, .. } = *source else {
        panic!("{source:?}")
    };
    let bf16 = |bytes: &[u8], i: usize| {
        half::bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32()
    };
    let value = |i: usize| {
        let code = (codes[i / 2] >> (4 * (i % 2))) & 15;
        bf16(scales, i / 64) * f32::from(code) + bf16(biases, i / 64)
    };
    (0..rows * k).map(value).collect()
}

fn moments(values: &[f32]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let var = values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
    (mean, var.sqrt())
}

#[test]
fn names_and_seeds() {
    assert_eq!(parse_name("synth:tiny"), Some(("tiny", 0)));
    assert_eq!(parse_name("synth:tiny:42"), Some(("tiny", 42)));
    assert_eq!(parse_name("synth:tiny:"), None);
    assert_eq!(parse_name("synth:tiny:-1"), None);
    assert_eq!(parse_name("models/tiny"), None);
    assert!(NAMES.iter().all(|n| target(n).is_some() && draft(n).is_some()));
    assert!(target("qwen9").is_none() && draft("qwen9").is_none());
}

#[test]
fn rows_are_the_same_however_they_are_made() {
    for weight in [Logical::Q(3), Logical::SelectorSuccessor] {
        let m = SynthMatrix::new(weight, 192, 5);
        let (mut all, mut scratch) = (Vec::new(), Vec::new());
        let whole = Matrix { n: 40, k: 192, source: m.rows(0..40, &mut all) };
        for range in [0..40, 0..1, 7..8, 13..29, 39..40, 5..5] {
            let mut none = Vec::new();
            let expected = whole.rows(range.clone(), &mut none).source;
            assert_eq!(m.rows(range.clone(), &mut scratch), expected, "{range:?}");
        }
        assert_eq!(whole.bytes(), 40 * m.row_bytes() as u64);
    }
}

#[test]
fn weights_and_seeds_differ() {
    let bytes = |weight, seed| {
        let mut scratch = Vec::new();
        SynthMatrix::new(weight, 64, seed).rows(0..2, &mut scratch);
        scratch
    };
    let base = bytes(Logical::Q(3), 1);
    assert_eq!(base, bytes(Logical::Q(3), 1));
    for other in [bytes(Logical::Q(4), 1), bytes(Logical::K(3), 1), bytes(Logical::Q(3), 2)] {
        assert_ne!(base, other);
    }
    let a = vector(Logical::InputNorm(0), 8, 1);
    assert_eq!(a, vector(Logical::InputNorm(0), 8, 1));
    assert_ne!(a, vector(Logical::InputNorm(1), 8, 1));
    assert_ne!(a, vector(Logical::InputNorm(0), 8, 2));
    // The bytes are part of what a name means: they must not change from build to build.
    assert_eq!(base[..8], [134, 250, 252, 210, 182, 251, 55, 216]);
}

#[test]
fn activations_stay_near_one() {
    let (k, n) = (1024, 64);
    let mut scratch = Vec::new();
    let of = |weight| SynthMatrix::new(weight, k, 3);
    let gate = values(&of(Logical::Gate(0)).rows(0..n, &mut scratch), n, k);
    let (mean, deviation) = moments(&gate);
    let expected = 1.0 / (k as f64).sqrt();
    assert!(mean.abs() < 0.02 * expected, "{mean}");
    assert!((deviation / expected - 1.0).abs() < 0.03, "{deviation}");
    // A product with a vector of variance 1 has variance near 1.
    let x = vector(Logical::GdnConv(0), k, 9);
    let rms = (x.iter().map(|v| v * v).sum::<f32>() / k as f32).sqrt();
    let y: Vec<f32> =
        gate.chunks(k).map(|row| row.iter().zip(&x).map(|(w, x)| w * x / rms).sum()).collect();
    let (_, deviation) = moments(&y);
    assert!((0.7..1.3).contains(&deviation), "{deviation}");

    let down = values(&of(Logical::Down(0)).rows(0..n, &mut scratch), n, k);
    assert!((moments(&down).1 / expected - 0.5).abs() < 0.03);
    let table = SynthMatrix::new(Logical::SelectorPredecessor, 256, 3);
    let Source::Dense { data, .. } = table.rows(0..n, &mut scratch) else { panic!() };
    let table: Vec<f32> =
        data.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect();
    assert!((moments(&table).1 - 0.25).abs() < 0.01);

    let decay = vector(Logical::GdnDecay(0), 1000, 0);
    assert!(decay.iter().all(|d| (-2.0..=-0.25).contains(d)));
    let base = vector(Logical::AttnConvBase(0), 2 * 2 * 64, 0);
    assert!(base[..64].iter().chain(&base[128..192]).all(|v| (v - 1.0).abs() <= 0.05));
    assert!(base[64..128].iter().chain(&base[192..]).all(|v| v.abs() <= 0.1));
}
