//! What an answer has to obey: formats, tools that must be called, how long the model may think.
//!
//! [`Grammars`] belongs to a tokenizer. It turns the rules of a request ([`AnswerRules`]) into the
//! [`Constraint`] that the engine asks in each round. A model thinks freely; what is asked of the
//! answer begins after the block of reasoning ([`guide`]).
//!
//! Grammars come from strangers. They are compiled on a thread of their own, within the limits at
//! the top of [`compile`]; the engine's thread only walks what was compiled, and each of its steps
//! has a limit as well, at which the request fails.

mod calls;
mod compile;
mod guide;
mod schema;
mod tag;
#[cfg(test)]
mod tests;
mod vocabulary;

use std::sync::Arc;

use engine::service::Constraint;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::regex_to_lark;
use serde_json::{Value, json};

use self::compile::Compiler;
use self::guide::{Guide, Plan, Rule, Thinking};
use self::tag::Tag;
use self::vocabulary::Vocabulary;
use crate::text::reasoning::{CLOSE, OPEN, Start};
use crate::text::tokenizer::Tok;
use crate::text::tools::{CALL_CLOSE, CALL_OPEN, Tool, ToolChoice, ToolFormat};

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
#[derive(Clone, Copy, Debug)]
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

/// The rules of one answer, compiled.
#[derive(Default)]
pub struct Guided {
    /// What the engine asks; `None` if every answer obeys.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Whether calls obey a grammar from their opening tag to their closing one, as
    /// [`crate::text::tools::ToolParser::exact`] wants to know.
    pub exact_calls: bool,
    /// What of the rules is not enforced, a sentence each.
    pub notes: Vec<String>,
}

/// Rules that can't be enforced, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct GrammarError {
    what: String,
    /// Whether it is the server's load, not the rules, that stands in the way.
    pub busy: bool,
}

impl GrammarError {
    fn new(what: impl Into<String>) -> GrammarError {
        GrammarError { what: what.into(), busy: false }
    }

    fn busy(what: impl Into<String>) -> GrammarError {
        GrammarError { what: what.into(), busy: true }
    }
}

/// The name of the grammar of answers that are no calls.
const ANSWER: &str = "answer";

/// Compiles rules for the models of one tokenizer.
pub struct Grammars {
    vocabulary: Arc<Vocabulary>,
    compiler: Compiler,
    think_open: Option<u32>,
    think_close: Arc<Tag>,
    call_open: Arc<Tag>,
    call_close: Arc<Tag>,
    /// Tokens that close a block of reasoning.
    closing: Vec<u32>,
}

impl Grammars {
    /// Prepares the tokenizer, which takes a fraction of a second: once for each model.
    /// `stop_tokens` end an answer.
    ///
    /// # Errors
    /// A tokenizer without any such token, or one that can't be searched.
    pub fn new(tok: Arc<dyn Tok>, stop_tokens: &[u32]) -> Result<Grammars, GrammarError> {
        let think_close = Arc::new(Tag::new(CLOSE, tok.as_ref()));
        let before = tok.encode_ordinary(match &*think_close {
            Tag::Token(_) => "\n",
            Tag::Text(_) => "\n</think>",
        });
        let mut closing = before.map_err(|error| GrammarError::new(error.to_string()))?;
        closing.extend(think_close.token());
        let think_open = tok.added_id(OPEN);
        let call_open = Arc::new(Tag::new(CALL_OPEN, tok.as_ref()));
        let call_close = Arc::new(Tag::new(CALL_CLOSE, tok.as_ref()));
        let vocabulary = Arc::new(Vocabulary::new(tok, stop_tokens)?);
        let compiler = Compiler::new(vocabulary.clone())?;
        Ok(Grammars {
            vocabulary,
            compiler,
            think_open,
            think_close,
            call_open,
            call_close,
            closing,
        })
    }

    /// Compiles the rules of a request, on a thread of its own; the same rules a second time cost
    /// nothing.
    ///
    /// # Errors
    /// Rules that can't be enforced: the request's fault.
    pub fn guide(&self, rules: &AnswerRules<'_>) -> Result<Guided, GrammarError> {
        let mut notes = Vec::new();
        let (rule, exact_calls) = self.rule(rules, &mut notes)?;
        let thinking = self.thinking(rules, &mut notes);
        let limited = thinking.as_ref().is_some_and(|thinking| thinking.budget.is_some());
        if matches!(rule, Rule::Free) && !limited {
            return Ok(Guided { notes, ..Guided::default() });
        }
        let plan = Plan { vocabulary: self.vocabulary.clone(), thinking, rule };
        let constraint = Box::new(Guide::new(plan, rules.start == Start::Reasoning));
        Ok(Guided { constraint: Some(constraint), exact_calls, notes })
    }

    /// The block of reasoning that comes before the answer, if there may be one.
    fn thinking(&self, rules: &AnswerRules<'_>, notes: &mut Vec<String>) -> Option<Thinking> {
        // A block that the model has to open itself can only be told by its token.
        let open = match rules.start {
            Start::Reasoning => None,
            Start::Either => Some(self.think_open?),
            Start::Answer => return None,
        };
        if rules.reasoning_budget == Some(0) && open.is_some() {
            notes.push(
                "a reasoning budget of 0 tokens closes the block once the model opens it".into(),
            );
        }
        Some(Thinking {
            open,
            close: self.think_close.clone(),
            closing: self.closing.clone(),
            budget: rules.reasoning_budget,
        })
    }

