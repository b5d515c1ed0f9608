//! Copies rows into columns of a wider buffer: a tap of the residual stream into the features that
//! the draft's `fc` reads.

use crate::{Act, Buf};

/// `to[r, column .. column + width] = from[r]`; with `finish`, then quantises each whole row of `to`.
#[derive(Clone, Copy, Debug)]
pub struct CopyRows {
    /// `[rows, width]` f32.
    pub from: Buf,
    /// Columns of one row of `from`.
    pub width: usize,
    /// `[rows, to.width]`.
    pub to: Act,
    /// First column written.
    pub column: usize,
    /// Whether this copy completes the rows, so that their quantised parts can be made.
    pub finish: bool,
    /// Rows.
    pub rows: usize,
}
