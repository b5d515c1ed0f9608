//! The laws of the rules: what is emitted follows the target's distribution exactly, whatever the
//! drafts. By enumeration on a vocabulary of five, and by chi-square tests of whole rounds.

use std::collections::BTreeMap;

use super::JudgedRow;
use super::rig::{Rig, Round, logits_after};
use super::rules::{self, Draft, Target, Verdict};
use crate::random::{Purpose, philox};
use crate::sampling::{Candidates, weight};
use crate::{Device, ONE, Propose, Rule, SamplerParams, Selector, TopK};

const V: usize = 5;

type Draw<'a> = &'a dyn Fn(Purpose, u32) -> u32;
type RuleFn = fn(&[Draft], &mut [JudgedRow], Draw) -> Verdict;

fn token(drafts: &[Draft], rows: &mut [JudgedRow], draw: Draw) -> Verdict {
    rules::token(drafts, rows, draw)
}

fn block(drafts: &[Draft], rows: &mut [JudgedRow], draw: Draw) -> Verdict {
    rules::block(drafts, rows, draw)
}

/// The arm that must fail: after a rejection it draws from p, not from what p has over q.
fn wrong(drafts: &[Draft], rows: &mut [JudgedRow], draw: Draw) -> Verdict {
    let Verdict { accepted, .. } = rules::token(drafts, rows, draw);
    // A proposal without candidates' overlap: its residual is p itself, but for one token.
    let nobody = [u32::MAX];
    let draft = Draft::new(&nobody[0], Candidates { ids: &[], weights: &[] });
    let reject = |purpose, index| match purpose {
        Purpose::Accept => u32::MAX,
        _ => draw(purpose, accepted as u32 + index),
    };
    let Verdict { token, .. } = rules::token(&[draft], &mut rows[accepted..], reject);
    Verdict { accepted, token }
}

/// A target and a drafter whose weights depend on the tokens before.
struct Tables {
    /// By prefix of 0, 1 and 2 tokens.
    p: BTreeMap<Vec<u32>, Vec<u32>>,
    /// By prefix of 0 and 1 tokens: candidates and their weights.
    q: BTreeMap<Vec<u32>, (Vec<u32>, Vec<u32>)>,
}

#[derive(Clone, Copy, Debug)]
enum Drafter {
    /// Random weights on some tokens, of which some weigh nothing.
    Candidates(usize),
    /// One token.
    Point,
    /// The target's own distribution.
    Perfect,
    /// Never what the target would say.
    Disjoint,
}

fn tables(seed: u32, drafter: Drafter) -> Tables {
    let random = |prefix: &[u32], t: u32, salt: u32| {
        let code = prefix.iter().fold(1, |code, &x| 7 * code + x + 1);
        philox([code, t, salt, 0], [seed, 0])[0]
    };
    let weights = |prefix: &[u32], salt| {
        let of = |t| match random(prefix, t, salt) {
            x if x % 4 == 0 => 0,
            x => x % ONE + 1,
        };
        let mut w: Vec<u32> = (0..V as u32).map(of).collect();
        w[(random(prefix, 0, salt + 9) % V as u32) as usize] = ONE;
        w
    };
    let mut prefixes = vec![vec![]];
    prefixes.extend((0..V as u32).map(|a| vec![a]));
    let q_prefixes = prefixes.clone();
    prefixes.extend((0..25).map(|i| vec![i / 5, i % 5]));
    let mut p: BTreeMap<_, _> =
        prefixes.into_iter().map(|prefix| (prefix.clone(), weights(&prefix, 1))).collect();
    let mut q = BTreeMap::new();
    for prefix in q_prefixes {
        let target = p.get_mut(&prefix).expect("a row for each prefix");
        let all: Vec<u32> = (0..V as u32).collect();
        let start = random(&prefix, 0, 3) as usize % V;
        let row = match drafter {
            Drafter::Point => (vec![start as u32], vec![ONE]),
            Drafter::Perfect => (all, target.clone()),
            Drafter::Candidates(k) => {
                let ids: Vec<u32> = (0..k).map(|i| ((start + i) % V) as u32).collect();
                let of = weights(&prefix, 2);
                let mut w: Vec<u32> = ids.iter().map(|&id| of[id as usize]).collect();
                w[k - 1] = ONE;
                (ids, w)
            }
            Drafter::Disjoint => {
                target[start] = 0;
                target[(start + 1) % V] = ONE;
                (vec![start as u32], vec![ONE])
            }
        };
        q.insert(prefix, row);
    }
    Tables { p, q }
}

fn share(w: &[u32], i: usize) -> f64 {
    f64::from(w[i]) / w.iter().map(|&w| f64::from(w)).sum::<f64>()
}

type Law = BTreeMap<(usize, u32), f64>;

