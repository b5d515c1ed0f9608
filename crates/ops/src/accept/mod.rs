//! The end of a round: which proposals stand, which token follows them, and the lane's next step.
//!
//! Row i of a lane holds the target's logits after the anchor and proposals 1..=i. Its distribution
//! is made by one definition, the same for every rule and with or without proposals:
//!
//! 1. raw logits, NaN as −∞; ids from `valid` on do not exist;
//! 2. penalties of the slot's token counts, to which row i adds proposals 1..=i: repetition
//!    (positive logits divided, others multiplied), frequency, presence;
//! 3. logit biases; 4. the grammar mask;
//! 5. min-p, relative to the likeliest token: logit ≥ max + temperature · ln(min_p);
//! 6. top-k by logit; 7. integer weights ([`SamplerParams`], `sampling`);
//! 8. top-p by weight over what is left: a token stays while the weight before it is less than
//!    top_p of the total. Ties go to the lowest id in every step.
//!
//! A row without any finite logit is a point mass on the lowest id that the mask allows (else
//! id 0), and reported ([`LaneResult::DEGENERATE`]). The [`Rule`] then decides in integers:
//! greedy, token, block or invariant; random numbers are those of [`crate::random`]. A lane of one
//! row has no proposals: plain decoding.
//!
//! After the rule, the tokens are cut behind the first stop id, and before the slot's `end`
//! position; either freezes the lane by setting its rows to 0. Then
//! `pos += kept, pending = kept, parity ^= 1` in the lane's step, kept tokens enter the counts,
//! and the last one becomes the anchor in row 0 of the lane's ids. A lane of 0 rows keeps nothing
//! and only takes that step.
//!
//! Source: spec E; arXiv 2211.17192, 2403.10444 (block), 2408.07978 (invariant).

mod cuda;
mod host;
mod rules;
mod select;
mod target;

use crate::kernel::{Card, Plan};
use crate::sampling::{Candidates, count_output};
use crate::top_k::MAX_VOCAB;
use crate::{
    Bindings, Buf, Cost, Cpu, Elements, LaneStep, Lanes, LogitBias, Mem, Op, Proposals, Rule,
    SamplerParams, TopK, Unsupported,
};
use rules::{Draft, Target, Verdict};

/// Which rows of a pass have logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// Every row: `logits` is `[lanes.rows, stride]`, a verify pass with deferred commit.
    All,
    /// Only the last row of each lane: `logits` is `[lanes.count, stride]`, the end of a prefill.
    /// There are no proposals, one token is emitted, and the step becomes `pos += rows,
    /// pending = 0, parity ^= 1`.
    Last,
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Accept {
    /// f32, see [`LogitRows`].
    pub logits: Buf,
    /// Which rows have logits.
    pub logit_rows: LogitRows,
    /// `[lanes.rows]` u32: the anchor and the proposals; the next anchor is written over the old.
    pub ids: Buf,
    /// `[lanes.rows]` u32: the next anchor is also written here, for the draft pass.
    pub draft_ids: Option<Buf>,
    /// What the proposals were drawn from. Without it all are point masses.
    pub proposals: Option<Proposals>,
    /// `[slots]` of [`SamplerParams`].
    pub params: Buf,
    /// `[slots, valid]` u32, see [`crate::TOKEN_IN_PROMPT`]. Kept tokens are added.
    pub counts: Buf,
    /// `[slots, bias_capacity]` of [`LogitBias`].
    pub biases: Buf,
    /// Logit biases that a slot can have.
    pub bias_capacity: usize,
    /// `[logit rows, ceil(valid / 32)]` u32: bit t mod 32 of word t / 32 allows token t. Read for
    /// slots with [`SamplerParams::MASKED`].
    pub masks: Option<Buf>,
    /// What the host reads, see [`LaneResult`].
    pub results: Buf,
    /// [`Accept::scratch_bytes`] long.
    pub scratch: Buf,
    /// Rows and their lanes; the steps are advanced.
    pub lanes: Lanes,
    /// Elements from one row of `logits` to the next.
    pub stride: usize,
    /// Ids that exist.
    pub valid: usize,
}

