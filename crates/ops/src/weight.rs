//! Weight matrices in the layouts that kernels read.

use crate::Buf;

/// Storage of the scales of a quantised matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleDtype {
    /// 16-bit IEEE.
    F16,
    /// 16-bit brain float.
    Bf16,
    /// 32-bit IEEE.
    F32,
}

/// How a matrix is stored on the device. See `linear/pack.rs` for the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Row-major f32 `[n, k]`.
    F32,
    /// Row-major IEEE half `[n, k]`.
    F16,
    /// Row-major brain float `[n, k]`.
    Bf16,
    /// Tiles of 16 output rows; unsigned codes of `bits` (4 or 8) with one scale and one bias for
    /// each `group` inputs: `w = scale · code + bias`.
    Affine {
        /// 4 or 8.
        bits: u8,
        /// 16, 32, 64 or 128.
        group: u16,
        /// Storage of scales and biases.
        scale: ScaleDtype,
    },
}

/// A matrix `[n, k]`: `n` outputs, `k` inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Packed bytes.
    pub buf: Buf,
    /// Layout.
    pub format: Format,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
}
