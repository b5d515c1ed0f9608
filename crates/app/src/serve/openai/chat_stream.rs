//! Chat completions, streamed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use utoipa::ToSchema;

use super::reply::{ChatLogprobs, Timings, Usage};
use crate::cli::version;
use crate::serve::answer::Answer;
use crate::serve::api::Api;
use crate::serve::generation::{CallDelta, Delta, End, Output, Piece};
use crate::serve::ids;
use crate::serve::model::Served;
use crate::serve::stream::{Writer, data};

/// Writes chunks.
pub struct ChatWriter {
    id: String,
    created: u64,
    model: String,
    served: Arc<Served>,
    choices: usize,
    include_usage: bool,
    progress: bool,
    logprobs: bool,
    begun: Instant,
    ends: BTreeMap<usize, End>,
}

impl ChatWriter {
    /// A writer for one answer.
    pub fn new(
        model: String,
        answer: &Answer,
        include_usage: bool,
        progress: bool,
        logprobs: bool,
    ) -> ChatWriter {
        ChatWriter {
            id: ids::fresh("chatcmpl-"),
            created: ids::unix_time(),
            model,
            served: Arc::clone(answer.model()),
            choices: answer.choices(),
            include_usage,
            progress,
            logprobs,
            begun: Instant::now(),
            ends: BTreeMap::new(),
        }
    }

    fn chunk(&self) -> Chunk<'_> {
        Chunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.model,
            system_fingerprint: version(),
            choices: Vec::new(),
            usage: None,
            timings: None,
            prompt_progress: None,
        }
    }

    fn choice(&self, index: usize, delta: ChunkDelta, end: Option<&End>, out: &mut String) {
        let finish_reason = end.map(|end| end.finish.openai());
        let logprobs = None;
        let choices = vec![ChunkChoice { index, delta, logprobs, finish_reason }];
        let timings = end.map(|end| Timings::of(&end.done, &self.served.info));
        data(&Chunk { choices, timings, ..self.chunk() }, out);
    }

    fn delta(&self, index: usize, delta: Delta, out: &mut String) {
        if self.logprobs && !delta.logprobs.is_empty() {
            // Tokens go with the text that they make; together they are one chunk.
            let text = Some(delta.text());
            let logprobs = Some(ChatLogprobs::of(delta.logprobs));
            let text = ChunkDelta { content: text, ..ChunkDelta::default() };
            let choice = ChunkChoice { index, delta: text, logprobs, finish_reason: None };
            data(&Chunk { choices: vec![choice], ..self.chunk() }, out);
        }
        for piece in delta.pieces {
            let delta = match piece {
                Piece::Text(_) if self.logprobs => continue,
                Piece::Text(text) => ChunkDelta { content: Some(text), ..ChunkDelta::default() },
                Piece::Reasoning(text) => {
                    ChunkDelta { reasoning_content: Some(text), ..ChunkDelta::default() }
                }
                Piece::Call(call) => {
                    ChunkDelta { tool_calls: Some(vec![call.into()]), ..ChunkDelta::default() }
                }
            };
            self.choice(index, delta, None, out);
        }
    }
}

impl Writer for ChatWriter {
    fn begin(&mut self, out: &mut String) {
        for index in 0..self.choices {
            let delta = ChunkDelta {
                role: Some("assistant"),
                content: Some(String::new()),
                ..ChunkDelta::default()
            };
            self.choice(index, delta, None, out);
        }
    }

    fn output(&mut self, output: Output, out: &mut String) {
        match output {
            Output::Started { .. } => {}
            Output::Prefill { done, total, cached } if self.progress => {
                let time_ms = self.begun.elapsed().as_secs_f64() * 1e3;
                let progress = PromptProgress { total, cache: cached, processed: done, time_ms };
                data(&Chunk { prompt_progress: Some(progress), ..self.chunk() }, out);
            }
            Output::Prefill { .. } => {}
            Output::Delta { choice, delta } => self.delta(choice, delta, out),
            Output::End { choice, end } => {
                self.choice(choice, ChunkDelta::default(), Some(&end), out);
                self.ends.insert(choice, end);
            }
            Output::Failed(error) => data(&error.body(Api::OpenAi), out),
        }
    }

    fn finish(&mut self, out: &mut String) {
        if self.include_usage {
            let usage = Some(Usage::of(self.ends.values(), self.choices));
            // Those of the first choice, as in a whole reply.
            let first = self.ends.values().next();
            let timings = first.map(|end| Timings::of(&end.done, &self.served.info));
            data(&Chunk { usage, timings, ..self.chunk() }, out);
        }
        out.push_str("data: [DONE]\n\n");
    }
}

/// A piece of a chat completion.
#[derive(Debug, Serialize, ToSchema)]
pub struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
    choices: Vec<ChunkChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Timings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<PromptProgress>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ChunkChoice {
    index: usize,
    delta: ChunkDelta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize, ToSchema)]
struct ChunkDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Vec<ChunkCall>>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ChunkCall {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: ChunkFunction,
}

#[derive(Debug, Serialize, ToSchema)]
struct ChunkFunction {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl From<CallDelta> for ChunkCall {
    fn from(CallDelta { index, begin, arguments }: CallDelta) -> ChunkCall {
        let kind = begin.as_ref().map(|_| "function");
        let (id, name) = begin.map(|begin| (begin.id, begin.name)).unzip();
        ChunkCall { index, id, kind, function: ChunkFunction { name, arguments } }
    }
}

/// How far the prompt has come, under llama-server's names.
#[derive(Debug, Serialize, ToSchema)]
struct PromptProgress {
    total: usize,
    cache: usize,
    processed: usize,
    time_ms: f64,
}
