//! The definition of a row's distribution, scalar and by sorting.

use std::cmp::{Ordering, Reverse};

use super::{JudgedRow, Row, Target};
use crate::random::ln;
use crate::sampling::{clean, race, weight};
use crate::{ONE, Rule, SamplerParams};

/// A row's distribution and pick.
pub(super) struct Defined {
    weights: Vec<u32>,
    pick: u32,
    log_sum: f32,
    degenerate: bool,
}

impl Defined {
    pub(super) fn judged(&mut self) -> JudgedRow<'_> {
        let total = self.weights.iter().map(|&w| u64::from(w)).sum();
        JudgedRow {
            target: Target { ids: &[], weights: &mut self.weights, total },
            pick: self.pick,
            log_sum: self.log_sum,
            degenerate: self.degenerate,
        }
    }
}

/// A row's distribution and pick, as the op's module says.
pub(super) fn definition(row: &Row) -> Defined {
    let log_sum = match row.params.flags & SamplerParams::LOGPROBS {
        0 => 0.0,
        _ => log_sum(row.raw),
    };
    let logits = processed(row);
    let max = largest(&logits);
    let mut weights = vec![0; logits.len()];
    if max == f32::NEG_INFINITY {
        let pick = row.fallback();
        weights[pick as usize] = ONE;
        return Defined { weights, pick, log_sum, degenerate: true };
    }
    let pick = match row.params.rule() {
        Rule::Greedy => logits.iter().position(|&z| z == max).unwrap_or(0),
        rule => {
            cut(row.params, &logits, max, &mut weights);
            let tokens: Vec<u32> = (0..weights.len() as u32).collect();
            match rule {
                Rule::Invariant => race(row.params.seed, row.position, &tokens, &weights),
                _ => 0,
            }
        }
    };
    Defined { weights, pick: pick as u32, log_sum, degenerate: false }
}

/// Logits after penalties, biases and mask.
pub(super) fn processed(row: &Row) -> Vec<f32> {
    let mut logits: Vec<f32> = row.raw.iter().map(|&z| clean(z)).collect();
    for (token, z) in logits.iter_mut().enumerate() {
        *z = row.params.penalised(*z, row.count(token as u32));
    }
    for bias in row.biases {
        if let Some(z) = logits.get_mut(bias.token as usize) {
            *z = clean(*z + bias.bias);
        }
    }
    if let Some(mask) = row.mask {
        for (token, z) in logits.iter_mut().enumerate() {
            if mask[token / 32] >> (token % 32) & 1 == 0 {
                *z = f32::NEG_INFINITY;
            }
        }
    }
    logits
}

/// Weights after min-p, top-k and top-p; the others stay 0.
fn cut(params: &SamplerParams, logits: &[f32], max: f32, weights: &mut [u32]) {
    let floor = max + params.min_logit;
    let mut kept: Vec<usize> = (0..logits.len()).filter(|&t| logits[t] >= floor).collect();
    kept.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap_or(Ordering::Equal));
    if params.top_k > 0 {
        kept.truncate(params.top_k as usize);
    }
    let mut kept: Vec<(u32, usize)> =
        kept.into_iter().map(|t| (weight((logits[t] - max) * params.inv_temperature), t)).collect();
    kept.sort_by_key(|&(weight, token)| (Reverse(weight), token));
    let limit = params.nucleus(kept.iter().map(|&(weight, _)| u64::from(weight)).sum());
    let mut before = 0;
    for (weight, token) in kept {
        if before >= limit {
            break;
        }
        weights[token] = weight;
        before += u64::from(weight);
    }
}

fn largest(logits: &[f32]) -> f32 {
    logits.iter().fold(f32::NEG_INFINITY, |max, &z| if z > max { z } else { max })
}

/// ln Σ e^logit of raw logits; −∞ if none is finite.
fn log_sum(raw: &[f32]) -> f32 {
    let logits: Vec<f32> = raw.iter().map(|&z| clean(z)).collect();
    let max = largest(&logits);
    log_sum_of(max, logits.iter().map(|&z| u64::from(weight(z - max))).sum())
}

/// [`log_sum`] from the largest logit and the sum of weights at temperature 1.
pub(super) fn log_sum_of(max: f32, total: u64) -> f32 {
    if max == f32::NEG_INFINITY {
        return max;
    }
    max + ln(total as f32 * (1.0 / ONE as f32))
}

/// ln p of a raw logit.
pub(super) fn log_probability(raw: f32, log_sum: f32) -> f32 {
    match clean(raw) {
        f32::NEG_INFINITY => f32::NEG_INFINITY,
        z => z - log_sum,
    }
}
