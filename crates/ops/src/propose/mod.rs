//! From the candidates of a draft pass to the proposals of the verify pass, one lane after the
//! position of another: proposal e = 1.. of a lane is chosen among the `k` candidates of its draft
//! row and written behind the anchor in the ids of the verify pass.
//!
//! The score of candidate c is its logit (DFlash 1), or with a [`Selector`] (DFlash 2)
//!
//! ```text
//! logit[c] + Σ_r predecessor[prev, r] · query[r] · successor[c, r]
//! ```
//!
//! where `prev` is the token before: the anchor, then the proposal chosen last. The slot's
//! [`Rule`] decides between the candidates:
//!
//! | rule | choice | count in [`Proposals`] |
//! |---|---|---|
//! | greedy | largest score, the first of equals | 0: a point mass |
//! | token, block | a draw from softmax(score / temperature) | k, with ids and weights |
//! | invariant | winner of the race with those weights, see [`crate::random`] | 0 |
//!
//! Order of the sum over r: products p[r] = predecessor · query; 16 lanes, lane r mod 16, each
//! fused-multiply-adding p[r] · successor by ascending r from 0; then the tree of
//! [`crate::simd::Simd::sum`]. A NaN score counts as −∞. Candidates' scores are cleaned, subtracted
//! and weighed like the target's logits ([`crate::SamplerParams`]).
//!
//! Source: spec D.3; `Draft.select` of the numpy reference.

mod cuda;
mod host;

use crate::kernel::{Card, Plan};
use crate::random::{Purpose, uniform};
use crate::sampling::{Candidates, below, clean, race, weight};
use crate::simd::{LANES, sum_tree};
use crate::{
    Bindings, Buf, Cost, Cpu, Elements, LaneStep, Lanes, Mem, ONE, Op, Proposals, Rule,
    SamplerParams, TopK, Unsupported,
};

/// DFlash 2's candidate selector.
#[derive(Clone, Copy, Debug)]
pub struct Selector {
    /// `[vocab, rank]` bf16.
    pub predecessor: Buf,
    /// `[vocab, rank]` bf16.
    pub successor: Buf,
    /// `[draft rows, rank]` f32: the hidden projection of the draft's rows.
    pub query: Buf,
    /// Rows of the codebooks. An id beyond reads the last.
    pub vocab: usize,
    /// A multiple of 16, at most [`Selector::MAX_RANK`].
    pub rank: usize,
}

impl Selector {
    /// The largest rank.
    pub const MAX_RANK: usize = 1024;
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Propose {
    /// `[draft rows, k]` u32: each row's candidates, best first, see [`TopK`].
    pub candidates: Buf,
    /// `[draft rows, k]` f32: their logits.
    pub values: Buf,
    /// Rescores the candidates by the token before (DFlash 2).
    pub selector: Option<Selector>,
    /// `[slots]` of [`SamplerParams`].
    pub params: Buf,
    /// `[lanes.rows]` u32, the ids of the verify pass: reads the anchor in a lane's row 0, writes
    /// the lane's other rows.
    pub ids: Buf,
    /// The distributions that proposals were drawn from.
    pub proposals: Proposals,
    /// The lanes of the verify pass. A lane of n rows gets n − 1 proposals.
    pub lanes: Lanes,
    /// Draft row of proposal e of lane l: `l · draft_stride + draft_first + e − 1`.
    pub draft_stride: usize,
    /// See `draft_stride`: 1 where the draft's rows include the anchors', 0 where they don't.
    pub draft_first: usize,
}

impl Propose {
    /// Candidates of a row.
    pub fn k(&self) -> usize {
        self.proposals.k
    }

    fn draft_row(&self, lane: usize, e: usize) -> usize {
        lane * self.draft_stride + self.draft_first + e - 1
    }

    /// Draft rows that the lanes may reach.
    fn draft_rows(&self) -> usize {
        let last = self.lanes.count.saturating_sub(1).saturating_mul(self.draft_stride);
        last.saturating_add(self.draft_first).saturating_add(self.lanes.max_rows - 1)
    }

