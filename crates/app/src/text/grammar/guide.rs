//! The constraint of one answer: think, then obey.
//!
//! ```text
//! Beginning ──▶ Thinking ──▶ Closing ──▶ Answer ◀──▶ Call ──▶ Over
//! ```
//!
//! Thinking is free but for its length: once the budget is spent, only the tokens that close the
//! block are allowed ([`Phase::Closing`]). The answer is free, or one grammar from its beginning on,
//! or free until a call opens and a grammar until the call closes.
//!
//! Proposals are followed step by step and then undone, so that the walk leaves no trace: each step
//! remembers where it came from, and the grammar's matcher rolls back.

use std::sync::Arc;

use engine::service::Constraint;
use llguidance::Matcher;

use super::compile::Compiled;
use super::tag::Tag;
use super::vocabulary::{Vocabulary, allows, set};

/// The rules of an answer.
pub(super) struct Plan {
    pub(super) vocabulary: Arc<Vocabulary>,
    /// The block of reasoning before the answer, if there may be one.
    pub(super) thinking: Option<Thinking>,
    pub(super) rule: Rule,
}

/// A block of reasoning.
pub(super) struct Thinking {
    /// The token that opens it; `None` if the prompt did.
    pub(super) open: Option<u32>,
    pub(super) close: Arc<Tag>,
    /// Tokens that close it when the budget is spent.
    pub(super) closing: Vec<u32>,
    /// The most tokens in it.
    pub(super) budget: Option<usize>,
}

/// What the answer obeys.
pub(super) enum Rule {
    /// Nothing.
    Free,
    /// This token does not occur.
    Without(u32),
    /// A grammar from its beginning to its end.
    Grammar(Compiled),
    /// A grammar from the opening tag of a call to the end of the call.
    Lazy { tag: Arc<Tag>, call: Compiled, parallel: bool },
}

/// Where an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct At {
    phase: Phase,
    /// Tokens of reasoning so far.
    spent: usize,
    /// How much of the awaited tag the text ends with.
    tag: usize,
    /// Bytes that the text's last character lacks.
    lacks: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing was written, and the model may open a block of reasoning.
    Beginning,
    Thinking,
    /// This one of the closing tokens comes next.
    Closing(usize),
    Answer,
    Call,
    /// Nothing may follow.
    Over,
}

/// What a step did to the matchers.
#[derive(Clone, Copy)]
enum Moved {
    Nothing,
    Consumed,
    Began,
}

/// Follows one answer.
pub(super) struct Guide {
    plan: Plan,
    at: At,
    /// Matchers of the grammar or of calls; the last one is at work.
    matchers: Vec<Matcher>,
}

impl Guide {
    /// At the beginning; `thinking`: the prompt opened a block of reasoning.
    pub(super) fn new(plan: Plan, thinking: bool) -> Guide {
        let phase = match &plan.thinking {
            Some(block) if thinking && block.budget == Some(0) => Phase::Closing(0),
            Some(_) if thinking => Phase::Thinking,
            Some(_) => Phase::Beginning,
            None => Phase::Answer,
        };
        let matchers = match &plan.rule {
            Rule::Grammar(grammar) => vec![grammar.matcher()],
            _ => Vec::new(),
        };
        Guide { plan, at: At { phase, spent: 0, tag: 0, lacks: 0 }, matchers }
    }

    /// Writes the tokens that may come next.
    fn mask(&mut self, mask: &mut [u32]) -> Result<(), String> {
        let vocabulary = &self.plan.vocabulary;
        let forbid =
            |mask: &mut [u32], ids: &[u32]| ids.iter().for_each(|&id| set(mask, id, false));
        match (self.at.phase, &self.plan.thinking) {
            (Phase::Thinking, Some(block)) => {
                vocabulary.allow_all(mask);
                forbid(mask, block.close.beyond(self.at.tag));
                // An answer that has to be something can't end before it begins.
                if matches!(self.plan.rule, Rule::Grammar(_)) {
                    forbid(mask, vocabulary.stops());
                }
            }
            (Phase::Closing(next), Some(block)) => {
                mask.fill(0);
                set(mask, block.closing[next], true);
            }
            (Phase::Beginning, Some(block)) => {
                let open = block.open;
                self.answer_mask(mask)?;
                open.iter().for_each(|&open| set(mask, open, true));
            }
            (Phase::Over, _) => vocabulary.allow_stops(mask),
            _ => self.answer_mask(mask)?,
        }
        if mask.iter().all(|word| *word == 0) {
            return Err("the grammar allows no token of this model here".into());
        }
        Ok(())
    }

    fn answer_mask(&mut self, mask: &mut [u32]) -> Result<(), String> {
        let vocabulary = &self.plan.vocabulary;
        match &self.plan.rule {
            Rule::Free => vocabulary.allow_all(mask),
            Rule::Without(token) => {
                vocabulary.allow_all(mask);
                set(mask, *token, false);
            }
            Rule::Lazy { tag, .. } if self.at.phase != Phase::Call => {
                vocabulary.allow_all(mask);
                tag.beyond(self.at.tag).iter().for_each(|&id| set(mask, id, false));
            }
            Rule::Grammar(_) | Rule::Lazy { .. } => {
                let matcher = self.matchers.last_mut().ok_or("no grammar is at work")?;
                let allowed = matcher.compute_mask_or_eos().map_err(told)?;
                vocabulary.allow(allowed.as_slice(), mask);
            }
        }
        Ok(())
    }

