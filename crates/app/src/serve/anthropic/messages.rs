//! `POST /v1/messages` and `/v1/messages/count_tokens`.

use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use super::request::MessagesRequest;
use super::stream::MessageWriter;
use crate::serve::body::Json;
use crate::serve::errors::{AnthropicError, ApiError};
use crate::serve::exchange::Exchange;
use crate::serve::generation::{End, FinishReason, Input, Piece, Whole};
use crate::serve::openai::reply::Timings;
use crate::serve::state::{App, aside};
use crate::serve::{ids, prepare, stream};

/// A message.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct OutMessage {
    /// Its name.
    pub id: String,
    /// `message`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// `assistant`.
    pub role: &'static str,
    /// The model that answered.
    pub model: String,
    /// Thinking, text and calls, in this order.
    pub content: Vec<Block>,
    /// Why it ended: `end_turn`, `max_tokens`, `stop_sequence`, `tool_use` or
    /// `model_context_window_exceeded`.
    pub stop_reason: Option<&'static str>,
    /// The stop sequence that was met.
    pub stop_sequence: Option<String>,
    /// Tokens.
    pub usage: MessageUsage,
    /// Times.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
}

/// A block of a message.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    /// What the model thought.
    Thinking {
        /// It.
        thinking: String,
        /// Names the text, so that it can be replayed unchanged.
        signature: String,
    },
    /// What it said.
    Text {
        /// It.
        text: String,
    },
    /// What it called.
    ToolUse {
        /// The call's id.
        id: String,
        /// The tool.
        name: String,
        /// Its arguments.
        input: Value,
    },
}

/// Tokens, as Anthropic counts them: those of the prompt that were cached are counted apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct MessageUsage {
    /// Prompt tokens that were computed.
    pub input_tokens: usize,
    /// Always 0: keeping state costs nothing here.
    pub cache_creation_input_tokens: usize,
    /// Prompt tokens that were not.
    pub cache_read_input_tokens: usize,
    /// Tokens of the answer.
    pub output_tokens: usize,
}

impl MessageUsage {
    /// The usage of a prompt and its answer.
    pub fn new(prompt: usize, cached: usize, output: usize) -> MessageUsage {
        MessageUsage {
            input_tokens: prompt.saturating_sub(cached),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: cached,
            output_tokens: output,
        }
    }

    /// The usage of a choice.
    pub fn of(end: &End) -> MessageUsage {
        let done = &end.done;
        MessageUsage::new(done.prompt_tokens, done.cached_tokens, done.output_tokens)
    }
}

/// Why a message ended.
pub fn stop_reason(end: &End) -> &'static str {
    match end.finish {
        FinishReason::Stop if end.stop.is_some() => "stop_sequence",
        FinishReason::Stop => "end_turn",
        FinishReason::Length => "max_tokens",
        FinishReason::Context => "model_context_window_exceeded",
        FinishReason::ToolCalls => "tool_use",
    }
}

/// Names a thought.
pub fn signature(thinking: &str) -> String {
    let digest = Sha256::digest(thinking.as_bytes());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Answers a conversation.
#[utoipa::path(post, path = "/v1/messages", tag = "Anthropic", request_body = MessagesRequest,
    responses((status = 200, description = "The answer; a stream of events if `stream` is true", body = OutMessage),
              (status = "4XX", description = "The request makes no sense or can't be taken", body = AnthropicError),
              (status = "5XX", description = "The server can't answer", body = AnthropicError)))]
pub async fn messages(
    State(app): State<App>,
    Extension(exchange): Extension<Exchange>,
    Json(request): Json<MessagesRequest>,
) -> Result<Response, ApiError> {
    let (served, name) = app.model(request.model.as_deref()).await?;
    exchange.session(request.metadata.as_ref().and_then(|metadata| metadata.user_id.as_deref()));
    let generation = request.generation()?;
    let streams = request.stream == Some(true);
    let answer = app.begin(&exchange, &served, generation, streams).await?;
    if streams {
        let writer = MessageWriter::new(name, &answer);
        return Ok(stream::respond(answer, writer, app.options.keep_alive));
    }
    let whole = answer.whole().await?.remove(0);
    let timings = Timings::of(&whole.end.done, &served.info);
    Ok(axum::Json(message(name, whole, timings)).into_response())
}

fn message(model: String, whole: Whole, timings: Timings) -> OutMessage {
    let Whole { delta, end } = whole;
    let mut calls = delta.calls().into_iter();
    let block = |piece: Piece| match piece {
        Piece::Reasoning(thinking) => {
            let signature = signature(&thinking);
            Some(Block::Thinking { thinking, signature })
        }
        Piece::Text(text) => Some(Block::Text { text }),
        Piece::Call(call) if call.begin.is_some() => calls.next().map(|call| {
            // The parser makes every call's arguments one JSON object.
            let input = serde_json::from_str(&call.arguments).unwrap_or_default();
            Block::ToolUse { id: call.id, name: call.name, input }
        }),
        Piece::Call(_) => None,
    };
    let content = delta.pieces.into_iter().filter_map(block).collect();
    OutMessage {
        id: ids::fresh("msg_"),
        kind: "message",
        role: "assistant",
        model,
        content,
        stop_reason: Some(stop_reason(&end)),
        usage: MessageUsage::of(&end),
        stop_sequence: end.stop,
        timings: Some(timings),
    }
}

/// How many tokens a conversation has.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct TokenCount {
    /// Tokens of the prompt.
    pub input_tokens: usize,
}

/// Counts the tokens of a conversation.
#[utoipa::path(post, path = "/v1/messages/count_tokens", tag = "Anthropic", request_body = MessagesRequest,
    responses((status = 200, description = "The count", body = TokenCount),
              (status = "4XX", description = "The request makes no sense", body = AnthropicError)))]
pub async fn count_tokens(
    State(app): State<App>,
    Extension(exchange): Extension<Exchange>,
    Json(request): Json<MessagesRequest>,
) -> Result<axum::Json<TokenCount>, ApiError> {
    let (facts, _) = app.about(request.model.as_deref())?;
    let input = Input::Chat(request.chat()?);
    let count =
        move || prepare::prompt(&facts, &input, None, &exchange).map(|prompt| prompt.ids.len());
    let input_tokens = aside(count).await?;
    Ok(axum::Json(TokenCount { input_tokens }))
}
