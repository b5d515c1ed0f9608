//! Min-p, top-k and top-p without sorting the vocabulary.
//!
//! A short top-k takes a list of the largest logits and works on that, and so does top-p if the
//! nucleus turns out to lie among the likeliest tokens. Otherwise every token gets a weight, in
//! place, and top-p (or a long top-k) finds the key at which the running sum from the largest down
//! crosses its limit, by halving the range of keys. All sums are integers, so the result is the
//! definition's.

use std::cmp::Reverse;
use std::ops::Range;

use super::host::LIST;
use crate::sampling::weights;
use crate::simd::{LANES, Simd};
use crate::{ONE, SamplerParams};

/// Tokens that are looked at before the whole vocabulary where only top-p cuts.
const LIKELY: usize = 128;

/// The distribution as a short list, if it is one: for a top-k up to [`LIST`], and where top-p
/// leaves no more than some of the likeliest tokens. Returns how many tokens were kept, ascending,
/// in the front of `ids` and `weights`, and their total.
#[inline(always)]
pub(super) fn short<S: Simd>(
    s: S,
    params: &SamplerParams,
    logits: &[f32],
    valid: usize,
    max: f32,
    ids: &mut [u32],
    weights: &mut [u32],
) -> Option<(usize, u64)> {
    let mut list = [(0u32, 0u32); LIST];
    let (len, limit);
    if (1..=LIST as u32).contains(&params.top_k) {
        let k = valid.min(params.top_k as usize);
        len = likeliest(s, params, logits, max, &mut ids[..k], &mut list);
        limit = params.nucleus(sum(&list[..len]));
    } else if params.top_k == 0 && params.top_p < ONE && valid > LIKELY {
        limit = params.nucleus(total_weight(s, params, logits, max));
        len = likeliest(s, params, logits, max, &mut ids[..LIKELY], &mut list);
    } else {
        return None;
    }
    let (kept, total) = nucleus(&list[..len], limit);
    if params.top_k == 0 && (total < limit || !clear_of_the_rest(&list[..len], kept)) {
        return None;
    }
    let list = &mut list[..kept];
    list.sort_unstable_by_key(|&(_, id)| id);
    for (i, &(weight, id)) in list.iter().enumerate() {
        (ids[i], weights[i]) = (id, weight);
    }
    Some((kept, total))
}

/// The `ids.len()` largest logits, as far as min-p keeps them: weights and ids, by descending
/// weight, then ascending id. Returns how many.
#[inline(always)]
fn likeliest<S: Simd>(
    s: S,
    params: &SamplerParams,
    logits: &[f32],
    max: f32,
    ids: &mut [u32],
    list: &mut [(u32, u32); LIST],
) -> usize {
    let mut values = [f32::NEG_INFINITY; LIST];
    crate::top_k::select(s, logits, ids, &mut values[..ids.len()]);
    let floor = max + params.min_logit;
    let len = values[..ids.len()].iter().take_while(|&&z| z >= floor).count();
    for i in (0..len).step_by(LANES) {
        let above = s.sub(s.load(&values[i..]), s.splat(max));
        let w = weights(s, s.mul(above, s.splat(params.inv_temperature)));
        for j in i..len.min(i + LANES) {
            list[j] = (w[j - i], ids[j]);
        }
    }
    list[..len].sort_unstable_by_key(|&(weight, id)| (Reverse(weight), id));
    len
}

fn sum(list: &[(u32, u32)]) -> u64 {
    list.iter().map(|&(weight, _)| u64::from(weight)).sum()
}

/// How many tokens of a sorted list stay while the weight before them is less than `limit`, and
/// their total.
fn nucleus(list: &[(u32, u32)], limit: u64) -> (usize, u64) {
    let (mut kept, mut total) = (0, 0);
    while kept < list.len() && total < limit && list[kept].0 > 0 {
        total += u64::from(list[kept].0);
        kept += 1;
    }
    (kept, total)
}

/// Whether the kept tokens outweigh every token that is not on the list. Those have no larger
/// logits than the list's last, but could have its weight, or a little more, as far as the
/// exponential is off.
fn clear_of_the_rest(list: &[(u32, u32)], kept: usize) -> bool {
    let (last, lightest) = (list[list.len() - 1].0, list[kept - 1].0);
    lightest > last + (last >> 20) + 2
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
        let crossing = crossing::<Logits>(row, k as u64, 0..u32::MAX);
        let stay = k as u64 - crossing.before;
        cut::<Logits>(row, f32::NEG_INFINITY.to_bits(), crossing.key, crossing.at, stay);
    }
    let total = weigh(s, params, max, row);
    let limit = params.nucleus(total);
    if limit == total {
        return total;
    }
    // Tokens this light together weigh no more than what may be dropped: the limit lies above.
    let light = ((total - limit) / row.len() as u64) as u32;
    let crossing = crossing::<Weights>(row, limit, Weights::key(light)..Weights::key(ONE));
    let weight = u64::from(Weights::bound(crossing.key));
    let stay = (limit - crossing.before).div_ceil(weight);
    cut::<Weights>(row, 0, crossing.key, crossing.at / weight, stay);
    crossing.before + stay * weight
}

