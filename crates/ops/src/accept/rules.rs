//! The acceptance rules, in integers.
//!
//! p(x) = W(x) / Sp and q(x) = Q(x) / Sq, with weights up to 2³⁰, Sp < 2⁵⁰ (2²⁰ tokens) and
//! Sq ≤ 2³⁵ (32 candidates). A uniform number is u / 2³², and the prefix weights of the block rule
//! are w / 2³². Every product below then fits 128 bits.

use super::{Accept, JudgedRow};
use crate::ONE;
use crate::random::Purpose;
use crate::sampling::{Candidates, below};

/// 1 as a prefix weight.
const UNIT: u128 = 1 << 32;

/// What a rule decides: how many proposals stand, and the token behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) accepted: usize,
    pub(super) token: u32,
}

/// One row's target distribution. The weights may be used up by a draw.
#[derive(Debug)]
pub(super) struct Target<'a> {
    /// The tokens of `weights`, ascending. Empty: weight t belongs to token t.
    pub(super) ids: &'a [u32],
    pub(super) weights: &'a mut [u32],
    pub(super) total: u64,
}

impl Target<'_> {
    fn index(&self, token: u32) -> Option<usize> {
        match self.ids {
            [] => Some(token as usize).filter(|&t| t < self.weights.len()),
            ids => ids.binary_search(&token).ok(),
        }
    }

    /// The weight of a token.
    fn of(&self, token: u32) -> u32 {
        self.index(token).map_or(0, |i| self.weights[i])
    }

    /// Takes a token out.
    fn remove(&mut self, token: u32) {
        if let Some(i) = self.index(token) {
            self.total -= u64::from(std::mem::take(&mut self.weights[i]));
        }
    }

    /// The token that holds unit `at` of the total, by ascending id.
    fn at(&self, mut at: u64) -> u32 {
        const BLOCK: usize = 64;
        for (b, block) in self.weights.chunks(BLOCK).enumerate() {
            let sum = block.iter().fold(0u64, |sum, &w| sum + u64::from(w));
            if at >= sum {
                at -= sum;
                continue;
            }
            for (i, &w) in block.iter().enumerate() {
                if at < u64::from(w) {
                    let i = b * BLOCK + i;
                    return if self.ids.is_empty() { i as u32 } else { self.ids[i] };
                }
                at -= u64::from(w);
            }
        }
        unreachable!("a unit beyond the total")
    }

    fn draw(&self, u: u32) -> u32 {
        self.at(below(self.total, u))
    }
}

/// One proposal and the distribution it was drawn from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draft<'a> {
    token: u32,
    ids: &'a [u32],
    weights: &'a [u32],
}

impl<'a> Draft<'a> {
    /// A proposal drawn from candidates; from itself if there are none.
    pub(super) fn new(token: &'a u32, drawn: Candidates<'a>) -> Draft<'a> {
        match drawn {
            Candidates { ids: [], .. } => {
                Draft { token: *token, ids: std::slice::from_ref(token), weights: const { &[ONE] } }
            }
            Candidates { ids, weights } => Draft { token: *token, ids, weights },
        }
    }

    fn total(&self) -> u128 {
        self.weights.iter().map(|&w| u128::from(w)).sum()
    }

    /// The weight of the proposal itself.
    fn weight(&self) -> u32 {
        let at = self.ids.iter().position(|&id| id == self.token);
        at.map_or(0, |i| self.weights[i])
    }
}

/// Greedy and invariant: the target's own picks, as far as the proposals agree.
pub(super) fn agreeing(drafts: &[Draft], rows: &[JudgedRow]) -> Verdict {
    let agree = drafts.iter().zip(rows).take_while(|(draft, row)| draft.token == row.pick);
    let accepted = agree.count();
    Verdict { accepted, token: rows[accepted].pick }
}