impl Accept {
    /// The most rows of a lane.
    pub const MAX_ROWS: usize = 32;

    /// Bytes of scratch for this many rows of logits.
    pub fn scratch_bytes(logit_rows: usize, valid: usize) -> usize {
        logit_rows * host::row_bytes(valid)
    }

    /// Bytes of `results`.
    pub fn results_bytes(lanes: usize, max_rows: usize) -> usize {
        4 * lanes * LaneResult::words(max_rows)
    }

    /// Rows of `logits`.
    fn logit_row_count(&self) -> usize {
        match self.logit_rows {
            LogitRows::All => self.lanes.rows,
            LogitRows::Last => self.lanes.count,
        }
    }

    fn step(&self, mem: &Mem, lane: usize) -> LaneStep {
        // Only this lane's: others may be advanced meanwhile.
        mem.get::<LaneStep>(self.lanes.step.rows(lane, 1, size_of::<LaneStep>()))[0]
    }

    /// The lane's rows that have logits, and the absolute position of the first.
    fn judged(&self, step: &LaneStep) -> (usize, u32) {
        match self.logit_rows {
            LogitRows::All => (step.rows as usize, step.pos),
            LogitRows::Last if step.rows == 0 => (0, step.pos),
            LogitRows::Last => (1, step.pos.wrapping_add(step.rows - 1)),
        }
    }

    /// Row of `logits` of the lane's row `i`.
    fn logit_row(&self, lane: usize, step: &LaneStep, i: usize) -> usize {
        match self.logit_rows {
            LogitRows::All => step.row0 as usize + i,
            LogitRows::Last => lane,
        }
    }