/// The law of `at(u)` for uniform u, where equal ends of a range mean that it is constant between:
/// a rule's outcome changes monotonically with each of its numbers. Ranges are halved down to 2¹².
fn integrate(at: &dyn Fn(u32) -> Law) -> Law {
    fn add(into: &mut Law, law: &Law, factor: f64) {
        for (key, p) in law {
            *into.entry(*key).or_default() += p * factor;
        }
    }
    fn range(
        at: &dyn Fn(u32) -> Law,
        (lo, low): (u32, &Law),
        (hi, high): (u32, &Law),
        sum: &mut Law,
    ) {
        let width = (f64::from(hi) - f64::from(lo)) / 4_294_967_295.0;
        if low == high || hi - lo < 1 << 12 {
            add(sum, low, width / 2.0);
            add(sum, high, width / 2.0);
            return;
        }
        let mid = lo + (hi - lo) / 2;
        let middle = at(mid);
        range(at, (lo, low), (mid, &middle), sum);
        range(at, (mid, &middle), (hi, high), sum);
    }
    let mut sum = Law::new();
    range(at, (0, &at(0)), (u32::MAX, &at(u32::MAX)), &mut sum);
    sum
}

/// The law of the first three tokens: what a round of two proposals emits, then the target.
fn law_of_texts(rule: RuleFn, tables: &Tables) -> Vec<f64> {
    let mut law = vec![0.0; V * V * V];
    let (first_ids, first) = &tables.q[&vec![]];
    for (i, &a) in first_ids.iter().enumerate() {
        let (second_ids, second) = &tables.q[&vec![a]];
        for (j, &b) in second_ids.iter().enumerate() {
            let path = share(first, i) * share(second, j);
            if path == 0.0 {
                continue;
            }
            let verdict = |u: [u32; 3]| {
                let drafts = [
                    Draft::new(&a, Candidates { ids: first_ids, weights: first }),
                    Draft::new(&b, Candidates { ids: second_ids, weights: second }),
                ];
                let mut weights =
                    [vec![], vec![a], vec![a, b]].map(|prefix| tables.p[&prefix].clone());
                let mut rows = weights.each_mut().map(|w| JudgedRow {
                    target: Target {
                        ids: &[],
                        total: w.iter().map(|&w| u64::from(w)).sum(),
                        weights: w,
                    },
                    pick: 0,
                    log_sum: 0.0,
                    degenerate: false,
                });
                rule(&drafts, &mut rows, &|purpose, index| match purpose {
                    Purpose::Accept => u[index as usize - 1],
                    _ => u[2],
                })
            };
            let outcomes = integrate(&|u1| {
                integrate(&|u2| {
                    integrate(&|u3| {
                        let Verdict { accepted, token } = verdict([u1, u2, u3]);
                        Law::from([((accepted, token), 1.0)])
                    })
                })
            });
            for ((accepted, token), p) in outcomes {
                let mut text = [a, b][..accepted].to_vec();
                text.push(token);
                complete(tables, &text, path * p, &mut law);
            }
        }
    }
    law
}

/// Spreads a probability over the texts of three tokens that begin with `text`.
fn complete(tables: &Tables, text: &[u32], p: f64, law: &mut [f64]) {
    if let &[a, b, c] = text {
        law[(a * 25 + b * 5 + c) as usize] += p;
        return;
    }
    for next in 0..V {
        let share = share(&tables.p[text], next);
        if share > 0.0 {
            complete(tables, &[text, &[next as u32]].concat(), p * share, law);
        }
    }
}

fn distance(rule: RuleFn, tables: &Tables) -> f64 {
    let mut want = vec![0.0; V * V * V];
    complete(tables, &[], 1.0, &mut want);
    let got = law_of_texts(rule, tables);
    let sum: f64 = got.iter().sum();
    assert!((sum - 1.0).abs() < 1e-6, "probabilities sum to {sum}");
    want.iter().zip(&got).map(|(w, g)| (w - g).abs()).fold(0.0, f64::max)
}

#[test]
fn texts_follow_the_target_by_enumeration() {
    for drafter in [
        Drafter::Candidates(5),
        Drafter::Candidates(3),
        Drafter::Point,
        Drafter::Perfect,
        Drafter::Disjoint,
    ] {
        for seed in 0..2 {
            let tables = tables(seed, drafter);
            for (name, rule) in [("token", token as RuleFn), ("block", block)] {
                let distance = distance(rule, &tables);
                assert!(distance < 1e-5, "{name} with {drafter:?}, seed {seed}: {distance}");
            }
        }
    }
}

#[test]
fn enumeration_notices_a_wrong_rule() {
    let distance = distance(wrong, &tables(0, Drafter::Candidates(3)));
    assert!(distance > 1e-3, "{distance}");
}

