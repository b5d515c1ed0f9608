//! `/v1/responses`: items in, items out, and conversations that the server remembers.

pub mod compose;
pub mod handlers;
pub mod items;
pub mod reply;
pub mod request;
pub mod stream;
