//! The GatedDeltaNet output norm: per head `out = x · rsqrt(mean(x²) + eps) · weight · silu(gate)`.
//!
//! `x` and `gate` are `[rows, heads · dim]` f32, `weight` is `[dim]` f32 shared by all heads, `out`
//! is `[rows, heads · dim]` activations. Norm first, gate after (`Qwen3_5RMSNormGated`).

use crate::{Act, Buf};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct GatedNorm {
    /// `[rows, heads · dim]` f32.
    pub x: Buf,
    /// `[rows, heads · dim]` f32.
    pub gate: Buf,
    /// `[dim]` f32.
    pub weight: Buf,
    /// `[rows, heads · dim]`.
    pub out: Act,
    /// Rows.
    pub rows: usize,
    /// Elements of one head.
    pub dim: usize,
    /// Added to the mean square.
    pub eps: f32,
}
