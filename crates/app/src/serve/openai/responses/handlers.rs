//! The routes.

use std::sync::Arc;

use axum::extract::{Extension, Path, State};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::compose::{Composer, outcome};
use super::request::{Prepared, ResponseRequest};
use super::stream::ResponseWriter;
use crate::serve::body::Json;
use crate::serve::errors::ApiError;
use crate::serve::exchange::Exchange;
use crate::serve::generation::{End, FinishReason};
use crate::serve::ids;
use crate::serve::openai::reply::{Timings, Usage};
use crate::serve::openai::store::Stored;
use crate::serve::state::App;
use crate::serve::stream;
use engine::service::ServiceInfo;

/// A reply without its output: what the request determines.
#[derive(Clone)]
pub struct Frame {
    app: App,
    store: bool,
    reply: Value,
    input: Vec<Value>,
    conversation: Vec<crate::text::chat::Message>,
    info: ServiceInfo,
}

impl Frame {
    /// The reply before there is any output.
    pub fn begun(&self) -> &Value {
        &self.reply
    }

    /// The status of an answer that ended like this.
    pub fn status(end: &End) -> &'static str {
        match end.finish {
            FinishReason::Length | FinishReason::Context => "incomplete",
            FinishReason::Stop | FinishReason::ToolCalls => "completed",
        }
    }

    /// The whole reply, which is kept if it is to be.
    pub fn complete(&self, output: Vec<Value>, end: &End) -> Value {
        let mut reply = self.reply.clone();
        let usage = Usage::of([end]);
        reply["status"] = Frame::status(end).into();
        reply["completed_at"] = ids::unix_time().into();
        if Frame::status(end) == "incomplete" {
            reply["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        reply["usage"] = json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": usage.completion_tokens_details.reasoning_tokens
            },
            "total_tokens": usage.total_tokens,
        });
        reply["timings"] = json!(Timings::of(&end.done, &self.info));
        let answer = outcome(&output);
        reply["output"] = output.into();
        if self.store {
            let conversation = self.conversation.iter().cloned().chain(answer).collect();
            let id = reply["id"].as_str().unwrap_or_default().to_owned();
            let stored = Stored { reply: reply.clone(), input: self.input.clone(), conversation };
            self.app.responses.insert(&id, stored);
        }
        reply
    }

    /// The reply of a request that failed.
    pub fn failed(&self, error: &ApiError) -> Value {
        let mut reply = self.reply.clone();
        reply["status"] = "failed".into();
        reply["error"] = json!({"code": error.code, "message": error.message});
        reply
    }
}

/// Answers items.
#[utoipa::path(post, path = "/v1/responses", tag = "OpenAI", request_body = ResponseRequest,
    responses((status = 200, description = "The response; a stream of events if `stream` is true"),
              (status = "4XX", description = "The request makes no sense or can't be taken"),
              (status = "5XX", description = "The server can't answer")))]
pub async fn create_response(
    State(app): State<App>,
    Extension(exchange): Extension<Exchange>,
    Json(request): Json<ResponseRequest>,
) -> Result<Response, ApiError> {
    let (served, name) = app.model(request.model.as_deref()).await?;
    exchange.session(request.prompt_cache_key.as_deref().or(request.user.as_deref()));
    let before = match &request.previous_response_id {
        Some(id) => stored(&app, id, "previous_response_id")?.conversation.clone(),
        None => Vec::new(),
    };
    let Prepared { generation, conversation, input, notes } = request.prepare(before)?;
    exchange.notes(notes);
    let streams = request.stream == Some(true);
    let answer = app.begin(&exchange, &served, generation, streams).await?;
    let frame = Frame {
        reply: reply(&request, name),
        store: request.store != Some(false),
        input,
        conversation,
        info: served.info.clone(),
        app: Arc::clone(&app),
    };
    if streams {
        let keep_alive = app.options.keep_alive;
        return Ok(stream::respond(answer, ResponseWriter::new(frame), keep_alive));
    }
    let whole = answer.whole().await?.remove(0);
    let (mut composer, mut events) = (Composer::default(), Vec::new());
    whole.delta.pieces.into_iter().for_each(|piece| composer.push(piece, &mut events));
    let output = composer.finish(Frame::status(&whole.end), &mut events);
    Ok(axum::Json(frame.complete(output, &whole.end)).into_response())
}

fn reply(request: &ResponseRequest, model: String) -> Value {
    let format = request.text.as_ref().and_then(|text| text.format.as_ref());
    let reasoning = request.reasoning.clone().unwrap_or_default();
    json!({
        "id": ids::fresh("resp_"),
        "object": "response",
        "created_at": ids::unix_time(),
        "completed_at": null,
        "status": "in_progress",
        "error": null,
        "incomplete_details": null,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata.clone().unwrap_or_else(|| json!({})),
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls.unwrap_or(true),
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort, "summary": null},
        "store": request.store.unwrap_or(true),
        "temperature": request.temperature,
        "text": {"format": {"type": format.map_or("text", |format| format.kind.as_str())}},
        "tool_choice": request.tool_choice.clone().unwrap_or_else(|| json!("auto")),
        "tools": request.tools.clone().unwrap_or_default(),
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": null,
        "user": request.user,
    })
}

/// A response that was kept.
#[utoipa::path(get, path = "/v1/responses/{response_id}", tag = "OpenAI",
    params(("response_id" = String, Path, description = "Its id")),
    responses((status = 200, description = "The response"),
              (status = 404, description = "It was not kept, or not this long")))]
pub async fn get_response(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<axum::Json<Value>, ApiError> {
    Ok(axum::Json(stored(&app, &id, "response_id")?.reply.clone()))
}

/// Items of a response.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ItemList {
    /// `list`.
    pub object: &'static str,
    /// The items.
    pub data: Vec<Value>,
    /// Whether there are more: never.
    pub has_more: bool,
}

/// The items that a response that was kept answers.
#[utoipa::path(get, path = "/v1/responses/{response_id}/input_items", tag = "OpenAI",
    params(("response_id" = String, Path, description = "The response's id")),
    responses((status = 200, description = "The items", body = ItemList),
              (status = 404, description = "It was not kept, or not this long")))]
pub async fn list_input_items(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<axum::Json<ItemList>, ApiError> {
    let data = stored(&app, &id, "response_id")?.input.clone();
    Ok(axum::Json(ItemList { object: "list", data, has_more: false }))
}

/// Forgets a response.
#[utoipa::path(delete, path = "/v1/responses/{response_id}", tag = "OpenAI",
    params(("response_id" = String, Path, description = "Its id")),
    responses((status = 200, description = "It is forgotten"),
              (status = 404, description = "It was not kept, or not this long")))]
pub async fn delete_response(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<axum::Json<Value>, ApiError> {
    if !app.responses.remove(&id) {
        return Err(unknown(&id, "response_id"));
    }
    Ok(axum::Json(json!({"id": id, "object": "response", "deleted": true})))
}

fn stored(app: &App, id: &str, param: &str) -> Result<Arc<Stored>, ApiError> {
    app.responses.get(id).ok_or_else(|| unknown(id, param))
}

fn unknown(id: &str, param: &str) -> ApiError {
    let id: String = id.chars().take(100).collect();
    let what = format!(
        "there is no response {id:?}; the last ones are kept in memory, those with \"store\": false \
         never are"
    );
    let error = ApiError::not_found("response_not_found", what);
    ApiError { param: Some(param.into()), ..error }
}
