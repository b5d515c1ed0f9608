//! Matrix product with up to four weights that share their input: `out_p = x · W_pᵀ (+ out_p)`.
//!
//! | | shape | dtype |
//! |---|---|---|
//! | x | `[rows, k]` | activations, see [`Act`] |
//! | weight | `[n, k]` | any [`crate::Format`] |
//! | out | `[rows, n]` | f32; added to where `add` is set |

use crate::{Act, Buf, Weight};

/// One weight of a [`Linear`].
#[derive(Clone, Copy, Debug)]
pub struct LinearPart {
    /// `[n, k]`.
    pub weight: Weight,
    /// `[rows, n]` f32.
    pub out: Buf,
    /// Adds to `out` instead of overwriting it: the residual stream.
    pub add: bool,
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// `[rows, k]`.
    pub x: Act,
    /// The weights; the first `count` are used.
    parts: [LinearPart; Linear::MAX_PARTS],
    count: usize,
    /// Rows.
    pub rows: usize,
}

impl Linear {
    /// Weights that one op may hold.
    pub const MAX_PARTS: usize = 4;

    /// A product of `rows` rows with each of 1 to 4 weights.
    pub fn new(x: Act, rows: usize, parts: &[LinearPart]) -> Linear {
        assert!((1..=Self::MAX_PARTS).contains(&parts.len()), "{} parts", parts.len());
        let mut list = [parts[0]; Self::MAX_PARTS];
        list[..parts.len()].copy_from_slice(parts);
        Linear { x, parts: list, count: parts.len(), rows }
    }

    /// The weights in use.
    pub fn parts(&self) -> &[LinearPart] {
        &self.parts[..self.count]
    }
}
