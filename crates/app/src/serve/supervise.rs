//! `--supervised`: the engine in a process of its own, started again when it crashes.
//!
//! The supervisor holds the listening socket and passes requests on to the engine's process over a
//! UNIX socket that only the user may open. It does nothing else, so it has little to crash of. While the
//! engine is away, requests are told so; a reply that breaks off in its middle ends with an error in the
//! form of its API. The engine's process leaves when its standard input ends, as it does with the supervisor.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context as Task, Poll};
use std::time::{Duration, Instant};

use anyhow::Context;
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::response::Parts;
use axum::http::{HeaderMap, HeaderName, header};
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

use super::api::Api;
use super::errors::{self, ApiError};
use super::exchange;
use super::lifecycle::{draining, stopped};
use super::listen::{self, Listener};
use super::{router, stream};
use crate::telemetry::record::{ErrorClass, Fault, Record};
use crate::telemetry::{Recorder, TraceContext};
use crate::terminal::{error, note};

/// Pauses before the engine is started again: twice as long each time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// An engine that ran this long did not crash because of how it was started.
const GOOD_RUN: Duration = Duration::from_secs(60);
/// Exit statuses that a second try would not change: a wrong command line, a model that can't be
/// loaded.
const HOPELESS: [i32; 2] = [2, 3];
/// Headers that concern one connection alone.
const HOP_BY_HOP: [HeaderName; 5] = [
    header::CONNECTION,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::TE,
    HeaderName::from_static("keep-alive"),
];

/// What the engine's process may need beyond its own time to drain, before it is ended.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

/// Within this the end of the engine's process is noticed.
const NOTICED: Duration = Duration::from_secs(1);

/// How the engine's process is.
#[derive(Clone, Debug)]
enum Engine {
    Running,
    /// It ended, like this; the next try is at this time.
    Away {
        how: String,
        again: Instant,
    },
    /// It was told to leave, and is not started again.
    Leaving,
}

struct Supervisor {
    socket: PathBuf,
    engine: Mutex<Engine>,
    /// Takes requests that the engine's process has no more chance to tell of.
    recorder: Arc<Recorder>,
}

