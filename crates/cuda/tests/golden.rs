//! The bundled model on the card, if there is one, against the float32 reference of the same weights
//! (`tests/golden`), and against itself: with and without a draft, read at once and a round behind,
//! prompts whole and in parts.

#![expect(clippy::disallowed_methods, reason = "a test picks its compiler by the environment")]

mod common;

use std::path::{Path, PathBuf};

use common::card;
use cuda::Cuda;
use engine::{Drafter, Engine, EngineOptions, Request, SamplingDefaults, SamplingOptions, Session};
use model::{Draft, DraftSource, Target, TargetSource};
use ops::Device;

const GOLDENS: [&str; 6] = ["short", "prose200", "long1500", "code", "utf8", "chat"];
/// Between the two likeliest logits. What bf16 activations may turn around.
const NEAR_TIE: f64 = 0.5;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn engine(mut dev: Cuda, ahead: bool, chunk: usize) -> Engine<Cuda> {
    let models = std::env::var_os("TH_ENGINE_MODELS").map(PathBuf::from);
    let models = models.unwrap_or_else(|| root().join("models"));
    let source = TargetSource::open(&models.join("th-tiny")).expect("target");
    let target = Target::load(&mut dev, &source, &mut |_| ()).expect("weights");
    let draft = DraftSource::open(&models.join("th-tiny-dflash"), source.spec()).expect("draft");
    let draft = Draft::load(&mut dev, &draft, &mut |_| ()).expect("weights");
    let options = EngineOptions { context: 4096, chunk, ahead, ..EngineOptions::default() };
    Engine::new(dev, target, Some(draft), Drafter::DFlash, options).expect("memory")
}

fn golden(name: &str) -> serde_json::Value {
    let folder = std::env::var_os("TH_GOLDENS").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| root().join("tests/golden"));
    let text = std::fs::read_to_string(folder.join(format!("{name}.json"))).expect("a golden");
    serde_json::from_str(&text).expect("JSON")
}

fn ids(value: &serde_json::Value) -> Vec<u32> {
    let number = |v: &serde_json::Value| v.as_u64().expect("an id") as u32;
    value.as_array().expect("ids").iter().map(number).collect()
}

fn answer(e: &mut Engine<Cuda>, prompt: &[u32], options: &SamplingOptions) -> Vec<u32> {
    let vocab = e.target().vocab;
    let sampler = options.resolve(&SamplingDefaults::default(), vocab).expect("options");
    let (prompt, stop_tokens) = (prompt.to_vec(), Vec::new());
    let mut session = Session::new(0);
    let request = Request { prompt, max_tokens: 128, stop_tokens, sampler };
    session.begin(e, request, &|| false).expect("a prompt that fits");
    let mut tokens = Vec::new();
    loop {
        let (new, ended) = session.next(e).expect("a round");
        tokens.extend_from_slice(new);
        if ended.is_some() {
            return tokens;
        }
    }
}

#[test]
fn greedy_text_is_the_reference_s_up_to_near_ties_and_needs_no_draft() {
    let greedy = SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() };
    let seeded =
        SamplingOptions { temperature: Some(0.8), seed: Some(11), ..SamplingOptions::default() };
    let mut texts: Vec<Vec<u32>> = Vec::new();
    // Parts of prompts with no more rows than rounds have, and with more.
    for (ahead, chunk) in [(true, 2048), (false, 64), (true, 192)] {
        let Some(dev) = card() else { return };
        let mut e = engine(dev, ahead, chunk);
        for drafted in [true, false] {
            e.set_drafter(if drafted { Drafter::DFlash } else { Drafter::None });
            let mut now = Vec::new();
            for name in GOLDENS {
                let data = golden(name);
                let prompt = ids(&data["prompt_ids"]);
                let text = answer(&mut e, &prompt, &greedy);
                let want = ids(&data["greedy_ids"]);
                let first = text.iter().zip(&want).position(|(a, b)| a != b);
                if let Some(at) = first {
                    let margin = data["greedy_margin"][at].as_f64().expect("a margin");
                    println!("{name}: token {at} differs, margin {margin:.3}");
                    assert!(margin < NEAR_TIE, "{name} token {at}: margin {margin}");
                }
                now.push(text);
                now.push(answer(&mut e, &prompt, &seeded));
            }
            texts = if texts.is_empty() { now.clone() } else { texts };
            assert!(now == texts, "ahead {ahead}, drafted {drafted}, chunks of {chunk}");
        }
        e.dev.sync().expect("a card that still answers");
    }
    println!("{} answers equal, six times", texts.len());
}
