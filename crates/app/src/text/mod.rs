//! Everything between text and token ids: tokenizers, chat templates, streamed output, tool calls,
//! and what answers have to obey.

pub mod chat;
pub mod detokenize;
#[cfg(test)]
mod fuzz;
pub mod gguf_vocab;
pub mod grammar;
pub mod guard;
mod least;
pub mod python_json;
pub mod reasoning;
pub mod stop;
pub mod stream;
pub mod template;
pub mod tokenizer;
pub mod tools;
