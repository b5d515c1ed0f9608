//! Many requests on one machine: admission, prefill slices, rounds, checkpoints, ends.
//!
//! [`Core::step`] does one thing at a time and returns; everything it decides follows from what it was
//! told and from the clock it is given, so that tests replay years of service from a seed. Threads,
//! channels and recovery are around it, in `serve.rs`.

mod admit;
mod decode;
mod job;
mod machine;
#[cfg(test)]
mod sim;
mod tier;

use std::time::Duration;

use ops::PAGE_TOKENS;

use crate::cache::PrefixCache;
use crate::disk::Disk;
use crate::engine::{EngineError, check_prompt};
use crate::pace::Pace;
use crate::pages::Pages;
use crate::scheduler::{self, Rate, Turns};
use crate::service::{
    CachePolicy, Event, Finish, Refusal, Request, RequestError, RequestId, ServiceStats,
};

pub(crate) use job::Job;
use job::{Phase, Running};
pub(crate) use machine::{Limits, Machine};
use tier::Tier;

/// How lanes are run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Part of the time that rounds get while prompts are computed.
    pub(crate) decode_share: f64,
    /// The longest prefill slice while lanes decode.
    pub(crate) slice: Duration,
    /// Tokens between checkpoints while a prompt is computed.
    pub(crate) grid: usize,
    /// Whether requests reuse exact state only, whatever they ask for.
    pub(crate) exact: bool,
    /// Bytes of a checkpoint from disk that go to the device at once, while others wait.
    pub(crate) arrival: usize,
}

/// Tells the time since the service began.
pub(crate) type Clock<'a> = &'a dyn Fn() -> Duration;

/// The machine is lost, and with it all its lanes.
#[derive(Debug)]
pub(crate) struct Lost(pub(crate) EngineError);

/// Jobs, and the machine that works on them.
pub(crate) struct Core<M> {
    pub(crate) machine: M,
    limits: Limits,
    rules: Rules,
    pages: Pages,
    cache: PrefixCache,
    waiting: Vec<Job>,
    /// By slot.
    lanes: Vec<Option<Running>>,
    turns: Turns,
    prefill_rate: Rate,
    /// By lanes of a round.
    paces: Vec<Pace>,
    /// Lanes that draft in the rounds in flight.
    drafting: usize,
    /// When a round came back last.
    received: Duration,
    /// Since when the round that is received next counts.
    round_from: Option<Duration>,
    stats: ServiceStats,
    service_time: Duration,
    /// Device failures in a row.
    failures: u32,
    /// Checkpoints on disk.
    tier: Option<Tier>,
    /// Pages that only checkpoints refer to, as of so many pages in use and checkpoints taken.
    alone: (usize, u64, usize),
    /// Checkpoints taken.
    taken: u64,
    /// Reused.
    flight: Vec<u32>,
}

/// Device failures in a row after which a machine counts as lost.
const FAILURES: u32 = 3;

impl<M: Machine> Core<M> {
    pub(crate) fn new(machine: M, rules: Rules, disk: Option<Disk>) -> Core<M> {
        let limits = machine.limits();
        Core {
            pages: Pages::new(limits.pages),
            cache: PrefixCache::new(limits.snapshots),
            waiting: Vec::new(),
            lanes: (0..limits.slots).map(|_| None).collect(),
            turns: Turns::new(rules.decode_share),
            prefill_rate: Rate::default(),
            paces: (1..=limits.slots).map(Pace::of).collect(),
            drafting: 0,
            received: Duration::ZERO,
            round_from: None,
            alone: (usize::MAX, 0, 0),
            stats: ServiceStats::default(),
            service_time: Duration::ZERO,
            failures: 0,
            tier: disk.map(Tier::new),
            taken: 0,
            flight: Vec::with_capacity(limits.slots),
            machine,
            limits,
            rules,
        }
    }

    /// Takes a job that [`check`] let pass.
    pub(crate) fn submit(&mut self, mut job: Job) {
        let found = self.find(&job.request);
        job.remaining = job.request.prompt.len() - found.tokens();
        self.ask_disk(&mut job, found.tokens());
        self.stats.accepted += 1;
        self.waiting.push(job);
    }

