//! The routes.

use std::sync::Arc;

use axum::extract::{Extension, Path, State};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::compose::{Composer, outcome};
use super::reply::{ResponseReply, status};
use super::request::{Prepared, ResponseRequest};
use super::stream::ResponseWriter;
use crate::serve::body::Json;
use crate::serve::errors::{ApiError, OpenAiError};
use crate::serve::exchange::Exchange;
use crate::serve::generation::End;
use crate::serve::openai::store::Stored;
use crate::serve::state::App;
use crate::serve::stream;
use engine::service::ServiceInfo;

/// A reply without its output, and what becomes of it.
#[derive(Clone)]
pub struct Frame {
    app: App,
    store: bool,
    reply: ResponseReply,
    input: Vec<Value>,
    conversation: Vec<crate::text::chat::Message>,
    info: ServiceInfo,
}

impl Frame {
    /// The reply before there is any output.
    pub fn reply(&self) -> &ResponseReply {
        &self.reply
    }

    /// The whole reply, which is kept if it is to be.
    pub fn complete(&self, output: Vec<Value>, end: &End) -> ResponseReply {
        let answer = outcome(&output);
        let reply = self.reply.complete(output, end, &self.info);
        if self.store {
            let conversation = self.conversation.iter().cloned().chain(answer).collect();
            let (reply, input) = (json!(reply), self.input.clone());
            self.app.responses.insert(&self.reply.id, Stored { reply, input, conversation });
        }
        reply
    }
}

/// Answers items.
#[utoipa::path(post, path = "/v1/responses", tag = "OpenAI", request_body = ResponseRequest,
    responses((status = 200, description = "The response; a stream of events if `stream` is true", body = ResponseReply),
              (status = "4XX", description = "The request makes no sense or can't be taken", body = OpenAiError),
              (status = "5XX", description = "The server can't answer", body = OpenAiError)))]
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
        reply: ResponseReply::begin(&request, name),
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
    let output = composer.finish(status(&whole.end), &mut events);
    Ok(axum::Json(frame.complete(output, &whole.end)).into_response())
}

/// A response that was kept.
#[utoipa::path(get, path = "/v1/responses/{response_id}", tag = "OpenAI",
    params(("response_id" = String, Path, description = "Its id")),
    responses((status = 200, description = "The response", body = ResponseReply),
              (status = 404, description = "It was not kept, or not this long", body = OpenAiError)))]
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

/// That a response is forgotten.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct DeletedResponse {
    /// Its id.
    pub id: String,
    /// `response`.
    pub object: &'static str,
    /// True.
    pub deleted: bool,
}

/// The items that a response that was kept answers.
#[utoipa::path(get, path = "/v1/responses/{response_id}/input_items", tag = "OpenAI",
    params(("response_id" = String, Path, description = "The response's id")),
    responses((status = 200, description = "The items", body = ItemList),
              (status = 404, description = "It was not kept, or not this long", body = OpenAiError)))]
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
    responses((status = 200, description = "It is forgotten", body = DeletedResponse),
              (status = 404, description = "It was not kept, or not this long", body = OpenAiError)))]
pub async fn delete_response(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<axum::Json<DeletedResponse>, ApiError> {
    if !app.responses.remove(&id) {
        return Err(unknown(&id, "response_id"));
    }
    Ok(axum::Json(DeletedResponse { id, object: "response", deleted: true }))
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
