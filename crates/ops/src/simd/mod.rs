//! Vector arithmetic on 16 f32 lanes, whatever the machine's register width.
//!
//! Every instruction set computes the same 16 lanes with the same operations in the same order
//! (AVX2 as two registers, NEON as four, portable as an array), so their results agree bit for
//! bit, and a kernel written once over [`Simd`] needs no tolerance between them.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use portable::Portable;

/// Lanes of one vector.
pub const LANES: usize = 16;

/// A vector instruction set, detected at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 F, BW, DQ, VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// Plain Rust.
    Portable,
}

impl Isa {
    /// The best set that this machine has.
    pub fn detect() -> Isa {
        Isa::available()[0]
    }

    /// Every set that this machine has, best first.
    pub fn available() -> Vec<Isa> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
            {
                sets.push(Isa::Avx512);
            }
            if is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
            {
                sets.push(Isa::Avx2);
            }
        }
        #[cfg(target_arch = "aarch64")]
        sets.push(Isa::Neon);
        sets.push(Isa::Portable);
        sets
    }

    /// The name used by `--isa` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => "neon",
            Isa::Portable => "portable",
        }
    }

    /// [`Simd::DOT_ROWS`] of this set.
    pub fn dot_rows(self) -> usize {
        struct DotRows;
        impl Kernel for DotRows {
            type Output = usize;
            #[inline(always)]
            fn run<S: Simd>(self, _: S) -> usize {
                S::DOT_ROWS
            }
        }
        self.dispatch(DotRows)
    }

    /// Runs a kernel compiled for this set.
    #[inline]
    pub fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            // SAFETY: an `Isa` names a set that `available` found on this machine.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::run(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::run(kernel) },
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::run(kernel),
            Isa::Portable => kernel.run(Portable),
        }
    }
}

/// A computation written once for all instruction sets. `run` and everything it calls must be
/// `#[inline(always)]`, so that it is compiled with the set's features.
pub trait Kernel {
    /// What it returns.
    type Output;
    /// The computation.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Operations on 16 f32 lanes. A token proves that the machine has the instructions.
pub trait Simd: Copy + Send + Sync + 'static {
    /// 16 f32 lanes.
    type F: Copy;
    /// How many `F` the register file holds: what a kernel may keep live at once.
    const REGISTERS: usize;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::F;
    /// The first 16 elements.
    fn load(self, x: &[f32]) -> Self::F;
    /// Into the first 16 elements.
    fn store(self, v: Self::F, out: &mut [f32]);
    /// 16 bf16 values, widened.
    fn load_bf16(self, x: &[u16]) -> Self::F;
    /// Values 0, 2, 4, … 30 of 32 bf16 values, widened. With [`Simd::load_bf16_odd`] half the work
    /// of two [`Simd::load_bf16`] on 32-bit words that hold a pair.
    fn load_bf16_even(self, x: &[u16]) -> Self::F;
    /// Values 1, 3, 5, … 31 of 32 bf16 values, widened.
    fn load_bf16_odd(self, x: &[u16]) -> Self::F;
    /// Rounded to bf16, to nearest even. NaN stays NaN.
    fn store_bf16(self, v: Self::F, out: &mut [u16]);
    /// a + b
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// a − b
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// a · b
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// a / b
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// a · b + c, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger; b where either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; b where either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// Square root.
    fn sqrt(self, a: Self::F) -> Self::F;
    /// Nearest integer, ties to even, as f32.
    fn round(self, a: Self::F) -> Self::F;
    /// a · 2^n for integral lanes n in −126..=127 (as f32).
    fn scale_pow2(self, a: Self::F, n: Self::F) -> Self::F;
    /// floor(log2 a) as f32, for normal lanes a > 0.
    fn exponent(self, a: Self::F) -> Self::F;
    /// Lanes: a < b ? t : f
    fn select_lt(self, a: Self::F, b: Self::F, t: Self::F, f: Self::F) -> Self::F;
    /// Rounds to nearest even and converts to int8 (lanes must lie in −127..=127).
    fn store_i8(self, v: Self::F, out: &mut [i8]);
    /// The lanes as an array.
    #[inline(always)]
    fn lanes(self, v: Self::F) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        self.store(v, &mut out);
        out
    }
    /// Sum of the lanes, as a balanced tree: lane i + lane i+8, then +4, +2, +1.
    fn sum(self, v: Self::F) -> f32;
    /// Largest lane.
    fn reduce_max(self, v: Self::F) -> f32;

    /// 16 little-endian f32 values.
    fn load_f32(self, x: &[u8]) -> Self::F;
    /// 16 little-endian IEEE halves, widened.
    fn load_f16(self, x: &[u8]) -> Self::F;
    /// 16 little-endian words as pairs of bf16: the low ones and the high ones, widened.
    fn load_bf16_pairs(self, x: &[u8]) -> [Self::F; 2];
    /// 16 unsigned bytes as numbers.
    fn load_u8(self, x: &[u8]) -> Self::F;
    /// 16 signed bytes as numbers.
    fn load_i8(self, x: &[u8]) -> Self::F;
    /// From each of 16 little-endian words, the bits of `mask` once shifted right, as a number.
    fn load_bits(self, x: &[u8], shift: u32, mask: u32) -> Self::F;

    /// Rows that one pass of an integer product takes best, at most 8.
    const DOT_ROWS: usize;
    /// By how much the second sums of [`Simd::dots_u4`] are too large.
    const HIGH: f32;
    /// Integer products of R rows of K activations with K 4-bit codes of 32 outputs, exact, as
    /// numbers. Byte `64·(k/4) + 4·lane + k%4` of the codes holds output `lane` in its low nibble and
    /// output `16 + lane` in its high one. The sums of the latter come multiplied by [`Simd::HIGH`].
    ///
    /// # Safety
    /// `codes` points to `16 · K` bytes, each of `x` to K activations; K is a multiple of 16.
    unsafe fn dots_u4<const R: usize, const K: usize>(
        self,
        codes: *const u8,
        x: [*const i8; R],
    ) -> [[Self::F; 2]; R];
    /// The same with the two codes of a byte looked up in a table first. Sums are not multiplied.
    ///
    /// # Safety
    /// As for [`Simd::dots_u4`].
    unsafe fn dots_table<const R: usize, const K: usize>(
        self,
        codes: *const u8,
        table: &[u8; 16],
        x: [*const i8; R],
    ) -> [[Self::F; 2]; R];
    /// The same with 8-bit codes: byte `128·(k/4) + 64·half + 4·lane + k%4` is output
    /// `16·half + lane`. Sums are not multiplied.
    ///
    /// # Safety
    /// As for [`Simd::dots_u4`], but `32 · K` bytes of codes.
    unsafe fn dots_u8<const R: usize, const K: usize>(
        self,
        codes: *const u8,
        x: [*const i8; R],
    ) -> [[Self::F; 2]; R];
}

/// Bytes of a cache line.
pub const CACHE_LINE: usize = 64;

/// Asks for a cache line, into the second level, that will be read soon. Any address will do; nothing is accessed.
#[inline(always)]
pub fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which neither faults nor reads; SSE is part of the architecture.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// The tree of [`Simd::sum`] on an array.
#[inline(always)]
pub(crate) fn sum_tree(mut x: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            x[i] += x[i + half];
        }
        half /= 2;
    }
    x[0]
}
