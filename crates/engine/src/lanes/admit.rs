//! From the queue to a lane.

use std::time::Duration;

use model::Lane;
use ops::PAGE_TOKENS;

use super::job::{Job, Phase, Running};
use super::{Clock, Core, Machine};
use crate::cache::{Found, Hit};
use crate::sampler::Bounds;
use crate::scheduler::{self, Candidate};
use crate::service::{CachePolicy, CacheSource, CacheUse, Event, Finish};

/// What a lane begins with.
struct Beginning {
    pages: Vec<u32>,
    /// The snapshot to go on from, and the page to copy onto the lane's own.
    restore: Option<(Hit, u32, Option<(u32, u32)>)>,
}

impl<M: Machine> Core<M> {
    /// Gives waiting jobs lanes, as many as there are lanes and pages for. Returns whether any got one.
    pub(super) fn admit(&mut self, clock: Clock<'_>) -> bool {
        let mut any = false;
        self.lanes.iter_mut().flatten().for_each(|running| running.lent = None);
        while let Some(slot) = self.lanes.iter().position(Option::is_none) {
            let Some((at, found)) = self.next_waiting() else { break };
            let job = &self.waiting[at];
            let Some(beginning) = self.beginning(&found, self.pages_for(job)) else { break };
            let job = self.waiting.remove(at);
            let chosen = job.candidate(0);
            let passed = self.waiting.iter_mut();
            let passed = passed.filter(|other| scheduler::overtakes(&chosen, &other.candidate(0)));
            passed.for_each(|other| other.overtaken += 1);
            self.place(slot as u32, job, found, beginning, clock);
            any = true;
        }
        any
    }

    /// The job that goes next, and what the cache has for it. Jobs that wait for a lane which computes
    /// what they need as well are left out.
    fn next_waiting(&mut self) -> Option<(usize, Found)> {
        let waiting = self.waiting.iter();
        let candidates: Vec<Candidate> = waiting.map(|job| job.candidate(job.remaining)).collect();
        for at in scheduler::order(&candidates) {
            if self.waiting[at].loading.is_some() {
                continue;
            }
            let found = self.find(&self.waiting[at].request);
            if !self.is_held(at, found.tokens()) {
                return Some((at, found));
            }
        }
        None
    }

    /// Whether a lane is about to compute a beginning of this job's prompt that the cache doesn't have
    /// yet. That lane then takes a checkpoint where the two prompts part, and until then counts as no less important
    /// than the job: else everyone between the two would come before both.
    fn is_held(&mut self, at: usize, cached: usize) -> bool {
        let Job { request, overtaken, .. } = &self.waiting[at];
        let priority = request.priority;
        let policy = self.policy(request);
        let waited = *overtaken >= scheduler::OVERTAKING;
        if policy == CachePolicy::Off || !self.cache.is_on() || waited {
            return false;
        }
        let usable = request.prompt.len() - 1;
        for running in self.lanes.iter_mut().flatten() {
            if running.phase != Phase::Prefill || running.job.request.cache == CachePolicy::Off {
                continue;
            }
            let theirs = running.prompt_tokens() - 1;
            let prompts = request.prompt[..usable].iter().zip(&running.text[..theirs]);
            let common = prompts.take_while(|(a, b)| a == b).count();
            // Their prompt's end is a checkpoint anyway, wherever it lies; otherwise whole pages.
            let exact = policy == CachePolicy::Exact;
            if exact && running.exact_until < running.lane.pos as usize {
                continue;
            }
            let whole = common == theirs && (!exact || common == usable);
            let end = if whole { common } else { common / PAGE_TOKENS * PAGE_TOKENS };
            if end >= cached + PAGE_TOKENS && running.lane.pos as usize <= end {
                if !running.marks.contains(&end) && (running.lane.pos as usize) < end {
                    let behind = running.marks.partition_point(|&mark| mark > end);
                    running.marks.insert(behind, end);
                }
                let held = (running.lane.pos as usize) < end;
                running.lent = running.lent.max(held.then_some(priority));
                return held;
            }
        }
        false
    }

    /// Pages that a job may come to fill.
    fn pages_for(&self, job: &Job) -> usize {
        let request = &job.request;
        let end = request.prompt.len().saturating_add(request.max_tokens).min(self.limits.context);
        (end + self.limits.block).div_ceil(PAGE_TOKENS)
    }

    /// Finds pages for a lane, evicting checkpoints if need be; first with what the cache has, then
    /// without. `None` if lanes that run have to end first.
    fn beginning(&mut self, found: &Found, count: usize) -> Option<Beginning> {
        if let Some(hit) = found.hit
            && let Some((snapshot, chain, tail)) = self.cache.open(hit.id)
            && let Some(own) = self.take_pages(count - chain.len(), Some(hit.id))
        {
            chain.iter().for_each(|&page| self.pages.share(page));
            let copy = tail.map(|from| (from, own[0]));
            let pages = [chain, own].concat();
            return Some(Beginning { pages, restore: Some((hit, snapshot, copy)) });
        }
        let pages = self.take_pages(count, None)?;
        Some(Beginning { pages, restore: None })
    }

