//! `GET /v1/models`: one reply that OpenAI's and Anthropic's clients both understand.

use axum::Json;
use axum::extract::{Path, State};
use jiff::Timestamp;
use serde::Serialize;
use utoipa::ToSchema;

use crate::serve::errors::{ApiError, OpenAiError};
use crate::serve::model::Facts;
use crate::serve::state::{App, Server};

/// The models that are facts.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelList {
    /// `list`.
    pub object: &'static str,
    /// The models.
    pub data: Vec<Model>,
    /// Whether there are more: never.
    pub has_more: bool,
    /// The first one's name.
    pub first_id: String,
    /// The last one's name.
    pub last_id: String,
}

/// A model.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Model {
    /// The name that requests use.
    pub id: String,
    /// `model`, for OpenAI's clients.
    pub object: &'static str,
    /// `model`, for Anthropic's clients.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The model's own name.
    pub display_name: String,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// The same as a date.
    pub created_at: String,
    /// `th-engine`.
    pub owned_by: &'static str,
    /// Tokens that one request may have, prompt and answer together.
    pub context_length: usize,
    /// The same, under vLLM's name.
    pub max_model_len: usize,
    /// The most tokens of an answer.
    pub max_output_tokens: usize,
}

impl Model {
    fn new(id: String, facts: &Facts) -> Model {
        let loaded = Timestamp::try_from(facts.loaded).unwrap_or_default();
        let context = facts.info.context;
        Model {
            id,
            object: "model",
            kind: "model",
            display_name: facts.name.clone(),
            created: loaded.as_second().unsigned_abs(),
            created_at: loaded.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            owned_by: "th-engine",
            context_length: context,
            max_model_len: context,
            max_output_tokens: context,
        }
    }
}

/// The models that are facts.
pub fn list(server: &Server, facts: &Facts) -> ModelList {
    let data: Vec<Model> =
        server.names(facts).into_iter().map(|id| Model::new(id, facts)).collect();
    ModelList {
        object: "list",
        has_more: false,
        first_id: data.first().map(|model| model.id.clone()).unwrap_or_default(),
        last_id: data.last().map(|model| model.id.clone()).unwrap_or_default(),
        data,
    }
}

/// Lists the models.
#[utoipa::path(get, path = "/v1/models", tag = "OpenAI",
    responses((status = 200, description = "The models", body = ModelList)))]
pub async fn list_models(State(app): State<App>) -> Result<Json<ModelList>, ApiError> {
    let (facts, _) = app.about(None)?;
    Ok(Json(list(&app, &facts)))
}

/// Describes a model.
#[utoipa::path(get, path = "/v1/models/{model}", tag = "OpenAI",
    params(("model" = String, Path, description = "Its name")),
    responses((status = 200, description = "The model", body = Model),
              (status = 404, description = "There is no such model", body = OpenAiError)))]
pub async fn show_model(
    State(app): State<App>,
    Path(asked): Path<String>,
) -> Result<Json<Model>, ApiError> {
    let (facts, name) = app.about(Some(&asked))?;
    Ok(Json(Model::new(name, &facts)))
}

/// Describes a model whose name has a slash.
pub async fn show_model_of_owner(
    State(app): State<App>,
    Path((owner, name)): Path<(String, String)>,
) -> Result<Json<Model>, ApiError> {
    show_model(State(app), Path(format!("{owner}/{name}"))).await
}
