//! Everything between text and token ids: tokenizers, chat templates, streamed output.

pub mod chat;
pub mod detokenize;
#[cfg(test)]
mod fuzz;
pub mod gguf_vocab;
pub mod guard;
pub mod python_json;
pub mod reasoning;
pub mod stop;
pub mod stream;
pub mod template;
pub mod tokenizer;
