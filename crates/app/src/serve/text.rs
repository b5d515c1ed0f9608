//! `/tokenize`, `/detokenize`, `/apply-template`: what a model sees, for people who wonder.

use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::body::{Json, RequestBody};
use super::errors::ApiError;
use super::generation::{Chat, Reasoning};
use super::openai::messages::{ChatMessage, conversation, tools};
use super::prepare;
use super::state::{App, aside};
use crate::text::chat::ChatText;
use crate::text::detokenize::decode;
use crate::text::tokenizer::Tok;

/// A text to make tokens of.
#[derive(Debug, Deserialize, ToSchema)]
pub struct TokenizeRequest {
    /// The text.
    pub content: String,
    /// Whether control tokens in the text count as such; otherwise it is all ordinary text.
    pub parse_special: Option<bool>,
    /// Whether the tokens that open a text are put before it.
    pub add_special: Option<bool>,
    /// Whether each token comes with its text.
    pub with_pieces: Option<bool>,
}

impl RequestBody for TokenizeRequest {}

/// The tokens of a text.
#[derive(Debug, Serialize, ToSchema)]
pub struct Tokenized {
    /// Ids, or objects with `id` and `piece`.
    pub tokens: Vec<Value>,
}

/// Makes tokens of a text.
#[utoipa::path(post, path = "/tokenize", tag = "Text", request_body = TokenizeRequest,
    responses((status = 200, description = "The tokens", body = Tokenized)))]
pub async fn tokenize(
    State(app): State<App>,
    Json(request): Json<TokenizeRequest>,
) -> Result<axum::Json<Tokenized>, ApiError> {
    let (facts, _) = app.about(None)?;
    let tokens = aside(move || tokens(facts.text()?, &request)).await?;
    Ok(axum::Json(Tokenized { tokens }))
}

fn tokens(text: &ChatText, request: &TokenizeRequest) -> Result<Vec<Value>, ApiError> {
    let failed = |e: crate::text::tokenizer::TokenizerError| {
        ApiError::bad_request("tokenizer_failed", e.what)
    };
    let mut ids = match request.parse_special {
        Some(true) => text.raw_ids(&request.content).map_err(failed)?,
        _ => text.tok().encode_ordinary(&request.content).map_err(failed)?,
    };
    let prefix = text.tok().raw_prefix();
    match (request.parse_special, request.add_special) {
        (Some(true), Some(true)) => {}
        (Some(true), _) => drop(ids.drain(..prefix.len())),
        (_, Some(true)) => drop(ids.splice(..0, prefix.iter().copied())),
        _ => {}
    }
    let token = |id: u32| match request.with_pieces {
        Some(true) => {
            let bytes = text.tok().token_bytes(id);
            let piece = std::str::from_utf8(bytes).map_or_else(|_| bytes.into(), Value::from);
            serde_json::json!({"id": id, "piece": piece})
        }
        _ => id.into(),
    };
    Ok(ids.into_iter().map(token).collect())
}

/// Tokens to make a text of.
#[derive(Debug, Deserialize, ToSchema)]
pub struct DetokenizeRequest {
    /// Ids.
    pub tokens: Vec<u32>,
}

impl RequestBody for DetokenizeRequest {}

/// A text.
#[derive(Debug, Serialize, ToSchema)]
pub struct Detokenized {
    /// It.
    pub content: String,
}

/// Makes a text of tokens. Control tokens show; ids that stand for nothing are refused.
#[utoipa::path(post, path = "/detokenize", tag = "Text", request_body = DetokenizeRequest,
    responses((status = 200, description = "The text", body = Detokenized)))]
pub async fn detokenize(
    State(app): State<App>,
    Json(request): Json<DetokenizeRequest>,
) -> Result<axum::Json<Detokenized>, ApiError> {
    let (facts, _) = app.about(None)?;
    let content = aside(move || text_of(facts.text()?.tok(), &request.tokens)).await?;
    Ok(axum::Json(Detokenized { content }))
}

fn text_of(tok: &dyn Tok, ids: &[u32]) -> Result<String, ApiError> {
    if let Some(id) = ids.iter().find(|&&id| id as usize >= tok.id_count()) {
        let what = format!("token {id} is not in the vocabulary of {}", tok.id_count());
        return Err(ApiError::invalid("tokens", what));
    }
    Ok(decode(tok, ids, true))
}

/// A conversation to render.
#[derive(Debug, Deserialize, ToSchema)]
pub struct TemplateRequest {
    /// Its messages.
    pub messages: Vec<ChatMessage>,
    /// Tools that may be called.
    pub tools: Option<Vec<Value>>,
    /// Whether the model thinks.
    pub enable_thinking: Option<bool>,
    /// Further variables of the template.
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

impl RequestBody for TemplateRequest {}

/// A rendered conversation.
#[derive(Debug, Serialize, ToSchema)]
pub struct Rendered {
    /// The prompt.
    pub prompt: String,
    /// What was changed in the messages.
    pub notes: Vec<String>,
}

/// Renders the chat template.
#[utoipa::path(post, path = "/apply-template", tag = "Text", request_body = TemplateRequest,
    responses((status = 200, description = "The prompt", body = Rendered)))]
pub async fn apply_template(
    State(app): State<App>,
    Json(request): Json<TemplateRequest>,
) -> Result<axum::Json<Rendered>, ApiError> {
    let (facts, _) = app.about(None)?;
    let chat = Chat {
        messages: conversation(&request.messages)?,
        tools: tools(request.tools.as_deref().unwrap_or_default())?,
        reasoning: Reasoning { enabled: request.enable_thinking, ..Reasoning::default() },
        template: request.chat_template_kwargs.unwrap_or_default(),
        ..Chat::default()
    };
    let prompt = aside(move || prepare::render(facts.text()?, &chat)).await?;
    Ok(axum::Json(Rendered { prompt: prompt.text.text().into_owned(), notes: prompt.notes }))
}
