//! Min-p, top-k and top-p without sorting the vocabulary.
//!
//! A short top-k takes a list of the largest logits and works on that. Otherwise every token gets a
//! weight, in place, and top-p (or a long top-k) finds the key at which the running sum from the
//! largest down crosses its limit: three histograms of 11, 11 and 10 bits of the key, each over
//! the tokens of the bucket where the one before crossed. All sums are integers, so the result
//! is the definition's.

use std::cmp::Reverse;

use crate::SamplerParams;
use crate::sampling::weights;
use crate::simd::{LANES, Simd};

/// The distribution of a top-k of `ids.len()`, at most 128: the kept tokens ascending with their
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
    const LIST: usize = super::host::LIST;
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
    let crossing = crossing(row, |w| w, u64::from, limit);
    let weight = u64::from(crossing.key);
    let stay = (limit - crossing.before).div_ceil(weight);
    cut(row, |w| w, 0, crossing.key, (crossing.at / weight) as usize, stay as usize);
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
    let skip_zeros = amount(0) == 0;
    let (mut prefix, mut before, mut at) = (0u32, 0u64, 0u64);
    for (shift, bits) in [(21, 11), (10, 11), (0, 10)] {
        let mut sums = [0u64; BUCKETS];
        let mask = (1u32 << bits) - 1;
        for chunk in row.chunks(LANES) {
            if skip_zeros && chunk.iter().fold(0, |any, &x| any | x) == 0 {
                continue;
            }
            for &x in chunk {
                let k = u64::from(key(x));
                if (k >> (shift + bits)) as u32 == prefix {
                    sums[(k >> shift) as usize & mask as usize] += amount(x);
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
