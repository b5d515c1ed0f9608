//! Cases every device must pass, and the promises about whole texts.

use super::rig::{Outcome, Rig, Round, logits_after};
use crate::testing::{Builder, Tolerance, conformance};
use crate::{
    Accept, LaneResult, LaneStep, Lanes, LogitBias, LogitRows, ONE, Op, Proposals, Rule,
    SamplerParams, TOKEN_IN_PROMPT,
};

crate::testing::cases!(agrees_with_the_definition, penalties_follow_the_block_everywhere,);

fn greedy() -> SamplerParams {
    SamplerParams::default()
}

fn sampled(rule: Rule, seed: u64) -> SamplerParams {
    SamplerParams {
        rule: rule as u32,
        seed: SamplerParams::seed_words(seed),
        ..SamplerParams::default()
    }
}

const RULES: [Rule; 4] = [Rule::Greedy, Rule::Token, Rule::Block, Rule::Invariant];

/// A one-lane round of point-mass proposals at position 10.
fn judge(rig: &mut Rig, params: SamplerParams, drafts: &[u32], logits: &[Vec<f32>]) -> Outcome {
    let drafts: Vec<_> = drafts.iter().map(|&d| (d, &[][..], &[][..])).collect();
    rig.round(&Round { params, anchor: 3, pos: 10, drafts: &drafts, logits })
}

/// Logits of a row whose largest is at `token`.
fn peak(valid: usize, token: usize) -> Vec<f32> {
    (0..valid).map(|t| if t == token { 2.0 } else { -(t as f32) }).collect()
}

#[test]
fn greedy_keeps_what_agrees_and_one_more() {
    let mut rig = Rig::new(4, 9);
    let rows: Vec<_> = [4, 5, 6, 7].map(|t| peak(9, t)).to_vec();
    for (drafts, tokens) in [
        ([4, 5, 6], vec![4, 5, 6, 7]),
        ([4, 5, 1], vec![4, 5, 6]),
        ([4, 1, 6], vec![4, 5]),
        ([1, 5, 6], vec![4]),
    ] {
        let kept = tokens.len() as u32;
        let got = judge(&mut rig, greedy(), &drafts, &rows);
        assert_eq!(got.tokens, tokens);
        assert_eq!((got.proposed, got.flags, got.anchor), (3, 0, tokens[tokens.len() - 1]));
        let step = got.step;
        assert_eq!((step.pos, step.pending, step.parity, step.rows), (10 + kept, kept, 0, 4));
        let draft_ids = rig.op.draft_ids.expect("the rig has them").slice(0, 4);
        assert_eq!(rig.words(draft_ids), [got.anchor]);
    }
    let counts = rig.counts(0);
    assert_eq!(rig.words(counts), [0, 0, 0, 0, 4, 3, 2, 1, 0]);
}

#[test]
fn ties_padding_and_odd_numbers() {
    let mut rig = Rig::new(1, 5);
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for (row, token) in [
        // The rig pads rows with 1e30 behind the five ids.
        ([1.0, 2.0, 2.0, 0.0, 2.0], 1),
        ([nan, -inf, -5.0, nan, -6.0], 2),
        ([1.0, inf, 0.0, inf, f32::MAX], 1),
        ([-0.0, 0.0, -0.0, -1.0, -1.0], 0),
    ] {
        for rule in RULES {
            let params = SamplerParams { top_k: 1, ..sampled(rule, 1) };
            let got = judge(&mut rig, params, &[], &[row.to_vec()]);
            assert_eq!((got.tokens, got.flags), (vec![token], 0), "{row:?} {rule:?}");
        }
    }
    for row in [[nan; 5], [-inf; 5]] {
        for rule in RULES {
            let got = judge(&mut rig, sampled(rule, 1), &[], &[row.to_vec()]);
            assert_eq!((got.tokens, got.flags), (vec![0], LaneResult::DEGENERATE));
        }
    }
    let mask = rig.op.masks.expect("the rig has masks");
    rig.write(mask, &[0b01100u32]);
    for rule in RULES {
        let params = SamplerParams { flags: SamplerParams::MASKED, ..sampled(rule, 1) };
        let got = judge(&mut rig, params, &[], &[vec![nan; 5]]);
        assert_eq!((got.tokens, got.flags), (vec![2], LaneResult::DEGENERATE));
    }
}

