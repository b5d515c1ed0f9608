//! Requests of `/v1/messages`, and the conversation that they make.

use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::serve::body::{RequestBody, Unsupported};
use crate::serve::errors::ApiError;
use crate::serve::generation::{Chat, Generation, Input, Limits, Reasoning};
use crate::serve::openai::options::Sampling;
use crate::text::chat::{Message, Role, ToolCall};
use crate::text::grammar::ResponseFormat;
use crate::text::tools::{Tool, ToolChoice};
use engine::service::{CachePolicy, Priority};

/// Claude Code puts a line into its system text that differs in every request and would make each
/// miss the cache; the model has no use for it.
const BILLING: &str = "x-anthropic-billing-header:";

/// A request for a message.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessagesRequest {
    /// The model; the one that is served if absent.
    pub model: Option<String>,
    /// The conversation.
    pub messages: Vec<InMessage>,
    /// Instructions: a text, or text blocks.
    #[schema(value_type = Option<Value>)]
    pub system: Option<Blocks>,
    /// The most tokens, thinking included.
    pub max_tokens: Option<i64>,
    /// Randomness.
    pub temperature: Option<f32>,
    /// Keeps the most likely tokens that make up this much of the probability.
    pub top_p: Option<f32>,
    /// Keeps this many most likely tokens.
    pub top_k: Option<i64>,
    /// Texts that end the answer and are left out of it.
    pub stop_sequences: Option<Vec<String>>,
    /// Whether the answer comes piece by piece.
    pub stream: Option<bool>,
    /// Tools that may be called.
    pub tools: Option<Vec<InTool>>,
    /// Which of them must be.
    pub tool_choice: Option<InToolChoice>,
    /// Whether the model thinks.
    pub thinking: Option<Thinking>,
    /// The form of the answer, and how much to think.
    pub output_config: Option<OutputConfig>,
    /// The form of the answer, under its older name.
    pub output_format: Option<OutputFormat>,
    /// Who asks.
    pub metadata: Option<Metadata>,
    /// Accepted; one's own machine has one tier.
    pub service_tier: Option<String>,
    /// Accepted: whatever fits is cached.
    #[schema(value_type = Option<Object>)]
    pub cache_control: Option<Value>,
}

impl RequestBody for MessagesRequest {
    const UNSUPPORTED: Unsupported = &[("mcp_servers", "[]"), ("container", "null")];
}

/// A message.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct InMessage {
    /// `user`, `assistant` or `system`.
    pub role: String,
    /// A text, or blocks.
    #[schema(value_type = Value)]
    pub content: Blocks,
}

/// A text, or blocks.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "Value")]
pub struct Blocks(pub Vec<Map<String, Value>>);

impl TryFrom<Value> for Blocks {
    type Error = String;

    fn try_from(value: Value) -> Result<Blocks, String> {
        let text = |text: String| {
            Map::from_iter([("type".to_owned(), "text".into()), ("text".to_owned(), text.into())])
        };
        match value {
            Value::String(content) => Ok(Blocks(vec![text(content)])),
            Value::Array(blocks) => {
                let block = |block| match block {
                    Value::Object(block) => Ok(block),
                    Value::String(content) => Ok(text(content)),
                    _ => Err("a block must be an object with a type".to_owned()),
                };
                blocks.into_iter().map(block).collect::<Result<_, _>>().map(Blocks)
            }
            _ => Err("expected a string or a list of blocks".to_owned()),
        }
    }
}

/// A tool.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct InTool {
    /// `custom`, or absent.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// Its name.
    pub name: Option<String>,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments.
    pub input_schema: Option<Value>,
    /// Whether arguments must obey the schema to the letter.
    pub strict: Option<bool>,
    /// Accepted: whatever fits is cached.
    #[schema(value_type = Option<Object>)]
    pub cache_control: Option<Value>,
}

/// Which tools must be called.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct InToolChoice {
    /// `auto`, `any`, `tool` or `none`.
    #[serde(rename = "type")]
    pub kind: String,
    /// With `tool`: its name.
    pub name: Option<String>,
    /// Whether an answer holds one call at most.
    pub disable_parallel_tool_use: Option<bool>,
}

/// Whether the model thinks.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct Thinking {
    /// `enabled`, `adaptive` or `disabled`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The most tokens of thinking.
    pub budget_tokens: Option<i64>,
    /// Accepted: thinking is shown.
    pub display: Option<String>,
}

/// The form of the answer, and how much to think.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct OutputConfig {
    /// A level, for templates that know levels.
    pub effort: Option<String>,
    /// The form of the answer.
    pub format: Option<OutputFormat>,
}

/// The form of the answer.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct OutputFormat {
    /// `json_schema`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The schema.
    pub schema: Option<Value>,
}

/// Who asks.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct Metadata {
    /// A name for the user.
    pub user_id: Option<String>,
}