    /// Chooses a lane's proposals.
    #[inline(always)]
    fn lane(&self, mem: &Mem, lane: usize, arithmetic: impl Arithmetic) {
        let step = mem.get::<LaneStep>(self.lanes.step)[lane];
        if step.rows == 0 {
            return;
        }
        let params = mem.get::<SamplerParams>(self.params)[step.slot as usize];
        let ids = mem.get_mut::<u32>(self.ids.rows(step.row0 as usize, step.rows as usize, 4));
        let k = self.k();
        for e in 1..step.rows as usize {
            let row = self.draft_row(lane, e);
            let candidates = mem.get::<u32>(self.candidates.rows(row, 1, 4 * k));
            let mut scores = [f32::NEG_INFINITY; TopK::MAX_K];
            let scores = &mut scores[..k];
            scores.copy_from_slice(mem.get::<f32>(self.values.rows(row, 1, 4 * k)));
            if let Some(selector) = &self.selector {
                let query = mem.get::<f32>(selector.query.rows(row, 1, 4 * selector.rank));
                let before = codebook_row(mem, selector, selector.predecessor, ids[e - 1]);
                let after = |id| codebook_row(mem, selector, selector.successor, id);
                arithmetic.rescore(query, before, after, candidates, scores);
            }
            let (count, q_ids, q_weights) =
                self.proposals.get_mut(mem, self.lanes.count, self.lanes.max_rows, lane, e);
            q_ids.copy_from_slice(candidates);
            weigh(arithmetic, scores, params.inv_temperature, q_weights);
            let drawn = Candidates { ids: q_ids, weights: q_weights };
            let (chosen, drawn) = choose(&params, step.pos, e as u32, drawn, scores);
            *count = if drawn { k as u32 } else { 0 };
            ids[e] = candidates[chosen];
        }
    }
}

/// The parts that the definition and the vector implementation compute each in their way.
trait Arithmetic: Copy {
    /// Adds Σ before · query · after to the candidates' scores.
    fn rescore<'m>(
        self,
        query: &[f32],
        before: &[u16],
        after: impl Fn(u32) -> &'m [u16],
        candidates: &[u32],
        scores: &mut [f32],
    );

    /// Scaled differences to the largest score into weights. Both are [`TopK::MAX_K`] long.
    fn weigh(self, x: &[f32; TopK::MAX_K]) -> [u32; TopK::MAX_K];
}

/// Weights of cleaned scores at a temperature. If no score is finite, the first candidate has all.
#[inline(always)]
fn weigh(arithmetic: impl Arithmetic, scores: &mut [f32], inv_temperature: f32, out: &mut [u32]) {
    scores.iter_mut().for_each(|score| *score = clean(*score));
    let max = scores.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m });
    let mut x = [f32::NEG_INFINITY; TopK::MAX_K];
    for (x, &score) in x.iter_mut().zip(&*scores) {
        *x = (score - max) * inv_temperature;
    }
    let weights = &mut out[..scores.len()];
    weights.copy_from_slice(&arithmetic.weigh(&x)[..scores.len()]);
    if max == f32::NEG_INFINITY {
        weights.fill(0);
        weights[0] = ONE;
    }
}

/// The index of the chosen candidate, and whether it was drawn from the weights.
fn choose(
    params: &SamplerParams,
    anchor: u32,
    e: u32,
    candidates: Candidates,
    scores: &[f32],
) -> (usize, bool) {
    match params.rule() {
        Rule::Greedy => {
            let better = |best: usize, i: usize| if scores[i] > scores[best] { i } else { best };
            ((0..scores.len()).fold(0, better), false)
        }
        Rule::Invariant => {
            let position = anchor.wrapping_add(e);
            (race(params.seed, position, candidates.ids, candidates.weights), false)
        }
        Rule::Token | Rule::Block => {
            let total = candidates.weights.iter().map(|&w| u64::from(w)).sum();
            let mut at = below(total, uniform(params.seed, anchor, Purpose::Draft, e));
            let mut chosen = 0;
            for (i, &w) in candidates.weights.iter().enumerate() {
                if at < u64::from(w) {
                    chosen = i;
                    break;
                }
                at -= u64::from(w);
            }
            (chosen, true)
        }
    }
}

