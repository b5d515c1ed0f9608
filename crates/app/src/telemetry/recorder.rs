//! The handle that the server gives finished requests to. It never waits: a record is either taken,
//! and then written by a thread of its own, or counted as lost.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::metrics::Metrics;
use super::otlp::{Exporter, OtlpOptions};
use super::privacy::{BodyKeeper, Privacy};
use super::record::Record;
use super::store::{Reader, Store, StoreError, StoreOptions};

/// The most records that may wait to be written, and what they may take.
const MAX_WAITING: usize = 4096;
const MAX_WAITING_BYTES: usize = 32 << 20;
/// Records in one transaction.
const BATCH: usize = 256;
/// How long a record may wait for others that are written with it. Writing takes turns with answering
/// where processors are few, and one transaction of many takes much less than many of one.
const GATHER: Duration = Duration::from_millis(25);
/// How often what is too old is deleted.
const RETENTION_EVERY: Duration = Duration::from_secs(60);
/// Pauses after a failure to write.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What becomes of finished requests.
#[derive(Clone, Debug, Default)]
pub struct RecorderOptions {
    /// Where they are kept; `None` keeps none.
    pub store: Option<StoreOptions>,
    /// What is kept of their text.
    pub privacy: Privacy,
    /// Where their spans are sent; `None` sends none.
    pub otlp: Option<OtlpOptions>,
}

/// Takes finished requests.
#[derive(Debug)]
pub struct Recorder {
    privacy: Privacy,
    metrics: Arc<Metrics>,
    shared: Arc<Shared>,
    store: Option<StoreOptions>,
    exporter: Option<Arc<Exporter>>,
    // `None` if nothing is kept or sent.
    queue: Option<Sender<Message>>,
    writer: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Message {
    Record(Box<Record>),
    Flush(Sender<()>),
}

/// How the store of traces is doing: part of `/status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoreHealth {
    /// `off`, `ok` or `failing`.
    pub state: &'static str,
    /// What is wrong, in words, since the last success.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Records written.
    pub written: u64,
    /// Records lost: they came while too many waited, or were never written.
    pub lost: u64,
    /// Records that wait to be written.
    pub waiting: usize,
    /// Failures to write, each of which is tried again.
    pub failures: u64,
    /// Bytes that the store takes.
    pub bytes: u64,
    /// Spans sent to the collector, those that it never got, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub otlp: Option<super::otlp::ExportHealth>,
}

#[derive(Debug, Default)]
struct Shared {
    written: AtomicU64,
    lost: AtomicU64,
    failures: AtomicU64,
    waiting: AtomicUsize,
    waiting_bytes: AtomicUsize,
    bytes: AtomicU64,
    error: Mutex<Option<String>>,
}

impl Recorder {
    /// Begins. A store that can't be opened is no reason not to serve: it is tried again, and
    /// [`Recorder::health`] tells.
    pub fn start(options: RecorderOptions, metrics: Arc<Metrics>) -> Arc<Recorder> {
        let shared = Arc::new(Shared::default());
        let exporter = options.otlp.map(Exporter::start);
        let mut recorder = Recorder {
            privacy: options.privacy,
            metrics,
            shared: shared.clone(),
            store: options.store,
            exporter,
            queue: None,
            writer: None,
        };
        if recorder.store.is_some() || recorder.exporter.is_some() {
            let (queue, records) = mpsc::channel();
            let writer = Writer {
                records,
                shared,
                metrics: recorder.metrics.clone(),
                privacy: recorder.privacy.clone(),
                options: recorder.store.clone(),
                exporter: recorder.exporter.clone(),
                store: None,
                pending: Vec::new(),
                pause: FIRST_PAUSE,
                try_at: Instant::now(),
                retention_at: Instant::now(),
                flushes: Vec::new(),
            };
            match std::thread::Builder::new().name("traces".into()).spawn(move || writer.run()) {
                Ok(thread) => (recorder.queue, recorder.writer) = (Some(queue), Some(thread)),
                Err(error) => recorder.shared.failed(format!("no thread for traces: {error}")),
            }
        }
        let (shared, kept) = (recorder.shared.clone(), recorder.store.is_some());
        // Metrics outlive the recorder, and must not keep the exporter from ending with it.
        let exporter = recorder.exporter.as_ref().map_or_else(Weak::new, Arc::downgrade);
        let health = move || shared.health(kept, exporter.upgrade().as_deref());
        recorder.metrics.watch_store(Box::new(health));
        Arc::new(recorder)
    }

    /// Takes a finished request. Never waits.
    pub fn record(&self, record: Record) {
        self.metrics.observe(&record);
        let Some(queue) = &self.queue else { return };
        let bytes = size(&record);
        let waiting = self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        let waiting_bytes = self.shared.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
        let room =
            waiting < MAX_WAITING && waiting_bytes.saturating_add(bytes) <= MAX_WAITING_BYTES;
        if room && queue.send(Message::Record(Box::new(record))).is_ok() {
            return;
        }
        self.shared.left(1, bytes);
        self.shared.lost.fetch_add(1, Ordering::Relaxed);
        if room {
            self.shared.failed("the thread that writes traces has stopped".into());
        }
    }

    /// Waits until everything taken so far was written, or tried in vain, and at most this long.
    /// Returns whether all of it was written.
    pub fn flush(&self, timeout: Duration) -> bool {
        let Some(queue) = &self.queue else { return true };
        let (done, flushed) = mpsc::channel();
        queue.send(Message::Flush(done)).is_ok()
            && flushed.recv_timeout(timeout).is_ok()
            && self.health().waiting == 0
    }

