use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::middleware;
use serde_json::Value;
use tower::ServiceExt;

use super::*;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::record::{ErrorClass, Record, Span};
use crate::telemetry::recorder::RecorderOptions;
use crate::telemetry::testing::{Scratch, answered, failed};
use crate::telemetry::trace_context::{TRACE_ID_HEADER, propagate};

fn started() -> (Scratch, Arc<Recorder>) {
    let scratch = Scratch::new();
    let options = RecorderOptions { store: Some(scratch.store()), ..RecorderOptions::default() };
    (scratch, Recorder::start(options, Arc::new(Metrics::new())))
}

fn server(records: &[Record]) -> (Scratch, Router) {
    let (scratch, recorder) = started();
    records.iter().for_each(|record| recorder.record(record.clone()));
    assert!(recorder.flush(Duration::from_secs(20)));
    (scratch, routes(recorder).layer(middleware::from_fn(propagate)))
}

async fn get_text(router: &Router, uri: &str) -> (StatusCode, String) {
    let request = Request::get(uri).body(Body::empty()).unwrap();
    let response = router.clone().oneshot(request).await.unwrap();
    let id = response.headers().get(TRACE_ID_HEADER).unwrap().to_str().unwrap().to_owned();
    assert_eq!(id.len(), 32);
    let status = response.status();
    let body = axum::body::to_bytes(response.into_body(), 1 << 24).await.unwrap();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

async fn get_json(router: &Router, uri: &str) -> Value {
    let (status, text) = get_text(router, uri).await;
    assert_eq!(status, StatusCode::OK, "{uri}: {text}");
    serde_json::from_str(&text).unwrap()
}

#[tokio::test]
async fn lists_come_in_pages() {
    let now = now_us();
    let records: Vec<Record> = (0..25).map(|i| answered(now - 1_000_000 + i)).collect();
    let (_scratch, router) = server(&records);
    let mut ids: Vec<Value> = Vec::new();
    let mut uri = "/traces?limit=10".to_owned();
    let mut pages = 0;
    loop {
        let page = get_json(&router, &uri).await;
        ids.extend(page["traces"].as_array().unwrap().iter().map(|t| t["span_id"].clone()));
        pages += 1;
        match page["next_before"].as_u64() {
            Some(before) => uri = format!("/traces?limit=10&before={before}"),
            None => break,
        }
    }
    let expected: Vec<Value> = records.iter().rev().map(|r| r.span_id.to_string().into()).collect();
    assert_eq!((pages, ids), (3, expected));
}

#[tokio::test]
async fn a_trace_has_its_waterfall() {
    let part = |name: &str, start_us, duration_us| Span {
        name: name.into(),
        start_us,
        duration_us,
        ..Span::default()
    };
    let decode = Span { children: vec![part("rounds", 20, 30)], ..part("decode", 20, 30) };
    let record = Record { spans: vec![part("queue", 0, 20), decode], ..answered(now_us()) };
    let (_scratch, router) = server(std::slice::from_ref(&record));
    for id in [record.trace_id.to_string(), record.span_id.to_string()] {
        let trace = get_json(&router, &format!("/traces/{id}")).await;
        let request = &trace["requests"][0];
        assert_eq!(request["spans"][1]["children"][0]["name"], "rounds");
        assert_eq!(request["tokens"]["cached"], 64);
        assert_eq!(serde_json::from_value::<Record>(request.clone()).unwrap(), record);
    }
}

#[tokio::test]
async fn statistics_by_model_and_client() {
    let now = now_us();
    let old = answered(now - 2 * 3600 * 1_000_000);
    let recent = [answered(now - 1_000_000), failed(now - 2_000_000, ErrorClass::Timeout), old];
    let (_scratch, router) = server(&recent);
    let body = get_json(&router, "/traces/stats?intervals=6").await;
    let total = &body["stats"]["total"];
    assert_eq!((&total["requests"], &total["error_rate"]), (&2.into(), &0.5.into()));
    assert_eq!(total["first_token_ms"]["p50"], 120.0);
    assert_eq!(body["stats"]["models"]["th-tiny"]["requests"], 2);
    assert_eq!(body["stats"]["clients"]["curl"]["errors"]["timeout"], 1);
    assert_eq!(body["stats"]["series"].as_array().unwrap().len(), 6);
    let all = get_json(&router, "/traces/stats?since=1d&outcome=ok").await;
    assert_eq!(all["stats"]["total"]["requests"], 2);
}

#[tokio::test]
async fn bad_questions_get_clear_answers() {
    let (_scratch, router) = server(&[answered(now_us())]);
    for (uri, status) in [
        ("/traces?limit=1001", 400),
        ("/traces?limit=-1", 400),
        ("/traces?colour=red", 400),
        ("/traces?since=yesterday", 400),
        ("/traces/stats?intervals=100000", 400),
        ("/traces/4bf92f3577b34da6a3ce929d0e0e4736", 404),
        ("/traces/..%2F..%2Fetc", 404),
        ("/traces/%27%20OR%201=1", 404),
    ] {
        assert_eq!(get_text(&router, uri).await.0.as_u16(), status, "{uri}");
    }
    let off = Recorder::start(RecorderOptions::default(), Arc::new(Metrics::new()));
    let router = routes(off).layer(middleware::from_fn(propagate));
    for uri in ["/traces", "/traces/stats", "/traces/4bf92f3577b34da6a3ce929d0e0e4736"] {
        assert_eq!(get_text(&router, uri).await.0, StatusCode::NOT_FOUND);
    }
    assert_eq!(get_text(&router, "/metrics").await.0, StatusCode::OK);
}

#[tokio::test]
async fn what_was_answered_just_now_is_read() {
    let (_scratch, recorder) = started();
    let router = routes(Arc::clone(&recorder)).layer(middleware::from_fn(propagate));
    for _ in 0..5 {
        let record = answered(now_us());
        recorder.record(record.clone());
        get_json(&router, &format!("/traces/{}", record.span_id)).await;
    }
}

#[tokio::test]
async fn metrics_are_text() {
    let (_scratch, router) = server(&[answered(now_us())]);
    let (status, text) = get_text(&router, "/metrics").await;
    assert_eq!(status, StatusCode::OK);
    assert!(text.contains("# TYPE th_engine_requests_total counter"), "{text}");
    assert!(text.contains("th_engine_traces_written_total 1\n"), "{text}");
}

#[tokio::test]
async fn the_document_names_every_route() {
    let record = answered(now_us());
    let (_scratch, router) = server(std::slice::from_ref(&record));
    let document = serde_json::to_value(document()).unwrap();
    let paths = document["paths"].as_object().unwrap();
    assert_eq!(paths.len(), 4);
    for path in paths.keys() {
        let uri = path.replace("{id}", &record.span_id.to_string());
        assert_eq!(get_text(&router, &uri).await.0, StatusCode::OK, "{path}");
    }
    let parameters = document["paths"]["/traces"]["get"]["parameters"].as_array().unwrap();
    assert!(parameters.iter().any(|p| p["name"] == "since" && p["in"] == "query"));
}
