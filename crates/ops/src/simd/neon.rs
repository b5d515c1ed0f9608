//! NEON: four registers.

use std::arch::aarch64::*;

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
}
