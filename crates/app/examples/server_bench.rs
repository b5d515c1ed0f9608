//! What the server itself costs, and whether what it reports is what its clients see.
//!
//! `cargo run --release -p app --example server_bench` puts an engine that answers at once behind the whole
//! server (sockets, router, template, tokenizer, traces on disk) and asks it over TCP from the same
//! machine: requests a second, the time a request takes at 100 a second, the memory of idle streams.
//!
//! `… --example server_bench -- rates URL` asks a server that runs for 100 answers of mixed length, one
//! after the other, and compares its own account of the time with the client's clock.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use app::generate::TextSource;
use app::serve::lifecycle::Lifecycle;
use app::serve::listen::{self, Listener};
use app::serve::model::{Facts, Served};
use app::serve::router::router;
use app::serve::run;
use app::serve::security::Security;
use app::serve::state::{Options, Server};
use app::session::open_text;
use app::telemetry::metrics::Metrics;
use app::telemetry::store::StoreOptions;
use app::telemetry::{Recorder, RecorderOptions};
use app::text::grammar::Grammars;
use app::text::guard::Guarded;
use engine::service::{
    CacheSource, CacheUse, Done, Event, EventSink, Finish, Health, Refusal, Request, RequestId,
    Service, ServiceInfo, ServiceStats, Token,
};
use engine::{MemoryBytes, SamplingDefaults};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// What answers say, in rounds of eight.
const ANSWER: &str = "The Rhine, the Danube and the Elbe are three rivers of Europe; ask for more.";
/// Connections that ask without a pause.
const BUSY: usize = 32;
const BUSY_TIME: Duration = Duration::from_secs(10);
/// Requests at fixed times.
const PACE: Duration = Duration::from_millis(10);
const PACED: usize = 3000;
const IDLE: usize = 500;
/// Answers whose account is compared with the clock.
const TIMED: usize = 100;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        [] => scripted(),
        ["rates", url] => rates(url.trim_start_matches("http://").trim_end_matches('/')),
        _ => anyhow::bail!("usage: server_bench [rates http://HOST:PORT]"),
    }
}

// ---- A server whose engine costs nothing

/// Answers at once, or never if the answer may have one token only.
struct AtOnce {
    answer: Vec<u32>,
    info: ServiceInfo,
    thread: Mutex<Sender<(Request, EventSink)>>,
}

impl AtOnce {
    fn start(answer: Vec<u32>, vocab: usize) -> AtOnce {
        let (sender, requests) = channel::<(Request, EventSink)>();
        let text = answer.clone();
        std::thread::spawn(move || {
            let mut silent = Vec::new();
            for (request, mut events) in requests {
                if request.max_tokens == 1 {
                    events(started());
                    silent.push(events);
                } else {
                    perform(&request, &text, &mut events);
                }
            }
        });
        let info = ServiceInfo {
            context: 4096,
            lanes: 2 * IDLE,
            vocab,
            block: 8,
            queue: IDLE,
            device: "none".into(),
            memory: MemoryBytes::default(),
            round_bytes: 0,
            read_bandwidth: 0.0,
        };
        AtOnce { answer, info, thread: Mutex::new(sender) }
    }
}

fn cache() -> CacheUse {
    CacheUse { tokens: 0, source: CacheSource::None, miss: "nothing is kept" }
}

fn started() -> Event {
    Event::Started { queued: Duration::ZERO, cache: cache() }
}

fn perform(request: &Request, text: &[u32], events: &mut EventSink) {
    let token = |&id: &u32| Token { id, logprob: None, alternatives: Vec::new() };
    events(started());
    for round in text.chunks(8) {
        events(Event::Tokens { tokens: round.iter().map(token).collect(), proposed: 7 });
    }
    let rounds = text.len().div_ceil(8);
    events(Event::Done(Done {
        finish: Finish::Stop,
        prompt_tokens: request.prompt.len(),
        cached_tokens: 0,
        output_tokens: text.len(),
        rounds,
        proposed: 7 * rounds,
        accepted: text.len() - rounds,
        queued: Duration::ZERO,
        prefill: Duration::ZERO,
        decode: Duration::from_micros(1),
        cache: cache(),
    }));
}

impl Service for AtOnce {
    fn submit(&self, request: Request, events: EventSink) -> Result<RequestId, Refusal> {
        let thread = self.thread.lock().map_err(|_| gone())?;
        thread.send((request, events)).map_err(|_| gone())?;
        Ok(RequestId(self.answer.len() as u64))
    }

    fn cancel(&self, _: RequestId) {}

    fn finish(&self, _: RequestId, _: usize) {}

    fn info(&self) -> ServiceInfo {
        self.info.clone()
    }

    fn stats(&self) -> ServiceStats {
        ServiceStats::default()
    }

    fn health(&self) -> Health {
        Health::Serving
    }
}

fn gone() -> Refusal {
    Refusal::Unavailable("the script's thread has ended".to_owned())
}

