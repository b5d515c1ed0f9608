//! One choice of an answer: from tokens to text, reasoning and calls.

use std::sync::Arc;

use axum::http::StatusCode;
use engine::service::{Done, Finish, Token};

use super::errors::ApiError;
use super::generation::{
    CallBegin, CallDelta, Chat, Delta, End, FinishReason, Generation, Input, Piece,
};
use super::ids;
use super::logprobs::Waiting;
use super::model::Facts;
use super::prepare::Prepared;
use crate::telemetry::ErrorClass;
use crate::text::chat::ChatText;
use crate::text::stream::{self, OutputStream, StreamOptions};
use crate::text::tools::{ToolChoice, ToolDelta, ToolParser};

/// Follows one choice.
pub(super) struct Choice {
    /// `None` for a model without a tokenizer: there are tokens, and no text.
    text: Option<(Arc<ChatText>, OutputStream)>,
    stop_tokens: Vec<u32>,
    /// Tokens that arrived and count.
    tokens: usize,
    reasoning_tokens: usize,
    /// The stop text that was met. What arrives after it is void.
    stop: Option<String>,
    logprobs: Option<Waiting>,
    /// Finds calls; `None` if there are no tools, and then what looks like a call is text.
    tools: Option<ToolParser>,
    /// Names of the tools called.
    called: Vec<String>,
}

impl Choice {
    /// A choice at its beginning.
    pub(super) fn new(
        model: &Facts,
        generation: &Generation,
        prepared: &Prepared,
        exact_calls: bool,
    ) -> Choice {
        let options = StreamOptions {
            stops: generation.stop.clone(),
            start: prepared.start,
            keep_special: generation.keep_special,
        };
        let text = model.text.as_ref().map(|text| {
            let stream = OutputStream::new(text.tok(), &options);
            (Arc::clone(text), stream)
        });
        Choice {
            text,
            stop_tokens: model.stop_tokens.clone(),
            tokens: 0,
            reasoning_tokens: 0,
            stop: None,
            logprobs: generation.logprobs.map(|_| Waiting::default()),
            tools: parser(&generation.input, exact_calls),
            called: Vec::new(),
        }
    }

    /// Takes a round's tokens. With the token that completes a stop text, says how many tokens of
    /// the answer count.
    pub(super) fn tokens(&mut self, tokens: &[Token]) -> (Delta, Option<usize>) {
        let mut delta = Delta::default();
        for token in tokens {
            if self.stop.is_some() {
                break;
            }
            self.token(token, &mut delta);
            if self.stop.is_some() {
                return (delta, Some(self.tokens));
            }
        }
        (delta, None)
    }

    /// Ends the choice.
    ///
    /// # Errors
    /// If it did not end by itself.
    pub(super) fn end(&mut self, done: Done) -> Result<(Delta, End), ApiError> {
        let mut delta = Delta::default();
        if let Some((_, stream)) = &mut self.text
            && self.stop.is_none()
        {
            let rest = stream.finish();
            self.give(rest, &mut delta);
        }
        if let Some(tools) = &mut self.tools {
            let mut found = Vec::new();
            tools.finish(&mut found);
            found.into_iter().for_each(|piece| take(piece, &mut self.called, &mut delta));
        }
        if let (None, Some(waiting)) = (&self.stop, &mut self.logprobs) {
            delta.logprobs.extend(waiting.release());
        }
        let finish = self.finish(done.finish)?;
        let (stop, reasoning_tokens) = (self.stop.take(), self.reasoning_tokens);
        Ok((delta, End { finish, stop, reasoning_tokens, done }))
    }

    /// Names of the tools called so far.
    pub(super) fn called(&self) -> Vec<String> {
        self.called.clone()
    }

    fn token(&mut self, token: &Token, delta: &mut Delta) {
        self.tokens += 1;
        if self.stop_tokens.contains(&token.id) {
            return;
        }
        let Some((text, stream)) = &mut self.text else {
            return;
        };
        let before = stream.in_reasoning();
        let new = stream.push(text.tok(), token.id);
        let (thinking, holds) = (before || stream.in_reasoning(), stream.holds());
        self.reasoning_tokens += usize::from(thinking);
        let (bytes, stopped) = (new.answer.len(), new.stop.is_some());
        if let Some(waiting) = &mut self.logprobs
            && !thinking
        {
            waiting.push(text.tok(), token);
            if stopped {
                delta.logprobs.extend(waiting.cut(bytes));
            } else if !holds {
                delta.logprobs.extend(waiting.release());
            }
        }
        self.give(new, delta);
    }

    fn give(&mut self, new: stream::Delta, delta: &mut Delta) {
        self.stop = new.stop;
        delta.push(Piece::Reasoning(new.reasoning));
        let Some(tools) = &mut self.tools else {
            return delta.push(Piece::Text(new.answer));
        };
        let mut found = Vec::new();
        tools.push(&new.answer, &mut found);
        found.into_iter().for_each(|piece| take(piece, &mut self.called, delta));
    }

    fn finish(&self, finish: Finish) -> Result<FinishReason, ApiError> {
        match finish {
            _ if self.stop.is_some() => Ok(FinishReason::Stop),
            Finish::Stop | Finish::Constraint if !self.called.is_empty() => {
                Ok(FinishReason::ToolCalls)
            }
            Finish::Stop | Finish::Constraint => Ok(FinishReason::Stop),
            Finish::Length => Ok(FinishReason::Length),
            Finish::Context => Ok(FinishReason::Context),
            Finish::Cancelled => {
                let what = "the answer was cancelled: the server is stopping";
                Err(ApiError::unavailable("cancelled", what, std::time::Duration::from_secs(5)))
            }
            Finish::Deadline => Err(ApiError::new(
                ErrorClass::Timeout,
                StatusCode::REQUEST_TIMEOUT,
                "deadline_exceeded",
                "the request's time was up before the answer was complete; raise the timeout or \
                 ask for fewer tokens",
            )),
        }
    }
}

fn parser(input: &Input, exact: bool) -> Option<ToolParser> {
    let Input::Chat(Chat { tools, tool_choice, .. }) = input else { return None };
    let may_call = !tools.is_empty() && *tool_choice != ToolChoice::None;
    let parser = || ToolParser::new(tools, ids::fresh("call_"));
    may_call.then(|| if exact { parser().exact() } else { parser() })
}

/// Adds a piece of the answer to what is new.
fn take(piece: ToolDelta, called: &mut Vec<String>, delta: &mut Delta) {
    let call = |index, begin, arguments| Piece::Call(CallDelta { index, begin, arguments });
    match piece {
        ToolDelta::Text(text) => delta.push(Piece::Text(text)),
        ToolDelta::Begin { index, id, name } => {
            called.push(name.clone());
            delta.push(call(index, Some(CallBegin { id, name }), String::new()));
        }
        ToolDelta::Arguments { index, fragment } => delta.push(call(index, None, fragment)),
        ToolDelta::End { .. } => {}
    }
}