    fn row<'m>(&self, mem: &'m Mem, lane: usize, step: &LaneStep, i: usize) -> Row<'m> {
        let slot = step.slot as usize;
        let params = &mem.get::<SamplerParams>(self.params)[slot];
        let row = self.logit_row(lane, step, i);
        let words = 4 * self.valid.div_ceil(32);
        let masked = params.flags & SamplerParams::MASKED != 0;
        let biases = self.biases.rows(slot, 1, self.bias_capacity * size_of::<LogitBias>());
        Row {
            params,
            position: self.judged(step).1.wrapping_add(i as u32 + 1),
            raw: &mem.get::<f32>(self.logits.rows(row, 1, 4 * self.stride))[..self.valid],
            counts: mem.get(self.counts.rows(slot, 1, 4 * self.valid)),
            drafts: match self.logit_rows {
                LogitRows::All => mem.get(self.ids.rows(step.row0 as usize + 1, i, 4)),
                LogitRows::Last => &[],
            },
            biases: &mem.get(biases)[..(params.biases as usize).min(self.bias_capacity)],
            mask: self.masks.filter(|_| masked).map(|masks| mem.get(masks.rows(row, 1, words))),
        }
    }

    /// Proposal `e` (from 1) of a lane.
    fn draft<'m>(&self, mem: &'m Mem, lane: usize, e: usize, ids: &'m [u32]) -> Draft<'m> {
        let drawn = match &self.proposals {
            Some(p) => p.get(mem, self.lanes.count, self.lanes.max_rows, lane, e),
            None => Candidates { ids: &[], weights: &[] },
        };
        Draft::new(&ids[e], drawn)
    }

    /// Applies the rule to a lane's rows and writes everything that follows.
    fn finish(&self, mem: &Mem, lane: usize, rows: &mut [JudgedRow]) {
        let step = self.step(mem, lane);
        let slot = step.slot as usize;
        let params = &mem.get::<SamplerParams>(self.params)[slot];
        let (judged, base) = self.judged(&step);
        let result = mem.get_mut::<u32>(self.results.rows(
            lane,
            1,
            4 * LaneResult::words(self.lanes.max_rows),
        ));
        result.fill(0);
        let mut tokens = [0; Self::MAX_ROWS];
        let mut flags = 0;
        let mut kept = 0;
        if judged > 0 {
            let ids = mem.get::<u32>(self.ids.rows(step.row0 as usize, judged, 4));
            let Verdict { accepted, token } = self.verdict(mem, lane, params, base, ids, rows);
            tokens[..accepted].copy_from_slice(&ids[1..=accepted]);
            tokens[accepted] = token;
            (kept, flags) = truncated(params, base, &tokens[..=accepted]);
            if rows[..kept.max(1)].iter().any(|row| row.degenerate) {
                flags |= LaneResult::DEGENERATE;
            }
            self.commit(mem, &step, &tokens[..kept]);
        }
        let logprobs = params.flags & SamplerParams::LOGPROBS != 0;
        let out = LaneResultMut::new(result, self.lanes.max_rows);
        *out.kept = kept as u32;
        *out.proposed = judged.saturating_sub(1) as u32;
        *out.flags = flags;
        out.tokens[..kept].copy_from_slice(&tokens[..kept]);
        for i in 0..if logprobs { kept } else { 0 } {
            let raw = self.row(mem, lane, &step, i).raw[tokens[i] as usize];
            out.log_sums[i] = rows[i].log_sum;
            out.logprobs[i] = target::log_probability(raw, rows[i].log_sum);
        }
        self.advance(mem, lane, step, kept as u32, flags);
    }

    fn verdict(
        &self,
        mem: &Mem,
        lane: usize,
        params: &SamplerParams,
        base: u32,
        ids: &[u32],
        rows: &mut [JudgedRow],
    ) -> Verdict {
        let draw = |purpose, index| crate::random::uniform(params.seed, base, purpose, index);
        let drafts: [Draft; Self::MAX_ROWS] = std::array::from_fn(|e| match e {
            0 => Draft::new(&ids[0], Candidates { ids: &[], weights: &[] }),
            e if e < rows.len() => self.draft(mem, lane, e, ids),
            _ => Draft::new(&ids[0], Candidates { ids: &[], weights: &[] }),
        });
        let drafts = &drafts[1..rows.len().max(1)];
        match params.rule() {
            Rule::Greedy | Rule::Invariant => rules::agreeing(drafts, rows),
            Rule::Token => rules::token(drafts, rows, draw),
            Rule::Block => rules::block(drafts, rows, draw),
        }
    }

    /// Counts the kept tokens and makes the last one the anchor.
    fn commit(&self, mem: &Mem, step: &LaneStep, kept: &[u32]) {
        let Some(&anchor) = kept.last() else { return };
        let counts = mem.get_mut::<u32>(self.counts.rows(step.slot as usize, 1, 4 * self.valid));
        for &token in kept {
            counts[token as usize] = count_output(counts[token as usize], 1);
        }
        for ids in [Some(self.ids), self.draft_ids].into_iter().flatten() {
            mem.get_mut::<u32>(ids.rows(step.row0 as usize, 1, 4))[0] = anchor;
        }
    }

    fn advance(&self, mem: &Mem, lane: usize, step: LaneStep, kept: u32, flags: u32) {
        let (forward, pending) = match self.logit_rows {
            LogitRows::All => (kept, kept),
            LogitRows::Last => (step.rows, 0),
        };
        let frozen = flags & (LaneResult::STOPPED | LaneResult::LIMIT) != 0;
        let next = LaneStep {
            pos: step.pos.wrapping_add(forward),
            pending,
            parity: step.parity ^ 1,
            rows: if frozen { 0 } else { step.rows },
            ..step
        };
        mem.get_mut::<LaneStep>(self.lanes.step.rows(lane, 1, size_of::<LaneStep>()))[0] = next;
    }
}

/// How many of a round's tokens are kept, and why not more. `base` is the position before the
/// first one.
fn truncated(params: &SamplerParams, base: u32, tokens: &[u32]) -> (usize, u32) {
    let room = params.end.saturating_sub(base.saturating_add(1)) as usize;
    let kept = tokens.len().min(room);
    if let Some(at) = tokens[..kept].iter().position(|&token| params.stops_at(token)) {
        return (at + 1, LaneResult::STOPPED);
    }
    (kept, if kept == room { LaneResult::LIMIT } else { 0 })
}

