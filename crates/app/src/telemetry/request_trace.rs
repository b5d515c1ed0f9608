//! One request in the making: what the server holds from the first byte to the last.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use engine::service::Event;

use super::privacy::BodyKeeper;
use super::record::{ErrorClass, Fault, Record};
use super::recorder::Recorder;
use super::timeline::{Stage, Timeline, micros};
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
        let since_epoch = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let mut record = Record::begin(context, endpoint);
        record.started_us = micros(since_epoch);
        RequestTrace {
            record,
            timeline: Timeline::begin(Instant::now()),
            bodies: recorder.body_keeper(),
            recorder: recorder.clone(),
            ended: false,
        }
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
