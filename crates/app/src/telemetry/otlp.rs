//! Spans for an OpenTelemetry collector, over OTLP/HTTP. Off unless an endpoint is given.
//!
//! A record is a whole tree of spans by the time it gets here, so there is nothing to start, stop
//! or sample: it is encoded and posted by a thread of its own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use prost::Message;
use serde::Serialize;

use super::record::Record;
use genai::{attribute, spans};

mod genai;

/// Records that may wait to be sent.
const MAX_WAITING: usize = 1024;
/// Records in one post, and how long the first of them waits for others.
const BATCH: usize = 64;
const LINGER: Duration = Duration::from_secs(1);
/// Tries of one post, and how long one may take.
const TRIES: u32 = 3;
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long the end of the program waits for what is left.
const LAST_CALL: Duration = Duration::from_secs(2);

/// Where spans go.
#[derive(Clone, PartialEq, Eq)]
pub struct OtlpOptions {
    /// The collector: `http://localhost:4318`. Spans go to `/v1/traces` below it.
    pub endpoint: String,
    /// Headers of each post; they may hold keys and are never shown.
    pub headers: Vec<(String, String)>,
    /// What the collector calls this server.
    pub service_name: String,
}

impl std::fmt::Debug for OtlpOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OtlpOptions").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// How exporting goes: part of `/status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ExportHealth {
    /// Traces that the collector took.
    pub sent: u64,
    /// Traces that it never got.
    pub lost: u64,
    /// What is wrong, since the last success.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Sends the spans of records.
#[derive(Debug)]
pub struct Exporter {
    queue: Option<SyncSender<Vec<Span>>>,
    shared: Arc<Shared>,
    sender: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    sent: AtomicU64,
    lost: AtomicU64,
    error: Mutex<Option<String>>,
    /// When everything has to be over.
    end: Mutex<Option<Instant>>,
}

impl Exporter {
    /// Begins.
    pub fn start(options: OtlpOptions) -> Arc<Exporter> {
        let (queue, records) = mpsc::sync_channel(MAX_WAITING);
        let shared = Arc::new(Shared::default());
        let poster = Poster { options, shared: shared.clone(), agent: agent() };
        let thread = std::thread::Builder::new().name("otlp".into());
        match thread.spawn(move || poster.run(&records)) {
            Ok(sender) => Arc::new(Exporter { queue: Some(queue), shared, sender: Some(sender) }),
            Err(error) => {
                shared.tell(Some(format!("no thread for the exporter: {error}")));
                Arc::new(Exporter { queue: None, shared, sender: None })
            }
        }
    }

    /// Takes the spans of a record. Never waits.
    pub fn export(&self, record: &Record) {
        let taken = self.queue.as_ref().is_some_and(|queue| queue.try_send(spans(record)).is_ok());
        if !taken {
            self.shared.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How it goes.
    pub fn health(&self) -> ExportHealth {
        ExportHealth {
            sent: self.shared.sent.load(Ordering::Relaxed),
            lost: self.shared.lost.load(Ordering::Relaxed),
            error: self.shared.error.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        *self.shared.end.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Instant::now() + LAST_CALL);
        drop(self.queue.take());
        if let Some(sender) = self.sender.take() {
            // It panicked if this fails; there is nobody to tell.
            let _ = sender.join();
        }
    }
}

impl Shared {
    fn tell(&self, error: Option<String>) {
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = error;
    }

    /// Time left; `None` while there is no end.
    fn left(&self) -> Option<Duration> {
        let end = *self.end.lock().unwrap_or_else(PoisonError::into_inner);
        end.map(|end| end.saturating_duration_since(Instant::now()))
    }
}

fn agent() -> ureq::Agent {
    let config = ureq::Agent::config_builder().http_status_as_error(false).max_redirects(0);
    config.build().into()
}

/// The thread that posts.
struct Poster {
    options: OtlpOptions,
    shared: Arc<Shared>,
    agent: ureq::Agent,
}

impl Poster {
    fn run(&self, records: &Receiver<Vec<Span>>) {
        while let Ok(first) = records.recv() {
            let until = Instant::now() + LINGER;
            let (mut spans, mut count) = (first, 1);
            while count < BATCH {
                match records.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(more) => spans.extend(more),
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
                }
                count += 1;
            }
            let outcome = self.deliver(&request(&self.options, spans));
            let counter = if outcome.is_ok() { &self.shared.sent } else { &self.shared.lost };
            counter.fetch_add(count as u64, Ordering::Relaxed);
            self.shared.tell(outcome.err());
        }
    }

    fn deliver(&self, body: &[u8]) -> Result<(), String> {
        let mut pause = Duration::from_millis(200);
        for attempt in 1.. {
            let failure = match self.post(body) {
                Ok(()) => return Ok(()),
                Err(failure) => failure,
            };
            let ending = self.shared.left().is_some();
            if attempt == TRIES || !failure.again || ending {
                return Err(failure.reason);
            }
            std::thread::sleep(pause);
            pause *= 2;
        }
        Ok(())
    }

    fn post(&self, body: &[u8]) -> Result<(), PostError> {
        let timeout = self.shared.left().unwrap_or(TIMEOUT).min(TIMEOUT);
        if timeout.is_zero() {
            return Err(PostError { reason: "the program ended".into(), again: false });
        }
        let url = format!("{}/v1/traces", self.options.endpoint.trim_end_matches('/'));
        let mut post = self.agent.post(url).content_type("application/x-protobuf");
        for (name, value) in &self.options.headers {
            post = post.header(name, value);
        }
        let post = post.config().timeout_global(Some(timeout)).build();
        let response = post.send(body).map_err(|error| PostError {
            reason: format!("the collector can't be reached: {}", told(&error)),
            again: true,
        })?;
        // Statuses that the protocol says to try again after.
        match response.status().as_u16() {
            200..=299 => Ok(()),
            status => Err(PostError {
                reason: format!("the collector answered {status}"),
                again: matches!(status, 429 | 502 | 503 | 504),
            }),
        }
    }
}

/// What went wrong, without the address: it may have a password in it, and this is shown.
fn told(error: &ureq::Error) -> String {
    match error {
        ureq::Error::Io(error) => error.kind().to_string(),
        ureq::Error::Timeout(_) => "it takes too long".into(),
        ureq::Error::HostNotFound => "no such host".into(),
        ureq::Error::BadUri(_) => "its address makes no sense".into(),
        _ => "the connection failed".into(),
    }
}

struct PostError {
    reason: String,
    again: bool,
}

fn request(options: &OtlpOptions, spans: Vec<Span>) -> Vec<u8> {
    let version = env!("CARGO_PKG_VERSION");
    let resource: Vec<KeyValue> = vec![
        attribute("service.name", options.service_name.as_str().into()),
        attribute("service.version", version.into()),
    ];
    let scope = InstrumentationScope {
        name: "th-engine".into(),
        version: version.into(),
        ..InstrumentationScope::default()
    };
    let scope_spans = ScopeSpans { scope: Some(scope), spans, schema_url: String::new() };
    let resource = Resource { attributes: resource, ..Resource::default() };
    let resource_spans = ResourceSpans {
        resource: Some(resource),
        scope_spans: vec![scope_spans],
        schema_url: String::new(),
    };
    ExportTraceServiceRequest { resource_spans: vec![resource_spans] }.encode_to_vec()
}

#[cfg(test)]
#[path = "otlp_tests.rs"]
mod tests;
