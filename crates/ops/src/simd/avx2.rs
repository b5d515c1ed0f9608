//! AVX2 with FMA: two registers.

use std::arch::x86_64::*;

use super::{Kernel, LANES, Simd};

/// Proof of AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

/// # Safety
/// The machine has the features.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
}

type V = [__m256; 2];

macro_rules! lanewise {
    ($($name:ident($($arg:ident),+) = $intrinsic:ident;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: V),+) -> V {
            // SAFETY: see the impl.
            unsafe { [$intrinsic($($arg[0]),+), $intrinsic($($arg[1]),+)] }
        }
    )*};
}

// No closures around intrinsics: the compiler leaves them, and what they call, as calls.
// SAFETY of every block below: an `Avx2` exists only inside `run`, so the machine has the
// features; loads and stores are bounds-checked by the slice they index first.
impl Simd for Avx2 {
    type F = V;
    const REGISTERS: usize = 8;

    lanewise! {
        add(a, b) = _mm256_add_ps;
        sub(a, b) = _mm256_sub_ps;
        mul(a, b) = _mm256_mul_ps;
        div(a, b) = _mm256_div_ps;
        fma(a, b, c) = _mm256_fmadd_ps;
        max(a, b) = _mm256_max_ps;
        min(a, b) = _mm256_min_ps;
        sqrt(a) = _mm256_sqrt_ps;
    }

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        // SAFETY: see the impl.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> V {
        let x = &x[..LANES];
        // SAFETY: see the impl.
        unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x[8..].as_ptr())] }
    }
    #[inline(always)]
    fn store(self, v: V, out: &mut [f32]) {
        let out = &mut out[..LANES];
        // SAFETY: see the impl.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(out[8..].as_mut_ptr(), v[1]);
        }
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16]) -> V {
        let x = &x[..LANES];
        // SAFETY: see the impl.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(x[8..].as_ptr().cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }
    #[inline(always)]
    fn load_bf16_even(self, x: &[u16]) -> V {
        let x = &x[..2 * LANES];
        // SAFETY: see the impl.
        unsafe {
            let low = _mm256_loadu_si256(x.as_ptr().cast());
            let high = _mm256_loadu_si256(x[LANES..].as_ptr().cast());
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }
    #[inline(always)]
    fn load_bf16_odd(self, x: &[u16]) -> V {
        let x = &x[..2 * LANES];
        // SAFETY: see the impl.
        unsafe {
            let mask = _mm256_set1_epi32(!0xffff);
            let low = _mm256_loadu_si256(x.as_ptr().cast());
            let high = _mm256_loadu_si256(x[LANES..].as_ptr().cast());
            [
                _mm256_castsi256_ps(_mm256_and_si256(low, mask)),
                _mm256_castsi256_ps(_mm256_and_si256(high, mask)),
            ]
        }
    }
    #[inline(always)]
    fn store_bf16(self, v: V, out: &mut [u16]) {
        let x = self.lanes(v);
        for i in 0..LANES {
            out[i] = super::portable::bf16_bits(x[i]);
        }
    }
    #[inline(always)]
    fn round(self, a: V) -> V {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // SAFETY: see the impl.
        unsafe { [_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])] }
    }
    #[inline(always)]
    fn scale_pow2(self, a: V, n: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvttps_epi32(n[0]), bias));
            let high = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvttps_epi32(n[1]), bias));
            [
                _mm256_mul_ps(a[0], _mm256_castsi256_ps(low)),
                _mm256_mul_ps(a[1], _mm256_castsi256_ps(high)),
            ]
        }
    }
    #[inline(always)]
    fn select_lt(self, a: V, b: V, t: V, f: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            [
                _mm256_blendv_ps(f[0], t[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])),
                _mm256_blendv_ps(f[1], t[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])),
            ]
        }
    }
    #[inline(always)]
    fn store_i8(self, v: V, out: &mut [i8]) {
        let out = &mut out[..LANES];
        // SAFETY: see the impl.
        unsafe {
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            );
            _mm_storeu_si128(out.as_mut_ptr().cast(), bytes);
        }
    }
    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        // SAFETY: see the impl.
        unsafe {
            let x = _mm256_add_ps(v[0], v[1]);
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }
    #[inline(always)]
    fn reduce_max(self, v: V) -> f32 {
        // SAFETY: see the impl.
        unsafe {
            let x = _mm256_max_ps(v[0], v[1]);
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }
}
