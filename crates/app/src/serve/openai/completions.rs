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
use crate::serve::api::Api;
use crate::serve::body::{Json, RequestBody, Unsupported};
use crate::serve::errors::{ApiError, OpenAiError};
use crate::serve::exchange::Exchange;
use crate::serve::generation::{End, Generation, Input, Limits, Output, TokenLogprob, Whole};
use crate::serve::ids;
use crate::serve::model::Served;
use crate::serve::prepare::MAX_CHOICES;
use crate::serve::state::App;
use crate::serve::stream::{self, Writer, data};
use crate::text::detokenize::decode;

generating_request! {
    /// A request for a completion.
    pub struct CompletionRequest {
        /// The model; the one that is served if absent.
        pub model: Option<String>,
        /// A text, token ids, or a list of either. The answers to each come in order, `n` of them.
        pub prompt: Option<Prompt>,
        /// Whether the prompt's text comes before the answer's.
        pub echo: Option<bool>,
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
    /// Texts.
    Texts(Vec<String>),
    /// Lists of token ids.
    TokenLists(Vec<Vec<u32>>),
}

impl Prompt {
    /// How many there are.
    fn len(&self) -> usize {
        match self {
            Prompt::Text(_) | Prompt::Tokens(_) => 1,
            Prompt::Texts(texts) => texts.len(),
            Prompt::TokenLists(lists) => lists.len(),
        }
    }

    fn inputs(&self) -> Vec<Input> {
        match self {
            Prompt::Text(text) => vec![Input::Text(text.clone())],
            Prompt::Tokens(ids) => vec![Input::Tokens(ids.clone())],
            Prompt::Texts(texts) => texts.iter().cloned().map(Input::Text).collect(),
            Prompt::TokenLists(lists) => lists.iter().cloned().map(Input::Tokens).collect(),
        }
    }
}

impl RequestBody for CompletionRequest {
    const UNSUPPORTED: Unsupported = &{
        let mut all = [("suffix", "\"\""); UNSUPPORTED.len() + 1];
        let mut i = 0;
        while i < UNSUPPORTED.len() {
            all[i] = UNSUPPORTED[i];
            i += 1;
        }
        all
    };
}

impl CompletionRequest {
    /// The request in this server's terms.
    ///
    /// # Errors
    /// If it makes no sense.
    pub fn generation(&self) -> Result<Generation, ApiError> {
        if self.echo == Some(true) && self.logprobs.is_some() {
            let what =
                "the log-probabilities of a prompt are not known: leave out echo or logprobs";
            return Err(ApiError::unsupported("echo", what));
        }
        let prompts = self.prompt.as_ref().map_or(0, Prompt::len);
        if prompts > MAX_CHOICES {
            let what = format!("{prompts} prompts are more than {MAX_CHOICES}; send them apart");
            return Err(ApiError::invalid("prompt", what));
        }
        let mut inputs = self.prompt.iter().flat_map(Prompt::inputs);
        let missing = || ApiError::invalid("prompt", "the prompt is missing");
        Ok(Generation {
            input: inputs.next().ok_or_else(missing)?,
            further: inputs.collect(),
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
              (status = "4XX", description = "The request makes no sense or can't be taken", body = OpenAiError),
              (status = "5XX", description = "The server can't answer", body = OpenAiError)))]
pub async fn completions(
    State(app): State<App>,
    Extension(exchange): Extension<Exchange>,
    Json(request): Json<CompletionRequest>,
) -> Result<Response, ApiError> {
    let (served, name) = app.model(request.model.as_deref()).await?;
    exchange.session(request.prompt_cache_key.as_deref().or(request.user.as_deref()));
    let generation = request.generation()?;
    let (logprobs, per_prompt) = (generation.logprobs.is_some(), generation.choices);
    let echoes = match request.echo {
        Some(true) => echoes(&served, &generation),
        _ => Vec::new(),
    };
    let streams = request.stream == Some(true);
    let answer = app.begin(&exchange, &served, generation, streams).await?;
    if streams {
        let options = request.stream_options.as_ref();
        let writer = CompletionWriter {
            blank: empty(name),
            served: Arc::clone(answer.model()),
            include_usage: options.is_some_and(|options| options.include_usage == Some(true)),
            logprobs,
            per_prompt,
            echoes,
            offsets: vec![0; answer.choices()],
            ends: BTreeMap::new(),
        };
        return Ok(stream::respond(answer, writer, app.options.keep_alive));
    }
    let choices = answer.whole().await?;
    let usage = Usage::of(choices.iter().map(|choice| &choice.end), per_prompt);
    let timings = Timings::of(&choices[0].end.done, &served.info);
    let choice = |(index, whole): (usize, Whole)| CompletionChoice {
        index,
        text: echoes.get(index / per_prompt).cloned().unwrap_or_default() + &whole.delta.text(),
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

/// The texts of the prompts.
fn echoes(served: &Served, generation: &Generation) -> Vec<String> {
    let text = |input: &Input| match input {
        Input::Text(text) => text.clone(),
        // A model without a tokenizer has no text.
        Input::Tokens(ids) => {
            let text = served.text.as_ref();
            text.map(|text| decode(text.tok(), ids, true)).unwrap_or_default()
        }
        Input::Chat(_) => String::new(),
    };
    generation.inputs().map(text).collect()
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
    /// How many choices a prompt has.
    per_prompt: usize,
    /// Texts that come before the answers to each prompt; empty if none do.
    echoes: Vec<String>,
    /// Characters of each choice so far.
    offsets: Vec<usize>,
    ends: BTreeMap<usize, End>,
}

impl CompletionWriter {
    fn choice(&self, choice: CompletionChoice, timings: Option<Timings>, out: &mut String) {
        data(&Completion { choices: vec![choice], timings, ..self.blank.clone() }, out);
    }
}

impl Writer for CompletionWriter {
    fn begin(&mut self, out: &mut String) {
        for (prompt, text) in std::mem::take(&mut self.echoes).into_iter().enumerate() {
            for index in prompt * self.per_prompt..(prompt + 1) * self.per_prompt {
                let text = text.clone();
                let choice = CompletionChoice { index, text, logprobs: None, finish_reason: None };
                self.choice(choice, None, out);
            }
        }
    }

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
                self.ends.insert(index, end);
            }
            Output::Failed(error) => data(&error.body(Api::OpenAi), out),
        }
    }

    fn finish(&mut self, out: &mut String) {
        if self.include_usage {
            let usage = Some(Usage::of(self.ends.values(), self.per_prompt));
            // Those of the first choice, as in a whole reply.
            let first = self.ends.values().next();
            let timings = first.map(|end| Timings::of(&end.done, &self.served.info));
            data(&Completion { usage, timings, ..self.blank.clone() }, out);
        }
        out.push_str("data: [DONE]\n\n");
    }
}
