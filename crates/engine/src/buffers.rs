//! Buffers of proposing and accepting, and each slot's sampling state.

use model::{Draft, DraftState, Target};
use ops::accept::{Accept, LogitRows};
use ops::propose::{Propose, Selector};
use ops::{
    Buf, Device, DeviceError, LaneResult, Lanes, LogitBias, PUBLISHED, PUBLISHED_BYTES, Proposals,
    SamplerParams, TopK, Unsupported, count_tokens,
};

use crate::round::{Masker, Place, Round};
use crate::sampler::{Bounds, MAX_LOGIT_BIASES, Sampler};

/// Candidates of a draft without a selector.
const CANDIDATES: usize = 16;
/// The most likeliest tokens that a token reports.
pub(crate) const MAX_LIKELIEST: usize = 20;

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
    /// `[rows, ceil(vocab / 32)]` u32.
    pub(crate) masks: Buf,
    /// Ids, then logits, `[rows, k]` each.
    likeliest: Buf,
    likeliest_scratch: Buf,
    /// Likeliest tokens of a row.
    likeliest_k: usize,
    /// Where `results` and `likeliest` are read to.
    read: Vec<u32>,
    read_likeliest: Vec<u32>,
    /// Rows and lanes of the round read last.
    last: (usize, usize),
    /// Reused by [`RoundBuffers::start`].
    count_row: Vec<u32>,
    mask_rows: Vec<u32>,
}

