//! Softmax attention of each row over the pages of its lane.
//!
//! The row at position p of a lane whose pass ends at position e (exclusive) sees the keys
//! `max(0, p + 1 − window) ..= p` when causal, and `max(0, p + 1 − window) ..= e − 1` otherwise.
//! Query head h reads key/value head `h / (heads / kv_heads)`.
//!
//! Order of computation, the same for every number of rows, lanes and threads: keys in blocks of
//! [`crate::PAGE_TOKENS`] positions on the absolute grid, online softmax through the blocks of a
//! split (a fixed number of blocks on the absolute grid), splits merged in ascending order.

use crate::{Buf, KvPool, Lanes};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// `[rows, heads · head_dim]` f32, normed and rotated.
    pub q: Buf,
    /// Keys and values.
    pub kv: KvPool,
    /// `[rows, heads · head_dim]` f32.
    pub out: Buf,
    /// Partial results of splits, [`Attention::scratch_bytes`] long.
    pub scratch: Buf,
    /// Rows and their positions.
    pub lanes: Lanes,
    /// Query heads.
    pub heads: usize,
    /// Multiplies q · k.
    pub scale: f32,
    /// Whether a row sees only itself and what came before.
    pub causal: bool,
    /// Keys this far back or further are not seen.
    pub window: Option<usize>,
}
