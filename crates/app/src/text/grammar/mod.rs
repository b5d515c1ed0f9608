//! What an answer has to obey: formats, tools that must be called, how long the model may think.
//!
//! [`Grammars`] belongs to a tokenizer. It turns the rules of a request ([`AnswerRules`]) into the
//! [`Constraint`] that the engine asks in each round. Compiling happens here, on the caller's
//! thread, within limits ([`limits`]); the engine's thread only walks what was compiled.
//!
//! [`Constraint`]: engine::service::Constraint

use serde_json::Value;

use crate::text::reasoning::Start;
use crate::text::tools::{Tool, ToolChoice, ToolFormat};

/// What an answer has to be.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ResponseFormat {
    /// Anything.
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// A JSON document that a schema accepts.
    JsonSchema {
        /// The schema's name, for messages.
        name: String,
        /// The schema.
        schema: Value,
        /// Whether a schema that can't be enforced to the letter is refused; otherwise what can't
        /// be is left out and named in the notes.
        strict: bool,
    },
    /// A text that a regular expression matches as a whole.
    Regex(String),
    /// A text of a grammar in llguidance's dialect of Lark.
    Lark(String),
}

/// All that a request asks of its answer.
#[derive(Clone, Debug)]
pub struct AnswerRules<'a> {
    /// How the output begins.
    pub start: Start,
    /// The most tokens of reasoning; then the block is closed.
    pub reasoning_budget: Option<usize>,
    /// The format of the answer.
    pub format: &'a ResponseFormat,
    /// The tools.
    pub tools: &'a [Tool],
    /// Which of them must be called.
    pub choice: &'a ToolChoice,
    /// Whether one answer may make several calls.
    pub parallel: bool,
    /// How the model writes calls, if it can.
    pub tool_format: Option<ToolFormat>,
}
