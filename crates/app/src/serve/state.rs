//! What all handlers share.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::answer::{self, Answer};
use super::errors::ApiError;
use super::exchange::Exchange;
use super::generation::{Generation, Input};
use super::lifecycle::{Lifecycle, Phase};
use super::model::{Facts, Served};
use super::openai::store::Responses;
use super::security::Security;
use crate::telemetry::Recorder;
use crate::text::grammar::ResponseFormat;

/// The server, as handlers see it.
pub type App = Arc<Server>;

/// What all handlers share.
pub struct Server {
    /// Limits and names.
    pub options: Options,
    /// Who may ask.
    pub security: Security,
    /// The model.
    pub lifecycle: Arc<Lifecycle>,
    /// Replies that later requests refer to.
    pub responses: Responses,
    /// Takes finished requests.
    pub recorder: Arc<Recorder>,
    /// When the server began.
    pub begun: SystemTime,
}

/// Limits and names.
#[derive(Clone, Debug)]
pub struct Options {
    /// Names under which the model is served, the first of which replies carry; the model's own
    /// name if empty. `*` stands for any name.
    pub model_names: Vec<String>,
    /// The most bytes of a request's body.
    pub max_body_bytes: usize,
    /// The most time that a body may take to arrive.
    pub upload_timeout: Duration,
    /// How long a stream may be silent.
    pub keep_alive: Duration,
    /// The most time a request may take, unless it asks for less.
    pub request_timeout: Option<Duration>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            model_names: Vec::new(),
            max_body_bytes: 32 << 20,
            upload_timeout: Duration::from_secs(60),
            keep_alive: Duration::from_secs(5),
            request_timeout: None,
        }
    }
}

impl Server {
    /// A server around a model.
    pub fn new(
        options: Options,
        security: Security,
        lifecycle: Arc<Lifecycle>,
        recorder: Arc<Recorder>,
    ) -> App {
        Arc::new(Server {
            options,
            security,
            lifecycle,
            responses: Responses::default(),
            recorder,
            begun: SystemTime::now(),
        })
    }

    /// Names under which the model is served, `*` left out.
    pub fn names(&self, facts: &Facts) -> Vec<String> {
        let names = self.options.model_names.iter().filter(|name| *name != "*").cloned();
        let mut names: Vec<String> = names.collect();
        if names.is_empty() {
            names.push(facts.name.clone());
        }
        names
    }

    /// The model that a request names, and the name that its reply carries. A request that names
    /// none gets the one that there is.
    ///
    /// # Errors
    /// If there is no such model, or no model now.
    pub async fn model(&self, asked: Option<&str>) -> Result<(Arc<Served>, String), ApiError> {
        // A name that is not served loads nothing.
        if self.lifecycle.facts().is_ok() {
            self.about(asked)?;
        }
        let served = self.lifecycle.model().await?;
        let name = self.name(&served, asked)?;
        Ok((served, name))
    }

    /// The same for requests that need no answer of the model, and don't load it.
    ///
    /// # Errors
    /// If there is no such model, or none was ever loaded.
    pub fn about(&self, asked: Option<&str>) -> Result<(Arc<Facts>, String), ApiError> {
        let facts = self.lifecycle.facts()?;
        let name = self.name(&facts, asked)?;
        Ok((facts, name))
    }

    fn name(&self, facts: &Facts, asked: Option<&str>) -> Result<String, ApiError> {
        let mut names = self.names(facts);
        let any = self.options.model_names.iter().any(|name| name == "*");
        match asked {
            None | Some("") => Ok(names.swap_remove(0)),
            Some(asked) if names.iter().any(|name| name == asked) => Ok(asked.to_owned()),
            Some(_) if any => Ok(names.swap_remove(0)),
            Some(asked) => Err(unknown_model(asked, &names)),
        }
    }

    /// Begins to answer. Preparing a long prompt takes its time, so it happens aside.
    ///
    /// # Errors
    /// If the request makes no sense or can't be taken.
    pub async fn begin(
        &self,
        exchange: &Exchange,
        served: &Arc<Served>,
        mut generation: Generation,
        streams: bool,
    ) -> Result<Answer, ApiError> {
        let limits = &mut generation.limits;
        limits.timeout = match (limits.timeout, self.options.request_timeout) {
            (Some(asked), Some(most)) => Some(asked.min(most)),
            (asked, most) => asked.or(most),
        };
        exchange.generates(&served.name, &generation, streams);
        let cut = Box::pin(self.lifecycle.when_cut());
        let answer = if quick(&generation) {
            answer::begin(served, &generation, exchange, cut)?
        } else {
            let (served, exchange) = (Arc::clone(served), exchange.clone());
            let work = move || answer::begin(&served, &generation, &exchange, cut);
            aside(work).await?
        };
        exchange.notes(answer.prompt().notes.iter().cloned());
        let idle = answer.without_effect.iter();
        exchange.notes(idle.map(|name| format!("{name} changes nothing at temperature 0")));
        Ok(answer)
    }

    /// Where the server stands.
    pub fn phase(&self) -> Phase {
        self.lifecycle.phase()
    }

    /// Time since the server began.
    pub fn uptime(&self) -> Duration {
        self.begun.elapsed().unwrap_or_default()
    }
}

/// Does what takes as long as a request is big away from the threads that move bytes.
///
/// # Errors
/// Those of the work.
pub async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| ApiError::server("internal", "preparing the reply failed"))?
}

/// Whether a request is prepared within about a millisecond, and may be on a thread that also moves
/// bytes: its prompt is short, and there is no grammar to compile.
fn quick(generation: &Generation) -> bool {
    let tools = matches!(&generation.input, Input::Chat(chat) if !chat.tools.is_empty());
    let plain = generation.response_format == ResponseFormat::Text && !tools;
    plain && generation.inputs().map(Input::bytes).sum::<usize>() <= 8 << 10
}

fn unknown_model(asked: &str, names: &[String]) -> ApiError {
    let shown: String = asked.chars().take(100).collect();
    let what = format!("the model {shown:?} is not served here; these are: {}", names.join(", "));
    let error = ApiError::not_found("model_not_found", what);
    ApiError { param: Some("model".into()), ..error }
}
