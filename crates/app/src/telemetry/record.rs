//! One finished request as plain data: what the store keeps, metrics count and collectors get.

use std::time::SystemTime;

use engine::SamplingOptions;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::timeline::micros;
use super::trace_context::{SpanId, TraceContext, TraceId};

/// A finished request. Times are in microseconds; `0` tokens are tokens that were counted and not
/// there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// The trace it belongs to; the caller's, if it sent one.
    pub trace_id: TraceId,
    /// Its own root span, which names it within this server.
    pub span_id: SpanId,
    /// The caller's span.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_id: Option<SpanId>,
    /// Whether the caller wants the trace collected.
    pub sampled: bool,
    /// What other tracing systems want carried along.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_state: Option<String>,
    /// What the reply calls it, `chatcmpl-…` say.
    pub request_id: String,
    /// When its first byte came, in microseconds since 1970.
    pub started_us: u64,
    /// From there to its last byte.
    pub duration_us: u64,
    /// From its first byte to its first token.
    pub first_token_us: Option<u64>,
    /// Who asked: the name of an API key, or of a program.
    pub client: String,
    /// The conversation that it belongs to, see [`session_key`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// The route, as the router spells it: `/v1/chat/completions`.
    pub endpoint: String,
    /// The model that answered; empty if none did.
    pub model: String,
    /// Whether the reply was streamed.
    pub stream: bool,
    /// HTTP status; 499 if the client left first.
    pub status: u16,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<Fault>,
    /// Why the answer ended: `stop`, `length`, `tool_calls`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish: Option<String>,
    /// Tokens by kind.
    pub tokens: TokenCounts,
    /// Time without a lane; of several choices, the longest.
    pub queue_us: u64,
    /// Time from the lane to the prompt's last token, of all choices.
    pub prefill_us: u64,
    /// Time from there to the last token, of all choices.
    pub decode_us: u64,
    /// What speculation did.
    pub draft: DraftCounts,
    /// What the prefix cache did.
    pub cache: CacheOutcome,
    /// Names of the tools called, in order.
    pub tool_calls: Vec<String>,
    /// How tokens were chosen.
    pub sampling: Sampling,
    /// Names equal requests, see [`request_hash`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_hash: Option<String>,
    /// An equal request of this client that ended badly shortly before: this looks like its retry.
    /// The store finds it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_of: Option<SpanId>,
    /// What its time went to.
    pub spans: Vec<Span>,
    /// What was asked and answered, if the server keeps that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bodies: Option<Bodies>,
}

impl Record {
    /// A request that has just begun.
    pub fn begin(trace: &TraceContext, endpoint: &str) -> Record {
        Record {
            trace_id: trace.trace_id,
            span_id: trace.span_id,
            parent_id: trace.parent_id,
            sampled: trace.sampled,
            trace_state: trace.state.clone(),
            started_us: micros(SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default()),
            endpoint: endpoint.to_owned(),
            ..Record::default()
        }
    }

    /// Where it stands in its trace.
    pub fn context(&self) -> TraceContext {
        TraceContext {
            trace_id: self.trace_id,
            span_id: self.span_id,
            parent_id: self.parent_id,
            sampled: self.sampled,
            state: self.trace_state.clone(),
        }
    }

    /// `ok`, or the class of its error.
    pub fn outcome(&self) -> &'static str {
        self.error.as_ref().map_or("ok", |error| error.class.name())
    }
}

/// Tokens of a request by kind. Cached ones are among the prompt's, reasoning among the output's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokenCounts {
    /// Tokens of the prompt, whatever the number of choices; of several prompts, of all.
    pub prompt: u64,
    /// Of these, tokens that were not computed.
    pub cached: u64,
    /// Tokens of the answer, of all choices.
    pub output: u64,
    /// Of these, tokens of reasoning.
    pub reasoning: u64,
}

/// What speculation did for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DraftCounts {
    /// Rounds.
    pub rounds: u64,
    /// Proposals verified.
    pub proposed: u64,
    /// Proposals accepted.
    pub accepted: u64,
}

/// What the prefix cache did for a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheOutcome {
    /// Where reused state came from: `none`, `memory`, `disk`.
    pub source: String,
    /// Why no more was found; empty if all was.
    pub miss: String,
}

