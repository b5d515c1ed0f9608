//! Who may ask: API keys, and browsers that were talked into asking.
//!
//! A server on 127.0.0.1 is reachable from every page that a browser on the same machine shows. Two
//! checks keep such pages out: the `Host` header must be a name of this server (a page whose domain
//! was re-bound to 127.0.0.1 sends its own), and an `Origin` must be this server itself or one of
//! those that were allowed.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::ConstantTimeEq;
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer, ExposeHeaders};

use super::errors::ApiError;
use super::state::App;
use crate::telemetry::ErrorClass;

/// Routes that anyone may ask for: whether the server lives is no secret, and the page has no data.
const OPEN: [&str; 3] = ["/", "/health", "/ready"];

/// Who may ask.
#[derive(Clone, Default)]
pub struct Security {
    /// Keys, one of which a request must carry; anyone may ask if there are none.
    pub keys: Vec<String>,
    /// Further names of this server. `*` allows any.
    pub hosts: Vec<String>,
    /// Origins whose pages may ask. `*` allows any.
    pub origins: Vec<String>,
}

impl std::fmt::Debug for Security {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Security { keys, hosts, origins } = self;
        let keys = keys.len();
        f.debug_struct("Security")
            .field("keys", &keys)
            .field("hosts", hosts)
            .field("origins", origins)
            .finish()
    }
}

impl Security {
    fn any_origin(&self) -> bool {
        self.origins.iter().any(|origin| origin == "*")
    }

    fn check(&self, request: &Request) -> Result<(), ApiError> {
        let (headers, uri) = (request.headers(), request.uri());
        let Some(host) = host(headers, uri) else {
            let what =
                "the request has no Host header, which HTTP/1.1 asks for: name the server in it";
            return Err(ApiError::bad_request("host_missing", what));
        };
        if !self.knows_host(host) {
            let what = format!(
                "the host {:?} is not a name of this server; start it with --allowed-host to add it",
                shortened(host)
            );
            return Err(forbidden("host_not_allowed", what));
        }
        if let Some(origin) = headers.get(header::ORIGIN)
            && !self.knows_origin(origin, host)
        {
            let origin = shortened(origin.to_str().unwrap_or("?"));
            let what = format!(
                "pages of {origin:?} may not ask this server; start it with --cors-origin to allow it"
            );
            return Err(forbidden("origin_not_allowed", what));
        }
        let open = OPEN.contains(&uri.path()) || request.method() == Method::OPTIONS;
        if open || self.keys.is_empty() || self.knows_key(headers) {
            return Ok(());
        }
        Err(ApiError::new(
            ErrorClass::Auth,
            StatusCode::UNAUTHORIZED,
            "invalid_api_key",
            "a valid API key is needed: send it as \"Authorization: Bearer KEY\" or \"x-api-key: KEY\"",
        ))
    }

    /// Addresses are always fine: only a name can be re-bound.
    fn knows_host(&self, host: &str) -> bool {
        let name = without_port(host);
        let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
        let name = name.to_ascii_lowercase();
        let local = name == "localhost" || name.ends_with(".localhost");
        let listed = |known: &String| known == "*" || known.eq_ignore_ascii_case(&name);
        address || local || self.hosts.iter().any(listed)
    }

    fn knows_origin(&self, origin: &HeaderValue, host: &str) -> bool {
        let Ok(origin) = origin.to_str() else { return false };
        let same = || {
            let authority = origin.split_once("://").map(|(_, authority)| authority);
            authority.is_some_and(|authority| host == authority)
        };
        self.any_origin() || same() || self.origins.iter().any(|known| known == origin)
    }

    fn knows_key(&self, headers: &HeaderMap) -> bool {
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let bearer = bearer.and_then(|value| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
        });
        let given = [bearer, headers.get("x-api-key").and_then(|value| value.to_str().ok())];
        let mut known = false;
        for (given, key) in
            given.into_iter().flatten().flat_map(|g| self.keys.iter().map(move |k| (g, k)))
        {
            known |= bool::from(given.as_bytes().ct_eq(key.as_bytes()));
        }
        known
    }

    /// Answers preflights, and tells browsers what pages may read.
    pub fn cors(&self) -> CorsLayer {
        let origins = match self.any_origin() {
            true => AllowOrigin::any(),
            false => {
                AllowOrigin::list(self.origins.iter().filter_map(|o| HeaderValue::from_str(o).ok()))
            }
        };
        CorsLayer::new()
            .allow_origin(origins)
            .allow_methods(AllowMethods::list([Method::GET, Method::POST, Method::DELETE]))
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers(ExposeHeaders::any())
    }
}

/// The layer in front of all routes.
pub async fn guard(State(app): State<App>, request: Request, next: Next) -> Response {
    match app.security.check(&request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn host<'a>(headers: &'a HeaderMap, uri: &'a Uri) -> Option<&'a str> {
    // HTTP/2 has the host in its target.
    let header = headers.get(header::HOST).map(|host| host.to_str().unwrap_or("?"));
    header.or_else(|| uri.authority().map(|authority| authority.as_str()))
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && !name.ends_with(':') => {
            name
        }
        _ => host,
    }
}

fn forbidden(code: &'static str, what: String) -> ApiError {
    ApiError::new(ErrorClass::Auth, StatusCode::FORBIDDEN, code, what)
}

fn shortened(text: &str) -> String {
    text.chars().take(100).collect()
}
