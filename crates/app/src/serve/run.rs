//! The command: from options to a server that runs, and to its end.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use regex::Regex;
use tokio::runtime::{Builder, Runtime};

use super::args::{AccessArgs, ServeArgs, TraceArgs};
use super::lifecycle::{Lifecycle, Load, Loading, Phase};
use super::listen::{self, Listener};
use super::model::{Facts, Served};
use super::router::router;
use super::security::Security;
use super::state::{App, Options, Server};
use crate::Failure;
use crate::config::Surroundings;
use crate::generate::{DiskCache, LoadRequest, Loader, ServeOptions, Serving};
use crate::session::open_text;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::otlp::OtlpOptions;
use crate::telemetry::privacy::Privacy;
use crate::telemetry::store::StoreOptions;
use crate::telemetry::{Recorder, RecorderOptions};
use crate::terminal::{error, note};
use crate::text::grammar::Grammars;
use crate::text::template;

/// Threads that move bytes; the engine has its own.
const WORKERS: usize = 2;
/// Stack of a thread that serves, beside what a template's render may take.
const OWN_STACK: usize = 2 << 20;
/// How often idleness is looked for, at most.
const IDLE_CHECK: Duration = Duration::from_secs(1);

/// Runs the command.
pub fn run(
    loader: &'static dyn Loader,
    request: &LoadRequest,
    args: &ServeArgs,
    surroundings: &Surroundings,
) -> Result<(), Failure> {
    let security = security(&args.access, surroundings).map_err(Failure::Usage)?;
    let traces = traces(&args.traces, &security, surroundings).map_err(Failure::Usage)?;
    let runtime = runtime().map_err(|error| Failure::Run(error.into()))?;
    runtime.block_on(async {
        // The port first: a model takes its time, and then it would be for nothing.
        let listener = listener(args).await.map_err(Failure::Run)?;
        dangers(&args.access, &security).iter().for_each(|danger| error(danger));
        let supervised = args.life.supervised_socket.is_some();
        if args.life.supervised && !supervised {
            return supervise(listener, traces, args).await;
        }
        let metrics = Arc::new(Metrics::new());
        let recorder = Recorder::start(traces, Arc::clone(&metrics));
        let lifecycle = Lifecycle::start(load(loader, request.clone(), lanes(args), metrics));
        let app = Server::new(options(args), security, lifecycle, recorder);
        tell(&app, listener.shown());
        if let Some(idle) = args.life.idle_release {
            tokio::spawn(release_when_idle(Arc::clone(&app.lifecycle), idle));
        }
        let lifecycle = Arc::clone(&app.lifecycle);
        let leave = async move {
            tokio::select! {
                () = told_to_leave(supervised) => {}
                () = first_load_failed(&lifecycle) => return,
            }
            note(&"leaving: requests may end, nothing more is taken");
            lifecycle.drain();
            tokio::spawn(hurry(supervised));
        };
        let drain = args.life.drain_timeout;
        let router = router(Arc::clone(&app));
        let cut = || app.lifecycle.cut();
        listen::serve(listener, router, args.limits.header_timeout, leave, drain, cut).await;
        match app.lifecycle.phase() {
            Phase::Failed(what) => Err(Failure::Load(anyhow::anyhow!(what))),
            _ => Ok(()),
        }
    })
}

#[cfg(unix)]
async fn supervise(
    listener: Listener,
    traces: RecorderOptions,
    args: &ServeArgs,
) -> Result<(), Failure> {
    note(&format!("listening on {}", listener.shown()));
    let leave = told_to_leave(false);
    let (head, drain) = (args.limits.header_timeout, args.life.drain_timeout);
    let recorder = Recorder::start(traces, Arc::new(Metrics::new()));
    super::supervise::run(listener, recorder, head, leave, drain).await.map_err(Failure::Run)
}

#[cfg(not(unix))]
async fn supervise(
    _listener: Listener,
    _traces: RecorderOptions,
    _args: &ServeArgs,
) -> Result<(), Failure> {
    let what = "--supervised needs UNIX sockets, which this system does not have";
    Err(Failure::Usage(anyhow::anyhow!(what)))
}

/// The threads that serve. Each has the stack that a template's render asks for, so that it need not be
/// made for every request; what a render never touches of it takes no memory.
///
/// # Errors
/// If the system gives no threads.
pub fn runtime() -> std::io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_name("http")
        .thread_stack_size(template::STACK + OWN_STACK)
        .enable_all()
        .build()
}

async fn listener(args: &ServeArgs) -> anyhow::Result<Listener> {
    let socket = args.life.supervised_socket.as_ref().or(args.access.unix_socket.as_ref());
    match socket {
        Some(path) => Listener::unix(path),
        None => Listener::tcp(SocketAddr::new(args.access.host, args.access.port)).await,
    }
}

