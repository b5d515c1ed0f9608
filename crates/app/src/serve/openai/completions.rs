//! `POST /v1/completions`: a text continued as it stands.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use engine::service::Priority;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::chat::{UNSUPPORTED, cache_policy};
use super::format::{FormatOption, response_format};
use super::options::{generating_request, time_limit, token_limit};
use super::reply::{Timings, Usage};
use crate::serve::answer::Answer;
use crate::serve::api::Api;
use crate::serve::body::{Json, RequestBody, Unsupported};
use crate::serve::errors::ApiError;
use crate::serve::exchange::Exchange;
use crate::serve::generation::{End, Generation, Input, Limits, Output, TokenLogprob, Whole};
use crate::serve::ids;
use crate::serve::model::Served;
use crate::serve::state::App;
use crate::serve::stream::{self, Writer, data};

generating_request! {
    /// A request for a completion.
    pub struct CompletionRequest {
        /// The model; the one that is served if absent.
        pub model: Option<String>,
        /// A text, token ids, or a list with one of them.
        pub prompt: Option<Prompt>,
        /// The most tokens. Default: until the model stops or the context is full.
        pub max_tokens: Option<i64>,
        /// How many of the likeliest tokens come with each; 0 gives the tokens alone.
        pub logprobs: Option<u32>,
        /// What the answer has to be.
        pub response_format: Option<FormatOption>,
    }
}

/// What is continued.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Texts, of which there may be one.
    Texts(Vec<String>),
    /// Lists of token ids, of which there may be one.
    TokenLists(Vec<Vec<u32>>),
}

impl Prompt {
    fn input(&self) -> Result<Input, ApiError> {
        match self {
            Prompt::Text(text) => Ok(Input::Text(text.clone())),
            Prompt::Tokens(ids) => Ok(Input::Tokens(ids.clone())),
            Prompt::Texts(texts) => match texts.as_slice() {
                [text] => Ok(Input::Text(text.clone())),
                _ => Err(several(texts.len())),
            },
            Prompt::TokenLists(lists) => match lists.as_slice() {
                [ids] => Ok(Input::Tokens(ids.clone())),
                _ => Err(several(lists.len())),
            },
        }
    }
}

fn several(count: usize) -> ApiError {
    let what = format!("{count} prompts were given; send each in a request of its own");
    ApiError::unsupported("prompt", what)
}

impl RequestBody for CompletionRequest {
    const UNSUPPORTED: Unsupported = &{
        let own = [("suffix", "\"\""), ("echo", "false")];
        let mut all = [("", "null"); UNSUPPORTED.len() + 2];
        let mut i = 0;
        while i < UNSUPPORTED.len() {
            all[i] = UNSUPPORTED[i];
            i += 1;
        }
        all[i] = own[0];
        all[i + 1] = own[1];
        all
    };
}

impl CompletionRequest {
    /// The request in this server's terms.
    ///
    /// # Errors
    /// If it makes no sense.
    pub fn generation(&self) -> Result<Generation, ApiError> {
        let prompt = self.prompt.as_ref();
        let prompt = prompt.ok_or_else(|| ApiError::invalid("prompt", "the prompt is missing"))?;
        Ok(Generation {
            input: prompt.input()?,
            choices: self.n.unwrap_or(1) as usize,
            sampling: self.sampling()?,
            stop: self.stop.as_ref().map(|stop| stop.0.clone()).unwrap_or_default(),
            limits: Limits {
                max_tokens: token_limit("max_tokens", self.max_tokens)?,
                timeout: time_limit(self.timeout)?,
            },
            logprobs: self.logprobs.map(|top| top as usize),
            response_format: response_format("response_format", self.response_format.as_ref())?,
            cache: cache_policy(self.cache_prompt),
            priority: Priority::Normal,
            draft: true,
            keep_special: false,
        })
    }
}

/// A completion, or a piece of one.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Completion {
    /// Its name.
    pub id: String,
    /// `text_completion`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The model that answered.
    pub model: String,
    /// The answers.
    pub choices: Vec<CompletionChoice>,
    /// Tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// Times of the first choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
    /// The build that answered.
    pub system_fingerprint: &'static str,
}

/// One answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CompletionChoice {
    /// Its number.
    pub index: usize,
    /// The text.
    pub text: String,
    /// Log-probabilities of its tokens, if asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// Why it ended: `stop` or `length`.
    pub finish_reason: Option<&'static str>,
}

