//! Every way to be refused, in the form of each API.

use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, StatusCode};
use engine::service::{Health, Refusal};
use serde_json::{Value, json};

use super::rig::{Reply, Rig, chat, post, request};
use super::scripted::{Act, Scripted};
use crate::serve::security::Security;
use crate::serve::state::Options;

const PATHS: [&str; 5] =
    ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat", "/api/generate"];

/// A body that suits every path.
fn any(fields: &Value) -> Value {
    let mut body = chat(&json!({"prompt": "Hi", "stream": false}));
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// An error's message and code, after a look at the form that its API wants.
fn error(path: &str, reply: &Reply) -> (String, String) {
    let body = reply.json();
    let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{body}")).to_owned();
    assert_eq!(reply.header("content-type"), "application/json", "{path}");
    if path.starts_with("/api") {
        return (text(&body["error"]), text(&body["code"]));
    }
    let error = &body["error"];
    assert!(error["type"].is_string(), "{body}");
    match path.starts_with("/v1/messages") {
        true => assert_eq!(body["type"], "error"),
        false => assert!(error.get("param").is_some() && body.get("type").is_none(), "{body}"),
    }
    (text(&error["message"]), text(&error["code"]))
}

async fn refused(rig: &Rig, fields: &Value, status: u16, code: &str, words: &str) {
    for path in PATHS {
        let reply = rig.post(path, &any(fields)).await;
        assert_eq!(reply.status.as_u16(), status, "{path}: {}", reply.text);
        let (message, found) = error(path, &reply);
        assert_eq!(found, code, "{path}");
        let anthropic = path == "/v1/messages" && code == "context_length_exceeded";
        assert!(anthropic || message.contains(words), "{path}: {message}");
    }
}

#[tokio::test]
async fn unknown_models() {
    let rig = Rig::saying("ok");
    refused(&rig, &json!({"model": "no-such"}), 404, "model_not_found", "scripted").await;
    refused(&rig, &json!({"model": "../../etc/passwd"}), 404, "model_not_found", "scripted").await;
    for fine in [json!("scripted"), json!(""), Value::Null] {
        let reply = rig.chat(&json!({"model": fine})).await.json();
        assert_eq!(reply["model"], "scripted");
    }
    let models = rig.get("/v1/models").await.json();
    assert_eq!(
        (&models["data"][0]["id"], &models["data"][0]["max_model_len"]),
        (&json!("scripted"), &json!(1000))
    );
    assert_eq!(rig.get("/v1/models/scripted").await.status, StatusCode::OK);
    assert_eq!(rig.get("/v1/models/other").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn served_names() {
    let names = |names: &[&str]| Options {
        model_names: names.iter().map(|&name| name.to_owned()).collect(),
        ..Options::default()
    };
    let rig = |options| {
        let engine = Scripted::new(|_, _| Ok(super::rig::says("ok")));
        Rig::with(engine, options, Security::default())
    };
    let two = rig(names(&["org/one", "two"]));
    for (asked, named) in [("two", "two"), ("org/one", "org/one"), ("", "org/one")] {
        assert_eq!(two.chat(&json!({"model": asked})).await.json()["model"], named);
    }
    assert_eq!(two.get("/v1/models/org/one").await.json()["id"], "org/one");
    assert_eq!(two.chat(&json!({"model": "scripted"})).await.status, StatusCode::NOT_FOUND);
    let any = rig(names(&["*"]));
    // The reply names what there really is.
    assert_eq!(any.chat(&json!({"model": "gpt-9"})).await.json()["model"], "scripted");
}

#[tokio::test]
async fn prompts_that_are_too_long() {
    let rig = Rig::saying("ok");
    let long = "secret ".repeat(2000);
    let fields = json!({"prompt": long, "messages": [{"role": "user", "content": long}]});
    refused(&rig, &fields, 400, "context_length_exceeded", "maximum context length is 1000 tokens")
        .await;
    let reply = rig.post("/v1/messages", &any(&fields)).await.json();
    let message = reply["error"]["message"].as_str().unwrap();
    assert!(
        message.starts_with("prompt is too long: ") && message.ends_with(" tokens > 1000 maximum"),
        "{message}"
    );
    // What is far too long is refused before it is tokenised, with what is certain.
    let far = "secret ".repeat(40_000);
    let fields = json!({"prompt": far, "messages": [{"role": "user", "content": far}]});
    refused(&rig, &fields, 400, "context_length_exceeded", "the prompt has at least ").await;
    let reply = rig.post("/v1/messages", &any(&fields)).await.json();
    let message = reply["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("prompt is too long: "), "{message}");
    assert!(rig.engine.seen().requests.is_empty());
    // Whoever wants a count gets the right one.
    let count = rig.post("/v1/messages/count_tokens", &any(&fields)).await.json();
    assert!(count["input_tokens"].as_u64().unwrap() > 40_000, "{count}");
}

#[tokio::test]
async fn engines_that_can_not() {
    let busy = || Refusal::Busy { waiting: 16, retry_after: Duration::from_nanos(6_000_000_123) };
    let rig = Rig::new(Scripted::new(move |_, _| Err(busy())));
    refused(&rig, &json!({}), 429, "queue_full", "16 requests wait already").await;
    let reply = rig.chat(&json!({})).await;
    assert_eq!(reply.header("retry-after"), "7");
    assert!(reply.text.contains("try again in 7 s\""), "{}", reply.text);
    let rig = Rig::new(Scripted::new(|_, _| Err(Refusal::Unavailable("gone".into()))));
    refused(&rig, &json!({}), 503, "engine_unavailable", "gone").await;
    let rig = Rig::acting(|_| vec![Act::Fail]);
    refused(&rig, &json!({}), 500, "device_failed", "on fire").await;
    let rig = Rig::acting(|_| vec![Act::End(engine::service::Finish::Deadline)]);
    refused(&rig, &json!({}), 408, "deadline_exceeded", "time was up").await;
    for (health, code) in [
        (Health::Recovering("it fell".into()), "recovering"),
        (Health::Failed("it fell".into()), "engine_failed"),
        (Health::Draining, "draining"),
    ] {
        let rig = Rig::saying("ok");
        assert_eq!(rig.get("/health").await.status, StatusCode::OK);
        rig.engine.set_health(health);
        refused(&rig, &json!({}), 503, code, "").await;
        let report = rig.get("/health").await;
        assert_eq!(report.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(rig.get("/ready").await.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_ne!(report.json()["status"], "ok");
    }
}

#[tokio::test]
async fn values_that_make_no_sense() {
    let rig = Rig::saying("ok");
    let cases = [
        (json!({"temperature": -1}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 2}), "top_p"),
        (json!({"n": 0}), "n"),
        (json!({"n": 1000}), "n"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_completion_tokens": -5}), "max_completion_tokens"),
        (json!({"stop": [""]}), "stop"),
        (json!({"stop": 5}), "stop"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"logit_bias": {"99999999": 1}}), "logit_bias"),
        (json!({"logit_bias": {"1": 1000}}), "logit_bias"),
        (json!({"timeout": 0}), "timeout"),
        (json!({"timeout": -1}), "timeout"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "wizard", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
            "messages[0].content[0]",
        ),
        (json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}), "tools[0]"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}),
            "tools[0]",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "function": {"name": "x"}}}), "tool_choice"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format"),
        (json!({"response_format": {"type": "yaml"}}), "response_format"),
        (
            json!({"chat_template_kwargs": {"enable_thinking": "no"}}),
            "chat_template_kwargs.enable_thinking",
        ),
        (json!({"thinking_budget": -7}), "thinking_budget"),
    ];
    for (fields, param) in cases {
        let reply = rig.chat(&fields).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{fields}");
        let error = &reply.json()["error"];
        assert_eq!(error["param"], param, "{fields} {error}");
        assert_eq!(error["code"], "invalid_value", "{fields}");
    }
    assert!(rig.engine.seen().requests.is_empty());
}

