//! Items that a request holds, and the conversation that they make.

use serde_json::Value;

use crate::serve::errors::ApiError;
use crate::serve::openai::content::Content;
use crate::text::chat::{Message, Role, ToolCall};

/// What input items add to a conversation.
#[derive(Debug, Default)]
pub struct Conversation {
    /// Its messages.
    pub messages: Vec<Message>,
    /// What was left out, one sentence each.
    pub notes: Vec<String>,
    /// Reasoning that belongs to the assistant's turn that follows.
    thought: Option<String>,
}

impl Conversation {
    /// Goes on with a conversation.
    pub fn after(messages: Vec<Message>) -> Conversation {
        Conversation { messages, ..Conversation::default() }
    }

    /// Adds items.
    ///
    /// # Errors
    /// If one can't be read.
    pub fn extend(&mut self, items: &[Value]) -> Result<(), ApiError> {
        items.iter().enumerate().try_for_each(|(index, item)| self.item(index, item))
    }

    fn item(&mut self, index: usize, item: &Value) -> Result<(), ApiError> {
        let path = format!("input[{index}]");
        let field = |name: &str| item[name].as_str();
        let needed = |name: &str| {
            field(name).map(str::to_owned).ok_or_else(|| {
                ApiError::invalid(path.clone(), format!("{path}: the field {name:?} is missing"))
            })
        };
        let kind = match field("type") {
            Some(kind) => kind,
            None if item["role"].is_string() => "message",
            None => {
                let what = format!("{path}: an item is an object with a type, or with a role");
                return Err(ApiError::invalid(path, what));
            }
        };
        match kind {
            "message" => self.message(&path, item),
            "reasoning" => {
                let texts = [&item["content"], &item["summary"]];
                let texts = texts.iter().filter_map(|parts| parts.as_array()).flatten();
                let text: String = texts.filter_map(|part| part["text"].as_str()).collect();
                if !text.is_empty() {
                    self.thought.get_or_insert_default().push_str(&text);
                }
                Ok(())
            }
            "function_call" => {
                let call = ToolCall {
                    id: field("call_id").or(field("id")).unwrap_or_default().to_owned(),
                    name: needed("name")?,
                    arguments: item["arguments"].clone(),
                };
                self.assistant().tool_calls.push(call);
                Ok(())
            }
            "function_call_output" => {
                let output = match &item["output"] {
                    Value::Null => String::new(),
                    output => text(&format!("{path}.output"), output)?,
                };
                let mut message = Message::new(Role::Tool, output);
                message.tool_call_id = Some(needed("call_id")?);
                self.messages.push(message);
                Ok(())
            }
            "item_reference" => {
                let what = format!("{path}: references to items are not supported; send the items");
                Err(ApiError::unsupported(path, what))
            }
            other => {
                self.notes.push(format!("{path}: items of type {other} are left out"));
                Ok(())
            }
        }
    }

    fn message(&mut self, path: &str, item: &Value) -> Result<(), ApiError> {
        let role = item["role"].as_str().unwrap_or_default();
        let role = Role::from_name(role).filter(|role| *role != Role::Tool).ok_or_else(|| {
            let what = format!("{path}.role is {role:?}; use system, developer, user or assistant");
            ApiError::invalid(format!("{path}.role"), what)
        })?;
        let content = text(&format!("{path}.content"), &item["content"])?;
        match role {
            Role::Assistant => self.assistant().content += &content,
            role => self.messages.push(Message::new(role, content)),
        }
        Ok(())
    }

    /// The assistant's turn that items add to: its reasoning, words and calls are items of their own.
    fn assistant(&mut self) -> &mut Message {
        let thought = self.thought.take();
        let goes_on = thought.is_none()
            && self.messages.last().is_some_and(|message| message.role == Role::Assistant);
        if !goes_on {
            let mut turn = Message::new(Role::Assistant, "");
            turn.reasoning = thought;
            self.messages.push(turn);
        }
        let last = self.messages.len() - 1;
        &mut self.messages[last]
    }
}

fn text(path: &str, value: &Value) -> Result<String, ApiError> {
    use serde::Deserialize;
    let content = Content::deserialize(value);
    let content = content.map_err(|e| ApiError::invalid(path, format!("{path}: {e}")))?;
    content.text(path)
}