    /// What the answer has to obey, and whether calls in it are exact.
    fn rule(
        &self,
        rules: &AnswerRules<'_>,
        notes: &mut Vec<String>,
    ) -> Result<(Rule, bool), GrammarError> {
        let tools = match rules.choice {
            ToolChoice::None => &[],
            ToolChoice::Named(name) => {
                let found = rules.tools.iter().position(|tool| tool.name == *name);
                let found = found.ok_or_else(|| {
                    GrammarError::new(format!(
                        "tool_choice names {name:?}, which is not among the tools"
                    ))
                })?;
                &rules.tools[found..=found]
            }
            ToolChoice::Auto | ToolChoice::Required => rules.tools,
        };
        let must = matches!(rules.choice, ToolChoice::Required | ToolChoice::Named(_));
        if must && tools.is_empty() {
            return Err(GrammarError::new("tool_choice asks for a call, but there are no tools"));
        }
        if must && rules.tool_format.is_none() {
            return Err(GrammarError::new(
                "tool_choice asks for a call, but this model's chat template knows no tools",
            ));
        }
        let format = rules.tool_format.filter(|_| !tools.is_empty());
        let answer = if must { None } else { self.answer(rules.format, notes)? };
        let Some(format) = format else {
            return Ok(match answer {
                Some(answer) => (self.grammar(rules, "@answer", vec![answer], notes)?, false),
                None => (self.forbid_calls(rules), false),
            });
        };
        let lazy = !must && answer.is_none();
        if lazy && rules.parallel && !tools.iter().any(|tool| tool.strict) {
            return Ok((Rule::Free, false));
        }
        let (open, close) = (self.call_open.lark(), self.call_close.lark());
        let markup = calls::Markup { format, open: &open, close: &close };
        let written = calls::lark(tools, &markup);
        let compile = |written: &calls::Calls, notes: &mut Vec<String>| {
            notes.extend(written.notes.iter().cloned());
            if lazy {
                let start = "start: after_open\n".to_owned() + &written.lark;
                let call = self.compiler.compile(TopLevelGrammar::from_lark(start), notes)?;
                let (tag, parallel) = (self.call_open.clone(), rules.parallel);
                return Ok(Rule::Lazy { tag, call, parallel });
            }
            let calls = if rules.parallel { "call (\"\\n\" call)*" } else { "call" };
            let others = answer.as_ref().map_or("", |_| " | @answer");
            let start = format!("({calls}{others})\n{}", written.lark);
            self.grammar(rules, &start, answer.clone().into_iter().collect(), notes)
        };
        let written = written?;
        let noted = notes.len();
        match compile(&written, notes) {
            Ok(rule) => Ok((rule, true)),
            // Nothing strict is lost by asking less of the others.
            Err(error) if written.relaxable => {
                notes.truncate(noted);
                notes.push(format!("arguments are not held to their schemas: {error}"));
                let free: Vec<Tool> = tools
                    .iter()
                    .map(|tool| match tool.strict {
                        true => tool.clone(),
                        false => Tool { parameters: json!({}), ..tool.clone() },
                    })
                    .collect();
                Ok((compile(&calls::lark(&free, &markup)?, notes)?, true))
            }
            Err(error) => Err(error),
        }
    }

    /// A grammar for answers from their beginning; `start` is its first rule and what follows.
    fn grammar(
        &self,
        rules: &AnswerRules<'_>,
        start: &str,
        named: Vec<GrammarWithLexer>,
        notes: &mut Vec<String>,
    ) -> Result<Rule, GrammarError> {
        // Models put line breaks after their reasoning; they belong to its markup.
        let lead = match rules.start {
            Start::Answer => "start: ",
            Start::Reasoning | Start::Either => "LEAD: /\\n{1,2}/\nstart: LEAD? ",
        };
        let first = GrammarWithLexer::from_lark(format!("{lead}{start}"));
        let grammars = std::iter::once(first).chain(named).collect();
        let grammar = TopLevelGrammar { grammars, max_tokens: None };
        Ok(Rule::Grammar(self.compiler.compile(grammar, notes)?))
    }

    /// The grammar of a format.
    fn answer(
        &self,
        format: &ResponseFormat,
        notes: &mut Vec<String>,
    ) -> Result<Option<GrammarWithLexer>, GrammarError> {
        let named = |grammar| GrammarWithLexer { name: Some(ANSWER.into()), ..grammar };
        let grammar = match format {
            ResponseFormat::Text => return Ok(None),
            ResponseFormat::JsonObject => {
                let schema = schema::prepare(&json!({"type": "object"}), true)?.schema;
                GrammarWithLexer::from_json_schema(schema)
            }
            ResponseFormat::JsonSchema { schema, strict, .. } => {
                let prepared = schema::prepare(schema, *strict)?;
                notes.extend(prepared.notes);
                GrammarWithLexer::from_json_schema(prepared.schema)
            }
            ResponseFormat::Regex(regex) => {
                compile::check_text("the regular expression", regex)?;
                let (_, inner, _) = schema::anchors(regex);
                let lark = regex_to_lark(inner, "");
                GrammarWithLexer::from_lark(format!("start: /(?:{lark})/"))
            }
            ResponseFormat::Lark(lark) => {
                compile::check_text("the grammar", lark)?;
                GrammarWithLexer::from_lark(lark.clone())
            }
        };
        Ok(Some(named(grammar)))
    }

    /// A model that was shown tools and must not call them. Where the tag is no token of its own,
    /// calls stay possible as text; nobody looks for them then.
    fn forbid_calls(&self, rules: &AnswerRules<'_>) -> Rule {
        match self.call_open.token() {
            Some(token) if !rules.tools.is_empty() && *rules.choice == ToolChoice::None => {
                Rule::Without(token)
            }
            _ => Rule::Free,
        }
    }
}