fn lanes(args: &ServeArgs) -> ServeOptions {
    let args = &args.lanes;
    let bytes = |mib: u32| u64::from(mib) << 20;
    ServeOptions {
        lanes: args.lanes.map(usize::from),
        queue: args.queue.into(),
        cache_memory: args.cache_memory.map(bytes),
        max_memory: args.max_memory.map(bytes),
        disk: args
            .cache_dir
            .clone()
            .map(|folder| DiskCache { folder, bytes: bytes(args.cache_disk) }),
        exact_cache: args.exact_cache,
    }
}

fn options(args: &ServeArgs) -> Options {
    Options {
        model_names: args.access.served_model_name.clone(),
        max_body_bytes: args.limits.max_body,
        upload_timeout: args.limits.upload_timeout,
        keep_alive: args.limits.keep_alive,
        request_timeout: args.limits.request_timeout,
    }
}

fn security(access: &AccessArgs, surroundings: &Surroundings) -> anyhow::Result<Security> {
    let mut keys = access.api_key.clone();
    keys.extend(surroundings.api_key.as_ref().map(|key| key.0.clone()));
    if let Some(path) = &access.api_key_file {
        let shown = path.display();
        let text =
            std::fs::read_to_string(path).with_context(|| format!("--api-key-file {shown}"))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let before = keys.len();
        keys.extend(lines.map(str::to_owned));
        anyhow::ensure!(keys.len() > before, "--api-key-file {shown} has no keys");
    }
    for origin in &access.cors_origin {
        let fits = origin == "*" || origin.contains("://") && !origin.ends_with('/');
        anyhow::ensure!(
            fits,
            "--cors-origin {origin}: give an origin like https://chat.example.org"
        );
    }
    Ok(Security { keys, hosts: access.allowed_host.clone(), origins: access.cors_origin.clone() })
}

/// What is dangerous about who may ask.
fn dangers(access: &AccessArgs, security: &Security) -> Vec<String> {
    let mut dangers = Vec::new();
    let open = security.keys.is_empty();
    if access.unix_socket.is_none() && !is_local(access.host) && open {
        dangers.push(format!(
            "anyone who reaches {} may use this server: set an API key (--api-key-file, TH_API_KEY) \
             or listen on 127.0.0.1",
            access.host
        ));
    }
    if security.origins.iter().any(|origin| origin == "*") && open {
        dangers.push(
            "any page in a browser may use this server: set an API key or name origins".into(),
        );
    }
    dangers
}

fn is_local(host: IpAddr) -> bool {
    host.is_loopback()
}

fn traces(
    args: &TraceArgs,
    security: &Security,
    surroundings: &Surroundings,
) -> anyhow::Result<RecorderOptions> {
    let default = || surroundings.traces();
    let path: Option<PathBuf> =
        args.trace_file.clone().or_else(default).filter(|_| !args.no_traces);
    let redact = args
        .trace_redact
        .iter()
        .map(|pattern| Regex::new(pattern).with_context(|| format!("--trace-redact {pattern}")));
    let header = |header: &String| {
        let (name, value) = header.split_once('=').context("--otlp-header is NAME=VALUE")?;
        anyhow::Ok((name.to_owned(), value.to_owned()))
    };
    let headers = args.otlp_header.iter().map(header).collect::<Result<_, _>>()?;
    Ok(RecorderOptions {
        store: path.map(|path| StoreOptions {
            path,
            keep: Duration::from_secs(u64::from(args.trace_days) * 24 * 3600),
            max_bytes: u64::from(args.trace_max_mib) << 20,
        }),
        privacy: Privacy {
            body_bytes: args.trace_bodies,
            secrets: security.keys.clone(),
            redact: redact.collect::<Result<_, _>>()?,
        },
        otlp: args.otlp_endpoint.clone().map(|endpoint| OtlpOptions {
            endpoint,
            headers,
            service_name: "th-engine".into(),
        }),
    })
}

/// How the model is loaded, now and after it was released.
fn load(
    loader: &'static dyn Loader,
    request: LoadRequest,
    lanes: ServeOptions,
    metrics: Arc<Metrics>,
) -> Load {
    Arc::new(move |report| {
        let serving = loader.serve(&request, &lanes, &mut |progress| {
            report(Loading {
                phase: progress.phase.to_owned(),
                done_bytes: progress.done_bytes,
                total_bytes: progress.total_bytes,
            });
        })?;
        let Serving { service, text, model, draft, defaults, stop_tokens } = serving;
        metrics.watch_service(&service);
        let text = open_text(&text)?.map(Arc::new);
        let grammars = match &text {
            Some(text) => Some(Arc::new(Grammars::new(text.shared_tok(), &stop_tokens)?)),
            None => None,
        };
        let facts = Facts {
            info: service.info(),
            text,
            grammars,
            name: model,
            draft,
            defaults,
            stop_tokens,
            loaded: SystemTime::now(),
        };
        Ok(Served { service, facts: Arc::new(facts) })
    })
}

