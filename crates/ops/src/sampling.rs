//! What proposing and accepting share: a request's parameters on the device, probabilities as
//! integers, and the proposals of a round.
//!
//! # Probabilities are integers
//!
//! A distribution over tokens is a list of weights `round(2³⁰ · e^((z − max z) / T))`, ties to even:
//! the likeliest token weighs [`ONE`], and tokens below 2⁻³¹ of it weigh nothing. Sums of weights are
//! exact in 64 bits whatever their order, so every device, thread count and vector width gives the
//! same sums, cuts and draws without prescribing an order, and the acceptance rules compare
//! products of integers, with no rounding at all.

use crate::random::exponential;
use crate::simd::math::{exp, exp_f32};
use crate::simd::{LANES, Simd};
use crate::{Buf, Mem};

/// The weight of the likeliest token: 2³⁰.
pub const ONE: u32 = 1 << 30;

/// How proposals are accepted. Stored as u32 in [`SamplerParams::rule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Rule {
    /// Temperature 0: the arg max is emitted, a proposal is accepted when it is the arg max.
    Greedy = 0,
    /// One test per proposal, `u · q < p`. (Leviathan et al., Chen et al. 2023)
    Token = 1,
    /// Tests of whole prefixes; never fewer accepted in expectation. (Sun et al. 2024)
    Block = 2,
    /// The target's own choice, made by a race that draft and target run with the same random
    /// numbers, is emitted; a proposal is accepted when it is that choice. The text does not
    /// depend on the drafter. (Daliri, Musco, Suresh 2024)
    Invariant = 3,
}

impl Rule {
    /// The rule of a parameter block. Unknown numbers mean [`Rule::Greedy`], which draws nothing.
    pub fn from_u32(rule: u32) -> Rule {
        match rule {
            1 => Rule::Token,
            2 => Rule::Block,
            3 => Rule::Invariant,
            _ => Rule::Greedy,
        }
    }

    /// The name used by options and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Rule::Greedy => "greedy",
            Rule::Token => "token",
            Rule::Block => "block",
            Rule::Invariant => "invariant",
        }
    }
}

/// Stop ids that the device knows of. The host truncates at any others.
pub const MAX_STOPS: usize = 8;

/// One request's sampling parameters: 24 words, the same on every device. `params` buffers hold
/// `[slots]` of these.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SamplerParams {
    /// The seed, low word first.
    pub seed: [u32; 2],
    /// A [`Rule`].
    pub rule: u32,
    /// [`SamplerParams::LOGPROBS`] and [`SamplerParams::MASKED`].
    pub flags: u32,
    /// 1 / temperature. Not used by [`Rule::Greedy`].
    pub inv_temperature: f32,
    /// temperature · ln(min_p): tokens whose logit lies further below the largest are cut. −∞ cuts
    /// none.
    pub min_logit: f32,
    /// Keeps this many largest logits; 0 keeps all.
    pub top_k: u32,
    /// Keeps a token while the weight before it is less than this share, in units of 1 / [`ONE`].
    pub top_p: u32,
    /// Subtracted from the logit of every token in the output.
    pub presence: f32,
    /// Subtracted once for each time that a token is in the output.
    pub frequency: f32,
    /// Divides positive logits, and multiplies the others, of every token in prompt or output.
    pub repetition: f32,
    /// Entries in use of the slot's logit biases.
    pub biases: u32,
    /// No token is emitted at this absolute position or beyond. `u32::MAX` sets no bound.
    pub end: u32,
    /// Entries in use of `stop`.
    pub stops: u32,
    /// Ids after which the lane stops, [`MAX_STOPS`] at most.
    pub stop: [u32; 8],
    /// Keeps the struct at 96 bytes.
    pub reserved: [u32; 2],
}

