//! `th-engine serve` as its users run it: the real binary with the bundled model.
#![cfg(unix)]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longer than anything here takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_th-engine"));
    command.args(args).env_remove("TH_API_KEY").stdin(Stdio::null());
    command
}

/// A server that runs, and what it says.
struct Server {
    child: Child,
    said: Receiver<String>,
    url: String,
}

impl Server {
    fn start(args: &[&str]) -> Server {
        let mut all =
            vec!["serve", "--port", "0", "--no-traces", "--context", "2048", "--lanes", "2"];
        all.extend(args);
        Server::run(&mut command(&all))
    }

    fn run(command: &mut Command) -> Server {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let (lines, said) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let _ = lines.send(line);
            }
        });
        let mut server = Server { child, said, url: String::new() };
        let line = server.hears("listening on ");
        let place = line.split("listening on ").nth(1).unwrap();
        server.url = place.split([';', ' ']).next().unwrap().to_owned();
        server
    }

    /// Waits for a line with these words.
    fn hears(&self, words: &str) -> String {
        loop {
            let line = self.said.recv_timeout(PATIENCE).unwrap_or_else(|e| panic!("{words}: {e}"));
            if line.contains(words) {
                return line;
            }
        }
    }

    fn get(&self, path: &str) -> (u16, Value) {
        let agent = agent();
        let mut reply = agent.get(format!("{}{path}", self.url)).call().unwrap();
        let status = reply.status().as_u16();
        (status, reply.body_mut().read_json().unwrap())
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let mut reply = agent().post(format!("{}{path}", self.url)).send_json(body).unwrap();
        let status = reply.status().as_u16();
        (status, reply.body_mut().read_json().unwrap())
    }

    fn stream(&self, path: &str, body: &Value) -> impl Read + use<> {
        let reply = agent().post(format!("{}{path}", self.url)).send_json(body).unwrap();
        reply.into_body().into_reader()
    }

    fn ready(&self) {
        let begun = Instant::now();
        while self.get("/ready").0 != 200 {
            assert!(begun.elapsed() < PATIENCE, "it never got ready");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn signal(&self, signal: i32) {
        kill(self.child.id(), signal);
    }

    fn exit_status(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn agent() -> ureq::Agent {
    let config = ureq::Agent::config_builder().http_status_as_error(false);
    ureq::Agent::new_with_config(config.timeout_global(Some(PATIENCE)).build())
}

fn kill(process: u32, signal: i32) {
    // SAFETY: kill has no memory to get wrong; the process is one that this test started.
    assert_eq!(unsafe { libc::kill(process as i32, signal) }, 0);
}

fn chat(fields: &Value) -> Value {
    let mut body =
        json!({"messages": [{"role": "user", "content": "What is the capital of France?"}]});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[test]
fn answers_are_those_of_run() {
    let server = Server::start(&[]);
    server.ready();
    let greedy = json!({"temperature": 0, "max_tokens": 24});
    let (status, reply) = server.post("/v1/chat/completions", &chat(&greedy));
    assert_eq!(status, 200, "{reply}");
    let text = reply["choices"][0]["message"]["content"].as_str().unwrap();
    let run = command(&[
        "run",
        "--prompt",
        "What is the capital of France?",
        "--temperature",
        "0",
        "--max-tokens",
        "24",
        "--json",
    ]);
    let run: Value = serde_json::from_slice(&{ run }.output().unwrap().stdout).unwrap();
    assert_eq!(text, run["text"]);
    // The same again is cached, streams, and speaks the other APIs.
    let (_, again) = server.post("/v1/chat/completions", &chat(&greedy));
    assert_eq!(again["choices"], reply["choices"]);
    let cached = again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached > 0, "{}", again["usage"]);
    let mut streamed = String::new();
    let body = chat(&json!({"temperature": 0, "max_tokens": 24, "stream": true}));
    server.stream("/v1/chat/completions", &body).read_to_string(&mut streamed).unwrap();
    let events = streamed.lines().filter_map(|line| line.strip_prefix("data: {"));
    let joined: String = events
        .map(|event| serde_json::from_str::<Value>(&format!("{{{event}")).unwrap())
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(joined, text);
    let (_, message) = server.post("/v1/messages", &chat(&greedy));
    assert_eq!(message["content"][0]["text"], text);
    let usage = &message["usage"];
    let sum = usage["input_tokens"].as_u64().unwrap()
        + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(reply["usage"]["prompt_tokens"], sum);
    let ollama = json!({"stream": false, "options": {"temperature": 0, "num_predict": 24}});
    let (_, answer) = server.post("/api/chat", &chat(&ollama));
    assert_eq!(answer["message"]["content"], text);
    // Seeds: 1, 2, 1.
    let seeded = |seed: u64| {
        let story = json!([{"role": "user", "content": "Tell me a story."}]);
        let fields = json!({"messages": story, "temperature": 1.2, "seed": seed, "max_tokens": 24});
        server.post("/v1/chat/completions", &chat(&fields)).1["choices"][0]["message"]["content"]
            .clone()
    };
    let (one, two, again) = (seeded(1), seeded(2), seeded(1));
    assert_eq!(one, again);
    assert_ne!(one, two);
    // JSON that a schema asks for, whatever the model would like to say.
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}});
    let (status, reply) = server.post(
        "/v1/chat/completions",
        &chat(&json!({"response_format": format, "max_tokens": 200, "seed": 3})),
    );
    assert_eq!(status, 200, "{reply}");
    let text = reply["choices"][0]["message"]["content"].as_str().unwrap();
    if reply["choices"][0]["finish_reason"] == "stop" {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(value["n"].is_i64() || value["n"].is_u64() || value["n"].is_number(), "{value}");
    }
    // Log-probabilities add up whatever the drafter does.
    let fields = json!({"temperature": 0, "max_tokens": 5, "logprobs": true, "top_logprobs": 3});
    let (_, reply) = server.post("/v1/chat/completions", &chat(&fields));
    let tokens = reply["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 5);
    for token in tokens {
        assert_eq!(token["logprob"], token["top_logprobs"][0]["logprob"], "{token}");
        assert!(token["logprob"].as_f64().unwrap() < 0.0);
    }
    let (_, status) = server.get("/status");
    assert_eq!(status["model"]["name"], "th-tiny");
    assert_eq!(status["requests"]["failed"], 0);
}

#[test]
fn a_taken_port_is_told_before_anything_is_loaded() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = command(&["serve", "--no-traces", "--port", &port]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains(&format!("port {port} is in use")) && said.contains("--port"), "{said}");
}

