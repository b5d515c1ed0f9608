//! `th-engine serve`: the OpenAI, Anthropic and Ollama APIs over one engine.
//!
//! A request passes `listen` (sockets), `router` with its layers (`exchange` follows it from the first
//! byte to the last, `errors` puts failures in the caller's form, `security` guards), and a handler of its API,
//! which turns it into a [`generation::Generation`]. [`answer`] submits that to the engine and gives
//! [`generation::Output`]s, which the API writes in its own words, whole or as a stream.

pub mod answer;
pub mod anthropic;
pub mod api;
pub mod args;
pub mod body;
mod choice;
pub mod config;
pub mod errors;
pub mod exchange;
pub mod generation;
pub mod health;
pub mod ids;
pub mod launch;
pub mod lifecycle;
pub mod listen;
pub mod logprobs;
pub mod model;
mod objects;
pub mod ollama;
pub mod openai;
pub mod page;
pub mod prepare;
pub mod router;
pub mod run;
pub mod security;
pub mod state;
pub mod stream;
#[cfg(unix)]
pub mod supervise;
pub mod text;

#[cfg(test)]
mod tests;
