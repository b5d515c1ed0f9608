//! Elementary functions from adds, multiplies and fused multiply-adds only, so that every
//! instruction set and the scalar reference agree bit for bit.

use std::f32::consts::LN_2;

use super::{Portable, Simd};

/// e^x in f32, relative error below 2e-7 (measured in the tests). Below −87.3 the result is 0;
/// above 88.7 it is that of 88.7. NaN stays NaN.
///
/// Cody and Waite reduction to |r| ≤ ln 2 / 2, then the Taylor polynomial of degree 7 by Horner.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    let (p, n) = exp_parts(s, s.max(s.splat(-87.3), s.min(s.splat(88.7), x)));
    // 2^n in two steps: n reaches 128, which one exponent can't hold.
    let half = s.round(s.mul(n, s.splat(0.5)));
    let e = s.scale_pow2(s.scale_pow2(p, half), s.sub(n, half));
    s.select_lt(x, s.splat(-87.3), s.splat(0.0), e)
}

/// 2^x in f32 for x up to 127, relative error below 1e-7 (measured in the tests). Below −126 the result
/// is that of −126; exp2(0) is exactly 1. NaN stays NaN. Half the work of [`exp`].
///
/// x = n + r with |r| ≤ ½, then a polynomial of degree 6 through (2^r − 1) / r at the Chebyshev nodes.
#[inline(always)]
pub fn exp2<S: Simd>(s: S, x: S::F) -> S::F {
    let x = s.max(s.splat(-126.0), x);
    let n = s.round(x);
    let r = s.sub(x, n);
    let mut p = s.splat(1.545_316_3e-4);
    for c in [1.339_086_3e-3, 9.618_083e-3, 5.550_357e-2, 0.240_226_5, LN_2, 1.0] {
        p = s.fma(p, r, s.splat(c));
    }
    s.scale_pow2(p, n)
}

/// e^x = p · 2^n with p in about √½..√2.
#[inline(always)]
fn exp_parts<S: Simd>(s: S, x: S::F) -> (S::F, S::F) {
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-0.693_359_4), x);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = s.fma(p, r, s.splat(c));
    }
    (p, n)
}

/// 1 + e^−x, with x clamped to ±87: there 2^n is one normal number, and so is the reciprocal.
#[inline(always)]
fn one_plus_exp_neg<S: Simd>(s: S, x: S::F) -> S::F {
    let y = s.sub(s.splat(0.0), x);
    let (p, n) = exp_parts(s, s.max(s.splat(-87.0), s.min(s.splat(87.0), y)));
    s.add(s.splat(1.0), s.scale_pow2(p, n))
}

/// 1 / (1 + e^−x), relative error below 4e-7 (measured in the tests). Below −87 the result is that
/// of −87, 1.6e-38.
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    s.div(s.splat(1.0), one_plus_exp_neg(s, x))
}

/// x · sigmoid(x), relative error below 4e-7 above −87 (measured in the tests).
#[inline(always)]
pub fn silu<S: Simd>(s: S, x: S::F) -> S::F {
    s.div(x, one_plus_exp_neg(s, x))
}

/// ln x in f32, within 2e-7 · max(|ln x|, |x − 1|) (measured in the tests), subnormals included. −∞ at
/// 0, NaN below, +∞ at +∞.
///
/// x = m · 2^e with m in [√½, √2), then ln m = 2 artanh((m − 1) / (m + 1)) by its series.
#[inline(always)]
pub fn ln<S: Simd>(s: S, x: S::F) -> S::F {
    let zero = s.splat(0.0);
    let smallest = s.splat(f32::MIN_POSITIVE);
    let normal = s.select_lt(x, smallest, s.mul(x, s.splat(33_554_432.0)), x);
    let shift = s.select_lt(x, smallest, s.splat(-25.0), zero);
    let e = s.exponent(normal);
    // 2^−e in two steps: e reaches 127, and 2^−127 is not a normal number.
    let half = s.round(s.mul(e, s.splat(0.5)));
    let m = s.scale_pow2(s.scale_pow2(normal, s.sub(zero, half)), s.sub(half, e));
    let root = s.splat(std::f32::consts::SQRT_2);
    let e = s.add(s.add(e, shift), s.select_lt(root, m, s.splat(1.0), zero));
    let m = s.select_lt(root, m, s.mul(m, s.splat(0.5)), m);
    let f = s.sub(m, s.splat(1.0));
    let z = s.div(f, s.add(s.splat(2.0), f));
    let low = s.mul(e, s.splat(-2.121_944_4e-4));
    // ln m = f − f·(f/2 …) keeps the leading term exact: 2z = f − z·f.
    let y = s.add(s.sub(artanh_tail::<S, 5>(s, z), s.mul(z, f)), low);
    let y = s.fma(e, s.splat(0.693_359_4), s.add(y, f));
    let y = s.select_lt(x, s.splat(f32::INFINITY), y, x);
    let edge = s.select_lt(x, zero, s.splat(f32::NAN), s.splat(f32::NEG_INFINITY));
    s.select_lt(zero, x, y, s.add(edge, x))
}