/// A folder that goes with its owner.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("th-engine-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_crashed_engine_is_started_again() {
    let scratch = Scratch::new("crash");
    let traces = scratch.0.join("traces.db");
    let mut server = Server::run(&mut command(&[
        "serve",
        "--port",
        "0",
        "--context",
        "2048",
        "--lanes",
        "2",
        "--supervised",
        "--trace-file",
        traces.to_str().unwrap(),
    ]));
    server.ready();
    let process = server.get("/status").1["pid"].as_u64().unwrap();
    assert_ne!(process, u64::from(server.child.id()));
    for (path, error) in
        [("/v1/completions", "data: {\"error\""), ("/v1/messages", "event: error\n")]
    {
        server.ready();
        let body = chat(
            &json!({"prompt": "Count: 1 2 3", "stream": true, "logit_bias": {"2": -100, "0": -100}, "max_tokens": 1900}),
        );
        // One that waits for a whole reply, and will for long.
        let whole = {
            let (url, mut body) = (format!("{}/v1/completions", server.url), body.clone());
            body["stream"] = false.into();
            std::thread::spawn(move || {
                let mut reply = agent().post(url).send_json(body).unwrap();
                (reply.status().as_u16(), reply.body_mut().read_to_string().unwrap())
            })
        };
        while server.get("/status").1["lanes"]["running"] != 1 {
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut stream = BufReader::new(server.stream(path, &body));
        let mut seen = String::new();
        while seen.matches("data: ").count() < 4 {
            assert_ne!(stream.read_line(&mut seen).unwrap(), 0, "{seen}");
        }
        let process = server.get("/status").1["pid"].as_u64().unwrap();
        kill(process as u32, libc::SIGKILL);
        stream.read_to_string(&mut seen).unwrap();
        assert!(seen.contains(error) && seen.contains("engine_crashed"), "{seen}");
        assert!(!seen.contains("[DONE]") && !seen.contains("message_stop"), "{seen}");
        let (status, said) = whole.join().unwrap();
        assert_eq!(status, 503, "{said}");
        assert!(said.contains("engine_crashed"), "{said}");
        server.hears("it is started again");
    }
    server.ready();
    // What the engine had in hand when it died is on record, under the trace that its reply named.
    let begun = Instant::now();
    let lost = loop {
        let traces = server.get("/traces?outcome=server_error").1["traces"].clone();
        if traces.as_array().unwrap().len() == 4 || begun.elapsed() > PATIENCE {
            break traces;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let lost = lost.as_array().unwrap();
    assert_eq!(lost.len(), 4, "{lost:?}");
    for trace in lost {
        assert_eq!(trace["error"]["code"], "engine_crashed", "{trace}");
        let endpoint = trace["endpoint"].as_str().unwrap();
        assert!(["/v1/completions", "/v1/messages"].contains(&endpoint), "{trace}");
        assert_eq!(trace["status"], if trace["stream"] == true { 200 } else { 503 }, "{trace}");
    }
    assert_eq!(server.post("/v1/chat/completions", &chat(&json!({"max_tokens": 2}))).0, 200);
    let engine = server.get("/status").1["pid"].as_u64().unwrap();
    server.signal(libc::SIGTERM);
    assert_eq!(server.exit_status(), Some(0));
    // SAFETY: signal 0 only asks whether the process is there.
    assert_eq!(unsafe { libc::kill(engine as i32, 0) }, -1, "the engine's process is left behind");
}

#[test]
fn a_server_that_is_told_to_leave_ends_its_requests() {
    let mut server = Server::start(&[]);
    server.ready();
    let body = json!({"prompt": "Count: 1 2 3", "stream": true, "max_tokens": 60, "logit_bias": {"2": -100, "0": -100}});
    let mut stream = BufReader::new(server.stream("/v1/completions", &body));
    let mut seen = String::new();
    stream.read_line(&mut seen).unwrap();
    server.signal(libc::SIGTERM);
    server.hears("leaving");
    stream.read_to_string(&mut seen).unwrap();
    assert!(seen.ends_with("data: [DONE]\n\n"), "{seen}");
    assert_eq!(server.exit_status(), Some(0));
}

#[test]
fn those_who_take_too_long_to_end_are_told() {
    for (more, signal) in [
        (&[][..], libc::SIGTERM),
        (&[][..], libc::SIGINT),
        (&["--supervised"], libc::SIGTERM),
        (&["--supervised"], libc::SIGINT),
    ] {
        let mut server = Server::start(&[&["--drain-timeout", "0.2"], more].concat());
        server.ready();
        let body = json!({"prompt": "Count: 1 2 3", "stream": true, "max_tokens": 1900, "logit_bias": {"2": -100, "0": -100}});
        let mut stream = BufReader::new(server.stream("/v1/completions", &body));
        let mut seen = String::new();
        stream.read_line(&mut seen).unwrap();
        server.signal(signal);
        server.hears("leaving");
        stream.read_to_string(&mut seen).unwrap();
        assert!(seen.contains("data: {\"error\"") && seen.contains("server_stopped"), "{seen}");
        assert!(!seen.contains("[DONE]"), "{seen}");
        assert_eq!(server.exit_status(), Some(0));
    }
}

#[test]
fn an_idle_model_is_loaded_again() {
    let cache = std::env::temp_dir().join(format!("th-engine-test-{}-idle", std::process::id()));
    let server = Server::start(&["--idle-release", "1", "--cache-dir", cache.to_str().unwrap()]);
    server.hears("tokens of context");
    server.hears("memory was given back");
    assert_eq!(server.get("/health").1["status"], "released");
    assert_eq!(server.post("/v1/chat/completions", &chat(&json!({"max_tokens": 2}))).0, 200);
    // The engine that was released held the folder; it is waited for.
    let status = server.get("/status").1;
    assert_eq!(status["cache"]["disk_error"], Value::Null, "{status}");
    assert!(status["cache"]["disk_bytes"].is_u64(), "{status}");
    drop(server);
    std::fs::remove_dir_all(&cache).unwrap();
}

#[test]
fn a_unix_socket_is_for_its_owner() {
    use std::os::unix::fs::PermissionsExt;
    let path = std::env::temp_dir().join(format!("th-engine-test-{}.sock", std::process::id()));
    let socket = path.to_str().unwrap();
    drop(std::os::unix::net::UnixListener::bind(&path));
    let mut server = Server::start(&["--unix-socket", socket]);
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
    stream.write_all(b"GET /api/version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("HTTP/1.1 403"), "{reply}");
    server.signal(libc::SIGTERM);
    assert_eq!(server.exit_status(), Some(0));
    assert!(!path.exists());
}

#[test]
fn a_file_says_the_same_as_the_command_line() {
    let path: PathBuf =
        std::env::temp_dir().join(format!("th-engine-test-{}.toml", std::process::id()));
    let file = path.to_str().unwrap();
    let print = |args: &[&str]| {
        let mut all = vec!["serve", "--config", file, "--print-config"];
        all.extend(args);
        command(&all).output().unwrap()
    };
    std::fs::write(&path, "port = 9999\nlanes = 3\napi-key = [\"hunter2\"]\ncors-origin = [\"https://a.b\"]\nno-traces = true\ndraft = \"none\"\nidle-release = 2.5\n").unwrap();
    let output = print(&["--lanes", "5", "--context", "512", "th-tiny"]);
    let text = String::from_utf8(output.stdout).unwrap();
    let table: toml::Table = text.parse().unwrap();
    assert_eq!((table["port"].as_integer(), table["lanes"].as_integer()), (Some(9999), Some(5)));
    assert_eq!((table["context"].as_integer(), table["draft"].as_str()), (Some(512), Some("none")));
    assert_eq!(
        (table["model"].as_str(), table["no-traces"].as_bool()),
        (Some("th-tiny"), Some(true))
    );
    assert_eq!(table["idle-release"].as_float(), Some(2.5));
    assert!(!text.contains("hunter2"), "{text}");
    // What it prints is a file that says the same.
    std::fs::write(&path, &text).unwrap();
    assert_eq!(String::from_utf8(print(&[]).stdout).unwrap(), text);
    for (wrong, words) in [
        ("prot = 1", "prot"),
        ("port = \"x\"", "--port"),
        ("lanes = [1]", "lanes has a value of the wrong kind"),
        ("no-traces = 1", "no-traces has a value of the wrong kind"),
        ("port = ", "TOML"),
        ("config = \"x\"", "config"),
    ] {
        std::fs::write(&path, wrong).unwrap();
        let output = print(&[]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{wrong}: {said}");
        assert!(said.contains(words), "{wrong}: {said}");
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn agents_are_told_what_the_server_has() {
    let server = Server::start(&["--api-key", "k", "--served-model-name", "org/tiny"]);
    let begun = Instant::now();
    let output = loop {
        let output =
            command(&["launch", "claude", "--print", "--url", &server.url, "--api-key", "k"])
                .output()
                .unwrap();
        if output.status.success() || begun.elapsed() > PATIENCE {
            break output;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let text = String::from_utf8(output.stdout).unwrap();
    for line in [
        "ANTHROPIC_MODEL=org/tiny",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW=2048",
        "ANTHROPIC_AUTH_TOKEN=k",
    ] {
        assert!(text.contains(line), "{text}");
    }
    assert!(text.contains(&format!("ANTHROPIC_BASE_URL={}", server.url)), "{text}");
    let refused = command(&["launch", "codex", "--print", "--url", &server.url]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
}
