//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use engine::service::{CachePolicy, Priority};
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::chat_stream::ChatWriter;
use super::format::{FormatOption, response_format};
use super::messages::{ChatMessage, conversation, tool_choice, tools};
use super::options::{generating_request, time_limit, token_limit};
use super::reply::{ChatLogprobs, Timings, Usage};
use crate::serve::body::{Json, RequestBody, Unsupported};
use crate::serve::errors::{ApiError, OpenAiError};
use crate::serve::exchange::Exchange;
use crate::serve::generation::{Call, Chat, Generation, Input, Limits, Reasoning, Whole};
use crate::serve::ids;
use crate::serve::model::Served;
use crate::serve::state::App;
use crate::serve::stream;

generating_request! {
    /// A request for a chat completion.
    pub struct ChatRequest {
        /// The model; the one that is served if absent.
        pub model: Option<String>,
        /// The conversation.
        pub messages: Vec<ChatMessage>,
        /// Tools that may be called, each `{"type": "function", "function": {…}}`.
        pub tools: Option<Vec<Value>>,
        /// `auto`, `none`, `required`, or an object that names a function.
        pub tool_choice: Option<Value>,
        /// Whether one answer may hold several calls.
        pub parallel_tool_calls: Option<bool>,
        /// What the answer has to be.
        pub response_format: Option<FormatOption>,
        /// The most tokens, reasoning included. Default: until the model stops or the context is full.
        pub max_completion_tokens: Option<i64>,
        /// The older name of `max_completion_tokens`.
        pub max_tokens: Option<i64>,
        /// Whether tokens of the answer come with log-probabilities.
        pub logprobs: Option<bool>,
        /// How many of the likeliest tokens come with each, up to 20.
        pub top_logprobs: Option<u32>,
        /// `none` turns thinking off; other words go to templates that know levels.
        pub reasoning_effort: Option<String>,
        /// Whether the model thinks.
        pub enable_thinking: Option<bool>,
        /// The most tokens of reasoning; 0 turns thinking off.
        #[serde(alias = "reasoning_budget")]
        pub thinking_budget: Option<i64>,
        /// Further variables of the chat template.
        pub chat_template_kwargs: Option<Map<String, Value>>,
        /// Accepted; nothing is kept of it.
        pub metadata: Option<Value>,
        /// Accepted; replies are not kept.
        pub store: Option<bool>,
        /// `text` alone.
        pub modalities: Option<Vec<String>>,
    }
}

/// Fields that would change an answer.
pub const UNSUPPORTED: Unsupported = &[
    ("audio", "null"),
    ("functions", "[]"),
    ("function_call", "\"none\""),
    ("web_search_options", "null"),
    ("typical_p", "1"),
    ("mirostat", "0"),
    ("dry_multiplier", "0"),
    ("xtc_probability", "0"),
    ("top_a", "0"),
    ("tfs_z", "1"),
    ("dynatemp_range", "0"),
    ("use_beam_search", "false"),
    ("best_of", "1"),
    ("guided_json", "null"),
    ("guided_regex", "null"),
    ("guided_grammar", "null"),
    ("grammar", "\"\""),
    ("json_schema", "null"),
    ("lora", "[]"),
    ("ignore_eos", "false"),
    ("min_tokens", "0"),
];

impl RequestBody for ChatRequest {
    const UNSUPPORTED: Unsupported = UNSUPPORTED;
}

impl ChatRequest {
    /// The request in this server's terms.
    ///
    /// # Errors
    /// If it makes no sense.
    pub fn generation(&self) -> Result<Generation, ApiError> {
        if let Some(other) = self.modalities.iter().flatten().find(|kind| *kind != "text") {
            let what = format!("the modality {other:?} is not supported; this model writes text");
            return Err(ApiError::unsupported("modalities", what));
        }
        if self.top_logprobs.is_some_and(|top| top > 0) && self.logprobs != Some(true) {
            let what = "top_logprobs needs \"logprobs\": true";
            return Err(ApiError::invalid("top_logprobs", what));
        }
        let tools = tools(self.tools.as_deref().unwrap_or_default())?;
        let chat = Chat {
            messages: conversation(&self.messages)?,
            tool_choice: tool_choice(self.tool_choice.as_ref(), &tools)?,
            tools,
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            reasoning: self.reasoning()?,
            template: self.template_variables(),
        };
        let max_tokens = match self.max_completion_tokens {
            None => token_limit("max_tokens", self.max_tokens)?,
            limit => token_limit("max_completion_tokens", limit)?,
        };
        Ok(Generation {
            input: Input::Chat(chat),
            further: Vec::new(),
            choices: self.n.unwrap_or(1) as usize,
            sampling: self.sampling()?,
            stop: self.stop.as_ref().map(|stop| stop.0.clone()).unwrap_or_default(),
            limits: Limits { max_tokens, timeout: time_limit(self.timeout)? },
            logprobs: (self.logprobs == Some(true))
                .then(|| self.top_logprobs.unwrap_or(0) as usize),
            response_format: response_format("response_format", self.response_format.as_ref())?,
            cache: cache_policy(self.cache_prompt),
            priority: Priority::Normal,
            draft: true,
            keep_special: false,
        })
    }

