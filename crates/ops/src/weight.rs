//! Weight matrices in the layouts that kernels read.

use crate::Buf;

/// Storage of the scales (and biases) of a quantised matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleDtype {
    /// 16-bit IEEE.
    F16,
    /// 16-bit brain float.
    Bf16,
    /// 32-bit IEEE.
    F32,
    /// Two levels, as K-quants have them: one IEEE half for 256 inputs times one byte for each group.
    TwoLevel,
}

/// How the codes of a quantised matrix are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codes {
    /// 4-bit unsigned.
    U4,
    /// 8-bit unsigned.
    U8,
    /// 4-bit indices into [`IQ4_TABLE`].
    Iq4,
}

/// The values of IQ4 codes.
pub const IQ4_TABLE: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// How a matrix is stored on the device. `linear/layout.rs` has the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Row-major f32 `[n, k]`.
    F32,
    /// Row-major IEEE half `[n, k]`.
    F16,
    /// Row-major brain float `[n, k]`.
    Bf16,
    /// Tiles of 32 outputs; codes with one scale and one bias for each `group` inputs:
    /// `w = scale · code + bias`.
    Affine {
        /// Unsigned codes, 4 or 8 bits.
        codes: Codes,
        /// 16, 32, 64 or 128.
        group: u16,
        /// Storage of scales and biases.
        scale: ScaleDtype,
    },
    /// The same without biases: `w = scale · (code − zero)`, with zero = 8 for 4-bit codes and 128
    /// for 8-bit ones; for table codes `w = scale · table[code]`.
    Symmetric {
        /// Any.
        codes: Codes,
        /// 16, 32, 64 or 128.
        group: u16,
        /// Storage of the scales.
        scale: ScaleDtype,
    },
}

/// In which order a device wants the bytes of a quantised matrix. Same pieces, same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileOrder {
    /// For vectors of 16 outputs: `linear/layout.rs`.
    Vectors,
    /// For the register fragments of matrix instructions: `linear/fragments.rs`.
    Fragments,
}

/// A matrix `[n, k]`: `n` outputs, `k` inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Packed bytes.
    pub buf: Buf,
    /// Layout.
    pub format: Format,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
}
