//! Who may ask.

use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use serde_json::json;

use super::rig::{Rig, chat, says};
use super::scripted::Scripted;
use crate::serve::router::document;
use crate::serve::security::Security;
use crate::serve::state::Options;

fn rig(security: Security) -> Rig {
    Rig::with(Scripted::new(|_, _| Ok(says("</think>ok"))), Options::default(), security)
}

fn keys(keys: &[&str]) -> Security {
    Security { keys: keys.iter().map(|&key| key.to_owned()).collect(), ..Security::default() }
}

async fn ask(rig: &Rig, method: Method, path: &str, headers: &[(&str, &str)]) -> (u16, String) {
    let mut request = Request::builder().method(method).uri(path);
    if !headers.iter().any(|(name, _)| *name == "host") {
        request = request.header("host", "localhost");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = Body::from(chat(&json!({"prompt": "Hi", "content": "", "tokens": []})).to_string());
    let reply = rig.read(request.body(body).unwrap()).await;
    (reply.status.as_u16(), reply.text)
}

/// Every route there is: those of the document, and those that it leaves out.
fn routes() -> Vec<(Method, String)> {
    let document = serde_json::to_value(document()).unwrap();
    let mut routes = Vec::new();
    let parameter = regex::Regex::new(r"\{[^}]*\}").unwrap();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            let method: Method = method.to_uppercase().parse().unwrap();
            routes.push((method, parameter.replace_all(path, "x").into_owned()));
        }
    }
    for path in ["/metrics", "/traces", "/traces/x", "/traces/stats", "/openapi.json", "/nowhere"] {
        routes.push((Method::GET, path.to_owned()));
    }
    routes
}

#[tokio::test]
async fn keys_guard_every_route_but_health() {
    let rig = rig(keys(&["secret", "other"]));
    let routes = routes();
    assert!(routes.len() > 20, "{}", routes.len());
    for (method, path) in routes {
        let open = ["/health", "/ready"].contains(&path.as_str());
        let wrong: [&[(&str, &str)]; 7] = [
            &[],
            &[("authorization", "Bearer wrong")],
            &[("authorization", "Bearer ")],
            &[("authorization", "secret")],
            &[("authorization", "Basic secret")],
            &[("x-api-key", "secretx")],
            &[("x-api-key", "")],
        ];
        for headers in wrong {
            let (status, text) = ask(&rig, method.clone(), &path, headers).await;
            assert_eq!(status == 401, !open, "{method} {path} {headers:?}: {status}");
            assert!(!text.contains("secret"), "{text}");
        }
        let right: [&[(&str, &str)]; 4] = [
            &[("authorization", "Bearer secret")],
            &[("authorization", "bearer other")],
            &[("x-api-key", "secret")],
            &[("authorization", "Bearer wrong"), ("x-api-key", "other")],
        ];
        for headers in right {
            let (status, _) = ask(&rig, method.clone(), &path, headers).await;
            assert_ne!(status, 401, "{method} {path} {headers:?}");
        }
    }
}

#[tokio::test]
async fn foreign_hosts_are_refused() {
    let local = rig(Security::default());
    let status = |host: &'static str| {
        let local = &local;
        async move { ask(local, Method::POST, "/v1/chat/completions", &[("host", host)]).await.0 }
    };
    for fine in [
        "localhost",
        "localhost:8080",
        "LocalHost",
        "127.0.0.1:8080",
        "[::1]:8080",
        "::1",
        "192.168.1.7",
        "a.localhost",
    ] {
        assert_eq!(status(fine).await, 200, "{fine}");
    }
    for foreign in [
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "localhost@evil",
    ] {
        assert_eq!(status(foreign).await, 403, "{foreign}");
    }
    let named = rig(Security { hosts: vec!["box.lan".into()], ..Security::default() });
    assert_eq!(ask(&named, Method::GET, "/v1/models", &[("host", "Box.lan:80")]).await.0, 200);
    assert_eq!(ask(&named, Method::GET, "/v1/models", &[("host", "evil")]).await.0, 403);
}

#[tokio::test]
async fn a_request_without_a_host_is_told_so() {
    for rig in [rig(Security::default()), rig(keys(&["secret"]))] {
        for path in ["/v1/chat/completions", "/v1/messages", "/api/chat", "/health"] {
            let request = Request::builder().method(Method::POST).uri(path);
            let reply = rig.read(request.body(Body::empty()).unwrap()).await;
            assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{path}");
            assert!(reply.text.contains("no Host header"), "{}", reply.text);
            assert!(reply.text.contains("host_missing"), "{}", reply.text);
        }
    }
    // HTTP/2 has it in its target.
    let request = Request::builder().uri("http://localhost/health").body(Body::empty()).unwrap();
    assert_eq!(rig(Security::default()).read(request).await.status, StatusCode::OK);
}

#[tokio::test]
async fn foreign_origins_are_refused() {
    let local =
        rig(Security { origins: vec!["https://chat.example".into()], ..Security::default() });
    let host = ("host", "localhost:8080");
    for (origin, expected) in [
        ("http://localhost:8080", 200),
        ("https://chat.example", 200),
        ("http://localhost:3000", 403),
        ("https://evil.example", 403),
        ("https://chat.example.evil.example", 403),
        ("null", 403),
    ] {
        let headers = [host, ("origin", origin)];
        let (status, _) = ask(&local, Method::POST, "/v1/chat/completions", &headers).await;
        assert_eq!(status, expected, "{origin}");
    }
}

#[tokio::test]
async fn pages_may_read_what_their_origin_is_allowed() {
    let preflight = |security: Security, origin: &'static str| async move {
        let request = Request::builder()
            .method(Method::OPTIONS)
            .uri("/v1/chat/completions")
            .header("host", "localhost")
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,content-type");
        rig(security).read(request.body(Body::empty()).unwrap()).await
    };
    let allowed = Security { origins: vec!["https://chat.example".into()], ..keys(&["k"]) };
    let reply = preflight(allowed.clone(), "https://chat.example").await;
    assert_eq!(reply.status, StatusCode::OK);
    assert_eq!(reply.header("access-control-allow-origin"), "https://chat.example");
    assert!(reply.header("access-control-allow-headers").contains("authorization"));
    let reply = preflight(allowed, "https://evil.example").await;
    assert_eq!(reply.header("access-control-allow-origin"), "");
    let reply = preflight(Security::default(), "https://evil.example").await;
    assert_eq!(reply.header("access-control-allow-origin"), "");
    let any = Security { origins: vec!["*".into()], ..Security::default() };
    assert_eq!(
        preflight(any, "https://evil.example").await.header("access-control-allow-origin"),
        "*"
    );
}

#[test]
fn keys_are_never_shown() {
    assert!(!format!("{:?}", keys(&["hunter2"])).contains("hunter2"));
}
