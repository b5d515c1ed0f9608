//! The gated delta rule. Per value head, with state S of `key_dim × value_dim`, row by row:
//!
//! ```text
//! m = e^g · (Sᵀ k)      d = beta · (v − m)      S ← e^g · S + k dᵀ      out = Sᵀ q
//! ```
//!
//! Source: arXiv 2412.06464; `gdn_recurrent` and `gdn_chunked` of the numpy reference.
//!
//! [`Commit::Deferred`] (verify, recurrent form): the state first takes up the lane's `pending`
//! rows, `S ← e^g S + k dᵀ` one by one from half `parity` of `pending`, and is written once; this
//! pass's rows then run on a copy that is thrown away, and leave k, d and g in the other half. The
//! state after keeping n rows therefore has the bits of a scan of just those n rows.
//!
//! [`Commit::Immediate`] (prefill, chunked form): takes up `pending`, then all rows in chunks that
//! end at absolute multiples of [`crate::PAGE_TOKENS`], and writes the state.
//!
//! A lane of 0 rows just takes up its pending rows.

use crate::gdn_prepare::{Commit, GdnGeometry};
use crate::{Buf, Lanes};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct GatedDelta {
    /// `[rows, keys]` f32, l2-normed and scaled.
    pub q: Buf,
    /// `[rows, keys]` f32, l2-normed.
    pub k: Buf,
    /// `[rows, values]` f32.
    pub v: Buf,
    /// `[rows, value_heads]` f32: log decay.
    pub g: Buf,
    /// `[rows, value_heads]` f32.
    pub beta: Buf,
    /// `[slots][value_heads][key_dim][value_dim]` f32.
    pub state: Buf,
    /// `[slots][2]` of `k [block][keys]`, `d [block][values]`, `g [block][value_heads]`, f32.
    pub pending: Buf,
    /// `[rows, values]` f32.
    pub out: Buf,
    /// Rows and their lanes.
    pub lanes: Lanes,
    /// Heads.
    pub geometry: GdnGeometry,
    /// The most rows of a deferred pass.
    pub block: usize,
    /// Which form.
    pub commit: Commit,
}

impl GatedDelta {
    /// Bytes of one slot's state.
    pub fn state_bytes(g: &GdnGeometry) -> usize {
        4 * g.value_heads * g.key_dim * g.value_dim
    }

    /// Bytes of one slot's pending rows, both halves.
    pub fn pending_bytes(g: &GdnGeometry, block: usize) -> usize {
        2 * 4 * block * (g.keys() + g.values() + g.value_heads)
    }
}
