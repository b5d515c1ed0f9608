//! One request in the making: what the server holds from the first byte to the last.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::service::Event;

use super::privacy::BodyKeeper;
use super::record::{ErrorClass, Fault, Record};
use super::recorder::Recorder;
use super::timeline::{Stage, Timeline};
use super::trace_context::TraceContext;

/// HTTP status in the log for a client that left before its reply was complete.
pub const CLIENT_CLOSED_REQUEST: u16 = 499;

/// A request in the making. However it ends, dropping it hands the finished record to the recorder;
/// one that was dropped before [`RequestTrace::complete`] or [`RequestTrace::fail`] was left by its
/// client.
pub struct RequestTrace {
    /// What is known by now: the server fills in what it learns. Times, tokens and spans are made
    /// from the timeline, but for reasoning tokens.
    pub record: Record,
    timeline: Timeline,
    bodies: BodyKeeper,
    recorder: Arc<Recorder>,
    ended: bool,
}

impl RequestTrace {
    /// A request whose first byte has just come.
    pub fn begin(recorder: &Arc<Recorder>, context: &TraceContext, endpoint: &str) -> RequestTrace {
        RequestTrace::of(recorder, Record::begin(context, endpoint))
    }

    /// The request that has just begun this record.
    pub fn of(recorder: &Arc<Recorder>, record: Record) -> RequestTrace {
        RequestTrace {
            record,
            timeline: Timeline::begin(Instant::now()),
            bodies: recorder.body_keeper(),
            recorder: recorder.clone(),
            ended: false,
        }
    }

    /// Each prompt has so many choices.
    pub fn choices_per_prompt(&mut self, choices: usize) {
        self.timeline.choices_per_prompt(choices);
    }

    /// A stage that began at `from` and ends now.
    pub fn stage(&mut self, stage: Stage, from: Instant) {
        self.timeline.stage(stage, from, Instant::now());
    }

    /// What the engine has just told of a choice.
    pub fn observe(&mut self, choice: usize, event: &Event) {
        self.timeline.observe(choice, event, Instant::now());
    }

    /// Time that has just gone into the text of a choice's tokens.
    pub fn detokenised(&mut self, choice: usize, took: Duration) {
        self.timeline.detokenised(choice, took, Instant::now());
    }

    /// The request's body, kept if the server keeps bodies.
    pub fn request_body(&mut self, body: &[u8]) {
        self.bodies.request(body);
    }

    /// More of the answer, kept if the server keeps bodies.
    pub fn response_text(&mut self, text: &str) {
        self.bodies.response(text);
    }

    /// It failed, and this is what the client was told. A reply that had begun keeps its status.
    pub fn fail(&mut self, class: ErrorClass, status: u16, code: &str, message: &str) {
        let fault = Fault { class, code: code.to_owned(), message: message.to_owned() };
        self.record.error = Some(fault);
        self.record.status = status;
        self.ended = true;
    }

    /// The reply is complete. `finish` is why the answer ended, in the words of the OpenAI API.
    pub fn complete(&mut self, status: u16, finish: Option<&str>) {
        self.record.status = status;
        self.record.finish = finish.map(str::to_owned);
        self.ended = true;
    }
}

impl Drop for RequestTrace {
    fn drop(&mut self) {
        if !self.ended {
            let message = "the client closed the connection before its reply was complete";
            self.fail(ErrorClass::Cancelled, CLIENT_CLOSED_REQUEST, "client_closed", message);
        }
        let mut record = std::mem::take(&mut self.record);
        self.timeline.finish(&mut record, Instant::now());
        record.bodies = self.bodies.take();
        self.recorder.record(record);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::Metrics;
    use crate::telemetry::privacy::Privacy;
    use crate::telemetry::recorder::RecorderOptions;
    use crate::telemetry::testing::Scratch;

    const SOON: Duration = Duration::from_secs(20);

    fn kept(privacy: Privacy, course: impl FnOnce(&mut RequestTrace)) -> Record {
        let scratch = Scratch::new();
        let options = RecorderOptions { store: Some(scratch.store()), privacy, otlp: None };
        let recorder = Recorder::start(options, Arc::new(Metrics::new()));
        let context = TraceContext::root();
        let mut trace = RequestTrace::begin(&recorder, &context, "/v1/messages");
        course(&mut trace);
        drop(trace);
        assert!(recorder.flush(SOON));
        let id = context.trace_id.to_string();
        let mut records = recorder.reader().unwrap().get(&id).unwrap();
        assert_eq!(records.len(), 1);
        let record = records.remove(0);
        assert_eq!((record.span_id, record.endpoint.as_str()), (context.span_id, "/v1/messages"));
        record
    }

    #[test]
    fn every_end_leaves_a_record() {
        let left = kept(Privacy::default(), |_| {});
        assert_eq!((left.outcome(), left.status), ("cancelled", CLIENT_CLOSED_REQUEST));
        let answered = kept(Privacy::default(), |trace| {
            trace.record.client = "curl".into();
            trace.complete(200, Some("tool_calls"));
        });
        assert_eq!((answered.outcome(), answered.status), ("ok", 200));
        assert_eq!(answered.finish.as_deref(), Some("tool_calls"));
        let failed = kept(Privacy::default(), |trace| {
            trace.fail(ErrorClass::ContextLength, 400, "context_length_exceeded", "too long");
        });
        assert_eq!((failed.outcome(), failed.status), ("context_length", 400));
        assert_eq!(failed.error.unwrap().code, "context_length_exceeded");
    }

    #[test]
    fn bodies_only_on_request() {
        let course = |trace: &mut RequestTrace| {
            trace.request_body(b"{\"prompt\":\"hi\"}");
            trace.response_text("he");
            trace.response_text("llo");
            trace.complete(200, None);
        };
        assert_eq!(kept(Privacy::default(), course).bodies, None);
        let privacy = Privacy { body_bytes: Some(100), ..Privacy::default() };
        let bodies = kept(privacy, course).bodies.unwrap();
        assert_eq!(
            (bodies.request.as_str(), bodies.response.as_str()),
            ("{\"prompt\":\"hi\"}", "hello")
        );
    }
}
