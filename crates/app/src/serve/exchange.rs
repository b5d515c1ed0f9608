//! One request and its reply, from the first byte to the last.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

use super::ids;

/// Fields of the request that nothing read.
pub const IGNORED: HeaderName = HeaderName::from_static("x-th-ignored");
/// What was changed in the request.
pub const NOTES: HeaderName = HeaderName::from_static("x-th-notes");
/// What OpenAI's clients and Anthropic's look for.
const REQUEST_IDS: [HeaderName; 2] =
    [HeaderName::from_static("x-request-id"), HeaderName::from_static("request-id")];
/// The longest header that is written.
const MAX_HEADER: usize = 2048;

/// What all parts of the server know of a request. Handlers find it among the extensions.
#[derive(Clone)]
pub struct Exchange(Arc<Inner>);

struct Inner {
    id: String,
    arrived: Instant,
    remarks: Mutex<Remarks>,
}

#[derive(Default)]
struct Remarks {
    ignored: BTreeSet<String>,
    notes: Vec<String>,
}

impl Exchange {
    /// A request that has just arrived.
    pub fn begin() -> Exchange {
        let id = ids::fresh("req_");
        Exchange(Arc::new(Inner { id, arrived: Instant::now(), remarks: Mutex::default() }))
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// When its head had arrived.
    pub fn arrived(&self) -> Instant {
        self.0.arrived
    }

    /// The request's body.
    pub fn body(&self, _bytes: &[u8]) {}

    /// Fields that nothing reads.
    pub fn ignored(&self, paths: impl IntoIterator<Item = String>) {
        self.remarks(|remarks| remarks.ignored.extend(paths));
    }

    /// Something that was changed in the request.
    pub fn notes(&self, notes: impl IntoIterator<Item = String>) {
        self.remarks(|remarks| remarks.notes.extend(notes));
    }

    fn remarks(&self, change: impl FnOnce(&mut Remarks)) {
        change(&mut self.0.remarks.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn mark(&self, response: &mut Response) {
        let headers = response.headers_mut();
        if let Ok(id) = HeaderValue::try_from(self.id()) {
            REQUEST_IDS.map(|name| headers.insert(name, id.clone()));
        }
        self.remarks(|remarks| {
            let ignored: Vec<&str> = remarks.ignored.iter().map(String::as_str).collect();
            for (name, text) in [(IGNORED, ignored.join(", ")), (NOTES, remarks.notes.join("; "))] {
                if !text.is_empty() {
                    headers.insert(name, header_text(&text));
                }
            }
        });
    }
}

/// Text as it may stand in a header: printable ASCII, not too long.
fn header_text(text: &str) -> HeaderValue {
    let printable = |c: char| if matches!(c, ' '..='~') { c } else { '?' };
    let mut ascii: String = text.chars().map(printable).take(MAX_HEADER).collect();
    if text.chars().count() > MAX_HEADER {
        ascii.replace_range(MAX_HEADER - 3.., "...");
    }
    HeaderValue::try_from(ascii).unwrap_or(HeaderValue::from_static("?"))
}

/// The layer around all routes: begins the exchange and marks its reply.
pub async fn observe(mut request: Request, next: Next) -> Response {
    let exchange = Exchange::begin();
    request.extensions_mut().insert(exchange.clone());
    let mut response = next.run(request).await;
    exchange.mark(&mut response);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_hold_any_text() {
        assert_eq!(header_text("a, b\r\nc: é"), "a, b??c: ?");
        let long = header_text(&"x".repeat(5000));
        assert_eq!(long.len(), MAX_HEADER);
        assert!(long.to_str().unwrap().ends_with("x..."));
        assert_eq!(header_text(&"é".repeat(MAX_HEADER)).len(), MAX_HEADER);
    }
}
