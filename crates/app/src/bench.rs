//! `th-engine bench`: how fast a model runs here, next to what its bytes allow.
//!
//! Arms run in the order A B B A, on the same tokens, greedily. Every figure comes with its spread,
//! and the read bandwidth is measured before and after: if it moved, the machine was not quiet.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use engine::{Drafter, Engine, Request, Sampler, SamplingDefaults, SamplingOptions, Session};
use ops::{Device, OpCount, Trace};

use crate::generate::Section;

/// Rounds of one arm, and those before them that don't count.
const ROUNDS: usize = 64;
const WARM_UP: usize = 4;
/// Tokens of the prompt before decoding.
const PROMPT: usize = 64;
const PREFILLS: [usize; 4] = [512, 2048, 8192, 32_768];
const REPEATS: usize = 3;

/// Milliseconds of repeated measurements.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    least: f64,
    /// The middle one.
    pub median: f64,
    most: f64,
}

impl Spread {
    /// Of these.
    pub fn of(mut times: Vec<Duration>) -> Spread {
        times.sort();
        let ms = |time: &Duration| 1e3 * time.as_secs_f64();
        let median = times.get(times.len() / 2).map_or(0.0, ms);
        Spread { least: times.first().map_or(0.0, ms), median, most: times.last().map_or(0.0, ms) }
    }

    /// For people.
    pub fn shown(&self) -> String {
        format!("{:.2} ms ({:.2} to {:.2})", self.median, self.least, self.most)
    }
}

/// Measures everything.
pub fn sections<D: Device>(engine: &mut Engine<D>) -> anyhow::Result<Vec<Section>> {
    let before = engine.read_bandwidth();
    let mut prefill = Vec::new();
    for tokens in PREFILLS {
        if tokens + 1 >= engine.context() {
            continue;
        }
        let mut times = Vec::with_capacity(REPEATS);
        for _ in 0..REPEATS {
            times.push(prefill_once(engine, tokens)?);
        }
        let spread = Spread::of(times);
        let rate = 1e3 * tokens as f64 / spread.median;
        prefill.push((format!("{tokens} tokens"), format!("{rate:.0} tok/s, {}", spread.shown())));
    }
    let mut sections = vec![Section { title: "Prefill".into(), facts: prefill }];
    let mut plain = rounds(engine, false, &mut |_| ())?;
    let drafts = !matches!(engine.drafter(), Drafter::None);
    let mut whole = Vec::new();
    if drafts {
        whole = rounds(engine, true, &mut |_| ())?;
        whole.extend(rounds(engine, true, &mut |_| ())?);
    }
    plain.extend(rounds(engine, false, &mut |_| ())?);
    let after = engine.read_bandwidth();
    sections.push(decode(engine, Spread::of(plain), Spread::of(whole), before.max(after)));
    let bandwidth = format!("{:.1} GB/s before, {:.1} GB/s after", before / 1e9, after / 1e9);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("unknown").to_owned();
    sections.push(Section {
        title: "Machine".into(),
        facts: vec![
            ("device".into(), engine.dev.info().name),
            ("read bandwidth of the weights".into(), bandwidth),
            ("load average".into(), load),
        ],
    });
    Ok(sections)
}

fn decode<D: Device>(engine: &Engine<D>, plain: Spread, whole: Spread, bandwidth: f64) -> Section {
    let ms = |bytes: u64| 1e3 * bytes as f64 / bandwidth.max(1.0);
    let pass_bytes: u64 = engine.target().pass_weights().iter().map(|w| w.buf.bytes as u64).sum();
    let mut facts = vec![
        ("one row, without the draft".to_owned(), plain.shown()),
        ("tokens/s without the draft".to_owned(), format!("{:.1}", 1e3 / plain.median)),
        ("weights of a pass ÷ bandwidth".to_owned(), format!("{:.2} ms", ms(pass_bytes))),
        (
            "share of the read bandwidth".to_owned(),
            format!("{:.0} %", 100.0 * ms(pass_bytes) / plain.median),
        ),
    ];
    if whole.median > 0.0 {
        let floor = ms(engine.round_bytes(PROMPT).total());
        facts.extend([
            (format!("a whole round of {} rows", engine.block()), whole.shown()),
            ("round ÷ one row".to_owned(), format!("{:.2}", whole.median / plain.median)),
            ("round ÷ floor of its bytes".to_owned(), format!("{:.2}", whole.median / floor)),
        ]);
    }
    Section { title: "Decode".into(), facts }
}

