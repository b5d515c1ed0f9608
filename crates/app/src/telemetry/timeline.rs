//! What a request's time went to, put together from what the server does and the engine tells.

use std::time::{Duration, Instant};

use engine::service::{CacheSource, CacheUse, Done, Event};
use serde_json::{Map, Value};

use super::record::{CacheOutcome, Record, Span};

/// The most parts that prefill, and the rounds, are told in; neighbours are merged beyond.
const MAX_STEPS: usize = 64;

/// What the server does itself before the engine takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Receives and reads the body.
    Read,
    /// Renders the chat template.
    Template,
    /// Makes tokens of the prompt.
    Tokenise,
    /// Compiles what the answer has to obey.
    Constraint,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Stage::Read => "read",
            Stage::Template => "template",
            Stage::Tokenise => "tokenise",
            Stage::Constraint => "constraint",
        }
    }
}

/// The course of one request so far.
#[derive(Clone, Debug)]
pub struct Timeline {
    origin: Instant,
    stages: Vec<Span>,
    choices: Vec<Choice>,
    /// How many choices one prompt has.
    per_prompt: usize,
}

impl Timeline {
    /// The course of a request whose first byte came at `origin`.
    pub fn begin(origin: Instant) -> Timeline {
        Timeline { origin, stages: Vec::new(), choices: Vec::new(), per_prompt: usize::MAX }
    }

    /// Each prompt has so many choices; all have one unless this says otherwise.
    pub fn choices_per_prompt(&mut self, choices: usize) {
        self.per_prompt = choices.max(1);
    }

    /// A stage that took from one time to another.
    pub fn stage(&mut self, stage: Stage, from: Instant, to: Instant) {
        self.stages.push(self.span(stage.name(), from, to));
    }

    /// What the engine told of a choice, at the time it was told.
    pub fn observe(&mut self, choice: usize, event: &Event, at: Instant) {
        self.choice(choice, at).observe(event, at);
    }

    /// Time that went into the text of a choice's tokens, between rounds.
    pub fn detokenised(&mut self, choice: usize, took: Duration, at: Instant) {
        let choice = self.choice(choice, at);
        choice.detokenise += took;
        choice.detokenise_calls += 1;
    }

    /// Puts times, tokens and spans into the record of a request that ended `at`.
    pub fn finish(&self, record: &mut Record, at: Instant) {
        record.duration_us = self.since(at);
        record.spans = self.stages.clone();
        let whole = self.choices.len() == 1;
        for (index, choice) in self.choices.iter().enumerate() {
            choice.account(record, self.origin, index % self.per_prompt == 0);
            let spans = choice.spans(self);
            if whole {
                record.spans.extend(spans);
            } else {
                let mut span = self.span("choice", choice.begun, choice.mark);
                span.attributes.insert("index".into(), index.into());
                span.children = spans;
                record.spans.push(span);
            }
        }
    }

    fn choice(&mut self, index: usize, at: Instant) -> &mut Choice {
        while self.choices.len() <= index {
            self.choices.push(Choice::new(at));
        }
        &mut self.choices[index]
    }

    fn since(&self, at: Instant) -> u64 {
        micros(at.saturating_duration_since(self.origin))
    }

    /// A wait that is told to be longer than the request is old began with it.
    fn span(&self, name: &str, from: Instant, to: Instant) -> Span {
        let from = from.max(self.origin);
        Span {
            name: name.to_owned(),
            start_us: self.since(from),
            duration_us: micros(to.saturating_duration_since(from)),
            ..Span::default()
        }
    }
}

/// The course of one answer.
#[derive(Clone, Debug)]
struct Choice {
    begun: Instant,
    /// Up to where its time is told.
    mark: Instant,
    lane: Option<Instant>,
    queued: Duration,
    cache: Option<CacheUse>,
    prompt: u64,
    prefill_end: Option<Instant>,
    prefilled: u64,
    prefill: Steps,
    first_token: Option<Instant>,
    rounds: Steps,
    detokenise: Duration,
    detokenise_calls: u64,
    done: Option<Done>,
}