#[tokio::test]
async fn what_is_not_supported_is_refused_by_name() {
    let rig = Rig::saying("ok");
    let image =
        json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]);
    let cases = [
        (json!({"messages": image}), "messages[0].content[0]"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
        (json!({"audio": {"voice": "x"}}), "audio"),
        (json!({"modalities": ["text", "audio"]}), "modalities"),
        (json!({"web_search_options": {}}), "web_search_options"),
        (json!({"mirostat": 2}), "mirostat"),
        (json!({"guided_json": {"type": "object"}}), "guided_json"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0]"),
    ];
    for (fields, param) in cases {
        let reply = rig.chat(&fields).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{fields}");
        let error = &reply.json()["error"];
        assert_eq!(
            (&error["param"], &error["code"]),
            (&json!(param), &json!("unsupported_parameter"))
        );
    }
    // The same with the values that change nothing.
    let neutral =
        json!({"functions": [], "audio": null, "mirostat": 0, "typical_p": 1.0, "best_of": 1});
    assert_eq!(rig.chat(&neutral).await.status, StatusCode::OK);
    for (path, fields) in [
        ("/v1/completions", json!({"prompt": "a", "suffix": "b"})),
        ("/v1/completions", json!({"prompt": "a", "echo": true, "logprobs": 1})),
        ("/v1/messages", chat(&json!({"tools": [{"type": "web_search_20250305", "name": "w"}]}))),
        ("/v1/messages", chat(&json!({"mcp_servers": [{"url": "x"}]}))),
        ("/api/chat", chat(&json!({"options": {"mirostat": 1}}))),
        ("/api/generate", json!({"prompt": "a", "images": ["x"]})),
    ] {
        let reply = rig.post(path, &fields).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{path} {fields}");
        assert_eq!(error(path, &reply).1, "unsupported_parameter", "{path} {fields}");
    }
}

