//! SwiGLU's middle: `out = silu(gate) · up`, elementwise. Source: arXiv 2002.05202.

use crate::{Act, Buf};

/// See the module. `gate` and `up` are `[rows, width]` f32.
#[derive(Clone, Copy, Debug)]
pub struct SiluMul {
    /// `[rows, width]` f32.
    pub gate: Buf,
    /// `[rows, width]` f32.
    pub up: Buf,
    /// `[rows, width]`.
    pub out: Act,
    /// Rows.
    pub rows: usize,
}
