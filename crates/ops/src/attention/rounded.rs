//! The definition with queries and weights in bf16, as matrix units take them.
//!
//! A card rounds each query, which moves every score by what the query's elements lose; the larger the scores, the
//! more. Queries can be rounded here just so. Weights can't: a card rounds each relative to the greatest score that it
//! has seen by then. But that leaves a bound: with weights w (1 + d) in place of w, |d| ≤ D, and their own sum as divisor,
//! a row is off by Σ w d (v − row) ÷ Σ w (1 + d), so by Σ w D |v − row| ÷ (1 − D) Σ w at most.

use half::bf16;

use super::Attention;
use crate::kv::Part;
use crate::{LaneStep, Mem, PAGE_TOKENS, Rounded};

/// By how much rounding to bf16 changes a number, relative to it, at most.
const BF16: f64 = 1.0 / 256.0;
/// What f32 sums of a score's products lose of the products' magnitudes: 2^-22 for each of up to 16 steps.
const SCORE: f64 = 1.0 / 262_144.0;
/// What powers of two, and f32 sums of weighted values, lose.
const SUMS: f64 = 1.0 / 65_536.0;

/// Every element of the output, row by row. With `tips`, an element of each query and one of each key may have been rounded
/// to the other neighbour, as the last bits of what they were computed from may decide.
pub(crate) fn rounded(op: &Attention, mem: &Mem, tips: bool) -> Vec<Rounded> {
    let (heads, dim) = (op.heads, op.kv.head_dim);
    let mut all = vec![Rounded::default(); op.lanes.rows * heads * dim];
    for step in op.lanes.steps(mem) {
        for r in 0..step.rows as usize {
            let row = step.row0 as usize + r;
            for head in 0..heads {
                let out = &mut all[(row * heads + head) * dim..][..dim];
                one(op, mem, step, (r, head), tips, out);
            }
        }
    }
    all
}

