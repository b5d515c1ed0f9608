//! Tools that a model may call, and the calls in what it writes.
//!
//! Models write calls as text, each family in its own format, which its chat template shows
//! ([`ToolFormat::of_template`]). [`ToolParser`] follows an answer as it streams and turns it into
//! [`ToolDelta`]s; a whole answer is the same stream in one piece. Only answers are searched: what a
//! model says about calls while it thinks is no call.

mod hermes;
mod json_stream;
mod parser;
mod typed;
mod xml;

use serde_json::{Map, Value, json};

pub use parser::ToolParser;
pub(crate) use typed::{Written, resolve, written};

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments; an empty object if it has none.
    pub parameters: Value,
    /// Whether arguments must obey the schema to the letter: one that can't be enforced is refused.
    pub strict: bool,
}

impl Tool {
    /// Reads a definition in OpenAI's form: `{"type": "function", "function": {"name": …,
    /// "parameters": …, "strict": …}}`, or the inner object alone.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn from_definition(definition: &Value) -> Result<Tool, String> {
        let function = definition.get("function").unwrap_or(definition);
        let name = function["name"].as_str().unwrap_or_default();
        check_name(name)?;
        let parameters = match &function["parameters"] {
            Value::Null => Value::Object(Map::new()),
            object @ Value::Object(_) => object.clone(),
            _ => {
                return Err(format!(
                    "the parameters of tool {name:?} must be a JSON schema object"
                ));
            }
        };
        Ok(Tool {
            name: name.to_owned(),
            description: function["description"].as_str().map(str::to_owned),
            parameters,
            strict: function["strict"].as_bool().unwrap_or(false),
        })
    }

    /// The definition as chat templates expect it.
    pub fn definition(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".into(), self.name.as_str().into());
        if let Some(description) = &self.description {
            function.insert("description".into(), description.as_str().into());
        }
        function.insert("parameters".into(), self.parameters.clone());
        json!({"type": "function", "function": function})
    }
}

/// Whether a name can stand in markup and in grammars as it is.
///
/// # Errors
/// Why not, in words.
pub fn check_name(name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-.:/".contains(c);
    if (1..=MAX_NAME).contains(&name.len()) && name.chars().all(fits) {
        return Ok(());
    }
    Err(format!(
        "a tool's name must have 1 to {MAX_NAME} characters, all of them letters, digits or one of \
         _ - . : /, not {name:?}"
    ))
}

/// The longest name of a tool, in characters.
const MAX_NAME: usize = 128;

/// Which tools the model is to call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As it likes.
    #[default]
    Auto,
    /// None.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// How a model writes its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToolFormat {
    /// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, strings
    /// verbatim and all else as JSON.
    QwenXml,
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
    HermesJson,
}

impl ToolFormat {
    /// The format that a chat template shows to its model; `None` if it shows none, as templates
    /// without tools.
    pub fn of_template(source: &str) -> Option<ToolFormat> {
        if source.contains("<function=") {
            Some(ToolFormat::QwenXml)
        } else if source.contains("<tool_call>") {
            Some(ToolFormat::HermesJson)
        } else {
            None
        }
    }
}

/// The tag before a call.
pub const CALL_OPEN: &str = "<tool_call>";
/// The tag after a call.
pub const CALL_CLOSE: &str = "</tool_call>";

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolDelta {
    /// Text outside calls.
    Text(String),
    /// A call begins; its arguments follow.
    Begin {
        /// Its number among the calls of this answer.
        index: usize,
        /// Its id, unique if the parser's prefix is.
        id: String,
        /// The tool called.
        name: String,
    },
    /// More of a call's arguments. All fragments together are one JSON object.
    Arguments {
        /// The call.
        index: usize,
        /// The next characters of its arguments.
        fragment: String,
    },
    /// A call ended.
    End {
        /// The call.
        index: usize,
        /// Whether the model wrote it to its end; otherwise its arguments were closed where they
        /// stopped.
        complete: bool,
    },
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
