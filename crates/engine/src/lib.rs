//! The engine: rounds, drafters, sampling policy. It sees token ids, never text.

mod buffers;
mod cache;
mod disk;
mod drafter;
mod engine;
mod lanes;
pub mod ngram;
mod pace;
mod pages;
pub mod plan;
mod round;
pub mod sampler;
mod scheduler;
mod serve;
pub mod service;
mod session;

pub use disk::DiskOptions;
pub use drafter::{Drafter, HostDrafter};
pub use engine::{Engine, EngineError, EngineOptions, MemoryBytes, RoundBytes};
pub use round::{Going, Masker, Round};
pub use sampler::{Rule, Sampler, SamplingDefaults, SamplingError, SamplingOptions};
pub use serve::{EngineService, ServiceOptions, serve};
pub use session::{FinishReason, Request, Session, Stats};
