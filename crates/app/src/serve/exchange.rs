//! One request and its reply, from the first byte to the last.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use engine::service::Event;

use super::errors::ApiError;
use super::generation::{Generation, Input};
use super::ids;
use super::state::App;
use crate::telemetry::record::{Record, Sampling, request_hash, session_key};
use crate::telemetry::timeline::Stage;
use crate::telemetry::{RequestTrace, TraceContext};
use crate::text::chat::Role;
use crate::text::grammar::ResponseFormat;
use crate::text::tools::ToolChoice;

/// Fields of the request that nothing read.
pub const IGNORED: HeaderName = HeaderName::from_static("x-th-ignored");
/// What was changed in the request.
pub const NOTES: HeaderName = HeaderName::from_static("x-th-notes");
/// What OpenAI's clients and Anthropic's look for.
const REQUEST_IDS: [HeaderName; 2] =
    [HeaderName::from_static("x-request-id"), HeaderName::from_static("request-id")];
/// The longest header that is written, name of a client and name of a session.
const MAX_HEADER: usize = 2048;
const MAX_CLIENT: usize = 64;
const MAX_SESSION: usize = 128;

/// What all parts of the server know of a request. Handlers find it among the extensions.
#[derive(Clone)]
pub struct Exchange(Arc<Inner>);

struct Inner {
    id: String,
    arrived: Instant,
    open: Mutex<Open>,
}

/// What is not settled before the last byte.
#[derive(Default)]
struct Open {
    /// `None` for requests that are not traced: those that watch the server.
    trace: Option<RequestTrace>,
    ignored: BTreeSet<String>,
    notes: Vec<String>,
    finish: Option<&'static str>,
    failed: Option<ApiError>,
}