#[test]
fn stop_ids_and_the_end_cut_and_freeze() {
    let mut rig = Rig::new(4, 9);
    let rows: Vec<_> = [4, 5, 6, 7].map(|t| peak(9, t)).to_vec();
    let mut stop = greedy();
    (stop.stop[0], stop.stop[1], stop.stops) = (8, 5, 2);
    let got = judge(&mut rig, stop, &[4, 5, 6], &rows);
    assert_eq!((got.tokens.as_slice(), got.flags), (&[4, 5][..], LaneResult::STOPPED));
    assert_eq!((got.step.pos, got.step.pending, got.step.rows, got.anchor), (12, 2, 0, 5));
    stop.stops = 1;
    assert_eq!(judge(&mut rig, stop, &[4, 5, 6], &rows).tokens, [4, 5, 6, 7]);
    for (end, kept, flags) in [(11, 0, 2), (12, 1, 2), (14, 3, 2), (15, 4, 2), (16, 4, 0)] {
        let got = judge(&mut rig, SamplerParams { end, ..greedy() }, &[4, 5, 6], &rows);
        assert_eq!((got.tokens.len(), got.flags), (kept, flags), "end {end}");
        assert_eq!(got.step.rows, if flags == 0 { 4 } else { 0 });
        assert_eq!(got.anchor, if kept == 0 { 3 } else { got.tokens[kept - 1] });
    }
    // A frozen lane keeps nothing, and only takes a step.
    let frozen =
        LaneStep { rows: 0, pos: 12, slot: 1, pending: 2, parity: 0, ..LaneStep::default() };
    rig.write(rig.op.lanes.step, &[frozen]);
    let counts = rig.words(rig.counts(0));
    rig.launch();
    let got = rig.outcome(0);
    assert_eq!((got.tokens.len(), got.flags, got.proposed), (0, 0, 0));
    assert_eq!(got.step, LaneStep { pending: 0, parity: 1, ..frozen });
    assert_eq!(rig.words(rig.counts(0)), counts);
}

#[test]
fn the_end_of_a_prefill_emits_one_token() {
    let mut rig = Rig::new(4, 9);
    rig.op.logit_rows = LogitRows::Last;
    for rule in RULES {
        let params = SamplerParams { top_k: 1, ..sampled(rule, 7) };
        rig.prepare(0, &Round { params, anchor: 0, pos: 64, drafts: &[], logits: &[peak(9, 6)] });
        let step =
            LaneStep { rows: 4, pos: 64, slot: 1, pending: 3, parity: 1, ..LaneStep::default() };
        rig.write(rig.op.lanes.step, &[step]);
        rig.launch();
        let got = rig.outcome(0);
        assert_eq!((got.tokens.as_slice(), got.anchor, got.proposed), (&[6][..], 6, 0));
        assert_eq!(got.step, LaneStep { pos: 68, pending: 0, parity: 0, ..step });
    }
    // The same random numbers as a plain step at the same position.
    let row = logits_after(9, 3.0, 1, 2);
    for rule in RULES {
        for seed in 0..20 {
            let round = |pos| Round {
                params: sampled(rule, seed),
                anchor: 2,
                pos,
                drafts: &[],
                logits: std::slice::from_ref(&row),
            };
            rig.op.logit_rows = LogitRows::Last;
            rig.prepare(0, &round(64));
            let step = LaneStep { rows: 4, pos: 64, slot: 1, ..LaneStep::default() };
            rig.write(rig.op.lanes.step, &[step]);
            rig.launch();
            let prefill = rig.outcome(0).tokens;
            rig.op.logit_rows = LogitRows::All;
            assert_eq!(rig.round(&round(67)).tokens, prefill);
        }
    }
}

#[test]
fn log_probabilities_are_those_of_the_raw_logits() {
    let mut rig = Rig::new(3, 70);
    let rows: Vec<_> = (0..3).map(|i| logits_after(70, 12.0, i, 1)).collect();
    let best: Vec<u32> = rows
        .iter()
        .map(|row| (0..70).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("tokens") as u32)
        .collect();
    for rule in RULES {
        // Everything that changes the distribution is on, and changes nothing here.
        let params = SamplerParams {
            flags: SamplerParams::LOGPROBS,
            inv_temperature: 1e4,
            repetition: 1.0001,
            top_k: 3,
            top_p: ONE / 2,
            ..sampled(rule, 3)
        };
        let got = judge(&mut rig, params, &best[..2], &rows);
        assert_eq!(got.tokens, best);
        for (i, row) in rows.iter().enumerate() {
            let max = f64::from(row[best[i] as usize]);
            let sum: f64 = row.iter().map(|&z| (f64::from(z) - max).exp()).sum();
            assert!((f64::from(got.logprobs[i]) + sum.ln()).abs() < 2e-6);
            assert!((f64::from(got.log_sums[i]) - max - sum.ln()).abs() < 2e-6);
        }
    }
    let quiet = judge(&mut rig, greedy(), &best[..2], &rows);
    assert_eq!(quiet.logprobs, [0.0; 3]);
}

