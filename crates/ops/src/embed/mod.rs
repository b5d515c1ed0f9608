//! Token embedding: `out[r] = table[ids[r]]`, dequantised on the way.
//!
//! | | shape | dtype |
//! |---|---|---|
//! | ids | `[rows]` | u32; an id ≥ n reads row n − 1 |
//! | table | `[n, k]` | any [`crate::Format`]; with tied heads the same matrix that `linear` reads |
//! | out | `[rows, k]` | f32 |

use crate::{Buf, Weight};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    /// `[rows]` u32.
    pub ids: Buf,
    /// `[vocab, hidden]`.
    pub table: Weight,
    /// `[rows, hidden]` f32.
    pub out: Buf,
    /// Rows.
    pub rows: usize,
}