impl Exchange {
    /// A request that has just arrived.
    pub fn begin(mut trace: Option<RequestTrace>) -> Exchange {
        let id = ids::fresh("req_");
        if let Some(trace) = &mut trace {
            trace.record.request_id.clone_from(&id);
        }
        let open = Mutex::new(Open { trace, ..Open::default() });
        Exchange(Arc::new(Inner { id, arrived: Instant::now(), open }))
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// When its head had arrived.
    pub fn arrived(&self) -> Instant {
        self.0.arrived
    }

    /// Its body, which arrived from `from` until now.
    pub fn body(&self, bytes: &[u8], from: Instant) {
        self.trace(|trace| {
            trace.stage(Stage::Read, from);
            trace.request_body(bytes);
            trace.record.request_hash = Some(request_hash(&trace.record.endpoint, bytes));
        });
    }

    /// Fields that nothing reads.
    pub fn ignored(&self, paths: impl IntoIterator<Item = String>) {
        self.open(|open| open.ignored.extend(paths));
    }

    /// Something that was changed in the request.
    pub fn notes(&self, notes: impl IntoIterator<Item = String>) {
        self.open(|open| open.notes.extend(notes));
    }

    /// What the caller calls its conversation or user.
    pub fn session(&self, name: Option<&str>) {
        let name = name.filter(|name| !name.is_empty());
        let name = name.map(|name| name.chars().take(MAX_SESSION).collect());
        self.trace(|trace| trace.record.session = trace.record.session.take().or(name));
    }

    /// What it asks to be generated.
    pub fn generates(&self, model: &str, generation: &Generation, streams: bool) {
        self.trace(|trace| {
            trace.choices_per_prompt(generation.choices);
            let record = &mut trace.record;
            record.model = model.to_owned();
            record.stream = streams;
            record.sampling = sampling(generation);
            if record.session.is_none() {
                record.session = beginning(&record.client, &generation.input);
            }
        });
    }

    /// The seed that its answers follow from, whether it named one or not.
    pub fn seeded(&self, seed: u64) {
        self.trace(|trace| trace.record.sampling.seed = Some(seed));
    }

    /// A stage that took this long until now.
    pub fn stage(&self, stage: Stage, from: Instant) {
        self.trace(|trace| trace.stage(stage, from));
    }

    /// What the engine told of a choice.
    pub fn observe(&self, choice: usize, event: &Event) {
        self.trace(|trace| trace.observe(choice, event));
    }

    /// Time that went into the text of a choice, and the text.
    pub fn detokenised(&self, choice: usize, took: Duration, text: &str) {
        self.trace(|trace| {
            trace.detokenised(choice, took);
            trace.response_text(text);
        });
    }

    /// A choice ended.
    pub fn ended(&self, finish: &'static str, reasoning_tokens: usize, tools: Vec<String>) {
        self.open(|open| open.finish = open.finish.or(Some(finish)));
        self.trace(|trace| {
            trace.record.tokens.reasoning += reasoning_tokens as u64;
            trace.record.tool_calls.extend(tools);
        });
    }

    /// It failed, perhaps in the middle of its reply.
    pub fn failed(&self, error: &ApiError) {
        self.open(|open| {
            open.failed.get_or_insert_with(|| error.clone());
        });
    }

    fn complete(&self, status: u16) {
        self.open(|open| {
            let (Some(mut trace), failed) = (open.trace.take(), &open.failed) else { return };
            match failed {
                Some(error) => trace.fail(error.class, status, error.code, &error.message),
                None => trace.complete(status, open.finish),
            }
        });
    }

    fn trace(&self, change: impl FnOnce(&mut RequestTrace)) {
        self.open(|open| open.trace.as_mut().map(change));
    }

    fn open<T>(&self, change: impl FnOnce(&mut Open) -> T) -> T {
        change(&mut self.0.open.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn mark(&self, headers: &mut HeaderMap) {
        if let Ok(id) = HeaderValue::try_from(self.id()) {
            for name in REQUEST_IDS {
                headers.insert(name, id.clone());
            }
        }
        self.open(|open| {
            let ignored: Vec<&str> = open.ignored.iter().map(String::as_str).collect();
            for (name, text) in [(IGNORED, ignored.join(", ")), (NOTES, open.notes.join("; "))] {
                if !text.is_empty() {
                    headers.insert(name, header_text(&text));
                }
            }
        });
    }
}

/// What is told about how an answer is made.
fn sampling(generation: &Generation) -> Sampling {
    let constraint = match generation.response_format {
        ResponseFormat::Text => None,
        ResponseFormat::JsonObject => Some("json_object"),
        ResponseFormat::JsonSchema { .. } => Some("json_schema"),
        ResponseFormat::Regex(_) => Some("regex"),
        ResponseFormat::Lark(_) => Some("grammar"),
    };
    let chat = match &generation.input {
        Input::Chat(chat) => Some(chat),
        _ => None,
    };
    let tool = chat.filter(|chat| !matches!(chat.tool_choice, ToolChoice::Auto | ToolChoice::None));
    let reasoning = chat.and_then(|chat| match (&chat.reasoning.effort, chat.reasoning.enabled) {
        (Some(effort), _) => Some(effort.chars().take(MAX_CLIENT).collect()),
        (None, enabled) => enabled.map(|on| if on { "on" } else { "off" }.to_owned()),
    });
    Sampling {
        max_tokens: generation.limits.max_tokens.map(|n| n as u64),
        stops: generation.stop.len(),
        n: (generation.choices > 1).then(|| generation.choices.try_into().unwrap_or(u32::MAX)),
        tools: chat.map_or(0, |chat| chat.tools.len()),
        constraint: constraint.or(tool.map(|_| "tool")).map(str::to_owned),
        reasoning,
        ..Sampling::from(&generation.sampling)
    }
}

/// A name for the conversation that begins like this.
fn beginning(client: &str, input: &Input) -> Option<String> {
    let Input::Chat(chat) = input else { return None };
    let first = chat.messages.iter().position(|message| message.role == Role::User)?;
    let tools = chat.tools.iter().map(|tool| tool.name.as_str());
    let messages = chat.messages[..=first].iter().map(|message| message.content.as_str());
    let parts: Vec<&str> = tools.chain(messages).collect();
    Some(session_key(client, &parts))
}

/// Text as it may stand in a header: printable ASCII, not too long.
fn header_text(text: &str) -> HeaderValue {
    let printable = |c: char| if matches!(c, ' '..='~') { c } else { '?' };
    let mut ascii: String = text.chars().map(printable).take(MAX_HEADER).collect();
    if text.chars().count() > MAX_HEADER {
        ascii.replace_range(MAX_HEADER - 3.., "...");
    }
    HeaderValue::try_from(ascii).unwrap_or(HeaderValue::from_static("?"))
}

/// The layer around all routes: begins the exchange, marks its reply, and follows it to its end.
pub async fn observe(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let context = TraceContext::from_headers(request.headers());
    let exchange = Exchange::begin(trace(&app, &request, &context));
    let head = request.method() == Method::HEAD;
    request.extensions_mut().insert(exchange.clone());
    request.extensions_mut().insert(context.clone());
    let mut response = next.run(request).await;
    exchange.mark(response.headers_mut());
    context.mark(response.headers_mut());
    if let Some(error) = response.extensions().get::<ApiError>() {
        exchange.failed(error);
    }
    let status = response.status().as_u16();
    let (parts, body) = response.into_parts();
    let watched = Watched { body, exchange, status };
    if head || watched.body.is_end_stream() {
        watched.exchange.complete(status);
    }
    Response::from_parts(parts, Body::new(watched))
}

fn trace(app: &App, request: &Request, context: &TraceContext) -> Option<RequestTrace> {
    record(request, context).map(|record| RequestTrace::of(&app.recorder, record))
}

/// The record that a request begins. Those that only look at the server leave none: there is one every
/// few seconds.
pub fn record(request: &Request, context: &TraceContext) -> Option<Record> {
    if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
        return None;
    }
    let route = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str);
    let mut record = Record::begin(context, route);
    record.client = client(request.headers());
    record.session = session(request.headers());
    Some(record)
}

/// The program that asks, by the first word of its `User-Agent`.
fn client(headers: &HeaderMap) -> String {
    let agent = headers.get(header::USER_AGENT).and_then(|agent| agent.to_str().ok());
    let word = agent.and_then(|agent| agent.split_whitespace().next()).unwrap_or("unknown");
    word.chars().take(MAX_CLIENT).collect()
}

fn session(headers: &HeaderMap) -> Option<String> {
    let named = ["x-session-id", "x-claude-code-session-id", "session_id"];
    let value = named.iter().find_map(|name| headers.get(*name)?.to_str().ok())?;
    Some(value.chars().take(MAX_SESSION).collect())
}

/// A reply's body; with its last byte the exchange is complete.
struct Watched {
    body: Body,
    exchange: Exchange,
    status: u16,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        let over = match &polled {
            Poll::Ready(None) => true,
            Poll::Ready(Some(Ok(_))) => self.body.is_end_stream(),
            _ => false,
        };
        if over {
            self.exchange.complete(self.status);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_hold_any_text() {
        assert_eq!(header_text("a, b\r\nc: é"), "a, b??c: ?");
        let long = header_text(&"x".repeat(5000));
        assert_eq!(long.len(), MAX_HEADER);
        assert!(long.to_str().unwrap().ends_with("x..."));
        assert_eq!(header_text(&"é".repeat(MAX_HEADER)).len(), MAX_HEADER);
    }
}
