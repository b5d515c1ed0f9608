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
