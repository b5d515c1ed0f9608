//! Metrics in the format of Prometheus. Every histogram is in seconds, and every label has a bounded
//! number of values.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::Duration;

use engine::service::{Health, Service};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, EncodeMetric,
    prometheus_text,
};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::record::Record;
use super::recorder::StoreHealth;
use super::stats::OTHERS;

/// What [`Metrics::text`] gives.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Values that a label may have; later ones are counted as others.
const MAX_LABEL_VALUES: usize = 64;
/// Seconds, each bucket twice the one before: those of the GenAI conventions, and two shorter.
const SECONDS: [f64; 16] = [
    0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96,
    81.92,
];
/// Seconds of one token.
const TOKEN_SECONDS: [f64; 14] =
    [0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0];
const TOKENS_PER_ROUND: [f64; 10] = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 16.0];

/// The metrics of one server.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    retries: Family<ModelLabel, Counter>,
    tokens: Family<TokenLabels, Counter>,
    tool_calls: Family<ModelLabel, Counter>,
    duration: Family<ModelLabel, Histogram, fn() -> Histogram>,
    first_token: Family<ModelLabel, Histogram, fn() -> Histogram>,
    output_token: Family<ModelLabel, Histogram, fn() -> Histogram>,
    queue: Family<ModelLabel, Histogram, fn() -> Histogram>,
    prefill: Family<ModelLabel, Histogram, fn() -> Histogram>,
    tokens_per_round: Family<ModelLabel, Histogram, fn() -> Histogram>,
    models: Values,
    endpoints: Values,
    sources: Arc<Sources>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    endpoint: String,
    model: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TokenLabels {
    model: String,
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabel {
    model: String,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new()
    }
}

impl Metrics {
    /// Metrics with nothing counted.
    pub fn new() -> Metrics {
        let seconds: fn() -> Histogram = || Histogram::new(SECONDS);
        let mut metrics = Metrics {
            registry: Registry::default(),
            requests: Family::default(),
            retries: Family::default(),
            tokens: Family::default(),
            tool_calls: Family::default(),
            duration: Family::new_with_constructor(seconds),
            first_token: Family::new_with_constructor(seconds),
            output_token: Family::new_with_constructor(|| Histogram::new(TOKEN_SECONDS)),
            queue: Family::new_with_constructor(seconds),
            prefill: Family::new_with_constructor(seconds),
            tokens_per_round: Family::new_with_constructor(|| Histogram::new(TOKENS_PER_ROUND)),
            models: Values::default(),
            endpoints: Values::default(),
            sources: Arc::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        let count = "th_engine_requests";
        registry.register(count, "Finished requests, by route and outcome", self.requests.clone());
        let retries = "Requests that look like retries of one that ended badly";
        registry.register("th_engine_suspected_retries", retries, self.retries.clone());
        let tokens = "Tokens; cached ones are among the prompt's, reasoning among the output's";
        registry.register("th_engine_tokens", tokens, self.tokens.clone());
        registry.register("th_engine_tool_calls", "Tool calls", self.tool_calls.clone());
        for (name, help, family) in [
            ("gen_ai_server_request_duration", "First byte in to last byte out", &self.duration),
            (
                "gen_ai_server_time_to_first_token",
                "First byte in to first token",
                &self.first_token,
            ),
            (
                "gen_ai_server_time_per_output_token",
                "Time of rounds over output tokens, of each answer",
                &self.output_token,
            ),
            ("th_engine_queue", "Wait for a lane", &self.queue),
            ("th_engine_prefill", "Lane to the prompt's last token in the cache", &self.prefill),
        ] {
            registry.register_with_unit(name, help, Unit::Seconds, family.clone());
        }
        let per_round = "Output tokens over rounds, of each answer";
        registry.register("th_engine_tokens_per_round", per_round, self.tokens_per_round.clone());
        registry.register_collector(Box::new(self.sources.clone()));
    }

    /// Counts a finished request. Histograms are of those that ended well.
    pub fn observe(&self, record: &Record) {
        let model = ModelLabel { model: self.models.bounded(&record.model) };
        let labels = RequestLabels {
            endpoint: self.endpoints.bounded(&record.endpoint),
            model: model.model.clone(),
            outcome: record.outcome(),
        };
        self.requests.get_or_create(&labels).inc();
        let tokens = &record.tokens;
        for (kind, count) in [
            ("prompt", tokens.prompt),
            ("cached", tokens.cached),
            ("output", tokens.output),
            ("reasoning", tokens.reasoning),
        ] {
            if count > 0 {
                let labels = TokenLabels { model: model.model.clone(), kind };
                self.tokens.get_or_create(&labels).inc_by(count);
            }
        }
        if !record.tool_calls.is_empty() {
            self.tool_calls.get_or_create(&model).inc_by(record.tool_calls.len() as u64);
        }
        let Some(first_token_us) = record.first_token_us.filter(|_| record.error.is_none()) else {
            return;
        };
        let seconds = |us: u64| us as f64 / 1e6;
        self.duration.get_or_create(&model).observe(seconds(record.duration_us));
        self.first_token.get_or_create(&model).observe(seconds(first_token_us));
        self.queue.get_or_create(&model).observe(seconds(record.queue_us));
        self.prefill.get_or_create(&model).observe(seconds(record.prefill_us));
        let (output, rounds) = (tokens.output as f64, record.draft.rounds as f64);
        if output > 0.0 {
            self.output_token.get_or_create(&model).observe(seconds(record.decode_us) / output);
        }
        if rounds > 0.0 {
            self.tokens_per_round.get_or_create(&model).observe(output / rounds);
        }
    }

    /// Counts a request of this model that the store found to look like a retry.
    pub(super) fn suspected_retry(&self, model: &str) {
        self.retries.get_or_create(&ModelLabel { model: self.models.bounded(model) }).inc();
    }

    /// Also tells what this service does, from now on instead of any other, for as long as it lives:
    /// metrics keep no model in memory.
    pub fn watch_service(&self, service: &Arc<dyn Service>) {
        let service = Arc::downgrade(service);
        *self.sources.service.write().unwrap_or_else(PoisonError::into_inner) = Some(service);
    }

    pub(super) fn watch_store(&self, health: HealthOf) {
        *self.sources.store.write().unwrap_or_else(PoisonError::into_inner) = Some(health);
    }

    /// All of it, as [`CONTENT_TYPE`].
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = prometheus_text::encode(&mut text, &self.registry);
        text
    }
}