impl Choice {
    fn new(begun: Instant) -> Choice {
        Choice {
            begun,
            mark: begun,
            lane: None,
            queued: Duration::ZERO,
            cache: None,
            prompt: 0,
            prefill_end: None,
            prefilled: 0,
            prefill: Steps::default(),
            first_token: None,
            rounds: Steps::default(),
            detokenise: Duration::ZERO,
            detokenise_calls: 0,
            done: None,
        }
    }

    fn observe(&mut self, event: &Event, at: Instant) {
        let from = self.mark;
        self.mark = at.max(from);
        match event {
            Event::Started { queued, cache } => {
                self.lane = Some(at);
                self.queued = *queued;
                self.begun = at.checked_sub(*queued).unwrap_or(at).min(self.begun);
                self.prefilled = cache.tokens as u64;
                self.cache = Some(cache.clone());
            }
            Event::Prefill { done, total } => {
                let tokens = (*done as u64).saturating_sub(self.prefilled);
                self.prompt = *total as u64;
                self.prefilled = *done as u64;
                self.prefill_end = Some(at);
                self.prefill.push(Step { from, to: self.mark, count: 1, tokens, proposed: 0 });
            }
            Event::Tokens { tokens, proposed } => {
                self.first_token.get_or_insert(at);
                let (tokens, proposed) = (tokens.len() as u64, *proposed as u64);
                self.rounds.push(Step { from, to: self.mark, count: 1, tokens, proposed });
            }
            Event::Done(done) => self.done = Some(done.clone()),
            Event::Failed(_) => {}
        }
    }

    /// Adds this choice to the record. The engine's own account counts where there is one; a
    /// request that was left before it came is counted by what was seen.
    fn account(&self, record: &mut Record, origin: Instant, first: bool) {
        let seen = self.rounds.sum();
        let cached = self.cache.as_ref().map_or(0, |cache| cache.tokens as u64);
        let done = self.done.as_ref();
        let prompt = done.map_or(self.prompt, |done| done.prompt_tokens as u64);
        if first {
            // The choices of a prompt count it once, as a reply does.
            record.tokens.prompt += prompt;
            record.tokens.cached += done.map_or(cached, |done| done.cached_tokens as u64);
        }
        record.tokens.output += done.map_or(seen.tokens, |done| done.output_tokens as u64);
        record.draft.rounds += done.map_or(seen.count, |done| done.rounds as u64);
        record.draft.proposed += done.map_or(seen.proposed, |done| done.proposed as u64);
        // A round emits one token more than it accepts.
        let accepted = seen.tokens.saturating_sub(seen.count).min(seen.proposed);
        record.draft.accepted += done.map_or(accepted, |done| done.accepted as u64);
        let queued = done.map_or(self.queued, |done| done.queued);
        record.queue_us = record.queue_us.max(micros(queued));
        let prefill = done.map_or_else(|| self.prefill_time(), |done| done.prefill);
        record.prefill_us += micros(prefill);
        let decode = done.map_or_else(|| self.decode_time(), |done| done.decode);
        record.decode_us += micros(decode);
        if let Some(at) = self.first_token {
            let first = micros(at.saturating_duration_since(origin));
            record.first_token_us = Some(record.first_token_us.map_or(first, |us| us.min(first)));
        }
        if let Some(cache) = self.cache.as_ref().filter(|_| record.cache.source.is_empty()) {
            record.cache = CacheOutcome {
                source: source(cache.source).to_owned(),
                miss: cache.miss.to_owned(),
            };
        }
    }

    fn prefill_time(&self) -> Duration {
        match (self.lane, self.prefill_end) {
            (Some(lane), Some(end)) => end.saturating_duration_since(lane),
            _ => Duration::ZERO,
        }
    }

    fn decode_time(&self) -> Duration {
        let begun = self.prefill_end.or(self.lane);
        let last = self.rounds.steps.last().map(|step| step.to);
        begun.zip(last).map_or(Duration::ZERO, |(from, to)| to.saturating_duration_since(from))
    }