impl MessagesRequest {
    /// The request in this server's terms.
    ///
    /// # Errors
    /// If it makes no sense.
    pub fn generation(&self) -> Result<Generation, ApiError> {
        let max_tokens = match self.max_tokens {
            None => None,
            Some(limit) if limit > 0 => Some(usize::try_from(limit).unwrap_or(usize::MAX)),
            Some(limit) => {
                let what = format!("max_tokens is {limit}; use 1 or more");
                return Err(ApiError::invalid("max_tokens", what));
            }
        };
        let sampling = Sampling {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: None,
            presence_penalty: None,
            frequency_penalty: None,
            repetition_penalty: None,
            seed: None,
            logit_bias: None,
        };
        Ok(Generation {
            input: Input::Chat(self.chat()?),
            further: Vec::new(),
            choices: 1,
            sampling: sampling.options()?,
            stop: self.stop_sequences.clone().unwrap_or_default(),
            limits: Limits { max_tokens, timeout: None },
            logprobs: None,
            response_format: self.format()?,
            cache: CachePolicy::Shared,
            priority: Priority::Normal,
            draft: true,
            keep_special: false,
        })
    }

    /// The conversation.
    ///
    /// # Errors
    /// If a block can't be read.
    pub fn chat(&self) -> Result<Chat, ApiError> {
        let tools = self.tools()?;
        let mut messages = Vec::new();
        if let Some(system) = &self.system {
            let text = system_text(system)?;
            if !text.is_empty() {
                messages.push(Message::new(Role::System, text));
            }
        }
        for (index, message) in self.messages.iter().enumerate() {
            add(&mut messages, index, message)?;
        }
        Ok(Chat {
            messages,
            tool_choice: self.tool_choice(&tools)?,
            tools,
            parallel_tool_calls: self
                .tool_choice
                .as_ref()
                .is_none_or(|choice| choice.disable_parallel_tool_use != Some(true)),
            reasoning: self.reasoning()?,
            template: Map::new(),
        })
    }

    fn tools(&self) -> Result<Vec<Tool>, ApiError> {
        let mut tools: Vec<Tool> = Vec::new();
        for (index, tool) in self.tools.iter().flatten().enumerate() {
            let path = format!("tools[{index}]");
            if let Some(kind) = tool.kind.as_deref().filter(|kind| *kind != "custom") {
                let what = format!(
                    "{path}: tools of type {kind:?} run on Anthropic's servers; only \"custom\" ones work here"
                );
                return Err(ApiError::unsupported(path, what));
            }
            let definition = serde_json::json!({
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            });
            let tool = Tool::from_definition(&definition)
                .map_err(|what| ApiError::invalid(path.clone(), format!("{path}: {what}")))?;
            if tools.iter().any(|other| other.name == tool.name) {
                let what = format!("{path}: a tool named {:?} is there already", tool.name);
                return Err(ApiError::invalid(path, what));
            }
            tools.push(tool);
        }
        Ok(tools)
    }

    fn tool_choice(&self, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
        let Some(choice) = &self.tool_choice else { return Ok(ToolChoice::Auto) };
        let invalid = |what: String| Err(ApiError::invalid("tool_choice", what));
        match (choice.kind.as_str(), &choice.name) {
            ("auto", _) => Ok(ToolChoice::Auto),
            ("none", _) => Ok(ToolChoice::None),
            ("any", _) if tools.is_empty() => {
                invalid("tool_choice is \"any\" and there are no tools".into())
            }
            ("any", _) => Ok(ToolChoice::Required),
            ("tool", Some(name)) if tools.iter().any(|tool| tool.name == *name) => {
                Ok(ToolChoice::Named(name.clone()))
            }
            ("tool", name) => {
                invalid(format!("tool_choice names {name:?}, which is not among the tools"))
            }
            (kind, _) => invalid(format!("tool_choice is {kind:?}; use auto, any, tool or none")),
        }
    }

    fn reasoning(&self) -> Result<Reasoning, ApiError> {
        let effort = self.output_config.as_ref().and_then(|config| config.effort.clone());
        let Some(thinking) = &self.thinking else {
            // Anthropic's models think only when asked to.
            return Ok(Reasoning { enabled: Some(false), effort: None, budget: None });
        };
        match (thinking.kind.as_str(), thinking.budget_tokens) {
            ("disabled", _) => Ok(Reasoning { enabled: Some(false), effort: None, budget: None }),
            ("enabled" | "adaptive", None) => {
                Ok(Reasoning { enabled: Some(true), effort, budget: None })
            }
            ("enabled" | "adaptive", Some(budget)) if budget > 0 => {
                let budget = usize::try_from(budget).ok();
                Ok(Reasoning { enabled: Some(true), effort, budget })
            }
            ("enabled" | "adaptive", Some(budget)) => {
                let what = format!("thinking.budget_tokens is {budget}; use 1 or more");
                Err(ApiError::invalid("thinking.budget_tokens", what))
            }
            (kind, _) => {
                let what = format!("thinking.type is {kind:?}; use enabled, adaptive or disabled");
                Err(ApiError::invalid("thinking.type", what))
            }
        }
    }