/// Ids that differ from one another, of any vocabulary.
fn tokens<D: Device>(engine: &Engine<D>, count: usize) -> Vec<u32> {
    let vocab = engine.target().vocab as u64;
    (0..count as u64).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u32 % vocab as u32).collect()
}

/// A greedy answer without an end, after so many tokens.
pub fn request<D: Device>(engine: &Engine<D>, prompt: usize) -> anyhow::Result<Request> {
    let options = SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() };
    let sampler: Sampler = options.resolve(&SamplingDefaults::default(), engine.target().vocab)?;
    let prompt = tokens(engine, prompt);
    Ok(Request { prompt, max_tokens: usize::MAX, stop_tokens: Vec::new(), sampler })
}

/// Time of a prefill.
pub fn prefill_once<D: Device>(engine: &mut Engine<D>, count: usize) -> anyhow::Result<Duration> {
    let request = request(engine, count + 1)?;
    let mut session = Session::new(0);
    let start = Instant::now();
    session.begin(engine, request, &|| false)?;
    Ok(start.elapsed())
}

/// The time of each of some rounds, after a few to warm up; `warm` is called before the first that
/// counts.
fn timed_rounds<D: Device>(
    engine: &mut Engine<D>,
    warm: &mut dyn FnMut(&mut Engine<D>),
) -> anyhow::Result<Vec<Duration>> {
    let request = request(engine, PROMPT)?;
    let mut session = Session::new(0);
    session.begin(engine, request, &|| false)?;
    let mut times = Vec::with_capacity(ROUNDS);
    for i in 0..WARM_UP + ROUNDS {
        if i == WARM_UP {
            warm(engine);
        }
        let start = Instant::now();
        let (_, ended) = session.next(engine)?;
        if ended.is_some() {
            break;
        }
        if i >= WARM_UP {
            times.push(start.elapsed());
        }
    }
    Ok(times)
}

/// The time of each of some rounds with the engine's drafter, or with none.
pub fn rounds<D: Device>(
    engine: &mut Engine<D>,
    draft: bool,
    warm: &mut dyn FnMut(&mut Engine<D>),
) -> anyhow::Result<Vec<Duration>> {
    if draft {
        return timed_rounds(engine, warm);
    }
    let drafter = engine.set_drafter(Drafter::None);
    let times = timed_rounds(engine, warm);
    engine.set_drafter(drafter);
    times
}

/// Time, share and bandwidth of each op over some rounds.
pub fn ops<D: Device>(engine: &mut Engine<Trace<D>>, draft: bool) -> anyhow::Result<Section> {
    engine.dev.stamping = true;
    // The prompt's pass and the warm-up rounds don't count.
    let rounds = rounds(engine, draft, &mut |engine| engine.dev.ops.clear());
    engine.dev.stamping = false;
    let count = rounds?.len().max(1);
    let title = if draft { "Ops of a round" } else { "Ops of one row" };
    Ok(Section { title: title.into(), facts: op_facts(&engine.dev.ops, count, None) })
}

/// A line for each kind of op, the longest first, and their sum. `peak` is bytes per second.
pub fn op_facts(
    ops: &BTreeMap<&'static str, OpCount>,
    rounds: usize,
    peak: Option<f64>,
) -> Vec<(String, String)> {
    let mut list: Vec<(&str, OpCount)> = ops.iter().map(|(name, op)| (*name, *op)).collect();
    list.sort_by_key(|(_, op)| std::cmp::Reverse(op.time));
    let all: f64 = list.iter().map(|(_, op)| op.time.as_secs_f64()).sum();
    let mut facts: Vec<(String, String)> = list
        .into_iter()
        .map(|(name, op)| {
            let seconds = op.time.as_secs_f64();
            let bytes = (op.cost.weight_bytes + op.cost.other_bytes) as f64;
            let rate = bytes / seconds.max(1e-12);
            let of_peak = peak.map_or(String::new(), |peak| {
                let tflops = op.cost.flops as f64 / seconds.max(1e-12) / 1e12;
                format!(" {:5.1} % of peak {tflops:7.2} TFLOP/s", 100.0 * rate / peak)
            });
            let text = format!(
                "{:7.3} ms {:5.1} % {:7.1} GB/s{of_peak} {:4} runs",
                1e3 * seconds / rounds as f64,
                100.0 * seconds / all.max(1e-12),
                rate / 1e9,
                op.runs / rounds
            );
            (name.to_owned(), text)
        })
        .collect();
    facts.push(("sum".to_owned(), format!("{:7.3} ms", 1e3 * all / rounds as f64)));
    facts
}