/// The token rule: proposal x stands iff u · q(x) < p(x); at the first that doesn't, a draw from
/// max(p − q, 0).
pub(super) fn token(
    drafts: &[Draft],
    rows: &mut [JudgedRow],
    draw: impl Fn(Purpose, u32) -> u32,
) -> Verdict {
    for (i, draft) in drafts.iter().enumerate() {
        let target = &mut rows[i].target;
        let u = u128::from(draw(Purpose::Accept, i as u32 + 1));
        let q = u * u128::from(draft.weight()) * u128::from(target.total);
        let p = (u128::from(target.of(draft.token)) * draft.total()) << 32;
        if q >= p {
            let u = draw(Purpose::Target, i as u32);
            return Verdict { accepted: i, token: residual(target, draft, UNIT, u) };
        }
    }
    let n = drafts.len();
    Verdict { accepted: n, token: rows[n].target.draw(draw(Purpose::Target, n as u32)) }
}

/// The block rule. Prefix weights w₀ = 1, wᵢ = min(1, wᵢ₋₁ p(dᵢ) / q(dᵢ)), rounded down. Prefix i
/// stands with probability hᵢ = Rᵢ / (Rᵢ + 1 − wᵢ), Rᵢ the sum of max(wᵢ p − q, 0) over the next
/// row, and hₙ = wₙ; the longest prefix that stands is accepted, then a draw from that maximum.
pub(super) fn block(
    drafts: &[Draft],
    rows: &mut [JudgedRow],
    draw: impl Fn(Purpose, u32) -> u32,
) -> Verdict {
    let n = drafts.len();
    let mut w = [UNIT; Accept::MAX_ROWS];
    let mut accepted = 0;
    for i in 1..=n {
        let (draft, target) = (&drafts[i - 1], &rows[i - 1].target);
        let p = w[i - 1] * u128::from(target.of(draft.token)) * draft.total();
        let q = u128::from(draft.weight()) * u128::from(target.total);
        w[i] = p.checked_div(q).unwrap_or(0).min(UNIT);
        let u = u128::from(draw(Purpose::Accept, i as u32));
        let stands = match drafts.get(i) {
            None => u < w[i],
            Some(next) => {
                let target = &rows[i].target;
                let rest = residual_mass(target, next, w[i]);
                let lost = (UNIT - w[i]) * u128::from(target.total) * next.total();
                // Both lose 32 bits, of 92 or more that a certain outcome has.
                let (rest, all) = (rest >> 32, (rest + lost) >> 32);
                all == 0 || u * all < rest << 32
            }
        };
        if stands {
            accepted = i;
        }
    }
    let (target, u) = (&mut rows[accepted].target, draw(Purpose::Target, accepted as u32));
    let token = match drafts.get(accepted) {
        None => target.draw(u),
        Some(draft) => residual(target, draft, w[accepted], u),
    };
    Verdict { accepted, token }
}

/// max(w p − q, 0) of one candidate, in units of 1 / (2³² · Sp · Sq).
fn excess(target: &Target, draft: &Draft, w: u128, i: usize) -> u128 {
    let p = w * u128::from(target.of(draft.ids[i])) * draft.total();
    p.saturating_sub((u128::from(draft.weights[i]) * u128::from(target.total)) << 32)
}

/// Σ max(w p − q, 0) over all tokens, in the units of [`excess`].
fn residual_mass(target: &Target, draft: &Draft, w: u128) -> u128 {
    let mut others = u128::from(target.total);
    let mut mass = 0;
    for i in 0..draft.ids.len() {
        others -= u128::from(target.of(draft.ids[i]));
        mass += excess(target, draft, w, i);
    }
    mass + w * others * draft.total()
}

/// A draw from max(w p − q, 0): the draft's candidates in their order, then all other tokens by
/// ascending id. From p if there is no such mass.
fn residual(target: &mut Target, draft: &Draft, w: u128, u: u32) -> u32 {
    let mass = residual_mass(target, draft, w);
    if mass == 0 {
        return target.draw(u);
    }
    let u = u128::from(u);
    let mut at = (mass >> 32) * u + (((mass & (UNIT - 1)) * u) >> 32);
    for i in 0..draft.ids.len() {
        let excess = excess(target, draft, w, i);
        if at < excess {
            return draft.ids[i];
        }
        at -= excess;
    }
    draft.ids.iter().for_each(|&id| target.remove(id));
    target.at((at / (w * draft.total())) as u64)
}