impl Default for SamplerParams {
    /// Greedy, nothing cut, nothing penalised, no bound.
    fn default() -> SamplerParams {
        SamplerParams {
            seed: [0; 2],
            rule: Rule::Greedy as u32,
            flags: 0,
            inv_temperature: 1.0,
            min_logit: f32::NEG_INFINITY,
            top_k: 0,
            top_p: ONE,
            presence: 0.0,
            frequency: 0.0,
            repetition: 1.0,
            biases: 0,
            end: u32::MAX,
            stops: 0,
            stop: [0; MAX_STOPS],
            reserved: [0; 2],
        }
    }
}

impl SamplerParams {
    /// Flag: report the log-probability of emitted tokens.
    pub const LOGPROBS: u32 = 1;
    /// Flag: the slot's rows obey the grammar masks.
    pub const MASKED: u32 = 2;

    /// A seed of 64 bits as words.
    pub fn seed_words(seed: u64) -> [u32; 2] {
        [seed as u32, (seed >> 32) as u32]
    }

    /// [`SamplerParams::min_logit`] of a `min_p` in 0..=1 at a temperature.
    pub fn min_logit_of(min_p: f32, temperature: f32) -> f32 {
        (f64::from(temperature) * f64::from(min_p).ln()) as f32
    }

    /// [`SamplerParams::top_p`] of a share in 0..=1.
    pub fn top_p_of(share: f32) -> u32 {
        (f64::from(share) * f64::from(ONE)).round() as u32
    }

    /// The rule.
    pub fn rule(&self) -> Rule {
        Rule::from_u32(self.rule)
    }

    /// Whether any penalty is set.
    pub fn penalises(&self) -> bool {
        self.presence != 0.0 || self.frequency != 0.0 || self.repetition != 1.0
    }

    /// A logit after the penalties of a token with this count, see [`TOKEN_IN_PROMPT`].
    #[inline(always)]
    pub(crate) fn penalised(&self, logit: f32, count: u32) -> f32 {
        if count == 0 {
            return logit;
        }
        let mut z = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        let outputs = count & !TOKEN_IN_PROMPT;
        if outputs > 0 {
            z = (z - self.frequency * outputs as f32) - self.presence;
        }
        clean(z)
    }

    /// The weight at which top-p stops keeping tokens, of a row of this total.
    #[inline(always)]
    pub(crate) fn nucleus(&self, total: u64) -> u64 {
        let scaled = u128::from(total) * u128::from(self.top_p.min(ONE));
        (scaled.div_ceil(u128::from(ONE)) as u64).max(1)
    }

    /// Whether the lane ends with this token.
    pub(crate) fn stops_at(&self, token: u32) -> bool {
        self.stop[..(self.stops as usize).min(MAX_STOPS)].contains(&token)
    }
}

/// Flag of a token count: the token is in the prompt. The other bits count its occurrences in the
/// output.
pub const TOKEN_IN_PROMPT: u32 = 1 << 31;

/// Adds `amount` to the number of times that a token was put out.
#[inline(always)]
pub(crate) fn count_output(count: u32, amount: u32) -> u32 {
    let outputs = (count & !TOKEN_IN_PROMPT).saturating_add(amount).min(!TOKEN_IN_PROMPT);
    (count & TOKEN_IN_PROMPT) | outputs
}

/// Fills a slot's row of token counts, all zero before, from its history.
pub fn count_tokens(counts: &mut [u32], prompt: &[u32], output: &[u32]) {
    for &token in prompt {
        if let Some(count) = counts.get_mut(token as usize) {
            *count |= TOKEN_IN_PROMPT;
        }
    }
    for &token in output {
        if let Some(count) = counts.get_mut(token as usize) {
            *count = count_output(*count, 1);
        }
    }
}

/// One entry of a slot's logit biases: added to the logit after the penalties.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct LogitBias {
    /// The token. Each at most once.
    pub token: u32,
    /// Added to its logit.
    pub bias: f32,
}

