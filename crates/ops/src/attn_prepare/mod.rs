//! Before attention: per-head norm and rotary embedding of queries and keys; keys and values go
//! into the pages of their lane at their absolute positions.
//!
//! Row r of a lane stands at position `pos + r`. `rsqrt` norm as in `rms_norm`, over each head's
//! `head_dim`, before the rotation. The rotation turns the pairs of the first `rope.dims` elements
//! by `position · inv_freq[i]`, computed in f32 as in transformers; the rest passes through.

use crate::{Buf, KvPool, Lanes};

/// Which elements of a head form rotary pair i of n = dims / 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairing {
    /// (i, i + n): Qwen, HF's rotate-half.
    Halves,
    /// (2i, 2i + 1): llama in GGUF.
    Adjacent,
}

/// Rotary embedding.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// `[dims / 2]` f32.
    pub inv_freq: Buf,
    /// Elements of a head that turn.
    pub dims: usize,
    /// Which elements turn together.
    pub pairing: RopePairing,
}

/// The query side of [`AttnPrepare`].
#[derive(Clone, Copy, Debug)]
pub struct Queries {
    /// `[rows, heads · stride]` f32; a head's query is the first `head_dim` of its `stride`.
    pub q: Buf,
    /// `head_dim`, or `2 · head_dim` where a gate follows each head's query.
    pub stride: usize,
    /// `[head_dim]` f32.
    pub norm: Option<Buf>,
    /// Query heads.
    pub heads: usize,
    /// `[rows, heads · head_dim]` f32.
    pub out: Buf,
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct AttnPrepare {
    /// Absent when only the cache is filled (a draft's context rows).
    pub queries: Option<Queries>,
    /// `[rows, kv_heads · head_dim]` f32.
    pub k: Buf,
    /// `[rows, kv_heads · head_dim]` f32.
    pub v: Buf,
    /// `[head_dim]` f32.
    pub k_norm: Option<Buf>,
    /// Rotary embedding of queries and keys.
    pub rope: Rope,
    /// Where keys and values go.
    pub kv: KvPool,
    /// Rows and their positions.
    pub lanes: Lanes,
    /// Of the norms.
    pub eps: f32,
}