/// Tokens that one row can emit under these parameters, found by drawing often.
fn support(rig: &mut Rig, params: SamplerParams, row: &[f32]) -> Vec<u32> {
    let draws = (0..400).map(|seed| {
        let seed = SamplerParams::seed_words(seed);
        judge(rig, SamplerParams { seed, ..params }, &[], &[row.to_vec()]).tokens[0]
    });
    let mut seen: Vec<u32> = draws.collect();
    seen.sort_unstable();
    seen.dedup();
    seen
}

#[test]
fn cuts_keep_what_they_should() {
    // Probabilities .4 .3 .2 .1, and two tokens of no weight.
    let row: Vec<f32> = [0.2, 0.4, 0.0, 0.1, 0.3, 0.0]
        .map(|p: f64| if p == 0.0 { -80.0 } else { p.ln() as f32 })
        .to_vec();
    let all = vec![0, 1, 3, 4];
    let mut rig = Rig::new(1, 6);
    for rule in [Rule::Token, Rule::Block, Rule::Invariant] {
        let base = sampled(rule, 0);
        let top_k = |top_k| SamplerParams { top_k, ..base };
        let top_p = |p| SamplerParams { top_p: SamplerParams::top_p_of(p), ..base };
        let min_p = |p| SamplerParams { min_logit: SamplerParams::min_logit_of(p, 1.0), ..base };
        for (params, want) in [
            (top_k(0), all.clone()),
            (top_k(1), vec![1]),
            (top_k(2), vec![1, 4]),
            (top_k(6), all.clone()),
            (top_k(7), all.clone()),
            (top_k(u32::MAX), all.clone()),
            (top_p(0.0), vec![1]),
            (top_p(0.39), vec![1]),
            (top_p(0.41), vec![1, 4]),
            (top_p(0.69), vec![1, 4]),
            (top_p(0.71), vec![0, 1, 4]),
            (top_p(0.91), all.clone()),
            (top_p(1.0), all.clone()),
            (min_p(0.0), all.clone()),
            (min_p(0.2), all.clone()),
            (min_p(0.26), vec![0, 1, 4]),
            (min_p(0.7), vec![1, 4]),
            (min_p(1.0), vec![1]),
            // top_p counts the mass of what top_k left: .4 / .7 of it stands before token 4.
            (SamplerParams { top_k: 2, ..top_p(0.5) }, vec![1]),
            (SamplerParams { top_k: 2, ..top_p(0.6) }, vec![1, 4]),
            // min_p compares after the temperature: at T = 2, (.1 / .4)^½ = .5.
            (
                SamplerParams {
                    inv_temperature: 0.5,
                    min_logit: SamplerParams::min_logit_of(0.49, 2.0),
                    ..base
                },
                all.clone(),
            ),
            (
                SamplerParams {
                    inv_temperature: 0.5,
                    min_logit: SamplerParams::min_logit_of(0.51, 2.0),
                    ..base
                },
                vec![0, 1, 4],
            ),
        ] {
            assert_eq!(support(&mut rig, params, &row), want, "{params:?}");
        }
        // A bias lifts, a mask forbids.
        rig.write(rig.biases(0), &[LogitBias { token: 2, bias: 100.0 }]);
        assert_eq!(support(&mut rig, SamplerParams { biases: 1, ..base }, &row), [2]);
        let masks = rig.op.masks.expect("the rig has masks");
        rig.write(masks, &[0b001001u32]);
        let masked = SamplerParams { flags: SamplerParams::MASKED, ..base };
        assert_eq!(support(&mut rig, masked, &row), [0, 3]);
    }
}

#[derive(Clone, Copy, Debug)]
enum Drafter {
    None,
    Random,
    AlwaysRight,
    AlwaysWrong,
}

