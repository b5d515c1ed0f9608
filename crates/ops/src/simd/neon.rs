//! NEON: four registers.

use std::arch::aarch64::*;

use super::portable::slices;
use super::{Kernel, LANES, Simd, sum_tree};

/// NEON is part of the architecture.
#[derive(Clone, Copy, Debug)]
pub struct Neon(());

pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon(()))
}

type V = [float32x4_t; 4];

macro_rules! lanewise {
    ($($name:ident($($arg:ident),+) = $intrinsic:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: V),+) -> V {
            // SAFETY: see the impl.
            unsafe { std::array::from_fn(|i| $intrinsic($($arg[i]),+)) }
        }
    )*};
}

// SAFETY of every block below: NEON is always there; loads and stores are bounds-checked by the
// slice they index first.
impl Simd for Neon {
    type F = V;
    const REGISTERS: usize = 8;

    lanewise! {
        add(a, b) = vaddq_f32;
        sub(a, b) = vsubq_f32;
        mul(a, b) = vmulq_f32;
        div(a, b) = vdivq_f32;
        fma(a, b, c) = |a, b, c| vfmaq_f32(c, a, b);
        max(a, b) = |a, b| vbslq_f32(vcgtq_f32(a, b), a, b);
        min(a, b) = |a, b| vbslq_f32(vcltq_f32(a, b), a, b);
        sqrt(a) = vsqrtq_f32;
        round(a) = vrndnq_f32;
        select_lt(a, b, t, f) = |a, b, t, f| vbslq_f32(vcltq_f32(a, b), t, f);
        scale_pow2(a, n) = |a, n| vmulq_f32(a, vreinterpretq_f32_s32(
            vshlq_n_s32::<23>(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)))));
        exponent(a) = |a| vcvtq_f32_s32(vsubq_s32(
            vreinterpretq_s32_u32(vshrq_n_u32::<23>(vreinterpretq_u32_f32(a))), vdupq_n_s32(127)));
    }

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        // SAFETY: see the impl.
        unsafe { [vdupq_n_f32(x); 4] }
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> V {
        let x = &x[..LANES];
        // SAFETY: see the impl.
        unsafe { std::array::from_fn(|i| vld1q_f32(x[4 * i..].as_ptr())) }
    }
    #[inline(always)]
    fn store(self, v: V, out: &mut [f32]) {
        let out = &mut out[..LANES];
        for i in 0..4 {
            // SAFETY: see the impl.
            unsafe { vst1q_f32(out[4 * i..].as_mut_ptr(), v[i]) }
        }
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16]) -> V {
        let x = &x[..LANES];
        // SAFETY: see the impl.
        unsafe {
            std::array::from_fn(|i| {
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(x[4 * i..].as_ptr())))
            })
        }
    }
    #[inline(always)]
    fn load_bf16_even(self, x: &[u16]) -> V {
        let x = &x[..2 * LANES];
        // SAFETY: see the impl.
        unsafe {
            std::array::from_fn(|i| {
                let pairs = vreinterpretq_u32_u16(vld1q_u16(x[8 * i..].as_ptr()));
                vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs))
            })
        }
    }
    #[inline(always)]
    fn load_bf16_odd(self, x: &[u16]) -> V {
        let x = &x[..2 * LANES];
        // SAFETY: see the impl.
        unsafe {
            std::array::from_fn(|i| {
                let pairs = vreinterpretq_u32_u16(vld1q_u16(x[8 * i..].as_ptr()));
                vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(!0xffff)))
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
    fn store_i8(self, v: V, out: &mut [i8]) {
        let x = self.lanes(v);
        for i in 0..LANES {
            out[i] = x[i].round_ties_even() as i8;
        }
    }
    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        sum_tree(self.lanes(v))
    }
    #[inline(always)]
    fn reduce_max(self, v: V) -> f32 {
        let x = self.lanes(v);
        x.into_iter().fold(x[0], |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn load_f32(self, x: &[u8]) -> V {
        let x = &x[..64];
        // SAFETY: see the impl.
        unsafe { std::array::from_fn(|i| vreinterpretq_f32_u8(vld1q_u8(x[16 * i..].as_ptr()))) }
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8]) -> V {
        let half = |i: usize| half::f16::from_le_bytes([x[2 * i], x[2 * i + 1]]).to_f32();
        self.load(&std::array::from_fn::<f32, LANES, _>(half))
    }
    #[inline(always)]
    fn load_bf16_pairs(self, x: &[u8]) -> [V; 2] {
        let x = &x[..64];
        // SAFETY: see the impl.
        unsafe {
            let words: [uint32x4_t; 4] =
                std::array::from_fn(|i| vreinterpretq_u32_u8(vld1q_u8(x[16 * i..].as_ptr())));
            let mask = vdupq_n_u32(0xFFFF_0000);
            let low = words.map(|w| vreinterpretq_f32_u32(vshlq_n_u32::<16>(w)));
            [low, words.map(|w| vreinterpretq_f32_u32(vandq_u32(w, mask)))]
        }
    }
    #[inline(always)]
    fn load_u8(self, x: &[u8]) -> V {
        self.load(&std::array::from_fn::<f32, LANES, _>(|i| f32::from(x[i])))
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8]) -> V {
        self.load(&std::array::from_fn::<f32, LANES, _>(|i| f32::from(x[i].cast_signed())))
    }
    #[inline(always)]
    fn load_bits(self, x: &[u8], shift: u32, mask: u32) -> V {
        let x = &x[..64];
        // SAFETY: see the impl.
        unsafe {
            let (shift, mask) = (vdupq_n_s32(-shift.cast_signed()), vdupq_n_u32(mask));
            std::array::from_fn(|i| {
                let words = vreinterpretq_u32_u8(vld1q_u8(x[16 * i..].as_ptr()));
                vcvtq_f32_u32(vandq_u32(vshlq_u32(words, shift), mask))
            })
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
        // SAFETY: the caller's.
        let (codes, x) = unsafe { slices::<R, K>(codes, 64, x) };
        dots::<R, K>(codes, 64, x, 0, |codes| {
            // SAFETY: NEON is always there.
            unsafe {
                let both = vld1q_u8(codes[..16].as_ptr());
                [vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)]
                    .map(|x| vreinterpretq_s8_u8(x))
            }
        })
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
        dots::<R, K>(codes, 64, x, 128, |codes| {
            // SAFETY: NEON is always there.
            unsafe {
                let table = veorq_u8(vld1q_u8(table.as_ptr()), vdupq_n_u8(0x80));
                let both = vld1q_u8(codes[..16].as_ptr());
                [vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)]
                    .map(|x| vreinterpretq_s8_u8(vqtbl1q_u8(table, x)))
            }
        })
    }
    #[inline(always)]
    unsafe fn dots_u8<const R: usize, const K: usize>(
        self,
        codes: *const u8,
        x: [*const i8; R],
    ) -> [[V; 2]; R] {
        // SAFETY: the caller's.
        let (codes, x) = unsafe { slices::<R, K>(codes, 128, x) };
        dots::<R, K>(codes, 128, x, 128, |codes| {
            [0, 64].map(|half: usize| {
                let codes = &codes[half..half + 16];
                // SAFETY: NEON is always there; in bounds.
                unsafe {
                    let codes = vld1q_u8(codes.as_ptr());
                    vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(0x80)))
                }
            })
        })
    }
}

