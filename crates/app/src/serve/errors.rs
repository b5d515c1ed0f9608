//! What can go wrong with a request, and how each API says it.
//!
//! Handlers return an [`ApiError`], which knows no API. It travels in the response's extensions, and
//! [`shape`], the outermost layer, writes the body in the form that the caller's API uses.

use std::time::Duration;

use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use engine::service::{Refusal, RequestError};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::api::Api;
pub use crate::telemetry::record::ErrorClass;

/// A request that was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// What is counted.
    pub class: ErrorClass,
    /// The HTTP status, where there is still one to send.
    pub status: StatusCode,
    /// A stable name for programs.
    pub code: &'static str,
    /// What happened and what to do about it.
    pub message: String,
    /// The field of the request that is to blame.
    pub param: Option<String>,
    /// When to try again.
    pub retry_after: Option<Duration>,
    /// Prompt tokens and context, for errors about them.
    pub length: Option<(usize, usize)>,
}

/// An error in OpenAI's form.
#[derive(Debug, Serialize, ToSchema)]
pub struct OpenAiError {
    error: OpenAiFault,
}

#[derive(Debug, Serialize, ToSchema)]
struct OpenAiFault {
    /// What happened and what to do about it.
    message: String,
    /// Its kind.
    #[serde(rename = "type")]
    kind: &'static str,
    /// The field of the request that is to blame.
    param: Option<String>,
    /// A stable name.
    code: &'static str,
}

/// An error in Anthropic's form.
#[derive(Debug, Serialize, ToSchema)]
pub struct AnthropicError {
    /// `error`.
    #[serde(rename = "type")]
    kind: &'static str,
    error: AnthropicFault,
}

#[derive(Debug, Serialize, ToSchema)]
struct AnthropicFault {
    /// Its kind.
    #[serde(rename = "type")]
    kind: &'static str,
    /// What happened and what to do about it.
    message: String,
    /// A stable name.
    code: &'static str,
}

/// An error in Ollama's form.
#[derive(Debug, Serialize, ToSchema)]
pub struct OllamaError {
    /// What happened and what to do about it.
    error: String,
    /// A stable name.
    code: &'static str,
}

impl ApiError {
    /// An error of any kind.
    pub fn new(
        class: ErrorClass,
        status: StatusCode,
        code: &'static str,
        message: impl Into<String>,
    ) -> ApiError {
        let message = message.into();
        ApiError { class, status, code, message, param: None, retry_after: None, length: None }
    }