/// The values that a label has had, so that it has no more than [`MAX_LABEL_VALUES`].
#[derive(Debug, Default)]
struct Values(Mutex<HashSet<String>>);

impl Values {
    fn bounded(&self, value: &str) -> String {
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if values.contains(value) || values.len() < MAX_LABEL_VALUES {
            values.insert(value.to_owned());
            return value.to_owned();
        }
        OTHERS.to_owned()
    }
}

/// Tells how a store is doing.
pub(super) type HealthOf = Box<dyn Fn() -> StoreHealth + Send + Sync>;

/// What is asked when metrics are read.
#[derive(Default)]
struct Sources {
    service: RwLock<Option<Weak<dyn Service>>>,
    store: RwLock<Option<HealthOf>>,
}

impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sources").finish_non_exhaustive()
    }
}

impl Collector for Sources {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut writer = Writer(encoder);
        let service = self.service.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(service) = service.and_then(|service| service.upgrade()) {
            writer.service(service.as_ref())?;
        }
        match self.store.read().unwrap_or_else(PoisonError::into_inner).as_ref() {
            Some(health) => writer.store(&health()),
            None => Ok(()),
        }
    }
}

struct Writer<'a>(DescriptorEncoder<'a>);

impl Writer<'_> {
    fn service(&mut self, service: &dyn Service) -> fmt::Result {
        let (stats, info, health) = (service.stats(), service.info(), service.health());
        let floor = if info.read_bandwidth > 0.0 {
            info.round_bytes as f64 / info.read_bandwidth
        } else {
            f64::NAN
        };
        let serving = f64::from(u8::from(health == Health::Serving));
        self.gauge("serving", "1 while the scheduler answers", serving)?;
        self.gauge("lanes", "Lanes", info.lanes as f64)?;
        self.gauge("lanes_running", "Lanes that compute", stats.running as f64)?;
        self.gauge("requests_waiting", "Requests that wait for a lane", stats.waiting as f64)?;
        self.gauge("queue_limit", "Requests that may wait", info.queue as f64)?;
        self.gauge("pages", "Pages of keys and values", stats.pages as f64)?;
        self.gauge("pages_used", "Pages that hold something", stats.pages_used as f64)?;
        self.gauge("checkpoints", "Checkpoints in memory", stats.checkpoints as f64)?;
        self.gauge(
            "checkpoint_bytes",
            "Bytes that they alone hold",
            stats.checkpoint_bytes as f64,
        )?;
        self.gauge("cache_disk_bytes", "Bytes of the cache's disk tier", stats.disk_bytes as f64)?;
        let floor_help = "The least that a round of one lane can take here; NaN if unknown";
        self.gauge("round_floor_seconds", floor_help, floor)?;
        self.memory(&info.memory)?;
        for (name, help, count) in [
            ("scheduler_requests_accepted", "Requests that the scheduler took", stats.accepted),
            ("scheduler_requests_refused", "Requests that it refused", stats.refused),
            ("scheduler_requests_completed", "Requests that ended well", stats.completed),
            (
                "scheduler_requests_cancelled",
                "Requests cancelled or past a deadline",
                stats.cancelled,
            ),
            ("scheduler_requests_failed", "Requests that failed", stats.failed),
            ("prompt_tokens", "Prompt tokens of requests that got a lane", stats.prompt_tokens),
            ("cached_tokens", "Of these, not computed", stats.cached_tokens),
            ("output_tokens", "Tokens emitted", stats.output_tokens),
            ("rounds", "Rounds, of however many lanes", stats.rounds),
            ("prefill_passes", "Prefill passes", stats.prefill_passes),
            ("proposals", "Proposals verified", stats.proposed),
            ("proposals_accepted", "Proposals accepted", stats.accepted_proposals),
            ("checkpoints_taken", "Checkpoints taken", stats.checkpoints_taken),
            ("checkpoints_evicted", "Checkpoints evicted", stats.evictions),
            ("scheduler_restarts", "Times that the scheduler was rebuilt", stats.restarts),
        ] {
            self.counter(name, help, count)?;
        }
        self.time("round_seconds", "Time that rounds took", stats.round_time)?;
        self.time("prefill_pass_seconds", "Time that prefill passes took", stats.prefill_time)?;
        self.time("checkpoint_seconds", "Time that checkpoints took", stats.checkpoint_time)
    }

    fn memory(&mut self, memory: &engine::MemoryBytes) -> fmt::Result {
        let gauge = ConstGauge::new(0i64);
        let help = "Device memory that the model takes, by kind";
        let mut encoder = self.0.encode_descriptor(
            "th_engine_device_memory_bytes",
            help,
            None,
            gauge.metric_type(),
        )?;
        for (kind, bytes) in [
            ("weights", memory.weights),
            ("draft", memory.draft),
            ("kv", memory.kv),
            ("state", memory.state),
            ("snapshots", memory.snapshots),
        ] {
            let labels = [("kind", kind)];
            ConstGauge::new(bytes as f64).encode(encoder.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn store(&mut self, health: &StoreHealth) -> fmt::Result {
        let ok = f64::from(u8::from(health.state != "failing"));
        self.gauge("trace_store_ok", "0 while traces can't be written", ok)?;
        self.gauge("trace_store_bytes", "Bytes of the store of traces", health.bytes as f64)?;
        self.gauge("traces_waiting", "Traces that wait to be written", health.waiting as f64)?;
        self.counter("traces_written", "Traces written", health.written)?;
        self.counter("traces_lost", "Traces that were never written", health.lost)?;
        self.counter("trace_store_failures", "Failures to write, tried again", health.failures)?;
        if let Some(otlp) = &health.otlp {
            self.counter("otlp_traces_sent", "Traces that a collector took", otlp.sent)?;
            self.counter("otlp_traces_lost", "Traces that it never got", otlp.lost)?;
        }
        Ok(())
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl EncodeGaugeValue) -> fmt::Result {
        self.metric(name, help, &ConstGauge::new(value))
    }

    fn counter(&mut self, name: &str, help: &str, value: impl EncodeCounterValue) -> fmt::Result {
        self.metric(name, help, &ConstCounter::new(value))
    }

    fn time(&mut self, name: &str, help: &str, time: Duration) -> fmt::Result {
        self.counter(name, help, time.as_secs_f64())
    }

    fn metric(&mut self, name: &str, help: &str, metric: &impl EncodeMetric) -> fmt::Result {
        let name = format!("th_engine_{name}");
        let encoder = self.0.encode_descriptor(&name, help, None, metric.metric_type())?;
        metric.encode(encoder)
    }
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
