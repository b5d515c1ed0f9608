//! One round: propose, verify, accept, commit.

use std::collections::VecDeque;

use model::{Draft, DraftState, Lane, Target};
use ops::accept::{Accept, LogitRows};
use ops::propose::{Propose, Selector};
use ops::{
    Buf, Commit, Device, DeviceError, LaneResult, LaneStep, Lanes, LogitBias, Proposals,
    SamplerParams, TopK, count_tokens,
};

use crate::drafter::Drafter;
use crate::engine::{Engine, EngineError};
use crate::sampler::{Bounds, MAX_LOGIT_BIASES, Sampler};

/// Candidates of a draft without a selector.
const CANDIDATES: usize = 16;

/// What one round emitted.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    tokens: [u32; Accept::MAX_ROWS],
    count: usize,
    /// Proposals verified.
    pub proposed: usize,
    /// A row had no finite logit.
    pub degenerate: bool,
    /// The device ended the lane behind these tokens: a stop token, or no room for more. Rounds after
    /// that emit nothing.
    pub ended: bool,
}

impl Round {
    /// The accepted proposals and the token that follows them. Empty only after the lane ended.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens[..self.count]
    }
}

/// Rounds enqueued and not read yet, and what the device will hold when they are done.
#[derive(Debug, Default)]
pub(crate) struct Pipeline {
    /// Rounds on the device, all of one lane and of the same rows.
    in_flight: usize,
    rows: usize,
    slot: u32,
    /// Rounds of other lanes, read before their session asked.
    early: VecDeque<(u32, Round)>,
    /// The step and the anchor that lie on the device, if that is known and nothing is in flight.
    resident: Option<(LaneStep, u32)>,
}

impl Pipeline {
    /// The device's step or anchor were written over.
    pub(crate) fn forget(&mut self) {
        self.resident = None;
    }

    /// Rounds of a slot that were not handed over.
    pub(crate) fn in_flight(&self, slot: u32) -> usize {
        let early = self.early.iter().filter(|(of, _)| *of == slot).count();
        early + self.on_device(slot)
    }

    fn on_device(&self, slot: u32) -> usize {
        if slot == self.slot { self.in_flight } else { 0 }
    }
}

/// Enqueues one round of a lane. Plain decoding is the same with nothing proposed: one row.
///
/// The device moves the lane itself, so a round may follow another whose result was not read: then
/// `lane` and `anchor` are not looked at. The host writes only where a lane begins or was moved by hand,
/// and the proposals of a drafter of its own.
fn submit<D: Device>(e: &mut Engine<D>, lane: &Lane, anchor: u32) -> Result<(), EngineError> {
    if e.pipeline.on_device(lane.slot) == 0 {
        park(e)?;
        begin(e, lane, anchor);
    }
    let rows = e.pipeline.rows;
    let lanes = e.lanes(rows);
    let Engine { dev, target, draft, drafter, state, scratch, buffers, .. } = e;
    let draft = draft.as_ref().filter(|_| matches!(drafter, Drafter::DFlash));
    let key = (rows as u64) << 1 | u64::from(draft.is_some());

    dev.replay(key, &mut |dev| {
        if let Some((draft, draft_state)) = draft {
            model::draft_block(dev, draft, target, draft_state, lanes);
            dev.run(&buffers.top_k(draft_state, target, lanes));
            dev.run(&buffers.propose(draft, draft_state, target, scratch.ids, lanes));
        }
        model::forward(dev, target, state, scratch, lanes, Commit::Deferred, 0..rows);
        if let Some((draft, draft_state)) = draft {
            model::draft_context(dev, draft, draft_state, scratch.features, lanes);
        }
        let draft_ids = draft.map(|(_, draft_state)| draft_state.ids);
        dev.run(&buffers.accept(target, scratch.ids, draft_ids, scratch.logits, lanes));
        dev.publish(buffers.results(lanes));
    });
    e.pipeline.in_flight += 1;
    Ok(())
}

/// Submits rounds of a lane until `depth` are in flight.
pub(crate) fn submit_until<D: Device>(
    e: &mut Engine<D>,
    lane: &Lane,
    anchor: u32,
    depth: usize,
) -> Result<(), EngineError> {
    // With a parked round, `lane` is not where the device left it: that round comes first.
    let parked = e.pipeline.in_flight(lane.slot) > e.pipeline.on_device(lane.slot);
    while !parked && e.pipeline.on_device(lane.slot) < depth {
        submit(e, lane, anchor)?;
    }
    Ok(())
}

