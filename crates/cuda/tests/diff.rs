//! Whole models on the CPU and on the card, op by op, if there is a card.
//!
//! Both compute with f32 activations, the one kind that both have; products of bf16 ones are held to
//! their definition by the cases, and whole models by `golden.rs`.

#![expect(clippy::disallowed_methods, reason = "a test picks its compiler by the environment")]

mod common;

use std::path::{Path, PathBuf};

use common::card;
use engine::{Drafter, Engine, EngineOptions, Request, SamplingDefaults, SamplingOptions, Session};
use model::{Draft, DraftSource, Target, TargetSource};
use ops::simd::Isa;
use ops::testing::{Corrupt, Tolerance};
use ops::{ActDtype, Device, Diff, Host, HostMode};

/// With activations that cards have too.
fn host() -> Host {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    Host::with(HostMode::Simd, Isa::detect(), threads, ActDtype::F32)
}

/// Folders below `models/`, or shapes with made-up weights.
fn engine<D: Device>(target: &Path, draft: &Path, mut dev: D) -> Engine<D> {
    let source = TargetSource::open(target).expect("target");
    let target = Target::load(&mut dev, &source, &mut |_| ()).expect("weights");
    let draft = DraftSource::open(draft, source.spec()).expect("draft");
    let draft = Draft::load(&mut dev, &draft, &mut |_| ()).expect("weights");
    let options = EngineOptions { context: 256, chunk: 64, ..EngineOptions::default() };
    Engine::new(dev, target, Some(draft), Drafter::DFlash, options).expect("memory")
}

/// A prompt of two prefill passes, and two rounds.
fn rounds<D: Device>(
    e: &mut Engine<D>,
    options: SamplingOptions,
) -> Result<(), engine::EngineError> {
    let vocab = e.target().vocab;
    let prompt: Vec<u32> = (0..70).map(|i| i * 7919 % vocab as u32).collect();
    let sampler = options.resolve(&SamplingDefaults::default(), vocab).expect("options");
    let asked = Request { prompt, max_tokens: 100, stop_tokens: Vec::new(), sampler };
    let mut session = Session::new(0);
    session.begin(e, asked, &|| false)?;
    for _ in 0..2 {
        session.next(e)?;
    }
    Ok(())
}

/// Compares what the ops write.
fn compared<B: Device>(card: B) -> Diff<Host, B> {
    Diff::new(host(), card, Tolerance::relative(2e-3)).rounded().resynced()
}

#[test]
fn the_card_agrees_with_the_cpu_op_by_op() {
    let greedy = SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() };
    let sampled =
        SamplingOptions { temperature: Some(0.9), seed: Some(3), ..SamplingOptions::default() };
    let models = std::env::var_os("TH_ENGINE_MODELS").map(PathBuf::from);
    let models =
        models.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models"));
    let synth = |name: &str| (PathBuf::from(name), PathBuf::from(name));
    let bundled = (models.join("th-tiny"), models.join("th-tiny-dflash"));
    for (target, draft) in [synth("synth:tiny"), synth("synth:tiny-dflash2"), bundled] {
        for options in [&greedy, &sampled] {
            let Some(cuda) = card() else { return };
            let dev = compared(cuda);
            let mut e = engine(&target, &draft, dev);
            let outcome = rounds(&mut e, options.clone());
            assert!(outcome.is_ok(), "{}: {outcome:?}", target.display());
            println!("{}: {} ops agree", target.display(), e.dev.runs());
        }
    }
}

#[test]
fn one_wrong_element_is_named() {
    for op in ["rms_norm", "attention", "attn_mix"] {
        let Some(cuda) = card() else { return };
        // The sign of element 3 of row 0.
        let wrong = Corrupt::new(cuda, (op, 1), "out", (4 * 3 + 3, 0x80));
        let dev = compared(wrong);
        let mut e = engine(Path::new("synth:tiny"), Path::new("synth:tiny"), dev);
        let greedy = SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() };
        assert!(rounds(&mut e, greedy).is_err(), "the fault was not seen");
        let difference = e.dev.difference().expect("a difference");
        assert_eq!((difference.op, difference.output), (op, "out"), "{difference}");
    }
}