/// Sums of products with signed codes that are `offset` too small. `unpack` reads the codes of four
/// outputs of each half at the start of its slice.
#[inline(always)]
fn dots<const R: usize, const K: usize>(
    codes: &[u8],
    step: usize,
    x: [&[i8]; R],
    offset: i32,
    unpack: impl Fn(&[u8]) -> [int8x16_t; 2],
) -> [[V; 2]; R] {
    let codes = &codes[..K / 4 * step];
    let x = x.map(|x| &x[..K]);
    let shift = x.map(|x| offset * x.iter().map(|&q| i32::from(q)).sum::<i32>());
    // SAFETY: NEON is always there. A product of a code in -128..=127 and an activation in
    // -127..=127 and the sum of two fit 16 bits.
    unsafe {
        let mut sums = shift.map(|shift| [[vdupq_n_s32(shift); 4]; 2]);
        for (i, codes) in codes.chunks_exact(step).enumerate() {
            for quarter in 0..4 {
                let codes = unpack(&codes[16 * quarter..]);
                for r in 0..R {
                    let four = &x[r][4 * i..4 * i + 4];
                    let four = i32::from_ne_bytes([0, 1, 2, 3].map(|j| four[j].cast_unsigned()));
                    let four = vreinterpretq_s8_s32(vdupq_n_s32(four));
                    for half in 0..2 {
                        let low = vmull_s8(vget_low_s8(codes[half]), vget_low_s8(four));
                        let pairs = vpaddq_s16(low, vmull_high_s8(codes[half], four));
                        let sum = &mut sums[r][half][quarter];
                        *sum = vpadalq_s16(*sum, pairs);
                    }
                }
            }
        }
        sums.map(|pair| pair.map(|sums| sums.map(|sum| vcvtq_f32_s32(sum))))
    }
}
