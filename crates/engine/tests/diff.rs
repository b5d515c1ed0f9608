//! A whole synthetic model on two devices at once, op by op.

mod common;

use common::{greedy, request, sampler};
use engine::{Drafter, Engine, EngineOptions, SamplingOptions, Session};
use model::{Draft, DraftSource, Target, TargetSource};
use ops::simd::Isa;
use ops::testing::{Corrupt, Tolerance};
use ops::{ActDtype, Device, Diff, Host, HostMode};

const DFLASH: &str = "synth:tiny";
const DFLASH2: &str = "synth:tiny-dflash2";

fn reference() -> Host {
    Host::with(HostMode::Reference, Isa::Portable, 1, ActDtype::I8)
}

/// A tiny synthetic pair on a device, by the kind of its draft.
fn engine<D: Device>(name: &str, mut dev: D) -> Engine<D> {
    let path = std::path::Path::new(name);
    let source = TargetSource::open(path).expect("target");
    let target = Target::load(&mut dev, &source, &mut |_| ()).expect("weights");
    let draft = DraftSource::open(path, source.spec()).expect("draft");
    let draft = Draft::load(&mut dev, &draft, &mut |_| ()).expect("weights");
    let options = EngineOptions { context: 256, chunk: 64, ..EngineOptions::default() };
    Engine::new(dev, target, Some(draft), Drafter::DFlash, options).expect("memory")
}

/// A prompt of two prefill passes and two rounds, greedy and sampled.
fn rounds<D: Device>(engine: &mut Engine<D>) -> Result<(), engine::EngineError> {
    let vocab = engine.target().vocab as u32;
    let prompt: Vec<u32> = (0..70).map(|i| i * 7919 % vocab).collect();
    let sampled = SamplingOptions {
        temperature: Some(0.9),
        top_p: Some(0.95),
        seed: Some(3),
        ..SamplingOptions::default()
    };
    for sampler in [greedy(), sampler(sampled)] {
        let mut asked = request(&prompt, 100, sampler);
        asked.stop_tokens.clear();
        let mut session = Session::new(0);
        session.begin(engine, asked, &|| false)?;
        for _ in 0..2 {
            session.next(engine)?;
        }
    }
    Ok(())
}

#[test]
fn simd_agrees_with_the_definitions_op_by_op() {
    for name in [DFLASH, DFLASH2] {
        let simd = Host::new(Isa::detect(), 2);
        let dev = Diff::new(reference(), simd, Tolerance::relative(2e-3)).resynced();
        let mut e = engine(name, dev);
        let outcome = rounds(&mut e);
        let (runs, ops) = (e.dev.runs(), e.round_ops());
        println!("{name}: {runs} runs of {:?}", ops.keys().collect::<Vec<_>>());
        assert!(outcome.is_ok(), "{name}: {outcome:?}");
        let per_round = ops.values().map(|op| op.runs).sum::<usize>();
        assert!(runs > 4 * per_round, "{name}: {runs} runs, {per_round} a round");
        // Every op of a round takes part, dynamic convolution in DFlash 2 only.
        assert_eq!(ops.len(), if name == DFLASH2 { 12 } else { 11 }, "{ops:?}");
    }
}

#[test]
fn instruction_sets_and_threads_agree_bit_for_bit() {
    let (portable, best) = (Host::new(Isa::Portable, 1), Host::new(Isa::detect(), 2));
    let outcome = rounds(&mut engine(DFLASH2, Diff::new(portable, best, Tolerance::exact())));
    assert!(outcome.is_ok(), "{outcome:?}");
}

#[test]
fn one_wrong_element_deep_in_a_round_is_named() {
    let simd = Host::new(Isa::detect(), 2);
    // The sign of element 3 of row 0.
    let wrong = Corrupt::new(simd, ("gated_norm", 4), "out", (4 * 3 + 3, 0x80));
    let dev = Diff::new(reference(), wrong, Tolerance::relative(2e-3)).resynced();
    let mut e = engine(DFLASH, dev);
    let error = rounds(&mut e).expect_err("a difference").to_string();
    assert!(error.contains("`gated_norm`: `out`[row 0, 3] is"), "{error}");
    let found = e.dev.difference().expect("a difference");
    assert_eq!((found.op, found.want), ("gated_norm", -found.got));
}
