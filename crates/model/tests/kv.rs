//! What keys and values in int8 cost the bundled model in quality, against bf16, on the golden prompts.
//!
//! `TH_SLOW_TESTS=1 cargo test -p model --test kv -- --nocapture` prints the tables of `docs/benchmarks.md`; by default
//! fewer and shorter texts are held to the same bounds.

mod common;

use common::{BLOCK, GOLDENS, Rig, argmax, golden, ids};
use ops::simd::Isa;
use ops::{ActDtype, Host, HostMode, KvDtype};

/// Bounds on the divergence per token, of all prompts' mean and of the worst token. (Measured: 0.0016 and 0.017.)
const MEAN_KL: f64 = 4e-3;
const MAX_KL: f64 = 0.1;

fn rig(act: ActDtype, kv: KvDtype) -> Rig {
    Rig::with(Host::with(HostMode::Simd, Isa::detect(), 2, act), act, None, kv)
}

fn slow() -> bool {
    #[expect(clippy::disallowed_methods, reason = "an opt-in for a longer test")]
    std::env::var("TH_SLOW_TESTS").is_ok()
}

/// Logits behind each token of `text`, which follows `prompt`.
fn logits(rig: &mut Rig, prompt: &[u32], text: &[u32]) -> Vec<Vec<f32>> {
    let (last, head) = prompt.split_last().expect("a prompt");
    rig.reset();
    rig.prefill(head, 512);
    let inputs = [&[*last], &text[..text.len() - 1]].concat();
    inputs.chunks(BLOCK).flat_map(|block| rig.verify(block, block.len())).collect()
}

/// The greedy text that follows a prompt.
fn greedy(rig: &mut Rig, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let (last, head) = prompt.split_last().expect("a prompt");
    rig.reset();
    rig.prefill(head, 512);
    let mut anchor = *last;
    let next = |_| {
        anchor = argmax(&rig.verify(&[anchor], 1)[0]);
        anchor
    };
    (0..tokens).map(next).collect()
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let peak = row.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let sum: f64 = row.iter().map(|&z| f64::from(z - peak).exp()).sum();
    row.iter().map(|&z| f64::from(z - peak) - sum.ln()).collect()
}

/// KL(want, got) over the whole vocabulary, in nats.
fn divergence(want: &[f32], got: &[f32]) -> f64 {
    let (p, q) = (log_softmax(want), log_softmax(got));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}

#[test]
fn int8_pages_cost_little() {
    if slow() {
        // Without the roundings of int8 activations, which any small change tips over.
        compare(ActDtype::F32, &GOLDENS, 128);
        compare(ActDtype::I8, &GOLDENS, 128);
    } else {
        compare(ActDtype::I8, &["short", "code", "chat"], 32);
    }
}

fn compare(act: ActDtype, names: &[&str], tokens: usize) {
    let (mut exact, mut small) = (rig(act, KvDtype::Bf16), rig(act, KvDtype::Int8));
    println!("with activations in {act:?}");
    let bytes = |rig: &Rig| rig.state.kv.iter().map(ops::KvPool::token_bytes).sum::<usize>();
    println!("bytes per token: {} in bf16, {} in int8", bytes(&exact), bytes(&small));
    println!(
        "| prompt | tokens before | mean KL | max KL | other arg max | greedy texts part at |"
    );
    println!("|---|---|---|---|---|---|");
    let (mut sum, mut worst, mut count) = (0.0, 0.0f64, 0);
    for name in names {
        let data = golden(name);
        let prompt = ids(&data["prompt_ids"]);
        let text = greedy(&mut exact, &prompt, tokens);
        let other = greedy(&mut small, &prompt, tokens);
        let part = text.iter().zip(&other).position(|(a, b)| a != b);
        let want = logits(&mut exact, &prompt, &text);
        let got = logits(&mut small, &prompt, &text);
        let each = want.iter().zip(&got);
        let kl: Vec<f64> = each.clone().map(|(want, got)| divergence(want, got)).collect();
        let flips = each.filter(|(want, got)| argmax(want) != argmax(got)).count();
        let mean = kl.iter().sum::<f64>() / kl.len() as f64;
        let max = kl.iter().copied().fold(0.0, f64::max);
        let part = part.map_or("never".to_owned(), |at| at.to_string());
        println!(
            "| {name} | {} | {mean:.1e} | {max:.1e} | {flips} of {} | {part} |",
            prompt.len(),
            kl.len()
        );
        (sum, worst, count) = (sum + kl.iter().sum::<f64>(), worst.max(max), count + kl.len());
    }
    let mean = sum / f64::from(count as u32);
    println!("| all | | {mean:.1e} | {worst:.1e} | | |");
    assert!(mean < MEAN_KL && worst < MAX_KL, "KL: mean {mean:.2e}, max {worst:.2e}");
}