/// Reads the rounds in flight, so that another lane can have the step and the ids on the device.
pub(crate) fn park<D: Device>(e: &mut Engine<D>) -> Result<(), EngineError> {
    while e.pipeline.in_flight > 0 {
        let (slot, round) = (e.pipeline.slot, take(e)?);
        e.pipeline.early.push_back((slot, round));
    }
    Ok(())
}

/// Hands over a lane's oldest round and moves the host's account of the lane.
pub(crate) fn receive<D: Device>(e: &mut Engine<D>, lane: &mut Lane) -> Result<Round, EngineError> {
    let early = e.pipeline.early.iter().position(|(slot, _)| *slot == lane.slot);
    let round = match early.and_then(|at| e.pipeline.early.remove(at)) {
        Some((_, round)) => round,
        None => take(e)?,
    };
    lane.commit(round.count as u32);
    let last = e.pipeline.on_device(lane.slot) == 0 && early.is_none();
    if let Some(&anchor) = round.tokens().last().filter(|_| last) {
        let rows = if round.ended { 0 } else { e.pipeline.rows as u32 };
        e.pipeline.resident = Some((lane.step(0, rows), anchor));
    }
    if let Drafter::Host(drafter) = &mut e.drafter {
        drafter.extend(round.tokens());
    }
    Ok(round)
}

/// Waits for the oldest round on the device.
fn take<D: Device>(e: &mut Engine<D>) -> Result<Round, EngineError> {
    let lanes = e.lanes(e.pipeline.rows);
    let round = e.buffers.receive(&mut e.dev, lanes);
    // After a failure, nothing that was enqueued counts any more.
    let left = if round.is_ok() { e.pipeline.in_flight.saturating_sub(1) } else { 0 };
    e.pipeline.in_flight = left;
    Ok(round?)
}

/// Makes the device hold the lane's step, the anchor, and what a drafter on the host proposes.
fn begin<D: Device>(e: &mut Engine<D>, lane: &Lane, anchor: u32) {
    let mut ids = [anchor; Accept::MAX_ROWS];
    let block = e.block();
    let rows = match &mut e.drafter {
        Drafter::None => 1,
        Drafter::DFlash => block,
        Drafter::Host(drafter) => {
            let count = drafter.propose(&mut ids[1..block]);
            // A drafter may propose anything; what isn't a token of the model ends the block.
            let vocab = e.target.vocab as u32;
            1 + ids[1..=count].iter().take_while(|&&id| id < vocab).count()
        }
    };
    let step = lane.step(0, rows as u32);
    let resident = e.pipeline.resident.take();
    (e.pipeline.rows, e.pipeline.slot) = (rows, lane.slot);
    if resident.is_none_or(|(on_device, _)| on_device != step) {
        e.dev.write(e.step, bytemuck::bytes_of(&step));
    }
    let known = resident.is_some_and(|(_, on_device)| on_device == anchor);
    let written = if matches!(e.drafter, Drafter::Host(_)) { rows } else { usize::from(!known) };
    if written > 0 {
        e.dev.write(e.scratch.ids, bytemuck::cast_slice(&ids[..written]));
    }
    if let Some((_, draft)) = e.draft.as_ref().filter(|_| !known) {
        e.dev.write(draft.ids, bytemuck::bytes_of(&anchor));
    }
}

/// Buffers of proposing and accepting, and each slot's sampling state.
#[derive(Debug)]
pub(crate) struct RoundBuffers {
    candidates: Buf,
    values: Buf,
    top_k_scratch: Buf,
    proposals: Proposals,
    params: Buf,
    counts: Buf,
    biases: Buf,
    results: Buf,
    accept_scratch: Buf,
    /// Where `results` is read to.
    read: Vec<u32>,
    /// Reused by [`RoundBuffers::start`].
    count_row: Vec<u32>,
}

impl RoundBuffers {
    pub(crate) fn new(
        dev: &mut dyn Device,
        target: &Target,
        draft: Option<&Draft>,
        slots: usize,
        block: usize,
    ) -> Result<RoundBuffers, DeviceError> {
        let k = draft
            .and_then(|d| d.selector.as_ref())
            .map_or(CANDIDATES, |s| s.candidates)
            .min(target.vocab);
        let (rows, vocab) = (slots * block, target.vocab);
        let results = Accept::results_bytes(slots, block);
        let proposals = dev.alloc(Proposals::bytes(slots, block, k), "proposals")?;
        Ok(RoundBuffers {
            candidates: dev.alloc(4 * rows * k, "candidates")?,
            values: dev.alloc(4 * rows * k, "candidates")?,
            top_k_scratch: dev.alloc(TopK::scratch_bytes(rows, vocab, k), "candidate search")?,
            proposals: Proposals { buf: proposals, k },
            params: dev.alloc(slots * size_of::<SamplerParams>(), "sampling parameters")?,
            counts: dev.alloc(4 * slots * vocab, "token counts")?,
            biases: dev.alloc(slots * MAX_LOGIT_BIASES * size_of::<LogitBias>(), "logit biases")?,
            results: dev.alloc(results, "results")?,
            accept_scratch: dev.alloc(Accept::scratch_bytes(rows, vocab), "acceptance")?,
            read: vec![0; results / 4],
            count_row: vec![0; vocab],
        })
    }