    /// Every spelling of "don't think" works: a budget of 0, effort `none`, `enable_thinking` at the
    /// top or among the template's variables.
    fn reasoning(&self) -> Result<Reasoning, ApiError> {
        let effort = self.reasoning_effort.as_deref();
        let kwargs = self.chat_template_kwargs.as_ref();
        let in_kwargs = kwargs.and_then(|kwargs| kwargs.get("enable_thinking"));
        let in_kwargs = match in_kwargs {
            None | Some(Value::Null) => None,
            Some(Value::Bool(on)) => Some(*on),
            Some(_) => {
                let path = "chat_template_kwargs.enable_thinking";
                return Err(ApiError::invalid(path, format!("{path} must be true or false")));
            }
        };
        let by_effort = match effort {
            Some("none" | "off") => Some(false),
            _ => None,
        };
        let budget = match self.thinking_budget {
            None | Some(-1) => None,
            Some(budget) => Some(usize::try_from(budget).map_err(|_| {
                ApiError::invalid("thinking_budget", "thinking_budget must be 0 or more")
            })?),
        };
        let by_budget = (budget == Some(0)).then_some(false);
        let enabled = self.enable_thinking.or(in_kwargs).or(by_effort).or(by_budget);
        Ok(Reasoning {
            enabled,
            effort: effort.filter(|_| by_effort.is_none()).map(str::to_owned),
            budget: budget.filter(|&budget| budget > 0),
        })
    }

    fn template_variables(&self) -> Map<String, Value> {
        let mut variables = self.chat_template_kwargs.clone().unwrap_or_default();
        variables.remove("enable_thinking");
        variables
    }

    /// Whether a last chunk tells the usage.
    fn include_usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|options| options.include_usage == Some(true))
    }
}

/// What `cache_prompt` means.
pub(super) fn cache_policy(cache_prompt: Option<bool>) -> CachePolicy {
    match cache_prompt {
        Some(false) => CachePolicy::Off,
        _ => CachePolicy::Shared,
    }
}

/// A chat completion.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatCompletion {
    /// Its name.
    pub id: String,
    /// `chat.completion`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The model that answered.
    pub model: String,
    /// The answers.
    pub choices: Vec<ChatChoice>,
    /// Tokens.
    pub usage: Usage,
    /// Times of the first choice.
    pub timings: Timings,
    /// The build that answered.
    pub system_fingerprint: &'static str,
    /// The seed that was used.
    pub seed: u64,
}

/// One answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatChoice {
    /// Its number.
    pub index: usize,
    /// What it says.
    pub message: AssistantMessage,
    /// Log-probabilities of its tokens, if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended: `stop`, `length` or `tool_calls`.
    pub finish_reason: &'static str,
}

/// What the model said.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct AssistantMessage {
    /// `assistant`.
    pub role: &'static str,
    /// Its text; null if it only called tools.
    pub content: Option<String>,
    /// Always null.
    pub refusal: Option<String>,
    /// What it thought.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// What it called.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ReplyToolCall>,
}

/// A tool call.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ReplyToolCall {
    /// Its id.
    pub id: String,
    /// `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// What is called.
    pub function: ReplyFunction,
}

/// A function to call.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ReplyFunction {
    /// Its name.
    pub name: String,
    /// Its arguments as JSON text.
    pub arguments: String,
}

/// Answers a conversation.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "OpenAI", request_body = ChatRequest,
    responses((status = 200, description = "The answer; a stream of chunks if `stream` is true", body = ChatCompletion),
              (status = "4XX", description = "The request makes no sense or can't be taken", body = OpenAiError),
              (status = "5XX", description = "The server can't answer", body = OpenAiError)))]
pub async fn chat_completions(
    State(app): State<App>,
    Extension(exchange): Extension<Exchange>,
    Json(request): Json<ChatRequest>,
) -> Result<Response, ApiError> {
    let (served, name) = app.model(request.model.as_deref()).await?;
    exchange.session(request.prompt_cache_key.as_deref().or(request.user.as_deref()));
    let generation = request.generation()?;
    let logprobs = generation.logprobs.is_some();
    let answer = app.begin(&exchange, &served, generation, request.stream == Some(true)).await?;
    if request.stream == Some(true) {
        let writer = ChatWriter::new(
            name,
            &answer,
            request.include_usage(),
            request.return_progress == Some(true),
            logprobs,
        );
        return Ok(stream::respond(answer, writer, app.options.keep_alive));
    }
    let seed = answer.seed;
    let choices = answer.whole().await?;
    Ok(axum::Json(completion(name, &served, choices, logprobs, seed)).into_response())
}

fn completion(
    model: String,
    served: &Arc<Served>,
    choices: Vec<Whole>,
    logprobs: bool,
    seed: u64,
) -> ChatCompletion {
    let usage = Usage::of(choices.iter().map(|choice| &choice.end), choices.len());
    let timings = Timings::of(&choices[0].end.done, &served.info);
    ChatCompletion {
        id: ids::fresh("chatcmpl-"),
        object: "chat.completion",
        created: ids::unix_time(),
        model,
        choices: choices.into_iter().enumerate().map(|(i, c)| choice(i, c, logprobs)).collect(),
        usage,
        timings,
        system_fingerprint: crate::cli::version(),
        seed,
    }
}

fn choice(index: usize, whole: Whole, logprobs: bool) -> ChatChoice {
    let Whole { delta, end } = whole;
    let (reasoning, text, calls) = (delta.reasoning(), delta.text(), delta.calls());
    let function = |Call { id, name, arguments }: Call| ReplyToolCall {
        id,
        kind: "function",
        function: ReplyFunction { name, arguments },
    };
    let message = AssistantMessage {
        role: "assistant",
        content: (calls.is_empty() || !text.is_empty()).then_some(text),
        refusal: None,
        reasoning_content: (!reasoning.is_empty()).then_some(reasoning),
        tool_calls: calls.into_iter().map(function).collect(),
    };
    let logprobs = logprobs.then(|| ChatLogprobs::of(delta.logprobs));
    ChatChoice { index, message, logprobs, finish_reason: end.finish.openai() }
}
