//! What telemetry is told.

use serde_json::json;

use super::rig::{Rig, eventually, ids, post, says};
use super::scripted::Act;
use axum::http::Method;
use http_body_util::BodyExt;

fn count(rig: &Rig, endpoint: &str, outcome: &str) -> u64 {
    let text = rig.app.recorder.metrics().text();
    let wanted = |line: &&str| {
        line.starts_with("th_engine_requests_total{")
            && line.contains(&format!("endpoint=\"{endpoint}\""))
            && line.contains(&format!("outcome=\"{outcome}\""))
    };
    text.lines().find(wanted).map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

#[tokio::test]
async fn every_request_is_counted_once_by_what_became_of_it() {
    let rig = Rig::acting(|n| match n {
        0 | 1 => says("Hm.</think>\n\nok"),
        2 => vec![Act::Round(ids("one")), Act::Fail],
        _ => vec![Act::Round(ids("one")), Act::Hang],
    });
    let chat = "/v1/chat/completions";
    rig.chat(&json!({})).await;
    rig.chat(&json!({"stream": true})).await;
    assert_eq!(count(&rig, chat, "ok"), 2);
    rig.chat(&json!({"stream": true})).await;
    assert_eq!(count(&rig, chat, "server_error"), 1);
    let mut body = rig
        .send(post("/v1/messages", &super::rig::chat(&json!({"stream": true}))))
        .await
        .into_body();
    body.frame().await.unwrap().unwrap();
    drop(body);
    eventually(|| count(&rig, "/v1/messages", "cancelled") == 1).await;
    rig.chat(&json!({"model": "no-such"})).await;
    assert_eq!(count(&rig, chat, "not_found"), 1);
    rig.chat(&json!({"n": 0})).await;
    assert_eq!(count(&rig, chat, "bad_request"), 1);
    let foreign =
        axum::http::Request::builder().method(Method::POST).uri(chat).header("host", "evil");
    rig.read(foreign.body(axum::body::Body::empty()).unwrap()).await;
    assert_eq!(count(&rig, chat, "auth"), 1);
    assert_eq!(count(&rig, chat, "ok"), 2);
    // Those that look at the server are not counted.
    rig.get("/health").await;
    rig.get("/v1/models").await;
    assert_eq!(count(&rig, "/health", "ok") + count(&rig, "/v1/models", "ok"), 0);
    let text = rig.app.recorder.metrics().text();
    let tokens = |kind: &str| -> f64 {
        let wanted = |line: &&str| {
            line.starts_with("th_engine_tokens_total{")
                && line.contains(&format!("kind=\"{kind}\""))
        };
        text.lines().find(wanted).unwrap().rsplit(' ').next().unwrap().parse().unwrap()
    };
    let said = ids("Hm.</think>\n\nok").len() as f64 + 1.0;
    assert!(tokens("output") >= 2.0 * said, "{text}");
    assert!(tokens("reasoning") >= 4.0, "{text}");
}

#[tokio::test]
async fn a_trace_goes_on_from_its_caller() {
    let rig = Rig::saying("</think>ok");
    let mut request = post("/v1/chat/completions", &super::rig::chat(&json!({})));
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    request.headers_mut().insert("traceparent", parent.parse().unwrap());
    let reply = rig.read(request).await;
    assert_eq!(reply.header("x-th-trace-id"), "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_ne!(
        rig.chat(&json!({})).await.header("x-th-trace-id"),
        rig.chat(&json!({})).await.header("x-th-trace-id")
    );
}