/// From logits to weights.
struct Scale<S: Simd> {
    max: S::F,
    inv_temperature: S::F,
    floor: S::F,
}

impl<S: Simd> Scale<S> {
    #[inline(always)]
    fn new(s: S, params: &SamplerParams, max: f32) -> Scale<S> {
        Scale {
            max: s.splat(max),
            inv_temperature: s.splat(params.inv_temperature),
            floor: s.splat(max + params.min_logit),
        }
    }

    #[inline(always)]
    fn weights(&self, s: S, z: S::F) -> [u32; LANES] {
        let x = s.mul(s.sub(z, self.max), self.inv_temperature);
        weights(s, s.select_lt(z, self.floor, s.splat(f32::NEG_INFINITY), x))
    }
}

#[inline(always)]
fn add(total: &mut [u64; LANES], weights: &[u32; LANES]) {
    for (total, &w) in total.iter_mut().zip(weights) {
        *total += u64::from(w);
    }
}

/// Logits (as bits) to weights, in place. Returns their sum.
#[inline(always)]
fn weigh<S: Simd>(s: S, params: &SamplerParams, max: f32, row: &mut [u32]) -> u64 {
    let scale = Scale::new(s, params, max);
    let mut total = [0u64; LANES];
    for chunk in row.chunks_exact_mut(LANES) {
        let w = scale.weights(s, s.load(bytemuck::cast_slice(chunk)));
        chunk.copy_from_slice(&w);
        add(&mut total, &w);
    }
    total.iter().sum()
}

/// The sum of the weights of all tokens that min-p keeps.
#[inline(always)]
pub(super) fn total_weight<S: Simd>(s: S, params: &SamplerParams, logits: &[f32], max: f32) -> u64 {
    let scale = Scale::new(s, params, max);
    let mut total = [0u64; LANES];
    for chunk in logits.chunks_exact(LANES) {
        add(&mut total, &scale.weights(s, s.load(chunk)));
    }
    total.iter().sum()
}

/// What a crossing is searched in.
trait Elements {
    /// A number that orders like the element.
    fn key(x: u32) -> u32;
    /// For [`Elements::exceeds`]: stands for all elements of at most this key.
    fn bound(key: u32) -> u32;
    /// Whether the element's key is larger than that of the bound.
    fn exceeds(x: u32, bound: u32) -> bool;
    /// What the element adds to the sum.
    fn amount(x: u32) -> u32;
}

/// Bits of clean logits, which are counted.
struct Logits;

impl Elements for Logits {
    #[inline(always)]
    fn key(bits: u32) -> u32 {
        if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
    }
    #[inline(always)]
    fn bound(key: u32) -> u32 {
        key
    }
    #[inline(always)]
    fn exceeds(bits: u32, bound: u32) -> bool {
        Self::key(bits) > bound
    }
    #[inline(always)]
    fn amount(_: u32) -> u32 {
        1
    }
}

/// Weights, which are added up. A key is the weight's bits as a float (exact, since weights come from
/// floats), so that halving a range of keys halves a range of orders of magnitude. A bound is the
/// weight of a key, rounded down.
struct Weights;