    pub(super) fn take_pages(&mut self, count: usize, spared: Option<u32>) -> Option<Vec<u32>> {
        let short = self.pages.free() < count;
        if short && self.pages.free() + self.cache.pages_alone(&self.pages) < count {
            // Lanes hold them: nothing would come of throwing checkpoints away.
            return None;
        }
        while self.pages.free() < count {
            if !self.cache.evict(&mut self.pages, spared) {
                return None;
            }
        }
        (0..count).map(|_| self.pages.take()).collect()
    }

    /// Puts a job on a free lane.
    fn place(
        &mut self,
        slot: u32,
        mut job: Job,
        found: Found,
        beginning: Beginning,
        clock: Clock<'_>,
    ) {
        let Beginning { pages, restore } = beginning;
        self.machine.set_pages(slot, &pages);
        let hit = restore.map(|(hit, ..)| hit);
        let mut lane = Lane::new(slot);
        match restore {
            Some((hit, snapshot, copy)) => {
                if let Some((from, to)) = copy {
                    self.machine.copy_page(from, to);
                }
                lane = self.machine.restore(snapshot, slot, hit.len as u32);
            }
            None => self.machine.clear(slot),
        }
        let admitted = clock();
        let tokens = hit.map_or(0, |hit| hit.len);
        let source = match tokens {
            0 => CacheSource::None,
            _ if hit.is_some_and(|hit| self.is_from_disk(hit.id)) => CacheSource::Disk,
            _ => CacheSource::Memory,
        };
        let miss = match found.hit {
            Some(_) if hit.is_none() => "what was kept had to make room for this request",
            _ => found.miss,
        };
        let cache = CacheUse { tokens, source, miss };
        let marks = self.marks(&job, &found, tokens);
        self.stats.prompt_tokens += job.request.prompt.len() as u64;
        self.stats.cached_tokens += tokens as u64;
        job.tell(Event::Started {
            queued: admitted.saturating_sub(job.submitted),
            cache: cache.clone(),
        });
        job.overtaken = 0;
        let mut text = Vec::with_capacity(job.request.prompt.len() + 64);
        text.extend_from_slice(&job.request.prompt);
        // Whoever goes on inside a page computes in other pieces than a prompt that found nothing, so
        // only full pages count as exact from there.
        let exact_until = hit.map_or(0, |hit| {
            let computes = hit.len + 1 < text.len();
            if computes { hit.exact_until / PAGE_TOKENS * PAGE_TOKENS } else { hit.exact_until }
        });
        self.lanes[slot as usize] = Some(Running {
            job,
            lane,
            phase: Phase::Prefill,
            text,
            pages,
            exact_until,
            marks,
            cache,
            admitted,
            prefilled: admitted,
            rounds: 0,
            proposed: 0,
            accepted: 0,
            spoilt: false,
            proven: false,
            broken: None,
            lent: None,
        });
        self.begin_decoding(slot, admitted);
    }

    /// Where to take checkpoints while a prompt is computed, descending: on a grid, where prompts may go
    /// on differently or did before, and at the prompt's end. All but the last are at a page's end, so
    /// that whoever goes on from there computes what a prompt that found nothing would.
    fn marks(&self, job: &Job, found: &Found, cached: usize) -> Vec<usize> {
        if job.request.cache == CachePolicy::Off || !self.cache.is_on() {
            return Vec::new();
        }
        let end = job.request.prompt.len() - 1;
        let parted = found.known_pages * PAGE_TOKENS;
        let grid = self.rules.grid.max(PAGE_TOKENS);
        let mut marks: Vec<usize> = (1..=end / grid).map(|i| i * grid).collect();
        marks.extend(job.request.boundaries.iter().chain([&parted]));
        marks.iter_mut().for_each(|mark| *mark = *mark / PAGE_TOKENS * PAGE_TOKENS);
        marks.push(end);
        marks.retain(|&mark| mark > cached && mark <= end);
        marks.sort_unstable_by(|a, b| b.cmp(a));
        marks.dedup();
        marks
    }

    /// Lets a lane answer, if its prompt is done.
    pub(super) fn begin_decoding(&mut self, slot: u32, now: Duration) {
        let Some(running) = &mut self.lanes[slot as usize] else { return };
        if running.phase != Phase::Prefill || running.remaining() > 0 {
            return;
        }
        let request = &running.job.request;
        let end = request.prompt.len().saturating_add(request.max_tokens).min(self.limits.context);
        let bounds = Bounds {
            stops: &request.stop_tokens,
            end: end as u32,
            logprobs: request.logprobs.is_some(),
            masked: request.constraint.is_some(),
        };
        self.machine.start(slot, &request.prompt, &request.sampler, &bounds);
        (running.phase, running.proven) = (Phase::Decode, false);
        running.prefilled = now;
        if running.job.request.max_tokens == 0 {
            self.end(slot, Finish::Length, None, now);
        }
    }
}
