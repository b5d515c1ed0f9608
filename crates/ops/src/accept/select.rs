//! Min-p, top-k and top-p without sorting the vocabulary.
//!
//! A short top-k takes a list of the largest logits and works on that. Otherwise every token gets a
//! weight, in place, and top-p (or a long top-k) finds the key at which the running sum from the
//! largest down crosses its limit: three histograms of 11, 11 and 10 bits of the key, each over
//! the tokens of the bucket where the one before crossed, most of which are few. All sums are integers, so the result
//! is the definition's.

use std::cmp::Reverse;

use super::host::LIST;
use crate::SamplerParams;
use crate::sampling::weights;
use crate::simd::{LANES, Simd};

/// The distribution of a top-k of `ids.len()`, at most [`LIST`]: the kept tokens ascending with their
/// weights in the front of `ids` and `weights`; how many, and their total.
#[inline(always)]
pub(super) fn short<S: Simd>(
    s: S,
    params: &SamplerParams,
    logits: &[f32],
    max: f32,
    ids: &mut [u32],
    weights_out: &mut [u32],
) -> (usize, u64) {
    let mut values = [f32::NEG_INFINITY; LIST];
    crate::top_k::select(s, logits, ids, &mut values[..ids.len()]);
    let floor = max + params.min_logit;
    let mut len = values[..ids.len()].iter().take_while(|&&z| z >= floor).count();
    let mut list = [(0u32, 0u32); LIST];
    for i in (0..len).step_by(LANES) {
        let above = s.sub(s.load(&values[i..]), s.splat(max));
        let w = weights(s, s.mul(above, s.splat(params.inv_temperature)));
        for j in i..len.min(i + LANES) {
            list[j] = (w[j - i], ids[j]);
        }
    }
    let list = &mut list[..len];
    list.sort_unstable_by_key(|&(weight, id)| (Reverse(weight), id));
    let limit = params.nucleus(list.iter().map(|&(weight, _)| u64::from(weight)).sum());
    let mut total = 0;
    len = list
        .iter()
        .take_while(|&&(weight, _)| {
            let stays = total < limit && weight > 0;
            total += if stays { u64::from(weight) } else { 0 };
            stays
        })
        .count();
    let list = &mut list[..len];
    list.sort_unstable_by_key(|&(_, id)| id);
    for (i, &(weight, id)) in list.iter().enumerate() {
        (ids[i], weights_out[i]) = (id, weight);
    }
    (len, total)
}

/// Turns the logits of a row (as bits, padded with −∞) into weights, cut by min-p, by a top-k of
/// any size and by top-p. Returns their total.
#[inline(always)]
pub(super) fn dense<S: Simd>(
    s: S,
    params: &SamplerParams,
    valid: usize,
    max: f32,
    row: &mut [u32],
) -> u64 {
    let k = params.top_k as usize;
    if k > 0 && k < valid {
        let crossing = crossing(row, order_key, |_| 1, k as u64);
        let lowest = f32::NEG_INFINITY.to_bits();
        cut(
            row,
            order_key,
            lowest,
            crossing.key,
            crossing.at as usize,
            k - crossing.before as usize,
        );
    }
    let total = weigh(s, params, max, row);
    let limit = params.nucleus(total);
    if limit == total {
        return total;
    }
    // Tokens this light together weigh no more than what may be dropped, so all of them go.
    let light = ((total - limit) / row.len() as u64) as u32;
    row.iter_mut().for_each(|w| *w = if *w > light { *w } else { 0 });
    let crossing = crossing(row, weight_key, u64::from, limit);
    let weight = u64::from(key_weight(crossing.key));
    let stay = (limit - crossing.before).div_ceil(weight);
    cut(row, |w| w, 0, weight as u32, (crossing.at / weight) as usize, stay as usize);
    crossing.before + stay * weight
}

/// Logits (as bits) to weights, in place.
#[inline(always)]
fn weigh<S: Simd>(s: S, params: &SamplerParams, max: f32, row: &mut [u32]) -> u64 {
    let (inv_temperature, floor) = (s.splat(params.inv_temperature), max + params.min_logit);
    let (max, floor, lowest) = (s.splat(max), s.splat(floor), s.splat(f32::NEG_INFINITY));
    let mut total = [0u64; LANES];
    for chunk in row.chunks_exact_mut(LANES) {
        let z = s.load(bytemuck::cast_slice(chunk));
        let x = s.mul(s.sub(z, max), inv_temperature);
        let w = weights(s, s.select_lt(z, floor, lowest, x));
        chunk.copy_from_slice(&w);
        for (total, w) in total.iter_mut().zip(w) {
            *total += u64::from(w);
        }
    }
    total.iter().sum()
}

