//! `th-engine profile`: where the time of a phase goes.
//!
//! Each phase runs three times: as always, without recordings (every kernel submitted by itself), and
//! with a time stamp around each op. Stamps keep ops from overlapping, so their sum is more than
//! the phase takes; what a pair of stamps costs is listed as an op of its own.

use std::time::Duration;

use engine::{Drafter, Engine};
use ops::{Counters, Device, Trace};

use crate::bench::{Spread, op_facts, prefill_once, rounds};
use crate::generate::Section;

/// Tokens of the prefill.
const PREFILL: usize = 2048;

type Traced<D> = Engine<Trace<D>>;

/// All phases.
pub fn sections<D: Device>(engine: &mut Traced<D>) -> anyhow::Result<Vec<Section>> {
    let peak = engine.read_bandwidth();
    let mut sections = vec![Section {
        title: "Machine".into(),
        facts: vec![
            ("device".into(), engine.dev.info().name),
            ("read bandwidth of the weights".into(), format!("{:.1} GB/s", peak / 1e9)),
        ],
    }];
    let prompt = PREFILL.min(engine.context().saturating_sub(2));
    let title = format!("Prefill of {prompt} tokens");
    sections.push(phase(engine, title, peak, &mut |engine, start| {
        prefill_once(engine, prompt)?;
        start(engine);
        Ok(vec![prefill_once(engine, prompt)?])
    })?);
    let title = "One row".to_owned();
    sections.push(phase(engine, title, peak, &mut |engine, start| rounds(engine, false, start))?);
    if !matches!(engine.drafter(), Drafter::None) {
        let title = format!("A round of {} rows", engine.block());
        sections
            .push(phase(engine, title, peak, &mut |engine, start| rounds(engine, true, start))?);
    }
    Ok(sections)
}

/// Runs a phase; calls back when what counts begins, and returns the time of each repetition.
type Run<'a, D> =
    dyn FnMut(&mut Traced<D>, &mut dyn FnMut(&mut Traced<D>)) -> anyhow::Result<Vec<Duration>> + 'a;

fn phase<D: Device>(
    engine: &mut Traced<D>,
    title: String,
    peak: f64,
    run: &mut Run<'_, D>,
) -> anyhow::Result<Section> {
    let mut before = Counters::default();
    let times = run(engine, &mut |engine| before = engine.dev.counters())?;
    let spent = engine.dev.counters() - before;
    let count = times.len().max(1);
    let usual = Spread::of(times);

    engine.dev.recording = false;
    let apart = run(engine, &mut |_| ());
    engine.dev.recording = true;
    let apart = Spread::of(apart?);

    engine.dev.stamping = true;
    let stamped = run(engine, &mut |engine| engine.dev.ops.clear());
    engine.dev.stamping = false;
    let rounds = stamped?.len().max(1);

    let mut facts = vec![("time".to_owned(), usual.shown())];
    if spent != Counters::default() {
        // A round that was submitted ahead may be counted in or not.
        let each = |n: u64| format!("{:.1}", n as f64 / count as f64);
        facts.extend([
            ("time without recordings".to_owned(), apart.shown()),
            ("kernels".to_owned(), each(spent.launches)),
            ("submissions".to_owned(), each(spent.submissions)),
            ("waits with an idle device".to_owned(), each(spent.waits)),
            ("device allocations".to_owned(), each(spent.allocations)),
        ]);
    }
    facts.extend(op_facts(&engine.dev.ops, rounds, (peak > 0.0).then_some(peak)));
    Ok(Section { title, facts })
}
