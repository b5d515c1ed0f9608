//! `/traces`, `/traces/{id}`, `/traces/stats` and `/metrics`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::json;
use utoipa::{IntoParams, OpenApi};

use super::metrics::CONTENT_TYPE;
use super::recorder::Recorder;
use super::stats::{Collector, Course, MAX_INTERVALS};
use super::store::{Filter, Reader, StoreError, now_us};
use super::when;
use crate::serve::errors::{ApiError, OpenAiError};

/// Records in one answer, if the request doesn't say, and the most that it may say.
const DEFAULT_LIMIT: usize = 50;
const MAX_LIMIT: usize = 1000;
/// What was answered last is waited for so long, to be in what is read.
const WRITTEN_WITHIN: Duration = Duration::from_secs(1);
/// What statistics and their course go back to, if the request doesn't say.
const DEFAULT_SINCE: &str = "1h";

/// The routes; whoever serves them guards them with its keys.
pub fn routes<S: Clone + Send + Sync + 'static>(recorder: Arc<Recorder>) -> Router<S> {
    Router::new()
        .route("/traces", get(list))
        .route("/traces/stats", get(stats))
        .route("/traces/{id}", get(one))
        .route("/metrics", get(metrics))
        .with_state(recorder)
}

#[derive(OpenApi)]
#[openapi(paths(list, stats, one, metrics))]
struct Description;

/// The part of the OpenAPI document that is about these routes.
pub fn document() -> utoipa::openapi::OpenApi {
    Description::openapi()
}

/// The query of `/traces` and `/traces/stats`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Asked {
    /// Only requests begun since: `15m`, `2h`, `7d` ago, a time, or microseconds since 1970.
    since: Option<String>,
    /// Only requests begun before.
    before: Option<String>,
    /// Only requests of this client.
    client: Option<String>,
    /// Only requests of this conversation.
    session: Option<String>,
    /// Only requests on this route.
    endpoint: Option<String>,
    /// Only requests that this model answered.
    model: Option<String>,
    /// Only requests that ended so: `ok`, `error`, or a class of errors.
    outcome: Option<String>,
    /// The most requests of a list; 50 if absent.
    #[param(maximum = 1000)]
    limit: Option<usize>,
    /// Intervals of the course of statistics; none if absent.
    #[param(maximum = 500)]
    intervals: Option<usize>,
}

impl Asked {
    fn filter(&self, now_us: u64) -> Result<Filter, ApiError> {
        let time = |name: &'static str, text: &Option<String>| {
            let parsed = text.as_deref().map(|text| when::parse(text, now_us)).transpose();
            parsed.map_err(|reason| ApiError::invalid(name, reason))
        };
        Ok(Filter {
            since_us: time("since", &self.since)?,
            before_us: time("before", &self.before)?,
            client: self.client.clone(),
            session: self.session.clone(),
            endpoint: self.endpoint.clone(),
            model: self.model.clone(),
            outcome: self.outcome.clone(),
        })
    }

    fn within(name: &'static str, value: Option<usize>, most: usize) -> Result<usize, ApiError> {
        let value = value.unwrap_or(0);
        if value > most {
            return Err(ApiError::invalid(name, format!("{name} is {value}; use at most {most}")));
        }
        Ok(value)
    }
}

type AskedQuery = Result<Query<Asked>, QueryRejection>;

fn asked(query: AskedQuery) -> Result<Asked, ApiError> {
    match query {
        Ok(Query(asked)) => Ok(asked),
        Err(rejection) => Err(ApiError::bad_request("invalid_query", rejection.body_text())),
    }
}

/// Requests, the newest first.
#[utoipa::path(get, path = "/traces", tag = "Server", params(Asked),
    responses((status = 200, description = "`traces`, and `next_before` where the next page begins"),
              (status = 400, description = "A query that makes no sense", body = OpenAiError),
              (status = 404, description = "This server keeps no traces", body = OpenAiError)))]