/// How tokens were chosen, as asked for: absent options took the model's defaults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// Randomness.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Most likely tokens kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Share of probability kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    /// Least share of the best token's probability.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
    /// Presence penalty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub presence_penalty: Option<f32>,
    /// Frequency penalty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frequency_penalty: Option<f32>,
    /// Repetition penalty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f32>,
    /// Seed, of those too that named none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// The most tokens of an answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u64>,
    /// Stop strings.
    #[serde(skip_serializing_if = "is_zero")]
    pub stops: usize,
    /// Choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n: Option<u32>,
    /// Tools offered.
    #[serde(skip_serializing_if = "is_zero")]
    pub tools: usize,
    /// What the answer had to obey: `json_object`, `json_schema`, `regex`, `grammar`, `tool`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub constraint: Option<String>,
    /// Reasoning asked for: `on`, `off`, an effort.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl From<&SamplingOptions> for Sampling {
    fn from(options: &SamplingOptions) -> Sampling {
        Sampling {
            temperature: options.temperature,
            top_k: options.top_k,
            top_p: options.top_p,
            min_p: options.min_p,
            presence_penalty: options.presence_penalty,
            frequency_penalty: options.frequency_penalty,
            repetition_penalty: options.repetition_penalty,
            seed: options.seed,
            ..Sampling::default()
        }
    }
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Its class.
    pub class: ErrorClass,
    /// The code that the client was given.
    pub code: String,
    /// The message that the client was given.
    pub message: String,
}

/// Classes of failures: what one would do about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorClass {
    /// No key, or a wrong one; a Host or Origin that is not allowed.
    Auth,
    /// This client asked too much.
    RateLimited,
    /// All clients together ask too much.
    Overloaded,
    /// The prompt does not fit.
    ContextLength,
    /// What it names does not exist.
    NotFound,
    /// Anything else that is wrong with the request.
    BadRequest,
    /// The server's fault.
    ServerError,
    /// The client left.
    Cancelled,
    /// Its deadline passed, or it came too slowly.
    Timeout,
}

impl ErrorClass {
    /// Every class.
    pub const ALL: [ErrorClass; 9] = [
        ErrorClass::Auth,
        ErrorClass::RateLimited,
        ErrorClass::Overloaded,
        ErrorClass::ContextLength,
        ErrorClass::NotFound,
        ErrorClass::BadRequest,
        ErrorClass::ServerError,
        ErrorClass::Cancelled,
        ErrorClass::Timeout,
    ];

    /// Its name everywhere.
    pub fn name(self) -> &'static str {
        match self {
            ErrorClass::Auth => "auth",
            ErrorClass::RateLimited => "rate_limited",
            ErrorClass::Overloaded => "overloaded",
            ErrorClass::ContextLength => "context_length",
            ErrorClass::NotFound => "not_found",
            ErrorClass::BadRequest => "bad_request",
            ErrorClass::ServerError => "server_error",
            ErrorClass::Cancelled => "cancelled",
            ErrorClass::Timeout => "timeout",
        }
    }

    /// The class with this name.
    pub fn named(name: &str) -> Option<ErrorClass> {
        ErrorClass::ALL.into_iter().find(|class| class.name() == name)
    }

    /// Whether a client would send the same request again.
    pub fn invites_retry(self) -> bool {
        use ErrorClass::{Auth, BadRequest, ContextLength, NotFound};
        !matches!(self, Auth | BadRequest | ContextLength | NotFound)
    }
}

/// A part of a request's time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// What was done.
    pub name: String,
    /// Start, from the request's start.
    pub start_us: u64,
    /// Duration.
    pub duration_us: u64,
    /// Figures.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub attributes: Map<String, Value>,
    /// Its parts, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub children: Vec<Span>,
}

/// What was asked and answered: capped and redacted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bodies {
    /// The request's body.
    pub request: String,
    /// The answer's text.
    pub response: String,
    /// Whether something was cut off.
    pub truncated: bool,
}

/// Names equal requests: a digest of the endpoint and the body as it came.
pub fn request_hash(endpoint: &str, body: &[u8]) -> String {
    digest([endpoint.as_bytes(), body])
}

/// Names a conversation that the client doesn't name itself: requests of one client that begin with
/// the same system text, tools and first message belong together.
pub fn session_key(client: &str, beginning: &[&str]) -> String {
    digest(std::iter::once(client).chain(beginning.iter().copied()).map(str::as_bytes))
}

/// 64 bits of a digest, in hexadecimal. Each part's length goes in before it, so that no two lists
/// of parts look alike.
fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_tell_parts_apart() {
        assert_eq!(request_hash("/a", b"bc"), request_hash("/a", b"bc"));
        assert_ne!(request_hash("/a", b"bc"), request_hash("/ab", b"c"));
        assert_ne!(session_key("a", &["b", "c"]), session_key("a", &["bc"]));
        assert_eq!(request_hash("", b"").len(), 16);
    }

    #[test]
    fn classes_have_one_name() {
        for class in ErrorClass::ALL {
            assert_eq!(serde_json::to_value(class).unwrap(), class.name());
            assert_eq!(ErrorClass::named(class.name()), Some(class));
        }
        assert_eq!(ErrorClass::named("none"), None);
    }

    #[test]
    fn records_read_back_even_from_older_versions() {
        let record = Record { finish: Some("stop".into()), ..Record::default() };
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
        assert_eq!(serde_json::from_str::<Record>("{\"later\":1}").unwrap(), Record::default());
    }
}
