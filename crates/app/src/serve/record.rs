//! The record of one finished request: what telemetry stores, counts and exports.
//!
//! Every request that reached the server makes exactly one record, whatever became of it: answered,
//! refused at the door, cancelled, failed. It holds no text unless bodies were asked for.

use std::time::{Duration, SystemTime};

use engine::SamplingOptions;
use engine::service::Done;

use super::errors::ErrorClass;
use super::generation::FinishReason;

/// Takes the records of finished requests. It is called on the server's threads, and must not make
/// them wait.
pub trait Recorder: Send + Sync {
    /// Takes a record.
    fn record(&self, record: RequestRecord);
}

/// A recorder for whoever wants none.
#[derive(Clone, Copy, Debug)]
pub struct NoRecorder;

impl Recorder for NoRecorder {
    fn record(&self, _record: RequestRecord) {}
}

/// One finished request.
#[derive(Clone, Debug)]
pub struct RequestRecord {
    /// Names the request within this server: `req_` and 32 hex digits.
    pub id: String,
    /// W3C trace id, 32 hex digits: the caller's, or a fresh one. Replies carry it as `x-th-trace-id`.
    pub trace_id: String,
    /// The caller's span id, 16 hex digits, if it sent a `traceparent`.
    pub parent_span_id: Option<String>,
    /// The `tracestate` that came with it.
    pub trace_state: Option<String>,
    /// When the request's head had arrived.
    pub begun: SystemTime,
    /// From then until the last byte of the reply was handed over, or the client left.
    pub duration: Duration,
    /// Method and route, as it was registered: `POST /v1/chat/completions`. Bounded.
    pub endpoint: String,
    /// HTTP status of the reply; 499 if the client left before it was complete.
    pub status: u16,
    /// What went wrong, if anything did.
    pub error: Option<RecordError>,
    /// `User-Agent`'s first word, at most 64 characters.
    pub client: String,
    /// What the caller says the conversation or user is: OpenAI's `prompt_cache_key` or `user`,
    /// Anthropic's `metadata.user_id`, or `x-session-id`. At most 128 characters.
    pub session: Option<String>,
    /// The server's own name of the model.
    pub model: String,
    /// What was generated; `None` for requests that generate nothing or were refused before.
    pub generation: Option<GenerationRecord>,
    /// The request's body, if bodies are kept.
    pub request_body: Option<String>,
    /// The reply's text, if bodies are kept.
    pub reply_body: Option<String>,
}

/// What went wrong with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordError {
    /// Its class. Bounded.
    pub class: ErrorClass,
    /// The stable code that the client got.
    pub code: &'static str,
    /// In words.
    pub message: String,
}

/// What was generated.
#[derive(Clone, Debug)]
pub struct GenerationRecord {
    /// Whether the reply was streamed.
    pub stream: bool,
    /// Sampling options that the request set.
    pub sampling: SamplingOptions,
    /// Stop texts.
    pub stops: usize,
    /// The request's limit of tokens.
    pub max_tokens: Option<usize>,
    /// Tools offered.
    pub tools: usize,
    /// Hash of everything that shapes the answer: equal for a retry.
    pub hash: u64,
    /// Rendering the chat template.
    pub template: Duration,
    /// Turning text into tokens.
    pub tokenize: Duration,
    /// Turning tokens into text, tool calls included, added up.
    pub detokenize: Duration,
    /// From [`RequestRecord::begun`] to the first token.
    pub first_token: Option<Duration>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Each choice; those that never ended are absent.
    pub choices: Vec<ChoiceRecord>,
    /// Passes over the prompt: since `begun`, tokens so far. At most 64, later ones are merged.
    pub prefill: Vec<(Duration, usize)>,
}

/// One choice of an answer.
#[derive(Clone, Debug)]
pub struct ChoiceRecord {
    /// Why it ended.
    pub finish: FinishReason,
    /// The engine's account: tokens, rounds, proposals, times, cache.
    pub done: Done,
    /// Tokens of reasoning.
    pub reasoning_tokens: usize,
    /// Tools called.
    pub tool_calls: usize,
    /// From [`RequestRecord::begun`] to its submission.
    pub submitted: Duration,
}