    /// Goes one token on.
    fn step(&mut self, token: u32) -> Result<Moved, String> {
        if self.plan.vocabulary.stops().contains(&token) {
            return self.stop(token);
        }
        let plan = &self.plan;
        match (self.at.phase, &plan.thinking) {
            (Phase::Beginning, Some(block)) if block.open == Some(token) => {
                let spent_at_once = block.budget == Some(0);
                self.at.phase = if spent_at_once { Phase::Closing(0) } else { Phase::Thinking };
            }
            (Phase::Thinking, Some(block)) => {
                let bytes = plan.vocabulary.bytes(token);
                self.at.spent += 1;
                self.at.lacks = lacks(self.at.lacks, bytes);
                match block.close.step(self.at.tag, token, bytes) {
                    None => self.begin_answer(),
                    Some(tag) => {
                        self.at.tag = tag;
                        // A character is not cut in two, but no model keeps it open for long.
                        let over =
                            block.budget.and_then(|budget| self.at.spent.checked_sub(budget));
                        if over.is_some_and(|over| self.at.lacks == 0 || over >= 3) {
                            self.at.phase = Phase::Closing(0);
                        }
                    }
                }
            }
            (Phase::Closing(next), Some(block)) => match next + 1 == block.closing.len() {
                true => self.begin_answer(),
                false => self.at.phase = Phase::Closing(next + 1),
            },
            (Phase::Over, _) => {}
            _ => return self.answer_step(token),
        }
        Ok(Moved::Nothing)
    }

    fn begin_answer(&mut self) {
        self.at = At { phase: Phase::Answer, tag: 0, ..self.at };
    }

    fn answer_step(&mut self, token: u32) -> Result<Moved, String> {
        if self.at.phase == Phase::Beginning {
            self.at.phase = Phase::Answer;
        }
        match &self.plan.rule {
            Rule::Free | Rule::Without(_) => Ok(Moved::Nothing),
            Rule::Lazy { tag, call, .. } if self.at.phase != Phase::Call => {
                match tag.step(self.at.tag, token, self.plan.vocabulary.bytes(token)) {
                    Some(state) => {
                        self.at.tag = state;
                        Ok(Moved::Nothing)
                    }
                    None => {
                        self.matchers.push(call.matcher());
                        self.at = At { phase: Phase::Call, tag: 0, ..self.at };
                        Ok(Moved::Began)
                    }
                }
            }
            Rule::Grammar(_) | Rule::Lazy { .. } => self.consume(token),
        }
    }

    fn consume(&mut self, token: u32) -> Result<Moved, String> {
        let matcher = self.matchers.last_mut().ok_or("no grammar is at work")?;
        matcher.consume_token(token).map_err(told)?;
        if matcher.is_stopped() {
            let again = matches!(self.plan.rule, Rule::Lazy { parallel: true, .. });
            self.at.phase = if again { Phase::Answer } else { Phase::Over };
        }
        Ok(Moved::Consumed)
    }

    /// A token that ends the answer. The engine ends it; a proposed one may yet be rejected.
    fn stop(&mut self, token: u32) -> Result<Moved, String> {
        let moved = match (self.at.phase, &self.plan.rule) {
            (Phase::Answer | Phase::Beginning, Rule::Grammar(_)) | (Phase::Call, _) => {
                self.consume(token)?
            }
            _ => Moved::Nothing,
        };
        self.at.phase = Phase::Over;
        Ok(moved)
    }

    fn undo(&mut self, at: At, moved: Moved) -> Result<(), String> {
        self.at = at;
        match moved {
            Moved::Nothing => {}
            Moved::Began => drop(self.matchers.pop()),
            Moved::Consumed => {
                let matcher = self.matchers.last_mut().ok_or("no grammar is at work")?;
                matcher.rollback(1).map_err(told)?;
            }
        }
        Ok(())
    }
}

impl Constraint for Guide {
    fn masks(&mut self, proposals: &[u32], masks: &mut [u32]) -> Result<usize, String> {
        let words = masks.len() / (proposals.len() + 1);
        if words == 0 {
            return Err("the masks have no room for a single token".into());
        }
        let mut undo = Vec::with_capacity(proposals.len());
        let mut written = 0;
        for mask in masks.chunks_exact_mut(words).take(proposals.len() + 1) {
            self.mask(mask)?;
            written += 1;
            match proposals.get(written - 1) {
                Some(&token) if allows(mask, token) => {
                    let at = self.at;
                    undo.push((at, self.step(token)?));
                }
                _ => break,
            }
        }
        for (at, moved) in undo.into_iter().rev() {
            self.undo(at, moved)?;
        }
        Ok(written)
    }

    fn advance(&mut self, tokens: &[u32]) -> Result<bool, String> {
        for &token in tokens {
            if self.at.phase == Phase::Over {
                break;
            }
            self.step(token)?;
        }
        // Calls that ended are not taken back any more.
        let done = self.matchers.len().saturating_sub(1);
        self.matchers.drain(..done);
        Ok(self.at.phase == Phase::Over)
    }
}

/// Bytes that the last character of a text lacks after more bytes.
fn lacks(before: u8, bytes: &[u8]) -> u8 {
    bytes.iter().fold(before, |lacks, byte| match byte {
        0xC2..=0xDF => 1,
        0xE0..=0xEF => 2,
        0xF0..=0xF4 => 3,
        0x80..=0xBF => lacks.saturating_sub(1),
        _ => 0,
    })
}

/// A grammar's failure in one line.
fn told(error: anyhow::Error) -> String {
    format!("the answer's grammar failed: {}", super::compile::one_line(&error.to_string()))
}
