//! The engine: rounds, drafters, sampling policy. It sees token ids, never text.

mod drafter;
mod engine;
pub mod ngram;
mod pace;
mod round;
pub mod sampler;
pub mod service;
mod session;

pub use drafter::{Drafter, HostDrafter};
pub use engine::{Engine, EngineError, EngineOptions, MemoryBytes, RoundBytes};
pub use round::Round;
pub use sampler::{Rule, Sampler, SamplingDefaults, SamplingError, SamplingOptions};
pub use session::{FinishReason, Request, Session, Stats};
