//! All routes, and the layers around them.

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tower_http::catch_panic::CatchPanicLayer;
use utoipa::OpenApi;
use utoipa::openapi::OpenApi as Document;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::errors::{self, ApiError};
use super::state::App;
use super::{anthropic, exchange, health, ollama, openai, page, security, text};
use crate::telemetry::{self, ErrorClass};

/// The description of all routes.
#[derive(OpenApi)]
#[openapi(info(
    title = "th-engine",
    description = "OpenAI's, Anthropic's and Ollama's APIs over one engine. Fields that are not known are ignored and named in the header x-th-ignored; what was changed in a request is named in x-th-notes.",
    license(name = "Apache-2.0", identifier = "Apache-2.0")
))]
struct Description;

/// The server's routes.
pub fn router(app: App) -> Router {
    let (routes, document) = documented().split_for_parts();
    let document = axum::Json(document);
    let routes = routes
        .merge(telemetry::routes::routes(app.recorder.clone()))
        .merge(page::routes())
        // Repository ids have a slash, which a path of one segment can't say.
        .route("/v1/models/{owner}/{name}", get(openai::models::show_model_of_owner))
        .route("/openapi.json", get(move || async move { document }))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method);
    // The last layer is the outermost.
    routes
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(app.clone(), unless_cut))
        .layer(from_fn_with_state(app.clone(), security::guard))
        .layer(app.security.cors())
        .layer(from_fn(errors::shape))
        .layer(from_fn_with_state(app.clone(), exchange::observe))
        .with_state(app)
}

/// The OpenAPI document.
pub fn document() -> Document {
    documented().into_openapi()
}

fn documented() -> OpenApiRouter<App> {
    let description = Description::openapi().merge_from(telemetry::routes::document());
    OpenApiRouter::with_openapi(description)
        .routes(routes!(openai::chat::chat_completions))
        .routes(routes!(openai::completions::completions))
        .routes(routes!(openai::responses::handlers::create_response))
        .routes(routes!(
            openai::responses::handlers::get_response,
            openai::responses::handlers::delete_response
        ))
        .routes(routes!(openai::responses::handlers::list_input_items))
        .routes(routes!(openai::models::list_models))
        .routes(routes!(openai::models::show_model))
        .routes(routes!(anthropic::messages::messages))
        .routes(routes!(anthropic::messages::count_tokens))
        .routes(routes!(ollama::chat::chat))
        .routes(routes!(ollama::generate::generate))
        .routes(routes!(ollama::about::tags))
        .routes(routes!(ollama::about::show))
        .routes(routes!(ollama::about::running))
        .routes(routes!(ollama::about::version))
        .routes(routes!(text::tokenize))
        .routes(routes!(text::detokenize))
        .routes(routes!(text::apply_template))
        .routes(routes!(health::health))
        .routes(routes!(health::ready))
        .routes(routes!(health::status))
}

async fn unknown(uri: Uri) -> ApiError {
    let path: String = uri.path().chars().take(100).collect();
    let what = format!("there is no {path} here; /openapi.json lists what there is");
    ApiError::not_found("route_not_found", what)
}

async fn wrong_method(uri: Uri) -> ApiError {
    let path: String = uri.path().chars().take(100).collect();
    let what = format!("{path} does not take this method; see /openapi.json");
    let status = StatusCode::METHOD_NOT_ALLOWED;
    ApiError::new(ErrorClass::BadRequest, status, "method_not_allowed", what)
}

/// Requests that have no reply yet when the server stops get one that says so. Streams end in their own
/// way.
async fn unless_cut(State(app): State<App>, request: Request, next: Next) -> Response {
    tokio::select! {
        biased;
        response = next.run(request) => response,
        why = app.lifecycle.when_cut() => why.into_response(),
    }
}

/// One request's panic is its own failure; what it said is on standard error.
fn panicked(_what: Box<dyn std::any::Any + Send + 'static>) -> Response<Body> {
    ApiError::server("internal_error", "this request ran into a fault of the server")
        .into_response()
}
