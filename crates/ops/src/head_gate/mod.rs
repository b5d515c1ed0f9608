//! Attention's output gate: `out = x · sigmoid(gate)`, or `out = x` for models without one.
//!
//! `x` is `[rows, heads · dim]` f32. `q_gate`, if any, is the query projection
//! `[rows, heads, 2 · dim]` f32, whose second half of each head is the gate.

use crate::{Act, Buf};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct HeadGate {
    /// `[rows, heads · dim]` f32.
    pub x: Buf,
    /// `[rows, heads, 2 · dim]` f32.
    pub q_gate: Option<Buf>,
    /// `[rows, heads · dim]`.
    pub out: Act,
    /// Rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Elements of one head.
    pub dim: usize,
}
