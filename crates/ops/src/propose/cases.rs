//! Cases every device must pass.

use crate::testing::{Builder, Tolerance, conformance};
use crate::{LaneStep, Lanes, ONE, Op, Proposals, Propose, Rule, SamplerParams, Selector, random};

crate::testing::cases!(agrees_with_the_definition,);

struct Case<'a> {
    /// One step and parameters for each lane.
    lanes: &'a [(LaneStep, SamplerParams)],
    max_rows: usize,
    /// `[draft rows, k]`.
    candidates: &'a [u32],
    values: &'a [f32],
    k: usize,
    anchors: u32,
}

fn build(b: &mut Builder, case: &Case) -> Propose {
    let (count, max_rows, k) = (case.lanes.len(), case.max_rows, case.k);
    let rows = count * max_rows;
    let steps: Vec<_> = case.lanes.iter().map(|lane| lane.0).collect();
    let params: Vec<_> = case.lanes.iter().map(|lane| lane.1).collect();
    let mut ids = vec![u32::MAX; rows];
    for step in &steps {
        if step.rows > 0 {
            ids[step.row0 as usize] = case.anchors + step.slot;
        }
    }
    let proposals = vec![7u32; Proposals::bytes(count, max_rows, k) / 4];
    let op = Propose {
        candidates: b.pod(case.candidates),
        values: b.f32(case.values),
        selector: None,
        params: b.pod(&params),
        ids: b.pod(&ids),
        proposals: Proposals { buf: b.pod(&proposals), k },
        lanes: Lanes { step: b.pod(&steps), count, rows, max_rows },
        draft_stride: max_rows - 1,
        draft_first: 0,
    };
    b.updated_bytes("ids", op.ids);
    b.updated_bytes("proposals", op.proposals.buf);
    op
}

fn step(lane: usize, max_rows: usize, rows: usize) -> LaneStep {
    LaneStep {
        row0: (lane * max_rows) as u32,
        rows: rows as u32,
        pos: 20 + lane as u32,
        slot: lane as u32,
        ..LaneStep::default()
    }
}

fn params(rule: Rule, seed: u64) -> SamplerParams {
    SamplerParams {
        rule: rule as u32,
        seed: SamplerParams::seed_words(seed),
        inv_temperature: 0.7,
        ..SamplerParams::default()
    }
}

/// The ids and the proposals after a run on the host.
fn run(case: &Case, finish: impl Fn(&mut Builder, Propose) -> Propose) -> (Vec<u32>, Vec<u32>) {
    let mut dev = crate::Host::new(crate::simd::Isa::detect(), 1);
    let mut b = Builder::new(&mut dev);
    let op = build(&mut b, case);
    let op = finish(&mut b, op);
    op.check().expect("a supported geometry");
    let words = |dev: &mut crate::Host, buf: crate::Buf| {
        let mut words = vec![0u32; buf.bytes / 4];
        crate::Device::read(dev, buf, bytemuck::cast_slice_mut(&mut words));
        words
    };
    crate::Device::run(&mut dev, &op);
    crate::Device::sync(&mut dev).expect("the op to run");
    (words(&mut dev, op.ids), words(&mut dev, op.proposals.buf))
}

#[test]
fn greedy_takes_the_first_of_the_largest() {
    let lanes = [(step(0, 4, 4), params(Rule::Greedy, 1))];
    let nan = f32::NAN;
    let case = Case {
        lanes: &lanes,
        max_rows: 4,
        candidates: &[4, 5, 6, 7, 8, 9, 1, 2, 3],
        values: &[3.0, 3.0, 1.0, nan, 1.0, 2.0, nan, nan, nan],
        k: 3,
        anchors: 50,
    };
    let (ids, proposals) = run(&case, |_, op| op);
    assert_eq!(ids, [50, 4, 9, 1]);
    assert_eq!(proposals[..3], [0, 0, 0], "point masses");
}

/// Codebooks chosen so that the selector overturns the logits, along the path.
#[test]
fn the_selector_follows_the_path() {
    let lanes = [(step(0, 3, 3), params(Rule::Greedy, 1))];
    let case = Case {
        lanes: &lanes,
        max_rows: 3,
        candidates: &[1, 2, 3, 4],
        values: &[1.0, 0.0, 1.0, 0.0],
        k: 2,
        anchors: 0,
    };
    let bf16 = |x: f32| (x.to_bits() >> 16) as u16;
    let (ids, _) = run(&case, |b, op| {
        let (vocab, rank) = (5, 16);
        let (mut predecessor, mut successor) = (vec![0; vocab * rank], vec![0; vocab * rank]);
        // After the anchor 0, token 2 gains 2 · 1.5 · 1; after token 2, token 4 gains as much.
        for (r, before, after) in [(0, 0, 2), (9, 2, 4)] {
            predecessor[before * rank + r] = bf16(2.0);
            successor[after * rank + r] = bf16(1.0);
        }
        let selector = Selector {
            predecessor: b.pod(&predecessor),
            successor: b.pod(&successor),
            query: b.f32(&[1.5; 2 * 16]),
            vocab,
            rank,
        };
        Propose { selector: Some(selector), ..op }
    });
    assert_eq!(ids, [0, 2, 4]);
}