/// Tells where the server is, and when the model is ready or why it isn't.
fn tell(app: &App, place: String) {
    note(&format!("listening on {place}; loading the model"));
    let lifecycle = Arc::clone(&app.lifecycle);
    tokio::spawn(async move {
        match lifecycle.settled().await {
            Phase::Ready(served) => {
                let draft = served.draft.as_deref().unwrap_or("none");
                note(&format!(
                    "{} on {}, draft {draft}, {} tokens of context, {} lanes",
                    served.name, served.info.device, served.info.context, served.info.lanes
                ));
                if let Some(why) = served.service.disk_error() {
                    error(&format!("the prefix cache is in memory only: {why}"));
                }
            }
            // The command fails with the reason.
            Phase::Failed(_) | Phase::Loading(_) | Phase::Released => {}
        }
    });
}

async fn release_when_idle(lifecycle: Arc<Lifecycle>, idle: Duration) {
    loop {
        tokio::time::sleep(IDLE_CHECK.min(idle)).await;
        if lifecycle.release_if_idle(idle) {
            note(&"idle: the model's memory was given back");
        }
    }
}

/// A server whose model can't be loaded has nothing to serve.
async fn first_load_failed(lifecycle: &Lifecycle) {
    // Not in a `match`: that would hold the model for as long as the server runs.
    let failed = matches!(lifecycle.settled().await, Phase::Failed(_));
    if !failed {
        std::future::pending::<()>().await;
    }
}

/// Whoever says it twice does not want to wait.
async fn hurry(supervised: bool) {
    if !supervised && tokio::signal::ctrl_c().await.is_ok() {
        std::process::exit(i32::from(crate::interrupt::EXIT_STATUS));
    }
}

/// Ctrl-C, what the system sends to end a service, or the end of a supervisor.
async fn told_to_leave(supervised: bool) {
    let interrupted = async {
        // At a terminal Ctrl-C reaches both processes: the supervisor's end is what counts.
        while tokio::signal::ctrl_c().await.is_ok() {
            if !supervised {
                return;
            }
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = interrupted => {}
        () = terminated() => {}
        () = input_ended(), if supervised => {}
    }
}

#[cfg(unix)]
async fn terminated() {
    use tokio::signal::unix::{SignalKind, signal};
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => drop(terminate.recv().await),
        Err(_) => std::future::pending().await,
    }
}

#[cfg(not(unix))]
async fn terminated() {
    std::future::pending().await
}

/// A supervisor writes nothing; its end ends the input.
async fn input_ended() {
    let (ended, told) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let read = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        let _ = ended.send(read);
    });
    let _ = told.await;
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        access: AccessArgs,
    }

    fn told(args: &[&str], keys: &[&str]) -> (bool, Vec<String>) {
        let line = Line::try_parse_from(["serve"].iter().chain(args)).unwrap();
        let keys = keys.iter().map(|&key| key.to_owned()).collect();
        let origins = line.access.cors_origin.clone();
        let security = Security { keys, origins, ..Security::default() };
        (is_local(line.access.host), dangers(&line.access, &security))
    }

    /// SE-03: this machine alone unless told otherwise, and what that means is said.
    #[test]
    fn a_server_for_everyone_is_warned_of() {
        assert_eq!(told(&[], &[]), (true, vec![]));
        let (local, dangers) = told(&["--host", "0.0.0.0"], &[]);
        assert!(!local && dangers[0].contains("anyone who reaches 0.0.0.0"), "{dangers:?}");
        assert_eq!(told(&["--host", "0.0.0.0"], &["k"]), (false, vec![]));
        assert!(told(&["--cors-origin", "*"], &[]).1[0].contains("any page in a browser"));
    }

    /// Whether this thread renders a template on the stack that it has.
    fn renders_here() -> bool {
        stacker::remaining_stack().is_some_and(|bytes| bytes >= template::STACK)
    }

    #[test]
    fn threads_that_serve_have_the_stack_of_a_render() {
        let runtime = runtime().unwrap();
        let worker = runtime.spawn(async { renders_here() });
        let aside = runtime.spawn_blocking(renders_here);
        assert!(runtime.block_on(worker).unwrap() && runtime.block_on(aside).unwrap());
        assert!(!renders_here());
    }
}