    /// Ends a job, wherever it is.
    pub(crate) fn cancel(&mut self, id: RequestId, now: Duration) {
        self.stop(id, Finish::Cancelled, None, now);
    }

    /// Ends a job whose text met a stop string behind its first `tokens` tokens.
    pub(crate) fn finish(&mut self, id: RequestId, tokens: usize, now: Duration) {
        self.stop(id, Finish::Stop, Some(tokens), now);
    }

    fn stop(&mut self, id: RequestId, finish: Finish, keep: Option<usize>, now: Duration) {
        if let Some(at) = self.waiting.iter().position(|job| job.id == id) {
            let mut job = self.waiting.remove(at);
            let done = job.unserved(finish, now);
            self.count_end(finish);
            job.tell(Event::Done(done));
            return;
        }
        let running = self.lanes.iter().flatten();
        let of_id = |r: &Running| r.job.id == id && r.phase != Phase::Over;
        let Some(slot) = running.clone().find(|r| of_id(r)).map(|r| r.lane.slot) else { return };
        self.end(slot, finish, keep, now);
    }

    /// Ends a job on a lane, of whose emitted tokens all or the first `keep` count.
    fn end(&mut self, slot: u32, finish: Finish, keep: Option<usize>, now: Duration) {
        self.machine.flight(&mut self.flight);
        let in_flight = self.flight.contains(&slot);
        let Some(running) = &mut self.lanes[slot as usize] else { return };
        let emitted = running.emitted();
        running.end(finish, keep.unwrap_or(emitted).min(emitted), in_flight, now);
        let took = now.saturating_sub(running.admitted);
        let known = !self.service_time.is_zero();
        self.service_time = if known { (7 * self.service_time + took) / 8 } else { took };
        self.count_end(finish);
    }

    fn count_end(&mut self, finish: Finish) {
        match finish {
            Finish::Cancelled | Finish::Deadline => self.stats.cancelled += 1,
            _ => self.stats.completed += 1,
        }
    }

    fn fail(&mut self, slot: u32, error: RequestError) {
        let Some(running) = &mut self.lanes[slot as usize] else { return };
        // What a job that has ended leaves behind is as useless.
        running.spoilt = true;
        if running.phase != Phase::Over {
            running.fail(error);
            self.stats.failed += 1;
        }
    }

    /// Does the next thing. Returns whether there was anything to do.
    ///
    /// # Errors
    /// The machine is lost: the caller makes a new core of what [`Core::abandon`] gives.
    pub(crate) fn step(&mut self, clock: Clock<'_>) -> Result<bool, Lost> {
        self.expire(clock());
        self.machine.flight(&mut self.flight);
        let arrives = self.poll_disk()?;
        if self.retire(clock)? | self.admit(clock) {
            // Whoever asks to come in sees at once that there is room.
            return Ok(true);
        }
        let decoding = self.slots(Phase::Decode);
        let prefilling = self.next_prefill();
        let in_flight = !self.flight.is_empty();
        let same = in_flight
            && self.flight.len() == decoding.len()
            && decoding.iter().all(|slot| self.flight.contains(slot));
        match prefilling {
            Some(_) if in_flight && (decoding.is_empty() || self.turns.prefill_may_go()) => {
                self.receive(clock)?;
            }
            Some(slot) if decoding.is_empty() || self.turns.prefill_may_go() => {
                self.prefill(slot, !decoding.is_empty(), clock)?;
            }
            _ if in_flight && !same => {
                self.receive(clock)?;
            }
            _ if !decoding.is_empty() => self.round(&decoding, clock)?,
            _ => return Ok(self.persist(clock())? | arrives),
        }
        if self.persist_is_due(clock()) {
            self.persist(clock())?;
        }
        Ok(true)
    }

