//! `th-engine serve`: the OpenAI, Anthropic and Ollama APIs over one engine.

pub mod api;
pub mod errors;
pub mod generation;
pub mod page;
