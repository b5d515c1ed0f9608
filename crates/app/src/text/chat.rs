//! A conversation to the prompt that a model was trained on.
//!
//! Messages arrive from people and programs in many shapes; [`ChatText::prompt`] brings them to the
//! one shape that templates expect, says what it changed ([`Prompt::notes`]), marks their text as
//! data ([`super::guard`]) and renders the checkpoint's template.
//!
//! Policies, all of which keep the beginning of a conversation rendered the same as it grows:
//! - `developer` messages are system messages.
//! - Where a template refuses a system message after the first one (tested when it is loaded),
//!   leading system messages are joined by a blank line, and later ones become user messages in
//!   their place. Moving them to the front would change the prefix and lose the cache.
//! - Arguments of replayed tool calls become an object: JSON text is parsed, nothing and `null` are
//!   `{}`, anything else is passed as one parameter named "arguments", so that a call which was
//!   broken once does not fail each later turn.
//! - Reasoning tags at the head of a replayed assistant turn stay markup, unless the reasoning
//!   comes in its own field. All other markup in messages is plain text.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::guard::{Guarded, Marks, NoStandIn};
use super::reasoning::{CLOSE, OPEN, Start};
use super::template::{Clock, Template, TemplateError, Templates};
use super::tokenizer::{Tok, Tokenizer, TokenizerError};

/// Who speaks in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions; also what newer APIs call "developer".
    System,
    /// The person or program that asks.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The role an API calls `name`.
    pub fn from_name(name: &str) -> Option<Role> {
        match name {
            "system" | "developer" => Some(Role::System),
            "user" => Some(Role::User),
            "assistant" => Some(Role::Assistant),
            "tool" => Some(Role::Tool),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// A call of a tool in an assistant message.
#[derive(Clone, Debug)]
pub struct ToolCall {
    /// The id that the tool message answers; may be empty.
    pub id: String,
    /// The name of the tool.
    pub name: String,
    /// The arguments as they arrived: JSON text in a string, or a JSON value.
    pub arguments: Value,
}

/// One message of a conversation.
#[derive(Clone, Debug)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// The text; parts joined, empty if there is none.
    pub content: String,
    /// What the model thought, kept apart from the text.
    pub reasoning: Option<String>,
    /// Tools the assistant called.
    pub tool_calls: Vec<ToolCall>,
    /// In a tool message: the call it answers.
    pub tool_call_id: Option<String>,
    /// The name of the speaker or tool, for templates that print it.
    pub name: Option<String>,
}

impl Message {
    /// A message with nothing but text.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message {
            role,
            content: content.into(),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }
}

/// What a template may be told beside the messages. `None` leaves the template's own default.
#[derive(Clone, Debug, Default)]
pub struct TemplateOptions {
    /// Whether the model thinks before it answers.
    pub enable_thinking: Option<bool>,
    /// Whether the reasoning of earlier turns stays in the prompt.
    pub preserve_thinking: Option<bool>,
    /// How much to think, for templates that know levels ("low", "medium", "xhigh").
    pub reasoning_effort: Option<String>,
    /// Further variables, from a request's `chat_template_kwargs`.
    pub extra: Map<String, Value>,
}

/// A rendered conversation.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// The text, with the parts that came from data marked.
    pub text: Guarded,
    /// How the model's output begins.
    pub start: Start,
    /// What was changed in the messages, one sentence each.
    pub notes: Vec<String>,
}