#[test]
fn draws_follow_the_weights_they_report() {
    let values = [0.5f32, 0.0, -1.0, -60.0];
    let temperature = 1.0 / 0.7;
    let mass: Vec<f64> = values.iter().map(|&z| (f64::from(z) / temperature).exp()).collect();
    let total: f64 = mass.iter().sum();
    for rule in [Rule::Token, Rule::Block, Rule::Invariant] {
        let mut counts = [0.0f64; 4];
        let rounds = 4000;
        for seed in 0..rounds {
            let lanes = [(step(0, 2, 2), params(rule, seed))];
            let candidates = [9, 4, 2, 7];
            let case = Case {
                lanes: &lanes,
                max_rows: 2,
                candidates: &candidates,
                values: &values,
                k: 4,
                anchors: 50,
            };
            let (ids, proposals) = run(&case, |_, op| op);
            let chosen = candidates.iter().position(|&c| c == ids[1]).expect("a candidate");
            counts[chosen] += 1.0;
            let weights = &proposals[5..9];
            assert_eq!(proposals[1..5], candidates);
            assert_eq!((weights[0], weights[3]), (ONE, 0));
            let share = f64::from(weights[1]) / f64::from(ONE);
            assert!((share - mass[1] / mass[0]).abs() < 1e-6);
            if rule == Rule::Invariant {
                let race = |i: usize| {
                    random::exponential(lanes[0].1.seed, 21, candidates[i]) / weights[i] as f32
                };
                assert!((0..3).all(|i| race(chosen) <= race(i)), "the race at position 21");
                assert_eq!(proposals[0], 0, "a point mass");
            } else {
                assert_eq!(proposals[0], 4);
            }
        }
        for i in 0..3 {
            let expected = mass[i] / total * rounds as f64;
            let deviation = (counts[i] - expected) / expected.sqrt();
            assert!(deviation.abs() < 4.0, "{rule:?}: {counts:?}, {i} expects {expected}");
        }
    }
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    for seed in 0..40u64 {
        conformance(&format!("propose {seed}"), Tolerance::exact(), |b| {
            b.reseed(seed);
            let (count, max_rows) = [(1, 1), (1, 8), (3, 4), (4, 2)][seed as usize % 4];
            let k = [1, 2, 16, 32][b.random() as usize % 4];
            let vocab = 40;
            let rules = [Rule::Greedy, Rule::Token, Rule::Block, Rule::Invariant];
            let lanes: Vec<_> = (0..count)
                .map(|lane| {
                    let rows = b.random() as usize % (max_rows + 1);
                    let params = params(rules[b.random() as usize % 4], b.random());
                    (step(lane, max_rows, rows), params)
                })
                .collect();
            let first = seed as usize % 2;
            let draft_stride = max_rows - 1 + first;
            let draft_rows = count * draft_stride;
            let candidates: Vec<u32> =
                (0..draft_rows * k).map(|i| (i * 7 % vocab) as u32).collect();
            let mut values = b.normal_values(draft_rows * k, 3.0);
            for value in &mut values {
                let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0];
                let at = b.random() as usize % 40;
                *value = odd.get(at).copied().unwrap_or(*value);
            }
            let case = Case {
                lanes: &lanes,
                max_rows,
                candidates: &candidates,
                values: &values,
                k,
                anchors: 3,
            };
            let rank = [16, 48, 256][b.random() as usize % 3];
            let op = build(b, &case);
            let codebook = |b: &mut Builder| {
                let values = b.normal_values(vocab * rank, 0.5);
                let bits: Vec<u16> = values.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
                b.pod(&bits)
            };
            let selector = Selector {
                predecessor: codebook(b),
                successor: codebook(b),
                query: b.normal(draft_rows.max(1) * rank, 1.0),
                vocab,
                rank,
            };
            let selector = Some(selector).filter(|_| seed % 3 > 0);
            Propose { selector, draft_stride, draft_first: first, ..op }
        });
    }
}

#[test]
fn refuses_what_it_cannot_do() {
    let mut dev = crate::Host::new(crate::simd::Isa::Portable, 1);
    let mut b = Builder::new(&mut dev);
    let lanes = [(step(0, 4, 4), params(Rule::Token, 1))];
    let case = Case {
        lanes: &lanes,
        max_rows: 4,
        candidates: &[0; 6],
        values: &[0.0; 6],
        k: 2,
        anchors: 0,
    };
    let op = build(&mut b, &case);
    let codebook = b.pod(&[0u16; 5 * 32]);
    let selector = Selector {
        predecessor: codebook,
        successor: codebook,
        query: b.f32(&[0.0; 96]),
        vocab: 5,
        rank: 32,
    };
    let refused = |op: Propose| op.check().is_err();
    assert!(!refused(op));
    assert!(!refused(Propose { selector: Some(selector), ..op }));
    for selector in [
        Selector { rank: 24, ..selector },
        Selector { rank: 2048, ..selector },
        Selector { vocab: 6, ..selector },
        Selector { vocab: 0, ..selector },
        Selector { query: selector.query.slice(0, 4), ..selector },
    ] {
        assert!(refused(Propose { selector: Some(selector), ..op }));
    }
    assert!(refused(Propose { draft_first: 1, ..op }));
    assert!(refused(Propose { proposals: Proposals { k: 3, ..op.proposals }, ..op }));
    assert!(refused(Propose { proposals: Proposals { k: 0, ..op.proposals }, ..op }));
    assert!(refused(Propose { lanes: Lanes { max_rows: 5, ..op.lanes }, ..op }));
    assert!(refused(Propose { lanes: Lanes { max_rows: 0, ..op.lanes }, ..op }));
    assert!(refused(Propose { lanes: Lanes { count: usize::MAX, ..op.lanes }, ..op }));
    assert!(refused(Propose { draft_stride: usize::MAX, draft_first: usize::MAX, ..op }));
}
