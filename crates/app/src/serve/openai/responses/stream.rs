//! Responses, streamed: events with a type and a number.

use serde_json::{Value, json};

use super::compose::{Composer, Event};
use super::handlers::Frame;
use super::reply::status;
use crate::serve::generation::{End, Output};
use crate::serve::stream::{Writer, event};

/// Writes events.
pub struct ResponseWriter {
    frame: Frame,
    composer: Composer,
    number: u64,
    end: Option<End>,
}

impl ResponseWriter {
    /// A writer for one answer.
    pub fn new(frame: Frame) -> ResponseWriter {
        ResponseWriter { frame, composer: Composer::default(), number: 0, end: None }
    }

    fn event(&mut self, kind: &'static str, fields: Value, out: &mut String) {
        let mut whole = json!({"type": kind, "sequence_number": self.number});
        if let (Value::Object(whole), Value::Object(fields)) = (&mut whole, fields) {
            whole.extend(fields);
        }
        self.number += 1;
        event(kind, &whole, out);
    }

    fn events(&mut self, events: Vec<Event>, out: &mut String) {
        events.into_iter().for_each(|(kind, fields)| self.event(kind, fields, out));
    }
}

impl Writer for ResponseWriter {
    fn begin(&mut self, out: &mut String) {
        let response = json!({"response": self.frame.reply()});
        self.event("response.created", response.clone(), out);
        self.event("response.in_progress", response, out);
    }

    fn output(&mut self, output: Output, out: &mut String) {
        match output {
            Output::Started { .. } | Output::Prefill { .. } => {}
            Output::Delta { delta, .. } => {
                let mut events = Vec::new();
                delta.pieces.into_iter().for_each(|piece| self.composer.push(piece, &mut events));
                self.events(events, out);
            }
            Output::End { end, .. } => self.end = Some(end),
            Output::Failed(error) => {
                let reply = self.frame.reply().failed(&error);
                let fields = json!({
                    "code": error.code, "message": error.message, "param": error.param,
                });
                self.event("error", fields, out);
                self.event("response.failed", json!({"response": reply}), out);
            }
        }
    }

    fn finish(&mut self, out: &mut String) {
        let Some(end) = self.end.take() else { return };
        let mut events = Vec::new();
        let ended = status(&end);
        let output = self.composer.finish(ended, &mut events);
        self.events(events, out);
        let reply = self.frame.complete(output, &end);
        let kind = match ended {
            "incomplete" => "response.incomplete",
            _ => "response.completed",
        };
        self.event(kind, json!({"response": reply}), out);
    }
}