/// Why a conversation has no prompt.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The model is a base model.
    #[error(
        "the model has no chat template; give the text itself with --raw or a completion request"
    )]
    NoTemplate,
    /// There is nothing to answer.
    #[error("the conversation has no messages")]
    Empty,
    /// The template failed or refused.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The messages leave no character to mark them with.
    #[error(transparent)]
    NoStandIn(#[from] NoStandIn),
    /// The rendered text could not be tokenised.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// The text side of a model: its tokenizer, its templates, and the names of its special tokens.
pub struct ChatText {
    tok: Arc<dyn Tok>,
    templates: Templates,
    /// `bos_token`, `eos_token` and so on, as templates see them.
    special: Map<String, Value>,
    late_system: bool,
}

impl ChatText {
    /// Reads the tokenizer and the templates of a model folder.
    pub fn open(folder: &Path, clock: Clock) -> anyhow::Result<ChatText> {
        let tok = Tokenizer::open(&folder.join("tokenizer.json"))?;
        let templates = Templates::open(folder, clock)?;
        let config = std::fs::read_to_string(folder.join("tokenizer_config.json")).ok();
        let config = config.and_then(|text| serde_json::from_str(&text).ok());
        let special = special_tokens(&config.unwrap_or(Value::Null));
        Ok(ChatText::new(Arc::new(tok), templates, special))
    }

    /// Puts the parts together; `special` holds `bos_token` and the like for the template.
    pub fn new(tok: Arc<dyn Tok>, templates: Templates, special: Map<String, Value>) -> ChatText {
        let mut chat = ChatText { tok, templates, special, late_system: true };
        chat.late_system = chat.accepts_late_system();
        chat
    }

    /// The tokenizer.
    pub fn tok(&self) -> &dyn Tok {
        self.tok.as_ref()
    }

    /// The tokenizer, to be kept.
    pub fn shared_tok(&self) -> Arc<dyn Tok> {
        Arc::clone(&self.tok)
    }

    /// The chat templates.
    pub fn templates(&self) -> &Templates {
        &self.templates
    }

    /// Whether a system message may stand after the first message.
    pub fn late_system(&self) -> bool {
        self.late_system
    }

    /// Whether the template has a switch for thinking.
    pub fn thinking_switch(&self) -> bool {
        self.templates.choose(false).is_some_and(|t| t.mentions("enable_thinking"))
    }

    /// Renders a conversation up to the point where the model answers. `tools` are definitions in
    /// OpenAI form, empty for none.
    pub fn prompt(
        &self,
        messages: &[Message],
        tools: &[Value],
        options: &TemplateOptions,
    ) -> Result<Prompt, ChatError> {
        let template = self.templates.choose(!tools.is_empty()).ok_or(ChatError::NoTemplate)?;
        if messages.is_empty() {
            return Err(ChatError::Empty);
        }
        let mut notes = Vec::new();
        let messages = self.place_system(messages, &mut notes);
        let plain: Vec<Value> = messages
            .iter()
            .enumerate()
            .map(|(index, message)| message_json(index, message, &mut notes))
            .collect();
        let tools = Value::Array(tools.to_vec());
        let extra = extra_variables(options);
        let marks = self.marks(template, &[&Value::Array(plain.clone()), &tools, &extra])?;
        // Later entries win: a request's extra variables never replace the conversation.
        let mut context = match marks.apply_value(&extra) {
            Value::Object(extra) => extra,
            _ => Map::new(),
        };
        context.extend(self.special.clone());
        context.insert("messages".into(), plain.iter().map(|m| mark_message(&marks, m)).collect());
        let no_tools = tools.as_array().is_some_and(Vec::is_empty);
        let tools = if no_tools { Value::Null } else { marks.apply_value(&tools) };
        context.insert("tools".into(), tools);
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), Value::Bool(true));
        let text = Guarded::new(template.render(&Value::Object(context))?, marks);
        Ok(Prompt { start: Start::of_prompt(text.marked()), text, notes })
    }

    /// [`ChatText::prompt`] as token ids.
    pub fn prompt_ids(&self, prompt: &Prompt) -> Result<Vec<u32>, ChatError> {
        Ok(self.tok.encode(&prompt.text)?)
    }

    /// The ids of a text that is continued as it stands: added tokens in it count.
    pub fn raw_ids(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = self.tok.raw_prefix().to_vec();
        ids.extend(self.tok.encode(&Guarded::trusted(text))?);
        Ok(ids)
    }

    fn marks(&self, template: &Template, data: &[&Value]) -> Result<Marks, NoStandIn> {
        Marks::choose(self.tok.guarded_chars(), &[template.source()], data)
    }

    /// Moves system messages where the template accepts them.
    fn place_system(&self, messages: &[Message], notes: &mut Vec<String>) -> Vec<Message> {
        let mut placed: Vec<Message> = Vec::with_capacity(messages.len());
        for (index, message) in messages.iter().enumerate() {
            let mut message = message.clone();
            if message.role == Role::System && !placed.is_empty() && !self.late_system {
                if let [first] = placed.as_mut_slice()
                    && first.role == Role::System
                {
                    first.content = format!("{}\n\n{}", first.content, message.content);
                    notes.push(format!("messages[{index}]: system message joined to the first"));
                    continue;
                }
                message.role = Role::User;
                notes.push(format!(
                    "messages[{index}]: the template takes a system message only at the \
                     beginning; passed as a user message"
                ));
            }
            placed.push(message);
        }
        placed
    }

    /// Renders a conversation with a system message in its middle, to see whether that works.
    fn accepts_late_system(&self) -> bool {
        let turns = [Role::System, Role::User, Role::Assistant, Role::System, Role::User];
        let text = |index: usize| format!("text {index}");
        let messages: Vec<Message> =
            turns.iter().enumerate().map(|(i, &role)| Message::new(role, text(i))).collect();
        match self.prompt(&messages, &[], &TemplateOptions::default()) {
            Ok(prompt) => prompt.text.text().contains(&text(3)),
            Err(_) => false,
        }
    }
}

