//! Output items that grow with an answer, and the events that tell so.

use serde_json::{Value, json};

use crate::serve::generation::{CallDelta, Piece};
use crate::serve::ids;

/// Builds output items.
#[derive(Debug, Default)]
pub struct Composer {
    /// Items that are complete.
    items: Vec<Value>,
    open: Option<Open>,
}

/// The item that grows.
#[derive(Debug)]
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call { number: usize, call_id: String, name: String },
}

/// An event: its type, and its fields besides.
pub type Event = (&'static str, Value);

impl Composer {
    /// Takes a piece of the answer.
    pub fn push(&mut self, piece: Piece, events: &mut Vec<Event>) {
        match piece {
            Piece::Reasoning(text) => {
                self.enter(Kind::Reasoning, "rs_", events);
                self.grow(&text, events);
            }
            Piece::Text(text) => {
                self.enter(Kind::Message, "msg_", events);
                self.grow(&text, events);
            }
            Piece::Call(CallDelta { index, begin, arguments }) => {
                if let Some(begin) = begin {
                    let kind = Kind::Call { number: index, call_id: begin.id, name: begin.name };
                    self.enter(kind, "fc_", events);
                }
                if !arguments.is_empty() {
                    self.grow(&arguments, events);
                }
            }
        }
    }

    /// Ends the answer and gives its items; `status` is that of the last one.
    pub fn finish(&mut self, status: &'static str, events: &mut Vec<Event>) -> Vec<Value> {
        self.close(status, events);
        std::mem::take(&mut self.items)
    }

    fn enter(&mut self, kind: Kind, prefix: &str, events: &mut Vec<Event>) {
        if self.open.as_ref().is_some_and(|open| open.kind == kind) {
            return;
        }
        self.close("completed", events);
        let open = Open { kind, id: ids::fresh(prefix), text: String::new() };
        let index = self.items.len();
        let mut item = open.item("in_progress");
        if let Kind::Reasoning | Kind::Message = open.kind {
            item["content"] = json!([]);
        }
        events.push(("response.output_item.added", json!({"output_index": index, "item": item})));
        if let Some(part) = open.part() {
            events.push(("response.content_part.added", open.placed(index, "part", part)));
        }
        self.open = Some(open);
    }

    fn grow(&mut self, text: &str, events: &mut Vec<Event>) {
        let index = self.items.len();
        let Some(open) = &mut self.open else { return };
        open.text += text;
        let name = match open.kind {
            Kind::Reasoning => "response.reasoning_text.delta",
            Kind::Message => "response.output_text.delta",
            Kind::Call { .. } => "response.function_call_arguments.delta",
        };
        events.push((name, open.placed(index, "delta", text.into())));
    }

    fn close(&mut self, status: &'static str, events: &mut Vec<Event>) {
        let Some(open) = self.open.take() else { return };
        let index = self.items.len();
        let text = || Value::from(open.text.as_str());
        match &open.kind {
            Kind::Reasoning => {
                events.push(("response.reasoning_text.done", open.placed(index, "text", text())));
            }
            Kind::Message => {
                events.push(("response.output_text.done", open.placed(index, "text", text())));
            }
            Kind::Call { name, .. } => {
                let mut done = open.placed(index, "arguments", text());
                done["name"] = name.as_str().into();
                events.push(("response.function_call_arguments.done", done));
            }
        }
        if let Some(part) = open.part() {
            events.push(("response.content_part.done", open.placed(index, "part", part)));
        }
        let item = open.item(status);
        events.push(("response.output_item.done", json!({"output_index": index, "item": item})));
        self.items.push(item);
    }
}

impl Open {
    fn item(&self, status: &str) -> Value {
        let content: Vec<Value> = self.part().into_iter().collect();
        match &self.kind {
            Kind::Reasoning => json!({
                "id": self.id, "type": "reasoning", "summary": [], "content": content,
                "status": status,
            }),
            Kind::Message => json!({
                "id": self.id, "type": "message", "status": status, "role": "assistant",
                "content": content,
            }),
            Kind::Call { call_id, name, .. } => json!({
                "id": self.id, "type": "function_call", "status": status, "call_id": call_id,
                "name": name, "arguments": self.text,
            }),
        }
    }

    /// The only part of an item that has parts.
    fn part(&self) -> Option<Value> {
        match self.kind {
            Kind::Reasoning => Some(json!({"type": "reasoning_text", "text": self.text})),
            Kind::Message => Some(json!({
                "type": "output_text", "text": self.text, "annotations": [], "logprobs": [],
            })),
            Kind::Call { .. } => None,
        }
    }

    /// A field of an event, with the place that the event is about.
    fn placed(&self, index: usize, field: &str, value: Value) -> Value {
        let mut event = json!({"item_id": self.id, "output_index": index});
        if self.part().is_some() {
            event["content_index"] = 0.into();
        }
        if self.kind == Kind::Message && field != "part" {
            event["logprobs"] = json!([]);
        }
        event[field] = value;
        event
    }
}

/// The message that output items make, for conversations that go on.
pub fn outcome(items: &[Value]) -> Vec<crate::text::chat::Message> {
    let mut conversation = super::items::Conversation::default();
    // These items are this server's own.
    match conversation.extend(items) {
        Ok(()) => conversation.messages,
        Err(_) => Vec::new(),
    }
}
