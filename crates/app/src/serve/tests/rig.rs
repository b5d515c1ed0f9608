//! A server around a scripted engine, and a client for it.

use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request, StatusCode};
use engine::SamplingDefaults;
use engine::service::{Finish, Service};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::scripted::{Act, Scripted};
use crate::serve::lifecycle::Lifecycle;
use crate::serve::model::{Facts, Served};
use crate::serve::router::router;
use crate::serve::security::Security;
use crate::serve::state::{App, Options, Server};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::{Recorder, RecorderOptions};
use crate::text::chat::ChatText;
use crate::text::grammar::Grammars;
use crate::text::guard::Guarded;
use crate::text::template::Templates;
use crate::text::tokenizer::{Tok, Tokenizer};

/// The token that ends an answer.
pub(super) const EOS: u32 = 2;

/// A template in the manner of Qwen's: thinking that can be switched off, tools in XML.
const TEMPLATE: &str = "\
{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}\
Write <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call><|im_end|>\n{% endif %}\
{%- for m in messages %}<|im_start|>{{ m.role }}\n\
{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}\
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}";

/// The bundled tokenizer with tokens for reasoning tags, as thinking models have them.
pub(super) static TOK: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/th-tiny/tokenizer.json");
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for (id, content) in [(49152, "<think>"), (49153, "</think>")] {
        let token = json!({"id": id, "content": content, "special": false});
        json["added_tokens"].as_array_mut().unwrap().push(token);
    }
    Arc::new(Tokenizer::from_json("t", json, None).unwrap())
});

/// One for all tests: it takes its time.
static GRAMMARS: LazyLock<Arc<Grammars>> =
    LazyLock::new(|| Arc::new(Grammars::new(TOK.clone(), &[EOS]).unwrap()));

/// The tokens of a text; reasoning tags in it are tokens of their own.
pub(super) fn ids(text: &str) -> Vec<u32> {
    TOK.encode(&Guarded::trusted(text)).unwrap()
}

/// What an engine does that says this and ends its turn, in rounds of `size` tokens.
pub(super) fn says_in(text: &str, size: usize) -> Vec<Act> {
    let mut ids = ids(text);
    ids.push(EOS);
    let rounds = ids.chunks(size).map(|round| Act::Round(round.to_vec()));
    rounds.chain([Act::End(Finish::Stop)]).collect()
}

/// The same, in rounds of three.
pub(super) fn says(text: &str) -> Vec<Act> {
    says_in(text, 3)
}

/// A server and its engine.
pub(super) struct Rig {
    pub(super) app: App,
    pub(super) engine: Arc<Scripted>,
    router: Router,
}

/// A reply that was read to its end.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) text: String,
}

impl Reply {
    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    pub(super) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// The data of all events but `[DONE]`.
    pub(super) fn events(&self) -> Vec<Value> {
        let data = self.text.lines().filter_map(|line| line.strip_prefix("data: "));
        let data = data.filter(|data| *data != "[DONE]");
        data.map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

impl Rig {
    /// A server whose engine always says this.
    pub(super) fn saying(text: &str) -> Rig {
        let acts = says(text);
        Rig::acting(move |_| acts.clone())
    }

    /// A server whose engine does this with its n-th request.
    pub(super) fn acting(acts: impl Fn(usize) -> Vec<Act> + Send + Sync + 'static) -> Rig {
        Rig::new(Scripted::new(move |n, _| Ok(acts(n))))
    }

    pub(super) fn new(engine: Arc<Scripted>) -> Rig {
        Rig::with(engine, Options::default(), Security::default())
    }

    pub(super) fn with(engine: Arc<Scripted>, options: Options, security: Security) -> Rig {
        let lifecycle = Lifecycle::ready(served(Arc::clone(&engine)));
        Rig::around(engine, options, security, lifecycle)
    }

    pub(super) fn around(
        engine: Arc<Scripted>,
        options: Options,
        security: Security,
        lifecycle: Arc<Lifecycle>,
    ) -> Rig {
        let recorder = Recorder::start(RecorderOptions::default(), Arc::new(Metrics::new()));
        let app = Server::new(options, security, lifecycle, recorder);
        Rig { router: router(Arc::clone(&app)), app, engine }
    }

    /// The reply to a request, its body unread.
    pub(super) async fn send(&self, request: Request<Body>) -> axum::response::Response {
        self.router.clone().oneshot(request).await.unwrap()
    }

    pub(super) async fn read(&self, request: Request<Body>) -> Reply {
        let response = self.send(request).await;
        let (status, headers) = (response.status(), response.headers().clone());
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        Reply { status, headers, text: String::from_utf8(bytes.to_vec()).unwrap() }
    }

    pub(super) async fn get(&self, path: &str) -> Reply {
        self.read(request(Method::GET, path, Body::empty())).await
    }

    pub(super) async fn post(&self, path: &str, body: &Value) -> Reply {
        self.read(post(path, body)).await
    }

    /// A chat with one message, and these fields besides.
    pub(super) async fn chat(&self, fields: &Value) -> Reply {
        self.post("/v1/chat/completions", &chat(fields)).await
    }
}

/// The body of a chat with one message, and these fields besides.
pub(super) fn chat(fields: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

pub(super) fn request(method: Method, path: &str, body: Body) -> Request<Body> {
    Request::builder().method(method).uri(path).header("host", "localhost").body(body).unwrap()
}

pub(super) fn post(path: &str, body: &Value) -> Request<Body> {
    request(Method::POST, path, Body::from(body.to_string()))
}

/// A model around an engine.
pub(super) fn served(engine: Arc<Scripted>) -> Served {
    let sources = [("default".to_owned(), TEMPLATE.to_owned())];
    let templates = Templates::parse("t", &sources, jiff::Zoned::now).unwrap();
    let tok: Arc<dyn Tok> = TOK.clone();
    let text = ChatText::new(tok, templates, serde_json::Map::new());
    let facts = Facts {
        info: engine.info(),
        text: Some(Arc::new(text)),
        grammars: Some(GRAMMARS.clone()),
        name: "scripted".into(),
        draft: None,
        defaults: SamplingDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            ..SamplingDefaults::default()
        },
        stop_tokens: vec![EOS],
        loaded: SystemTime::UNIX_EPOCH,
    };
    Served { service: engine, facts: Arc::new(facts) }
}

/// Replaces what differs from run to run.
pub(super) fn stable(text: &str) -> String {
    let patterns = [
        (r#"(chatcmpl-|cmpl-|msg_|resp_|call_|rs_|fc_|req_)[0-9a-f]{24}"#, "${1}ID"),
        (r#""(created|created_at|completed_at)":\d+"#, r#""$1":0"#),
        (r#""created_at":"[^"]*""#, r#""created_at":"TIME""#),
        (r#""system_fingerprint":"[^"]*""#, r#""system_fingerprint":"BUILD""#),
        (r#""seed":\d+"#, r#""seed":0"#),
        (r#""(time_ms|total_duration)":[0-9.]+"#, r#""$1":0"#),
    ];
    patterns.iter().fold(text.to_owned(), |text, (pattern, stable)| {
        regex::Regex::new(pattern).unwrap().replace_all(&text, *stable).into_owned()
    })
}

/// Waits until something is so.
pub(super) async fn eventually(what: impl Fn() -> bool) {
    for _ in 0..5000 {
        if what() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("it never came to be");
}
