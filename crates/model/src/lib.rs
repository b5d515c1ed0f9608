//! Models: what a checkpoint holds, and the passes that run it.

mod error;
mod fields;
#[cfg(test)]
mod fuzz;
mod keys;
mod origin;
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

pub use error::LoadError;
pub use names::Logical;
pub use origin::{DraftSource, TargetSource};
pub use source::{FloatDtype, Matrix, Source};
