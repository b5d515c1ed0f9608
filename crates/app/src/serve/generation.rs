//! What every API asks for and gets, in one shape.
//!
//! Each API turns its requests into a [`Generation`] and writes what [`super::answer`] makes of it,
//! [`Output`]s, in its own words. Nothing here knows any API, and nothing below knows HTTP.

use std::time::Duration;

use engine::SamplingOptions;
use engine::service::{CachePolicy, Done, Priority};
use serde_json::{Map, Value};

use super::errors::ApiError;
use crate::text::chat::Message;
use crate::text::grammar::ResponseFormat;
use crate::text::tools::{Tool, ToolChoice};

/// A request for answers to one prompt.
#[derive(Clone, Debug)]
pub struct Generation {
    /// What is answered or continued.
    pub input: Input,
    /// Further ones, each of which is answered as if it had come alone.
    pub further: Vec<Input>,
    /// How many answers to each.
    pub choices: usize,
    /// How tokens are chosen. What is absent follows the model's own defaults.
    pub sampling: SamplingOptions,
    /// Texts that end an answer and are left out of it.
    pub stop: Vec<String>,
    /// What ends an answer otherwise.
    pub limits: Limits,
    /// How many alternatives each token reports besides its own log-probability.
    pub logprobs: Option<usize>,
    /// What the answer has to be.
    pub response_format: ResponseFormat,
    /// What may be reused of earlier requests.
    pub cache: CachePolicy,
    /// Who goes first.
    pub priority: Priority,
    /// Whether rounds may draft.
    pub draft: bool,
    /// Whether control tokens appear in the text.
    pub keep_special: bool,
}

impl Generation {
    /// All that is answered or continued.
    pub fn inputs(&self) -> impl Iterator<Item = &Input> {
        std::iter::once(&self.input).chain(&self.further)
    }
}

/// What is answered or continued.
#[derive(Clone, Debug)]
pub enum Input {
    /// A conversation, through the model's chat template.
    Chat(Chat),
    /// A text that is continued as it stands; control tokens in it count.
    Text(String),
    /// The same as token ids.
    Tokens(Vec<u32>),
}

impl Input {
    /// Roughly how much there is to prepare.
    pub fn bytes(&self) -> usize {
        match self {
            Input::Chat(chat) => {
                let reasoning = |m: &Message| m.reasoning.as_ref().map_or(0, String::len);
                let messages = chat.messages.iter().map(|m| m.content.len() + reasoning(m) + 64);
                messages.sum::<usize>() + 1024 * chat.tools.len()
            }
            Input::Text(text) => text.len(),
            Input::Tokens(_) => 0,
        }
    }
}

/// A conversation.
#[derive(Clone, Debug, Default)]
pub struct Chat {
    /// Its messages.
    pub messages: Vec<Message>,
    /// Tools that may be called.
    pub tools: Vec<Tool>,
    /// Which of them must be.
    pub tool_choice: ToolChoice,
    /// Whether one answer may hold several calls.
    pub parallel_tool_calls: bool,
    /// Whether and how much the model thinks first.
    pub reasoning: Reasoning,
    /// Further variables of the chat template.
    pub template: Map<String, Value>,
}

/// What ends an answer besides the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The most tokens; `None` is until the context is full.
    pub max_tokens: Option<usize>,
    /// The most time, from the request's arrival.
    pub timeout: Option<Duration>,
}

/// Whether and how much the model thinks before it answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reasoning {
    /// `None` leaves it to the template.
    pub enabled: Option<bool>,
    /// A level, for templates that know levels.
    pub effort: Option<String>,
    /// The most tokens of reasoning, after which the block is closed.
    pub budget: Option<usize>,
}

/// What becomes of a request.
#[derive(Clone, Debug)]
pub enum Output {
    /// The first lane began.
    Started {
        /// Prompt tokens that need not be computed.
        cached: usize,
    },
    /// How far the prompt has come.
    Prefill {
        /// Tokens so far, cached ones included.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
        /// Of these, tokens that need not be computed.
        cached: usize,
    },
    /// New text of a choice.
    Delta {
        /// Which choice.
        choice: usize,
        /// What is new.
        delta: Delta,
    },
    /// A choice ended.
    End {
        /// Which choice.
        choice: usize,
        /// How.
        end: End,
    },
    /// The request failed; nothing follows.
    Failed(ApiError),
}

