//! Requests of `/v1/responses`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::items::Conversation;
use crate::serve::body::{RequestBody, Unsupported};
use crate::serve::errors::ApiError;
use crate::serve::generation::{Chat, Generation, Input, Limits, Reasoning};
use crate::serve::openai::format::{FormatOption, response_format};
use crate::serve::openai::messages::tool_choice;
use crate::serve::openai::options::{Sampling, time_limit, token_limit};
use crate::text::chat::{Message, Role};
use crate::text::tools::{Tool, ToolChoice};
use engine::service::{CachePolicy, Priority};

/// A request for a response.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ResponseRequest {
    /// The model; the one that is served if absent.
    pub model: Option<String>,
    /// A text, or a list of items.
    #[schema(value_type = Value)]
    pub input: Option<Value>,
    /// Instructions. Those of an earlier response don't go on.
    pub instructions: Option<String>,
    /// The response that this one goes on from.
    pub previous_response_id: Option<String>,
    /// Whether the response is kept, for `previous_response_id` and `GET`; yes, unless false.
    pub store: Option<bool>,
    /// Whether the answer comes piece by piece.
    pub stream: Option<bool>,
    /// Accepted; nothing is obfuscated on one's own machine.
    #[schema(value_type = Option<Object>)]
    pub stream_options: Option<Value>,
    /// Tools that may be called. Those that aren't functions are left out, and named.
    pub tools: Option<Vec<Value>>,
    /// `auto`, `none`, `required`, or an object that names a function.
    pub tool_choice: Option<Value>,
    /// Whether one answer may hold several calls.
    pub parallel_tool_calls: Option<bool>,
    /// Randomness.
    pub temperature: Option<f32>,
    /// Keeps the most likely tokens that make up this much of the probability.
    pub top_p: Option<f32>,
    /// Keeps this many most likely tokens.
    pub top_k: Option<i64>,
    /// Makes the answer repeatable.
    pub seed: Option<i64>,
    /// The most tokens, reasoning included.
    pub max_output_tokens: Option<i64>,
    /// Whether and how much the model thinks.
    pub reasoning: Option<ReasoningOption>,
    /// The form of the answer.
    pub text: Option<TextOption>,
    /// Kept with the response.
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Value>,
    /// Who asks.
    pub user: Option<String>,
    /// What the requests of one conversation have in common.
    pub prompt_cache_key: Option<String>,
    /// Accepted.
    pub safety_identifier: Option<String>,
    /// Accepted; one's own machine has one tier.
    pub service_tier: Option<String>,
    /// `disabled`: a prompt that is too long is an error.
    pub truncation: Option<String>,
    /// Accepted: reasoning is in the items already.
    pub include: Option<Vec<String>>,
    /// The most seconds that the request may take.
    pub timeout: Option<f64>,
}

impl RequestBody for ResponseRequest {
    const UNSUPPORTED: Unsupported = &[
        ("background", "false"),
        ("conversation", "null"),
        ("prompt", "null"),
        ("max_tool_calls", "null"),
        ("top_logprobs", "0"),
        ("context_management", "null"),
    ];
}

/// Whether and how much the model thinks.
#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
pub struct ReasoningOption {
    /// `none` turns it off; other words go to templates that know levels.
    pub effort: Option<String>,
    /// Accepted: reasoning is given whole.
    pub summary: Option<String>,
    /// Accepted, under its older name.
    pub generate_summary: Option<String>,
    /// The most tokens.
    pub budget: Option<usize>,
}

/// The form of the answer.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct TextOption {
    /// What it has to be.
    pub format: Option<FormatOption>,
    /// Accepted; models without it write as they do.
    pub verbosity: Option<String>,
}

/// A request in this server's terms.
#[derive(Debug)]
pub struct Prepared {
    /// What the engine is asked.
    pub generation: Generation,
    /// The conversation without its instructions, to go on from.
    pub conversation: Vec<Message>,
    /// The input as items.
    pub input: Vec<Value>,
    /// What was left out, one sentence each.
    pub notes: Vec<String>,
}

