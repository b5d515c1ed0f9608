//! Rounds of the lanes that answer.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::job::{Phase, Running};
use super::{Clock, Core, Lost, Machine};
use crate::engine::EngineError;
use crate::round::{Going, Masker, Round};
use crate::service::{Event, Finish, RequestError, Token};
use ops::MAX_STOPS;

impl<M: Machine> Core<M> {
    /// Submits a round of these lanes, or more where the machine runs ahead, and receives the oldest.
    pub(super) fn round(&mut self, slots: &[u32], clock: Clock<'_>) -> Result<(), Lost> {
        let adapts = self.limits.adapts;
        let rows = slots.len() * self.limits.block;
        let pace = adapts && rows <= self.limits.like_alone && self.paces[slots.len() - 1].drafts();
        let mut depth = self.limits.depth;
        let mut going = Vec::with_capacity(slots.len());
        for &slot in slots {
            let Some(running) = &self.lanes[slot as usize] else { continue };
            let request = &running.job.request;
            let masked = request.constraint.is_some();
            if masked || request.stop_tokens.len() > MAX_STOPS {
                depth = 1;
            }
            going.push(Going {
                lane: running.lane,
                anchor: running.anchor(),
                draft: request.draft && (!adapts || pace || !request.sampler.may_adapt()),
                logprobs: request.logprobs,
                masked,
            });
        }
        let drafting = going.iter().filter(|g| g.draft).count();
        if !self.flight.is_empty() && drafting != self.drafting {
            // Rounds of one kind first end, then the other kind begins.
            return self.receive(clock).map(drop);
        }
        self.drafting = drafting;
        let begun = clock();
        // What is in flight was computed since the round before it came back, whatever the host did meanwhile.
        let since = if self.flight.is_empty() { begun } else { self.received };
        self.round_from = Some(begun);
        let submitted = self.machine.submit(&going, depth, &mut Constraints(&mut self.lanes));
        if let Err(error) = submitted {
            return self.lanes_failed(slots, error);
        }
        self.machine.flight(&mut self.flight);
        let tokens = self.receive(clock)?;
        self.turns.decoded(clock().saturating_sub(begun));
        // Rounds of both kinds of lanes at once say nothing about either.
        if adapts && tokens > 0 && drafting.is_multiple_of(going.len()) {
            let tokens = tokens as f64 / going.len() as f64;
            let took = self.received.saturating_sub(since);
            self.paces[slots.len() - 1].took(drafting > 0, took.as_secs_f64(), tokens);
        }
        Ok(())
    }

    /// Receives the oldest round in flight. Returns how many tokens it emitted.
    pub(super) fn receive(&mut self, clock: Clock<'_>) -> Result<usize, Lost> {
        let slots = self.flight.clone();
        let begun = self.round_from.take().unwrap_or_else(clock);
        let mut rounds = Vec::with_capacity(slots.len());
        for &slot in &slots {
            let Some(running) = &mut self.lanes[slot as usize] else { continue };
            match self.machine.receive(&mut running.lane) {
                Ok(round) => rounds.push((slot, round)),
                Err(error) => return self.lanes_failed(&slots, error).map(|()| 0),
            }
        }
        let now = clock();
        (self.failures, self.received) = (0, now);
        self.stats.rounds += 1;
        self.stats.round_time += now.saturating_sub(begun);
        let tokens = rounds.iter().map(|(_, round)| round.tokens().len()).sum();
        self.machine.flight(&mut self.flight);
        for (slot, round) in rounds {
            self.take_round(slot, round, clock);
        }
        Ok(tokens)
    }