/// What makes one row's distribution.
struct Row<'a> {
    params: &'a SamplerParams,
    /// Absolute position of the token that the row predicts.
    position: u32,
    raw: &'a [f32],
    counts: &'a [u32],
    /// Proposals that the row has seen.
    drafts: &'a [u32],
    biases: &'a [LogitBias],
    mask: Option<&'a [u32]>,
}

impl Row<'_> {
    /// What a row without any finite logit falls back to.
    fn fallback(&self) -> u32 {
        let words = self.mask.unwrap_or(&[]).iter().enumerate();
        let first = words
            .filter(|&(_, &word)| word != 0)
            .map(|(i, word)| 32 * i as u32 + word.trailing_zeros());
        first.take(1).find(|&id| (id as usize) < self.raw.len()).unwrap_or(0)
    }

    /// The count of a token, the row's proposals included.
    fn count(&self, token: u32) -> u32 {
        let drafted = self.drafts.iter().filter(|&&d| d == token).count();
        count_output(self.counts[token as usize], drafted as u32)
    }
}

/// One row after the first stage.
struct JudgedRow<'a> {
    /// The distribution of a sampled row.
    target: Target<'a>,
    /// The token of a greedy or invariant row.
    pick: u32,
    /// ln Σ e^raw, if the slot wants log-probabilities.
    log_sum: f32,
    /// The row had no finite logit.
    degenerate: bool,
}

/// One lane's part of `results`, `[lanes]` of `4 + 3 · max_rows` words:
/// `kept, proposed, flags, 0`, then `tokens`, `logprobs` and `log_sums`, `max_rows` each, zero
/// from `kept` on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LaneResult<'a> {
    /// Tokens emitted by this round, in order.
    pub tokens: &'a [u32],
    /// Raw log-probability of each, before penalties, temperature and cuts, if asked for.
    pub logprobs: &'a [f32],
    /// ln Σ e^logit of each token's row, if asked for: `logit − log_sum` is the log-probability of
    /// any other token there.
    pub log_sums: &'a [f32],
    /// Proposals that were judged.
    pub proposed: usize,
    /// The flags below.
    pub flags: u32,
}

impl<'a> LaneResult<'a> {
    /// The last token is a stop id of the slot; the lane is frozen.
    pub const STOPPED: u32 = 1;
    /// The slot's `end` was reached; the lane is frozen.
    pub const LIMIT: u32 = 2;
    /// A row had no finite logit: the model's numbers are broken, or a grammar is at a dead end.
    pub const DEGENERATE: u32 = 4;

    const HEADER: usize = 4;

    fn words(max_rows: usize) -> usize {
        Self::HEADER + 3 * max_rows
    }

    /// Lane `lane` of a results buffer that was read back.
    ///
    /// # Panics
    /// If the buffer is shorter than that.
    pub fn of(results: &'a [u32], lane: usize, max_rows: usize) -> LaneResult<'a> {
        let words = &results[lane * Self::words(max_rows)..][..Self::words(max_rows)];
        let (header, rest) = words.split_at(Self::HEADER);
        let kept = (header[0] as usize).min(max_rows);
        let floats = bytemuck::cast_slice::<u32, f32>(&rest[max_rows..]);
        LaneResult {
            tokens: &rest[..kept],
            logprobs: &floats[..kept],
            log_sums: &floats[max_rows..][..kept],
            proposed: header[1] as usize,
            flags: header[2],
        }
    }
}

struct LaneResultMut<'a> {
    kept: &'a mut u32,
    proposed: &'a mut u32,
    flags: &'a mut u32,
    tokens: &'a mut [u32],
    logprobs: &'a mut [f32],
    log_sums: &'a mut [f32],
}

