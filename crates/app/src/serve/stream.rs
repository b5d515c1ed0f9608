//! Streamed replies: an [`Answer`] written piece by piece in the form of an API.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use serde::Serialize;

use super::answer::Answer;
use super::generation::Output;

/// Writes an answer in the form of an API.
pub trait Writer: Send + 'static {
    /// The reply's content type.
    const CONTENT_TYPE: &'static str = "text/event-stream";

    /// Writes what comes before anything is known.
    fn begin(&mut self, out: &mut String);

    /// Writes what happened.
    fn output(&mut self, output: Output, out: &mut String);

    /// Writes what comes after everything went well.
    fn finish(&mut self, out: &mut String);

    /// Writes something that means nothing, so that nobody takes the connection for dead.
    fn keep_alive(&mut self, out: &mut String) {
        out.push_str(": keep-alive\n\n");
    }
}

/// The reply that streams an answer. Dropping it cancels the answer.
pub fn respond<W: Writer>(answer: Answer, writer: W, keep_alive: Duration) -> Response {
    let state = State { answer, writer, keep_alive, stage: Stage::Begin };
    let pieces = unfold(state, |mut state| async move {
        let piece = state.next().await?;
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(piece)), state))
    });
    let mut response = Body::from_stream(pieces).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(W::CONTENT_TYPE));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that gather replies would undo the streaming.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Writes a server-sent event without a name.
pub fn data(value: &impl Serialize, out: &mut String) {
    out.push_str("data: ");
    json(value, out);
    out.push_str("\n\n");
}

/// Writes a server-sent event.
pub fn event(name: &str, value: &impl Serialize, out: &mut String) {
    out.push_str("event: ");
    out.push_str(name);
    out.push('\n');
    data(value, out);
}

/// Writes a line of JSON.
pub fn line(value: &impl Serialize, out: &mut String) {
    json(value, out);
    out.push('\n');
}

fn json(value: &impl Serialize, out: &mut String) {
    // Replies are plain structures with string keys, which can't fail to serialise.
    out.push_str(&serde_json::to_string(value).unwrap_or_default());
}

enum Stage {
    Begin,
    Middle,
    Over,
}

struct State<W> {
    answer: Answer,
    writer: W,
    keep_alive: Duration,
    stage: Stage,
}

impl<W: Writer> State<W> {
    /// The next bytes: everything that is known by now.
    async fn next(&mut self) -> Option<String> {
        let mut out = String::new();
        if let Stage::Begin = self.stage {
            self.stage = Stage::Middle;
            self.writer.begin(&mut out);
        }
        while out.is_empty() {
            if let Stage::Over = self.stage {
                return None;
            }
            match tokio::time::timeout(self.keep_alive, self.answer.next()).await {
                Err(_) => self.writer.keep_alive(&mut out),
                Ok(Some(output)) => self.write(output, &mut out),
                Ok(None) => {
                    self.stage = Stage::Over;
                    self.writer.finish(&mut out);
                }
            }
        }
        while let Stage::Middle = self.stage
            && let Some(output) = self.answer.try_next()
        {
            self.write(output, &mut out);
        }
        Some(out)
    }

    fn write(&mut self, output: Output, out: &mut String) {
        if let Output::Failed(_) = output {
            self.stage = Stage::Over;
        }
        self.writer.output(output, out);
    }
}