/// The special tokens that a `tokenizer_config.json` names, each a string or `{"content": …}`.
pub fn special_tokens(config: &Value) -> Map<String, Value> {
    let names = [
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
    ];
    let token = |name: &str| {
        let field = &config[name];
        let content = field.as_str().or_else(|| field["content"].as_str())?;
        Some((name.to_owned(), Value::from(content)))
    };
    names.iter().filter_map(|name| token(name)).collect()
}

fn extra_variables(options: &TemplateOptions) -> Value {
    let mut extra = options.extra.clone();
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            extra.insert(name.into(), value);
        }
    };
    set("enable_thinking", options.enable_thinking.map(Value::Bool));
    set("preserve_thinking", options.preserve_thinking.map(Value::Bool));
    set("reasoning_effort", options.reasoning_effort.clone().map(Value::String));
    Value::Object(extra)
}

/// A message in the shape that templates expect.
fn message_json(index: usize, message: &Message, notes: &mut Vec<String>) -> Value {
    let mut object = Map::new();
    object.insert("role".into(), message.role.name().into());
    object.insert("content".into(), message.content.as_str().into());
    let optional = [
        ("reasoning_content", &message.reasoning),
        ("tool_call_id", &message.tool_call_id),
        ("name", &message.name),
    ];
    for (key, value) in optional {
        if let Some(value) = value {
            object.insert(key.into(), value.as_str().into());
        }
    }
    if !message.tool_calls.is_empty() {
        let call = |(number, call): (usize, &ToolCall)| {
            let (arguments, note) = call_arguments(&call.arguments);
            let place = format!("messages[{index}].tool_calls[{number}].function.arguments");
            notes.extend(note.map(|note| format!("{place}: {note}")));
            let function = json!({"name": call.name, "arguments": arguments});
            json!({"id": call.id, "type": "function", "function": function})
        };
        let calls: Value = message.tool_calls.iter().enumerate().map(call).collect();
        object.insert("tool_calls".into(), calls);
    }
    Value::Object(object)
}

/// The arguments of a call as an object, and what had to be changed for that.
fn call_arguments(arguments: &Value) -> (Value, Option<String>) {
    let parsed = match arguments {
        Value::String(text) if text.trim().is_empty() => Value::Null,
        Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| arguments.clone()),
        other => other.clone(),
    };
    match parsed {
        Value::Object(_) => (parsed, None),
        Value::Null => (json!({}), None),
        _ => {
            let note = "not a JSON object; passed as one parameter named \"arguments\"";
            (json!({"arguments": arguments}), Some(note.into()))
        }
    }
}

/// Marks a message as data, except for the reasoning block at the head of an assistant's text.
fn mark_message(marks: &Marks, message: &Value) -> Value {
    let mut marked = marks.apply_value(message);
    // Roles are this program's own words.
    marked["role"] = message["role"].clone();
    if message["role"] == "assistant"
        && message["reasoning_content"].is_null()
        && let Some((thought, answer)) = message["content"].as_str().and_then(reasoning_block)
    {
        let thought = match thought.trim_start().strip_prefix(OPEN) {
            Some(thought) => format!("{OPEN}{}", marks.apply(thought)),
            None => marks.apply(thought).into_owned(),
        };
        marked["content"] = format!("{thought}{CLOSE}{}", marks.apply(answer)).into();
    }
    marked
}

/// The text of an assistant before and after the closing tag of its reasoning. Without an opening
/// tag at the head (output that began inside the block), the closing one has to stand on a line of
/// its own: anywhere else it is a mention.
fn reasoning_block(content: &str) -> Option<(&str, &str)> {
    let (thought, answer) = content.split_once(CLOSE)?;
    let opened = thought.trim_start().starts_with(OPEN);
    let own_line = (thought.is_empty() || thought.ends_with('\n'))
        && (answer.is_empty() || answer.starts_with('\n'));
    (opened || own_line).then_some((thought, answer))
}

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