/// Log-probabilities of a completion.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    /// The tokens' texts.
    pub tokens: Vec<String>,
    /// Their log-probabilities.
    pub token_logprobs: Vec<f32>,
    /// The likeliest tokens in their places.
    pub top_logprobs: Vec<BTreeMap<String, f32>>,
    /// Where they begin in the text, in characters.
    pub text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    /// Log-probabilities in this form; `offset` is where the first token begins, and moves on.
    fn of(tokens: Vec<TokenLogprob>, offset: &mut usize) -> CompletionLogprobs {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut all = CompletionLogprobs::default();
        for token in tokens {
            let shown = text(&token.bytes);
            all.text_offset.push(*offset);
            *offset += shown.chars().count();
            all.tokens.push(shown);
            all.token_logprobs.push(token.logprob);
            let mut top = BTreeMap::new();
            for (_, bytes, logprob) in &token.top {
                // Different bytes may look alike; the likelier one is shown.
                top.entry(text(bytes)).or_insert(*logprob);
            }
            all.top_logprobs.push(top);
        }
        all
    }
}

/// Continues a text.
#[utoipa::path(post, path = "/v1/completions", tag = "OpenAI", request_body = CompletionRequest,
    responses((status = 200, description = "The text; a stream of chunks if `stream` is true", body = Completion),
              (status = "4XX", description = "The request makes no sense or can't be taken"),
              (status = "5XX", description = "The server can't answer")))]
pub async fn completions(
    State(app): State<App>,
    Extension(exchange): Extension<Exchange>,
    Json(request): Json<CompletionRequest>,
) -> Result<Response, ApiError> {
    let (served, name) = app.model(request.model.as_deref()).await?;
    exchange.session(request.prompt_cache_key.as_deref().or(request.user.as_deref()));
    let generation = request.generation()?;
    let logprobs = generation.logprobs.is_some();
    let streams = request.stream == Some(true);
    let answer = app.begin(&exchange, &served, generation, streams).await?;
    if streams {
        let options = request.stream_options.as_ref();
        let include_usage = options.is_some_and(|options| options.include_usage == Some(true));
        let writer = CompletionWriter::new(name, &answer, include_usage, logprobs);
        return Ok(stream::respond(answer, writer, app.options.keep_alive));
    }
    let choices = answer.whole().await?;
    let usage = Usage::of(choices.iter().map(|choice| &choice.end));
    let timings = Timings::of(&choices[0].end.done, &served.info);
    let choice = |(index, whole): (usize, Whole)| CompletionChoice {
        index,
        text: whole.delta.text(),
        logprobs: logprobs.then(|| CompletionLogprobs::of(whole.delta.logprobs, &mut 0)),
        finish_reason: Some(whole.end.finish.openai()),
    };
    let reply = Completion {
        choices: choices.into_iter().enumerate().map(choice).collect(),
        usage: Some(usage),
        timings: Some(timings),
        ..empty(name)
    };
    Ok(axum::Json(reply).into_response())
}

fn empty(model: String) -> Completion {
    Completion {
        id: ids::fresh("cmpl-"),
        object: "text_completion",
        created: ids::unix_time(),
        model,
        choices: Vec::new(),
        usage: None,
        timings: None,
        system_fingerprint: crate::cli::version(),
    }
}

/// Writes chunks.
struct CompletionWriter {
    blank: Completion,
    served: Arc<Served>,
    include_usage: bool,
    logprobs: bool,
    /// Characters of each choice so far.
    offsets: Vec<usize>,
    ends: Vec<End>,
}

impl CompletionWriter {
    fn new(
        model: String,
        answer: &Answer,
        include_usage: bool,
        logprobs: bool,
    ) -> CompletionWriter {
        CompletionWriter {
            blank: empty(model),
            served: Arc::clone(answer.model()),
            include_usage,
            logprobs,
            offsets: vec![0; answer.choices()],
            ends: Vec::new(),
        }
    }

    fn choice(&self, choice: CompletionChoice, timings: Option<Timings>, out: &mut String) {
        data(&Completion { choices: vec![choice], timings, ..self.blank.clone() }, out);
    }
}

impl Writer for CompletionWriter {
    fn begin(&mut self, _out: &mut String) {}

    fn output(&mut self, output: Output, out: &mut String) {
        match output {
            Output::Started { .. } | Output::Prefill { .. } => {}
            Output::Delta { choice: index, delta } => {
                let (text, offset) = (delta.text(), &mut self.offsets[index]);
                let logprobs =
                    self.logprobs.then(|| CompletionLogprobs::of(delta.logprobs, offset));
                let choice = CompletionChoice { index, text, logprobs, finish_reason: None };
                self.choice(choice, None, out);
            }
            Output::End { choice: index, end } => {
                let finish_reason = Some(end.finish.openai());
                let choice =
                    CompletionChoice { index, text: String::new(), logprobs: None, finish_reason };
                self.choice(choice, Some(Timings::of(&end.done, &self.served.info)), out);
                self.ends.push(end);
            }
            Output::Failed(error) => data(&error.body(Api::OpenAi), out),
        }
    }

    fn finish(&mut self, out: &mut String) {
        if self.include_usage {
            let usage = Some(Usage::of(&self.ends));
            data(&Completion { usage, ..self.blank.clone() }, out);
        }
        out.push_str("data: [DONE]\n\n");
    }
}
