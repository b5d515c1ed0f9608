//! One conversation: a lane, the tokens in its cache, and the loop that answers.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use model::Lane;
use ops::Device;

use crate::engine::{Engine, EngineError};
use crate::sampler::Sampler;

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token of the model, or the caller's word.
    Stop,
    /// `max_tokens`.
    Length,
    /// The context is full.
    Context,
    /// The caller gave up.
    Cancelled,
}

/// What one answer took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of those, taken from the lane's cache.
    pub cached_tokens: usize,
    /// Tokens emitted, a final stop token included.
    pub completion_tokens: usize,
    /// From the call to the last prompt token in the cache.
    pub prefill: Duration,
    /// From the call to the first token.
    pub first_token: Duration,
    /// All rounds.
    pub decode: Duration,
    /// Rounds.
    pub rounds: usize,
    /// Proposals verified.
    pub proposed: usize,
    /// Proposals accepted.
    pub accepted: usize,
    /// Rounds whose every proposal was accepted; rounds without proposals don't count.
    pub full_rounds: usize,
}

impl Stats {
    /// Emitted tokens per round.
    pub fn tokens_per_round(&self) -> f64 {
        self.completion_tokens as f64 / self.rounds.max(1) as f64
    }

    /// Tokens per second over all rounds.
    pub fn decode_rate(&self) -> f64 {
        self.completion_tokens as f64 / self.decode.as_secs_f64().max(1e-9)
    }
}

/// A finished answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The tokens, a final stop token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// What it took.
    pub stats: Stats,
}

/// How an answer is made.
#[derive(Clone, Debug)]
pub struct Request {
    /// The whole prompt. What the lane already holds of it is not computed again.
    pub prompt: Vec<u32>,
    /// The most tokens to emit.
    pub max_tokens: usize,
    /// Tokens that end the answer.
    pub stop_tokens: Vec<u32>,
    /// How tokens are chosen.
    pub sampler: Sampler,
}

/// What the caller wants after seeing some tokens: go on, or end the answer keeping only the first
/// `n` of the tokens it was just shown.
pub type Verdict = ControlFlow<(usize, FinishReason)>;

/// One conversation on one slot of an engine.
#[derive(Debug)]
pub struct Session {
    lane: Lane,
    /// Tokens in the cache, in order: `lane.pos` of them.
    cached: Vec<u32>,
}

impl Session {
    /// An empty conversation on a slot.
    pub fn new(slot: u32) -> Session {
        Session { lane: Lane::new(slot), cached: Vec::new() }
    }

    /// Tokens in the cache.
    pub fn cached(&self) -> &[u32] {
        &self.cached
    }

    /// Answers a prompt. `on_tokens` sees the tokens of each round as they are emitted.
    pub fn answer<D: Device>(
        &mut self,
        engine: &mut Engine<D>,
        request: &Request,
        on_tokens: &mut dyn FnMut(&[u32]) -> Verdict,
    ) -> Result<Answer, EngineError> {
        let start = Instant::now();
        let outcome = self.run(engine, request, on_tokens, start);
        if outcome.is_err() {
            // Nothing a failed pass left behind may be used.
            self.cached.clear();
            self.lane = Lane::new(self.lane.slot);
        }
        outcome
    }

    fn run<D: Device>(
        &mut self,
        engine: &mut Engine<D>,
        request: &Request,
        on_tokens: &mut dyn FnMut(&[u32]) -> Verdict,
        start: Instant,
    ) -> Result<Answer, EngineError> {
        engine.check_prompt(&request.prompt)?;
        let mut stats = Stats { prompt_tokens: request.prompt.len(), ..Stats::default() };
        stats.cached_tokens = self.reuse(engine, &request.prompt);
        let (&anchor, head) = request.prompt.split_last().ok_or(EngineError::EmptyPrompt)?;
        engine.prefill(&mut self.lane, &head[self.cached.len()..])?;
        self.cached.extend_from_slice(&head[self.cached.len()..]);
        stats.prefill = start.elapsed();
        engine.start(self.lane.slot, &request.prompt, &request.sampler, &request.stop_tokens);

        let mut tokens: Vec<u32> = Vec::with_capacity(request.max_tokens.min(engine.context()));
        self.cached.reserve(request.max_tokens.min(engine.context()) + engine.block());
        let decode_start = Instant::now();
        let mut anchor = anchor;
        let finish = loop {
            if tokens.len() >= request.max_tokens {
                break FinishReason::Length;
            }
            if self.lane.pos as usize + 1 >= engine.context() {
                break FinishReason::Context;
            }
            let round = engine.round(&mut self.lane, anchor)?;
            if round.degenerate {
                return Err(EngineError::Degenerate { pos: self.lane.pos });
            }
            let emitted = round.tokens();
            stats.rounds += 1;
            stats.proposed += round.proposed;
            stats.accepted += emitted.len() - 1;
            stats.full_rounds += usize::from(round.proposed > 0 && emitted.len() > round.proposed);
            if tokens.is_empty() {
                stats.first_token = start.elapsed();
            }
            let (keep, ended) = cut(emitted, request, tokens.len());
            let (keep, ended) = match on_tokens(&emitted[..keep]) {
                ControlFlow::Continue(()) => (keep, ended),
                ControlFlow::Break((n, why)) => (n.min(keep), Some(why)),
            };
            // The cache takes the anchor and all kept tokens but the last, which is the next anchor.
            let dropped = emitted.len() - keep.max(1);
            self.lane.uncommit(dropped as u32);
            self.cached.push(anchor);
            self.cached.extend_from_slice(&emitted[..keep.max(1) - 1]);
            anchor = emitted[keep.max(1) - 1];
            tokens.extend_from_slice(&emitted[..keep]);
            if let Some(why) = ended {
                break why;
            }
        };
        stats.decode = decode_start.elapsed();
        stats.completion_tokens = tokens.len();
        Ok(Answer { tokens, finish, stats })
    }

    /// Keeps the cache if the prompt continues it; empties the lane otherwise. Returns how many
    /// tokens of the prompt need not be computed.
    fn reuse<D: Device>(&mut self, engine: &mut Engine<D>, prompt: &[u32]) -> usize {
        let continues = prompt.len() > self.cached.len() && prompt.starts_with(&self.cached);
        if !continues {
            self.cached.clear();
        }
        if self.cached.is_empty() {
            self.lane = Lane::new(self.lane.slot);
            engine.clear(self.lane.slot);
        }
        self.cached.len()
    }
}

/// How many of a round's tokens stand, and whether the answer ends there.
fn cut(emitted: &[u32], request: &Request, before: usize) -> (usize, Option<FinishReason>) {
    let room = request.max_tokens - before;
    let within = &emitted[..emitted.len().min(room)];
    if let Some(at) = within.iter().position(|t| request.stop_tokens.contains(t)) {
        return (at + 1, Some(FinishReason::Stop));
    }
    let ended = (before + within.len() >= request.max_tokens).then_some(FinishReason::Length);
    (within.len(), ended)
}
