//! Real clients against the real server: the official packages of OpenAI and Anthropic for Python and
//! JavaScript, and a fuzzer that reads the OpenAPI document. They are downloaded, so these tests run only
//! where `TH_ENGINE_CLIENTS` is set: to a folder in which the downloads stay.
#![cfg(unix)]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

const KEY: &str = "a-key";
const MODEL: &str = "tiny";

/// The folder for downloads, or a word on what is left out.
fn downloads(test: &str) -> Option<PathBuf> {
    #[expect(clippy::disallowed_methods, reason = "a test that is asked for")]
    let folder = std::env::var_os("TH_ENGINE_CLIENTS").map(PathBuf::from);
    if folder.is_none() {
        eprintln!(
            "{test}: skipped, since it downloads packages; set TH_ENGINE_CLIENTS=FOLDER to run it"
        );
    }
    folder
}

/// The bundled model with a chat template that knows tools and thinking.
fn model(folder: &Path) -> PathBuf {
    let model = folder.join("model");
    let _ = std::fs::remove_dir_all(&model);
    std::fs::create_dir_all(&model).unwrap();
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/th-tiny");
    for entry in std::fs::read_dir(bundled.canonicalize().unwrap()).unwrap() {
        let entry = entry.unwrap();
        symlink(entry.path(), model.join(entry.file_name())).unwrap();
    }
    let template = include_str!("clients/template.jinja");
    std::fs::write(model.join("chat_template.jinja"), template).unwrap();
    model
}

struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(folder: &Path, more: &[&str]) -> Server {
        let model = model(folder);
        let draft = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/th-tiny-dflash");
        let mut child = Command::new(env!("CARGO_BIN_EXE_th-engine"))
            .arg("serve")
            .arg(model)
            .arg("--draft")
            .arg(draft)
            .args(["--device", "cpu", "--port", "0", "--no-traces", "--lanes", "2"])
            .args(["--served-model-name", MODEL, "--api-key", KEY])
            .args(more)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let line = lines.find(|line| line.contains("listening on ")).unwrap();
        let url = line.split("listening on ").nth(1).unwrap().split(';').next().unwrap().to_owned();
        lines.find(|line| line.contains("tokens of context")).expect("a model that loads");
        std::thread::spawn(move || lines.for_each(|line| eprintln!("server: {line}")));
        Server { child, url }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}\n{text}\n{said}");
    text
}

/// Python with these packages.
fn python(folder: &Path, packages: &[&str]) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let venv = folder.join("venv");
    if !venv.join("bin/python").exists() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&venv));
    }
    run(Command::new(venv.join("bin/pip")).args(["install", "--quiet"]).args(packages));
    venv.join("bin/python")
}

fn suite(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(name)
}

#[test]
fn python_clients() {
    let Some(folder) = downloads("python_clients") else { return };
    let python = python(&folder, &["openai", "anthropic"]);
    let server = Server::start(&folder, &["--context", "4096"]);
    let transcript =
        run(Command::new(python).arg(suite("suite.py")).args([&server.url, KEY, MODEL]));
    insta::assert_snapshot!(transcript);
}

#[test]
fn javascript_clients() {
    let Some(folder) = downloads("javascript_clients") else { return };
    let packages = folder.join("node");
    std::fs::create_dir_all(&packages).unwrap();
    let install = ["install", "--silent", "--no-save", "openai", "@anthropic-ai/sdk"];
    run(Command::new("npm").arg("--prefix").arg(&packages).args(install));
    std::fs::copy(suite("suite.mjs"), packages.join("suite.mjs")).unwrap();
    let server = Server::start(&folder.join("js"), &["--context", "4096"]);
    let script = packages.join("suite.mjs");
    let transcript = run(Command::new("node").arg(script).args([&server.url, KEY, MODEL]));
    insta::assert_snapshot!(transcript);
}

#[test]
fn no_request_is_a_fault_of_the_server() {
    let Some(folder) = downloads("no_request_is_a_fault_of_the_server") else { return };
    let python = python(&folder, &["schemathesis"]);
    // Any name is the model's, so that requests get as far as it; none of them takes long.
    let more = ["--served-model-name", "*", "--request-timeout", "5", "--context", "512"];
    let server = Server::start(&folder.join("fuzz"), &more);
    let tool = python.with_file_name("schemathesis");
    let checks = ["--checks", "not_a_server_error", "--max-examples", "10", "--seed", "1"];
    // It leaves a folder of its own where it runs.
    let text = run(Command::new(tool)
        .current_dir(&folder)
        .arg("run")
        .arg(format!("{}/openapi.json", server.url))
        .args(["--url", &server.url, "--header", &format!("Authorization: Bearer {KEY}")])
        .args(checks));
    println!("{text}");
}
