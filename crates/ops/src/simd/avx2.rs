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
            [0, 8].map(|i| {
                let half = _mm_loadu_si128(x[i..].as_ptr().cast());
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
            })
        }
    }
    #[inline(always)]
    fn load_bf16_even(self, x: &[u16]) -> V {
        let x = &x[..2 * LANES];
        // SAFETY: see the impl.
        unsafe {
            [0, LANES].map(|i| {
                let pairs = _mm256_loadu_si256(x[i..].as_ptr().cast());
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs))
            })
        }
    }
    #[inline(always)]
    fn load_bf16_odd(self, x: &[u16]) -> V {
        let x = &x[..2 * LANES];
        // SAFETY: see the impl.
        unsafe {
            [0, LANES].map(|i| {
                let pairs = _mm256_loadu_si256(x[i..].as_ptr().cast());
                _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(!0xffff)))
            })
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
            [0, 1].map(|i| {
                let e = _mm256_add_epi32(_mm256_cvttps_epi32(n[i]), _mm256_set1_epi32(127));
                _mm256_mul_ps(a[i], _mm256_castsi256_ps(_mm256_slli_epi32::<23>(e)))
            })
        }
    }
    #[inline(always)]
    fn exponent(self, a: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            a.map(|a| {
                let e = _mm256_srli_epi32::<23>(_mm256_castps_si256(a));
                _mm256_cvtepi32_ps(_mm256_sub_epi32(e, _mm256_set1_epi32(127)))
            })
        }
    }
    #[inline(always)]
    fn select_lt(self, a: V, b: V, t: V, f: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            [0, 1].map(|i| _mm256_blendv_ps(f[i], t[i], _mm256_cmp_ps::<_CMP_LT_OQ>(a[i], b[i])))
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

    #[inline(always)]
    fn load_f16(self, x: &[u8]) -> V {
        let x = &x[..32];
        // SAFETY: see the impl.
        unsafe { [0, 16].map(|i| _mm256_cvtph_ps(_mm_loadu_si128(x[i..].as_ptr().cast()))) }
    }
    #[inline(always)]
    fn load_bf16_pairs(self, x: &[u8]) -> [V; 2] {
        // SAFETY: see the impl.
        unsafe {
            let pairs = words(x);
            let mask = _mm256_set1_epi32(0xFFFF_0000_u32.cast_signed());
            let low = pairs.map(|x| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x)));
            [low, pairs.map(|x| _mm256_castsi256_ps(_mm256_and_si256(x, mask)))]
        }
    }
    #[inline(always)]
    fn load_u8(self, x: &[u8]) -> V {
        let x = &x[..LANES];
        // SAFETY: see the impl.
        unsafe {
            [0, 8].map(|i| {
                let bytes = _mm_loadl_epi64(x[i..].as_ptr().cast());
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))
            })
        }
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8]) -> V {
        let x = &x[..LANES];
        // SAFETY: see the impl.
        unsafe {
            [0, 8].map(|i| {
                let bytes = _mm_loadl_epi64(x[i..].as_ptr().cast());
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
            })
        }
    }
    #[inline(always)]
    fn load_bits(self, x: &[u8], shift: u32, mask: u32) -> V {
        // SAFETY: see the impl.
        unsafe {
            let (shift, mask) =
                (_mm_cvtsi32_si128(shift.cast_signed()), _mm256_set1_epi32(mask.cast_signed()));
            words(x).map(|x| _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(x, shift), mask)))
        }
    }
    #[inline(always)]
    fn prefetch(self, x: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(x.cast()) }
    }

    const DOT_ROWS: usize = 2;
    const HIGH: f32 = 1.0;

    #[inline(always)]
    fn dots_u4<const R: usize, const K: usize>(self, codes: &[u8], x: [&[i8]; R]) -> [[V; 2]; R] {
        /// Steps whose sums of pairs fit 16 bits: 8 · 2 · 15 · 128 < 2^15.
        const STEPS: usize = 8;
        let codes = &codes[..16 * K];
        let x = x.map(|x| &x[..K]);
        // SAFETY: see the impl.
        unsafe {
            let (ones, mask) = (_mm256_set1_epi16(1), _mm256_set1_epi8(15));
            let mut sums = [[_mm256_setzero_si256(); 4]; R];
            for (block, codes) in codes.chunks(64 * STEPS).enumerate() {
                let mut pairs = [[_mm256_setzero_si256(); 4]; R];
                for (i, codes) in codes.chunks_exact(64).enumerate() {
                    let both = words(codes);
                    let low = both.map(|x| _mm256_and_si256(x, mask));
                    let high = both.map(|x| _mm256_and_si256(_mm256_srli_epi16::<4>(x), mask));
                    let codes = [low[0], low[1], high[0], high[1]];
                    for r in 0..R {
                        let four = four(&x[r][4 * (STEPS * block + i)..]);
                        for (pairs, codes) in pairs[r].iter_mut().zip(codes) {
                            let products = _mm256_maddubs_epi16(codes, four);
                            *pairs = _mm256_add_epi16(*pairs, products);
                        }
                    }
                }
                for (sums, pairs) in sums.iter_mut().flatten().zip(pairs.iter().flatten()) {
                    *sums = _mm256_add_epi32(*sums, _mm256_madd_epi16(*pairs, ones));
                }
            }
            numbers(sums)
        }
    }
    #[inline(always)]
    fn dots_table<const R: usize, const K: usize>(
        self,
        codes: &[u8],
        table: &[u8; 16],
        x: [&[i8]; R],
    ) -> [[V; 2]; R] {
        // SAFETY: see the impl.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            let mask = _mm256_set1_epi8(15);
            wide_dots::<R, K>(codes, 64, x, |codes| {
                let both = words(codes);
                let low = both.map(|x| _mm256_and_si256(x, mask));
                let high = both.map(|x| _mm256_and_si256(_mm256_srli_epi16::<4>(x), mask));
                [low[0], low[1], high[0], high[1]].map(|x| _mm256_shuffle_epi8(table, x))
            })
        }
    }
    #[inline(always)]
    fn dots_u8<const R: usize, const K: usize>(self, codes: &[u8], x: [&[i8]; R]) -> [[V; 2]; R] {
        // SAFETY: see the impl.
        unsafe {
            wide_dots::<R, K>(codes, 128, x, |codes| {
                let (a, b) = (words(codes), words(&codes[64..]));
                [a[0], a[1], b[0], b[1]]
            })
        }
    }
}