/// The bundled model's text side around an engine that answers at once.
fn served() -> anyhow::Result<Served> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/th-tiny");
    let text = open_text(&TextSource::Folder(folder))?.context("th-tiny has a tokenizer")?;
    let text = Arc::new(text);
    let answer = text.tok().encode(&Guarded::trusted(ANSWER))?;
    let service = Arc::new(AtOnce::start(answer, 49_152));
    let stop_tokens = vec![2];
    let facts = Facts {
        info: service.info(),
        grammars: Some(Arc::new(Grammars::new(text.shared_tok(), &stop_tokens)?)),
        text: Some(text),
        name: "scripted".into(),
        draft: None,
        defaults: SamplingDefaults::default(),
        stop_tokens,
        loaded: SystemTime::now(),
    };
    Ok(Served { service, facts: Arc::new(facts) })
}

fn scripted() -> anyhow::Result<()> {
    let traces = std::env::temp_dir().join(format!("server-bench-{}.db", std::process::id()));
    let (sender, address) = channel();
    let path = traces.clone();
    std::thread::spawn(move || -> anyhow::Result<()> {
        run::runtime()?.block_on(async {
            let listener = Listener::tcp(([127, 0, 0, 1], 0).into()).await?;
            sender.send(listener.shown())?;
            let store = Some(StoreOptions::at(path));
            let options = RecorderOptions { store, ..RecorderOptions::default() };
            let recorder = Recorder::start(options, Arc::new(Metrics::new()));
            let lifecycle = Lifecycle::ready(served()?);
            let app = Server::new(Options::default(), Security::default(), lifecycle, recorder);
            let (head, drain) = (Duration::from_secs(10), Duration::ZERO);
            listen::serve(listener, router(app), head, std::future::pending(), drain, || ()).await;
            Ok(())
        })
    });
    let address: SocketAddr = address.recv()?.trim_start_matches("http://").parse()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        for (streams, name) in [(false, "whole"), (true, "streamed")] {
            let before = processor_time();
            let count = busy(address, streams).await?;
            let each = (processor_time() - before) / count * 1e6;
            let rate = count / BUSY_TIME.as_secs_f64();
            // Processor time hardly depends on what else the machine does.
            println!(
                "{name} replies, {BUSY} connections without a pause: {rate:.0} requests/s, {each:.0} us of \
                 processor time each, this client's included"
            );
        }
        // What sockets, threads and this client take is seen at a route that does nothing.
        let (whole, streamed) = (chat(false, 64), chat(true, 64));
        let asked = [("nothing", None), ("whole", Some(&whole)), ("streamed", Some(&streamed))];
        for (name, body) in asked {
            let mut times = paced(address, body).await?;
            times.sort_unstable();
            let at =
                |share: f64| times[(share * (times.len() - 1) as f64) as usize].as_secs_f64() * 1e3;
            let (p50, p99, most) = (at(0.5), at(0.99), at(1.0));
            println!(
                "{name} at 100 a second: p50 {p50:.2} ms, p99 {p99:.2} ms, longest {most:.2} ms"
            );
        }
        idle(address).await
    })?;
    let _ = std::fs::remove_file(traces);
    Ok(())
}

async fn busy(address: SocketAddr, streams: bool) -> anyhow::Result<f64> {
    let until = Instant::now() + BUSY_TIME;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..BUSY {
        tasks.spawn(async move {
            let mut client = Client::to(address).await?;
            let mut count = 0;
            while Instant::now() < until {
                client.ask("/v1/chat/completions", &chat(streams, 64)).await?;
                count += 1;
            }
            anyhow::Ok(count)
        });
    }
    let mut count = 0;
    while let Some(done) = tasks.join_next().await {
        count += done??;
    }
    Ok(f64::from(count))
}

/// Times from when a request was due to the end of its reply; of `/ready` if there is no body.
async fn paced(address: SocketAddr, body: Option<&Value>) -> anyhow::Result<Vec<Duration>> {
    let mut client = Client::to(address).await?;
    let begun = Instant::now();
    let mut times = Vec::with_capacity(PACED);
    for i in 0..PACED as u32 {
        let due = begun + i * PACE;
        // The timer may be a millisecond late, which is not the server's.
        while let Some(left) = due.checked_duration_since(Instant::now()) {
            match left.checked_sub(Duration::from_millis(2)) {
                Some(long) => tokio::time::sleep(long).await,
                None => std::hint::spin_loop(),
            }
        }
        match body {
            Some(body) => drop(client.ask("/v1/chat/completions", body).await?),
            None => drop(client.get("/ready").await?),
        }
        times.push(due.elapsed());
    }
    Ok(times)
}

async fn idle(address: SocketAddr) -> anyhow::Result<()> {
    let before = resident();
    let mut streams = Vec::with_capacity(IDLE);
    for _ in 0..IDLE {
        let mut client = Client::to(address).await?;
        client.send("/v1/chat/completions", &chat(true, 1)).await?;
        client.head().await?;
        streams.push(client);
    }
    tokio::time::sleep(Duration::from_secs(6)).await; // past a sign of life of each
    let after = resident();
    println!(
        "{IDLE} idle streams: {:.1} MB more, both ends of the connections included",
        after.saturating_sub(before) as f64 / 1e6
    );
    Ok(())
}