async fn list(
    State(recorder): State<Arc<Recorder>>,
    query: AskedQuery,
) -> Result<Response, ApiError> {
    let asked = asked(query)?;
    let filter = asked.filter(now_us())?;
    let limit = match Asked::within("limit", asked.limit, MAX_LIMIT)? {
        0 => DEFAULT_LIMIT,
        limit => limit,
    };
    let traces = read(recorder, move |reader| reader.list(&filter, limit)).await?;
    // Where the next page begins, if there may be one.
    let next = traces.last().filter(|_| traces.len() == limit).map(|last| last.started_us);
    Ok(Json(json!({ "traces": traces, "next_before": next })).into_response())
}

/// All requests of a trace, with what their time went to.
#[utoipa::path(get, path = "/traces/{id}", tag = "Server",
    params(("id" = String, Path, description = "A trace id or a span id")),
    responses((status = 200, description = "`requests`"),
              (status = 404, description = "There is no such trace", body = OpenAiError)))]
async fn one(
    State(recorder): State<Arc<Recorder>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let wanted = id.clone();
    let requests = read(recorder, move |reader| reader.get(&wanted)).await?;
    if requests.is_empty() {
        let what = "no trace has this id; it may be too old, or not written yet. Ids are those of \
                    /traces and of the header x-th-trace-id";
        return Err(ApiError::not_found("trace_not_found", what));
    }
    Ok(Json(json!({ "id": id, "requests": requests })).into_response())
}

/// Percentiles, rates and shares: in all, by model and by client, of the last hour unless `since`
/// says otherwise.
#[utoipa::path(get, path = "/traces/stats", tag = "Server", params(Asked),
    responses((status = 200, description = "`stats`"),
              (status = 400, description = "A query that makes no sense", body = OpenAiError),
              (status = 404, description = "This server keeps no traces", body = OpenAiError)))]
async fn stats(
    State(recorder): State<Arc<Recorder>>,
    query: AskedQuery,
) -> Result<Response, ApiError> {
    let asked = asked(query)?;
    let now = now_us();
    let mut filter = asked.filter(now)?;
    let default = || when::parse(DEFAULT_SINCE, now).unwrap_or(0);
    let since = *filter.since_us.get_or_insert_with(default);
    let until = filter.before_us.unwrap_or(now);
    let intervals = Asked::within("intervals", asked.intervals, MAX_INTERVALS)?;
    let course = (intervals > 0).then(|| Course::new(since, until, intervals));
    let stats = read(recorder, move |reader| {
        let mut collector = Collector::new(course);
        reader.samples(&filter, |sample| collector.add(&sample))?;
        Ok(collector.finish())
    });
    let body = json!({ "since_us": since, "until_us": until, "stats": stats.await? });
    Ok(Json(body).into_response())
}

/// Metrics in Prometheus's text format.
#[utoipa::path(get, path = "/metrics", tag = "Server",
    responses((status = 200, description = "The metrics", content_type = "text/plain")))]
async fn metrics(State(recorder): State<Arc<Recorder>>) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], recorder.metrics().text()).into_response()
}

/// Reads the store on a thread that may wait. What was answered before is in it, if it can be written.
async fn read<T: Send + 'static>(
    recorder: Arc<Recorder>,
    read: impl FnOnce(&Reader) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, ApiError> {
    let reading = tokio::task::spawn_blocking(move || {
        // A store that can't be written may still be read.
        let _ = recorder.flush(WRITTEN_WITHIN);
        read(&recorder.reader()?)
    });
    match reading.await {
        Ok(result) => result.map_err(store_error),
        Err(_) => Err(ApiError::server("traces_failed", "reading the store of traces failed")),
    }
}

fn store_error(error: StoreError) -> ApiError {
    let what = error.to_string();
    match error {
        StoreError::Off => ApiError::not_found("traces_off", what),
        StoreError::Missing => ApiError::not_found("no_traces", what),
        _ => ApiError::server("traces_unreadable", what),
    }
}

#[cfg(test)]
#[path = "routes_tests.rs"]
mod tests;