impl Op for Propose {
    fn name(&self) -> &'static str {
        "propose"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("candidates", self.candidates);
        b.read("values", self.values);
        if let Some(selector) = &self.selector {
            b.read("predecessor", selector.predecessor);
            b.read("successor", selector.successor);
            b.read("query", selector.query);
        }
        b.read("params", self.params);
        b.read("step", self.lanes.step);
        b.update_as("ids", self.ids, Elements::U32);
        b.update_as("proposals", self.proposals.buf, Elements::U32);
    }

    fn check(&self) -> Result<(), Unsupported> {
        let unless = |ok, what: &dyn Fn() -> String, limit: &str| {
            Unsupported::unless(ok, "propose", what, limit)
        };
        let (k, Lanes { count, rows, max_rows, step }) = (self.k(), self.lanes);
        unless((1..=TopK::MAX_K).contains(&k), &|| format!("{k} candidates"), "1 to 32")?;
        unless(max_rows >= 1, &|| "lanes of no rows".to_owned(), "at least the anchor's row")?;
        let draft_rows = self.draft_rows();
        if let Some(s) = &self.selector {
            let rank = s.rank.is_multiple_of(LANES) && (1..=Selector::MAX_RANK).contains(&s.rank);
            unless(rank, &|| format!("rank {}", s.rank), "multiples of 16 up to 1024")?;
            let codebook = s.vocab.checked_mul(2 * s.rank);
            let fits = s.vocab > 0
                && codebook == Some(s.predecessor.bytes)
                && codebook == Some(s.successor.bytes)
                && s.query.holds(draft_rows, 4 * s.rank);
            unless(fits, &|| format!("{s:?}"), "matching buffer sizes")?;
        }
        let fits = count.checked_mul(size_of::<LaneStep>()) == Some(step.bytes)
            && self.ids.holds(rows, 4)
            && self.candidates.holds(draft_rows, 4 * k)
            && self.values.holds(draft_rows, 4 * k)
            && self.params.bytes.is_multiple_of(size_of::<SamplerParams>())
            && self.proposals.holds(count, max_rows);
        unless(fits, &|| format!("{self:?}"), "matching buffer sizes")
    }

    fn cost(&self) -> Cost {
        let proposals = (self.lanes.count * (self.lanes.max_rows - 1)) as u64;
        let (k, rank) = (self.k() as u64, self.selector.map_or(0, |s| s.rank as u64));
        let chosen = if rank > 0 { proposals * 2 * rank * (k + 1) } else { 0 };
        Cost {
            weight_bytes: chosen,
            other_bytes: proposals * (8 * k + 4 * rank + 4 * (1 + 2 * k) + 4),
            flops: proposals * rank * (2 * k + 1),
        }
    }

    fn reference(&self, mem: &Mem) {
        for lane in 0..self.lanes.count {
            self.lane(mem, lane, Definition);
        }
    }

    fn host(&self, mem: &Mem, cpu: &Cpu) {
        host::run(self, mem, cpu);
    }

    fn cuda(&self, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
        cuda::plan(self, card, plan)
    }
}

#[derive(Clone, Copy)]
struct Definition;

impl Arithmetic for Definition {
    fn rescore<'m>(
        self,
        query: &[f32],
        before: &[u16],
        after: impl Fn(u32) -> &'m [u16],
        candidates: &[u32],
        scores: &mut [f32],
    ) {
        let widen = |bf16: u16| f32::from_bits(u32::from(bf16) << 16);
        for (score, &id) in scores.iter_mut().zip(candidates) {
            let mut lanes = [0.0f32; LANES];
            for (r, &successor) in after(id).iter().enumerate() {
                let product = widen(before[r]) * query[r];
                lanes[r % LANES] = product.mul_add(widen(successor), lanes[r % LANES]);
            }
            *score += sum_tree(lanes);
        }
    }

    fn weigh(self, x: &[f32; TopK::MAX_K]) -> [u32; TopK::MAX_K] {
        x.map(weight)
    }
}

/// The codebook row of a token.
#[inline(always)]
fn codebook_row<'m>(mem: &'m Mem, selector: &Selector, codebook: Buf, id: u32) -> &'m [u16] {
    let row = (id as usize).min(selector.vocab - 1);
    mem.get(codebook.rows(row, 1, 2 * selector.rank))
}

#[cfg(any(test, feature = "cases"))]
pub(crate) mod cases;
