//! The page at `/`: chat and observability in one document without a build step, and without
//! anything from elsewhere.
//!
//! Its parts are files of their own so that one can read them; they are put together here. The
//! content security policy names the hashes of the only script and the only style sheet, so that
//! nothing that a model writes can ever run.

use std::sync::LazyLock;

use axum::Router;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use base64::Engine;
use sha2::{Digest, Sha256};

const DOCUMENT: &str = include_str!("index.html");
const STYLE: &str = include_str!("style.css");
/// The script's parts, in order.
const SCRIPTS: [&str; 6] = [
    include_str!("core.js"),
    include_str!("markdown.js"),
    include_str!("charts.js"),
    include_str!("chat.js"),
    include_str!("watch.js"),
    include_str!("main.js"),
];

/// The route. It holds no data, so it needs no key: the page asks for one where the server does.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new().route("/", get(page))
}

struct Page {
    document: String,
    policy: String,
}

static PAGE: LazyLock<Page> = LazyLock::new(|| {
    let script = script();
    Page {
        document: DOCUMENT.replacen("{{style}}", STYLE, 1).replacen("{{script}}", &script, 1),
        policy: format!(
            "default-src 'none'; script-src '{}'; style-src '{}'; connect-src 'self'; img-src data:; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            source(&script),
            source(STYLE)
        ),
    }
});

fn script() -> String {
    format!("\"use strict\";\n(() => {{\n{}\n}})();\n", SCRIPTS.join("\n"))
}

/// How a policy names a text.
fn source(text: &str) -> String {
    let digest = base64::engine::general_purpose::STANDARD.encode(Sha256::digest(text));
    format!("sha256-{digest}")
}

async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, PAGE.policy.as_str()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE.document.as_str()).into_response()
}

#[cfg(test)]
#[path = "page_tests.rs"]
mod tests;