/// `count` tokens of the test model, in rounds of up to 4 rows.
fn text(
    rig: &mut Rig,
    params: SamplerParams,
    drafter: Drafter,
    truth: &[u32],
    count: usize,
) -> Vec<u32> {
    let valid = rig.op.valid;
    rig.write(rig.counts(0), &vec![0u32; valid]);
    rig.write(rig.counts(0), &[0, TOKEN_IN_PROMPT, TOKEN_IN_PROMPT]);
    let mut tokens = vec![1, 2];
    while tokens.len() < count + 2 {
        let done = tokens.len() - 2;
        let proposal = |i: usize| {
            let right = truth.get(done + i).copied().unwrap_or(0);
            match drafter {
                Drafter::Random => (done * 7 + i * 3) as u32 % valid as u32,
                Drafter::AlwaysWrong => (right + 1) % valid as u32,
                _ => right,
            }
        };
        let n = if matches!(drafter, Drafter::None) { 0 } else { 3 };
        let drafts: Vec<_> = (0..n).map(|i| (proposal(i), &[][..], &[][..])).collect();
        let mut context = tokens.clone();
        context.extend(drafts.iter().map(|d| d.0));
        let logits: Vec<_> = (0..=n)
            .map(|i| {
                let at = tokens.len() + i;
                logits_after(valid, 6.0, context[at - 2], context[at - 1])
            })
            .collect();
        let (anchor, pos) = (tokens[tokens.len() - 1], tokens.len() as u32 - 1);
        let got = rig.round(&Round { params, anchor, pos, drafts: &drafts, logits: &logits });
        match drafter {
            Drafter::AlwaysRight if done + 4 <= truth.len() => assert_eq!(got.tokens.len(), 4),
            Drafter::AlwaysWrong if done < truth.len() => assert_eq!(got.tokens.len(), 1),
            _ => {}
        }
        tokens.extend(&got.tokens);
    }
    tokens[2..count + 2].to_vec()
}

/// Greedy and drafter-invariant texts do not depend on the drafter, with every option that can
/// change a distribution, penalties along the block included.
#[test]
fn the_text_does_not_depend_on_the_drafter() {
    let mut rig = Rig::new(4, 40);
    rig.write(
        rig.biases(0),
        &[LogitBias { token: 5, bias: 1.5 }, LogitBias { token: 7, bias: -2.0 }],
    );
    let options = [
        SamplerParams::default(),
        SamplerParams { presence: 1.5, frequency: 0.3, repetition: 1.2, ..greedy() },
        SamplerParams { top_k: 5, biases: 2, presence: 2.0, ..greedy() },
        SamplerParams { top_p: ONE / 2, frequency: 1.0, inv_temperature: 0.7, ..greedy() },
    ];
    for (i, options) in options.into_iter().enumerate() {
        for rule in [Rule::Greedy, Rule::Invariant] {
            for seed in 0..25 {
                let seed = SamplerParams::seed_words(seed);
                let params = SamplerParams { seed, rule: rule as u32, ..options };
                let truth = text(&mut rig, params, Drafter::None, &[], 24);
                for drafter in [Drafter::Random, Drafter::AlwaysRight, Drafter::AlwaysWrong] {
                    let got = text(&mut rig, params, drafter, &truth, 24);
                    assert_eq!(got, truth, "{rule:?} options {i} seed {seed:?} {drafter:?}");
                }
            }
        }
    }
}

/// The arm that must fail: ignoring the block's own proposals gives another text.
#[test]
fn penalties_do_follow_the_block() {
    let mut rig = Rig::new(2, 4);
    let rows = [vec![0.0, 0.0, 2.0, 1.0], vec![0.0, 0.0, 2.0, 1.0]];
    let params = SamplerParams { presence: 5.0, ..greedy() };
    assert_eq!(judge(&mut rig, greedy(), &[2], &rows).tokens, [2, 2]);
    rig.write(rig.counts(0), &[0u32; 4]);
    assert_eq!(judge(&mut rig, params, &[2], &rows).tokens, [2, 3]);
    assert_eq!(rig.words(rig.counts(0)), [0, 0, 1, 1]);
    // A proposal that stands twice counts twice for the third row.
    let mut rig = Rig::new(3, 4);
    let rows = vec![vec![0.0, 0.0, 2.0, 1.0]; 3];
    let params = SamplerParams { frequency: 0.6, ..greedy() };
    assert_eq!(judge(&mut rig, params, &[2, 2], &rows).tokens, [2, 2, 3]);
}

