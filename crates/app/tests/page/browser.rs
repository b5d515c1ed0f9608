//! A browser without a window, driven over its own protocol through two pipes.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use base64::Engine;
use serde_json::{Value, json};

/// The most time that anything may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Where browsers are.
const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// A browser with one page.
pub(crate) struct Browser {
    child: Child,
    commands: ChildStdin,
    answers: Receiver<Value>,
    session: String,
    next: u64,
    /// What the page complained of: exceptions, errors of its console, violations of its policy.
    pub(crate) complaints: Vec<String>,
}

impl Browser {
    /// Starts the browser, with a folder of its own.
    pub(crate) fn start(profile: &Path) -> Browser {
        let found = NAMES.iter().find(|name| {
            let version = Command::new(name).arg("--version").stderr(Stdio::null()).output();
            version.is_ok_and(|output| output.status.success())
        });
        let name = found.expect("a Chromium among the programs of this machine");
        // The protocol wants descriptors 3 and 4; a shell can turn standard input and output into
        // them.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1", name])
            .args(["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"])
            .args([
                "--no-sandbox",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--disable-extensions",
            ])
            .arg(format!("--user-data-dir={}", profile.display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (commands, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let answers = listen(output);
        let mut browser = Browser {
            child,
            commands,
            answers,
            session: String::new(),
            next: 0,
            complaints: Vec::new(),
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", attach);
        browser.session = session["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Sends a command; its result.
    pub(crate) fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut command = json!({"id": self.next, "method": method, "params": params});
        if !self.session.is_empty() {
            command["sessionId"] = self.session.as_str().into();
        }
        self.commands.write_all(format!("{command}\0").as_bytes()).unwrap();
        self.commands.flush().unwrap();
        loop {
            let answer = self.answers.recv_timeout(PATIENCE).expect("an answer of the browser");
            if answer["id"] == self.next {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            self.note(&answer);
        }
    }

    fn note(&mut self, event: &Value) {
        let entry = &event["params"]["entry"];
        match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => self.complaints.push(event["params"].to_string()),
            // Answers like 401 are logged as errors of the network; the page tells them itself.
            Some("Log.entryAdded") if entry["level"] == "error" && entry["source"] != "network" => {
                self.complaints.push(entry.to_string());
            }
            _ => {}
        }
    }

    /// Opens an address.
    pub(crate) fn open(&mut self, url: &str) {
        self.eval("window.before = true");
        self.call("Page.navigate", json!({"url": url}));
        self.wait("window.before === undefined && document.readyState === 'complete'");
    }

    /// Loads the page again.
    pub(crate) fn reload(&mut self) {
        self.eval("window.before = true");
        self.call("Page.reload", json!({}));
        self.wait("window.before === undefined && document.readyState === 'complete'");
    }

    /// The value of an expression.
    pub(crate) fn eval(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let result = self.call("Runtime.evaluate", params);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true; one that can't be told yet is not.
    pub(crate) fn wait(&mut self, expression: &str) {
        let until = Instant::now() + PATIENCE;
        let tried =
            format!("(() => {{ try {{ return {expression}; }} catch {{ return false; }} }})()");
        while self.eval(&tried) != Value::Bool(true) {
            if Instant::now() > until {
                let text = self.eval("document.body.innerText");
                panic!(
                    "in vain: {expression}; complaints {:?}; the page says {text}",
                    self.complaints
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Presses a key, as `KeyboardEvent.key` calls it.
    pub(crate) fn press(&mut self, key: &str, shift: bool) {
        let (code, text) = match key {
            "Tab" => (9, ""),
            "Enter" => (13, "\r"),
            "Escape" => (27, ""),
            " " => (32, " "),
            "ArrowRight" => (39, ""),
            "ArrowLeft" => (37, ""),
            other => panic!("no code for {other}"),
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({
                "type": kind, "key": key, "windowsVirtualKeyCode": code, "modifiers": if shift { 8 } else { 0 },
            });
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = text.into();
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Types a text where the keyboard is.
    pub(crate) fn type_text(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
    }

    /// Goes on with Tab until the element with this id has the keyboard.
    pub(crate) fn tab_to(&mut self, id: &str) {
        for _ in 0..60 {
            if self.eval("document.activeElement?.id ?? ''") == id {
                return;
            }
            self.press("Tab", false);
        }
        panic!("Tab never reaches {id}");
    }

    /// Makes the window so wide and high, light or dark.
    pub(crate) fn window(&mut self, width: u32, height: u32, scheme: &str) {
        let size =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", features);
    }

    /// Keeps a picture of the whole page.
    pub(crate) fn picture(&mut self, path: &Path) {
        let shot = json!({"format": "png", "captureBeyondViewport": true});
        let data = self.call("Page.captureScreenshot", shot);
        let engine = base64::engine::general_purpose::STANDARD;
        std::fs::write(path, engine.decode(data["data"].as_str().unwrap()).unwrap()).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It leaves with its pipes; what does not is ended.
        let _ = self.commands.write_all(b"{\"id\":0,\"method\":\"Browser.close\"}\0");
        std::thread::sleep(Duration::from_millis(300));
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn listen(output: ChildStdout) -> Receiver<Value> {
    let (sender, answers) = mpsc::channel();
    std::thread::spawn(move || {
        for message in BufReader::new(output).split(0) {
            let Ok(message) = message else { return };
            let Ok(value) = serde_json::from_slice(&message) else { continue };
            if sender.send(value).is_err() {
                return;
            }
        }
    });
    answers
}