    /// Hands a round's tokens to a lane's job.
    fn take_round(&mut self, slot: u32, round: Round, clock: Clock<'_>) {
        let in_flight = self.flight.contains(&slot);
        let Some(running) = &mut self.lanes[slot as usize] else { return };
        running.proven = true;
        if running.phase == Phase::Over {
            // It ended while this round was on its way: the rows that it kept are dropped again.
            running.lane.uncommit(round.tokens().len() as u32);
            return;
        }
        if round.degenerate {
            let pos = running.lane.pos;
            let why = EngineError::Degenerate { pos }.to_string();
            return self.fail(slot, RequestError::Request(why));
        }
        if let Some(why) = running.broken.take() {
            return self.fail(slot, RequestError::Request(why));
        }
        let emitted = round.tokens();
        running.rounds += 1;
        running.proposed += round.proposed;
        running.accepted += emitted.len().saturating_sub(1);
        self.stats.proposed += round.proposed as u64;
        self.stats.accepted_proposals += emitted.len().saturating_sub(1) as u64;
        let (keep, mut finish) = cut(emitted, running);
        running.text.extend_from_slice(&emitted[..keep]);
        running.roll_back(in_flight);
        self.stats.output_tokens += keep as u64;
        if let Some(constraint) = &mut running.job.request.constraint {
            let advance = AssertUnwindSafe(|| constraint.advance(&emitted[..keep]));
            match caught(catch_unwind(advance)) {
                Ok(true) if finish != Some(Finish::Stop) => finish = Some(Finish::Constraint),
                Ok(_) => {}
                Err(why) => return self.fail(slot, RequestError::Request(why)),
            }
        }
        if finish.is_none() && (round.ended || keep == 0) {
            finish = Some(Finish::Context);
        }
        if keep > 0 {
            let tokens = tokens(&round, keep);
            running.job.tell(Event::Tokens { tokens, proposed: round.proposed });
        }
        if let Some(finish) = finish {
            self.end(slot, finish, None, clock());
        }
    }
}

/// How many of a round's tokens stand, and whether the answer ends there.
fn cut(emitted: &[u32], running: &Running) -> (usize, Option<Finish>) {
    let request = &running.job.request;
    let room = request.max_tokens - running.emitted();
    let within = &emitted[..emitted.len().min(room)];
    if let Some(at) = within.iter().position(|token| request.stop_tokens.contains(token)) {
        return (at + 1, Some(Finish::Stop));
    }
    (within.len(), (within.len() == room).then_some(Finish::Length))
}

fn tokens(round: &Round, keep: usize) -> Vec<Token> {
    let ids = round.tokens()[..keep].iter();
    let of = |(i, &id): (usize, &u32)| match round.logprobs.get(i) {
        Some((logprob, alternatives)) => {
            // A token with no probability at all is not an alternative.
            let alternatives = alternatives.iter().filter(|(_, logprob)| logprob.is_finite());
            let alternatives = alternatives.copied().collect();
            Token { id, logprob: Some(*logprob), alternatives }
        }
        None => Token { id, logprob: None, alternatives: Vec::new() },
    };
    ids.enumerate().map(of).collect()
}

/// The constraints of lanes, asked for masks.
struct Constraints<'a>(&'a mut [Option<Running>]);

impl Masker for Constraints<'_> {
    fn masks(&mut self, slot: u32, proposals: &[u32], masks: &mut [u32]) {
        let Some(running) = &mut self.0[slot as usize] else { return };
        let Some(constraint) = &mut running.job.request.constraint else { return };
        let rows = proposals.len() + 1;
        let words = masks.len() / rows;
        match caught(catch_unwind(AssertUnwindSafe(|| constraint.masks(proposals, masks)))) {
            // Rows behind those written are not reached; they allow whatever there is.
            Ok(written) if (1..=rows).contains(&written) => masks[written * words..].fill(u32::MAX),
            Ok(written) => {
                running.broken = Some(format!("the constraint wrote {written} of {rows} masks"));
                masks.fill(u32::MAX);
            }
            Err(why) => {
                running.broken = Some(why);
                masks.fill(u32::MAX);
            }
        }
    }
}

/// A panic as an error, in words.
fn caught<T>(outcome: std::thread::Result<Result<T, String>>) -> Result<T, String> {
    outcome.unwrap_or_else(|panic| {
        let said = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("the constraint panicked: {}", said.unwrap_or("without a word")))
    })
}
