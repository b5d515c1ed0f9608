//! What the tests of telemetry share: made-up requests, folders of their own, a service that only
//! tells figures.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use engine::MemoryBytes;
use engine::service::{
    EventSink, Health, Refusal, Request, RequestId, Service, ServiceInfo, ServiceStats,
};

use super::record::{DraftCounts, ErrorClass, Fault, Record, TokenCounts};
use super::store::StoreOptions;
use super::trace_context::{SpanId, TraceId};

/// A folder of one test, removed when it is dropped.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new() -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("th-engine-telemetry-{}-{count}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        Scratch(dir)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn store(&self) -> StoreOptions {
        StoreOptions::at(self.0.join("traces.db"))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Numbers that look random and are the same every time.
pub(super) struct Numbers(pub(super) u64);

impl Numbers {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }
}

/// A request that ended well.
pub(super) fn answered(started_us: u64) -> Record {
    Record {
        trace_id: TraceId::random(),
        span_id: SpanId::random(),
        sampled: true,
        request_id: "chatcmpl-1".into(),
        started_us,
        duration_us: 900_000,
        first_token_us: Some(120_000),
        client: "curl".into(),
        endpoint: "/v1/chat/completions".into(),
        model: "th-tiny".into(),
        status: 200,
        finish: Some("stop".into()),
        tokens: TokenCounts { prompt: 100, cached: 64, output: 30, reasoning: 10 },
        queue_us: 5_000,
        prefill_us: 100_000,
        decode_us: 700_000,
        draft: DraftCounts { rounds: 10, proposed: 70, accepted: 20 },
        ..Record::default()
    }
}

/// A request that did not.
pub(super) fn failed(started_us: u64, class: ErrorClass) -> Record {
    let fault = Fault { class, code: "code".into(), message: "message".into() };
    let answered = answered(started_us);
    Record { error: Some(fault), first_token_us: None, finish: None, status: 500, ..answered }
}

/// A request of any kind.
pub(super) fn any(numbers: &mut Numbers, started_us: u64) -> Record {
    let mut record = answered(started_us);
    record.client = format!("client-{}", numbers.below(3));
    record.model = format!("model-{}", numbers.below(2));
    record.duration_us = numbers.below(10_000_000);
    record.first_token_us = (numbers.below(8) > 0).then(|| numbers.below(1_000_000));
    record.tokens.prompt = numbers.below(1000);
    record.tokens.cached = numbers.below(record.tokens.prompt + 1);
    record.tokens.output = numbers.below(500);
    record.decode_us = numbers.below(5_000_000);
    if numbers.below(4) == 0 {
        let class = ErrorClass::ALL[numbers.below(9) as usize];
        record.error = failed(0, class).error;
    }
    record
}

/// A service that only tells figures.
pub(super) struct Figures;

impl Service for Figures {
    fn submit(&self, _: Request, _: EventSink) -> Result<RequestId, Refusal> {
        Err(Refusal::Unavailable("only figures".into()))
    }

    fn cancel(&self, _: RequestId) {}

    fn finish(&self, _: RequestId, _: usize) {}

    fn info(&self) -> ServiceInfo {
        ServiceInfo {
            context: 4096,
            lanes: 4,
            vocab: 1000,
            block: 8,
            queue: 64,
            device: "test".into(),
            memory: MemoryBytes { weights: 1000, draft: 100, ..MemoryBytes::default() },
            round_bytes: 3_000,
            read_bandwidth: 1_000_000.0,
        }
    }

    fn stats(&self) -> ServiceStats {
        ServiceStats {
            accepted: 12,
            waiting: 3,
            running: 2,
            output_tokens: 500,
            rounds: 100,
            round_time: Duration::from_millis(2500),
            pages_used: 7,
            pages: 9,
            ..ServiceStats::default()
        }
    }

    fn health(&self) -> Health {
        Health::Serving
    }
}