/// Mean tokens of a round: block ≥ token, and both all of them for a perfect drafter.
#[test]
fn the_block_rule_is_never_shorter() {
    let mean = |rule: RuleFn, tables: &Tables| {
        let mut mean = 0.0;
        let rounds = 20_000u32;
        for round in 0..rounds {
            let draw =
                |purpose: Purpose, index| philox([round, index, purpose as u32, 7], [8, 9])[0];
            let pick = |w: &[u32], index| {
                let total = w.iter().map(|&w| u64::from(w)).sum();
                let mut at = crate::sampling::below(total, draw(Purpose::Draft, index));
                let found = w.iter().position(|&w| {
                    let here = at < u64::from(w);
                    at = at.saturating_sub(u64::from(w));
                    here
                });
                found.expect("a unit below the total")
            };
            let (ids_a, w_a) = &tables.q[&vec![]];
            let a = ids_a[pick(w_a, 1)];
            let (ids_b, w_b) = &tables.q[&vec![a]];
            let b = ids_b[pick(w_b, 2)];
            let drafts = [
                Draft::new(&a, Candidates { ids: ids_a, weights: w_a }),
                Draft::new(&b, Candidates { ids: ids_b, weights: w_b }),
            ];
            let mut weights = [vec![], vec![a], vec![a, b]].map(|prefix| tables.p[&prefix].clone());
            let mut rows = weights.each_mut().map(|w| JudgedRow {
                target: Target {
                    ids: &[],
                    total: w.iter().map(|&w| u64::from(w)).sum(),
                    weights: w,
                },
                pick: 0,
                log_sum: 0.0,
                degenerate: false,
            });
            mean += f64::from(rule(&drafts, &mut rows, &draw).accepted as u32 + 1);
        }
        mean / f64::from(rounds)
    };
    for seed in 0..4 {
        let some = tables(seed, Drafter::Candidates(4));
        let (by_token, by_block) = (mean(token, &some), mean(block, &some));
        assert!(by_block > by_token - 0.01, "seed {seed}: {by_block} < {by_token}");
        assert_eq!(mean(token, &tables(seed, Drafter::Perfect)), 3.0);
        assert_eq!(mean(block, &tables(seed, Drafter::Perfect)), 3.0);
    }
}

const WORDS: usize = 12;

/// Logits of the target of the chi-square tests.
fn target_logits(before: u32, last: u32) -> Vec<f32> {
    logits_after(WORDS, 4.0, before, last)
}

/// A draft pass on the rig's device: eight candidates of each of two rows, and their path.
struct Drafting {
    top_k: TopK,
    propose: Propose,
}

impl Drafting {
    fn new(rig: &mut Rig, with_selector: bool) -> Drafting {
        let (rows, k, rank) = (2, 8, 16);
        let mut alloc = |bytes: usize| rig.dev.alloc(bytes, "draft").expect("memory");
        let top_k = TopK {
            logits: alloc(4 * rows * WORDS),
            ids: alloc(4 * rows * k),
            values: alloc(4 * rows * k),
            scratch: alloc(TopK::scratch_bytes(rows, WORDS, k)),
            rows,
            stride: WORDS,
            valid: WORDS,
            k,
        };
        let selector = Selector {
            predecessor: alloc(2 * WORDS * rank),
            successor: alloc(2 * WORDS * rank),
            query: alloc(4 * rows * rank),
            vocab: WORDS,
            rank,
        };
        let bf16 = |salt: u32| -> Vec<u16> {
            let one = |i| (philox([i, salt, 0, 0], [1, 1])[0] >> 8) as f32 / (1 << 23) as f32 - 1.0;
            (0..(WORDS * rank) as u32).map(|i| (one(i).to_bits() >> 16) as u16).collect()
        };
        rig.write(selector.predecessor, &bf16(1));
        rig.write(selector.successor, &bf16(2));
        rig.write(selector.query, &[0.8f32; 32]);
        for row in 0..rows {
            let logits = logits_after(WORDS, 4.0, 100, row as u32);
            rig.write(top_k.logits.rows(row, 1, 4 * WORDS), &logits);
        }
        let propose = Propose {
            candidates: top_k.ids,
            values: top_k.values,
            selector: Some(selector).filter(|_| with_selector),
            params: rig.op.params,
            ids: rig.op.ids,
            proposals: rig.op.proposals.expect("the rig has proposals"),
            lanes: rig.op.lanes,
            draft_stride: 2,
            draft_first: 0,
        };
        Drafting { top_k, propose }
    }

    /// The proposals of a round, left on the device for it.
    fn propose(&self, rig: &mut Rig, round: &Round) -> [u32; 2] {
        rig.prepare(0, round);
        rig.dev.run(&self.top_k);
        rig.dev.run(&self.propose);
        let ids = rig.words(rig.op.ids);
        [ids[1], ids[2]]
    }
}