/// 16 words.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn words(x: &[u8]) -> [__m256i; 2] {
    let x = &x[..64];
    // SAFETY: the caller's; in bounds.
    [0, 32].map(|i| unsafe { _mm256_loadu_si256(x[i..].as_ptr().cast()) })
}

/// Four activations in every word.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn four(x: &[i8]) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        _mm256_set1_epi32(i32::from_ne_bytes([x[0], x[1], x[2], x[3]].map(i8::cast_unsigned)))
    }
}

/// Sums of outputs 0..8, 8..16, 16..24, 24..32 as numbers.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn numbers<const R: usize>(sums: [[__m256i; 4]; R]) -> [[V; 2]; R] {
    // SAFETY: the caller's.
    sums.map(|s| unsafe {
        let s = s.map(|s| _mm256_cvtepi32_ps(s));
        [[s[0], s[1]], [s[2], s[3]]]
    })
}

/// Products of 8-bit codes. Pairs of these don't fit the 16 bits of `maddubs`, so even and odd bytes
/// are widened and multiplied apart.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn wide_dots<const R: usize, const K: usize>(
    codes: &[u8],
    step: usize,
    x: [&[i8]; R],
    unpack: impl Fn(&[u8]) -> [__m256i; 4],
) -> [[V; 2]; R] {
    let codes = &codes[..K / 4 * step];
    let x = x.map(|x| &x[..K]);
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[_mm256_setzero_si256(); 4]; R];
        for (i, codes) in codes.chunks_exact(step).enumerate() {
            let codes = unpack(codes);
            let even = codes.map(|c| _mm256_and_si256(c, _mm256_set1_epi16(255)));
            let odd = codes.map(|c| _mm256_srli_epi16::<8>(c));
            for r in 0..R {
                let four = four(&x[r][4 * i..]);
                let x_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(four));
                let x_odd = _mm256_srai_epi16::<8>(four);
                for j in 0..4 {
                    let products = _mm256_add_epi32(
                        _mm256_madd_epi16(even[j], x_even),
                        _mm256_madd_epi16(odd[j], x_odd),
                    );
                    sums[r][j] = _mm256_add_epi32(sums[r][j], products);
                }
            }
        }
        numbers(sums)
    }
}
