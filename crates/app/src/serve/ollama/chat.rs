//! `POST /api/chat`.

use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::options::{Options, format, reasoning};
use super::reply::{Kind, LineWriter, Replies, Reply};
use crate::serve::body::{Json, RequestBody, Unsupported};
use crate::serve::errors::{ApiError, OllamaError};
use crate::serve::exchange::Exchange;
use crate::serve::generation::{Chat, Input};
use crate::serve::openai::messages::tools;
use crate::serve::state::App;
use crate::serve::stream;
use crate::text::chat::{Message, Role, ToolCall};

/// A request for a chat answer.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct OllamaChatRequest {
    /// The model; the one that is served if absent.
    pub model: Option<String>,
    /// The conversation. Without one the model is only loaded.
    pub messages: Option<Vec<OllamaMessage>>,
    /// Tools that may be called.
    pub tools: Option<Vec<Value>>,
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

impl RequestBody for OllamaChatRequest {
    const UNSUPPORTED: Unsupported = &[("logprobs", "false")];
}

/// A message.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct OllamaMessage {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What it says.
    pub content: Option<String>,
    /// What an assistant thought.
    pub thinking: Option<String>,
    /// Pictures, which this model can't see.
    pub images: Option<Vec<Value>>,
    /// Tools that an assistant called.
    pub tool_calls: Option<Vec<OllamaCall>>,
    /// The tool whose result this is.
    #[serde(alias = "name")]
    pub tool_name: Option<String>,
    /// The call whose result this is.
    pub tool_call_id: Option<String>,
}

/// A tool call.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct OllamaCall {
    /// Its id.
    pub id: Option<String>,
    /// What was called.
    pub function: OllamaFunction,
}

/// A called function.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct OllamaFunction {
    /// Its name.
    pub name: String,
    /// Its arguments.
    #[serde(default)]
    pub arguments: Value,
    /// Its place among the calls of its turn.
    pub index: Option<u32>,
}

/// Answers a conversation.
#[utoipa::path(post, path = "/api/chat", tag = "Ollama", request_body = OllamaChatRequest,
    responses((status = 200, description = "The answer; lines of JSON unless `stream` is false", body = Reply),
              (status = "4XX", description = "The request makes no sense or can't be taken", body = OllamaError),
              (status = "5XX", description = "The server can't answer", body = OllamaError)))]
pub async fn chat(
    State(app): State<App>,
    Extension(exchange): Extension<Exchange>,
    Json(request): Json<OllamaChatRequest>,
) -> Result<Response, ApiError> {
    let (served, name) = app.model(bare(request.model.as_deref())).await?;
    let replies = Replies::new(Kind::Chat, name, &served.info);
    let messages = conversation(request.messages.as_deref().unwrap_or_default())?;
    if messages.is_empty() {
        return Ok(axum::Json(replies.loaded()).into_response());
    }
    let chat = Chat {
        messages,
        tools: tools(request.tools.as_deref().unwrap_or_default())?,
        parallel_tool_calls: true,
        reasoning: reasoning(request.think.as_ref())?,
        template: Map::new(),
        ..Chat::default()
    };
    let options = request.options.unwrap_or_default();
    let generation = options.generation(Input::Chat(chat), format(request.format.as_ref())?)?;
    let streams = request.stream != Some(false);
    let answer = app.begin(&exchange, &served, generation, streams).await?;
    if streams {
        return Ok(stream::respond(answer, LineWriter::new(replies), app.options.keep_alive));
    }
    Ok(axum::Json(replies.whole(answer.whole().await?.remove(0))).into_response())
}

/// The name without the tag that Ollama's clients put behind it.
pub(super) fn bare(model: Option<&str>) -> Option<&str> {
    model.map(|model| model.strip_suffix(":latest").unwrap_or(model))
}

fn conversation(messages: &[OllamaMessage]) -> Result<Vec<Message>, ApiError> {
    messages.iter().enumerate().map(|(index, message)| one(index, message)).collect()
}

fn one(index: usize, message: &OllamaMessage) -> Result<Message, ApiError> {
    let path = format!("messages[{index}]");
    let role = Role::from_name(&message.role).ok_or_else(|| {
        let what =
            format!("{path}.role is {:?}; use system, user, assistant or tool", message.role);
        ApiError::invalid(format!("{path}.role"), what)
    })?;
    if message.images.as_ref().is_some_and(|images| !images.is_empty()) {
        let what = format!("{path}.images: this model can't see");
        return Err(ApiError::unsupported(format!("{path}.images"), what));
    }
    let calls = message.tool_calls.iter().flatten().map(|call| ToolCall {
        id: call.id.clone().unwrap_or_default(),
        name: call.function.name.clone(),
        arguments: call.function.arguments.clone(),
    });
    Ok(Message {
        role,
        content: message.content.clone().unwrap_or_default(),
        reasoning: message.thinking.clone().filter(|text| !text.is_empty()),
        tool_calls: calls.collect(),
        tool_call_id: message.tool_call_id.clone(),
        name: message.tool_name.clone(),
    })
}