/// What is new of a choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Its pieces in order; neighbours are of different kinds or calls.
    pub pieces: Vec<Piece>,
    /// Log-probabilities of the answer's tokens, if asked for.
    pub logprobs: Vec<TokenLogprob>,
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// What the model thinks.
    Reasoning(String),
    /// What it answers.
    Text(String),
    /// What it calls.
    Call(CallDelta),
}

impl Delta {
    /// Whether there is nothing new.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.logprobs.is_empty()
    }

    /// Adds a piece; it joins the last one if it goes on with it.
    pub fn push(&mut self, piece: Piece) {
        match (self.pieces.last_mut(), piece) {
            (_, Piece::Reasoning(new) | Piece::Text(new)) if new.is_empty() => {}
            (Some(Piece::Reasoning(last)), Piece::Reasoning(new))
            | (Some(Piece::Text(last)), Piece::Text(new)) => *last += &new,
            (Some(Piece::Call(last)), Piece::Call(new))
                if last.index == new.index && new.begin.is_none() =>
            {
                last.arguments += &new.arguments;
            }
            (_, piece) => self.pieces.push(piece),
        }
    }

    /// Adds all of another one.
    pub fn extend(&mut self, other: Delta) {
        other.pieces.into_iter().for_each(|piece| self.push(piece));
        self.logprobs.extend(other.logprobs);
    }

    /// All reasoning.
    pub fn reasoning(&self) -> String {
        let text = |piece: &Piece| match piece {
            Piece::Reasoning(text) => Some(text.clone()),
            _ => None,
        };
        self.pieces.iter().filter_map(text).collect()
    }

    /// All text.
    pub fn text(&self) -> String {
        let text = |piece: &Piece| match piece {
            Piece::Text(text) => Some(text.clone()),
            _ => None,
        };
        self.pieces.iter().filter_map(text).collect()
    }

    /// All calls.
    pub fn calls(&self) -> Vec<Call> {
        let mut calls = Vec::new();
        for piece in &self.pieces {
            if let Piece::Call(piece) = piece {
                Call::add(&mut calls, piece);
            }
        }
        calls
    }
}

/// A piece of a tool call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallDelta {
    /// Which call of the answer, from 0.
    pub index: usize,
    /// Id and name, in the first piece of a call only.
    pub begin: Option<CallBegin>,
    /// More of the arguments' JSON text.
    pub arguments: String,
}

/// How a tool call begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallBegin {
    /// Its id.
    pub id: String,
    /// The tool's name.
    pub name: String,
}

/// A token of the answer with its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Its id.
    pub id: u32,
    /// The bytes it stands for.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The likeliest tokens in its place: id, bytes, log-probability.
    pub top: Vec<(u32, Vec<u8>, f32)>,
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq)]
pub struct End {
    /// Why.
    pub finish: FinishReason,
    /// The stop text that was met.
    pub stop: Option<String>,
    /// Tokens of reasoning.
    pub reasoning_tokens: usize,
    /// The engine's account.
    pub done: Done,
}

/// Why a choice ended, as a client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The model ended its turn, a stop text was met, or a grammar is complete.
    Stop,
    /// The limit of tokens.
    Length,
    /// The context is full.
    Context,
    /// The answer ends with tool calls.
    ToolCalls,
}

/// A whole choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Whole {
    /// All of its pieces.
    pub delta: Delta,
    /// How it ended.
    pub end: End,
}

/// A whole tool call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its id.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// The arguments as JSON text.
    pub arguments: String,
}

impl Call {
    /// Adds a piece to the calls so far.
    pub fn add(calls: &mut Vec<Call>, delta: &CallDelta) {
        if let Some(CallBegin { id, name }) = delta.begin.clone() {
            calls.push(Call { id, name, arguments: String::new() });
        }
        if let Some(call) = calls.get_mut(delta.index) {
            call.arguments += &delta.arguments;
        }
    }
}
