//! `/v1/completions`.

use axum::http::StatusCode;
use serde_json::json;

use super::rig::{Rig, ids, stable};

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
    for prompt in [json!(null), json!(5), json!([]), json!([-1]), json!([[1], [2]]), json!([["a"]])]
    {
        let reply = rig.post("/v1/completions", &json!({"prompt": prompt})).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{prompt} {}", reply.text);
    }
}
