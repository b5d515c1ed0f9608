//! How much a draft proposes right: tokens per round on the golden prompts, greedily and under each
//! acceptance rule. None of it depends on the machine or its load.
//!
//! `cargo run --release -p engine --example drafting [MODEL DRAFT]` prints two tables in Markdown.

use std::path::{Path, PathBuf};

use engine::{
    Drafter, Engine, EngineOptions, Request, Rule, Sampler, SamplingDefaults, SamplingOptions,
    Session,
};
use model::{Draft, DraftSource, Target, TargetSource};
use ops::Host;
use ops::simd::Isa;

const PROMPTS: [&str; 6] = ["chat", "code", "prose200", "long1500", "utf8", "short"];
const TOKENS: usize = 128;
const SEEDS: std::ops::RangeInclusive<u64> = 1..=8;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Tokens and rounds of some answers.
#[derive(Clone, Copy, Default)]
struct Count {
    tokens: usize,
    rounds: usize,
}

impl Count {
    fn add(&mut self, other: Count) {
        self.tokens += other.tokens;
        self.rounds += other.rounds;
    }

    fn per_round(self) -> f64 {
        self.tokens as f64 / self.rounds.max(1) as f64
    }
}

fn main() -> Outcome<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let named: Vec<PathBuf> = std::env::args().skip(1).map(PathBuf::from).collect();
    let (model, draft) = match named.as_slice() {
        [] => (root.join("models/th-tiny"), root.join("models/th-tiny-dflash")),
        [model, draft] => (model.clone(), draft.clone()),
        _ => return Err("usage: drafting [MODEL DRAFT]".into()),
    };
    let (mut engine, stops) = load(&model, &draft)?;
    let read = |name| Ok((name, prompt(&root, name)?));
    let prompts: Vec<(&str, Vec<u32>)> = PROMPTS.into_iter().map(read).collect::<Outcome<_>>()?;

    println!("| prompt | prompt tokens | tokens | rounds | tokens per round |");
    println!("|---|---|---|---|---|");
    let greedy = sampler(&engine, 0.0, 0, Rule::Greedy)?;
    let mut all = Count::default();
    for (name, prompt) in &prompts {
        let count = answer(&mut engine, prompt, &stops, greedy.clone())?;
        all.add(count);
        let Count { tokens, rounds } = count;
        println!("| {name} | {} | {tokens} | {rounds} | {:.2} |", prompt.len(), count.per_round());
    }
    println!("| all | | {} | {} | {:.2} |\n", all.tokens, all.rounds, all.per_round());

    println!("| prompt | block rule | token rule | invariant rule | invariant ÷ block |");
    println!("|---|---|---|---|---|");
    let mut sums = [Count::default(); 3];
    for (name, prompt) in &prompts {
        let mut of_prompt = [Count::default(); 3];
        for (i, rule) in [Rule::Block, Rule::Token, Rule::Invariant].into_iter().enumerate() {
            for seed in SEEDS {
                let sampler = sampler(&engine, 1.0, seed, rule)?;
                of_prompt[i].add(answer(&mut engine, prompt, &stops, sampler)?);
            }
            sums[i].add(of_prompt[i]);
        }
        row(name, of_prompt);
    }
    row("all", sums);
    Ok(())
}

fn row(name: &str, counts: [Count; 3]) {
    let [block, token, invariant] = counts.map(Count::per_round);
    println!("| {name} | {block:.2} | {token:.2} | {invariant:.2} | {:.2} |", invariant / block);
}

/// The pair behind an engine, and the tokens that end an answer.
fn load(model: &Path, draft: &Path) -> Outcome<(Engine<Host>, Vec<u32>)> {
    let mut dev = Host::new(Isa::detect(), std::thread::available_parallelism()?.get());
    let source = TargetSource::open(model)?;
    let target = Target::load(&mut dev, &source, &mut |_| ())?;
    let stops = source.generation().eos_token_ids.clone();
    let draft = DraftSource::open(draft, source.spec())?;
    let draft = Draft::load(&mut dev, &draft, &mut |_| ())?;
    let options = EngineOptions { context: 2048, ..EngineOptions::default() };
    Ok((Engine::new(dev, target, Some(draft), Drafter::DFlash, options)?, stops))
}

fn prompt(root: &Path, name: &str) -> Outcome<Vec<u32>> {
    let text = std::fs::read_to_string(root.join("tests/golden").join(format!("{name}.json")))?;
    let golden: serde_json::Value = serde_json::from_str(&text)?;
    let ids = golden["prompt_ids"].as_array().ok_or("a golden has no prompt_ids")?;
    Ok(ids.iter().filter_map(|id| id.as_u64()).map(|id| id as u32).collect())
}

fn sampler(engine: &Engine<Host>, temperature: f32, seed: u64, rule: Rule) -> Outcome<Sampler> {
    let options = SamplingOptions {
        temperature: Some(temperature),
        seed: Some(seed),
        rule: Some(rule),
        ..SamplingOptions::default()
    };
    Ok(options.resolve(&SamplingDefaults::default(), engine.target().vocab)?)
}

/// One answer on an empty cache.
fn answer(
    engine: &mut Engine<Host>,
    prompt: &[u32],
    stops: &[u32],
    sampler: Sampler,
) -> Outcome<Count> {
    let request = Request {
        prompt: prompt.to_vec(),
        max_tokens: TOKENS,
        stop_tokens: stops.to_vec(),
        sampler,
    };
    let mut session = Session::new(0);
    session.begin(engine, request, &|| false)?;
    while session.next(engine)?.1.is_none() {}
    let stats = session.stats();
    Ok(Count { tokens: stats.completion_tokens, rounds: stats.rounds })
}
