//! The engine: rounds, drafters, sampling policy. It sees token ids, never text.

pub mod ngram;
pub mod sampler;