    /// How the store is doing.
    pub fn health(&self) -> StoreHealth {
        self.shared.health(self.store.is_some(), self.exporter.as_deref())
    }

    /// What was kept, to be read.
    ///
    /// # Errors
    /// Nothing is kept, or it can't be read.
    pub fn reader(&self) -> Result<Reader, StoreError> {
        let options = self.store.as_ref().ok_or(StoreError::Off)?;
        Reader::open(&options.path)
    }

    /// The metrics that requests are counted in.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    pub(super) fn body_keeper(&self) -> BodyKeeper {
        if self.queue.is_some() { self.privacy.keeper() } else { BodyKeeper::default() }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        drop(self.queue.take());
        if let Some(writer) = self.writer.take() {
            // It panicked if this fails; the records it had are lost, and there is nobody to tell.
            let _ = writer.join();
        }
    }
}

impl Shared {
    fn health(&self, kept: bool, exporter: Option<&Exporter>) -> StoreHealth {
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner).clone();
        StoreHealth {
            state: match (kept, &error) {
                (false, _) => "off",
                (true, None) => "ok",
                (true, Some(_)) => "failing",
            },
            error,
            written: self.written.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
            waiting: self.waiting.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            otlp: exporter.map(Exporter::health),
        }
    }

    fn left(&self, records: usize, bytes: usize) {
        self.waiting.fetch_sub(records, Ordering::Relaxed);
        self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn failed(&self, reason: String) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason);
    }

    fn succeeded(&self) {
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// About what a record takes in memory.
fn size(record: &Record) -> usize {
    let spans = record.spans.iter().map(|span| 1 + span.children.len()).sum::<usize>();
    let bodies = record.bodies.as_ref().map_or(0, |b| b.request.len() + b.response.len());
    1024 + 256 * spans + bodies
}

/// The thread that writes.
struct Writer {
    records: Receiver<Message>,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    privacy: Privacy,
    options: Option<StoreOptions>,
    exporter: Option<Arc<Exporter>>,
    store: Option<Store>,
    /// Records without secrets, and what each was counted as.
    pending: Vec<(Record, usize)>,
    pause: Duration,
    try_at: Instant,
    retention_at: Instant,
    flushes: Vec<Sender<()>>,
}

impl Writer {
    fn run(mut self) {
        let mut open = true;
        // The store is opened before the first record comes: what is wrong with it shows at once.
        self.write();
        while open {
            let wake = if self.pending.is_empty() { self.retention_at } else { self.try_at };
            match self.records.recv_timeout(wake.saturating_duration_since(Instant::now())) {
                Ok(message) => {
                    self.take(message);
                    // Asleep, not listening: nobody who sends has to wake this thread.
                    if self.flushes.is_empty() {
                        std::thread::sleep(GATHER);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => open = false,
            }
            while let Ok(message) = self.records.try_recv() {
                self.take(message);
            }
            // A flush, and the end, don't wait for the pause to pass.
            if Instant::now() >= self.try_at || !self.flushes.is_empty() || !open {
                self.write();
            }
            for done in self.flushes.drain(..) {
                // Whoever waited for it may have given up.
                let _ = done.send(());
            }
        }
        let bytes = self.pending.iter().map(|(_, bytes)| bytes).sum();
        self.shared.left(self.pending.len(), bytes);
        self.shared.lost.fetch_add(self.pending.len() as u64, Ordering::Relaxed);
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Record(mut record) => {
                let bytes = size(&record);
                self.privacy.scrub(&mut record);
                if let Some(exporter) = self.exporter.as_ref().filter(|_| record.sampled) {
                    exporter.export(&record);
                }
                match self.options {
                    Some(_) => self.pending.push((*record, bytes)),
                    None => self.shared.left(1, bytes),
                }
            }
            Message::Flush(done) => self.flushes.push(done),
        }
    }

    /// Writes what is pending; what could not be written stays, and the next try comes later.
    fn write(&mut self) {
        let Some(options) = self.options.clone() else {
            self.retention_at = Instant::now() + RETENTION_EVERY;
            return;
        };
        match self.try_write(&options) {
            Ok(()) => {
                self.pause = FIRST_PAUSE;
                self.try_at = Instant::now();
                self.shared.succeeded();
            }
            Err(error) => {
                self.shared.failed(error.to_string());
                if error.is_damage() {
                    self.store = None;
                    if let Err(error) = Store::set_aside(&options.path) {
                        self.shared.failed(error.to_string());
                    }
                } else if !error.is_passing() {
                    self.store = None;
                }
                self.try_at = Instant::now() + self.pause;
                self.retention_at = self.retention_at.max(self.try_at);
                self.pause = (self.pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    fn try_write(&mut self, options: &StoreOptions) -> Result<(), StoreError> {
        let store = match &mut self.store {
            Some(store) => store,
            none => none.insert(Store::open(options)?),
        };
        while !self.pending.is_empty() {
            let batch = self.pending.len().min(BATCH);
            store.insert(self.pending[..batch].iter_mut().map(|(record, _)| record))?;
            let mut bytes = 0;
            for (record, size) in self.pending.drain(..batch) {
                bytes += size;
                if record.retry_of.is_some() {
                    self.metrics.suspected_retry(&record.model);
                }
            }
            self.shared.left(batch, bytes);
            self.shared.written.fetch_add(batch as u64, Ordering::Relaxed);
        }
        if Instant::now() >= self.retention_at {
            self.retention_at = Instant::now() + RETENTION_EVERY;
            store.retain()?;
        }
        self.shared.bytes.store(store.bytes()?, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
#[path = "recorder_tests.rs"]
mod tests;