    /// Whether nobody waits and nothing runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.lanes.iter().all(Option::is_none)
    }

    /// When the next deadline is.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        let running = self.lanes.iter().flatten().map(|running| &running.job);
        self.waiting.iter().chain(running).filter_map(|job| job.deadline).min()
    }

    /// What was done, and is going on.
    pub(crate) fn stats(&mut self) -> ServiceStats {
        let version = (self.pages.used(), self.taken + self.cache.evictions());
        if (self.alone.0, self.alone.1) != version {
            self.alone = (version.0, version.1, self.cache.pages_alone(&self.pages));
        }
        let alone = self.alone.2 * self.limits.page_bytes;
        ServiceStats {
            waiting: self.waiting.len(),
            running: self.lanes.iter().flatten().filter(|r| r.phase != Phase::Over).count(),
            pages_used: self.pages.used(),
            pages: self.pages.total(),
            checkpoints: self.cache.len(),
            checkpoint_bytes: (self.cache.len() * self.limits.snapshot_bytes + alone) as u64,
            evictions: self.cache.evictions(),
            disk_bytes: self.tier.as_ref().map_or(0, |tier| tier.disk.bytes()),
            ..self.stats
        }
    }

    /// Goes on counting where another core left off.
    pub(crate) fn count_from(&mut self, stats: ServiceStats) {
        self.stats = stats;
    }

    /// Fails every job on a lane and gives back those that wait.
    pub(crate) fn abandon(mut self, error: &RequestError) -> (Vec<Job>, ServiceStats) {
        for slot in 0..self.lanes.len() as u32 {
            self.fail(slot, error.clone());
        }
        (std::mem::take(&mut self.waiting), self.stats)
    }

    /// Ends every job there is.
    pub(crate) fn end_all(&mut self, finish: Finish, now: Duration) {
        while let Some(job) = self.waiting.first() {
            self.stop(job.id, finish, None, now);
        }
        for slot in self.slots(Phase::Prefill).into_iter().chain(self.slots(Phase::Decode)) {
            self.end(slot, finish, None, now);
        }
    }

    /// Mean time that a job has a lane.
    pub(crate) fn service_time(&self) -> Duration {
        self.service_time
    }

    /// Takes a job back in that another core left waiting.
    pub(crate) fn resume(&mut self, mut job: Job) {
        job.loading = None;
        self.waiting.push(job);
    }

    /// Ends what is past its deadline, and what nobody listens to.
    fn expire(&mut self, now: Duration) {
        let late = |job: &Job| match job.deadline {
            _ if job.deaf => Some(Finish::Cancelled),
            Some(deadline) if deadline <= now => Some(Finish::Deadline),
            _ => None,
        };
        while let Some((id, finish)) =
            self.waiting.iter().find_map(|job| Some((job.id, late(job)?)))
        {
            self.stop(id, finish, None, now);
        }
        for slot in 0..self.lanes.len() {
            let running = self.lanes[slot].as_ref().filter(|r| r.phase != Phase::Over);
            if let Some(finish) = running.and_then(|r| late(&r.job)) {
                self.end(slot as u32, finish, None, now);
            }
        }
    }

    /// Frees the lanes of ended jobs, whose last state is kept if that is wanted.
    fn retire(&mut self, clock: Clock<'_>) -> Result<bool, Lost> {
        let mut any = false;
        for slot in 0..self.lanes.len() as u32 {
            let over = self.lanes[slot as usize].as_ref().is_some_and(|r| r.phase == Phase::Over);
            if over && !self.flight.contains(&slot) {
                let kept = self.keep(slot, clock);
                self.free(slot);
                any = true;
                if let Err(error) = kept {
                    self.note_failure(error)?;
                }
            }
        }
        Ok(any)
    }

    fn free(&mut self, slot: u32) {
        let Some(running) = self.lanes[slot as usize].take() else { return };
        running.pages.into_iter().for_each(|page| self.pages.release(page));
    }

    /// Takes a checkpoint of a lane as it stands, unless there is one or none is wanted.
    fn keep(&mut self, slot: u32, clock: Clock<'_>) -> Result<(), EngineError> {
        let Some(running) = &mut self.lanes[slot as usize] else { return Ok(()) };
        let len = running.lane.pos as usize;
        let unwanted = running.spoilt || running.job.request.cache == CachePolicy::Off;
        if unwanted || len <= running.cache.tokens || !self.cache.is_on() {
            return Ok(());
        }
        let text = &running.text[..len];
        if self.cache.has(text, len <= running.exact_until) {
            return Ok(());
        }
        let Some(snapshot) = self.cache.reserve(&mut self.pages) else { return Ok(()) };
        let begun = clock();
        if let Err(error) = self.machine.save(&mut running.lane, snapshot) {
            self.cache.give_back(snapshot);
            return Err(error);
        }
        self.stats.checkpoints_taken += 1;
        self.stats.checkpoint_time += clock().saturating_sub(begun);
        let (pages, exact) = (&running.pages, running.exact_until);
        let serial = self.cache.insert(text, pages, exact, snapshot, &mut self.pages);
        self.taken += 1;
        // Those of the grid stay in memory.
        let end = running.phase != Phase::Prefill || running.remaining() == 0;
        if end
            || running.job.request.boundaries.iter().any(|b| b / PAGE_TOKENS == len / PAGE_TOKENS)
        {
            self.note_for_disk(serial);
        }
        Ok(())
    }

    /// The slots of lanes in a phase, ascending.
    fn slots(&self, phase: Phase) -> Vec<u32> {
        let of_phase = self.lanes.iter().flatten().filter(|running| running.phase == phase);
        of_phase.map(|running| running.lane.slot).collect()
    }

    /// The lane whose prompt is to be computed next.
    fn next_prefill(&self) -> Option<u32> {
        let slots = self.slots(Phase::Prefill);
        let candidates: Vec<_> = self.candidates(&slots);
        scheduler::order(&candidates).first().map(|&i| slots[i])
    }

    fn candidates(&self, slots: &[u32]) -> Vec<scheduler::Candidate> {
        let running = slots.iter().filter_map(|&slot| self.lanes[slot as usize].as_ref());
        running.map(|running| running.candidate(running.remaining())).collect()
    }

    /// Computes a slice of a lane's prompt.
    fn prefill(&mut self, slot: u32, decoding: bool, clock: Clock<'_>) -> Result<(), Lost> {
        let rows = self.slice_rows(slot, decoding);
        let Some(running) = &mut self.lanes[slot as usize] else { return Ok(()) };
        let begun = clock();
        let pos = running.lane.pos as usize;
        let outcome = self.machine.prefill(&mut running.lane, &running.text[pos..pos + rows]);
        let now = clock();
        let took = now.saturating_sub(begun);
        self.turns.prefilled(took, decoding);
        self.overtake(slot);
        if let Err(error) = outcome {
            return self.lanes_failed(&[slot], error);
        }
        self.failures = 0;
        // A few rows take almost as long as a page.
        if rows >= PAGE_TOKENS {
            self.prefill_rate.add(rows, took);
        }
        self.stats.prefill_passes += 1;
        self.stats.prefill_time += took;
        let Some(running) = &mut self.lanes[slot as usize] else { return Ok(()) };
        running.proven = true;
        if running.exact_until == pos {
            running.exact_until = pos + rows;
        }
        let (done, total) = (pos + rows, running.prompt_tokens());
        running.job.tell(Event::Prefill { done, total });
        let marked = running.marks.last() == Some(&done);
        running.marks.truncate(running.marks.partition_point(|&mark| mark > done));
        if marked && let Err(error) = self.keep(slot, clock) {
            return self.lanes_failed(&[slot], error);
        }
        self.begin_decoding(slot, clock());
        Ok(())
    }

    /// Rows of a lane's next prefill pass. Passes end on the absolute page grid, at a checkpoint, or
    /// with the prompt; so the bits of the state depend on positions alone.
    fn slice_rows(&self, slot: u32, decoding: bool) -> usize {
        let Some(running) = &self.lanes[slot as usize] else { return 0 };
        // No two passes take the same time: a quarter of the bound is for those that take longer.
        let slice = self.rules.slice.mul_f64(0.75);
        let bounded = self.prefill_rate.within(slice).filter(|_| decoding);
        // Before anything was measured, a lane that decodes waits for a page at most.
        let budget = match bounded {
            Some(rows) => rows,
            None if decoding => PAGE_TOKENS,
            None => self.limits.chunk,
        };
        let budget = budget.clamp(PAGE_TOKENS, self.limits.chunk);
        let pos = running.lane.pos as usize;
        let grid = (pos + budget) / PAGE_TOKENS * PAGE_TOKENS;
        let end = running.marks.last().copied().unwrap_or(usize::MAX);
        grid.min(end).min(running.prompt_tokens() - 1) - pos
    }

    /// Counts that others were passed over for a slice of this lane.
    fn overtake(&mut self, slot: u32) {
        let candidate = |running: &Running| running.candidate(0);
        let Some(chosen) = self.lanes[slot as usize].as_ref().map(candidate) else { return };
        for running in self.lanes.iter_mut().flatten().filter(|r| r.phase == Phase::Prefill) {
            let overtaken = scheduler::overtakes(&chosen, &candidate(running));
            running.job.overtaken += u32::from(overtaken);
        }
        if let Some(running) = &mut self.lanes[slot as usize] {
            running.job.overtaken = 0;
        }
    }

    /// A pass of these lanes failed, and nobody without rounds in flight is hit as long as the machine
    /// still works.
    fn lanes_failed(&mut self, slots: &[u32], error: EngineError) -> Result<(), Lost> {
        slots.iter().for_each(|&slot| self.fail(slot, told(&error)));
        self.note_failure(error)
    }

    /// Something failed. Rounds in flight are void, whoever's they are, and the device may have moved
    /// their lanes or not: these fail as well. So do lanes of which no pass has come back yet, and what is on its way
    /// from disk: it may be what was written for them that failed.
    pub(super) fn note_failure(&mut self, error: EngineError) -> Result<(), Lost> {
        self.failures += 1;
        self.round_from = None;
        let unproven = self.lanes.iter().flatten().filter(|running| !running.proven);
        let void: Vec<u32> = unproven.map(|running| running.lane.slot).collect();
        for slot in std::mem::take(&mut self.flight).into_iter().chain(void) {
            self.fail(slot, told(&error));
        }
        self.drop_arriving();
        if self.failures >= FAILURES || self.machine.probe().is_err() {
            return Err(Lost(error));
        }
        self.machine.flight(&mut self.flight);
        Ok(())
    }

    fn find(&self, request: &Request) -> crate::cache::Found {
        if !self.cache.is_on() {
            return crate::cache::Found::nothing("the prefix cache is off");
        }
        match self.policy(request) {
            CachePolicy::Off => {
                crate::cache::Found::nothing("the request asked for nothing to be reused")
            }
            policy => self.cache.find(&request.prompt, policy),
        }
    }

    fn policy(&self, request: &Request) -> CachePolicy {
        match request.cache {
            CachePolicy::Shared if self.rules.exact => CachePolicy::Exact,
            policy => policy,
        }
    }
}

/// An engine's error as a job is told.
fn told(error: &EngineError) -> RequestError {
    match error {
        EngineError::Device(device) => RequestError::Device(device.to_string()),
        other => RequestError::Request(other.to_string()),
    }
}

/// Refuses a request that can't be answered.
pub(crate) fn check(request: &Request, limits: &Limits) -> Result<(), Refusal> {
    check_prompt(&request.prompt, limits.context, limits.vocab).map_err(|error| match error {
        EngineError::PromptTooLong { tokens, context } => Refusal::TooLong { tokens, context },
        other => Refusal::Invalid(other.to_string()),
    })?;
    let ordered = request.boundaries.is_sorted();
    if !ordered || request.boundaries.last().is_some_and(|&end| end > request.prompt.len()) {
        let (boundaries, tokens) = (&request.boundaries, request.prompt.len());
        let why =
            format!("boundaries {boundaries:?} are not ascending positions of {tokens} tokens");
        return Err(Refusal::Invalid(why));
    }
    let most = crate::buffers::MAX_LIKELIEST;
    match request.logprobs {
        Some(count) if count > most => Err(Refusal::Invalid(format!(
            "{count} alternatives of each token were asked for; {most} can be had"
        ))),
        _ => Ok(()),
    }
}
