//! The whole server without sockets: requests go through the router to a scripted engine.

mod anthropic;
mod chat;
mod completions;
mod errors;
mod lifecycle;
mod ollama;
mod responses;
mod rig;
mod scripted;
mod security;
mod streaming;
mod traces;