    fn format(&self) -> Result<ResponseFormat, ApiError> {
        let config = self.output_config.as_ref().and_then(|config| config.format.as_ref());
        let Some(format) = config.or(self.output_format.as_ref()) else {
            return Ok(ResponseFormat::Text);
        };
        match (format.kind.as_str(), &format.schema) {
            ("json_schema", Some(schema)) => Ok(ResponseFormat::JsonSchema {
                name: "response".into(),
                schema: schema.clone(),
                strict: false,
            }),
            ("json_schema", None) => {
                Err(ApiError::invalid("output_config.format", "a json_schema needs a schema"))
            }
            (kind, _) => {
                let what = format!("output_config.format is of type {kind:?}; use json_schema");
                Err(ApiError::unsupported("output_config.format", what))
            }
        }
    }
}

fn system_text(system: &Blocks) -> Result<String, ApiError> {
    let mut texts = Vec::new();
    for (index, block) in system.0.iter().enumerate() {
        let text = text_of(block).ok_or_else(|| {
            let what = format!("system[{index}]: only text blocks make up a system text");
            ApiError::unsupported(format!("system[{index}]"), what)
        })?;
        if !text.starts_with(BILLING) {
            texts.push(text);
        }
    }
    Ok(texts.join("\n\n"))
}

fn text_of(block: &Map<String, Value>) -> Option<&str> {
    (block.get("type")? == "text").then(|| block.get("text")?.as_str())?
}

/// Adds a message. Results of tools become messages of their own, before the user's words.
fn add(messages: &mut Vec<Message>, index: usize, message: &InMessage) -> Result<(), ApiError> {
    let role = match message.role.as_str() {
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "system" => Role::System,
        role => {
            let path = format!("messages[{index}].role");
            let what = format!("{path} is {role:?}; use user or assistant");
            return Err(ApiError::invalid(path, what));
        }
    };
    let mut turn = Message::new(role, "");
    let mut spoke = false;
    for (number, block) in message.content.0.iter().enumerate() {
        let path = format!("messages[{index}].content[{number}]");
        let field = |name: &str| block.get(name).and_then(Value::as_str);
        match (field("type").unwrap_or_default(), role) {
            ("text", _) => {
                let text = field("text").ok_or_else(|| missing(&path, "text"))?;
                if spoke && role == Role::User {
                    turn.content.push('\n');
                }
                turn.content += text;
                spoke = true;
            }
            ("thinking", Role::Assistant) => {
                let thought = field("thinking").ok_or_else(|| missing(&path, "thinking"))?;
                turn.reasoning.get_or_insert_default().push_str(thought);
            }
            // Nobody here can read it.
            ("redacted_thinking", Role::Assistant) => {}
            ("tool_use", Role::Assistant) => turn.tool_calls.push(ToolCall {
                id: field("id").unwrap_or_default().to_owned(),
                name: field("name").ok_or_else(|| missing(&path, "name"))?.to_owned(),
                arguments: block.get("input").cloned().unwrap_or_default(),
            }),
            ("tool_result", Role::User) => {
                let content = result_text(&path, block)?;
                let mut result = Message::new(Role::Tool, content);
                result.tool_call_id = field("tool_use_id").map(str::to_owned);
                messages.push(result);
            }
            (kind, _) => {
                let what =
                    format!("{path}: blocks of type {kind:?} are not supported in this place");
                return Err(ApiError::unsupported(path, what));
            }
        }
    }
    if spoke || role != Role::User {
        messages.push(turn);
    }
    Ok(())
}

fn result_text(path: &str, block: &Map<String, Value>) -> Result<String, ApiError> {
    let content = match block.get("content") {
        None | Some(Value::Null) => String::new(),
        Some(content) => {
            let blocks = Blocks::try_from(content.clone());
            let blocks =
                blocks.map_err(|what| ApiError::invalid(path, format!("{path}: {what}")))?;
            let mut texts = Vec::new();
            for block in &blocks.0 {
                let kind = block.get("type").and_then(Value::as_str).unwrap_or_default();
                let text = text_of(block).ok_or_else(|| {
                    let what =
                        format!("{path}: blocks of type {kind:?} are not supported in results");
                    ApiError::unsupported(path, what)
                })?;
                texts.push(text.to_owned());
            }
            texts.join("\n")
        }
    };
    Ok(match block.get("is_error").and_then(Value::as_bool) {
        Some(true) => format!("Error: {content}"),
        _ => content,
    })
}

fn missing(path: &str, field: &str) -> ApiError {
    ApiError::invalid(path, format!("{path}: the field {field:?} is missing"))
}
