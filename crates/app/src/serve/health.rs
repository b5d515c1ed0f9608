//! `/health`, `/ready`, `/status`: the truth about the server.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::service::{Health, ServiceStats};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::lifecycle::Phase;
use super::state::{App, Server};
use crate::cli::version;

/// Whether the server answers, and why not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct HealthReport {
    /// `ok`, `loading`, `released` (the next request loads the model), `recovering`, `draining` or
    /// `failed`.
    pub status: &'static str,
    /// Why, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Whether requests are answered: 503 with the reason if not.
#[utoipa::path(get, path = "/health", tag = "Server",
    responses((status = 200, description = "It answers", body = HealthReport),
              (status = 503, description = "It does not", body = HealthReport)))]
pub async fn health(State(app): State<App>) -> Response {
    report(&app, |status| matches!(status, "ok" | "released"))
}

/// Whether a request would be answered at once, with the model in memory.
#[utoipa::path(get, path = "/ready", tag = "Server",
    responses((status = 200, description = "It would", body = HealthReport),
              (status = 503, description = "It would not", body = HealthReport)))]
pub async fn ready(State(app): State<App>) -> Response {
    report(&app, |status| status == "ok")
}

fn report(app: &Server, fine: fn(&str) -> bool) -> Response {
    let report = health_of(app);
    if fine(report.status) {
        return Json(report).into_response();
    }
    let retry = [(header::RETRY_AFTER, "5")];
    (StatusCode::SERVICE_UNAVAILABLE, retry, Json(report)).into_response()
}

fn health_of(app: &Server) -> HealthReport {
    let (status, reason) = match app.phase() {
        _ if app.lifecycle.draining() => ("draining", None),
        Phase::Loading(loading) => {
            let progress = match loading.total_bytes {
                0 => loading.phase,
                total => {
                    let (done, mib) = (loading.done_bytes, 1 << 20);
                    format!("{}: {} of {} MiB", loading.phase, done / mib, total / mib)
                }
            };
            ("loading", Some(progress).filter(|text| !text.is_empty()))
        }
        Phase::Released => ("released", None),
        // Names of files stay in the log.
        Phase::Failed(_) => ("failed", Some("the model could not be loaded; see the log".into())),
        Phase::Ready(served) => match served.service.health() {
            Health::Serving => ("ok", None),
            Health::Recovering(what) => ("recovering", Some(what)),
            Health::Draining => ("draining", None),
            Health::Failed(what) => ("failed", Some(what)),
        },
    };
    HealthReport { status, reason }
}

/// All that is known: instance, build, model, device, memory, lanes, queue, cache, rounds.
#[utoipa::path(get, path = "/status", tag = "Server",
    responses((status = 200, description = "The status; fields may be added")))]
pub async fn status(State(app): State<App>) -> Json<Value> {
    let report = health_of(&app);
    let mut status = json!({
        "status": report.status,
        "reason": report.reason,
        "build": version(),
        "pid": std::process::id(),
        "uptime_seconds": app.uptime().as_secs_f64(),
        "lifecycle": app.phase().name(),
        "draining": app.lifecycle.draining(),
        "traces": app.recorder.health(),
    });
    if let (Ok(served), Value::Object(status)) = (app.lifecycle.facts(), &mut status) {
        let info = &served.info;
        let engine = app.lifecycle.served();
        let engine = engine.as_ref().map(|served| &served.service);
        let stats = engine.map(|engine| engine.stats()).unwrap_or_default();
        let disk_error = engine.and_then(|engine| engine.disk_error());
        let memory = &info.memory;
        let defaults = &served.defaults;
        let model = json!({
            "model": {
                "name": served.name,
                "names": app.names(&served),
                "draft": served.draft,
                "vocab": info.vocab,
                "context": info.context,
                "chat": served.text.as_ref().is_some_and(|t| t.templates().choose(false).is_some()),
                "thinking_switch": served.text.as_ref().is_some_and(|text| text.thinking_switch()),
            },
            "sampling_defaults": {
                "do_sample": defaults.do_sample,
                "temperature": defaults.temperature,
                "top_k": defaults.top_k,
                "top_p": defaults.top_p,
                "min_p": defaults.min_p,
                "presence_penalty": defaults.presence_penalty,
                "frequency_penalty": defaults.frequency_penalty,
                "repetition_penalty": defaults.repetition_penalty,
            },
            "device": {
                "name": info.device,
                "round_bytes": info.round_bytes,
                "read_bandwidth": info.read_bandwidth,
            },
            "memory": {
                "weights_bytes": memory.weights,
                "draft_bytes": memory.draft,
                "kv_bytes": memory.kv,
                "state_bytes": memory.state,
                "checkpoint_bytes": memory.snapshots,
                "total_bytes": memory.total(),
            },
            "lanes": {"total": info.lanes, "running": stats.running},
            "queue": {"limit": info.queue, "waiting": stats.waiting},
        });
        if let Value::Object(model) = model {
            status.extend(model);
        }
        if let Value::Object(figures) = figures(&stats, disk_error) {
            status.extend(figures);
        }
    }
    Json(status)
}

fn figures(stats: &ServiceStats, disk_error: Option<String>) -> Value {
    let seconds = |time: Duration| time.as_secs_f64();
    let ratio = |a: u64, b: u64| (b > 0).then(|| a as f64 / b as f64);
    json!({
        "requests": {
            "accepted": stats.accepted,
            "refused": stats.refused,
            "completed": stats.completed,
            "cancelled": stats.cancelled,
            "failed": stats.failed,
        },
        "tokens": {
            "prompt": stats.prompt_tokens,
            "cached": stats.cached_tokens,
            "output": stats.output_tokens,
        },
        "rounds": {
            "count": stats.rounds,
            "seconds": seconds(stats.round_time),
            "tokens_per_round": ratio(stats.output_tokens, stats.rounds),
            "proposed": stats.proposed,
            "accepted": stats.accepted_proposals,
        },
        "prefill": {"passes": stats.prefill_passes, "seconds": seconds(stats.prefill_time)},
        "cache": {
            "pages": stats.pages,
            "pages_used": stats.pages_used,
            "checkpoints": stats.checkpoints,
            "checkpoint_bytes": stats.checkpoint_bytes,
            "disk_bytes": stats.disk_bytes,
            "disk_error": disk_error,
            "evictions": stats.evictions,
            "hit_share": ratio(stats.cached_tokens, stats.prompt_tokens),
        },
        "engine_restarts": stats.restarts,
    })
}
