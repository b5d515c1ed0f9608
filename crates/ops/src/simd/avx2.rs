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
    fn exponent(self, a: V) -> V {
        // SAFETY: see the impl.
        unsafe {
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_srli_epi32::<23>(_mm256_castps_si256(a[0]));
            let high = _mm256_srli_epi32::<23>(_mm256_castps_si256(a[1]));
            [
                _mm256_cvtepi32_ps(_mm256_sub_epi32(low, bias)),
                _mm256_cvtepi32_ps(_mm256_sub_epi32(high, bias)),
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

    #[inline(always)]
    fn load_f32(self, x: &[u8]) -> V {
        // SAFETY: see the impl.
        unsafe {
            let [a, b] = words(x[..64].as_ptr());
            [_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)]
        }
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8]) -> V {
        let x = &x[..32];
        // SAFETY: see the impl.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(x[16..].as_ptr().cast())),
            ]
        }
    }
    #[inline(always)]
    fn load_bf16_pairs(self, x: &[u8]) -> [V; 2] {
        // SAFETY: see the impl.
        unsafe {
            let [a, b] = words(x[..64].as_ptr());
            let mask = _mm256_set1_epi32(0xFFFF_0000_u32.cast_signed());
            let low = [_mm256_slli_epi32::<16>(a), _mm256_slli_epi32::<16>(b)];
            let high = [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)];
            [
                [_mm256_castsi256_ps(low[0]), _mm256_castsi256_ps(low[1])],
                [_mm256_castsi256_ps(high[0]), _mm256_castsi256_ps(high[1])],
            ]
        }
    }
    #[inline(always)]
    fn load_u8(self, x: &[u8]) -> V {
        let x = &x[..LANES];
        // SAFETY: see the impl.
        unsafe {
            let x = _mm_loadu_si128(x.as_ptr().cast());
            numbers([_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(x))])
        }
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8]) -> V {
        let x = &x[..LANES];
        // SAFETY: see the impl.
        unsafe {
            let x = _mm_loadu_si128(x.as_ptr().cast());
            numbers([_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(x))])
        }
    }
    #[inline(always)]
    fn load_bits(self, x: &[u8], shift: u32, mask: u32) -> V {
        // SAFETY: see the impl.
        unsafe {
            let (shift, mask) =
                (_mm_cvtsi32_si128(shift.cast_signed()), _mm256_set1_epi32(mask.cast_signed()));
            let [a, b] = words(x[..64].as_ptr());
            let (a, b) = (_mm256_srl_epi32(a, shift), _mm256_srl_epi32(b, shift));
            numbers([_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)])
        }
    }
    const DOT_ROWS: usize = 2;
    const HIGH: f32 = 1.0;

    #[inline(always)]
    unsafe fn dots_u4<const R: usize, const K: usize>(
        self,
        codes: *const u8,
        x: [*const i8; R],
    ) -> [[V; 2]; R] {
        /// Steps whose sums of pairs fit 16 bits: 8 · 2 · 15 · 128 < 2^15.
        const STEPS: usize = 8;
        // SAFETY: the caller's.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let mut sums = [[_mm256_setzero_si256(); 4]; R];
            for block in 0..(K / 4).div_ceil(STEPS) {
                let mut pairs = [[_mm256_setzero_si256(); 4]; R];
                for i in block * STEPS..(K / 4).min((block + 1) * STEPS) {
                    let codes = nibbles(codes.add(64 * i));
                    for r in 0..R {
                        let four = four(x[r].add(4 * i));
                        for j in 0..4 {
                            let products = _mm256_maddubs_epi16(codes[j], four);
                            pairs[r][j] = _mm256_add_epi16(pairs[r][j], products);
                        }
                    }
                }
                for r in 0..R {
                    for j in 0..4 {
                        let products = _mm256_madd_epi16(pairs[r][j], ones);
                        sums[r][j] = _mm256_add_epi32(sums[r][j], products);
                    }
                }
            }
            all_numbers(sums)
        }
    }
    #[inline(always)]
    unsafe fn dots_table<const R: usize, const K: usize>(
        self,
        codes: *const u8,
        table: &[u8; 16],
        x: [*const i8; R],
    ) -> [[V; 2]; R] {
        // SAFETY: the caller's.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            wide_dots::<R, K, Table>(Table(table), codes, x)
        }
    }
    #[inline(always)]
    unsafe fn dots_u8<const R: usize, const K: usize>(
        self,
        codes: *const u8,
        x: [*const i8; R],
    ) -> [[V; 2]; R] {
        // SAFETY: the caller's.
        unsafe { wide_dots::<R, K, Bytes>(Bytes, codes, x) }
    }
}