/// Both arms on every device: a kernel that ignored the block's own proposals would give the first
/// arm's text in the second.
#[cfg_attr(test, test)]
fn penalties_follow_the_block_everywhere() {
    for (presence, text) in [(0.0, [2, 2]), (5.0, [2, 3])] {
        for rule in RULES {
            let label = format!("accept, presence {presence}, {}", rule.name());
            conformance(&label, Tolerance::exact(), |b| {
                let params = SamplerParams { presence, top_k: 1, ..sampled(rule, 5) };
                let step = LaneStep { rows: 2, pos: 10, ..LaneStep::default() };
                // Two tokens, one proposal, nothing cut; then the tokens, and no log-probabilities.
                let result = [2, 1, 0, 0, text[0], text[1], 0, 0, 0, 0];
                b.expect("results", &result.map(f32::from_bits));
                Accept {
                    logits: b.f32(&[0.0, 0.0, 2.0, 1.0, 0.0, 0.0, 2.0, 1.0]),
                    logit_rows: LogitRows::All,
                    ids: b.pod(&[1u32, 2]),
                    draft_ids: None,
                    proposals: None,
                    params: b.pod(&[params]),
                    counts: b.pod(&[0u32; 4]),
                    biases: b.pod::<LogitBias>(&[]),
                    bias_capacity: 0,
                    masks: None,
                    results: b.out_f32("results", result.len()),
                    scratch: b.bytes(&vec![0xFF; Accept::scratch_bytes(2, 4)]),
                    lanes: Lanes { step: b.pod(&[step]), count: 1, rows: 2, max_rows: 2 },
                    stride: 4,
                    valid: 4,
                }
            });
        }
    }
}

/// Where top-p can't stop at the likeliest tokens, and where it only seems to.
#[test]
fn top_p_at_the_edges_of_its_shortcuts() {
    let mut rig = Rig::new(1, 400);
    let draw_all = |rig: &mut Rig, params, row: &[f32]| {
        let seen = support(rig, params, row);
        (seen.len(), seen[0], seen[seen.len() - 1])
    };
    // All weights are equal although the logits rise: the lowest ids stay, not the largest logits.
    let rising: Vec<f32> = (0..400).map(|t| t as f32 * 0.01).collect();
    let flat = SamplerParams {
        inv_temperature: 1e-10,
        top_p: SamplerParams::top_p_of(0.01),
        ..sampled(Rule::Token, 0)
    };
    assert_eq!(draw_all(&mut rig, flat, &rising), (4, 0, 3));
    // One heavy token and 399 equal ones: just one of them stays.
    let mut row = vec![-3.0f32; 400];
    row[70] = 0.0;
    let light = (-3.0f64).exp();
    let top_p = SamplerParams::top_p_of(((1.0 + light / 2.0) / (1.0 + 399.0 * light)) as f32);
    let params = SamplerParams { top_p, ..sampled(Rule::Token, 0) };
    assert_eq!(draw_all(&mut rig, params, &row), (2, 0, 70));
}

