//! Plain Rust: the twin of every other instruction set, and the fallback.

use super::{LANES, Simd, sum_tree};

/// Lanes as an array.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

type V = [f32; LANES];

#[inline(always)]
fn map2(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Portable {
    type F = V;
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> V {
        std::array::from_fn(|i| x[i])
    }
    #[inline(always)]
    fn store(self, v: V, out: &mut [f32]) {
        out[..LANES].copy_from_slice(&v);
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16]) -> V {
        std::array::from_fn(|i| f32::from_bits(u32::from(x[i]) << 16))
    }
    #[inline(always)]
    fn load_bf16_even(self, x: &[u16]) -> V {
        std::array::from_fn(|i| f32::from_bits(u32::from(x[2 * i]) << 16))
    }
    #[inline(always)]
    fn load_bf16_odd(self, x: &[u16]) -> V {
        std::array::from_fn(|i| f32::from_bits(u32::from(x[2 * i + 1]) << 16))
    }
    #[inline(always)]
    fn store_bf16(self, v: V, out: &mut [u16]) {
        for i in 0..LANES {
            out[i] = bf16_bits(v[i]);
        }
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn sqrt(self, a: V) -> V {
        a.map(f32::sqrt)
    }
    #[inline(always)]
    fn round(self, a: V) -> V {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn scale_pow2(self, a: V, n: V) -> V {
        map2(a, n, |a, n| a * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn exponent(self, a: V) -> V {
        a.map(|a| ((a.to_bits() >> 23) as i32 - 127) as f32)
    }
    #[inline(always)]
    fn select_lt(self, a: V, b: V, t: V, f: V) -> V {
        std::array::from_fn(|i| if a[i] < b[i] { t[i] } else { f[i] })
    }
    #[inline(always)]
    fn store_i8(self, v: V, out: &mut [i8]) {
        for i in 0..LANES {
            out[i] = v[i].round_ties_even() as i8;
        }
    }
    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        sum_tree(v)
    }
    #[inline(always)]
    fn reduce_max(self, v: V) -> f32 {
        v.into_iter().fold(v[0], |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn load_f32(self, x: &[u8]) -> V {
        std::array::from_fn(|i| f32::from_bits(word(x, i)))
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8]) -> V {
        std::array::from_fn(|i| half::f16::from_le_bytes([x[2 * i], x[2 * i + 1]]).to_f32())
    }
    #[inline(always)]
    fn load_bf16_pairs(self, x: &[u8]) -> [V; 2] {
        let words: [u32; LANES] = std::array::from_fn(|i| word(x, i));
        [words.map(|w| f32::from_bits(w << 16)), words.map(|w| f32::from_bits(w & 0xFFFF_0000))]
    }
    #[inline(always)]
    fn load_u8(self, x: &[u8]) -> V {
        std::array::from_fn(|i| f32::from(x[i]))
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8]) -> V {
        std::array::from_fn(|i| f32::from(x[i].cast_signed()))
    }
    #[inline(always)]
    fn load_bits(self, x: &[u8], shift: u32, mask: u32) -> V {
        std::array::from_fn(|i| ((word(x, i) >> shift) & mask) as f32)
    }

    const DOT_ROWS: usize = 1;
    const HIGH: f32 = 1.0;

    #[inline(always)]
    unsafe fn dots_u4<const R: usize, const K: usize>(
        self,
        codes: *const u8,
        x: [*const i8; R],
    ) -> [[V; 2]; R] {
        // SAFETY: the caller's.
        let (codes, x) = unsafe { slices::<R, K>(codes, 64, x) };
        dots::<R, K>(codes, 64, x, |codes, i| [codes[i] & 15, codes[i] >> 4])
    }
    #[inline(always)]
    unsafe fn dots_table<const R: usize, const K: usize>(
        self,
        codes: *const u8,
        table: &[u8; 16],
        x: [*const i8; R],
    ) -> [[V; 2]; R] {
        // SAFETY: the caller's.
        let (codes, x) = unsafe { slices::<R, K>(codes, 64, x) };
        let entry = |code: u8| table[usize::from(code)];
        dots::<R, K>(codes, 64, x, |codes, i| [entry(codes[i] & 15), entry(codes[i] >> 4)])
    }
    #[inline(always)]
    unsafe fn dots_u8<const R: usize, const K: usize>(
        self,
        codes: *const u8,
        x: [*const i8; R],
    ) -> [[V; 2]; R] {
        // SAFETY: the caller's.
        let (codes, x) = unsafe { slices::<R, K>(codes, 128, x) };
        dots::<R, K>(codes, 128, x, |codes, i| [codes[i], codes[i + 64]])
    }
}

#[inline(always)]
fn word(x: &[u8], i: usize) -> u32 {
    u32::from_le_bytes([x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]])
}

/// The inputs of [`Simd::dots_u4`] and its like as slices.
///
/// # Safety
/// That of [`Simd::dots_u4`], with `step` bytes of codes for each four inputs.
#[inline(always)]
pub(super) unsafe fn slices<'a, const R: usize, const K: usize>(
    codes: *const u8,
    step: usize,
    x: [*const i8; R],
) -> (&'a [u8], [&'a [i8]; R]) {
    let mut rows: [&[i8]; R] = [&[]; R];
    // SAFETY: the caller's.
    unsafe {
        for r in 0..R {
            rows[r] = std::slice::from_raw_parts(x[r], K);
        }
        (std::slice::from_raw_parts(codes, K / 4 * step), rows)
    }
}

/// Sums of products; `unpack(step of codes, i)` gives byte i of both halves of the outputs.
#[inline(always)]
fn dots<const R: usize, const K: usize>(
    codes: &[u8],
    step: usize,
    x: [&[i8]; R],
    unpack: impl Fn(&[u8], usize) -> [u8; 2],
) -> [[V; 2]; R] {
    let mut sums = [[[0i32; LANES]; 2]; R];
    for (i, codes) in codes[..K / 4 * step].chunks_exact(step).enumerate() {
        for (sums, x) in sums.iter_mut().zip(x) {
            let four = &x[4 * i..4 * i + 4];
            for lane in 0..LANES {
                for j in 0..4 {
                    let codes = unpack(codes, 4 * lane + j);
                    for half in 0..2 {
                        sums[half][lane] += i32::from(codes[half]) * i32::from(four[j]);
                    }
                }
            }
        }
    }
    sums.map(|pair| pair.map(|sums| sums.map(|sum| sum as f32)))
}

/// f32 to bf16, to nearest even; NaN keeps its sign and becomes quiet.
#[inline(always)]
pub(super) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}
