//! `/api/tags`, `/api/ps`, `/api/show`, `/api/version`.

use axum::Json as Reply;
use axum::extract::State;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::chat::bare;
use crate::serve::body::{Json, RequestBody};
use crate::serve::errors::{ApiError, OllamaError};
use crate::serve::model::Facts;
use crate::serve::state::App;

/// Lists the models.
#[utoipa::path(get, path = "/api/tags", tag = "Ollama",
    responses((status = 200, description = "The models")))]
pub async fn tags(State(app): State<App>) -> Result<Reply<Value>, ApiError> {
    let (facts, _) = app.about(None)?;
    let models: Vec<Value> = app.names(&facts).iter().map(|name| entry(name, &facts)).collect();
    Ok(Reply(json!({"models": models})))
}

/// Lists the models in memory.
#[utoipa::path(get, path = "/api/ps", tag = "Ollama",
    responses((status = 200, description = "The models in memory")))]
pub async fn running(State(app): State<App>) -> Reply<Value> {
    let served = app.lifecycle.served();
    let models = served.iter().flat_map(|served| {
        app.names(served).into_iter().map(|name| {
            let mut entry = entry(&name, served);
            entry["size_vram"] = served.info.memory.total().into();
            entry["context_length"] = served.info.context.into();
            entry
        })
    });
    let models: Vec<Value> = models.collect();
    Reply(json!({"models": models}))
}

fn entry(name: &str, facts: &Facts) -> Value {
    let loaded = Timestamp::try_from(facts.loaded).unwrap_or_default();
    json!({
        "name": name,
        "model": name,
        "modified_at": loaded.to_string(),
        "size": facts.info.memory.weights,
        "digest": "",
        "details": details(facts),
    })
}

fn details(facts: &Facts) -> Value {
    json!({
        "format": "th-engine",
        "family": facts.name,
        "families": [facts.name],
        "parameter_size": "",
        "quantization_level": "",
    })
}

/// Which model to describe.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ShowRequest {
    /// The model.
    #[serde(alias = "name")]
    pub model: Option<String>,
    /// Accepted; there is no more to tell.
    pub verbose: Option<bool>,
}

impl RequestBody for ShowRequest {}

/// Describes a model.
#[utoipa::path(post, path = "/api/show", tag = "Ollama", request_body = ShowRequest,
    responses((status = 200, description = "The description"),
              (status = 404, description = "There is no such model", body = OllamaError)))]
pub async fn show(
    State(app): State<App>,
    Json(request): Json<ShowRequest>,
) -> Result<Reply<Value>, ApiError> {
    let (served, _) = app.about(bare(request.model.as_deref()))?;
    let templates = served.text.as_ref().map(|text| text.templates());
    let template = templates.and_then(|templates| templates.choose(false));
    let mut capabilities = vec!["completion"];
    if templates.and_then(|t| t.choose(true)).is_some_and(|template| template.mentions("tools")) {
        capabilities.push("tools");
    }
    if served.text.as_ref().is_some_and(|text| text.thinking_switch()) {
        capabilities.push("thinking");
    }
    Ok(Reply(json!({
        "modelfile": "",
        "parameters": format!("num_ctx {}", served.info.context),
        "template": template.map(|template| template.source()),
        "details": details(&served),
        "model_info": {
            "general.architecture": "th-engine",
            "general.basename": served.name,
            "th-engine.context_length": served.info.context,
        },
        "capabilities": capabilities,
    })))
}

/// Tells the version.
#[utoipa::path(get, path = "/api/version", tag = "Ollama",
    responses((status = 200, description = "The version")))]
pub async fn version() -> Reply<Value> {
    // Clients compare it with Ollama's own, and want no words in it.
    Reply(json!({"version": env!("CARGO_PKG_VERSION")}))
}
