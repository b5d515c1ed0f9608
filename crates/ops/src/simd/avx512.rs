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
    fn exponent(self, a: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let e = _mm512_srli_epi32::<23>(_mm512_castps_si512(a));
            _mm512_cvtepi32_ps(_mm512_sub_epi32(e, _mm512_set1_epi32(127)))
        }
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

    #[inline(always)]
    fn load_f32(self, x: &[u8]) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_loadu_ps(x[..64].as_ptr().cast()) }
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8]) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x[..32].as_ptr().cast())) }
    }
    #[inline(always)]
    fn load_bf16_pairs(self, x: &[u8]) -> [__m512; 2] {
        // SAFETY: see the impl.
        unsafe {
            let pairs = _mm512_loadu_si512(x[..64].as_ptr().cast());
            let high = _mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed()));
            let low = _mm512_slli_epi32::<16>(pairs);
            [_mm512_castsi512_ps(low), _mm512_castsi512_ps(high)]
        }
    }
    #[inline(always)]
    fn load_u8(self, x: &[u8]) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let bytes = _mm_loadu_si128(x[..LANES].as_ptr().cast());
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))
        }
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8]) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let bytes = _mm_loadu_si128(x[..LANES].as_ptr().cast());
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
        }
    }
    #[inline(always)]
    fn load_bits(self, x: &[u8], shift: u32, mask: u32) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let words = _mm512_loadu_si512(x[..64].as_ptr().cast());
            let words = _mm512_srl_epi32(words, _mm_cvtsi32_si128(shift.cast_signed()));
            let mask = _mm512_set1_epi32(mask.cast_signed());
            _mm512_cvtepi32_ps(_mm512_and_si512(words, mask))
        }
    }
    const DOT_ROWS: usize = 8;
    /// The raw bytes are `low + 16 · high`.
    const HIGH: f32 = 16.0;

    #[inline(always)]
    unsafe fn dots_u4<const R: usize, const K: usize>(
        self,
        codes: *const u8,
        x: [*const i8; R],
    ) -> [[__m512; 2]; R] {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = dots::<R, K, Nibbles>(Nibbles, codes, x);
            for r in 0..R {
                sums[r][1] = _mm512_sub_epi32(sums[r][1], sums[r][0]);
            }
            numbers(sums)
        }
    }
    #[inline(always)]
    unsafe fn dots_table<const R: usize, const K: usize>(
        self,
        codes: *const u8,
        table: &[u8; 16],
        x: [*const i8; R],
    ) -> [[__m512; 2]; R] {
        // SAFETY: the caller's.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            numbers(dots::<R, K, Table>(Table(table), codes, x))
        }
    }
    #[inline(always)]
    unsafe fn dots_u8<const R: usize, const K: usize>(
        self,
        codes: *const u8,
        x: [*const i8; R],
    ) -> [[__m512; 2]; R] {
        // SAFETY: the caller's.
        unsafe { numbers(dots::<R, K, Bytes>(Bytes, codes, x)) }
    }
}

/// Two vectors of bytes from the codes of four inputs.
trait Unpack: Copy {
    const BYTES: usize;
    /// # Safety
    /// The machine has the features, and `codes` is `BYTES` long.
    unsafe fn unpack(self, codes: *const u8) -> [__m512i; 2];
}

/// Low nibbles, and both: `low + 16 · high`. Sums with `low` taken from sums with both leave 16
/// times those with `high`, for one instruction in all instead of two for each step.
#[derive(Clone, Copy)]
struct Nibbles;
/// Nibbles through a table.
#[derive(Clone, Copy)]
struct Table(__m512i);
/// Whole bytes.
#[derive(Clone, Copy)]
struct Bytes;

impl Unpack for Nibbles {
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn unpack(self, codes: *const u8) -> [__m512i; 2] {
        // SAFETY: the caller's.
        unsafe {
            let both = _mm512_loadu_si512(codes.cast());
            [_mm512_and_si512(both, _mm512_set1_epi8(15)), both]
        }
    }
}

impl Unpack for Table {
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn unpack(self, codes: *const u8) -> [__m512i; 2] {
        // SAFETY: the caller's.
        unsafe {
            let both = _mm512_loadu_si512(codes.cast());
            let mask = _mm512_set1_epi8(15);
            let low = _mm512_and_si512(both, mask);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(both), mask);
            [_mm512_shuffle_epi8(self.0, low), _mm512_shuffle_epi8(self.0, high)]
        }
    }
}

impl Unpack for Bytes {
    const BYTES: usize = 128;
    #[inline(always)]
    unsafe fn unpack(self, codes: *const u8) -> [__m512i; 2] {
        // SAFETY: the caller's.
        unsafe { [_mm512_loadu_si512(codes.cast()), _mm512_loadu_si512(codes.add(64).cast())] }
    }
}

/// Sums over K inputs of the products of R rows with two vectors of bytes for each four inputs.
///
/// # Safety
/// The machine has the features. `codes` points to `K / 4 · C::BYTES` bytes, each of `x` to K
/// activations; K is a multiple of 16.
#[inline(always)]
unsafe fn dots<const R: usize, const K: usize, C: Unpack>(
    unpack: C,
    codes: *const u8,
    x: [*const i8; R],
) -> [[__m512i; 2]; R] {
    /// How far ahead of its use a line of codes is asked for. With eight rows the processor's own
    /// prefetcher runs less than a memory latency ahead. One line at a time: a burst would fill
    /// the line buffers that activations need too.
    const AHEAD: usize = 4096;
    /// Few rows would wait for the latency of their products: more sums hide it.
    const MOST: usize = 4;
    let chains = match R {
        1 => 4,
        2..=4 => 2,
        _ => 1,
    };
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[[_mm512_setzero_si512(); 2]; R]; MOST];
        // Spelled out four times: the compiler leaves the loop as it is, and its exit would be
        // mispredicted every time.
        macro_rules! step {
            ($i:expr, $j:literal) => {
                let step = codes.add(($i + $j) * C::BYTES);
                for line in 0..C::BYTES / 64 {
                    _mm_prefetch::<_MM_HINT_T0>(step.wrapping_add(AHEAD + 64 * line).cast());
                }
                let [a, b] = unpack.unpack(step);
                let sums = &mut sums[$j % chains];
                for r in 0..R {
                    let four = x[r].add(4 * ($i + $j)).cast::<i32>().read_unaligned();
                    let four = _mm512_set1_epi32(four);
                    sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], a, four);
                    sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], b, four);
                }
            };
        }
        for i in (0..K / 4).step_by(4) {
            step!(i, 0);
            step!(i, 1);
            step!(i, 2);
            step!(i, 3);
        }
        let mut stride = chains / 2;
        while stride > 0 {
            for chain in 0..stride {
                for r in 0..R {
                    for half in 0..2 {
                        let other = sums[chain + stride][r][half];
                        sums[chain][r][half] = _mm512_add_epi32(sums[chain][r][half], other);
                    }
                }
            }
            stride /= 2;
        }
        sums[0]
    }
}

/// # Safety
/// The machine has the features.
#[inline(always)]
unsafe fn numbers<const R: usize>(sums: [[__m512i; 2]; R]) -> [[__m512; 2]; R] {
    // SAFETY: the caller's.
    unsafe {
        let mut numbers = [[_mm512_setzero_ps(); 2]; R];
        for r in 0..R {
            for half in 0..2 {
                numbers[r][half] = _mm512_cvtepi32_ps(sums[r][half]);
            }
        }
        numbers
    }
}
