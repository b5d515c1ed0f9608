//! The bundled model against the float32 reference of the same weights (`tests/golden`).

mod common;

use common::{BLOCK, GOLDENS, Rig, argmax, floats, golden, ids};
use ops::{ActDtype, Device};

/// Largest difference of a logit with exact activations: what bf16 keys and values and the order of
/// sums leave. (Measured: 0.024.)
const EXACT_LOGIT: f32 = 0.03;
/// Largest difference with int8 activations. (Measured: 0.58.)
const INT8_LOGIT: f32 = 0.75;

/// Differences over the last positions of one prompt.
struct Differences {
    /// Of the reference's top-20 logits, after taking the mean difference of a row away.
    mean: f64,
    max: f64,
    /// Mean KL divergence over the top-20 ids and the rest of the mass.
    kl: f64,
    positions: f64,
}

/// Runs a prompt so that its last positions pass through the verify path, and compares.
fn last_positions(rig: &mut Rig, name: &str) -> Differences {
    let data = golden(name);
    let prompt = ids(&data["prompt_ids"]);
    let rows = data["last_positions"].as_array().expect("positions");
    let head = prompt.len() - rows.len();
    rig.reset();
    rig.prefill(&prompt[..head], 512);
    let mut got = Vec::new();
    for block in prompt[head..].chunks(BLOCK) {
        got.extend(rig.verify(block, block.len()));
    }
    let (mut sum, mut count, mut max, mut kl) = (0.0, 0, 0.0f64, 0.0);
    for (row, got) in rows.iter().zip(&got) {
        let (top, want) = (ids(&row["ids"]), floats(&row["logits"]));
        for (&id, &want) in top.iter().zip(&want) {
            let difference = f64::from((got[id as usize] - want).abs());
            (sum, count, max) = (sum + difference, count + 1, max.max(difference));
        }
        kl += divergence(&top, &want, row["lse"].as_f64().expect("lse"), got);
    }
    let positions = rows.len() as f64;
    Differences { mean: sum / f64::from(count), max, kl: kl / positions, positions }
}

/// KL(reference, ours) over the top ids and one bucket for all others.
fn divergence(top: &[u32], want: &[f32], want_lse: f64, got: &[f32]) -> f64 {
    let peak = got.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let lse = got.iter().map(|&z| f64::from(z - peak).exp()).sum::<f64>().ln() + f64::from(peak);
    let (mut kl, mut p_rest, mut q_rest) = (0.0, 1.0, 1.0);
    for (&id, &z) in top.iter().zip(want) {
        let (p, q) = (f64::from(z) - want_lse, f64::from(got[id as usize]) - lse);
        kl += p.exp() * (p - q);
        p_rest -= p.exp();
        q_rest -= q.exp();
    }
    let (p_rest, q_rest) = (p_rest.max(1e-12), q_rest.max(1e-12));
    kl + p_rest * (p_rest / q_rest).ln()
}

#[test]
fn exact_activations_give_the_reference_s_logits() {
    let mut rig = Rig::new(ActDtype::F32, None);
    for name in GOLDENS {
        let d = last_positions(&mut rig, name);
        println!("{name}: mean {:.2e} max {:.2e} kl {:.2e}", d.mean, d.max, d.kl);
        // What is left is bf16 keys and values, and the order of sums.
        assert!(
            d.mean < 0.02 && d.max < 0.2 && d.kl < 1e-4,
            "{name}: {} {} {}",
            d.mean,
            d.max,
            d.kl
        );
    }
}

#[test]
fn int8_activations_stay_close_to_the_reference() {
    let mut rig = Rig::new(ActDtype::I8, None);
    let (mut kl, mut positions) = (0.0, 0.0);
    for name in GOLDENS {
        let d = last_positions(&mut rig, name);
        println!("{name}: mean {:.2e} max {:.2e} kl {:.2e}", d.mean, d.max, d.kl);
        assert!(d.max < f64::from(INT8_LOGIT), "{name}: max {}", d.max);
        (kl, positions) = (kl + d.kl * d.positions, positions + d.positions);
    }
    println!("all {positions} positions: kl {:.2e}", kl / positions);
    assert!(kl / positions < 2e-3, "mean kl {}", kl / positions);
}