/// ln(1 + e^x) in f32, relative error below 4e-7 (measured in the tests); 0 below −87.3.
///
/// max(x, 0) + ln(1 + e^−|x|), where 1 + y is never formed: ln(1 + y) = 2 artanh(y / (2 + y)).
#[inline(always)]
pub fn softplus<S: Simd>(s: S, x: S::F) -> S::F {
    let zero = s.splat(0.0);
    let t = s.min(x, s.sub(zero, x));
    let (p, n) = exp_parts(s, s.max(s.splat(-87.3), t));
    let y = s.select_lt(t, s.splat(-87.3), zero, s.scale_pow2(p, n));
    let z = s.div(y, s.add(s.splat(2.0), y));
    let log = s.add(s.add(z, z), artanh_tail::<S, 8>(s, z));
    s.add(s.max(x, zero), log)
}

/// 2 artanh(z) − 2z = 2 z³ (1/3 + z²/5 + z⁴/7 + …), `TERMS` terms.
#[inline(always)]
fn artanh_tail<S: Simd, const TERMS: usize>(s: S, z: S::F) -> S::F {
    let square = s.mul(z, z);
    let mut p = s.splat(0.0);
    for i in (0..TERMS).rev() {
        p = s.fma(p, square, s.splat(2.0 / (2 * i + 3) as f32));
    }
    s.mul(s.mul(p, square), z)
}

/// (sin x, cos x) for |x| < 2^24, right to within a few 1e-16 before they are rounded to f32. Without
/// branches or calls, so that a loop over it becomes vector code.
///
/// x = n · π/2 + r with |r| ≤ π/4 (Cody and Waite, π/2 in three parts whose products with n are exact),
/// then the Taylor series up to r^15 in f64.
#[inline(always)]
pub fn sin_cos(x: f32) -> (f32, f32) {
    // Adding it leaves a double's nearest integer in the lowest bits.
    const SHIFT: f64 = 1.5 * (1u64 << 52) as f64;
    let x = f64::from(x);
    let shifted = x * std::f64::consts::FRAC_2_PI + SHIFT;
    let n = shifted - SHIFT;
    let r = x - n * HI_PART - n * MID_PART - n * LOW_PART;
    let r2 = r * r;
    let (mut sin, mut cos) = (0.0, 0.0);
    for k in (0..8).rev() {
        sin = sin * r2 + SINE[k];
        cos = cos * r2 + COSINE[k];
    }
    sin *= r;
    let quarter = shifted.to_bits();
    let (s, c) = if quarter & 1 == 0 { (sin, cos) } else { (cos, sin) };
    let s = if quarter & 2 == 0 { s } else { -s };
    let c = if (quarter + 1) & 2 == 0 { c } else { -c };
    (s as f32, c as f32)
}

/// π/2 = the sum of these three.
const HI_PART: f64 = 1.570796325802803;
const MID_PART: f64 = 9.920935774287987e-10;
const LOW_PART: f64 = 2.2517417741562176e-18;

/// ± 1 / (2k + 1)! and ± 1 / (2k)!
const SINE: [f64; 8] = series(1);
const COSINE: [f64; 8] = series(0);

const fn series(first: usize) -> [f64; 8] {
    let mut terms = [1.0; 8];
    let mut k = 1;
    while k < 8 {
        let n = 2 * k + first;
        terms[k] = -terms[k - 1] / (n * (n - 1)) as f64;
        k += 1;
    }
    terms
}

/// Lane 0 of a vector function: the scalar twin.
#[inline]
pub fn scalar(f: impl Fn(Portable, [f32; 16]) -> [f32; 16], x: f32) -> f32 {
    f(Portable, [x; 16])[0]
}

/// e^x, bit-equal to a lane of [`exp`].
pub fn exp_f32(x: f32) -> f32 {
    scalar(exp, x)
}
/// Bit-equal to a lane of [`sigmoid`].
pub fn sigmoid_f32(x: f32) -> f32 {
    scalar(sigmoid, x)
}
/// Bit-equal to a lane of [`silu`].
pub fn silu_f32(x: f32) -> f32 {
    scalar(silu, x)
}

