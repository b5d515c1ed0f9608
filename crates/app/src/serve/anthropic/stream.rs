//! Messages, streamed: blocks that begin, grow and end.

use serde_json::{Value, json};

use super::messages::{Block, MessageUsage, OutMessage, signature, stop_reason};
use crate::serve::answer::Answer;
use crate::serve::api::Api;
use crate::serve::generation::{CallDelta, End, Output, Piece};
use crate::serve::ids;
use crate::serve::openai::reply::Timings;
use crate::serve::stream::{Writer, event};
use engine::service::ServiceInfo;

/// Writes events.
pub struct MessageWriter {
    message: OutMessage,
    info: ServiceInfo,
    prompt: usize,
    started: bool,
    /// The block that is being written, and how many came before it.
    open: Option<Open>,
    blocks: usize,
    thinking: String,
}

/// Kinds of blocks that grow.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Open {
    Thinking,
    Text,
    Call(usize),
}

impl MessageWriter {
    /// A writer for one answer.
    pub fn new(model: String, answer: &Answer) -> MessageWriter {
        let message = OutMessage {
            id: ids::fresh("msg_"),
            kind: "message",
            role: "assistant",
            model,
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: MessageUsage::default(),
            timings: None,
        };
        MessageWriter {
            message,
            info: answer.model().info.clone(),
            prompt: answer.prompt().ids.len(),
            started: false,
            open: None,
            blocks: 0,
            thinking: String::new(),
        }
    }

    /// The first event tells how much of the prompt was cached, so it comes when that is known.
    fn start(&mut self, cached: usize, out: &mut String) {
        if !std::mem::replace(&mut self.started, true) {
            self.message.usage = MessageUsage::new(self.prompt, cached, 0);
            event("message_start", &json!({"type": "message_start", "message": self.message}), out);
        }
    }

    /// Makes a block of this kind the one that grows.
    fn enter(&mut self, kind: Open, block: &Block, out: &mut String) {
        if self.open != Some(kind) {
            self.close(out);
            self.open = Some(kind);
            let start = json!({
                "type": "content_block_start", "index": self.blocks, "content_block": block
            });
            event("content_block_start", &start, out);
        }
    }

    fn close(&mut self, out: &mut String) {
        let Some(kind) = self.open.take() else { return };
        if kind == Open::Thinking {
            let signature = signature(&std::mem::take(&mut self.thinking));
            self.grow(&json!({"type": "signature_delta", "signature": signature}), out);
        }
        let stop = json!({"type": "content_block_stop", "index": self.blocks});
        event("content_block_stop", &stop, out);
        self.blocks += 1;
    }

    fn grow(&self, delta: &Value, out: &mut String) {
        let delta = json!({"type": "content_block_delta", "index": self.blocks, "delta": delta});
        event("content_block_delta", &delta, out);
    }

    fn piece(&mut self, piece: Piece, out: &mut String) {
        match piece {
            Piece::Reasoning(text) => {
                let block = Block::Thinking { thinking: String::new(), signature: String::new() };
                self.enter(Open::Thinking, &block, out);
                self.thinking += &text;
                self.grow(&json!({"type": "thinking_delta", "thinking": text}), out);
            }
            Piece::Text(text) => {
                self.enter(Open::Text, &Block::Text { text: String::new() }, out);
                self.grow(&json!({"type": "text_delta", "text": text}), out);
            }
            Piece::Call(CallDelta { index, begin, arguments }) => {
                if let Some(begin) = begin {
                    let block = Block::ToolUse { id: begin.id, name: begin.name, input: json!({}) };
                    self.enter(Open::Call(index), &block, out);
                }
                if !arguments.is_empty() {
                    self.grow(&json!({"type": "input_json_delta", "partial_json": arguments}), out);
                }
            }
        }
    }

    fn end(&mut self, end: &End, out: &mut String) {
        self.close(out);
        let delta = json!({
            "type": "message_delta",
            "delta": {"stop_reason": stop_reason(end), "stop_sequence": end.stop},
            "usage": MessageUsage::of(end),
            "timings": Timings::of(&end.done, &self.info),
        });
        event("message_delta", &delta, out);
    }
}

impl Writer for MessageWriter {
    fn begin(&mut self, out: &mut String) {
        self.keep_alive(out);
    }

    fn output(&mut self, output: Output, out: &mut String) {
        match output {
            Output::Started { cached } => self.start(cached, out),
            Output::Prefill { .. } => {}
            Output::Delta { delta, .. } => {
                delta.pieces.into_iter().for_each(|piece| self.piece(piece, out));
            }
            Output::End { end, .. } => {
                self.start(end.done.cached_tokens, out);
                self.end(&end, out);
            }
            Output::Failed(error) => event("error", &error.body(Api::Anthropic), out),
        }
    }

    fn finish(&mut self, out: &mut String) {
        event("message_stop", &json!({"type": "message_stop"}), out);
    }

    fn keep_alive(&mut self, out: &mut String) {
        event("ping", &json!({"type": "ping"}), out);
    }
}
