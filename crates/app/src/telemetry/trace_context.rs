//! W3C trace context: whose trace a request belongs to, in and out.
//!
//! A caller's `traceparent` is taken as it is if it is right to the letter, and ignored otherwise:
//! a broken one must not break the request.

use std::fmt;
use std::str::FromStr;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use serde::{Deserialize, Serialize};

/// Names the trace on every reply.
pub const TRACE_ID_HEADER: HeaderName = HeaderName::from_static("x-th-trace-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");
const TRACERESPONSE: HeaderName = HeaderName::from_static("traceresponse");
/// What the recommendation makes everyone carry.
const MAX_STATE_BYTES: usize = 512;
const MAX_STATE_MEMBERS: usize = 32;

/// An id of `N` bytes, in lower-case hexadecimal; zero is no id.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id<const N: usize>([u8; N]);

/// Names a trace.
pub type TraceId = Id<16>;
/// Names a span.
pub type SpanId = Id<8>;

impl<const N: usize> Id<N> {
    /// One that nothing has.
    pub fn random() -> Id<N> {
        let mut bytes = [0; N];
        // Without the system's randomness ids come from the clock and a counter: a request is not
        // worth losing for them.
        if getrandom::fill(&mut bytes).is_err() || bytes == [0; N] {
            use std::sync::atomic::{AtomicU64, Ordering};
            static COUNT: AtomicU64 = AtomicU64::new(1);
            let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
            let count = u128::from(COUNT.fetch_add(1, Ordering::Relaxed));
            bytes.copy_from_slice(&(now.wrapping_add(count << 64) | 1).to_le_bytes()[..N]);
        }
        Id(bytes)
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8; N] {
        &self.0
    }

    /// Whether it names nothing.
    pub fn is_zero(&self) -> bool {
        self.0 == [0; N]
    }
}

impl<const N: usize> Default for Id<N> {
    fn default() -> Id<N> {
        Id([0; N])
    }
}

impl<const N: usize> fmt::Display for Id<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl<const N: usize> fmt::Debug for Id<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text that is no id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not {0} lower-case hexadecimal digits")]
pub struct NotAnId(usize);

impl<const N: usize> FromStr for Id<N> {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Id<N>, NotAnId> {
        let digits = text.as_bytes();
        let mut bytes = [0; N];
        if digits.len() != 2 * N {
            return Err(NotAnId(2 * N));
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let high = hex_digit(pair[0]).ok_or(NotAnId(2 * N))?;
            *byte = high << 4 | hex_digit(pair[1]).ok_or(NotAnId(2 * N))?;
        }
        Ok(Id(bytes))
    }
}

impl<const N: usize> Serialize for Id<N> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de, const N: usize> Deserialize<'de> for Id<N> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Id<N>, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

fn hex_digit(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

/// Where a request stands in a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace.
    pub trace_id: TraceId,
    /// This server's span.
    pub span_id: SpanId,
    /// The caller's span.
    pub parent_id: Option<SpanId>,
    /// Whether it is to be collected.
    pub sampled: bool,
    /// What other tracing systems want carried along.
    pub state: Option<String>,
}

impl TraceContext {
    /// The beginning of a trace.
    pub fn root() -> TraceContext {
        TraceContext {
            trace_id: TraceId::random(),
            span_id: SpanId::random(),
            parent_id: None,
            sampled: true,
            state: None,
        }
    }

    /// The caller's trace if its headers name one, else a new one.
    pub fn from_headers(headers: &HeaderMap) -> TraceContext {
        let mut parents = headers.get_all(TRACEPARENT).iter();
        let (Some(parent), None) = (parents.next(), parents.next()) else {
            return TraceContext::root();
        };
        let Some((trace_id, parent_id, sampled)) = parent.to_str().ok().and_then(traceparent)
        else {
            return TraceContext::root();
        };
        let span_id = SpanId::random();
        let parent_id = Some(parent_id);
        TraceContext { trace_id, span_id, parent_id, sampled, state: tracestate(headers) }
    }

    /// `traceparent` for whatever this request calls in its turn.
    pub fn traceparent(&self) -> String {
        format!("00-{}-{}-{:02x}", self.trace_id, self.span_id, u8::from(self.sampled))
    }

    /// The trace that a reply names, and the span that answered.
    pub fn of_reply(headers: &HeaderMap) -> Option<(TraceId, SpanId)> {
        let (trace, span, _) = traceparent(headers.get(TRACERESPONSE)?.to_str().ok()?)?;
        Some((trace, span))
    }

    /// Names the trace in a reply.
    pub fn mark(&self, headers: &mut HeaderMap) {
        let value = |text: String| HeaderValue::try_from(text).ok();
        if let Some(id) = value(self.trace_id.to_string()) {
            headers.insert(TRACE_ID_HEADER, id);
        }
        if let Some(parent) = value(self.traceparent()) {
            headers.insert(TRACERESPONSE, parent);
        }
    }
}

/// Middleware around all routes: handlers find the [`TraceContext`] among the request's extensions,
/// and every reply names it.
pub async fn propagate(mut request: Request, next: Next) -> Response {
    let context = TraceContext::from_headers(request.headers());
    request.extensions_mut().insert(context.clone());
    let mut response = next.run(request).await;
    context.mark(response.headers_mut());
    response
}