impl Elements for Weights {
    #[inline(always)]
    fn key(weight: u32) -> u32 {
        (weight as f32).to_bits()
    }
    #[inline(always)]
    fn bound(key: u32) -> u32 {
        f32::from_bits(key) as u32
    }
    #[inline(always)]
    fn exceeds(weight: u32, bound: u32) -> bool {
        weight > bound
    }
    #[inline(always)]
    fn amount(weight: u32) -> u32 {
        weight
    }
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

/// Finds where the sum of amounts, by descending key, reaches `limit`, given that it does so at a
/// key above the start of `keys` and not above its end: halves the range until few elements are
/// left in it, and sorts those.
#[inline(always)]
fn crossing<E: Elements>(row: &[u32], limit: u64, keys: Range<u32>) -> Crossing {
    const FEW: usize = 256;
    let Range { start: mut low, end: mut high } = keys;
    let (mut above_low, mut above_high) = (row.len(), Above { sum: 0, count: 0 });
    while high - low > 1 && above_low - above_high.count > FEW {
        let middle = low + (high - low) / 2;
        let above = sum_above::<E>(row, E::bound(middle));
        if above.sum >= limit {
            (low, above_low) = (middle, above.count);
        } else {
            (high, above_high) = (middle, above);
        }
    }
    let mut before = above_high.sum;
    let within = above_low - above_high.count;
    if within > FEW {
        // They all have one key.
        let at = sum_above::<E>(row, E::bound(low)).sum - before;
        return Crossing { key: high, before, at };
    }
    let mut few = [0; FEW];
    let found = gather::<E>(row, E::bound(low), E::bound(high), &mut few);
    let few = &mut few[..found];
    few.sort_unstable_by_key(|&x| Reverse(E::key(x)));
    let mut crossing = Crossing { key: high, before, at: 0 };
    for equal in few.chunk_by(|&a, &b| E::key(a) == E::key(b)) {
        let at = equal.iter().map(|&x| u64::from(E::amount(x))).sum();
        crossing = Crossing { key: E::key(equal[0]), before, at };
        before += at;
        if before >= limit {
            break;
        }
    }
    crossing
}

struct Above {
    sum: u64,
    count: usize,
}

/// Sum and count of the elements that exceed a bound.
#[inline(always)]
fn sum_above<E: Elements>(row: &[u32], bound: u32) -> Above {
    let mut above = Above { sum: 0, count: 0 };
    for &x in row {
        let exceeds = E::exceeds(x, bound);
        above.sum += u64::from(if exceeds { E::amount(x) } else { 0 });
        above.count += usize::from(exceeds);
    }
    above
}

/// The elements that exceed `low` but not `high`. Returns how many.
#[inline(always)]
fn gather<E: Elements>(row: &[u32], low: u32, high: u32, out: &mut [u32]) -> usize {
    let mut found = 0;
    for chunk in row.chunks_exact(LANES) {
        let mut any = false;
        for &x in chunk {
            any |= E::exceeds(x, low) & !E::exceeds(x, high);
        }
        if !any {
            continue;
        }
        for &x in chunk {
            if E::exceeds(x, low) && !E::exceeds(x, high) {
                out[found] = x;
                found += 1;
            }
        }
    }
    found
}

/// Sets elements below a key (from 1) to `nothing`, and of the elements of that key all but the
/// first `stay`; there are `ties` of them.
#[inline(always)]
fn cut<E: Elements>(row: &mut [u32], nothing: u32, key: u32, ties: u64, stay: u64) {
    let bound = E::bound(key - 1);
    for x in row.iter_mut() {
        *x = if E::exceeds(*x, bound) { *x } else { nothing };
    }
    if ties > stay {
        let tied = row.iter_mut().filter(|x| E::key(**x) == key);
        tied.skip(stay as usize).for_each(|x| *x = nothing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_like_what_they_stand_for() {
        let weights = [0, 1, 2, 3, 1000, 1 << 20, (1 << 24) - 1, 1 << 24, ONE - 64, ONE];
        assert!(weights.is_sorted_by_key(|&w| Weights::key(w)));
        for pair in weights.windows(2) {
            let bound = Weights::bound(Weights::key(pair[1]) - 1);
            assert!(Weights::exceeds(pair[1], bound) && !Weights::exceeds(pair[0], bound));
        }
        let logits = [f32::NEG_INFINITY, f32::MIN, -1.0, 0.0, 1e-40, 2.0, f32::MAX];
        assert!(logits.is_sorted_by_key(|z| Logits::key(z.to_bits())));
    }

    #[test]
    fn the_sum_crosses_where_a_sorted_list_says() {
        let short = [5, 0, 7, 7, 1, 0, 5, 7, 2, 0, 0, 0, 0, 0, 0, 0];
        // Sums by descending weight: 7, 14, 21, 26, 31, 33, 34.
        for (limit, weight, before, at) in [
            (1, 7, 0, 21),
            (21, 7, 0, 21),
            (22, 5, 21, 10),
            (31, 5, 21, 10),
            (32, 2, 31, 2),
            (34, 1, 33, 1),
        ] {
            for copies in [1, 100] {
                // Long rows take the other way through.
                let row = short.repeat(copies as usize);
                let crossing = crossing::<Weights>(&row, copies * limit, 0..Weights::key(ONE));
                assert_eq!(crossing.key, Weights::key(weight));
                assert_eq!((crossing.before, crossing.at), (copies * before, copies * at));
            }
        }
    }
}