impl ResponseRequest {
    /// The request in this server's terms, after the conversation so far.
    ///
    /// # Errors
    /// If it makes no sense.
    pub fn prepare(&self, before: Vec<Message>) -> Result<Prepared, ApiError> {
        if self.truncation.as_deref().is_some_and(|how| how != "disabled") {
            let what = "truncation is not supported: a prompt that is too long is an error";
            return Err(ApiError::unsupported("truncation", what));
        }
        let input = self.items()?;
        let mut conversation = Conversation::after(before);
        conversation.extend(&input)?;
        let Conversation { messages, mut notes, .. } = conversation;
        let tools = self.tools(&mut notes)?;
        let choice = match tool_choice(self.tool_choice.as_ref(), &tools) {
            // All tools were left out, or those that are meant.
            Err(_) if tools.is_empty() && self.tools.as_ref().is_some_and(|t| !t.is_empty()) => {
                notes.push("tool_choice is left out with the tools".into());
                ToolChoice::Auto
            }
            choice => choice?,
        };
        let instructions = self.instructions.iter().filter(|text| !text.is_empty());
        let instructions = instructions.map(|text| Message::new(Role::System, text.as_str()));
        let chat = Chat {
            messages: instructions.chain(messages.iter().cloned()).collect(),
            tools,
            tool_choice: choice,
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            reasoning: self.reasoning(),
            template: Map::new(),
        };
        let format = self.text.as_ref().and_then(|text| text.format.as_ref());
        let generation = Generation {
            input: Input::Chat(chat),
            further: Vec::new(),
            choices: 1,
            sampling: self.sampling().options()?,
            stop: Vec::new(),
            limits: Limits {
                max_tokens: token_limit("max_output_tokens", self.max_output_tokens)?,
                timeout: time_limit(self.timeout)?,
            },
            logprobs: None,
            response_format: response_format("text.format", format)?,
            cache: CachePolicy::Shared,
            priority: Priority::Normal,
            draft: true,
            keep_special: false,
        };
        Ok(Prepared { generation, conversation: messages, input, notes })
    }

    fn items(&self) -> Result<Vec<Value>, ApiError> {
        match &self.input {
            Some(Value::String(text)) => Ok(vec![serde_json::json!({
                "type": "message", "role": "user",
                "content": [{"type": "input_text", "text": text}],
            })]),
            Some(Value::Array(items)) => Ok(items.clone()),
            None | Some(Value::Null) if self.previous_response_id.is_some() => Ok(Vec::new()),
            _ => Err(ApiError::invalid("input", "input must be a string or a list of items")),
        }
    }

    /// Functions. Agents offer tools of other kinds too, and work without them.
    fn tools(&self, notes: &mut Vec<String>) -> Result<Vec<Tool>, ApiError> {
        let mut tools: Vec<Tool> = Vec::new();
        for (index, definition) in self.tools.iter().flatten().enumerate() {
            let path = format!("tools[{index}]");
            if let Some(kind) = definition["type"].as_str().filter(|kind| *kind != "function") {
                notes.push(format!("{path}: tools of type {kind} are left out"));
                continue;
            }
            let tool = Tool::from_definition(definition)
                .map_err(|what| ApiError::invalid(path.clone(), format!("{path}: {what}")))?;
            if tools.iter().any(|other| other.name == tool.name) {
                let what = format!("{path}: a tool named {:?} is there already", tool.name);
                return Err(ApiError::invalid(path, what));
            }
            tools.push(tool);
        }
        Ok(tools)
    }

    fn sampling(&self) -> Sampling<'_> {
        Sampling {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: None,
            presence_penalty: None,
            frequency_penalty: None,
            repetition_penalty: None,
            seed: self.seed,
            logit_bias: None,
        }
    }

    fn reasoning(&self) -> Reasoning {
        let asked = self.reasoning.clone().unwrap_or_default();
        let off = asked.effort.as_deref() == Some("none") || asked.budget == Some(0);
        Reasoning {
            enabled: off.then_some(false),
            effort: asked.effort.filter(|_| !off),
            budget: asked.budget.filter(|&budget| budget > 0),
        }
    }
}
