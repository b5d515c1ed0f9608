//! Anthropic's API.

pub mod messages;
pub mod request;
pub mod stream;
