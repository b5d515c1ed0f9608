//! One conversation: a lane, the tokens in its cache, and the loop that answers.

use std::time::{Duration, Instant};

use model::Lane;
use ops::{Device, MAX_STOPS};

use crate::engine::{Engine, EngineError};
use crate::pace::Pace;
use crate::round::{self, Going, Unmasked};
use crate::sampler::{Bounds, Sampler};

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

/// One conversation on one slot of an engine, and the answer under way.
///
/// [`Session::begin`] takes a prompt in, each [`Session::next`] runs a round, and
/// [`Session::truncate`] ends an answer inside the tokens of its last round.
#[derive(Debug)]
pub struct Session {
    lane: Lane,
    /// Tokens in the cache, in order: `lane.pos` of them.
    cached: Vec<u32>,
    /// The last token, not yet in the cache.
    anchor: u32,
    /// Tokens of the last round.
    last: Vec<u32>,
    /// The cache holds tokens that the text does not: nothing of it can be used.
    spoilt: bool,
    request: Option<Request>,
    started: Instant,
    stats: Stats,
    pace: Pace,
    /// Whether the rounds in flight draft.
    drafting: bool,
    /// When a round came back last.
    received: Instant,
}

impl Session {
    /// An empty conversation on a slot.
    pub fn new(slot: u32) -> Session {
        Session {
            lane: Lane::new(slot),
            cached: Vec::new(),
            anchor: 0,
            last: Vec::new(),
            spoilt: false,
            request: None,
            started: Instant::now(),
            stats: Stats::default(),
            pace: Pace::of(1),
            drafting: false,
            received: Instant::now(),
        }
    }

    /// Tokens in the cache.
    pub fn cached(&self) -> &[u32] {
        &self.cached
    }

    /// Tokens of the last round.
    pub fn last_tokens(&self) -> &[u32] {
        &self.last
    }

    /// What the answer under way, or the last one, took so far.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Takes a prompt into the cache, all but its last token, which is the first round's anchor.
    /// Stops between passes when `cancel` says so: then no answer is under way.
    pub fn begin<D: Device>(
        &mut self,
        engine: &mut Engine<D>,
        request: Request,
        cancel: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        self.request = None;
        self.started = Instant::now();
        self.stats = Stats { prompt_tokens: request.prompt.len(), ..Stats::default() };
        engine.check_prompt(&request.prompt)?;
        let settled = engine.settle(&mut self.lane);
        self.reset_if_failed(engine, settled)?;
        let (&anchor, head) = request.prompt.split_last().ok_or(EngineError::EmptyPrompt)?;
        self.stats.cached_tokens = self.reuse(engine, &request.prompt);
        while self.cached.len() < head.len() && !cancel() {
            let rest = &head[self.cached.len()..];
            let rows = engine.chunk_rows(&self.lane, rest.len());
            let outcome = engine.prefill_pass(&mut self.lane, &rest[..rows]);
            self.reset_if_failed(engine, outcome)?;
            self.cached.extend_from_slice(&rest[..rows]);
        }
        if self.cached.len() < head.len() {
            return Ok(());
        }
        let end = request.prompt.len().saturating_add(request.max_tokens).min(engine.context());
        let bounds = Bounds { stops: &request.stop_tokens, end: end as u32, ..Bounds::default() };
        engine.start(self.lane.slot, &request.prompt, &request.sampler, &bounds);
        self.anchor = anchor;
        let room = request.max_tokens.min(engine.context()) + engine.block();
        self.cached.reserve(room);
        self.last.reserve(engine.block());
        self.stats.prefill = self.started.elapsed();
        self.request = Some(request);
        Ok(())
    }

