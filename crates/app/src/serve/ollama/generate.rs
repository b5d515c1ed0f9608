//! `POST /api/generate`.

use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::chat::bare;
use super::options::{Options, format, reasoning};
use super::reply::{Kind, LineWriter, Replies, Reply};
use crate::serve::body::{Json, RequestBody, Unsupported};
use crate::serve::errors::{ApiError, OllamaError};
use crate::serve::exchange::Exchange;
use crate::serve::generation::{Chat, Input};
use crate::serve::state::App;
use crate::serve::stream;
use crate::text::chat::{Message, Role};

/// A request for a text.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct GenerateRequest {
    /// The model; the one that is served if absent.
    pub model: Option<String>,
    /// The prompt. Without one the model is only loaded.
    pub prompt: Option<String>,
    /// Instructions.
    pub system: Option<String>,
    /// Whether the prompt is continued as it stands, without the chat template.
    pub raw: Option<bool>,
    /// `"json"`, or a JSON schema.
    pub format: Option<Value>,
    /// Sampling and limits.
    pub options: Option<Options>,
    /// Whether the answer comes piece by piece: yes, unless false.
    pub stream: Option<bool>,
    /// Whether to think: true, false, or a level.
    pub think: Option<Value>,
    /// Accepted; see --idle-release.
    pub keep_alive: Option<Value>,
}

impl RequestBody for GenerateRequest {
    const UNSUPPORTED: Unsupported = &[
        ("suffix", "\"\""),
        ("images", "[]"),
        ("template", "\"\""),
        ("context", "[]"),
        ("logprobs", "false"),
    ];
}

/// Continues a text, or answers it.
#[utoipa::path(post, path = "/api/generate", tag = "Ollama", request_body = GenerateRequest,
    responses((status = 200, description = "The text; lines of JSON unless `stream` is false", body = Reply),
              (status = "4XX", description = "The request makes no sense or can't be taken", body = OllamaError),
              (status = "5XX", description = "The server can't answer", body = OllamaError)))]
pub async fn generate(
    State(app): State<App>,
    Extension(exchange): Extension<Exchange>,
    Json(request): Json<GenerateRequest>,
) -> Result<Response, ApiError> {
    let (served, name) = app.model(bare(request.model.as_deref())).await?;
    let replies = Replies::new(Kind::Generate, name, &served.info);
    let prompt = match &request.prompt {
        Some(prompt) if !prompt.is_empty() => prompt.clone(),
        _ => return Ok(axum::Json(replies.loaded()).into_response()),
    };
    let has_template = served.text()?.templates().choose(false).is_some();
    let input = if request.raw == Some(true) || !has_template {
        Input::Text(prompt)
    } else {
        let system = request.system.as_ref().filter(|system| !system.is_empty());
        let mut messages: Vec<Message> =
            system.map(|text| Message::new(Role::System, text)).into_iter().collect();
        messages.push(Message::new(Role::User, prompt));
        let reasoning = reasoning(request.think.as_ref())?;
        Input::Chat(Chat { messages, reasoning, ..Chat::default() })
    };
    let options = request.options.unwrap_or_default();
    let generation = options.generation(input, format(request.format.as_ref())?)?;
    let streams = request.stream != Some(false);
    let answer = app.begin(&exchange, &served, generation, streams).await?;
    if streams {
        return Ok(stream::respond(answer, LineWriter::new(replies), app.options.keep_alive));
    }
    Ok(axum::Json(replies.whole(answer.whole().await?.remove(0))).into_response())
}