impl RoundBuffers {
    pub(crate) fn new(
        dev: &mut dyn Device,
        target: &Target,
        draft: Option<&Draft>,
        slots: usize,
        block: usize,
        depth: usize,
    ) -> Result<RoundBuffers, DeviceError> {
        check_lanes(slots, block, MAX_LIKELIEST.min(target.vocab), depth)?;
        let k = draft
            .and_then(|d| d.selector.as_ref())
            .map_or(CANDIDATES, |s| s.candidates)
            .min(target.vocab);
        let (rows, vocab) = (slots * block, target.vocab);
        let results = Accept::results_bytes(slots, block);
        let proposals = dev.alloc(Proposals::bytes(slots, block, k), "proposals")?;
        let likeliest_k = MAX_LIKELIEST.min(vocab);
        let likeliest = 8 * rows * likeliest_k;
        let mask_words = vocab.div_ceil(32);
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
            masks: dev.alloc(4 * rows * mask_words, "grammar masks")?,
            likeliest: dev.alloc(likeliest, "likeliest tokens")?,
            likeliest_scratch: dev
                .alloc(TopK::scratch_bytes(rows, vocab, likeliest_k), "likeliest tokens")?,
            likeliest_k,
            read: vec![0; results / 4],
            read_likeliest: vec![0; likeliest / 4],
            last: (0, 1),
            count_row: vec![0; vocab],
            mask_rows: vec![0; block * mask_words],
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

    /// The candidates of the draft's rows.
    pub(crate) fn top_k(&self, s: &DraftState, target: &Target, drafting: Lanes) -> TopK {
        let (stride, valid) = (target.lm_head.n, target.vocab);
        let first = draft_first(drafting);
        let rows = drafting.rows - first;
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

    /// Proposals of the lanes of a pass, of which the first, `drafting`, have any.
    pub(crate) fn propose(
        &self,
        d: &Draft,
        s: &DraftState,
        target: &Target,
        ids: Buf,
        lanes: Lanes,
        drafting: Lanes,
    ) -> Propose {
        let first = draft_first(drafting);
        let reach = lanes.count * lanes.max_rows - first;
        let selector = d.selector.as_ref().map(|selector| Selector {
            predecessor: selector.predecessor,
            successor: selector.successor,
            query: s.selector_rows.rows(first, reach, 4 * selector.rank),
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
            draft_stride: drafting.max_rows - first,
            draft_first: 1 - first,
        }
    }

    pub(crate) fn accept(
        &self,
        target: &Target,
        ids: Buf,
        draft_ids: Option<Buf>,
        logits: Buf,
        masked: bool,
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
            masks: masked.then_some(self.masks),
            results: self.results,
            scratch: self.accept_scratch,
            lanes,
            stride: target.lm_head.n,
            valid: target.vocab,
        }
    }

    /// The likeliest tokens of every row.
    pub(crate) fn likeliest(&self, target: &Target, logits: Buf, lanes: Lanes) -> TopK {
        let (rows, k) = (lanes.rows, self.likeliest_k);
        TopK {
            logits: logits.rows(0, rows, 4 * target.lm_head.n),
            ids: self.likeliest.rows(0, rows, 4 * k),
            values: self.likeliest.slice(4 * rows * k, 4 * rows * k),
            scratch: self.likeliest_scratch,
            rows,
            stride: target.lm_head.n,
            valid: target.vocab,
            k,
        }
    }

    /// What the host reads of a round.
    pub(crate) fn results(&self, lanes: Lanes) -> Buf {
        self.results.slice(0, Accept::results_bytes(lanes.count, lanes.max_rows))
    }

    /// What the host reads of [`RoundBuffers::likeliest`], in parts that can be published.
    pub(crate) fn likeliest_results(&self, rows: usize) -> impl Iterator<Item = Buf> + use<> {
        let all = self.likeliest.rows(0, rows, 8 * self.likeliest_k);
        (0..all.bytes)
            .step_by(PUBLISHED_BYTES)
            .map(move |at| all.slice(at, PUBLISHED_BYTES.min(all.bytes - at)))
    }

    /// Asks for the masks of the lanes that have some, given the rows' ids if any lane has proposals,
    /// and writes them.
    pub(crate) fn write_masks(
        &mut self,
        dev: &mut dyn Device,
        places: &[Place],
        ids: &[u32],
        masker: &mut dyn Masker,
    ) {
        let words = self.count_row.len().div_ceil(32);
        for place in places.iter().filter(|place| place.masked) {
            let (row0, rows) = (place.row0 as usize, place.rows as usize);
            let proposals = if rows > 1 { &ids[row0 + 1..row0 + rows] } else { &[] };
            let masks = &mut self.mask_rows[..rows * words];
            masks.fill(u32::MAX);
            masker.masks(place.slot, proposals, masks);
            dev.write(self.masks.rows(row0, rows, 4 * words), bytemuck::cast_slice(masks));
        }
    }

    /// Waits for a round's results.
    pub(crate) fn receive(
        &mut self,
        dev: &mut dyn Device,
        lanes: Lanes,
        places: &[Place],
    ) -> Result<(), DeviceError> {
        let words = self.results(lanes).bytes / 4;
        dev.receive(bytemuck::cast_slice_mut(&mut self.read[..words]))?;
        if places.iter().any(|place| place.logprobs.is_some()) {
            let parts = self.likeliest_results(lanes.rows);
            let mut rest = self.read_likeliest.as_mut_slice();
            for part in parts {
                let (now, later) = rest.split_at_mut(part.bytes / 4);
                dev.receive(bytemuck::cast_slice_mut(now))?;
                rest = later;
            }
        }
        self.last = (lanes.rows, lanes.max_rows);
        Ok(())
    }

    /// The round of lane `i` of those received last.
    pub(crate) fn round(&self, i: usize, places: &[Place]) -> Round {
        let (rows, max_rows) = self.last;
        let result = LaneResult::of(&self.read, i, max_rows);
        let mut round = Round::of(&result);
        if let Some(count) = places[i].logprobs {
            let k = self.likeliest_k;
            let (ids, values) = self.read_likeliest.split_at(rows * k);
            let values: &[f32] = bytemuck::cast_slice(values);
            round.logprobs.extend(result.logprobs.iter().enumerate().map(|(t, &logprob)| {
                let row = (places[i].row0 as usize + t) * k;
                let row = ids[row..][..k].iter().zip(&values[row..][..k]).take(count);
                let relative = |(&id, &value): (&u32, &f32)| (id, value - result.log_sums[t]);
                (logprob, row.map(relative).collect())
            }));
        }
        round
    }
}

/// Refuses more lanes than can tell the host what a round brought, with the likeliest tokens of all rows, `depth`
/// rounds at a time.
fn check_lanes(slots: usize, block: usize, k: usize, depth: usize) -> Result<(), Unsupported> {
    let fits = |slots: usize| {
        let parts = (8 * slots * block * k).div_ceil(PUBLISHED_BYTES);
        depth * (1 + parts) <= PUBLISHED && Accept::results_bytes(slots, block) <= PUBLISHED_BYTES
    };
    let most = || (1..slots).rev().find(|&slots| fits(slots)).unwrap_or(0);
    let what = || format!("{slots} lanes of {block} rows");
    let limit = if fits(slots) { String::new() } else { format!("{} lanes: use --lanes", most()) };
    Unsupported::unless(fits(slots), "a round's results", what, &limit)
}

/// First draft row with logits: a lone lane's row 0 predicts nothing and is left out.
fn draft_first(drafting: Lanes) -> usize {
    usize::from(drafting.count == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_lanes_than_can_be_told_of_are_refused_with_the_number() {
        let most = |block, depth| {
            (1..9000).take_while(|&slots| check_lanes(slots, block, 20, depth).is_ok()).count()
        };
        // 160 bytes a row, 65,536 at once; 8 copies may wait, one of them with the results themselves.
        assert_eq!(most(8, 2), 3 * 65_536 / (160 * 8));
        for (block, depth) in [(8, 1), (8, 2), (1, 1), (16, 2)] {
            let most = most(block, depth);
            let error = check_lanes(9999, block, 20, depth).expect_err("too many").to_string();
            assert!(most > 51 && error.contains(&format!("{most} lanes")), "{most}: {error}");
        }
    }
}
