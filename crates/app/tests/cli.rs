//! The program as its users see it: exit status, standard output, standard error.
//!
//! The real binary is driven where no model has to run. Where one has, this test binary starts
//! itself again as the program with a scripted engine behind it ([`child`]).

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use app::generate::{
    Event, Finish, GenerateError, GenerateOptions, Generator, LoadRequest, Loaded, Loader, Prefill,
    Progress, Round, Section, ServeOptions, Serving, TextSource,
};
use app::text::tokenizer::{Tok, Tokenizer};
use serde_json::{Value, json};

/// Set for [`child`]: the script, as JSON.
const SCRIPT: &str = "TH_TEST_SCRIPT";
/// Separates what the test harness prints from what the program prints.
const MARK: &str = "\u{1}program\n";

/// The text side of a model that loads at once: one token for each byte, and the control tokens
/// 256 and 257. Its chat template is that of the bundled model.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("byte-model");
    std::fs::create_dir_all(&folder).unwrap();
    let printable = |b: &u32| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut chars: Vec<u32> = (0..256).filter(printable).collect();
    chars.extend(0x100..0x200 - chars.len() as u32);
    let words = chars.iter().map(|&c| char::from_u32(c).unwrap().to_string());
    let vocab: serde_json::Map<String, Value> =
        words.enumerate().map(|(id, word)| (word, id.into())).collect();
    let added = |id: usize, content: &str| json!({"id": id, "content": content, "special": true});
    let tokenizer = json!({
        "added_tokens": [added(256, "<|im_start|>"), added(257, "<|im_end|>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/th-tiny/tokenizer_config.json");
    let config: Value = serde_json::from_str(&std::fs::read_to_string(config).unwrap()).unwrap();
    let config = json!({"chat_template": config["chat_template"]});
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
});

// ---- the scripted engine

/// Loads a generator that gives the answers of the script, whatever the model.
struct Scripted(Value);

impl Loader for Scripted {
    fn load(
        &self,
        request: &LoadRequest,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> anyhow::Result<Loaded> {
        if let Some(reason) = self.0["load_error"].as_str() {
            anyhow::bail!("{reason}");
        }
        progress(Progress { phase: "reading weights", done_bytes: 5, total_bytes: 10 });
        let folder = PathBuf::from(self.0["folder"].as_str().unwrap());
        let tok = Tokenizer::open(&folder.join("tokenizer.json"))?;
        let no_text = self.0["no_text"] == true;
        let text = if no_text { TextSource::None } else { TextSource::Folder(folder) };
        Ok(Loaded {
            generator: Box::new(ScriptedGenerator {
                script: self.0.clone(),
                tok,
                at: 0,
                rest: Vec::new(),
                left: None,
            }),
            text,
            model: "scripted".into(),
            draft: Some(format!("{:?}", request.draft)),
            device: format!("{:?} {:?} threads", request.isa, request.threads),
            floor_ms_per_round: Some(0.5),
            memory: engine::MemoryBytes { weights: 7, draft: 5, kv: 3, state: 1, snapshots: 0 },
        })
    }

    fn bench(&self, _: &LoadRequest, _: bool) -> anyhow::Result<Vec<Section>> {
        anyhow::bail!("a scripted engine has no speed")
    }

    fn profile(&self, _: &LoadRequest) -> anyhow::Result<Vec<Section>> {
        anyhow::bail!("a scripted engine has no speed")
    }

    fn serve(
        &self,
        _request: &LoadRequest,
        _options: &ServeOptions,
        _progress: &mut dyn FnMut(Progress<'_>),
    ) -> anyhow::Result<Serving> {
        anyhow::bail!("these tests serve nobody")
    }

    fn inspect(&self, request: &LoadRequest) -> anyhow::Result<(Vec<Section>, TextSource)> {
        let facts = vec![("context".into(), format!("{:?}", request.context))];
        let text = TextSource::Folder(self.0["folder"].as_str().unwrap().into());
        Ok((vec![Section { title: "Model".into(), facts }], text))
    }
}

/// The token of the endless answer.
const COMMA: u32 = 0x2C - 0x21;

/// Gives `script["answers"][i]` as tokens, three a round; the last answer repeats.
struct ScriptedGenerator {
    script: Value,
    tok: Tokenizer,
    at: usize,
    rest: Vec<u32>,
    left: Option<usize>,
}

impl Generator for ScriptedGenerator {
    fn start(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        _cancel: &AtomicBool,
    ) -> Result<Prefill, GenerateError> {
        if let Some(log) = self.script["log"].as_str() {
            let mut file = std::fs::OpenOptions::new().append(true).create(true).open(log).unwrap();
            let line = json!({"prompt": prompt, "options": format!("{options:?}")});
            writeln!(file, "{line}").unwrap();
        }
        if let Some(context) = self.script["context"].as_u64()
            && prompt.len() as u64 > context
        {
            let context = context as usize;
            return Err(GenerateError::ContextOverflow { prompt: prompt.len(), context });
        }
        let answers = self.script["answers"].as_array().unwrap();
        let text = answers[self.at.min(answers.len() - 1)].as_str().unwrap();
        self.at += 1;
        self.rest = self.tok.encode_ordinary(text).unwrap();
        self.left = options.max_tokens;
        Ok(Prefill { cached_tokens: 2 })
    }

    fn next(&mut self) -> Result<Event, GenerateError> {
        if self.script["endless"] == true {
            std::thread::sleep(Duration::from_millis(20));
            return Ok(Event::Tokens { ids: vec![COMMA], round: None });
        }
        if self.script["device_error"] == true && self.rest.len() < 3 {
            return Err(GenerateError::Device("it caught fire".into()));
        }
        if self.left == Some(0) {
            return Ok(Event::End(Finish::Length));
        }
        if self.rest.is_empty() {
            return Ok(Event::End(Finish::Stop));
        }
        let count = self.rest.len().min(3).min(self.left.unwrap_or(3));
        self.left = self.left.map(|left| left - count);
        let ids = self.rest.drain(..count).collect();
        Ok(Event::Tokens { ids, round: Some(Round { proposed: 2, accepted: count as u32 - 1 }) })
    }

    fn stop(&mut self) {
        self.rest.clear();
    }
}

/// Not a test: the program with the scripted engine, when [`SCRIPT`] is set.
#[test]
#[expect(clippy::disallowed_methods, reason = "the script is handed to the child process this way")]
fn child() {
    let Ok(script) = std::env::var(SCRIPT) else { return };
    let script: Value = serde_json::from_str(&script).unwrap();
    let args: Vec<OsString> = std::iter::once("th-engine")
        .chain(script["args"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap()))
        .map(OsString::from)
        .collect();
    print!("{MARK}");
    std::io::stdout().flush().unwrap();
    let status = app::main_with(args, Box::leak(Box::new(Scripted(script))));
    let failed = format!("{status:?}") != format!("{:?}", std::process::ExitCode::SUCCESS);
    let digits: String = format!("{status:?}").chars().filter(char::is_ascii_digit).collect();
    std::process::exit(if failed { digits.parse().unwrap() } else { 0 });
}

// ---- the drivers

/// What a run of the program gave.
#[derive(Debug)]
struct Ran {
    status: i32,
    out: String,
    err: String,
}

fn ran(output: &Output) -> Ran {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let out = text(&output.stdout);
    let out = out.split_once(MARK).map_or(out.as_str(), |(_, program)| program);
    // The harness remarks on slow tests in the middle of it all.
    let out = out.replace("test child has been running for over 60 seconds\n", "");
    Ran { status: output.status.code().unwrap_or(-1), out, err: text(&output.stderr) }
}

/// The real binary.
fn real(args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_th-engine"));
    command.args(args).stdin(Stdio::null()).env_remove("TH_ENGINE_MODELS").env_remove("TH_ISA");
    ran(&command.output().unwrap())
}

fn scripted_command(script: &Value, args: &[&str]) -> Command {
    let mut script = script.clone();
    script["args"] = json!(args);
    script["folder"] = json!(FOLDER.to_str().unwrap());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "child", "--nocapture"])
        .env(SCRIPT, script.to_string())
        .env_remove("TH_ENGINE_MODELS")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn scripted(script: &Value, args: &[&str], stdin: &str) -> Ran {
    let mut child = scripted_command(script, args).spawn().unwrap();
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    ran(&child.wait_with_output().unwrap())
}

fn answers(answers: &[&str]) -> Value {
    json!({"answers": answers})
}

/// A log file of this test, and what the engine was asked.
struct Log(PathBuf);

impl Log {
    fn new(name: &str) -> Log {
        let path =
            std::env::temp_dir().join(format!("th-engine-{name}-{}.log", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Log(path)
    }

    fn script(&self, answers: &[&str]) -> Value {
        json!({"answers": answers, "log": self.0.to_str().unwrap()})
    }

    /// Prompts as text with control tokens, and the options.
    fn read(self) -> Vec<(String, String)> {
        let tok = Tokenizer::open(&FOLDER.join("tokenizer.json")).unwrap();
        let log = std::fs::read_to_string(&self.0).unwrap();
        let _ = std::fs::remove_file(&self.0);
        let one = |line: &str| {
            let entry: Value = serde_json::from_str(line).unwrap();
            let ids: Vec<u32> = serde_json::from_value(entry["prompt"].clone()).unwrap();
            let text = app::text::detokenize::decode(&tok, &ids, true);
            (text, entry["options"].as_str().unwrap().to_owned())
        };
        log.lines().map(one).collect()
    }
}

// ---- the real binary

#[test]
fn help_and_version() {
    let help = real(&["--help"]);
    assert_eq!((help.status, help.err.as_str()), (0, ""));
    for word in ["chat", "run", "inspect", "--draft", "TH_ENGINE_MODELS", "Exit status"] {
        assert!(help.out.contains(word), "{word}: {}", help.out);
    }
    let run = real(&["run", "--help"]);
    for word in ["--prompt-file", "--acceptance", "invariant", "--json", "[default:"] {
        assert!(run.out.contains(word), "{word}: {}", run.out);
    }
    let version = real(&["--version"]);
    assert!(version.out.starts_with("th-engine 0.1.0 ("), "{}", version.out);
    // Nothing asked: help on standard error, and the status of a wrong command line.
    let nothing = real(&[]);
    assert_eq!(nothing.status, 2);
    assert!(nothing.err.contains("Usage:"));
}

#[test]
fn wrong_command_lines_exit_with_2() {
    for args in [
        &["run", "--prompt", "a", "--tokens", "1"][..],
        &["run", "--top-p", "7"],
        &["run", "a", "--model", "b"],
        &["frobnicate"],
    ] {
        let ran = real(args);
        assert_eq!((ran.status, ran.out.as_str()), (2, ""), "{args:?}");
        assert!(ran.err.starts_with("error: "), "{}", ran.err);
    }
}

#[test]
fn a_missing_model_exits_with_3_and_says_where_it_was_looked_for() {
    for command in ["chat", "run", "inspect"] {
        let ran = real(&[command, "no-such-model"]);
        assert_eq!((ran.status, ran.out.as_str()), (3, ""));
        assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
        assert!(ran.err.contains("looked at no-such-model, "), "{}", ran.err);
    }
    let ran = real(&["run", "--draft", "./no-such-draft", "--prompt", "a"]);
    assert_eq!(ran.status, 3);
    assert!(ran.err.contains("no draft \"./no-such-draft\""), "{}", ran.err);
}

// ---- run

#[test]
fn run_prints_the_answer_and_its_figures() {
    let ran = scripted(&answers(&["It is Paris, naïve 🙂."]), &["run", "--prompt", "Where?"], "");
    assert_eq!((ran.status, ran.out.as_str()), (0, "It is Paris, naïve 🙂.\n"));
    assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
    for word in ["prompt ", "(2 cached)", "tok/s", "tokens/round", "accepted whole", "x floor"] {
        assert!(ran.err.contains(word), "{word}: {}", ran.err);
    }
    assert!(!ran.err.contains('\u{1b}') && !ran.out.contains('\u{1b}'));
}

#[test]
fn run_takes_prompts_from_everywhere() {
    let file = std::env::temp_dir().join(format!("th-engine-prompt-{}.txt", std::process::id()));
    std::fs::write(&file, "from a file\n").unwrap();
    let path = file.to_str().unwrap();
    let log = Log::new("sources");
    let script = log.script(&["ok"]);
    let long = "x".repeat(300_000);
    for (args, stdin) in [
        (&["run", "--prompt", "given"][..], ""),
        (&["run", "--prompt-file", path], ""),
        (&["run", "--prompt-file", "-"], "from a dash\n"),
        (&["run"], "piped\r\n"),
        (&["run", "--raw"], "raw <|im_start|>\n"),
        (&["run", "--tokens", "256,257, 0"], ""),
        (&["run", "--system", "Be brief.", "--prompt", "<|im_end|>"], ""),
        (&["run"], long.as_str()),
    ] {
        let ran = scripted(&script, args, stdin);
        assert_eq!((ran.status, ran.out.as_str()), (0, "ok\n"), "{args:?}: {}", ran.err);
    }
    std::fs::remove_file(&file).unwrap();
    let asked: Vec<String> = log.read().into_iter().map(|(prompt, _)| prompt).collect();
    let templated = |text: &str| {
        format!(
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging \
             Face<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        )
    };
    assert_eq!(asked[0], templated("given"));
    assert_eq!(asked[1], templated("from a file"));
    assert_eq!(asked[2], templated("from a dash"));
    assert_eq!(asked[3], templated("piped"));
    assert_eq!(asked[4], "raw <|im_start|>\n");
    assert_eq!(asked[5], "<|im_start|><|im_end|>!");
    assert!(asked[6].starts_with("<|im_start|>system\nBe brief.<|im_end|>\n"));
    assert_eq!(asked[7], templated(&long));
}

#[test]
fn run_passes_options_on() {
    let log = Log::new("options");
    let args = [
        "run",
        "--prompt",
        "a",
        "--temperature",
        "0.5",
        "--top-k",
        "3",
        "--seed",
        "9",
        "--acceptance",
        "invariant",
        "--max-tokens",
        "4",
        "--json",
        "--isa",
        "portable",
        "--threads",
        "2",
        "--draft",
        "ngram",
    ];
    let ran = scripted(&log.script(&["one two three four five six"]), &args, "");
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(report["text"], "one ");
    assert_eq!(report["finish_reason"], "length");
    assert_eq!(report["draft"], "Ngram");
    assert_eq!(report["device"], "Portable Some(2) threads");
    let (_, options) = log.read().remove(0);
    for word in [
        "temperature: Some(0.5)",
        "top_k: Some(3)",
        "seed: Some(9)",
        "rule: Some(Invariant)",
        "max_tokens: Some(4)",
        "top_p: None",
    ] {
        assert!(options.contains(word), "{word}: {options}");
    }
}

#[test]
fn run_json_is_exactly_one_object() {
    let ran = scripted(
        &answers(&["One. Two. Three."]),
        &["run", "--prompt", "a", "--json", "--stop", " Th"],
        "",
    );
    assert_eq!((ran.status, ran.err.as_str()), (0, ""));
    assert_eq!(ran.out.lines().count(), 1);
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    let keys: Vec<&String> = report.as_object().unwrap().keys().collect();
    assert_eq!(
        keys,
        [
            "text",
            "tokens",
            "finish_reason",
            "usage",
            "timings",
            "memory",
            "counters",
            "model",
            "draft",
            "device",
            "build"
        ]
    );
    assert_eq!(report["text"], "One. Two.");
    assert_eq!(report["finish_reason"], "stop");
    let tokens = report["tokens"].as_array().unwrap().len();
    assert_eq!(report["usage"]["completion_tokens"], tokens);
    assert_eq!(report["usage"]["cached_tokens"], 2);
    let timings: Vec<&String> = report["timings"].as_object().unwrap().keys().collect();
    assert_eq!(
        timings,
        [
            "load_ms",
            "prefill_ms",
            "first_token_ms",
            "decode_ms",
            "rounds",
            "tokens_per_round",
            "decode_tps",
            "floor_ms_per_round"
        ]
    );
    assert_eq!(report["timings"]["floor_ms_per_round"], 0.5);
    let memory = json!({"weights_bytes": 7, "draft_bytes": 5, "kv_bytes": 3, "state_bytes": 1});
    assert_eq!(report["memory"], memory);
}

#[test]
fn reasoning_goes_beside_the_answer() {
    let script = answers(&["<think>\nHm.\n</think>\n\nFour."]);
    let ran = scripted(&script, &["run", "--prompt", "2+2?"], "");
    assert_eq!((ran.status, ran.out.as_str()), (0, "Four.\n"));
    assert!(ran.err.starts_with("Hm.\n"), "{}", ran.err);
    let ran = scripted(&script, &["run", "--prompt", "2+2?", "--json"], "");
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((&report["text"], &report["reasoning"]), (&json!("Four."), &json!("Hm.")));
    // Raw text is shown as it is.
    let ran = scripted(&script, &["run", "--prompt", "2+2?", "--raw"], "");
    assert_eq!(ran.out, "<think>\nHm.\n</think>\n\nFour.\n");
}

#[test]
fn an_option_without_effect_is_named() {
    let ran = scripted(&answers(&["ok"]), &["run", "--prompt", "a", "--no-think"], "");
    assert_eq!(ran.status, 0);
    assert!(ran.err.contains("--no-think changes nothing"), "{}", ran.err);
}

#[test]
fn what_goes_wrong_is_one_line_and_a_status() {
    let broken_file =
        std::env::temp_dir().join(format!("th-engine-latin-{}.txt", std::process::id()));
    std::fs::write(&broken_file, b"caf\xe9").unwrap();
    let path = broken_file.to_str().unwrap();
    let ok = answers(&["ok"]);
    for (script, args, status, word) in [
        (json!({"load_error": "m.gguf: cut short"}), &["run", "--prompt", "a"][..], 3, "cut short"),
        (
            json!({"answers": ["a"], "context": 3}),
            &["run", "--prompt", "a"],
            1,
            "the context holds 3",
        ),
        (
            json!({"answers": ["a b c d"], "device_error": true}),
            &["run", "--prompt", "a"],
            1,
            "caught fire",
        ),
        (ok.clone(), &["run", "--prompt-file", "/no/such"], 2, "/no/such"),
        (ok.clone(), &["run", "--prompt-file", path], 2, "not UTF-8 text (byte 3)"),
        (ok.clone(), &["run", "--raw"], 1, "the prompt is empty"),
        (json!({"answers": ["a"], "no_text": true}), &["run", "--prompt", "a"], 1, "run --tokens"),
        (json!({"answers": ["a"], "no_text": true}), &["chat"], 1, "run --tokens"),
        (
            json!({"answers": ["a"], "no_text": true}),
            &["run", "--tokens", "1", "--stop", "a"],
            2,
            "--stop needs",
        ),
    ] {
        let ran = scripted(&script, args, "");
        assert_eq!(ran.status, status, "{args:?}: {ran:?}");
        let last = ran.err.lines().last().unwrap();
        assert!(last.starts_with("error: ") && last.contains(word), "{args:?}: {}", ran.err);
        assert_eq!(ran.err.lines().count(), 1, "{args:?}: {}", ran.err);
    }
    std::fs::remove_file(&broken_file).unwrap();
}

#[test]
fn a_model_without_a_tokenizer_prints_token_ids() {
    let ran = scripted(
        &json!({"answers": ["one two three four"], "no_text": true}),
        &["run", "--tokens", "5"],
        "",
    );
    assert_eq!(ran.status, 0);
    let ids: Result<Vec<u32>, _> = ran.out.split_whitespace().map(str::parse).collect();
    assert_eq!(ids.unwrap().len(), "one two three four".len(), "{}", ran.out);
}

#[cfg(unix)]
#[test]
fn a_reader_that_leaves_ends_the_program_quietly() {
    let script = json!({"answers": ["x"], "endless": true});
    let mut child = scripted_command(&script, &["run", "--prompt", "a"]).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    // The first comma comes from the endless answer.
    let mut byte = [0u8];
    while byte != *b"," {
        std::io::Read::read_exact(&mut stdout, &mut byte).unwrap();
    }
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

// ---- chat

#[test]
fn chat_keeps_the_conversation() {
    let log = Log::new("chat");
    let lines = "hello\n\n/stats\nand you?\n//slash\n/reset\n/system Be brief.\nagain\n/nonsense\n/quit\nnever sent\n";
    let ran = scripted(&log.script(&["Hi.", "Fine.", "Yes."]), &["chat"], lines);
    assert_eq!(ran.status, 0, "{}", ran.err);
    let out: Vec<&str> = ran.out.lines().collect();
    assert_eq!((out[0], out[2], out[3]), ("Hi.", "Fine.", "Yes."));
    assert!(out[1].starts_with("prompt ") && out[1].contains("tok"), "{}", out[1]);
    assert_eq!(
        out[4..7],
        ["new conversation", "new conversation with this system message", "Yes."]
    );
    assert!(out[7].contains("unknown command /nonsense") && out.len() == 8);
    let asked: Vec<String> = log.read().into_iter().map(|(prompt, _)| prompt).collect();
    assert_eq!(asked.len(), 4);
    let second = "user\nhello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nand you?<|im_end|>";
    assert!(asked[1].contains(second), "{}", asked[1]);
    assert!(asked[2].contains("user\n/slash<|im_end|>"));
    assert_eq!(
        asked[3],
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    );
}

#[test]
fn chat_ends_with_its_input() {
    for stdin in ["", "hello\n", "hello"] {
        let ran = scripted(&answers(&["Hi."]), &["chat"], stdin);
        assert_eq!(ran.status, 0);
        assert_eq!(ran.out, if stdin.is_empty() { "" } else { "Hi.\n" });
        assert!(!ran.out.contains('\u{1b}') && !ran.err.contains('\u{1b}'));
    }
}

#[test]
fn a_failed_message_ends_a_piped_chat() {
    let script = json!({"answers": ["a"], "context": 200});
    let long = "word ".repeat(60) + "\nnext\n";
    let ran = scripted(&script, &["chat"], &long);
    assert_eq!((ran.status, ran.out.as_str()), (1, ""));
    assert!(ran.err.contains("the context holds 200"), "{}", ran.err);
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_the_answer_and_then_the_program() {
    let interrupt = |child: &std::process::Child| {
        // SAFETY: sends a signal to a child of this test that has not been waited for.
        unsafe { libc::kill(i32::try_from(child.id()).unwrap(), libc::SIGINT) };
    };
    let seen = AtomicBool::new(false);
    let wait_for_dots = |child: &mut std::process::Child| {
        let stdout = child.stdout.as_mut().unwrap();
        let mut all = Vec::new();
        let begun = Instant::now();
        while !String::from_utf8_lossy(&all).contains(",,") {
            let mut some = [0u8; 64];
            let count = std::io::Read::read(stdout, &mut some).unwrap();
            all.extend(&some[..count]);
            assert!(count > 0 && begun.elapsed() < Duration::from_secs(20), "{all:?}");
        }
        seen.store(true, Ordering::Relaxed);
    };
    // run: what there is stays, and the status says that it was interrupted.
    let script = json!({"answers": ["x"], "endless": true});
    let mut child = scripted_command(&script, &["run", "--prompt", "a"]).spawn().unwrap();
    wait_for_dots(&mut child);
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(String::from_utf8(output.stderr).unwrap().starts_with("prompt "));
    // chat: the answer ends, the program waits for the next line, and leaves at the second one.
    let mut child = scripted_command(&script, &["chat"]).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"go\n").unwrap();
    wait_for_dots(&mut child);
    interrupt(&child);
    stdin.write_all(b"/system\n").unwrap();
    let begun = Instant::now();
    let mut reply = String::new();
    while !reply.contains("no system message") {
        let mut some = [0u8; 64];
        let count = std::io::Read::read(child.stdout.as_mut().unwrap(), &mut some).unwrap();
        assert!(count > 0 && begun.elapsed() < Duration::from_secs(20), "{reply:?}");
        reply += &String::from_utf8_lossy(&some[..count]);
    }
    assert!(child.try_wait().unwrap().is_none());
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(String::from_utf8(output.stderr).unwrap().contains("interrupted"));
    assert!(seen.into_inner());
}

// ---- inspect

#[test]
fn inspect_describes_engine_and_text() {
    let ran = scripted(&answers(&[]), &["inspect", "--context", "4096"], "");
    assert_eq!((ran.status, ran.err.as_str()), (0, ""));
    for word in ["Model\n", "Some(4096)", "Text\n", "258", "2 (2 control)", "tokenizer_config.json"]
    {
        assert!(ran.out.contains(word), "{word}: {}", ran.out);
    }
    let ran = scripted(&answers(&[]), &["inspect", "--json"], "");
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(report["sections"]["Text"]["token ids"], "258");
}