    /// Prepares a slot for an answer.
    pub(crate) fn start(
        &mut self,
        dev: &mut dyn Device,
        slot: u32,
        prompt: &[u32],
        sampler: &Sampler,
        bounds: &Bounds<'_>,
    ) {
        let slot = slot as usize;
        let params = self.params.rows(slot, 1, size_of::<SamplerParams>());
        dev.write(params, bytemuck::bytes_of(&sampler.params(bounds)));
        let biases = self.biases.rows(slot, 1, MAX_LOGIT_BIASES * size_of::<LogitBias>());
        dev.write(biases, bytemuck::cast_slice(&sampler.logit_bias));
        self.count_row.fill(0);
        count_tokens(&mut self.count_row, prompt, &[]);
        let counts = self.counts.rows(slot, 1, 4 * self.count_row.len());
        dev.write(counts, bytemuck::cast_slice(&self.count_row));
        dev.zero(self.proposals.buf);
    }

    pub(crate) fn top_k(&self, s: &DraftState, target: &Target, lanes: Lanes) -> TopK {
        let (stride, valid) = (target.lm_head.n, target.vocab);
        let first = draft_first(lanes);
        let rows = lanes.rows - first;
        let k = self.proposals.k;
        TopK {
            logits: s.logits.rows(first, rows, 4 * stride),
            ids: self.candidates,
            values: self.values,
            scratch: self.top_k_scratch,
            rows,
            stride,
            valid,
            k,
        }
    }

    pub(crate) fn propose(
        &self,
        d: &Draft,
        s: &DraftState,
        target: &Target,
        ids: Buf,
        lanes: Lanes,
    ) -> Propose {
        let first = draft_first(lanes);
        let selector = d.selector.as_ref().map(|selector| Selector {
            predecessor: selector.predecessor,
            successor: selector.successor,
            query: s.selector_rows.rows(first, lanes.rows - first, 4 * selector.rank),
            vocab: target.lm_head.n,
            rank: selector.rank,
        });
        Propose {
            candidates: self.candidates,
            values: self.values,
            selector,
            params: self.params,
            ids,
            proposals: self.proposals,
            lanes,
            draft_stride: lanes.max_rows - first,
            draft_first: 1 - first,
        }
    }

    pub(crate) fn accept(
        &self,
        target: &Target,
        ids: Buf,
        draft_ids: Option<Buf>,
        logits: Buf,
        lanes: Lanes,
    ) -> Accept {
        Accept {
            logits,
            logit_rows: LogitRows::All,
            ids,
            draft_ids,
            proposals: Some(self.proposals),
            params: self.params,
            counts: self.counts,
            biases: self.biases,
            bias_capacity: MAX_LOGIT_BIASES,
            masks: None,
            results: self.results,
            scratch: self.accept_scratch,
            lanes,
            stride: target.lm_head.n,
            valid: target.vocab,
        }
    }

    /// What the host reads of a round.
    fn results(&self, lanes: Lanes) -> Buf {
        self.results.slice(0, Accept::results_bytes(lanes.count, lanes.max_rows))
    }

    fn receive(&mut self, dev: &mut dyn Device, lanes: Lanes) -> Result<Round, DeviceError> {
        let words = self.results(lanes).bytes / 4;
        dev.receive(bytemuck::cast_slice_mut(&mut self.read[..words]))?;
        let result = LaneResult::of(&self.read, 0, lanes.max_rows);
        let mut tokens = [0; Accept::MAX_ROWS];
        tokens[..result.tokens.len()].copy_from_slice(result.tokens);
        Ok(Round {
            tokens,
            count: result.tokens.len(),
            proposed: result.proposed,
            degenerate: result.flags & LaneResult::DEGENERATE != 0,
            ended: result.flags & (LaneResult::STOPPED | LaneResult::LIMIT) != 0,
        })
    }
}

/// First draft row with logits: a lone lane's row 0 predicts nothing and is left out.
fn draft_first(lanes: Lanes) -> usize {
    usize::from(lanes.count == 1)
}