// Safety of the functions below: their caller has an `Avx2`, and pointers are good for as many
// bytes as is said.

/// 16 words.
#[inline(always)]
unsafe fn words(x: *const u8) -> [__m256i; 2] {
    // SAFETY: see above.
    unsafe { [_mm256_loadu_si256(x.cast()), _mm256_loadu_si256(x.add(32).cast())] }
}

/// The low nibbles of 64 bytes, then the high ones.
#[inline(always)]
unsafe fn nibbles(x: *const u8) -> [__m256i; 4] {
    // SAFETY: see above.
    unsafe {
        let mask = _mm256_set1_epi8(15);
        let [a, b] = words(x);
        [
            _mm256_and_si256(a, mask),
            _mm256_and_si256(b, mask),
            _mm256_and_si256(_mm256_srli_epi16::<4>(a), mask),
            _mm256_and_si256(_mm256_srli_epi16::<4>(b), mask),
        ]
    }
}

/// Four activations in every word.
#[inline(always)]
unsafe fn four(x: *const i8) -> __m256i {
    // SAFETY: see above.
    unsafe { _mm256_set1_epi32(x.cast::<i32>().read_unaligned()) }
}

#[inline(always)]
unsafe fn numbers(x: [__m256i; 2]) -> V {
    // SAFETY: see above.
    unsafe { [_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])] }
}

/// Sums of outputs 0..8, 8..16, 16..24, 24..32 as numbers.
#[inline(always)]
unsafe fn all_numbers<const R: usize>(sums: [[__m256i; 4]; R]) -> [[V; 2]; R] {
    // SAFETY: see above.
    unsafe {
        let mut all = [[[_mm256_setzero_ps(); 2]; 2]; R];
        for r in 0..R {
            let [a, b, c, d] = sums[r];
            all[r] = [numbers([a, b]), numbers([c, d])];
        }
        all
    }
}

/// Bytes of outputs 0..8, 8..16, 16..24, 24..32 from the codes of four inputs.
trait Unpack: Copy {
    const BYTES: usize;
    /// # Safety
    /// The caller has an [`Avx2`], and `codes` points to `BYTES` bytes.
    unsafe fn unpack(self, codes: *const u8) -> [__m256i; 4];
}

/// Nibbles through a table.
#[derive(Clone, Copy)]
struct Table(__m256i);
/// Whole bytes.
#[derive(Clone, Copy)]
struct Bytes;

impl Unpack for Table {
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn unpack(self, codes: *const u8) -> [__m256i; 4] {
        // SAFETY: the caller's.
        unsafe {
            let [a, b, c, d] = nibbles(codes);
            [
                _mm256_shuffle_epi8(self.0, a),
                _mm256_shuffle_epi8(self.0, b),
                _mm256_shuffle_epi8(self.0, c),
                _mm256_shuffle_epi8(self.0, d),
            ]
        }
    }
}

impl Unpack for Bytes {
    const BYTES: usize = 128;
    #[inline(always)]
    unsafe fn unpack(self, codes: *const u8) -> [__m256i; 4] {
        // SAFETY: the caller's.
        unsafe {
            let ([a, b], [c, d]) = (words(codes), words(codes.add(64)));
            [a, b, c, d]
        }
    }
}

/// Products of 8-bit codes. Pairs of these don't fit the 16 bits of `maddubs`, so even and odd bytes
/// are widened and multiplied apart.
#[inline(always)]
unsafe fn wide_dots<const R: usize, const K: usize, C: Unpack>(
    unpack: C,
    codes: *const u8,
    x: [*const i8; R],
) -> [[V; 2]; R] {
    // SAFETY: see above.
    unsafe {
        let low = _mm256_set1_epi16(255);
        let mut sums = [[_mm256_setzero_si256(); 4]; R];
        for i in 0..K / 4 {
            let codes = unpack.unpack(codes.add(i * C::BYTES));
            for r in 0..R {
                let four = four(x[r].add(4 * i));
                let x_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(four));
                let x_odd = _mm256_srai_epi16::<8>(four);
                for j in 0..4 {
                    let even = _mm256_and_si256(codes[j], low);
                    let odd = _mm256_srli_epi16::<8>(codes[j]);
                    let products = _mm256_add_epi32(
                        _mm256_madd_epi16(even, x_even),
                        _mm256_madd_epi16(odd, x_odd),
                    );
                    sums[r][j] = _mm256_add_epi32(sums[r][j], products);
                }
            }
        }
        all_numbers(sums)
    }
}