/// Trace, caller's span and the sampled flag of a `traceparent`. Versions after 00 may be longer.
fn traceparent(text: &str) -> Option<(TraceId, SpanId, bool)> {
    let mut parts = text.splitn(5, '-');
    let version = parts.next()?.parse::<Id<1>>().ok()?;
    let trace_id = parts.next()?.parse::<TraceId>().ok()?;
    let parent_id = parts.next()?.parse::<SpanId>().ok()?;
    let flags = parts.next()?.parse::<Id<1>>().ok()?;
    let known = match version.0 {
        [0xff] => false,
        [0] => parts.next().is_none(),
        _ => true,
    };
    let valid = known && !trace_id.is_zero() && !parent_id.is_zero();
    valid.then_some((trace_id, parent_id, flags.0[0] & 1 == 1))
}

/// The caller's `tracestate`, its headers joined; none if it is longer than anyone must carry or has
/// anything that is no list of members.
fn tracestate(headers: &HeaderMap) -> Option<String> {
    let parts: Result<Vec<&str>, _> =
        headers.get_all(TRACESTATE).iter().map(HeaderValue::to_str).collect();
    let members: Vec<&str> =
        parts.ok()?.into_iter().flat_map(|part| part.split(',')).map(str::trim).collect();
    let members: Vec<&str> = members.into_iter().filter(|member| !member.is_empty()).collect();
    let well_formed = |member: &&str| {
        member.split_once('=').is_some_and(|(key, value)| {
            let key_byte =
                |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_-*/@".contains(&b);
            !key.is_empty()
                && key.bytes().all(key_byte)
                && !value.is_empty()
                && !value.contains('=')
        })
    };
    let fits = members.len() <= MAX_STATE_MEMBERS && members.iter().all(well_formed);
    let joined = members.join(",");
    (fits && !joined.is_empty() && joined.len() <= MAX_STATE_BYTES).then_some(joined)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    fn headers(pairs: &[(&'static str, &[u8])]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_bytes(value).unwrap());
        }
        headers
    }

    #[test]
    fn a_right_parent_is_taken() {
        for (flags, sampled) in [("00", false), ("01", true), ("fe", false), ("ff", true)] {
            let parent = format!("00-{TRACE}-{SPAN}-{flags}");
            let context =
                TraceContext::from_headers(&headers(&[("traceparent", parent.as_bytes())]));
            assert_eq!(context.trace_id.to_string(), TRACE);
            assert_eq!(context.parent_id.unwrap().to_string(), SPAN);
            assert_eq!(context.sampled, sampled);
            assert_ne!(Some(context.span_id), context.parent_id);
            let out = context.traceparent();
            assert_eq!(traceparent(&out).unwrap().1, context.span_id, "{out}");
        }
        let later = format!("01-{TRACE}-{SPAN}-01-more-of-it");
        assert!(traceparent(&later).is_some());
    }

    #[test]
    fn a_wrong_one_begins_a_new_trace() {
        let zero_trace = format!("00-{}-{SPAN}-01", "0".repeat(32));
        let zero_span = format!("00-{TRACE}-{}-01", "0".repeat(16));
        let upper = format!("00-{}-{SPAN}-01", TRACE.to_uppercase());
        let long = format!("00-{TRACE}-{SPAN}-01-");
        let huge = "0".repeat(100_000);
        let signed = format!("00-{TRACE}-{SPAN}-+1");
        let wide = format!("00-{TRACE}-{SPAN}-é");
        let forbidden = format!("ff-{TRACE}-{SPAN}-01");
        let spaced = format!("00-{TRACE}-{SPAN}-01 x");
        for bad in [
            "",
            "-",
            "---",
            "00",
            TRACE,
            &zero_trace,
            &zero_span,
            &upper,
            &long,
            &huge,
            &signed,
            &wide,
            &forbidden,
            &spaced,
        ] {
            let context = TraceContext::from_headers(&headers(&[("traceparent", bad.as_bytes())]));
            assert_eq!(context.parent_id, None, "{bad:.80}");
            assert_ne!(context.trace_id.to_string(), TRACE, "{bad:.80}");
            assert!(!context.trace_id.is_zero() && context.sampled);
        }
        let good = format!("00-{TRACE}-{SPAN}-01");
        let twice = headers(&[("traceparent", good.as_bytes()), ("traceparent", good.as_bytes())]);
        assert_eq!(TraceContext::from_headers(&twice).parent_id, None);
    }

    #[test]
    fn state_is_carried_within_limits() {
        let parent = format!("00-{TRACE}-{SPAN}-01");
        let state = |values: &[&[u8]]| {
            let mut map = headers(&[("traceparent", parent.as_bytes())]);
            for value in values {
                map.append(TRACESTATE, HeaderValue::from_bytes(value).unwrap());
            }
            TraceContext::from_headers(&map).state
        };
        assert_eq!(state(&[b"a=1 , b@c=2", b"d=3"]).as_deref(), Some("a=1,b@c=2,d=3"));
        assert_eq!(state(&[b",,"]), None);
        assert_eq!(state(&[b"no-value"]), None);
        assert_eq!(state(&[b"A=1"]), None);
        assert_eq!(state(&[b"a=\xff"]), None);
        assert_eq!(state(&[format!("a={}", "x".repeat(600)).as_bytes()]), None);
        let many: Vec<String> = (0..33).map(|i| format!("k{i}=v")).collect();
        assert_eq!(state(&[many.join(",").as_bytes()]), None);
        let only = headers(&[("tracestate", b"a=1")]);
        assert_eq!(TraceContext::from_headers(&only).state, None);
    }

    #[test]
    fn ids_differ() {
        let ids: std::collections::HashSet<TraceId> =
            (0..1000).map(|_| TraceId::random()).collect();
        assert_eq!(ids.len(), 1000);
    }
}
