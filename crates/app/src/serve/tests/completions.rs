//! `/v1/completions`.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::rig::{Rig, ids, says, stable};

#[tokio::test]
async fn whole_and_streamed() {
    let rig = Rig::saying("Once <think>upon</think> a time");
    let body = json!({"prompt": "Tell", "logprobs": 1});
    insta::assert_snapshot!(
        "completion_whole",
        stable(&rig.post("/v1/completions", &body).await.text)
    );
    let body = json!({"prompt": "Tell", "stream": true, "stream_options": {"include_usage": true}});
    insta::assert_snapshot!(
        "completion_streamed",
        stable(&rig.post("/v1/completions", &body).await.text)
    );
}

#[tokio::test]
async fn prompts_in_every_form() {
    let rig = Rig::saying("ok");
    let expected = ids("Tell<|im_end|>");
    for prompt in
        [json!("Tell<|im_end|>"), json!(["Tell<|im_end|>"]), json!(expected), json!([expected])]
    {
        let reply = rig.post("/v1/completions", &json!({"prompt": prompt})).await;
        assert_eq!(reply.status, StatusCode::OK, "{prompt}");
    }
    let seen = rig.engine.seen().requests;
    assert!(seen.iter().all(|request| request.prompt == expected));
    for prompt in [json!(null), json!(5), json!([]), json!([-1]), json!([[1], []]), json!([["a"]])]
    {
        let reply = rig.post("/v1/completions", &json!({"prompt": prompt})).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{prompt} {}", reply.text);
    }
}

#[tokio::test]
async fn several_prompts() {
    let rig = Rig::acting(|n| says(["a", "b", "c", "d", "e", "f"][n % 6]));
    let body = json!({"prompt": ["One", "Two and more", "Three"], "n": 2, "seed": 7, "echo": true});
    let reply = rig.post("/v1/completions", &body).await.json();
    let choices = reply["choices"].as_array().unwrap();
    let texts: Vec<&str> = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["Onea", "Oneb", "Two and morec", "Two and mored", "Threee", "Threef"]);
    assert!(choices.iter().enumerate().all(|(index, choice)| choice["index"] == index));
    let seen = rig.engine.seen().requests;
    for (index, request) in seen.iter().enumerate() {
        assert_eq!(request.prompt, ids(["One", "Two and more", "Three"][index / 2]));
        // Each prompt is answered as it would be alone.
        assert_eq!(request.sampler.seed, seen[index % 2].sampler.seed);
    }
    let tokens: usize = seen.iter().step_by(2).map(|request| request.prompt.len()).sum();
    assert_eq!(reply["usage"]["prompt_tokens"], tokens);
    // Streamed, the same, under the same numbers.
    let mut streamed_body = body.clone();
    streamed_body["stream"] = true.into();
    streamed_body["stream_options"] = json!({"include_usage": true});
    let events = rig.post("/v1/completions", &streamed_body).await.events();
    let of = |index: usize| -> String {
        let own = |event: &&Value| event["choices"][0]["index"] == index;
        events.iter().filter(own).filter_map(|event| event["choices"][0]["text"].as_str()).collect()
    };
    assert_eq!((0..6).map(of).collect::<Vec<_>>(), texts);
    assert_eq!(events.last().unwrap()["usage"], reply["usage"]);
    // Tokens are echoed as their text, control tokens too.
    let body = json!({"prompt": [ids("One<|im_end|>")], "echo": true});
    let reply = rig.post("/v1/completions", &body).await.json();
    assert_eq!(reply["choices"][0]["text"], "One<|im_end|>a");
    let many = json!({"prompt": vec!["x"; 100], "n": 2});
    let reply = rig.post("/v1/completions", &many).await;
    assert_eq!(
        (reply.status, &reply.json()["error"]["param"]),
        (StatusCode::BAD_REQUEST, &json!("prompt"))
    );
}
