//! `/v1/messages`.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::rig::{Rig, TOK, chat, stable};
use crate::text::detokenize::decode;

const ALL: &str = "I think.\n</think>\n\nSome text.\n<tool_call>\n<function=look>\n<parameter=at>\nit\n</parameter>\n\
</function>\n</tool_call>";

fn body(fields: &Value) -> Value {
    let mut body = chat(&json!({
        "max_tokens": 100,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "look", "description": "Looks", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}],
    }));
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[tokio::test]
async fn whole_and_streamed() {
    let rig = Rig::saying(ALL);
    let reply = rig.post("/v1/messages", &body(&json!({}))).await;
    assert_eq!((reply.status, reply.header("x-th-ignored")), (StatusCode::OK, ""));
    insta::assert_snapshot!("message_whole", stable(&reply.text));
    let reply = rig.post("/v1/messages?beta=true", &body(&json!({"stream": true}))).await;
    insta::assert_snapshot!("message_streamed", stable(&reply.text));
}

#[tokio::test]
async fn thinking_is_off_unless_asked_for() {
    let rig = Rig::saying("The answer.");
    for thinking in [Value::Null, json!({"type": "disabled"})] {
        let reply = rig.post("/v1/messages", &body(&json!({"thinking": thinking}))).await.json();
        assert_eq!(reply["content"], json!([{"type": "text", "text": "The answer."}]));
    }
    let reply = rig.post("/v1/messages", &body(&json!({"thinking": {"type": "perhaps"}}))).await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn prompts_are_counted_as_they_are_read() {
    let rig = Rig::saying("</think>ok");
    let counted = rig.post("/v1/messages/count_tokens?beta=true", &body(&json!({}))).await.json();
    let reply = rig.post("/v1/messages", &body(&json!({}))).await.json();
    let usage = &reply["usage"];
    let sum = usage["input_tokens"].as_u64().unwrap()
        + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(counted["input_tokens"], sum);
    assert_eq!(sum, rig.engine.seen().requests[0].prompt.len() as u64);
    assert_eq!(usage["cache_read_input_tokens"], 3);
}

#[tokio::test]
async fn a_line_that_differs_each_time_does_not_reach_the_model() {
    let rig = Rig::saying("ok");
    for cch in ["1", "2"] {
        let system = json!([
            {"type": "text", "text": format!("x-anthropic-billing-header: cc_version=2; cch={cch};")},
            {"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}},
        ]);
        rig.post("/v1/messages", &body(&json!({"system": system}))).await;
    }
    let seen = rig.engine.seen().requests;
    assert_eq!(seen[0].prompt, seen[1].prompt);
    let user = json!([{"role": "user", "content": "x-anthropic-billing-header: mine"}]);
    rig.post("/v1/messages", &body(&json!({"messages": user}))).await;
    let prompt = decode(&**TOK, &rig.engine.seen().requests[2].prompt, true);
    assert!(prompt.contains("x-anthropic-billing-header: mine"));
}

#[tokio::test]
async fn conversations_with_tools() {
    let rig = Rig::saying("ok");
    let messages = json!([
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I should.", "signature": "x"},
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "it"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a cat"}]},
            {"type": "tool_result", "tool_use_id": "t2", "content": "gone", "is_error": true},
            {"type": "text", "text": "So?"},
        ]},
    ]);
    let reply = rig.post("/v1/messages", &body(&json!({"messages": messages}))).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.text);
    let prompt = decode(&**TOK, &rig.engine.seen().requests[0].prompt, true);
    let turns: Vec<&str> = prompt.split("<|im_start|>").map(|turn| turn.trim()).collect();
    assert!(turns[3].starts_with("assistant\n<think>\nI should.\n</think>"), "{prompt}");
    assert!(turns[3].contains("\"at\": \"it\""), "{prompt}");
    assert_eq!(
        turns[4..7],
        ["tool\na cat<|im_end|>", "tool\nError: gone<|im_end|>", "user\nSo?<|im_end|>"]
    );
    for bad in [
        json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        json!([{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": {}}]}]),
        json!([{"role": "robot", "content": "x"}]),
        json!([{"role": "user", "content": 5}]),
        json!([{"role": "user", "content": [{"type": "text"}]}]),
    ] {
        let reply = rig.post("/v1/messages", &body(&json!({"messages": bad}))).await;
        assert_eq!(
            (reply.status.as_u16(), reply.json()["error"]["type"].clone()),
            (400, json!("invalid_request_error")),
            "{bad}"
        );
    }
}

#[tokio::test]
async fn ends_have_their_names() {
    let rig = Rig::saying("one two three four");
    let reason = |fields: Value| {
        let rig = &rig;
        async move {
            let reply = rig.post("/v1/messages", &body(&fields)).await.json();
            (reply["stop_reason"].clone(), reply["stop_sequence"].clone())
        }
    };
    let off = json!({"type": "disabled"});
    assert_eq!(reason(json!({"thinking": off})).await, (json!("end_turn"), Value::Null));
    let stopped = reason(json!({"thinking": off, "stop_sequences": [" three"]})).await;
    assert_eq!(stopped, (json!("stop_sequence"), json!(" three")));
    assert_eq!(reason(json!({"max_tokens": 2})).await, (json!("max_tokens"), Value::Null));
}
