//! AVX-512: one register.

use std::arch::x86_64::*;

use super::{Kernel, LANES, Simd};

/// Proof of AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

/// # Safety
/// The machine has the features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

// SAFETY of every block below: an `Avx512` exists only inside `run`, so the machine has the
// features; loads and stores are bounds-checked by the slice they index first.
impl Simd for Avx512 {
    type F = __m512;
    const REGISTERS: usize = 32;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_loadu_ps(x[..LANES].as_ptr()) }
    }
    #[inline(always)]
    fn store(self, v: __m512, out: &mut [f32]) {
        // SAFETY: see the impl.
        unsafe { _mm512_storeu_ps(out[..LANES].as_mut_ptr(), v) }
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16]) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let half = _mm256_loadu_si256(x[..LANES].as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
        }
    }
    #[inline(always)]
    fn load_bf16_even(self, x: &[u16]) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let pairs = _mm512_loadu_si512(x[..2 * LANES].as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))
        }
    }
    #[inline(always)]
    fn load_bf16_odd(self, x: &[u16]) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let pairs = _mm512_loadu_si512(x[..2 * LANES].as_ptr().cast());
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(!0xffff)))
        }
    }
    #[inline(always)]
    fn store_bf16(self, v: __m512, out: &mut [u16]) {
        // SAFETY: see the impl.
        unsafe {
            let bits = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
            let quiet = _mm512_or_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(0x40));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let half = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet));
            _mm256_storeu_si256(out[..LANES].as_mut_ptr().cast(), half);
        }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn sqrt(self, a: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_sqrt_ps(a) }
    }
    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT }>(a) }
    }
    #[inline(always)]
    fn scale_pow2(self, a: __m512, n: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_scalef_ps(a, n) }
    }
    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, t: __m512, f: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), f, t) }
    }
    #[inline(always)]
    fn store_i8(self, v: __m512, out: &mut [i8]) {
        // SAFETY: see the impl.
        unsafe {
            let bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v));
            _mm_storeu_si128(out[..LANES].as_mut_ptr().cast(), bytes);
        }
    }
    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        // SAFETY: see the impl.
        unsafe {
            let x = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }
    #[inline(always)]
    fn reduce_max(self, v: __m512) -> f32 {
        // SAFETY: see the impl.
        unsafe { _mm512_reduce_max_ps(v) }
    }
}
