//! A server with the real page and the real traces, and answers from a script.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use app::telemetry::metrics::Metrics;
use app::telemetry::record::{DraftCounts, Fault, Span, TokenCounts};
use app::telemetry::store::StoreOptions;
use app::telemetry::trace_context::{SpanId, TraceId, propagate};
use app::telemetry::{ErrorClass, Record, Recorder, RecorderOptions};
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

/// The key that is asked for while [`Script::wants_key`].
pub(crate) const KEY: &str = "open sesame";

/// What the server does.
#[derive(Default)]
pub(crate) struct Script {
    /// Whether requests must carry [`KEY`].
    pub(crate) wants_key: AtomicBool,
    /// Chat requests so far.
    pub(crate) chats: AtomicU64,
    /// Streams that the page left before their end.
    pub(crate) left: AtomicU64,
    tokens: AtomicU64,
}

/// Starts the server on a thread of its own.
pub(crate) fn start(folder: &Path, script: Arc<Script>) -> SocketAddr {
    let store = Some(StoreOptions::at(folder.join("traces.db")));
    let options = RecorderOptions { store, ..RecorderOptions::default() };
    let recorder = Recorder::start(options, Arc::new(Metrics::new()));
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_micros() as u64;
    (0..120).for_each(|i| recorder.record(request(i, now)));
    assert!(recorder.flush(Duration::from_secs(60)));
    let router = Router::new()
        .route("/status", get(status))
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(chat))
        .merge(app::telemetry::routes::routes(recorder))
        .layer(from_fn_with_state(script.clone(), guard))
        .merge(app::serve::page::routes())
        .layer(from_fn(propagate))
        .with_state(script);
    let (sender, address) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            sender.send(listener.local_addr().unwrap()).unwrap();
            axum::serve(listener, router).await.unwrap();
        });
    });
    address.recv().unwrap()
}

/// A request of the last hour.
fn request(i: u64, now: u64) -> Record {
    let part = |name: &str, start_us, duration_us, children| Span {
        name: name.into(),
        start_us,
        duration_us,
        children,
        ..Span::default()
    };
    let first = 60_000 + 7_919 * (i % 37);
    let decode = 300_000 + 104_729 * (i % 11);
    let failed = i % 9 == 4;
    let rounds = (0..12).map(|n| part("rounds", first + n * decode / 12, decode / 12, Vec::new()));
    let fault = || Fault {
        class: ErrorClass::Overloaded,
        code: "queue_full".into(),
        message: "64 requests wait already <b>".into(),
    };
    Record {
        trace_id: TraceId::random(),
        span_id: SpanId::random(),
        request_id: format!("chatcmpl-{i}"),
        started_us: now - i * 29_000_000,
        duration_us: if failed { 900 } else { first + decode + 4_000 },
        first_token_us: (!failed).then_some(first),
        client: ["claude-cli/2.1", "openai-python", "<script>alert(1)</script>"][i as usize % 3]
            .into(),
        endpoint: "/v1/chat/completions".into(),
        model: "th-tiny".into(),
        status: if failed { 429 } else { 200 },
        finish: (!failed).then(|| "stop".into()),
        error: failed.then(fault),
        tokens: TokenCounts { prompt: 400 + i, cached: 256, output: 60 + i % 40, reasoning: 20 },
        queue_us: 2_000,
        prefill_us: first - 5_000,
        decode_us: decode,
        draft: DraftCounts { rounds: 24, proposed: 168, accepted: 36 + i % 40 },
        spans: vec![
            part("template", 300, 700, Vec::new()),
            part("tokenise", 1_000, 900, Vec::new()),
            part("queue", 2_000, 2_000, Vec::new()),
            part(
                "prefill",
                5_000,
                first - 5_000,
                vec![part("chunk", 5_000, first - 5_000, Vec::new())],
            ),
            part("decode", first, decode, rounds.collect()),
        ],
        ..Record::default()
    }
}

async fn guard(State(script): State<Arc<Script>>, request: Request, next: Next) -> Response {
    let key = request.headers().get(header::AUTHORIZATION).and_then(|key| key.to_str().ok());
    if script.wants_key.load(Ordering::Relaxed) && key != Some(&format!("Bearer {KEY}")) {
        let body = Json(json!({"error": {"message": "a valid API key is needed"}}));
        return (StatusCode::UNAUTHORIZED, body).into_response();
    }
    next.run(request).await
}

async fn models() -> Json<Value> {
    Json(json!({"object": "list", "data": [{"id": "th-tiny", "object": "model"}]}))
}

