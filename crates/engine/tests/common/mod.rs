//! The bundled model behind an engine, and drafters that are wrong on purpose.

#![allow(dead_code, unreachable_pub, reason = "shared by test files that each use a part")]

pub mod faulty;
pub mod served;

use std::path::{Path, PathBuf};

use engine::{
    Drafter, Engine, EngineOptions, HostDrafter, Request, Sampler, SamplingDefaults,
    SamplingOptions, Session,
};
use model::{Draft, DraftSource, Target, TargetSource};
use ops::simd::Isa;
use ops::{Device, Host};

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Which drafter an engine gets.
pub enum With {
    None,
    DFlash,
    Host(Box<dyn HostDrafter>),
}

pub fn engine(with: With) -> Engine<Host> {
    engine_with(with, EngineOptions { context: 2048, ..EngineOptions::default() })
}

pub fn engine_with(with: With, options: EngineOptions) -> Engine<Host> {
    engine_on(Host::new(Isa::detect(), 2), with, options).expect("memory")
}

pub fn engine_on<D: Device>(
    mut dev: D,
    with: With,
    options: EngineOptions,
) -> Result<Engine<D>, String> {
    let source = TargetSource::open(&root().join("models/th-tiny")).expect("target");
    let target = Target::load(&mut dev, &source, &mut |_| ()).map_err(|e| e.to_string())?;
    let (draft, drafter) = match with {
        With::None => (None, Drafter::None),
        With::Host(drafter) => (None, Drafter::host(drafter)),
        With::DFlash => {
            let path = root().join("models/th-tiny-dflash");
            let source = DraftSource::open(&path, source.spec()).expect("draft");
            let draft = Draft::load(&mut dev, &source, &mut |_| ()).map_err(|e| e.to_string())?;
            (Some(draft), Drafter::DFlash)
        }
    };
    Engine::new(dev, target, draft, drafter, options).map_err(|e| e.to_string())
}

pub fn sampler(options: SamplingOptions) -> Sampler {
    options.resolve(&SamplingDefaults::default(), 49_152).expect("valid options")
}

pub fn greedy() -> Sampler {
    sampler(SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() })
}

pub fn request(prompt: &[u32], max_tokens: usize, sampler: Sampler) -> Request {
    Request { prompt: prompt.to_vec(), max_tokens, stop_tokens: vec![2, 0], sampler }
}

/// A whole answer, with the number of rounds it took.
pub fn answer(
    engine: &mut Engine<Host>,
    session: &mut Session,
    request: Request,
) -> (Vec<u32>, usize) {
    session.begin(engine, request, &|| false).expect("a prompt");
    let mut tokens = Vec::new();
    loop {
        let (new, ended) = session.next(engine).expect("a round");
        tokens.extend_from_slice(new);
        if ended.is_some() {
            return (tokens, session.stats().rounds);
        }
    }
}

/// Token ids of the golden prompts, and pieces of the longest as further ones.
pub fn prompts(count: usize) -> Vec<Vec<u32>> {
    let ids = |name: &str| -> Vec<u32> {
        let path = root().join("tests/golden").join(format!("{name}.json"));
        let text = std::fs::read_to_string(path).expect("golden");
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let list = value["prompt_ids"].as_array().expect("ids");
        list.iter().map(|v| v.as_u64().expect("id") as u32).collect()
    };
    let mut all: Vec<Vec<u32>> = ["short", "chat", "code", "prose200", "utf8"].map(ids).to_vec();
    let long = ids("long1500");
    all.extend(long.chunks(71).take(count.saturating_sub(all.len())).map(<[u32]>::to_vec));
    all.truncate(count);
    all
}

/// Proposes from a script that knows the answer, spoilt in some way.
#[derive(Debug)]
pub struct Scripted {
    /// The whole text: prompt and the answer without a drafter.
    pub text: Vec<u32>,
    pub seen: usize,
    pub how: How,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum How {
    AlwaysRight,
    AlwaysWrong,
    Random,
    /// Right, but a different number of proposals each round, sometimes none.
    Ragged,
}

impl HostDrafter for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }
    fn reset(&mut self, tokens: &[u32]) {
        self.seen = tokens.len();
    }
    fn extend(&mut self, tokens: &[u32]) {
        self.seen += tokens.len();
    }
    fn propose(&mut self, out: &mut [u32]) -> usize {
        let right = |i: usize| self.text.get(self.seen + i).copied().unwrap_or(11);
        for i in 0..out.len() {
            out[i] = match self.how {
                How::AlwaysRight | How::Ragged => right(i),
                How::AlwaysWrong => (right(i) + 1) % 49_152,
                How::Random => (self.seen as u32 * 7919 + i as u32 * 104_729) % 60_000,
            };
        }
        if self.how == How::Ragged { self.seen % (out.len() + 1) } else { out.len() }
    }
    fn another(&self) -> Box<dyn HostDrafter> {
        Box::new(Scripted { text: self.text.clone(), seen: 0, how: self.how })
    }
}
