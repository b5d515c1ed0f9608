//! Replies of both kinds: one object, or one for each piece and a last one with the figures.

use std::time::{Duration, Instant};

use engine::service::ServiceInfo;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::serve::api::Api;
use crate::serve::generation::{Call, End, Output, Piece, Whole};
use crate::serve::openai::reply::Timings;
use crate::serve::stream::{Writer, line};

/// A reply, or a piece of one.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Reply {
    /// The model that answered.
    pub model: String,
    /// When.
    pub created_at: String,
    /// Of a chat: what the model says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<ReplyMessage>,
    /// Of a generation: the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response: Option<String>,
    /// Of a generation: what the model thought.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thinking: Option<String>,
    /// Whether this is the last piece.
    pub done: bool,
    /// Why it ended: `stop` or `length`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub done_reason: Option<&'static str>,
    /// Figures, in the last piece.
    #[serde(flatten)]
    pub figures: Option<Figures>,
}

/// What a chat's model says.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct ReplyMessage {
    /// `assistant`.
    pub role: &'static str,
    /// Its text.
    pub content: String,
    /// What it thought.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thinking: Option<String>,
    /// What it called: `{"function": {"name": …, "arguments": {…}}}`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<Value>,
}

/// Counts, and times in nanoseconds.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct Figures {
    /// All of it.
    pub total_duration: u64,
    /// Waiting for a lane.
    pub load_duration: u64,
    /// Tokens of the prompt.
    pub prompt_eval_count: usize,
    /// Reading it.
    pub prompt_eval_duration: u64,
    /// Tokens of the answer.
    pub eval_count: usize,
    /// Writing it.
    pub eval_duration: u64,
    /// The same as with the other APIs.
    pub timings: Timings,
}

/// Which of the two kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `/api/chat`.
    Chat,
    /// `/api/generate`.
    Generate,
}

/// Builds replies.
#[derive(Clone, Debug)]
pub struct Replies {
    kind: Kind,
    model: String,
    info: ServiceInfo,
    begun: Instant,
}

impl Replies {
    /// Replies to one request.
    pub fn new(kind: Kind, model: String, info: &ServiceInfo) -> Replies {
        Replies { kind, model, info: info.clone(), begun: Instant::now() }
    }

    /// A piece, or all of it.
    fn piece(&self, text: String, thinking: String, calls: Vec<Value>) -> Reply {
        let thinking = (!thinking.is_empty()).then_some(thinking);
        let mut reply = Reply {
            model: self.model.clone(),
            created_at: Timestamp::now().to_string(),
            message: None,
            response: None,
            thinking: None,
            done: false,
            done_reason: None,
            figures: None,
        };
        match self.kind {
            Kind::Chat => {
                let (role, tool_calls) = ("assistant", calls);
                reply.message = Some(ReplyMessage { role, content: text, thinking, tool_calls });
            }
            Kind::Generate => (reply.response, reply.thinking) = (Some(text), thinking),
        }
        reply
    }

    fn last(&self, reply: Reply, end: &End) -> Reply {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let done = &end.done;
        let figures = Figures {
            total_duration: nanos(self.begun.elapsed()),
            load_duration: nanos(done.queued),
            prompt_eval_count: done.prompt_tokens,
            prompt_eval_duration: nanos(done.prefill),
            eval_count: done.output_tokens,
            eval_duration: nanos(done.decode),
            timings: Timings::of(done, &self.info),
        };
        let done_reason = match end.finish.openai() {
            "length" => "length",
            _ => "stop",
        };
        Reply { done: true, done_reason: Some(done_reason), figures: Some(figures), ..reply }
    }

    /// The reply to a request that only loads the model.
    pub fn loaded(&self) -> Reply {
        let reply = self.piece(String::new(), String::new(), Vec::new());
        Reply { done: true, done_reason: Some("load"), ..reply }
    }

    /// A whole answer.
    pub fn whole(&self, whole: Whole) -> Reply {
        let Whole { delta, end } = whole;
        let calls = delta.calls().iter().map(call).collect();
        self.last(self.piece(delta.text(), delta.reasoning(), calls), &end)
    }
}

/// A call whose arguments are an object; the parser makes every call's arguments one.
fn call(call: &Call) -> Value {
    let arguments = serde_json::from_str(&call.arguments);
    let arguments: Value = arguments.unwrap_or_else(|_| Map::new().into());
    json!({"id": call.id, "function": {"name": call.name, "arguments": arguments}})
}

/// Writes lines. Calls go out whole, at the end: this API knows no parts of arguments.
#[derive(Debug)]
pub struct LineWriter {
    replies: Replies,
    calls: Vec<Call>,
}

impl LineWriter {
    /// A writer for one answer.
    pub fn new(replies: Replies) -> LineWriter {
        LineWriter { replies, calls: Vec::new() }
    }
}

impl Writer for LineWriter {
    const CONTENT_TYPE: &'static str = "application/x-ndjson";

    fn begin(&mut self, _out: &mut String) {}

    fn output(&mut self, output: Output, out: &mut String) {
        match output {
            Output::Started { .. } | Output::Prefill { .. } => {}
            Output::Delta { delta, .. } => {
                for piece in delta.pieces {
                    let (text, thinking) = match piece {
                        Piece::Text(text) => (text, String::new()),
                        Piece::Reasoning(text) => (String::new(), text),
                        Piece::Call(call) => {
                            Call::add(&mut self.calls, &call);
                            continue;
                        }
                    };
                    line(&self.replies.piece(text, thinking, Vec::new()), out);
                }
            }
            Output::End { end, .. } => {
                if !self.calls.is_empty() {
                    let calls = self.calls.iter().map(call).collect();
                    line(&self.replies.piece(String::new(), String::new(), calls), out);
                }
                let empty = self.replies.piece(String::new(), String::new(), Vec::new());
                line(&self.replies.last(empty, &end), out);
            }
            Output::Failed(error) => line(&error.body(Api::Ollama), out),
        }
    }

    fn finish(&mut self, _out: &mut String) {}

    fn keep_alive(&mut self, out: &mut String) {
        // Lines of JSON have no comments: a piece without text says as little.
        line(&self.replies.piece(String::new(), String::new(), Vec::new()), out);
    }
}