impl<'a> LaneResultMut<'a> {
    fn new(words: &'a mut [u32], max_rows: usize) -> LaneResultMut<'a> {
        let (header, rest) = words.split_at_mut(LaneResult::HEADER);
        let (tokens, floats) = rest.split_at_mut(max_rows);
        let (logprobs, log_sums) =
            bytemuck::cast_slice_mut::<u32, f32>(floats).split_at_mut(max_rows);
        let [kept, proposed, flags, _] = header else { unreachable!("the header has 4 words") };
        LaneResultMut { kept, proposed, flags, tokens, logprobs, log_sums }
    }
}

impl Op for Accept {
    fn name(&self) -> &'static str {
        "accept"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("logits", self.logits);
        b.update_as("ids", self.ids, Elements::U32);
        if let Some(ids) = self.draft_ids {
            b.update_as("draft_ids", ids, Elements::U32);
        }
        if let Some(proposals) = &self.proposals {
            b.read("proposals", proposals.buf);
        }
        b.read("params", self.params);
        b.update_as("counts", self.counts, Elements::U32);
        b.read("biases", self.biases);
        if let Some(masks) = self.masks {
            b.read("masks", masks);
        }
        b.update_as("step", self.lanes.step, Elements::U32);
        b.write_as("results", self.results, Elements::U32);
        b.write_as("scratch", self.scratch, Elements::Scratch);
    }

    fn check(&self) -> Result<(), Unsupported> {
        let unless = |ok, what: &dyn Fn() -> String, limit: &str| {
            Unsupported::unless(ok, "accept", what, limit)
        };
        let Lanes { step, count, rows, max_rows } = self.lanes;
        let (valid, stride) = (self.valid, self.stride);
        let lane_rows = self.logit_rows == LogitRows::Last || max_rows <= Self::MAX_ROWS;
        unless(max_rows >= 1 && lane_rows, &|| format!("lanes of {max_rows} rows"), "1 to 32")?;
        unless(
            valid >= 1 && valid <= stride,
            &|| format!("{valid} ids in rows of {stride}"),
            "1 to stride",
        )?;
        unless(stride <= MAX_VOCAB, &|| format!("rows of {stride}"), "2^20 logits")?;
        if let Some(p) = &self.proposals {
            let k = (1..=TopK::MAX_K).contains(&p.k);
            unless(k, &|| format!("{} candidates", p.k), "1 to 32")?;
            unless(p.holds(count, max_rows), &|| format!("{p:?}"), "matching buffer sizes")?;
        }
        let bias_row = self.bias_capacity.saturating_mul(size_of::<LogitBias>());
        let judged = self.logit_row_count();
        let slots = self.params.bytes / size_of::<SamplerParams>();
        let fits = count.checked_mul(size_of::<LaneStep>()) == Some(step.bytes)
            && self.params.bytes == slots * size_of::<SamplerParams>()
            && self.logits.holds(judged, 4 * stride)
            && self.ids.holds(rows, 4)
            && self.draft_ids.is_none_or(|ids| ids.holds(rows, 4))
            && self.counts.holds(slots, 4 * valid)
            && self.biases.holds(slots, bias_row)
            && self.masks.is_none_or(|masks| masks.holds(judged, 4 * valid.div_ceil(32)))
            && self.results.holds(count, 4 * LaneResult::words(max_rows))
            && self.scratch.holds(judged, host::row_bytes(valid));
        unless(fits, &|| format!("{self:?}"), "matching buffer sizes")
    }

    fn cost(&self) -> Cost {
        let elements = (self.logit_row_count() * self.valid) as u64;
        Cost { weight_bytes: 0, other_bytes: 4 * elements, flops: elements }
    }

    fn reference(&self, mem: &Mem) {
        for lane in 0..self.lanes.count {
            let step = self.step(mem, lane);
            let rows = 0..self.judged(&step).0;
            let mut judged: Vec<_> =
                rows.map(|i| target::definition(&self.row(mem, lane, &step, i))).collect();
            let mut rows: Vec<_> = judged.iter_mut().map(target::Defined::judged).collect();
            self.finish(mem, lane, &mut rows);
        }
    }

    fn host(&self, mem: &Mem, cpu: &Cpu) {
        host::run(self, mem, cpu);
    }

    fn cuda(&self, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
        cuda::plan(self, card, plan)
    }
}

#[cfg(any(test, feature = "cases"))]
pub(crate) mod cases;
#[cfg(test)]
mod law;
#[cfg(any(test, feature = "cases"))]
mod rig;
