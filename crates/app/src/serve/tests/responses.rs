//! `/v1/responses`.

use axum::body::Body;
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

use super::rig::{Rig, TOK, ids, request, says, stable};
use super::scripted::Act;
use crate::text::detokenize::decode;

const ALL: &str = "I think.\n</think>\n\nFirst.\n<tool_call>\n<function=look>\n<parameter=at>\nit\n</parameter>\n\
</function>\n</tool_call>\nBetween.\n<tool_call>\n<function=look>\n</function>\n</tool_call>";

fn tools() -> Value {
    json!([{"type": "function", "name": "look", "parameters": {"type": "object"}}])
}

fn kinds(items: &Value) -> Vec<&str> {
    items.as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn whole_and_streamed_agree() {
    for size in [1, 3, 1000] {
        let rig = Rig::acting(move |_| super::rig::says_in(ALL, size));
        let body = json!({"input": "Hi", "tools": tools()});
        let reply = rig.post("/v1/responses", &body).await;
        assert_eq!(reply.status, StatusCode::OK, "{}", reply.text);
        let whole = reply.json();
        let order = ["reasoning", "message", "function_call", "message", "function_call"];
        assert_eq!(kinds(&whole["output"]), order);
        assert_eq!(whole["output"][1]["content"][0]["text"], "First.");
        assert_eq!(whole["output"][2]["arguments"], "{\"at\":\"it\"}");
        let body = json!({"input": "Hi", "tools": tools(), "stream": true});
        let streamed = rig.post("/v1/responses", &body).await;
        if size == 1000 {
            insta::assert_snapshot!("response_streamed", stable(&streamed.text));
        }
        let events = streamed.events();
        let numbers: Vec<u64> =
            events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.completed");
        let text = |value: &Value| stable(&value.to_string());
        assert_eq!(text(&last["response"]["output"]), text(&whole["output"]));
        // Every item that begins grows to what it is at its end.
        for (index, item) in whole["output"].as_array().unwrap().iter().enumerate() {
            let of = |kind: &str| -> Vec<&Value> {
                let about =
                    |event: &&Value| event["type"] == kind && event["output_index"] == index;
                events.iter().filter(about).collect()
            };
            assert_eq!(of("response.output_item.added").len(), 1);
            assert_eq!(of("response.output_item.done").len(), 1);
            let (kind, end) = match item["type"].as_str().unwrap() {
                "reasoning" => ("response.reasoning_text.delta", &item["content"][0]["text"]),
                "message" => ("response.output_text.delta", &item["content"][0]["text"]),
                _ => ("response.function_call_arguments.delta", &item["arguments"]),
            };
            let joined: String =
                of(kind).iter().map(|event| event["delta"].as_str().unwrap()).collect();
            assert_eq!(joined, end.as_str().unwrap());
        }
    }
}

#[tokio::test]
async fn conversations_go_on() {
    let rig = Rig::acting(|n| says(["</think>Blue.", "</think>Sky."][n % 2]));
    let first = rig
        .post("/v1/responses", &json!({"input": "Colour?", "instructions": "Be brief."}))
        .await
        .json();
    let id = first["id"].as_str().unwrap();
    let body = json!({"input": [{"role": "user", "content": "Why?"}], "previous_response_id": id});
    let second = rig.post("/v1/responses", &body).await.json();
    assert_eq!(second["previous_response_id"], id);
    let prompt = decode(&**TOK, &rig.engine.seen().requests[1].prompt, true);
    let turns: Vec<&str> = prompt.split("<|im_start|>").skip(1).collect();
    assert!(
        turns[0].contains("Colour?") && turns[1].contains("Blue.") && turns[2].contains("Why?"),
        "{prompt}"
    );
    assert!(!prompt.contains("Be brief."), "instructions don't go on");
    let path = format!("/v1/responses/{id}");
    assert_eq!(rig.get(&path).await.json(), first);
    let items = rig.get(&format!("{path}/input_items")).await.json();
    assert_eq!(items["data"][0]["content"][0]["text"], "Colour?");
    let gone = rig.read(request(Method::DELETE, &path, Body::empty())).await;
    assert_eq!(gone.json()["deleted"], true);
    for reply in [
        rig.get(&path).await,
        rig.read(request(Method::DELETE, &path, Body::empty())).await,
        rig.post("/v1/responses", &body).await,
    ] {
        assert_eq!(
            (reply.status, reply.json()["error"]["code"].clone()),
            (StatusCode::NOT_FOUND, json!("response_not_found"))
        );
    }
    let unkept = rig.post("/v1/responses", &json!({"input": "x", "store": false})).await.json();
    let path = format!("/v1/responses/{}", unkept["id"].as_str().unwrap());
    assert_eq!(rig.get(&path).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn what_agents_send() {
    let rig = Rig::saying("</think>ok");
    let input = json!([
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Do it."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": null},
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{\"command\":[\"ls\"]}"},
        {"type": "function_call_output", "call_id": "c1", "output": "files"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
        {"type": "web_search_call", "id": "w"},
        {"role": "user", "content": "More."},
    ]);
    let body = json!({
        "model": "scripted", "instructions": "You are an agent.", "input": input,
        "tools": [
            {"type": "function", "name": "shell", "description": "Runs", "strict": false, "parameters": {"type": "object"}},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
            {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []},
        ],
        "tool_choice": "auto", "parallel_tool_calls": false, "reasoning": {"effort": "medium", "summary": "auto"},
        "store": false, "stream": true, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
    });
    let reply = rig.post("/v1/responses", &body).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.text);
    assert_eq!(reply.header("x-th-ignored"), "");
    let notes = reply.header("x-th-notes");
    for left_out in ["custom", "web_search", "namespace", "web_search_call"] {
        assert!(notes.contains(left_out), "{notes}");
    }
    let prompt = decode(&**TOK, &rig.engine.seen().requests[0].prompt, true);
    for part in [
        "You are an agent.",
        "Rules.",
        "Do it.",
        "Hm.",
        "\"command\": [\"ls\"]",
        "files",
        "Done.",
        "More.",
    ] {
        assert!(prompt.contains(part), "{part}: {prompt}");
    }
}

#[tokio::test]
async fn ends_have_their_names() {
    let rig = Rig::saying("</think>one two three four");
    let cut =
        rig.post("/v1/responses", &json!({"input": "x", "max_output_tokens": 3})).await.json();
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let streamed = rig
        .post("/v1/responses", &json!({"input": "x", "max_output_tokens": 3, "stream": true}))
        .await;
    assert_eq!(streamed.events().last().unwrap()["type"], "response.incomplete");
    let rig = Rig::acting(|_| vec![Act::Round(ids("</think>one")), Act::Fail]);
    let streamed = rig.post("/v1/responses", &json!({"input": "x", "stream": true})).await;
    let events = streamed.events();
    assert_eq!(events.last().unwrap()["type"], "response.failed");
    assert!(!streamed.text.contains("response.completed"));
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": 5}), "input"),
        (json!({"input": [5]}), "input[0]"),
        (json!({"input": [{"type": "message", "role": "tool", "content": "x"}]}), "input[0].role"),
        (json!({"input": [{"type": "function_call", "call_id": "1"}]}), "input[0]"),
        (json!({"input": [{"type": "item_reference", "id": "1"}]}), "input[0]"),
        (json!({"input": "x", "truncation": "auto"}), "truncation"),
        (json!({"input": "x", "background": true}), "background"),
        (json!({"input": "x", "max_output_tokens": 0}), "max_output_tokens"),
    ] {
        let reply = rig.post("/v1/responses", &body).await;
        assert_eq!(
            (reply.status, reply.json()["error"]["param"].clone()),
            (StatusCode::BAD_REQUEST, json!(param)),
            "{body}"
        );
    }
}