/// Random rounds of several lanes, each with its own rule and options.
fn random_case(b: &mut Builder, seed: u64, valid: usize, lanes: usize, max_rows: usize) -> Accept {
    b.reseed(seed);
    let pick = |b: &mut Builder, n: usize| (b.random() % n as u64) as usize;
    let (k, stride, slots) = (6.min(valid), valid + pick(b, 9), lanes + 2);
    let rows = lanes * max_rows;
    let mut logits = b.normal_values(rows * stride, 4.0);
    if seed.is_multiple_of(3) {
        // Many ties.
        logits.iter_mut().for_each(|z| *z = z.round() * 0.5);
    }
    for _ in 0..pick(b, 4) * valid / 8 {
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0, 1.0, -0.0];
        let at = pick(b, logits.len());
        logits[at] = odd[pick(b, 6)];
    }
    let mut params = vec![SamplerParams::default(); slots];
    let mut biases = vec![LogitBias::default(); slots * 3];
    let top_ks = [0, 0, 1, 2, 5, 40, 128, 129, 256, 257, 300, valid, valid + 1];
    for p in &mut params {
        p.rule = pick(b, 4) as u32;
        p.seed = [b.random() as u32, b.random() as u32];
        p.flags = pick(b, 4) as u32;
        p.inv_temperature = [0.1, 0.5, 1.0, 1.0, 2.0, 30.0][pick(b, 6)];
        p.top_k = top_ks[pick(b, top_ks.len())] as u32;
        p.top_p = SamplerParams::top_p_of([0.0, 0.2, 0.5, 0.9, 0.95, 0.999, 1.0, 1.0][pick(b, 8)]);
        let min_p = [0.0, 0.0, 0.01, 0.1, 0.5, 1.0][pick(b, 6)];
        p.min_logit = SamplerParams::min_logit_of(min_p, 1.0 / p.inv_temperature);
        p.presence = [0.0, 0.0, 1.5, -1.0][pick(b, 4)];
        p.frequency = [0.0, 0.0, 0.3, 50.0][pick(b, 4)];
        p.repetition = [1.0, 1.0, 1.1, 0.5][pick(b, 4)];
        p.biases = pick(b, 4) as u32;
        p.end = if pick(b, 5) == 0 { 100 + pick(b, 12) as u32 } else { u32::MAX };
        p.stops = pick(b, 3) as u32;
        p.stop[0] = pick(b, valid) as u32;
    }
    for bias in &mut biases {
        // An id beyond the vocabulary is ignored.
        *bias = LogitBias { token: pick(b, valid + 2) as u32, bias: b.uniform() * 8.0 - 4.0 };
    }
    let counts: Vec<u32> = (0..slots * valid)
        .map(|_| [0, 0, 0, 1, 3, TOKEN_IN_PROMPT, TOKEN_IN_PROMPT | 2][pick(b, 7)])
        .collect();
    let words = valid.div_ceil(32);
    let masks: Vec<u32> =
        (0..rows * words).map(|_| [u32::MAX, b.random() as u32, 0][pick(b, 3)]).collect();
    let steps: Vec<LaneStep> = (0..lanes)
        .map(|lane| LaneStep {
            row0: (lane * max_rows) as u32,
            rows: pick(b, max_rows + 1) as u32,
            pos: 95 + pick(b, 10) as u32,
            slot: ((lane * 3 + 1) % slots) as u32,
            pending: 1,
            parity: pick(b, 2) as u32,
            ..LaneStep::default()
        })
        .collect();
    // Proposals: likely tokens of the row, so that acceptance happens; some absurd.
    let best = |row: usize, n: usize| {
        let row = &logits[row * stride..][..valid];
        let mut order: Vec<u32> = (0..valid as u32).collect();
        let key = |t: u32| if row[t as usize].is_nan() { f32::MIN } else { row[t as usize] };
        order.sort_by(|&a, &b| key(b).total_cmp(&key(a)));
        order[..n].to_vec()
    };
    let mut ids = vec![0u32; rows];
    let n = lanes * (max_rows - 1);
    let (mut q_counts, mut q_ids, mut q_weights) = (vec![0; n], vec![0; n * k], vec![0; n * k]);
    for lane in 0..lanes {
        for e in 1..max_rows {
            let (row, at) = (lane * max_rows + e, lane * (max_rows - 1) + e - 1);
            let candidates = best(row - 1, k);
            let chosen = pick(b, k);
            ids[row] = if pick(b, 12) == 0 { u32::MAX } else { candidates[chosen] };
            q_counts[at] = if pick(b, 3) == 0 { 0 } else { k as u32 };
            for (i, &id) in candidates.iter().enumerate() {
                q_ids[at * k + i] = id;
                q_weights[at * k + i] = if i == chosen { ONE } else { b.random() as u32 % ONE };
            }
        }
    }
    let proposals = [q_counts, q_ids, q_weights].concat();
    let masked = seed.is_multiple_of(2);
    let op = Accept {
        logits: b.f32(&logits),
        logit_rows: LogitRows::All,
        ids: b.pod(&ids),
        draft_ids: Some(b.pod(&vec![9u32; rows])),
        proposals: Some(Proposals { buf: b.pod(&proposals), k })
            .filter(|_| !seed.is_multiple_of(5)),
        params: b.pod(&params),
        counts: b.pod(&counts),
        biases: b.pod(&biases),
        bias_capacity: 3,
        masks: if masked { Some(b.pod(&masks)) } else { None },
        results: b.out_bytes("results", Accept::results_bytes(lanes, max_rows)),
        scratch: b.bytes(&vec![0xFF; Accept::scratch_bytes(rows, valid)]),
        lanes: Lanes { step: b.pod(&steps), count: lanes, rows, max_rows },
        stride,
        valid,
    };
    b.updated_bytes("ids", op.ids);
    b.updated_bytes("draft_ids", op.draft_ids.expect("set above"));
    b.updated_bytes("counts", op.counts);
    b.updated_bytes("step", op.lanes.step);
    op
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    for seed in 0..80 {
        let valid = [1, 2, 5, 31, 64, 65, 300, 777][seed as usize % 8];
        let (lanes, max_rows) = [(1, 1), (1, 8), (3, 4), (2, 17), (5, 2)][seed as usize % 5];
        conformance(&format!("accept {seed}"), Tolerance::exact(), |b| {
            random_case(b, seed, valid, lanes, max_rows)
        });
    }
    for seed in 80..86 {
        conformance(&format!("accept {seed}"), Tolerance::exact(), |b| {
            random_case(b, seed, 6000, 2, 5)
        });
    }
    for (seed, valid, lanes, max_rows) in [
        (86, 12_345, 2, 3),
        (87, 49_152, 1, 4),
        (88, 248_320, 1, 3),
        (89, 248_320, 2, 2),
        (91, 1 << 20, 1, 2),
    ] {
        conformance(&format!("accept {seed}"), Tolerance::exact(), |b| {
            random_case(b, seed, valid, lanes, max_rows)
        });
    }
}