impl Supervisor {
    fn engine(&self) -> Engine {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, next: Engine) {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*engine, Engine::Leaving) {
            *engine = next;
        }
    }

    /// Whether the engine's process ends, or has: it takes a moment to be noticed.
    async fn engine_ends(&self) -> bool {
        let until = Instant::now() + NOTICED;
        while matches!(self.engine(), Engine::Running) {
            if Instant::now() >= until {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        true
    }

    /// What requests are told that the engine's process had when it ended.
    fn broken_off(&self) -> ApiError {
        match self.engine() {
            Engine::Leaving => stopped(),
            Engine::Running | Engine::Away { .. } => {
                let what = "the engine's process ended before the reply was complete; send the \
                            request again";
                let error = ApiError::unavailable("engine_crashed", what, FIRST_PAUSE);
                ApiError { class: ErrorClass::ServerError, ..error }
            }
        }
    }
}

/// Supervises an engine's process, started as this one was with `--supervised-socket` added, until
/// `leave`.
///
/// # Errors
/// If the process can't be started at all, or says that it never can.
pub async fn run(
    listener: Listener,
    recorder: Arc<Recorder>,
    header_timeout: Duration,
    leave: impl Future<Output = ()>,
    drain: Duration,
) -> anyhow::Result<()> {
    let folder = Folder::create()?;
    let socket = folder.0.join("engine.sock");
    let engine = Mutex::new(Engine::Running);
    let supervisor = Arc::new(Supervisor { socket, engine, recorder });
    // The engine's process knows its routes; here they only have to have their names.
    let known = router::document().paths.paths.into_keys();
    let routes = known.fold(Router::new(), |routes, path| routes.route(&path, any(pass_on)));
    let router =
        routes.fallback(pass_on).layer(from_fn(errors::shape)).with_state(Arc::clone(&supervisor));
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let kept = Arc::clone(&supervisor);
    let keeper = tokio::spawn(async move { keep(&kept, stopped, drain).await });
    tokio::pin!(keeper);
    let leave = async {
        tokio::select! {
            () = leave => {
                supervisor.set(Engine::Leaving);
                // It drains while requests still run through this process. The keeper is there to
                // hear it.
                let _ = stop.send(());
                None
            }
            kept = &mut keeper => Some(kept),
        }
    };
    let kept = {
        let (tell, told) = tokio::sync::oneshot::channel();
        let leave = async {
            // The one who waits below is told before anything else happens.
            let _ = tell.send(leave.await);
        };
        // Those who are cut short hear it from the engine's process, or from its end.
        let patience = drain + 2 * LAST_PATIENCE;
        listen::serve(listener, router, header_timeout, leave, patience, || ()).await;
        told.await.ok().flatten()
    };
    let kept = match kept {
        Some(kept) => kept,
        None => keeper.await,
    };
    kept.context("the supervisor failed")?
}

/// Runs the engine's process again and again.
async fn keep(
    supervisor: &Supervisor,
    mut stopped: tokio::sync::oneshot::Receiver<()>,
    drain: Duration,
) -> anyhow::Result<()> {
    let mut pause = FIRST_PAUSE;
    loop {
        let mut child = start(&supervisor.socket)?;
        // Waiting for a process closes its input, which would tell this one to leave.
        let input = child.stdin.take();
        supervisor.set(Engine::Running);
        let begun = Instant::now();
        let status = tokio::select! {
            status = child.wait() => status?,
            _ = &mut stopped => {
                drop(input);
                return end(child, drain).await;
            }
        };
        let how = match status.code() {
            Some(code) if HOPELESS.contains(&code) => {
                anyhow::bail!("the engine's process can't run (exit status {code})")
            }
            Some(code) => format!("exit status {code}"),
            None => status.to_string(),
        };
        pause = if begun.elapsed() >= GOOD_RUN { FIRST_PAUSE } else { pause };
        error(&format!("the engine's process ended ({how}); it is started again in {pause:?}"));
        supervisor.set(Engine::Away { how, again: Instant::now() + pause });
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = &mut stopped => return Ok(()),
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn start(socket: &Path) -> anyhow::Result<Child> {
    let program = std::env::current_exe().context("this program's own file")?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg("--supervised-socket").arg(socket);
    command.stdin(Stdio::piped()).kill_on_drop(true);
    command.spawn().context("can't start the engine's process")
}

/// Lets the engine's process end its requests; its input has ended, which tells it to.
async fn end(mut child: Child, drain: Duration) -> anyhow::Result<()> {
    if tokio::time::timeout(drain + LAST_PATIENCE, child.wait()).await.is_err() {
        note(&"the engine's process did not leave in time and is ended");
        child.kill().await?;
    }
    Ok(())
}

async fn pass_on(State(supervisor): State<Arc<Supervisor>>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let underway = Underway::begin(&supervisor, &request);
    match ask(&supervisor.socket, request).await {
        Ok(response) => relay(response, Api::of_path(&path), underway),
        Err(Unanswered::NotThere) => away(&supervisor, &path, underway),
        Err(Unanswered::Broken) if supervisor.engine_ends().await => {
            underway.fails(supervisor.broken_off())
        }
        // The engine's process lives: it refused the request at its head, and closed.
        Err(Unanswered::Broken) => {
            let what = "the request was refused before its body was read: check the API key, the \
                        path, the host, and the size of the body";
            ApiError::bad_request("refused_unread", what).into_response()
        }
        Err(Unanswered::Incomplete) => {
            let what = "the request's body did not arrive whole";
            ApiError::bad_request("incomplete_body", what).into_response()
        }
    }
}

/// Why the engine's process gave no reply.
enum Unanswered {
    /// It does not listen.
    NotThere,
    /// It closed with the request in hand.
    Broken,
    /// The request never arrived whole, which is its client's affair.
    Incomplete,
}

async fn ask(socket: &Path, mut request: Request) -> Result<Response<Incoming>, Unanswered> {
    let gone = |_| Unanswered::NotThere;
    let stream = UnixStream::connect(socket).await.map_err(gone)?;
    let connected = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = connected.map_err(|_| Unanswered::NotThere)?;
    tokio::spawn(async move {
        // Its end shows in the reply's body.
        let _ = connection.await;
    });
    let host = request.uri().authority().map(|authority| authority.as_str().parse());
    if let Some(Ok(host)) = host {
        request.headers_mut().entry(header::HOST).or_insert(host);
    }
    one_hop(request.headers_mut());
    *request.version_mut() = axum::http::Version::HTTP_11;
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    // A part of one that is right already.
    *request.uri_mut() = target.parse().map_err(|_| Unanswered::Incomplete)?;
    sender.send_request(request).await.map_err(|error| match error.is_user() {
        true => Unanswered::Incomplete,
        false => Unanswered::Broken,
    })
}

fn one_hop(headers: &mut HeaderMap) {
    HOP_BY_HOP.iter().for_each(|name| drop(headers.remove(name)));
}

fn relay(response: Response<Incoming>, api: Api, mut underway: Underway) -> Response {
    let (mut parts, body) = response.into_parts();
    one_hop(&mut parts.headers);
    let kind = parts.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let streams =
        kind.is_some_and(|kind| kind.starts_with("text/event-stream") || kind.contains("ndjson"));
    underway.answered(&parts, streams);
    let relayed = Relayed { body, api, streams, underway: Some(underway) };
    Response::from_parts(parts, Body::new(relayed))
}

/// What a request is told while there is no engine.
fn away(supervisor: &Supervisor, path: &str, underway: Underway) -> Response {
    let error = match supervisor.engine() {
        Engine::Leaving => draining(),
        Engine::Running => {
            let what = "the engine's process is starting";
            ApiError::unavailable("engine_restarting", what, FIRST_PAUSE)
        }
        Engine::Away { how, again } => {
            let what = format!("the engine's process ended ({how}) and is being started again");
            let wait = again.saturating_duration_since(Instant::now());
            ApiError::unavailable("engine_restarting", what, wait)
        }
    };
    if ["/health", "/ready"].contains(&path) {
        let status = if error.code == "draining" { "draining" } else { "restarting" };
        let report = json!({"status": status, "reason": error.message});
        return (error.status, axum::Json(report)).into_response();
    }
    underway.fails(error)
}

/// A request that the engine's process has. What is known of it here goes into its record if that
/// process never gets to write one.
struct Underway {
    supervisor: Arc<Supervisor>,
    begun: Instant,
    /// `None` for requests that are not traced.
    record: Option<Record>,
}

impl Underway {
    fn begin(supervisor: &Arc<Supervisor>, request: &Request) -> Underway {
        let record = exchange::record(request, &TraceContext::from_headers(request.headers()));
        Underway { supervisor: Arc::clone(supervisor), begun: Instant::now(), record }
    }

    /// The reply has begun: it names the trace.
    fn answered(&mut self, parts: &Parts, streams: bool) {
        let Some(record) = &mut self.record else { return };
        if let Some((trace_id, span_id)) = TraceContext::of_reply(&parts.headers) {
            (record.trace_id, record.span_id) = (trace_id, span_id);
        }
        let id = parts.headers.get("x-request-id").and_then(|id| id.to_str().ok());
        record.request_id = id.unwrap_or_default().to_owned();
        record.status = parts.status.as_u16();
        record.stream = streams;
    }

    /// It failed, with no reply or in the middle of one.
    fn lost(self, error: &ApiError) {
        let Some(mut record) = self.record else { return };
        record.duration_us = u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        if record.status == 0 {
            record.status = error.status.as_u16();
        }
        let (code, message) = (error.code.to_owned(), error.message.clone());
        record.error = Some(Fault { class: error.class, code, message });
        self.supervisor.recorder.record(record);
    }

    /// It gets this instead of a reply.
    fn fails(self, error: ApiError) -> Response {
        let context = self.record.as_ref().map(Record::context);
        self.lost(&error);
        let mut response = error.into_response();
        if let Some(context) = context {
            context.mark(response.headers_mut());
        }
        response
    }
}

/// A reply on its way. If the engine's process crashes, a stream ends with an error that its client
/// understands, and anything else is cut off.
struct Relayed {
    body: Incoming,
    api: Api,
    streams: bool,
    /// `None` once it is over.
    underway: Option<Underway>,
}

impl HttpBody for Relayed {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Task<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, hyper::Error>>> {
        if self.underway.is_none() {
            return Poll::Ready(None);
        }
        match Pin::new(&mut self.body).poll_frame(task) {
            Poll::Ready(Some(Err(broken))) => {
                let Some(underway) = self.underway.take() else { return Poll::Ready(None) };
                let error = underway.supervisor.broken_off();
                underway.lost(&error);
                Poll::Ready(Some(match self.streams {
                    true => Ok(http_body::Frame::data(last_words(&error, self.api).into())),
                    false => Err(broken),
                }))
            }
            polled => polled,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.underway.is_none() || self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        match self.streams {
            // Its last words may come on top.
            true => http_body::SizeHint::default(),
            false => self.body.size_hint(),
        }
    }
}

fn last_words(error: &ApiError, api: Api) -> String {
    let body = error.body(api);
    let mut out = String::new();
    match api {
        Api::OpenAi => stream::data(&body, &mut out),
        Api::Anthropic => stream::event("error", &body, &mut out),
        Api::Ollama => stream::line(&body, &mut out),
    }
    out
}

/// A folder that only this user may open, gone with its owner.
struct Folder(PathBuf);

impl Folder {
    fn create() -> anyhow::Result<Folder> {
        use std::os::unix::fs::DirBuilderExt;
        let path = std::env::temp_dir().join(super::ids::fresh("th-engine-"));
        let made = std::fs::DirBuilder::new().mode(0o700).create(&path);
        made.with_context(|| format!("can't make the folder {}", path.display()))?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left in the system's folder for such things is small, and cleared by the system.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