async fn status(State(script): State<Arc<Script>>) -> Json<Value> {
    let tokens = script.tokens.load(Ordering::Relaxed);
    Json(json!({
        "status": "ok", "reason": null, "build": "0.1.0", "uptime_seconds": 100.0,
        "model": {"name": "th-tiny", "draft": "th-tiny-dflash", "context": 4096},
        "device": {"name": "a scripted device", "round_bytes": 3e6, "read_bandwidth": 1e9},
        "memory": {"total_bytes": 123_456_789},
        "lanes": {"total": 4, "running": 1}, "queue": {"limit": 64, "waiting": 2},
        "tokens": {"prompt": 100, "cached": 50, "output": tokens},
        "rounds": {"count": tokens / 3, "seconds": tokens as f64 / 600.0},
        "cache": {"pages": 64, "pages_used": 17, "checkpoints": 3, "checkpoint_bytes": 5_000_000, "hit_share": 0.5},
        "traces": {"state": "ok", "written": 120, "lost": 0},
    }))
}

/// Streams an answer: with thoughts and hostile markdown; slow and long if asked to; a tool call if
/// there are tools and no result yet.
async fn chat(State(script): State<Arc<Script>>, Json(request): Json<Value>) -> Response {
    script.chats.fetch_add(1, Ordering::Relaxed);
    let messages = request["messages"].as_array().cloned().unwrap_or_default();
    let last = messages.last().cloned().unwrap_or_default();
    let text = last["content"].as_str().unwrap_or_default().to_owned();
    if text.contains("fail") {
        let body = json!({"error": {"message": "the script says so <i>", "code": "x"}});
        return (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response();
    }
    let (slow, calls) =
        (text.contains("slow"), request["tools"].is_array() && last["role"] != "tool");
    let delta = |delta: Value| json!({"choices": [{"index": 0, "delta": delta}]});
    let mut chunks = vec![
        json!({"choices": [], "prompt_progress": {"processed": 10, "total": 20, "cache": 0}}),
        delta(json!({"role": "assistant", "content": ""})),
        delta(json!({"reasoning_content": "Let me think "})),
        delta(json!({"reasoning_content": "about that."})),
    ];
    if calls {
        let begin = json!({"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{\"ci"}});
        chunks.push(delta(json!({"tool_calls": [begin]})));
        let rest = json!({"index": 0, "function": {"arguments": "ty\":\"Bern\"}"}});
        chunks.push(delta(json!({"tool_calls": [rest]})));
    } else if slow {
        chunks.extend((0..2000).map(|i| delta(json!({"content": format!("word{i} ")}))));
    } else {
        let answer = format!(
            "## You said\n\n{text}\n\n| a | b |\n|---|---|\n| 1 | **2** |\n\n```rust\nfn main() {{}}\n```\n\n\
             <img src=x onerror=\"window.hacked=1\"> [click](javascript:window.hacked=2) \
             <script>window.hacked=3</script> 漢字 👩‍👩‍👧‍👦"
        );
        let pieces: Vec<char> = answer.chars().collect();
        chunks.extend(
            pieces
                .chunks(7)
                .map(|piece| delta(json!({"content": piece.iter().collect::<String>()}))),
        );
    }
    let finish = if calls { "tool_calls" } else { "stop" };
    chunks.push(json!({
        "choices": [{"index": 0, "delta": {}, "finish_reason": finish}],
        "timings": {"cache_n": 64, "prompt_n": 36, "predicted_n": 90, "predicted_ms": 1000.0, "predicted_per_second": 90.0,
            "rounds": 30, "tokens_per_round": 3.0, "floor_share": 0.8},
    }));
    chunks.push(json!({"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 90}}));
    let left = Left { script: script.clone(), whole: false };
    let events = futures_util::stream::unfold(
        (chunks.into_iter(), left),
        move |(mut chunks, mut left)| async move {
            let Some(chunk) = chunks.next() else {
                if left.whole {
                    return None;
                }
                left.whole = true;
                return Some((
                    Ok::<_, std::io::Error>(Bytes::from("data: [DONE]\n\n")),
                    (chunks, left),
                ));
            };
            let until = Instant::now() + Duration::from_millis(if slow { 20 } else { 2 });
            tokio::time::sleep_until(until.into()).await;
            left.script.tokens.fetch_add(3, Ordering::Relaxed);
            Some((Ok(Bytes::from(format!(": alive\n\ndata: {chunk}\n\n"))), (chunks, left)))
        },
    );
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(events)).into_response()
}

/// Counts a stream that was dropped before its end.
struct Left {
    script: Arc<Script>,
    whole: bool,
}

impl Drop for Left {
    fn drop(&mut self) {
        self.script.left.fetch_add(u64::from(!self.whole), Ordering::Relaxed);
    }
}
