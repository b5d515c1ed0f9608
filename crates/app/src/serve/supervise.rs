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
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

use super::api::Api;
use super::errors::{self, ApiError};
use super::listen::{self, Listener};
use super::stream;
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

/// How the engine's process is.
#[derive(Clone, Debug)]
enum Engine {
    Running,
    /// It ended, like this; the next try is at this time.
    Away {
        how: String,
        again: Instant,
    },
}

struct Supervisor {
    socket: PathBuf,
    engine: Mutex<Engine>,
}

impl Supervisor {
    fn engine(&self) -> Engine {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, engine: Engine) {
        *self.engine.lock().unwrap_or_else(PoisonError::into_inner) = engine;
    }
}

/// Supervises an engine's process, started as this one was with `--supervised-socket` added, until
/// `leave`.
///
/// # Errors
/// If the process can't be started at all, or says that it never can.
pub async fn run(
    listener: Listener,
    header_timeout: Duration,
    leave: impl Future<Output = ()>,
    drain: Duration,
) -> anyhow::Result<()> {
    let folder = Folder::create()?;
    let socket = folder.0.join("engine.sock");
    let engine = Mutex::new(Engine::Running);
    let supervisor = Arc::new(Supervisor { socket: socket.clone(), engine });
    let router = Router::new()
        .fallback(pass_on)
        .layer(from_fn(errors::shape))
        .with_state(Arc::clone(&supervisor));
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let keeper = tokio::spawn(async move { keep(&supervisor, stopped, drain).await });
    tokio::pin!(keeper);
    let leave = async {
        tokio::select! {
            () = leave => None,
            kept = &mut keeper => Some(kept),
        }
    };
    let kept = {
        let (tell, told) = tokio::sync::oneshot::channel();
        let leave = async {
            // The one who waits below is told before anything else happens.
            let _ = tell.send(leave.await);
        };
        listen::serve(listener, router, header_timeout, leave, drain).await;
        told.await.ok().flatten()
    };
    let kept = match kept {
        Some(kept) => kept,
        None => {
            // The keeper is there to hear it.
            let _ = stop.send(());
            keeper.await
        }
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
    let patience = drain + Duration::from_secs(5);
    if tokio::time::timeout(patience, child.wait()).await.is_err() {
        note(&"the engine's process did not leave in time and is ended");
        child.kill().await?;
    }
    Ok(())
}

async fn pass_on(State(supervisor): State<Arc<Supervisor>>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    match ask(&supervisor.socket, request).await {
        Ok(response) => relay(response, Api::of_path(&path)),
        Err(()) => away(&supervisor, &path),
    }
}

async fn ask(socket: &Path, mut request: Request) -> Result<Response<Incoming>, ()> {
    let stream = UnixStream::connect(socket).await.map_err(drop)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(drop)?;
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
    *request.uri_mut() = target.parse().map_err(drop)?;
    sender.send_request(request).await.map_err(drop)
}

fn one_hop(headers: &mut HeaderMap) {
    HOP_BY_HOP.iter().for_each(|name| drop(headers.remove(name)));
}

fn relay(response: Response<Incoming>, api: Api) -> Response {
    let (mut parts, body) = response.into_parts();
    one_hop(&mut parts.headers);
    let kind = parts.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let streams =
        kind.is_some_and(|kind| kind.starts_with("text/event-stream") || kind.contains("ndjson"));
    match streams {
        true => Response::from_parts(parts, Body::new(Relayed { body, api, over: false })),
        false => Response::from_parts(parts, Body::new(body)),
    }
}

/// What a request is told while there is no engine.
fn away(supervisor: &Supervisor, path: &str) -> Response {
    let (what, wait) = match supervisor.engine() {
        Engine::Running => ("the engine's process is starting".to_owned(), FIRST_PAUSE),
        Engine::Away { how, again } => {
            let what = format!("the engine's process ended ({how}) and is being started again");
            (what, again.saturating_duration_since(Instant::now()))
        }
    };
    if ["/health", "/ready"].contains(&path) {
        let report = json!({"status": "restarting", "reason": what});
        return (StatusCode::SERVICE_UNAVAILABLE, axum::Json(report)).into_response();
    }
    ApiError::unavailable("engine_restarting", what, wait).into_response()
}

/// A streamed reply. If the engine's process crashes, it ends with an error that its client
/// understands.
struct Relayed {
    body: Incoming,
    api: Api,
    over: bool,
}

impl HttpBody for Relayed {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Task<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, hyper::Error>>> {
        if self.over {
            return Poll::Ready(None);
        }
        match Pin::new(&mut self.body).poll_frame(task) {
            Poll::Ready(Some(Err(_))) => {
                self.over = true;
                Poll::Ready(Some(Ok(http_body::Frame::data(broken_off(self.api).into()))))
            }
            polled => polled,
        }
    }
}

fn broken_off(api: Api) -> String {
    let what = "the engine's process ended in the middle of this reply; send the request again";
    let body = ApiError::server("engine_crashed", what).body(api);
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