/// A lane's outcome is the same alone and among others, in another slot, with other rows behind.
#[test]
fn a_lane_does_not_depend_on_its_neighbours() {
    for seed in 0..40 {
        let rule = RULES[seed as usize % 4];
        let params = SamplerParams { presence: 0.5, top_k: 20, ..sampled(rule, seed) };
        let logits: Vec<_> = (0..4).map(|i| logits_after(50, 5.0, i, seed as u32)).collect();
        let drafts = [(3, &[][..], &[][..]), (9, &[][..], &[][..]), (4, &[][..], &[][..])];
        let round = Round { params, anchor: 1, pos: 20, drafts: &drafts, logits: &logits };
        let alone = Rig::new(4, 50).round(&round);
        let mut rig = Rig::with(crate::HostMode::Simd, 3, 8, 50);
        for lane in [0, 2] {
            let other = sampled(Rule::Token, 77);
            let logits = [logits_after(50, 3.0, 7, lane)];
            let round = Round { params: other, anchor: 2, pos: 5, drafts: &[], logits: &logits };
            rig.prepare(lane as usize, &round);
        }
        rig.prepare(1, &round);
        rig.launch();
        let among = rig.outcome(1);
        assert_eq!(among.tokens, alone.tokens);
        assert_eq!((among.flags, among.step.pos), (alone.flags, alone.step.pos));
    }
}

#[test]
fn refuses_what_it_cannot_do() {
    let op = Rig::new(4, 40).op;
    let refused = |op: Accept| op.check().is_err();
    assert!(!refused(op));
    let lanes = op.lanes;
    assert!(refused(Accept { valid: 0, ..op }));
    assert!(refused(Accept { valid: op.stride + 1, ..op }));
    assert!(refused(Accept { stride: 1 << 21, ..op }));
    assert!(refused(Accept { lanes: Lanes { max_rows: 33, ..lanes }, ..op }));
    assert!(refused(Accept { lanes: Lanes { max_rows: 0, ..lanes }, ..op }));
    assert!(refused(Accept { lanes: Lanes { rows: 5, ..lanes }, ..op }));
    assert!(refused(Accept { lanes: Lanes { rows: usize::MAX, ..lanes }, ..op }));
    assert!(refused(Accept { lanes: Lanes { count: 2, ..lanes }, ..op }));
    assert!(refused(Accept { bias_capacity: 5, ..op }));
    assert!(refused(Accept { counts: op.counts.slice(0, 4), ..op }));
    assert!(refused(Accept { scratch: op.scratch.slice(0, 4), ..op }));
    assert!(refused(Accept { results: op.results.slice(0, 4), ..op }));
    assert!(refused(Accept { params: op.params.slice(0, 95), ..op }));
    let proposals = op.proposals.expect("the rig has proposals");
    assert!(refused(Accept { proposals: Some(Proposals { k: 33, ..proposals }), ..op }));
    assert!(refused(Accept { proposals: Some(Proposals { k: 9, ..proposals }), ..op }));
}