/// A logit that orders and subtracts well: NaN as −∞, +∞ as the largest finite number, −0 as +0.
#[inline(always)]
pub(crate) fn clean(z: f32) -> f32 {
    let z = if z > f32::NEG_INFINITY { z } else { f32::NEG_INFINITY };
    let z = if z < f32::MAX { z } else { f32::MAX };
    z + 0.0
}

/// [`clean`] on vectors.
#[inline(always)]
pub(crate) fn clean_simd<S: Simd>(s: S, z: S::F) -> S::F {
    let z = s.max(z, s.splat(f32::NEG_INFINITY));
    s.add(s.min(z, s.splat(f32::MAX)), s.splat(0.0))
}

/// The weight of a token whose scaled logit lies `x ≤ 0` above the largest.
pub(crate) fn weight(x: f32) -> u32 {
    (exp_f32(x) * ONE as f32).round_ties_even() as u32
}

/// [`weight`] on vectors.
#[inline(always)]
pub(crate) fn weights<S: Simd>(s: S, x: S::F) -> [u32; LANES] {
    let scaled = s.round(s.mul(exp(s, x), s.splat(ONE as f32)));
    // Where x was NaN, as for `as u32`: 0.
    let scaled = s.lanes(s.min(s.max(scaled, s.splat(0.0)), s.splat(ONE as f32)));
    let mut weights = [0; LANES];
    for l in 0..LANES {
        // SAFETY: between 0 and 2³⁰. A checked conversion would be done lane by lane.
        weights[l] = unsafe { scaled[l].to_int_unchecked::<i32>() } as u32;
    }
    weights
}

/// What wins the race of the drafter-invariant rule when it is smallest; +∞ for weight 0.
#[inline(always)]
pub(crate) fn race_time(exponential: f32, weight: u32) -> f32 {
    exponential / weight as f32
}

/// The index in `weights` of the winner of the race between `tokens`: lowest token on ties. 0 if
/// all weigh nothing.
pub(crate) fn race(seed: [u32; 2], position: u32, tokens: &[u32], weights: &[u32]) -> usize {
    let (mut best, mut winner) = (f32::INFINITY, 0);
    for (i, (&token, &weight)) in tokens.iter().zip(weights).enumerate() {
        if weight == 0 {
            continue;
        }
        let time = race_time(exponential(seed, position, token), weight);
        if time < best || (time == best && token < tokens[winner]) {
            (best, winner) = (time, i);
        }
    }
    winner
}

/// floor(total · u / 2³²): a uniform number below `total`.
#[inline(always)]
pub(crate) fn below(total: u64, u: u32) -> u64 {
    ((u128::from(total) * u128::from(u)) >> 32) as u64
}

/// The proposals of a pass and the distributions they were drawn from, in one buffer:
///
/// | part | shape | dtype |
/// |---|---|---|
/// | counts | `[lanes, max_rows − 1]` | u32: candidates of the proposal; 0 = it is a point mass |
/// | ids | `[lanes, max_rows − 1, k]` | u32: the candidates |
/// | weights | `[lanes, max_rows − 1, k]` | u32: their weights |
///
/// The proposals themselves stand in the ids of the verify pass: proposal e = 1.. of a lane in row
/// `row0 + e`. A drafter on the host writes those and zeroes the counts; a buffer that only such
/// drafters use can stay as it was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proposals {
    /// [`Proposals::bytes`] long.
    pub buf: Buf,
    /// Candidates of one proposal, at most [`crate::TopK::MAX_K`].
    pub k: usize,
}

/// One proposal's distribution. Both empty for a point mass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidates<'a> {
    pub(crate) ids: &'a [u32],
    pub(crate) weights: &'a [u32],
}

impl Proposals {
    /// Bytes for this many lanes of at most `max_rows` rows.
    pub fn bytes(lanes: usize, max_rows: usize, k: usize) -> usize {
        4 * lanes * max_rows.saturating_sub(1) * (1 + 2 * k)
    }

