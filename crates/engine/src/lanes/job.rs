//! A request on its way: waiting, then on a lane.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use model::Lane;

use crate::disk::Key;
use crate::scheduler::Candidate;
use crate::service::{
    CacheSource, CacheUse, Done, Event, EventSink, Finish, Priority, Request, RequestError,
    RequestId,
};

/// A request that was taken.
pub(crate) struct Job {
    pub(crate) id: RequestId,
    pub(crate) request: Request,
    pub(crate) events: EventSink,
    /// Times are durations since the service began.
    pub(crate) submitted: Duration,
    pub(crate) deadline: Option<Duration>,
    /// How often something that came later went first.
    pub(crate) overtaken: u32,
    /// Prompt tokens left to compute, as it looked when the job came.
    pub(crate) remaining: usize,
    /// Nobody listens any more.
    pub(crate) deaf: bool,
    /// A checkpoint is on its way from disk, of this length.
    pub(crate) loading: Option<(Key, usize)>,
}

impl Job {
    /// Tells whoever asked. A listener that panics is not told again; its job ends.
    pub(crate) fn tell(&mut self, event: Event) {
        if !self.deaf && catch_unwind(AssertUnwindSafe(|| (self.events)(event))).is_err() {
            self.deaf = true;
        }
    }

    pub(crate) fn candidate(&self, remaining: usize) -> Candidate {
        let (priority, arrival) = (self.request.priority, self.id.0);
        Candidate { priority, remaining, arrival, overtaken: self.overtaken }
    }

    /// The account of a job that never got a lane.
    pub(crate) fn unserved(&self, finish: Finish, now: Duration) -> Done {
        Done {
            finish,
            prompt_tokens: self.request.prompt.len(),
            cached_tokens: 0,
            output_tokens: 0,
            rounds: 0,
            proposed: 0,
            accepted: 0,
            queued: now.saturating_sub(self.submitted),
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
            cache: CacheUse {
                tokens: 0,
                source: CacheSource::None,
                miss: "the request ended before it had a lane",
            },
        }
    }
}

/// Where a job on a lane is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Its prompt is being computed.
    Prefill,
    /// It answers.
    Decode,
    /// It has ended; its lane is freed once no round of it is in flight.
    Over,
}

/// A job on a lane.
pub(crate) struct Running {
    pub(crate) job: Job,
    pub(crate) lane: Lane,
    pub(crate) phase: Phase,
    /// Prompt and emitted tokens.
    pub(crate) text: Vec<u32>,
    pub(crate) pages: Vec<u32>,
    /// Up to where prefill passes, and nothing else, made what the lane holds.
    pub(crate) exact_until: usize,
    /// Positions at which to take checkpoints while computing the prompt, descending.
    pub(crate) marks: Vec<usize>,
    pub(crate) cache: CacheUse,
    /// When it got the lane, and when the prompt was done.
    pub(crate) admitted: Duration,
    pub(crate) prefilled: Duration,
    pub(crate) rounds: usize,
    pub(crate) proposed: usize,
    pub(crate) accepted: usize,
    /// The lane holds tokens that the text does not.
    pub(crate) spoilt: bool,
    /// Since the lane was made ready for its phase, a pass of it has come back: what was written for it is there.
    pub(crate) proven: bool,
    /// What its constraint complained of.
    pub(crate) broken: Option<String>,
    /// The priority of the most important job that waits for what this one computes.
    pub(crate) lent: Option<Priority>,
}

impl Running {
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.job.request.prompt.len()
    }

    /// Tokens emitted.
    pub(crate) fn emitted(&self) -> usize {
        self.text.len() - self.prompt_tokens()
    }

    /// For its prompt's next slice.
    pub(crate) fn candidate(&self, remaining: usize) -> Candidate {
        let own = self.job.candidate(remaining);
        Candidate { priority: own.priority.max(self.lent.unwrap_or(own.priority)), ..own }
    }

    /// Prompt tokens that are still to be computed.
    pub(crate) fn remaining(&self) -> usize {
        (self.prompt_tokens() - 1).saturating_sub(self.lane.pos as usize)
    }

    /// The last token, not yet in the cache.
    pub(crate) fn anchor(&self) -> u32 {
        self.text.last().copied().unwrap_or_default()
    }

    /// Ends the job well, of whose emitted tokens the first `keep` count. `in_flight`: whether a round
    /// behind them is on its way.
    pub(crate) fn end(&mut self, finish: Finish, keep: usize, in_flight: bool, now: Duration) {
        self.text.truncate(self.prompt_tokens() + keep);
        self.roll_back(in_flight);
        let decoding = self.phase == Phase::Decode;
        let prefill_end = if decoding { self.prefilled } else { now };
        self.phase = Phase::Over;
        let done = Done {
            finish,
            prompt_tokens: self.prompt_tokens(),
            cached_tokens: self.cache.tokens,
            output_tokens: self.emitted(),
            rounds: self.rounds,
            proposed: self.proposed,
            accepted: self.accepted,
            queued: self.admitted.saturating_sub(self.job.submitted),
            prefill: prefill_end.saturating_sub(self.admitted),
            decode: now.saturating_sub(prefill_end),
            cache: self.cache.clone(),
        };
        self.job.tell(Event::Done(done));
    }

    /// Takes tokens that the text no longer has from the lane, if that is still possible: rows of its
    /// last round are, unless a round behind it has taken them up.
    pub(crate) fn roll_back(&mut self, in_flight: bool) {
        let beyond = (self.lane.pos as usize + 1).saturating_sub(self.text.len()) as u32;
        if beyond == 0 {
            return;
        }
        if in_flight || beyond > self.lane.pending {
            self.spoilt = true;
        } else {
            self.lane.uncommit(beyond);
        }
    }

    /// Ends the job badly. Nothing of its lane may be used.
    pub(crate) fn fail(&mut self, error: RequestError) {
        self.phase = Phase::Over;
        self.spoilt = true;
        self.job.tell(Event::Failed(error));
    }
}