/// Bytes of this process in memory; 0 where the system doesn't say.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) << 10
}

/// Seconds that processors have worked for this process; NaN where the system doesn't say.
fn processor_time() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Behind the program's name, which may hold anything: user's and system's time in hundredths.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11);
    let ticks: Vec<f64> = fields.take(2).filter_map(|field| field.parse().ok()).collect();
    if ticks.len() == 2 { ticks.iter().sum::<f64>() / 100.0 } else { f64::NAN }
}

fn chat(streams: bool, max_tokens: usize) -> Value {
    json!({
        "messages": [
            {"role": "system", "content": "You answer in one sentence."},
            {"role": "user", "content": "Name three rivers of Europe."},
        ],
        "max_tokens": max_tokens,
        "stream": streams,
    })
}

// ---- A server that runs

fn rates(address: &str) -> anyhow::Result<()> {
    let address: SocketAddr = address.parse().with_context(|| format!("{address}: HOST:PORT"))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut tokens, mut reported, mut seen, mut worst) = (0, 0.0, 0.0, 0.0_f64);
    runtime.block_on(async {
        let mut client = Client::to(address).await?;
        for i in 0..TIMED as u64 {
            let body = json!({
                "messages": [{"role": "user", "content": format!("Count on from {}.", 17 * i)}],
                // From 8 to 263 tokens, in no order.
                "max_tokens": 8 + (97 * i) % 256,
                "stream": true,
                "stream_options": {"include_usage": true},
                "seed": i,
            });
            let begun = Instant::now();
            let reply = client.ask("/v1/chat/completions", &body).await?;
            let wall = begun.elapsed().as_secs_f64() * 1e3;
            let mut data = reply.lines().filter_map(|line| line.strip_prefix("data: {"));
            let last = data.rfind(|data| data.contains("\"timings\""));
            let last = last.context("no timings in the stream")?;
            let last: Value = serde_json::from_str(&format!("{{{last}"))?;
            let of = |name: &str| last["timings"][name].as_f64().context(name.to_owned());
            let before = of("queue_ms")? + of("prompt_ms")?;
            let (own, clients) = (of("predicted_ms")?, wall - before);
            worst = worst.max((own / clients - 1.0).abs());
            tokens += of("predicted_n")? as u64;
            reported += own;
            seen += clients;
        }
        anyhow::Ok(())
    })?;
    let rate = |ms: f64| tokens as f64 / ms * 1e3;
    println!(
        "{TIMED} answers, {tokens} tokens: the server reports {:.1} tokens/s, its client's clock says {:.1}: \
         {:+.2} % (one answer: at most {:.1} %)",
        rate(reported),
        rate(seen),
        (rate(reported) / rate(seen) - 1.0) * 100.0,
        worst * 100.0
    );
    Ok(())
}

// ---- HTTP, as little as it takes

struct Client(BufReader<TcpStream>);

impl Client {
    async fn to(address: SocketAddr) -> anyhow::Result<Client> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Client(BufReader::with_capacity(2 << 10, stream)))
    }

    async fn send(&mut self, path: &str, body: &Value) -> anyhow::Result<()> {
        let body = body.to_string();
        let length = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n\r\n{body}"
        );
        Ok(self.0.get_mut().write_all(request.as_bytes()).await?)
    }

    /// Reads a reply's head: the length of its body, or `None` if it comes in chunks.
    async fn head(&mut self) -> anyhow::Result<Option<usize>> {
        let (mut line, mut length, mut first) = (String::new(), None, true);
        loop {
            line.clear();
            anyhow::ensure!(self.0.read_line(&mut line).await? > 0, "the connection was closed");
            let text = line.trim_end().to_ascii_lowercase();
            anyhow::ensure!(!first || text.starts_with("http/1.1 200"), "{text}");
            first = false;
            match text.split_once(": ") {
                _ if text.is_empty() => return Ok(length),
                Some(("content-length", value)) => length = Some(value.parse()?),
                _ => {}
            }
        }
    }

    async fn get(&mut self, path: &str) -> anyhow::Result<String> {
        let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        self.0.get_mut().write_all(request.as_bytes()).await?;
        self.reply().await
    }

    async fn ask(&mut self, path: &str, body: &Value) -> anyhow::Result<String> {
        self.send(path, body).await?;
        self.reply().await
    }

    async fn reply(&mut self) -> anyhow::Result<String> {
        let mut reply = Vec::new();
        match self.head().await? {
            Some(length) => {
                reply.resize(length, 0);
                self.0.read_exact(&mut reply).await?;
            }
            None => loop {
                let mut size = String::new();
                self.0.read_line(&mut size).await?;
                let size = usize::from_str_radix(size.trim_end(), 16)?;
                let start = reply.len();
                reply.resize(start + size + 2, 0);
                self.0.read_exact(&mut reply[start..]).await?;
                reply.truncate(start + size);
                if size == 0 {
                    break;
                }
            },
        }
        Ok(String::from_utf8(reply)?)
    }
}