    fn spans(&self, timeline: &Timeline) -> Vec<Span> {
        let Some(lane) = self.lane else {
            // It never got a lane: all that it did was wait.
            return vec![timeline.span("queue", self.begun, self.mark)];
        };
        let mut spans = vec![timeline.span("queue", self.begun, lane)];
        if let Some(cache) = &self.cache {
            let mut span = timeline.span("cache lookup", lane, lane);
            span.attributes = attributes([
                ("tokens", cache.tokens.into()),
                ("source", source(cache.source).into()),
                ("miss", cache.miss.into()),
            ]);
            spans.push(span);
        }
        spans.extend(self.prefill.span("prefill", "chunk", timeline));
        spans.extend(self.rounds.span("decode", "rounds", timeline));
        if let Some(from) = self.first_token.filter(|_| self.detokenise_calls > 0) {
            // It happened in pieces between the rounds; told as one.
            let mut span = timeline.span("detokenise", from, from + self.detokenise);
            span.attributes = attributes([("calls", self.detokenise_calls.into())]);
            spans.push(span);
        }
        spans
    }
}

/// Steps of one kind, no more than [`MAX_STEPS`] of them however many there were.
#[derive(Clone, Debug, Default)]
struct Steps {
    steps: Vec<Step>,
    /// Steps in each but the last; 0 is none yet.
    grain: u64,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    from: Instant,
    to: Instant,
    count: u64,
    tokens: u64,
    proposed: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    count: u64,
    tokens: u64,
    proposed: u64,
}

impl Step {
    fn merge(&mut self, next: &Step) {
        self.to = next.to;
        self.count += next.count;
        self.tokens += next.tokens;
        self.proposed += next.proposed;
    }
}

impl Steps {
    fn push(&mut self, step: Step) {
        self.grain = self.grain.max(1);
        if let Some(last) = self.steps.last_mut().filter(|last| last.count < self.grain) {
            last.merge(&step);
            return;
        }
        if self.steps.len() == MAX_STEPS {
            self.grain *= 2;
            let merged = self.steps.chunks(2).map(|pair| {
                let mut first = pair[0];
                pair[1..].iter().for_each(|next| first.merge(next));
                first
            });
            self.steps = merged.collect();
        }
        self.steps.push(step);
    }

    fn sum(&self) -> Sum {
        self.steps.iter().fold(Sum::default(), |sum, step| Sum {
            count: sum.count + step.count,
            tokens: sum.tokens + step.tokens,
            proposed: sum.proposed + step.proposed,
        })
    }

    fn span(&self, name: &str, part: &str, timeline: &Timeline) -> Option<Span> {
        let (first, last) = (self.steps.first()?, self.steps.last()?);
        let mut whole = timeline.span(name, first.from, last.to);
        let sum = self.sum();
        whole.attributes = attributes([("tokens", sum.tokens.into()), ("count", sum.count.into())]);
        whole.children.extend(self.steps.iter().map(|step| {
            let mut span = timeline.span(part, step.from, step.to);
            span.attributes = attributes([
                ("count", step.count.into()),
                ("tokens", step.tokens.into()),
                ("proposed", step.proposed.into()),
            ]);
            span
        }));
        Some(whole)
    }
}

/// Attributes, those left out that say nothing.
fn attributes<const N: usize>(pairs: [(&str, Value); N]) -> Map<String, Value> {
    let says = |value: &Value| value.as_str() != Some("") && value.as_u64() != Some(0);
    pairs.into_iter().filter(|(_, value)| says(value)).map(|(k, v)| (k.to_owned(), v)).collect()
}

fn source(source: CacheSource) -> &'static str {
    match source {
        CacheSource::None => "none",
        CacheSource::Memory => "memory",
        CacheSource::Disk => "disk",
    }
}

/// Microseconds; what overflows is the most there is.
pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[path = "timeline_tests.rs"]
mod tests;
