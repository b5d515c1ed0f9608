//! Ollama's API.

pub mod about;
pub mod chat;
pub mod generate;
pub mod options;
pub mod reply;
