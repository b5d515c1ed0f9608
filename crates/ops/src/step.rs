//! What changes from pass to pass, in device buffers.

use crate::{Buf, Commit};

/// Tokens of one page of a key/value pool, of one key block in attention, and of one chunk of the
/// chunked recurrence: one absolute grid for all three.
pub const PAGE_TOKENS: usize = 64;

/// One lane's share of a pass. `step` buffers hold `[lanes]` of these.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct LaneStep {
    /// First row of the lane in the pass's row buffers.
    pub row0: u32,
    /// Rows of the lane in this pass.
    pub rows: u32,
    /// Absolute position of the lane's first row.
    pub pos: u32,
    /// Which recurrent cell and which row of the page table the lane owns.
    pub slot: u32,
    /// Rows of the lane's previous pass that the recurrent state still has to take up.
    pub pending: u32,
    /// Which half of the pending buffers holds those rows; this pass writes the other half.
    pub parity: u32,
    /// Keeps the struct at 32 bytes.
    pub reserved: [u32; 2],
}

/// What a pass is for. A device may have kernels with other sums for the many rows of prompts; it chooses by this
/// and by shapes, not by the number of rows, so that a prompt's rows have the same bits wherever the prompt is
/// cut, and a round's whatever shares it (up to 64 rows: larger rounds take the products of prompts). What is computed does not depend on it, nor do the host's bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Prompt tokens: any number of rows, usually many.
    Prompt,
    /// A round, of the target or of the draft: a few rows of each lane.
    Round,
}

impl Pass {
    /// When this pass's rows enter the recurrent state.
    pub fn commit(self) -> Commit {
        match self {
            Pass::Prompt => Commit::Immediate,
            Pass::Round => Commit::Deferred,
        }
    }
}

/// The lanes of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lanes {
    /// `[count]` of [`LaneStep`].
    pub step: Buf,
    /// Lanes in the pass.
    pub count: usize,
    /// Rows of all lanes together: the height of every row buffer of the pass.
    pub rows: usize,
    /// The most rows that any one lane has.
    pub max_rows: usize,
}
