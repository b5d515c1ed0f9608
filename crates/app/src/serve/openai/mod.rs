//! OpenAI's API.

pub mod chat;
pub mod chat_stream;
pub mod completions;
pub mod content;
pub mod format;
pub mod messages;
pub mod models;
pub mod options;
pub mod reply;
pub mod responses;
pub mod store;
