//! Loading, failing to, releasing, leaving.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use axum::http::StatusCode;
use serde_json::json;

use super::rig::{Rig, eventually, says, served};
use super::scripted::{Act, Scripted};
use crate::serve::lifecycle::{Lifecycle, Load, Loading, Phase};
use crate::serve::security::Security;
use crate::serve::state::Options;

fn engine() -> Arc<Scripted> {
    Scripted::new(|_, _| Ok(says("</think>ok")))
}

fn rig(engine: &Arc<Scripted>, lifecycle: Arc<Lifecycle>) -> Rig {
    Rig::around(Arc::clone(engine), Options::default(), Security::default(), lifecycle)
}

#[tokio::test]
async fn requests_during_a_load_are_told_how_far_it_is() {
    let (go, wait) = mpsc::channel::<()>();
    let (engine, wait) = (engine(), Mutex::new(wait));
    let for_load = Arc::clone(&engine);
    let load: Load = Arc::new(move |report| {
        report(Loading {
            phase: "loading the model".into(),
            done_bytes: 3 << 20,
            total_bytes: 4 << 20,
        });
        let _ = wait.lock().unwrap().recv();
        Ok(served(Arc::clone(&for_load)))
    });
    let rig = rig(&engine, Lifecycle::start(load));
    eventually(|| matches!(rig.app.phase(), Phase::Loading(Loading { done_bytes: 3_145_728, .. })))
        .await;
    let reply = rig.chat(&json!({})).await;
    assert_eq!((reply.status.as_u16(), reply.header("retry-after")), (503, "5"));
    assert_eq!(reply.json()["error"]["code"], "model_loading");
    assert!(reply.text.contains("75 %"), "{}", reply.text);
    let health = rig.get("/health").await;
    assert_eq!(health.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        health.json(),
        json!({"status": "loading", "reason": "loading the model: 3 of 4 MiB"})
    );
    go.send(()).unwrap();
    eventually(|| matches!(rig.app.phase(), Phase::Ready(_))).await;
    assert_eq!(rig.chat(&json!({})).await.status, StatusCode::OK);
    assert_eq!(rig.get("/ready").await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_load_that_failed_says_so_and_names_no_file() {
    let load: Load = Arc::new(|_| anyhow::bail!("/home/user/secret.gguf: not a model"));
    let rig = rig(&engine(), Lifecycle::start(load));
    eventually(|| matches!(rig.app.phase(), Phase::Failed(_))).await;
    for reply in [rig.chat(&json!({})).await, rig.get("/health").await, rig.get("/status").await] {
        assert!(!reply.text.contains("secret"), "{}", reply.text);
        assert!(reply.text.contains("fail"), "{}", reply.text);
    }
    assert_eq!(rig.get("/health").await.status, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn an_idle_model_is_released_and_loaded_again() {
    let (engine, loads) = (engine(), Arc::new(AtomicUsize::new(0)));
    let (for_load, count) = (Arc::clone(&engine), Arc::clone(&loads));
    let load: Load = Arc::new(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        Ok(served(Arc::clone(&for_load)))
    });
    let lifecycle = Lifecycle::start(load);
    lifecycle.settled().await;
    assert!(!lifecycle.release_if_idle(Duration::from_secs(1)), "it was loaded a moment ago");
    let rig = rig(&engine, Arc::clone(&lifecycle));
    let held = lifecycle.model().await.unwrap();
    // Long enough that a busy machine doesn't spend it between two lines.
    let idle = Duration::from_millis(500);
    std::thread::sleep(idle);
    assert!(!lifecycle.release_if_idle(Duration::from_secs(60)), "too early");
    assert!(!lifecycle.release_if_idle(idle), "a request holds it");
    drop(held);
    assert!(!lifecycle.release_if_idle(idle), "idle since a moment ago");
    std::thread::sleep(idle);
    assert!(lifecycle.release_if_idle(idle));
    assert!(!lifecycle.release_if_idle(idle), "only once");
    // Nothing holds the model any more but the one who tests it.
    eventually(|| Arc::strong_count(&engine) == 3).await; // the test, the rig and the loader
    let health = rig.get("/health").await;
    assert_eq!(
        (health.status, health.json()["status"].clone()),
        (StatusCode::OK, json!("released"))
    );
    assert_eq!(rig.get("/ready").await.status, StatusCode::SERVICE_UNAVAILABLE);
    // What is known of it can be asked, without loading it.
    for path in ["/v1/models", "/api/tags", "/status"] {
        assert_eq!(rig.get(path).await.status, StatusCode::OK, "{path}");
    }
    let count = rig.post("/v1/messages/count_tokens", &super::rig::chat(&json!({}))).await;
    assert_eq!(count.status, StatusCode::OK);
    assert_eq!(rig.chat(&json!({"model": "no-such"})).await.status, StatusCode::NOT_FOUND);
    assert!(matches!(rig.app.phase(), Phase::Released));
    // Many requests at once load it once.
    let fields = json!({});
    let (a, b) = tokio::join!(rig.chat(&fields), rig.chat(&fields));
    assert_eq!((a.status, b.status), (StatusCode::OK, StatusCode::OK));
    assert_eq!(loads.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_server_that_leaves_ends_what_runs_and_takes_nothing_more() {
    let gone = Arc::new(AtomicBool::new(false));
    let engine = Scripted::new(|_, _| {
        let mut acts =
            vec![Act::Round(super::rig::ids("one")), Act::Wait(Duration::from_millis(60))];
        acts.extend(says(" two"));
        Ok(acts)
    });
    let lifecycle = Lifecycle::ready(served(Arc::clone(&engine)));
    let rig = rig(&engine, Arc::clone(&lifecycle));
    let fields = json!({"stream": true, "enable_thinking": false});
    let running = rig.chat(&fields);
    let leaving = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        lifecycle.drain();
        gone.store(true, Ordering::SeqCst);
        let reply = rig.chat(&json!({})).await;
        assert_eq!(
            (reply.status.as_u16(), reply.json()["error"]["code"].clone()),
            (503, json!("draining"))
        );
        assert_eq!(rig.get("/health").await.json()["status"], "draining");
    };
    let (reply, ()) = tokio::join!(running, leaving);
    assert!(gone.load(Ordering::SeqCst));
    assert!(reply.text.contains(" two") && reply.text.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn the_status_tells_what_there_is() {
    let engine = engine();
    let rig = rig(&engine, Lifecycle::ready(served(Arc::clone(&engine))));
    let status = rig.get("/status").await.json();
    assert_eq!(status["model"]["name"], "scripted");
    assert_eq!(status["model"]["context"], 1000);
    assert_eq!(status["sampling_defaults"]["top_k"], 20);
    assert_eq!((&status["lanes"]["total"], &status["queue"]["limit"]), (&json!(4), &json!(16)));
    assert_eq!(status["device"]["name"], "a script");
    let metrics = rig.get("/metrics").await;
    assert_eq!(metrics.status, StatusCode::OK);
}
