//! Ollama's routes.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::rig::{Rig, chat, stable};

const CALL: &str = "Hm.</think>\n\nLooking.\n<tool_call>\n<function=look>\n<parameter=at>\nit\n</parameter>\n</function>\n</tool_call>";

#[tokio::test]
async fn chats() {
    let rig = Rig::saying(CALL);
    let tools = json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]);
    let body = chat(&json!({"model": "scripted:latest", "tools": tools, "stream": false}));
    let reply = rig.post("/api/chat", &body).await.json();
    let message = &reply["message"];
    assert_eq!((&message["content"], &message["thinking"]), (&json!("Looking."), &json!("Hm.")));
    assert_eq!(
        message["tool_calls"][0]["function"],
        json!({"name": "look", "arguments": {"at": "it"}})
    );
    assert_eq!((&reply["done"], &reply["done_reason"]), (&json!(true), &json!("stop")));
    assert_eq!(reply["eval_duration"], 40_000_000);
    let streamed = rig.post("/api/chat", &chat(&json!({"tools": tools}))).await;
    assert_eq!(streamed.header("content-type"), "application/x-ndjson");
    insta::assert_snapshot!("ollama_chat", stable(&streamed.text));
}

#[tokio::test]
async fn a_request_without_words_loads_the_model() {
    let rig = Rig::saying("ok");
    for (path, body) in
        [("/api/chat", json!({"messages": []})), ("/api/generate", json!({"model": "scripted"}))]
    {
        let reply = rig.post(path, &body).await.json();
        assert_eq!((&reply["done"], &reply["done_reason"]), (&json!(true), &json!("load")));
    }
    assert!(rig.engine.seen().requests.is_empty());
}

#[tokio::test]
async fn generations() {
    let rig = Rig::saying("</think>ok");
    let prompt = |raw: bool| {
        json!({"prompt": "Hi", "raw": raw, "stream": false, "system": "Be brief.",
        "options": {"num_predict": 5, "seed": 7, "temperature": 0, "repeat_penalty": 1.5, "num_ctx": 4096}})
    };
    let reply = rig.post("/api/generate", &prompt(false)).await;
    assert_eq!(reply.json()["response"], "ok");
    assert_eq!(reply.header("x-th-ignored"), "options.num_ctx");
    assert!(reply.header("x-th-notes").contains("seed changes nothing at temperature 0"));
    rig.post("/api/generate", &prompt(true)).await;
    let seen = rig.engine.seen().requests;
    assert_eq!(
        (seen[0].max_tokens, seen[0].sampler.seed, seen[0].sampler.repetition_penalty),
        (5, 7, 1.5)
    );
    assert!(seen[0].prompt.len() > seen[1].prompt.len());
}

#[tokio::test]
async fn what_there_is() {
    let rig = Rig::saying("ok");
    assert_eq!(rig.get("/api/tags").await.json()["models"][0]["name"], "scripted");
    assert_eq!(rig.get("/api/ps").await.json()["models"][0]["context_length"], 1000);
    let shown = rig.post("/api/show", &json!({"model": "scripted:latest"})).await.json();
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
    assert_eq!(shown["model_info"]["th-engine.context_length"], 1000);
    let reply = rig.post("/api/show", &json!({"model": "other"})).await;
    assert_eq!((reply.status, reply.json()["error"].is_string()), (StatusCode::NOT_FOUND, true));
    let version: Value = rig.get("/api/version").await.json();
    assert!(version["version"].as_str().unwrap().starts_with(char::is_numeric));
}