    /// Runs a round of the answer under way and returns its tokens, or why there are no more. A
    /// reason comes with the answer's last tokens, a stop token included.
    pub fn next<D: Device>(
        &mut self,
        engine: &mut Engine<D>,
    ) -> Result<(&[u32], Option<FinishReason>), EngineError> {
        let Some(request) = &self.request else {
            return Ok((&[], Some(FinishReason::Cancelled)));
        };
        let full = self.lane.pos as usize + 1 >= engine.context();
        if full || self.stats.completion_tokens >= request.max_tokens {
            self.request = None;
            self.last.clear();
            let why = if full { FinishReason::Context } else { FinishReason::Length };
            return Ok((&[], Some(why)));
        }
        let start = Instant::now();
        let left = request.max_tokens - self.stats.completion_tokens;
        let ahead = engine.may_run_ahead() && request.stop_tokens.len() <= MAX_STOPS;
        // A round emits at least one token, so `left` rounds surely end the answer.
        let depth = left.min(round::depth(ahead));
        let adapts = engine.adapts() && request.sampler.may_adapt();
        let draft = !adapts || self.pace.drafts();
        // Rounds of one kind first end, then the other kind begins.
        let begins = engine.in_flight(self.lane.slot) == 0;
        let goes_on = begins || draft == self.drafting;
        // What is in flight was computed since the round before it came back, whatever the caller did meanwhile.
        let since = if begins { start } else { self.received };
        let timed = adapts && goes_on && engine.pipeline.is_next(self.lane.slot);
        let submitted = if goes_on {
            self.drafting = draft;
            engine.submit(&[Going::new(self.lane, self.anchor, draft)], depth, &mut Unmasked)
        } else {
            Ok(())
        };
        let round = submitted.and_then(|()| engine.receive(&mut self.lane)).and_then(|round| {
            let pos = self.lane.pos;
            if round.degenerate { Err(EngineError::Degenerate { pos }) } else { Ok(round) }
        });
        let round = match round {
            Ok(round) => round,
            Err(error) => return self.reset_if_failed(engine, Err(error)),
        };
        let emitted = round.tokens();
        if emitted.is_empty() {
            self.request = None;
            self.last.clear();
            return Ok((&[], Some(FinishReason::Context)));
        }
        let stats = &mut self.stats;
        self.received = Instant::now();
        if timed {
            let took = self.received.duration_since(since);
            self.pace.took(round.proposed > 0, took.as_secs_f64(), emitted.len() as f64);
        }
        stats.decode += self.received.duration_since(start);
        stats.rounds += 1;
        stats.proposed += round.proposed;
        stats.accepted += emitted.len() - 1;
        stats.full_rounds += usize::from(round.proposed > 0 && emitted.len() > round.proposed);
        if stats.completion_tokens == 0 {
            stats.first_token = self.started.elapsed();
        }
        let (keep, mut ended) = cut(emitted, request, stats.completion_tokens);
        if ended.is_none() && round.ended {
            ended = Some(FinishReason::Context);
        }
        stats.completion_tokens += keep;
        // The cache takes the anchor and every kept token but the last, which is the next anchor.
        self.cached.push(self.anchor);
        self.cached.extend_from_slice(&emitted[..keep - 1]);
        // Only stop tokens that the device doesn't know of are cut here, and then it didn't run ahead.
        self.lane.uncommit((emitted.len() - keep) as u32);
        self.anchor = emitted[keep - 1];
        self.last.clear();
        self.last.extend_from_slice(&emitted[..keep]);
        if ended.is_some() {
            self.request = None;
        }
        Ok((&self.last, ended))
    }

    /// Ends the answer, of whose last round only the first `keep` tokens count. What was computed
    /// stays usable for the next prompt, unless a round in flight has already taken up tokens that
    /// are dropped here.
    ///
    /// # Panics
    /// If the last round had fewer tokens.
    pub fn truncate<D: Device>(&mut self, engine: &Engine<D>, keep: usize) {
        assert!(keep <= self.last.len(), "{keep} of the {} tokens of a round", self.last.len());
        self.request = None;
        let dropped = self.last.len() - keep;
        self.stats.completion_tokens -= dropped;
        // The last token of a round is never in the cache, so dropping it costs nothing there; but
        // the first is needed as an anchor.
        let uncached = dropped.min(self.last.len().saturating_sub(1));
        self.cached.truncate(self.cached.len() - uncached);
        self.last.truncate(keep);
        if uncached > 0 && engine.in_flight(self.lane.slot) > 0 {
            self.spoilt = true;
        } else {
            self.lane.uncommit(uncached as u32);
        }
    }

    /// Nothing that a failed pass left behind may be used: not the lane, nor rounds in flight and results that
    /// were not received, which the next answer would take for its own.
    fn reset_if_failed<T, D: Device>(
        &mut self,
        engine: &mut Engine<D>,
        outcome: Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        if outcome.is_err() {
            // A device that is lost says so again in the next pass; what failed first is what is told.
            let _ = engine.probe();
            self.request = None;
            self.cached.clear();
            self.last.clear();
            self.lane = Lane::new(self.lane.slot);
        }
        outcome
    }

    /// Keeps the cache if the prompt continues it; empties the lane otherwise. Returns how many
    /// tokens of the prompt need not be computed.
    fn reuse<D: Device>(&mut self, engine: &mut Engine<D>, prompt: &[u32]) -> usize {
        let known = !std::mem::take(&mut self.spoilt);
        let continues = prompt.len() > self.cached.len() && prompt.starts_with(&self.cached);
        if !continues || !known {
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