/// Pearson's statistic of the first two tokens of `rounds` texts against the target, as standard
/// deviations from its mean.
fn chi_square(params: SamplerParams, rounds: u32, text: &mut dyn FnMut(u32) -> Vec<u32>) -> f64 {
    let p = |before, last| {
        let logits = target_logits(before, last);
        let max = logits.iter().fold(0.0f32, |m, &z| m.max(z));
        let w: Vec<u32> =
            logits.iter().map(|&z| weight((z - max) * params.inv_temperature)).collect();
        (0..WORDS).map(|t| share(&w, t)).collect::<Vec<f64>>()
    };
    let first = p(0, 1);
    let mut counts = vec![0.0; WORDS * WORDS];
    for seed in 0..rounds {
        let text = text(seed);
        let second = text.get(1).copied().unwrap_or_else(|| {
            let u = f64::from(philox([seed, 0, 0, 0], [77, 77])[0]) / 4_294_967_296.0;
            let mut sum = 0.0;
            let row = p(1, text[0]);
            row.iter()
                .position(|p| {
                    sum += p;
                    u < sum
                })
                .unwrap_or(0) as u32
        });
        counts[text[0] as usize * WORDS + second as usize] += 1.0;
    }
    let (mut statistic, mut cells) = (0.0, 0.0);
    let (mut rare_expected, mut rare) = (0.0, 0.0);
    for a in 0..WORDS {
        for (b, second) in p(1, a as u32).into_iter().enumerate() {
            let expected = first[a] * second * f64::from(rounds);
            let got: f64 = counts[a * WORDS + b];
            if expected < 5.0 {
                rare_expected += expected;
                rare += got;
                continue;
            }
            statistic += (got - expected).powi(2) / expected;
            cells += 1.0;
        }
    }
    statistic += (rare - rare_expected).powi(2) / rare_expected.max(1.0);
    (statistic - cells) / (2.0f64 * cells).sqrt()
}

fn params(rule: Rule, seed: u32) -> SamplerParams {
    SamplerParams {
        rule: rule as u32,
        seed: [seed, 1],
        inv_temperature: 0.8,
        ..SamplerParams::default()
    }
}

/// A text that begins with one round at context (0, 1): proposals by the draft pass, judged by
/// the op.
fn round_on_device(rig: &mut Rig, drafting: &Drafting, rule: Rule, seed: u32) -> Vec<u32> {
    let blank = [vec![0.0; WORDS], vec![0.0; WORDS], vec![0.0; WORDS]];
    let params = params(rule, seed);
    let round = Round { params, anchor: 1, pos: 50, drafts: &[], logits: &blank };
    let [a, b] = drafting.propose(rig, &round);
    for (i, (before, last)) in [(0, 1), (1, a), (a, b)].into_iter().enumerate() {
        let row = rig.op.logits.rows(i, 1, 4 * rig.op.stride).slice(0, 4 * WORDS);
        rig.write(row, &target_logits(before, last));
    }
    rig.launch();
    rig.outcome(0).tokens
}

#[test]
fn texts_follow_the_target_by_chi_square() {
    for rule in [Rule::Token, Rule::Block, Rule::Invariant] {
        for with_selector in [false, true] {
            let mut rig = Rig::new(3, WORDS);
            let drafting = Drafting::new(&mut rig, with_selector);
            let mut accepted = 0;
            let far = chi_square(params(rule, 0), 10_000, &mut |seed| {
                let text = round_on_device(&mut rig, &drafting, rule, seed);
                accepted += text.len() - 1;
                text
            });
            assert!(far.abs() < 4.0, "{rule:?}, selector {with_selector}: {far} deviations");
            assert!(accepted > 4_000, "{rule:?}: {accepted} accepted");
        }
    }
}

/// The arm that must fail: the same chi-square test of a rule that draws from p after a rejection.
#[test]
fn chi_square_notices_a_wrong_rule() {
    let mut rig = Rig::new(3, WORDS);
    let drafting = Drafting::new(&mut rig, false);
    let far = chi_square(params(Rule::Token, 0), 10_000, &mut |seed| {
        let right = round_on_device(&mut rig, &drafting, Rule::Token, seed);
        match right.len() {
            1 => {
                // As if the residual were the target's row: a plain draw.
                let logits = [target_logits(0, 1)];
                let params = params(Rule::Token, seed ^ 0x8000_0000);
                rig.round(&Round { params, anchor: 1, pos: 9, drafts: &[], logits: &logits }).tokens
            }
            _ => right,
        }
    });
    assert!(far > 8.0, "{far}");
}
