//! One round: propose, verify, accept, commit.

use model::{Draft, DraftState, Lane, Target};
use ops::accept::{Accept, LogitRows};
use ops::propose::{Propose, Selector};
use ops::{
    Buf, Commit, Device, DeviceError, LaneResult, Lanes, LogitBias, Proposals, SamplerParams, TopK,
    count_tokens,
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
}

impl Round {
    /// The accepted proposals and the token that follows them; at least one.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens[..self.count]
    }
}

/// One round of one lane. Plain decoding is the same with nothing proposed: one row.
pub(crate) fn round<D: Device>(
    e: &mut Engine<D>,
    lane: &mut Lane,
    anchor: u32,
) -> Result<Round, EngineError> {
    let rows = propose(e, lane, anchor);
    let lanes = e.set_step(lane, rows);
    let Engine { dev, target, draft, drafter, state, scratch, buffers, .. } = e;

    model::forward(dev, target, state, scratch, lanes, Commit::Deferred, 0..rows);
    if let (Drafter::DFlash, Some((draft, draft_state))) = (&*drafter, &*draft) {
        model::draft_context(dev, draft, draft_state, scratch.features, lanes);
    }
    dev.run(&buffers.accept(target, scratch.ids, scratch.logits, lanes));

    let round = buffers.read(dev, lanes)?;
    lane.commit(round.count as u32);
    if let Drafter::Host(drafter) = drafter {
        drafter.extend(round.tokens());
    }
    Ok(round)
}

/// Writes the rows to verify, the anchor and its proposals, and returns how many there are.
fn propose<D: Device>(e: &mut Engine<D>, lane: &Lane, anchor: u32) -> usize {
    let block = e.block();
    e.dev.write(e.scratch.ids, bytemuck::bytes_of(&anchor));
    if let Drafter::Host(drafter) = &mut e.drafter {
        let mut proposals = [0; Accept::MAX_ROWS];
        let count = drafter.propose(&mut proposals[1..block]);
        proposals[0] = anchor;
        let vocab = e.target.vocab as u32;
        // A drafter may propose anything; what isn't a token of the model ends the block.
        let rows = 1 + proposals[1..=count].iter().take_while(|&&id| id < vocab).count();
        e.dev.write(e.scratch.ids, bytemuck::cast_slice(&proposals[..rows]));
        return rows;
    }
    if matches!(e.drafter, Drafter::None) {
        return 1;
    }
    let lanes = e.set_step(lane, block);
    let Engine { dev, target, draft, scratch, buffers, .. } = e;
    let Some((draft, state)) = draft else { return 1 };
    dev.write(state.ids, bytemuck::bytes_of(&anchor));
    model::draft_block(dev, draft, target, state, lanes);
    dev.run(&buffers.top_k(state, target, lanes));
    dev.run(&buffers.propose(draft, state, target, scratch.ids, lanes));
    block
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
        stops: &[u32],
    ) {
        let slot = slot as usize;
        let params = self.params.rows(slot, 1, size_of::<SamplerParams>());
        let bounds = Bounds { stops, end: u32::MAX, ..Bounds::default() };
        dev.write(params, bytemuck::bytes_of(&sampler.params(&bounds)));
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

    pub(crate) fn accept(&self, target: &Target, ids: Buf, logits: Buf, lanes: Lanes) -> Accept {
        Accept {
            logits,
            logit_rows: LogitRows::All,
            ids,
            draft_ids: None,
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

    fn read(&mut self, dev: &mut dyn Device, lanes: Lanes) -> Result<Round, EngineError> {
        dev.sync()?;
        dev.read(self.results, bytemuck::cast_slice_mut(&mut self.read));
        let result = LaneResult::of(&self.read, 0, lanes.max_rows);
        let mut tokens = [0; Accept::MAX_ROWS];
        tokens[..result.tokens.len()].copy_from_slice(result.tokens);
        Ok(Round {
            tokens,
            count: result.tokens.len(),
            proposed: result.proposed,
            degenerate: result.flags & LaneResult::DEGENERATE != 0,
        })
    }
}

/// First draft row with logits: a lone lane's row 0 predicts nothing and is left out.
fn draft_first(lanes: Lanes) -> usize {
    usize::from(lanes.count == 1)
}