#[tokio::test]
async fn ignored_fields_are_named() {
    let rig = Rig::saying("</think>ok");
    let fields = json!({"foo": 1, "messages": [{"role": "user", "content": "Hi", "bar": [1]}]});
    let reply = rig.chat(&fields).await;
    assert_eq!(reply.status, StatusCode::OK);
    assert_eq!(reply.header("x-th-ignored"), "foo, messages.0.bar");
    let streamed = rig.chat(&json!({"zoo": {"a": 1}, "stream": true})).await;
    assert_eq!(streamed.header("x-th-ignored"), "zoo");
}

#[tokio::test]
async fn bodies_and_paths_that_are_wrong() {
    let small = Options {
        max_body_bytes: 1000,
        upload_timeout: Duration::from_millis(30),
        ..Options::default()
    };
    let rig = Rig::with(Scripted::new(|_, _| Ok(vec![])), small, Security::default());
    for path in PATHS {
        for body in [
            "",
            "{",
            "[]",
            "[null, [], null, null, null, null]",
            "null",
            "5",
            "\"x\"",
            "{\"messages\": {}, \"prompt\": {}}",
            "\u{feff}{}",
        ] {
            let reply = rig.read(request(Method::POST, path, Body::from(body))).await;
            assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{path} {body}: {}", reply.text);
            error(path, &reply);
        }
        let reply = rig.read(request(Method::POST, path, Body::from(vec![0xff, 0xfe]))).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST);
        let reply = rig.post(path, &any(&json!({"x": "y".repeat(2000)}))).await;
        assert_eq!(
            (reply.status.as_u16(), error(path, &reply).1.as_str()),
            (413, "request_too_large")
        );
        // The same without a length that would tell.
        let pieces =
            futures_util::stream::iter((0..50).map(|_| Ok::<_, std::io::Error>("x".repeat(100))));
        let reply = rig.read(request(Method::POST, path, Body::from_stream(pieces))).await;
        assert_eq!(reply.status.as_u16(), 413);
        let never = futures_util::stream::pending::<Result<String, std::io::Error>>();
        let reply = rig.read(request(Method::POST, path, Body::from_stream(never))).await;
        assert_eq!(
            (reply.status.as_u16(), error(path, &reply).1.as_str()),
            (408, "upload_timeout")
        );
        let reply = rig.read(request(Method::GET, path, Body::empty())).await;
        assert_eq!(
            (reply.status.as_u16(), error(path, &reply).1.as_str()),
            (405, "method_not_allowed")
        );
        let nowhere = format!("{path}/nowhere");
        let reply = rig.read(request(Method::POST, &nowhere, Body::empty())).await;
        assert_eq!(
            (reply.status.as_u16(), error(&nowhere, &reply).1.as_str()),
            (404, "route_not_found")
        );
    }
}

#[tokio::test]
async fn a_list_is_no_object() {
    let rig = Rig::saying("ok");
    for (path, body, param) in [
        ("/v1/chat/completions", chat(&json!({"stream_options": [true, null]})), "stream_options"),
        ("/v1/chat/completions", json!({"messages": [["user", "Hi"]]}), "messages[0]"),
        (
            "/v1/responses",
            json!({"input": "Hi", "reasoning": ["none", null, null, null]}),
            "reasoning",
        ),
        ("/v1/responses", json!({"input": "Hi", "text": [null, null]}), "text"),
    ] {
        let reply = rig.post(path, &body).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{body}");
        let error = &reply.json()["error"];
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("a list, where an object is expected"), "{message}");
        assert_eq!(error["param"], param);
    }
    let reply = rig.post("/tokenize", &json!(["a", false, false, false])).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert!(reply.text.contains("a list, where an object is expected"), "{}", reply.text);
}

#[tokio::test]
async fn deep_bodies_do_no_harm() {
    let rig = Rig::saying("ok");
    let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    for (field, status) in [("x", 200), ("tools", 400), ("tool_choice", 400), ("metadata", 400)] {
        let body = format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"x\"}}], \"{field}\": {deep}}}"
        );
        let reply = rig.read(request(Method::POST, "/v1/chat/completions", Body::from(body))).await;
        assert_eq!(reply.status.as_u16(), status, "{field} {}", reply.text);
    }
}

#[tokio::test]
async fn one_request_that_panics_fails_alone() {
    let rig = Rig::new(Scripted::new(|n, _| {
        if n == 0 { panic!("a bug") } else { Ok(super::rig::says("</think>ok")) }
    }));
    let reply = rig.read(post("/v1/chat/completions", &chat(&json!({})))).await;
    assert_eq!(
        (reply.status.as_u16(), reply.json()["error"]["code"].clone()),
        (500, json!("internal_error"))
    );
}