/// Of row `r` of a lane and one head.
fn one(
    op: &Attention,
    mem: &Mem,
    step: &LaneStep,
    (r, head): (usize, usize),
    tips: bool,
    out: &mut [Rounded],
) {
    let (dim, kv_head) = (op.kv.head_dim, head / (op.heads / op.kv.kv_heads));
    let pages = op.kv.pages(mem, step.slot);
    let page = |pos: usize| pages[pos / PAGE_TOKENS] as usize;
    let (start, end) = op.visible(step, r);
    let q = op.query(mem, step.row0 as usize + r, head);
    let q: Vec<f64> = q.iter().map(|&q| bf16::from_f32(q).to_f64()).collect();
    let scale = f64::from(op.scale);
    // Scores, and by what factor their weights may be off.
    let scores: Vec<(f64, f64)> = (start..end)
        .map(|pos| {
            let block = mem.get(op.kv.key_block(page(pos), kv_head));
            let product = |i| q[i] * op.kv.element(block, Part::Key, pos, i) * scale;
            let [mut score, mut all, mut largest] = [0.0f64; 3];
            for product in (0..dim).map(product) {
                score += product;
                all += product.abs();
                largest = largest.max(product.abs());
            }
            let tips = if tips { 2.0 * 2.0 * BF16 * largest } else { 0.0 };
            (score, (1.0 + BF16 + SUMS) * (SCORE * all + tips).exp() - 1.0)
        })
        .collect();
    let max = scores.iter().map(|s| s.0).fold(f64::NEG_INFINITY, f64::max);
    let worst = scores.iter().map(|s| s.1).fold(0.0, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s.0 - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    let values: Vec<&[u8]> =
        (start..end).map(|pos| mem.get(op.kv.value_block(page(pos), kv_head))).collect();
    for (i, out) in out.iter_mut().enumerate() {
        let value = |n: usize| op.kv.element(values[n], Part::Value, start + n, i);
        let each = || weights.iter().enumerate();
        let want = each().map(|(n, w)| w * value(n)).sum::<f64>() / total;
        let off = each().map(|(n, w)| {
            let v = value(n);
            w * (scores[n].1 / (1.0 - worst).max(0.0) * (v - want).abs() + SUMS * v.abs())
        });
        let within = off.sum::<f64>() / total;
        *out = Rounded { want: want as f32, within: within as f32 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::cases::{SHAPE, build, lane};
    use crate::simd::Isa;
    use crate::testing::Builder;
    use crate::{ActDtype, Device, Host, HostMode, Op};

    /// What a card might get wrong.
    #[derive(Clone, Copy, PartialEq)]
    enum Fault {
        None,
        /// A row sees one key too few.
        LastKey,
        /// The same key twice.
        Twice,
        /// The sums so far keep their factor when a page has a greater score.
        Factor,
        /// The sign of one element of the queries.
        Sign,
    }

    const DIM: usize = 64;
    const POS: usize = 300;
    const ROWS: usize = 4;

    /// As `split.cu` computes: f32 sums, queries and weights in bf16, page after page.
    fn as_a_card(op: &Attention, mem: &Mem, (r, head): (usize, usize), fault: Fault) -> Vec<f32> {
        let round = |x: f32| bf16::from_f32(x).to_f32();
        let mut q: Vec<f32> = op.query(mem, r, head).iter().map(|&q| round(q)).collect();
        if fault == Fault::Sign {
            q[7] = -q[7];
        }
        let (mut max, mut total, mut sums) = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; DIM]);
        let pages = op.kv.pages(mem, 0);
        let end = POS + r + 1 - usize::from(fault == Fault::LastKey);
        for first in (0..end).step_by(PAGE_TOKENS) {
            let page = pages[first / PAGE_TOKENS] as usize;
            let keys = mem.get(op.kv.key_block(page, head / 3));
            let values = mem.get(op.kv.value_block(page, head / 3));
            let here = (first..end.min(first + PAGE_TOKENS))
                .map(|pos| if fault == Fault::Twice && pos == 65 { 64 } else { pos });
            let score = |pos| {
                let of = |i: usize| q[i] * op.kv.element(keys, Part::Key, pos, i) as f32;
                (0..DIM).map(of).sum::<f32>() * op.scale
            };
            let scores: Vec<f32> = here.clone().map(score).collect();
            let greatest = scores.iter().copied().fold(max, f32::max);
            let factor = if fault == Fault::Factor { 1.0 } else { (max - greatest).exp() };
            max = greatest;
            (total, sums) = (total * factor, sums.iter().map(|s| s * factor).collect());
            for (pos, score) in here.zip(scores) {
                let weight = round((score - max).exp());
                total += weight;
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum += weight * op.kv.element(values, Part::Value, pos, i) as f32;
                }
            }
        }
        sums.iter().map(|sum| sum / total).collect()
    }

    /// Elements beyond a bound, of 1,536.
    struct Beyond {
        /// [`rounded`]'s.
        own: usize,
        /// 1/128 of the element and the output's root mean square, off the definition.
        fixed: usize,
    }

    /// With queries this large.
    fn beyond(size: f32, fault: Fault) -> Beyond {
        let mut host = Host::with(HostMode::Reference, Isa::Portable, 1, ActDtype::F32);
        let mut b = Builder::new(&mut host);
        let op = build(&mut b, SHAPE, &[lane(0, POS as u32, ROWS as u32)]);
        let q = b.normal(ROWS * SHAPE.heads * DIM, size);
        let op = Attention { q, ..op };
        host.run(&op);
        host.sync().expect("the definition");
        let mem = host.mem();
        let want: &[f32] = mem.get(op.out);
        let rms = (want.iter().map(|x| x * x).sum::<f32>() / want.len() as f32).sqrt();
        let near = op.rounded(mem).expect("attention rounds");
        let places = (0..ROWS).flat_map(|r| (0..SHAPE.heads).map(move |head| (r, head)));
        let got: Vec<f32> = places.flat_map(|at| as_a_card(&op, mem, at, fault)).collect();
        let own = near.iter().zip(&got).filter(|(n, got)| (n.want - *got).abs() > n.within);
        let fixed =
            want.iter().zip(&got).filter(|(w, g)| (*w - *g).abs() > (w.abs() + rms) / 128.0);
        let mean = near.iter().map(|n| n.within / rms).sum::<f32>() / near.len() as f32;
        println!("queries of {size}: within {mean} of the root mean square");
        Beyond { own: own.count(), fixed: fixed.count() }
    }

    #[test]
    fn the_bound_knows_the_scores() {
        for size in [0.1, 1.0, 5.0, 20.0] {
            let found = beyond(size, Fault::None);
            assert_eq!(found.own, 0, "queries of {size}");
            // One number for all scores is too small for some.
            assert!(size < 5.0 || found.fixed > 0, "queries of {size}");
        }
    }

    #[test]
    fn faults_are_beyond_the_bound() {
        for fault in [Fault::LastKey, Fault::Twice, Fault::Factor, Fault::Sign] {
            for size in [1.0, 5.0] {
                let found = beyond(size, fault).own;
                println!("fault {} at {size}: {found} elements", fault as u8);
                assert!(found > 0, "fault {} at {size}", fault as u8);
            }
        }
    }
}
