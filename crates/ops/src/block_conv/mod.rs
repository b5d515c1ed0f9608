//! DFlash 2's dynamic grouped convolution over the rows of one block (no state across rounds).
//!
//! `out_t[c] = Σ_o (base[o, c] + dyn[t, side, o, c / group]) · x_{t−o}[c]`, with `x_{<0} = 0`, where t
//! counts the rows of a lane. Source: spec D.3, `grouped_conv` of the numpy reference.

use crate::{Buf, Lanes};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct BlockConv {
    /// `[rows, width]` f32.
    pub x: Buf,
    /// `[rows, 2, taps, width / group]` f32.
    pub dynamic: Buf,
    /// Which of the two kernels of `dynamic`.
    pub side: usize,
    /// `[taps, width]` f32: this side's.
    pub base: Buf,
    /// `[rows, width]` activations; `add` of `out_f32` is set for the residual stream instead.
    pub out: BlockConvOut,
    /// Rows and their lanes.
    pub lanes: Lanes,
    /// Taps.
    pub taps: usize,
    /// Channels.
    pub width: usize,
    /// Channels that share a dynamic tap.
    pub group: usize,
}

/// Where [`BlockConv`] writes.
#[derive(Clone, Copy, Debug)]
pub enum BlockConvOut {
    /// As the input of a linear layer.
    Act(crate::Act),
    /// Added to `[rows, width]` f32.
    Add(Buf),
}
