//! What the server tells about its requests: a trace of each, a store of them on this machine,
//! metrics, and spans for a collector.
//!
//! The server holds one [`RequestTrace`] for each request from its first byte to its last, and tells
//! it what happens; when it is dropped, the finished [`Record`] goes to the [`Recorder`]. Nothing
//! here can make a request wait or fail.

pub mod metrics;
pub mod otlp;
pub mod privacy;
pub mod record;
pub mod recorder;
pub mod request_trace;
pub mod routes;
pub mod stats;
pub mod store;
#[cfg(test)]
mod testing;
pub mod timeline;
pub mod trace_context;
pub mod when;

pub use record::{ErrorClass, Record};
pub use recorder::{Recorder, RecorderOptions};
pub use request_trace::RequestTrace;
pub use trace_context::TraceContext;