/// Bit-equal to a lane of [`ln`].
pub fn ln_f32(x: f32) -> f32 {
    scalar(ln, x)
}
/// Bit-equal to a lane of [`softplus`].
pub fn softplus_f32(x: f32) -> f32 {
    scalar(softplus, x)
}

#[cfg(test)]
mod tests {
    use super::super::{Isa, Kernel, LANES, Simd};
    use super::*;

    struct ExpAll<'a>(&'a [f32], &'a mut [f32]);
    impl Kernel for ExpAll<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for (x, y) in self.0.chunks(LANES).zip(self.1.chunks_mut(LANES)) {
                s.store(exp(s, s.load(x)), y);
            }
        }
    }

    #[test]
    fn sin_cos_rounds_as_libm_does() {
        for i in 0..200_000 {
            for x in [i as f32 * 0.37 - 1e3, (i * 71) as f32, i as f32 * 1e-6, -(i as f32)] {
                let (sin, cos) = f64::from(x).sin_cos();
                let want = (sin as f32, cos as f32);
                let got = sin_cos(x);
                // A result within 1e-15 of the middle of two floats may fall on either side.
                let near = |want: f32, got: f32, exact: f64| {
                    want == got || (f64::from(got) - exact).abs() < 3e-8
                };
                assert!(near(want.0, got.0, sin) && near(want.1, got.1, cos), "{x}: {got:?}");
            }
        }
        assert_eq!(sin_cos(0.0), (0.0, 1.0));
    }

    struct Exp2All<'a>(&'a [f32], &'a mut [f32]);
    impl Kernel for Exp2All<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for (x, y) in self.0.chunks(LANES).zip(self.1.chunks_mut(LANES)) {
                s.store(exp2(s, s.load(x)), y);
            }
        }
    }

    #[test]
    fn exp2_is_accurate_and_equal_on_every_isa() {
        let mut x: Vec<f32> = (0..64_000).map(|i| -130.0 + i as f32 * (257.0 / 64_000.0)).collect();
        x[..4].copy_from_slice(&[0.0, -0.0, f32::NAN, f32::NEG_INFINITY]);
        let mut want = vec![0.0; x.len()];
        Isa::Portable.dispatch(Exp2All(&x, &mut want));
        assert_eq!(want[..2], [1.0, 1.0]);
        assert!(want[2].is_nan());
        for (&x, &y) in x.iter().zip(&want).filter(|(x, _)| !x.is_nan()) {
            let exact = f64::from(x.max(-126.0)).exp2();
            assert!((f64::from(y) / exact - 1.0).abs() < 1e-7, "exp2({x}) = {y}, want {exact}");
        }
        for isa in Isa::available() {
            let mut got = vec![0.0; x.len()];
            isa.dispatch(Exp2All(&x, &mut got));
            for i in 0..x.len() {
                let same =
                    got[i].to_bits() == want[i].to_bits() || got[i].is_nan() && want[i].is_nan();
                assert!(same, "{}: exp2({}) = {} want {}", isa.name(), x[i], got[i], want[i]);
            }
        }
    }

    #[test]
    fn exp_is_accurate_and_equal_on_every_isa() {
        let mut x: Vec<f32> = (0..64_000).map(|i| -90.0 + i as f32 * (180.0 / 64_000.0)).collect();
        x[..4].copy_from_slice(&[0.0, -0.0, f32::NAN, f32::NEG_INFINITY]);
        let mut want = vec![0.0; x.len()];
        Isa::Portable.dispatch(ExpAll(&x, &mut want));
        for (&x, &y) in x.iter().zip(&want) {
            if x.is_nan() {
                assert!(y.is_nan());
                continue;
            }
            let exact = f64::from(x).exp();
            if (-87.3..=88.7).contains(&x) {
                assert!((f64::from(y) / exact - 1.0).abs() < 2e-7, "exp({x}) = {y}, want {exact}");
            } else if x < -87.3 {
                assert_eq!(y, 0.0);
            }
        }
        for isa in Isa::available() {
            let mut got = vec![0.0; x.len()];
            isa.dispatch(ExpAll(&x, &mut got));
            for i in 0..x.len() {
                let same =
                    got[i].to_bits() == want[i].to_bits() || got[i].is_nan() && want[i].is_nan();
                assert!(same, "{}: exp({}) = {} want {}", isa.name(), x[i], got[i], want[i]);
            }
        }
    }

    struct All<'a, const FUNCTION: usize>(&'a [f32], &'a mut [f32]);
    impl<const FUNCTION: usize> Kernel for All<'_, FUNCTION> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for (x, y) in self.0.chunks(LANES).zip(self.1.chunks_mut(LANES)) {
                let x = s.load(x);
                let result = match FUNCTION {
                    0 => ln(s, x),
                    1 => softplus(s, x),
                    2 => sigmoid(s, x),
                    _ => silu(s, x),
                };
                s.store(result, y);
            }
        }
    }

    /// The portable values, once every other instruction set gave the same bits.
    fn on_every_isa<const FUNCTION: usize>(x: &[f32]) -> Vec<f32> {
        let mut want = vec![0.0; x.len()];
        Isa::Portable.dispatch(All::<FUNCTION>(x, &mut want));
        for isa in Isa::available() {
            let mut got = vec![0.0; x.len()];
            isa.dispatch(All::<FUNCTION>(x, &mut got));
            for i in 0..x.len() {
                let same =
                    got[i].to_bits() == want[i].to_bits() || got[i].is_nan() && want[i].is_nan();
                assert!(same, "{}: f({}) = {} want {}", isa.name(), x[i], got[i], want[i]);
            }
        }
        want
    }

    #[test]
    fn ln_is_accurate_and_equal_on_every_isa() {
        // Every exponent with several mantissas, subnormals, and a fine grid around 1.
        let bits = (1..0x7f80_0000u32).step_by(33_331).map(f32::from_bits);
        let mut x: Vec<f32> =
            bits.chain((0..40_000).map(|i| 0.5 + i as f32 * (1.5 / 40_000.0))).collect();
        x.truncate(x.len() / LANES * LANES);
        for (&x, &y) in x.iter().zip(&on_every_isa::<0>(&x)) {
            let exact = f64::from(x).ln();
            let bound = 2e-7 * exact.abs().max((f64::from(x) - 1.0).abs().min(1.0));
            assert!((f64::from(y) - exact).abs() <= bound, "ln({x}) = {y}, want {exact}");
        }
        let mut edges = [1.0; LANES];
        edges[..6].copy_from_slice(&[0.0, -0.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
        let y = on_every_isa::<0>(&edges);
        assert_eq!(y[..2], [f32::NEG_INFINITY; 2]);
        assert!(y[2].is_nan() && y[4].is_nan() && y[5].is_nan());
        assert_eq!((y[3], y[6]), (f32::INFINITY, 0.0));
    }

    #[test]
    fn softplus_is_accurate_and_equal_on_every_isa() {
        let mut x: Vec<f32> = (0..64_000).map(|i| -100.0 + i as f32 * (200.0 / 64_000.0)).collect();
        x[..4].copy_from_slice(&[0.0, f32::NAN, f32::NEG_INFINITY, f32::INFINITY]);
        for (&x, &y) in x.iter().zip(&on_every_isa::<1>(&x)) {
            let exact = f64::from(x).max(0.0) + (-f64::from(x).abs()).exp().ln_1p();
            if x.is_nan() {
                assert!(y.is_nan());
            } else if x < -87.3 {
                assert_eq!(y, 0.0);
            } else if x == f32::INFINITY {
                assert_eq!(y, x);
            } else {
                let error = (f64::from(y) / exact - 1.0).abs();
                assert!(error < 4e-7, "softplus({x}) = {y}, want {exact}");
            }
        }
    }

    #[test]
    fn sigmoid_and_silu_are_accurate_and_equal_on_every_isa() {
        let mut x: Vec<f32> = (0..64_000).map(|i| -100.0 + i as f32 * (200.0 / 64_000.0)).collect();
        x[..4].copy_from_slice(&[0.0, f32::NAN, f32::NEG_INFINITY, f32::INFINITY]);
        let (sigmoid, silu) = (on_every_isa::<2>(&x), on_every_isa::<3>(&x));
        assert_eq!((sigmoid[0], silu[0]), (0.5, 0.0));
        assert!(sigmoid[1].is_nan() && silu[1].is_nan());
        assert!(sigmoid[2] < 2e-38 && sigmoid[3] == 1.0 && silu[3] == f32::INFINITY);
        for (i, &x) in x.iter().enumerate().skip(4) {
            let exact = 1.0 / (1.0 + (-f64::from(x)).exp());
            if x < -87.0 {
                assert!(sigmoid[i] < 2e-38 && silu[i].abs() < 2e-36, "{x}");
                continue;
            }
            let error = (f64::from(sigmoid[i]) / exact - 1.0).abs();
            assert!(error < 4e-7, "sigmoid({x}) = {}, want {exact}", sigmoid[i]);
            let error = f64::from(silu[i]) - f64::from(x) * exact;
            assert!(error.abs() <= 4e-7 * (f64::from(x) * exact).abs(), "silu({x}) = {}", silu[i]);
        }
    }
}
