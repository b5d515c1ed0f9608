//! Messages of chat requests, and the conversation that they make.

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::content::Content;
use crate::serve::errors::ApiError;
use crate::text::chat::{Message, Role, ToolCall};
use crate::text::tools::{Tool, ToolChoice};

/// A message.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ChatMessage {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What it says.
    pub content: Option<Content>,
    /// The speaker's name, for templates that print it.
    pub name: Option<String>,
    /// What an assistant thought, from an earlier reply.
    #[serde(alias = "reasoning")]
    pub reasoning_content: Option<String>,
    /// Tools that an assistant called.
    pub tool_calls: Option<Vec<MessageToolCall>>,
    /// The call that a tool's message answers.
    pub tool_call_id: Option<String>,
    /// Why an assistant refused.
    pub refusal: Option<String>,
}

/// A tool call of an earlier reply.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessageToolCall {
    /// Its id.
    pub id: Option<String>,
    /// Always `function`.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// What was called.
    pub function: MessageFunction,
}

/// A called function.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessageFunction {
    /// Its name.
    pub name: String,
    /// Its arguments: JSON text, or the object itself.
    #[serde(default)]
    pub arguments: Value,
}

/// The conversation that a request holds.
///
/// # Errors
/// If a message can't be read.
pub fn conversation(messages: &[ChatMessage]) -> Result<Vec<Message>, ApiError> {
    messages.iter().enumerate().map(|(index, message)| one(index, message)).collect()
}

fn one(index: usize, message: &ChatMessage) -> Result<Message, ApiError> {
    let role = Role::from_name(&message.role).ok_or_else(|| {
        let what = format!(
            "messages[{index}].role is {:?}; use system, developer, user, assistant or tool",
            message.role
        );
        ApiError::invalid(format!("messages[{index}].role"), what)
    })?;
    let path = format!("messages[{index}].content");
    let content = match (&message.content, &message.refusal) {
        (Some(content), _) => content.text(&path)?,
        (None, Some(refusal)) => refusal.clone(),
        (None, None) => String::new(),
    };
    let calls = message.tool_calls.iter().flatten().map(|call| ToolCall {
        id: call.id.clone().unwrap_or_default(),
        name: call.function.name.clone(),
        arguments: call.function.arguments.clone(),
    });
    Ok(Message {
        role,
        content,
        reasoning: message.reasoning_content.clone().filter(|text| !text.is_empty()),
        tool_calls: calls.collect(),
        tool_call_id: message.tool_call_id.clone(),
        name: message.name.clone(),
    })
}

/// The tools that a request offers, in OpenAI's form.
///
/// # Errors
/// If one is no function, or two have one name.
pub fn tools(definitions: &[Value]) -> Result<Vec<Tool>, ApiError> {
    let mut tools: Vec<Tool> = Vec::with_capacity(definitions.len());
    for (index, definition) in definitions.iter().enumerate() {
        let path = format!("tools[{index}]");
        match definition["type"].as_str() {
            None | Some("function") => {}
            Some(kind) => {
                let what =
                    format!("{path}: tools of type {kind:?} are not supported; use \"function\"");
                return Err(ApiError::unsupported(path, what));
            }
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

/// Which tools must be called: a word, or an object that names one.
///
/// # Errors
/// If it makes no sense with these tools.
pub fn tool_choice(choice: Option<&Value>, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
    let invalid = |what: String| Err(ApiError::invalid("tool_choice", what));
    let choice = match choice {
        None | Some(Value::Null) => return Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" | "any" => ToolChoice::Required,
            _ => {
                return invalid(format!(
                    "tool_choice is {word:?}; use auto, none, required or an object that names a function"
                ));
            }
        },
        Some(object) => {
            let name = object["function"]["name"].as_str().or_else(|| object["name"].as_str());
            let Some(name) = name else {
                return invalid("tool_choice names no function".into());
            };
            ToolChoice::Named(name.to_owned())
        }
    };
    match &choice {
        ToolChoice::Named(name) if !tools.iter().any(|tool| tool.name == *name) => {
            invalid(format!("tool_choice names {name:?}, which is not among the tools"))
        }
        ToolChoice::Required if tools.is_empty() => {
            invalid("tool_choice is \"required\" and there are no tools".into())
        }
        _ => Ok(choice),
    }
}