    /// The counts, to be zeroed by a drafter on the host.
    pub fn counts(&self, lanes: usize, max_rows: usize) -> Buf {
        self.buf.slice(0, 4 * lanes * max_rows.saturating_sub(1))
    }

    /// Whether the buffer is large enough.
    pub(crate) fn holds(&self, lanes: usize, max_rows: usize) -> bool {
        let proposals = lanes.saturating_mul(max_rows.saturating_sub(1));
        self.buf.holds(proposals, 4 * (1 + 2 * self.k))
    }

    /// Byte ranges of ids and weights of proposal `e` (from 1) of a lane.
    fn parts(&self, lanes: usize, max_rows: usize, lane: usize, e: usize) -> [Buf; 3] {
        let (rows, index) = (lanes * (max_rows - 1), lane * (max_rows - 1) + e - 1);
        let part = |base: usize| self.buf.slice(4 * (base + index * self.k), 4 * self.k);
        [self.buf.slice(4 * index, 4), part(rows), part(rows * (1 + self.k))]
    }

    pub(crate) fn get<'m>(
        &self,
        mem: &'m Mem,
        lanes: usize,
        max_rows: usize,
        lane: usize,
        e: usize,
    ) -> Candidates<'m> {
        let [count, ids, weights] = self.parts(lanes, max_rows, lane, e);
        let count = (mem.get::<u32>(count)[0] as usize).min(self.k);
        Candidates { ids: &mem.get(ids)[..count], weights: &mem.get(weights)[..count] }
    }

    pub(crate) fn get_mut<'m>(
        &self,
        mem: &'m Mem,
        lanes: usize,
        max_rows: usize,
        lane: usize,
        e: usize,
    ) -> (&'m mut u32, &'m mut [u32], &'m mut [u32]) {
        let [count, ids, weights] = self.parts(lanes, max_rows, lane, e);
        (&mut mem.get_mut::<u32>(count)[0], mem.get_mut(ids), mem.get_mut(weights))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_token_weighs_one() {
        assert_eq!(weight(0.0), ONE);
        assert_eq!(weight(-0.0), ONE);
        assert_eq!(weight(f32::NEG_INFINITY), 0);
        assert_eq!(weight(-21.6), 0);
        assert_eq!(weight(-21.0), 1);
        assert!(weight(-1e-9) <= ONE);
    }

    #[test]
    fn clean_orders_everything() {
        assert_eq!(clean(f32::NAN), f32::NEG_INFINITY);
        assert_eq!(clean(f32::INFINITY), f32::MAX);
        assert_eq!(clean(-0.0).to_bits(), 0);
        assert_eq!(clean(-1.5), -1.5);
    }

    #[test]
    fn top_p_edges() {
        let of = |p| SamplerParams { top_p: SamplerParams::top_p_of(p), ..Default::default() };
        assert_eq!(of(0.0).nucleus(1 << 40), 1);
        assert_eq!(of(1.0).nucleus(12_345_678_901), 12_345_678_901);
        assert_eq!(of(0.5).nucleus(3), 2);
    }

    #[test]
    fn penalties_follow_the_usual_formulas() {
        let p = SamplerParams {
            presence: 0.5,
            frequency: 0.25,
            repetition: 2.0,
            ..SamplerParams::default()
        };
        assert_eq!(p.penalised(3.0, 0), 3.0);
        assert_eq!(p.penalised(3.0, TOKEN_IN_PROMPT), 1.5);
        assert_eq!(p.penalised(-3.0, TOKEN_IN_PROMPT), -6.0);
        assert_eq!(p.penalised(3.0, 2), 1.5 - 0.5 - 0.5);
        let mut counts = [0; 4];
        count_tokens(&mut counts, &[1, 1, 9], &[2, 1, 2]);
        assert_eq!(counts, [0, TOKEN_IN_PROMPT | 1, 2, 0]);
        assert_eq!(count_output(u32::MAX, 1), u32::MAX);
    }
}
