//! Before the gated delta rule: causal depthwise convolution of 4 taps, SiLU, l2 norm of q and k,
//! and the two gates.
//!
//! For channel c and the lane's row t: `y = Σ_j w[j, c] · u[t − 3 + j, c]`, then SiLU, where `u` is
//! the lane's stream of `qkv` rows; q and k heads are then divided by `sqrt(Σ u² + 1e-6)`, q also
//! multiplied by `dk^-½`. `g = decay · softplus(a + dt_bias)` (decay = −exp(A_log), so g ≤ 0) and
//! `beta = sigmoid(b)`. Source: arXiv 2412.06464 and `Qwen3_5GatedDeltaNet` in transformers.
//!
//! History: `history` is `[slots][2][3 + block][channels]` f32. Half `parity` holds what the lane's
//! previous pass left: 3 rows of history, then its rows. The three rows before this pass's first
//! are rows `pending .. pending + 3` of that half. This pass writes half `1 − parity`: those three
//! rows, then its own rows ([`Commit::Deferred`], at most `block`), or just its last three rows
//! as history ([`Commit::Immediate`]; the next pass then has `pending = 0`).

use crate::{Buf, Lanes};

/// Which key head a value head reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadMap {
    /// h / (value_heads / key_heads): safetensors.
    Grouped,
    /// h mod key_heads: GGUF.
    Tiled,
}

/// Heads of a GatedDeltaNet layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GdnGeometry {
    /// Query and key heads.
    pub key_heads: usize,
    /// Value heads.
    pub value_heads: usize,
    /// Elements of a key head.
    pub key_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Which key head a value head reads.
    pub head_map: HeadMap,
}

impl GdnGeometry {
    /// Width of all key heads.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }
    /// Width of all value heads.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }
    /// Channels of the convolution: q, k and v.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }
    /// The key head of value head `h`.
    pub fn key_head(&self, h: usize) -> usize {
        match self.head_map {
            HeadMap::Grouped => h / (self.value_heads / self.key_heads),
            HeadMap::Tiled => h % self.key_heads,
        }
    }
}

/// When a pass's rows enter the recurrent state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    /// In the lane's next pass, and only the rows kept by then (verify).
    Deferred,
    /// In this pass, all of them (prefill).
    Immediate,
}

/// Taps of the convolution.
pub const CONV_TAPS: usize = 4;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct GdnPrepare {
    /// `[rows, channels]` f32: q, k, v before the convolution.
    pub qkv: Buf,
    /// `[rows, value_heads]` f32.
    pub a: Buf,
    /// `[rows, value_heads]` f32.
    pub b: Buf,
    /// `[4, channels]` f32; tap 3 meets the row itself.
    pub conv: Buf,
    /// `[value_heads]` f32: −exp(A_log).
    pub decay: Buf,
    /// `[value_heads]` f32.
    pub dt_bias: Buf,
    /// `[slots][2][3 + block][channels]` f32.
    pub history: Buf,
    /// `[rows, keys]` f32.
    pub q: Buf,
    /// `[rows, keys]` f32.
    pub k: Buf,
    /// `[rows, values]` f32.
    pub v: Buf,
    /// `[rows, value_heads]` f32: log decay.
    pub g: Buf,
    /// `[rows, value_heads]` f32.
    pub beta: Buf,
    /// Rows and their lanes.
    pub lanes: Lanes,
    /// Heads.
    pub geometry: GdnGeometry,
    /// The most rows of a deferred pass.
    pub block: usize,
    /// When the rows enter the state.
    pub commit: Commit,
}
