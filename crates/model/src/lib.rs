//! Models: what a checkpoint holds, and the passes that run it.

mod draft;
mod error;
mod fields;
#[cfg(test)]
mod fuzz;
mod keys;
mod load;
mod origin;
mod scratch;
mod state;
mod target;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub mod draft_spec;
pub mod files;
pub mod generation;
pub mod names;
pub mod source;
pub mod spec;
pub mod synth;

pub use draft::{
    Draft, DraftLayer, DraftState, DynamicConv, Selector, block as draft_block,
    context as draft_context,
};
pub use error::LoadError;
pub use load::{Failure, Progress};
pub use names::Logical;
pub use origin::{DraftSource, TargetSource};
pub use scratch::{AttentionScratch, GdnScratch, MlpScratch, Scratch, ScratchShape};
pub use source::{FloatDtype, Matrix, Source};
pub use state::{Cell, Lane, PageShape, State, StateShape, copy_page, page_table};
pub use target::{
    AttentionShape, AttentionWeights, GdnWeights, Layer, Mixer, Mlp, Target, forward, take_up,
};