/// The sum of the weights of logits at temperature 1.
#[inline(always)]
pub(super) fn total_weight<S: Simd>(s: S, logits: &[f32], max: f32) -> u64 {
    let max = s.splat(max);
    let mut total = [0u64; LANES];
    for chunk in logits.chunks_exact(LANES) {
        let w = weights(s, s.sub(s.load(chunk), max));
        for (total, w) in total.iter_mut().zip(w) {
            *total += u64::from(w);
        }
    }
    total.iter().sum()
}

/// The bits of a clean logit as a number that orders like it.
#[inline(always)]
fn order_key(bits: u32) -> u32 {
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// What the key of weight 1 would be, but for the shift: the bits of 1.0.
const WEIGHT_BITS: u32 = 0x3F80_0000;

/// A weight from 1 on as a number that orders like it: its bits as a float, from the top. Weights
/// come from floats, so this is exact. It spreads them over the buckets of a histogram.
#[inline(always)]
fn weight_key(weight: u32) -> u32 {
    ((weight as i32 as f32).to_bits().wrapping_sub(WEIGHT_BITS)) << 4
}

/// The weight of a key.
fn key_weight(key: u32) -> u32 {
    f32::from_bits((key >> 4) + WEIGHT_BITS) as u32
}

/// Where a running sum crosses its limit.
struct Crossing {
    /// The key whose elements take the sum to the limit.
    key: u32,
    /// The sum over larger keys, less than the limit.
    before: u64,
    /// The sum over the elements of this key.
    at: u64,
}

/// Finds where the sum of `amount`, by descending key, reaches `limit` (at most the whole sum).
#[inline(always)]
fn crossing(
    row: &[u32],
    key: impl Fn(u32) -> u32,
    amount: impl Fn(u32) -> u64,
    limit: u64,
) -> Crossing {
    const BUCKETS: usize = 1 << 11;
    let (mut prefix, mut before, mut at) = (0u32, 0u64, 0u64);
    for (shift, bits) in [(21, 11), (10, 11), (0, 10)] {
        let mut sums = [0u64; BUCKETS];
        let mask = (1u32 << bits) - 1;
        let counts = |x: u32| (key(x) >> shift >> bits == prefix) & (amount(x) > 0);
        for chunk in row.chunks_exact(LANES) {
            let mut any = false;
            for &x in chunk {
                any |= counts(x);
            }
            if !any {
                continue;
            }
            for &x in chunk {
                if counts(x) {
                    sums[(key(x) >> shift & mask) as usize] += amount(x);
                }
            }
        }
        let mut bucket = mask as usize;
        while bucket > 0 && before + sums[bucket] < limit {
            before += sums[bucket];
            bucket -= 1;
        }
        at = sums[bucket];
        prefix = prefix << bits | bucket as u32;
    }
    Crossing { key: prefix, before, at }
}

/// Sets elements below a key to `nothing`, and of the `ties` elements of that key all but the
/// first `stay`.
#[inline(always)]
fn cut(
    row: &mut [u32],
    key_of: impl Fn(u32) -> u32,
    nothing: u32,
    key: u32,
    ties: usize,
    stay: usize,
) {
    row.iter_mut().for_each(|x| *x = if key_of(*x) < key { nothing } else { *x });
    if ties > stay {
        let tied = row.iter_mut().filter(|x| key_of(**x) == key);
        tied.skip(stay).for_each(|x| *x = nothing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ONE;

    #[test]
    fn keys_order_like_what_they_stand_for() {
        let weights = [1, 2, 3, 1000, 1 << 20, (1 << 24) - 1, 1 << 24, ONE - 64, ONE];
        assert!(weights.is_sorted_by_key(|&w| weight_key(w)));
        assert!(weights.iter().all(|&w| key_weight(weight_key(w)) == w));
        let logits = [f32::NEG_INFINITY, f32::MIN, -1.0, 0.0, 1e-40, 2.0, f32::MAX];
        assert!(logits.is_sorted_by_key(|z| order_key(z.to_bits())));
    }

    #[test]
    fn the_sum_crosses_where_a_sorted_list_says() {
        let row = [5, 0, 7, 7, 1, 0, 5, 7, 2, 0, 0, 0, 0, 0, 0, 0];
        // Sums by descending weight: 7, 14, 21, 26, 31, 33, 34.
        for (limit, weight, before, at) in [
            (1, 7, 0, 21),
            (21, 7, 0, 21),
            (22, 5, 21, 10),
            (31, 5, 21, 10),
            (32, 2, 31, 2),
            (34, 1, 33, 1),
        ] {
            let crossing = crossing(&row, weight_key, u64::from, limit);
            assert_eq!(key_weight(crossing.key), weight);
            assert_eq!((crossing.before, crossing.at), (before, at));
        }
    }
}