    /// A field has a value that makes no sense.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        let error = ApiError::bad_request("invalid_value", message);
        ApiError { param: Some(param.into()), ..error }
    }

    /// A field asks for something that this server can't do.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        let error = ApiError::bad_request("unsupported_parameter", message);
        ApiError { param: Some(param.into()), ..error }
    }

    /// The request makes no sense.
    pub fn bad_request(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(ErrorClass::BadRequest, StatusCode::BAD_REQUEST, code, message)
    }

    /// Nothing is there.
    pub fn not_found(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(ErrorClass::NotFound, StatusCode::NOT_FOUND, code, message)
    }

    /// Not for now.
    pub fn unavailable(code: &'static str, message: impl Into<String>, wait: Duration) -> ApiError {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        let error = ApiError::new(ErrorClass::Overloaded, status, code, message);
        ApiError { retry_after: Some(wait), ..error }
    }

    /// The fault is here.
    pub fn server(code: &'static str, message: impl Into<String>) -> ApiError {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        ApiError::new(ErrorClass::ServerError, status, code, message)
    }

    /// The prompt is too long.
    pub fn too_long(tokens: usize, context: usize) -> ApiError {
        ApiError::length(&tokens.to_string(), tokens, context)
    }

    /// The prompt is so long that nobody counted.
    pub fn far_too_long(at_least: usize, context: usize) -> ApiError {
        ApiError::length(&format!("at least {at_least}"), at_least, context)
    }

    fn length(counted: &str, tokens: usize, context: usize) -> ApiError {
        let message = format!(
            "This model's maximum context length is {context} tokens, and the prompt has {counted}. \
             Shorten the prompt, or start the server with a larger --context."
        );
        let status = StatusCode::BAD_REQUEST;
        let class = ErrorClass::ContextLength;
        let error = ApiError::new(class, status, "context_length_exceeded", message);
        ApiError { length: Some((tokens, context)), ..error }
    }

    /// The body in an API's form.
    pub fn body(&self, api: Api) -> Value {
        let (message, code) = (self.message.clone(), self.code);
        match api {
            Api::OpenAi => json!(OpenAiError {
                error: OpenAiFault {
                    message,
                    kind: self.openai_type(),
                    param: self.param.clone(),
                    code,
                }
            }),
            Api::Anthropic => json!(AnthropicError {
                kind: "error",
                error: AnthropicFault {
                    kind: self.anthropic_type(),
                    message: self.anthropic_message(),
                    code,
                }
            }),
            Api::Ollama => json!(OllamaError { error: message, code }),
        }
    }

    fn openai_type(&self) -> &'static str {
        match self.class {
            ErrorClass::Auth if self.status == StatusCode::UNAUTHORIZED => "authentication_error",
            ErrorClass::Auth => "permission_error",
            ErrorClass::BadRequest | ErrorClass::ContextLength | ErrorClass::NotFound => {
                "invalid_request_error"
            }
            ErrorClass::RateLimited => "rate_limit_error",
            ErrorClass::Overloaded => "overloaded_error",
            ErrorClass::Timeout => "timeout_error",
            ErrorClass::Cancelled => "cancelled",
            ErrorClass::ServerError => "server_error",
        }
    }

    fn anthropic_type(&self) -> &'static str {
        match self.class {
            ErrorClass::Auth if self.status == StatusCode::UNAUTHORIZED => "authentication_error",
            ErrorClass::Auth => "permission_error",
            _ if self.status == StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            ErrorClass::BadRequest | ErrorClass::ContextLength => "invalid_request_error",
            ErrorClass::NotFound => "not_found_error",
            ErrorClass::RateLimited => "rate_limit_error",
            ErrorClass::Overloaded => "overloaded_error",
            ErrorClass::Timeout => "timeout_error",
            ErrorClass::Cancelled | ErrorClass::ServerError => "api_error",
        }
    }

    /// Anthropic's clients recognise a prompt that is too long by these words.
    fn anthropic_message(&self) -> String {
        match self.length {
            Some((tokens, context)) => {
                format!("prompt is too long: {tokens} tokens > {context} maximum")
            }
            None => self.message.clone(),
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        match refusal {
            Refusal::Invalid(what) => ApiError::bad_request("invalid_request", what),
            Refusal::TooLong { tokens, context } => ApiError::too_long(tokens, context),
            Refusal::Busy { retry_after, .. } => {
                let status = StatusCode::TOO_MANY_REQUESTS;
                let message = refusal.to_string();
                let error = ApiError::new(ErrorClass::Overloaded, status, "queue_full", message);
                ApiError { retry_after: Some(retry_after), ..error }
            }
            Refusal::Unavailable(what) => {
                ApiError::unavailable("engine_unavailable", what, Duration::from_secs(5))
            }
        }
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> ApiError {
        let message = error.to_string();
        match error {
            RequestError::Device(_) => ApiError::server("device_failed", message),
            RequestError::Request(_) => ApiError::server("generation_failed", message),
            RequestError::Stopped(_) => {
                ApiError::unavailable("engine_stopped", message, Duration::from_secs(5))
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// Writes errors in the form of the API that was called.
pub async fn shape(request: Request, next: Next) -> Response {
    let api = Api::of_path(request.uri().path());
    let response = next.run(request).await;
    match response.extensions().get::<ApiError>() {
        Some(error) => in_form(error.clone(), api, response),
        None if is_bare(&response) => in_form(of_status(response.status()), api, response),
        None => response,
    }
}

/// Whether this is a refusal of the router itself, in plain words: a path that is no text, say.
fn is_bare(response: &Response) -> bool {
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE);
    let plain = kind.is_none_or(|kind| kind.as_bytes().starts_with(b"text/plain"));
    (status.is_client_error() || status.is_server_error()) && plain
}

fn of_status(status: StatusCode) -> ApiError {
    let class = match status {
        _ if status.is_server_error() => ErrorClass::ServerError,
        StatusCode::NOT_FOUND => ErrorClass::NotFound,
        _ => ErrorClass::BadRequest,
    };
    let what = format!("the request was refused: {status}; see /openapi.json");
    ApiError::new(class, status, "refused", what)
}

fn in_form(error: ApiError, api: Api, response: Response) -> Response {
    let (mut parts, _) = response.into_parts();
    let headers = &mut parts.headers;
    headers.remove(header::CONTENT_LENGTH);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(wait) = error.retry_after {
        // Whole seconds, rounded up: nobody should come back too early.
        headers.insert(
            header::RETRY_AFTER,
            HeaderValue::from(wait.as_secs_f64().ceil().max(1.0) as u64),
        );
    }
    if error.status == StatusCode::UNAUTHORIZED {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    let body = error.body(api).to_string();
    Response::from_parts(parts, body.into())
}