#[test]
fn the_residual_stream_follows_the_reference_layer_by_layer() {
    let layers: Vec<usize> = (0..30).collect();
    let mut rig = Rig::new(ActDtype::F32, Some(layers));
    for name in ["short", "chat", "code"] {
        let data = golden(name);
        let prompt = ids(&data["prompt_ids"]);
        rig.reset();
        let (last, head) = prompt.split_last().expect("a prompt");
        rig.prefill(head, 512);
        rig.verify(&[*last], 1);
        let features = rig.scratch.features;
        let mut row = vec![0f32; features.width];
        rig.dev.read(features.buf, bytemuck::cast_slice_mut(&mut row));
        for (layer, want) in
            data["hidden_last"]["layers"].as_array().expect("layers").iter().enumerate()
        {
            let got = &row[layer * 576..][..576];
            let rms = (got.iter().map(|v| v * v).sum::<f32>() / 576.0).sqrt();
            let want_rms = want[1].as_f64().expect("rms") as f32;
            assert!(
                (rms / want_rms - 1.0).abs() < 5e-3,
                "{name} layer {layer}: rms {rms} want {want_rms}"
            );
            for (i, (g, w)) in got.iter().zip(floats(&want[2])).enumerate() {
                assert!(
                    (g - w).abs() < 0.02 * want_rms,
                    "{name} layer {layer} [{i}]: {g} want {w}"
                );
            }
        }
    }
}

/// Teacher-forced along the reference's greedy text: every step's arg max is the reference's, or
/// the reference's margin there is a near tie.
fn greedy(rig: &mut Rig, name: &str, near_tie: f32) -> usize {
    let data = golden(name);
    let prompt = ids(&data["prompt_ids"]);
    let (text, margins) = (ids(&data["greedy_ids"]), floats(&data["greedy_margin"]));
    rig.reset();
    let (last, head) = prompt.split_last().expect("a prompt");
    rig.prefill(head, 512);
    let mut inputs = vec![*last];
    inputs.extend_from_slice(&text[..text.len() - 1]);
    let mut ties = 0;
    for (b, block) in inputs.chunks(BLOCK).enumerate() {
        for (i, row) in rig.verify(block, block.len()).iter().enumerate() {
            let at = b * BLOCK + i;
            if argmax(row) != text[at] {
                assert!(margins[at] < near_tie, "{name} token {at}: margin {}", margins[at]);
                ties += 1;
            }
        }
    }
    ties
}

#[test]
fn greedy_tokens_are_the_reference_s() {
    let mut rig = Rig::new(ActDtype::F32, None);
    for name in GOLDENS {
        let ties = greedy(&mut rig, name, 2.0 * EXACT_LOGIT);
        println!("{name}: {ties} near ties went the other way (exact activations)");
    }
    let mut rig = Rig::new(ActDtype::I8, None);
    for name in GOLDENS {
        let ties = greedy(&mut rig, name, 2.0 * INT8_LOGIT);
        println!("{name}: {ties} near ties went the other way (int8 activations)");
    }
}

#[test]
fn the_draft_proposes_what_the_reference_proposes() {
    for (act, logit) in [(ActDtype::F32, EXACT_LOGIT), (ActDtype::I8, INT8_LOGIT)] {
        let mut rig = Rig::new(act, None);
        for name in GOLDENS {
            draft_rounds(&mut rig, name, 2.0 * logit);
        }
    }
}

fn draft_rounds(rig: &mut Rig, name: &str, near_tie: f32) {
    let data = golden(name);
    let prompt = ids(&data["prompt_ids"]);
    let text = ids(&data["greedy_ids"]);
    rig.reset();
    rig.prefill(&prompt, 512);
    let all: Vec<u32> = prompt.iter().chain(&text).copied().collect();
    for round in data["draft_rounds"].as_array().expect("rounds") {
        let anchor_pos = round["anchor_pos"].as_u64().expect("position") as usize;
        // Catch up with the reference's text: the context of the draft ends before the anchor.
        while (rig.lane.pos as usize) < anchor_pos {
            let pos = rig.lane.pos as usize;
            let end = anchor_pos.min(pos + BLOCK);
            rig.verify(&all[pos..end], end - pos);
        }
        let (want, margins) = (ids(&round["proposals"]), floats(&round["margins"]));
        for (i, row) in rig.propose(all[anchor_pos]).iter().enumerate() {
            let got = argmax(row);
            if got != want[i] {
                assert!(
                    margins[i] < near_tie,
                    "{name} at {anchor_pos}+{i}: {got}, margin {}",
                    margins[i]
                );
                println!("{name} at {anchor_pos}+{i}: near tie, margin {}", margins[i]);
            }
        }
    }
}
