//! Models: what a checkpoint holds, and the passes that run it.

mod error;
pub mod files;

pub use error::LoadError;
