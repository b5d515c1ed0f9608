//! What a served model is like: first tokens cold and cached, tokens a second by lanes, the longest gap
//! while another's prompt is computed, and a restart with a warm disk.
//!
//! `cargo run --release -p app --example serving_bench -- [bench's options]` prints Markdown. Run it on a
//! quiet machine: it takes clock time, and says how busy the machine was before and after.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use app::cli::Cli;
use app::config::Surroundings;
use app::device::{Chosen, choose};
use app::generate::LoadRequest;
use app::local::{Sources, build_with};
use app::memory;
use engine::plan::{Plan, Wishes};
use engine::service::{CachePolicy, Done, Event, Priority, Request, RequestId, Service};
use engine::{
    DiskOptions, EngineService, SamplingDefaults, SamplingOptions, ServiceOptions, serve,
};
use ops::{Device, DryRun};

const DOCUMENTS: [usize; 3] = [1500, 7600, 32_000];
const LANES: [usize; 5] = [1, 2, 4, 8, 16];
const REPEATS: u64 = 3;
/// Tokens of each answer where rates are measured.
const ANSWER: usize = 192;

fn main() -> anyhow::Result<()> {
    let args = std::env::args_os().skip(1);
    let args = ["th-engine", "bench"].map(OsString::from).into_iter().chain(args);
    let cli = Cli::parse_checked(args).unwrap_or_else(|error| error.exit());
    let request = cli.load_request(&Surroundings::read())?;
    load_average("before");
    first_tokens(&request)?;
    rates(&request)?;
    gap(&request)?;
    restart(&request)?;
    load_average("after");
    Ok(())
}

fn load_average(when: &str) {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("\nLoad average {when}: {}", load.split(' ').next().unwrap_or("unknown"));
}

/// A model ready to be asked.
struct Bench {
    service: Arc<EngineService>,
    plan: Plan,
    vocab: u32,
}

fn start(
    request: &LoadRequest,
    wishes: &Wishes,
    disk: Option<DiskOptions>,
) -> anyhow::Result<Bench> {
    let sources = Sources::open(request)?;
    let Chosen { dev, options, .. } = choose(request, &sources, None)?;
    let act = dev.info().act;
    let free = if dev.info().name.starts_with("cpu") { memory::host_free() } else { None };
    let fresh = || DryRun::new(act);
    let plan = memory::planned(request, &sources, options, wishes, free, &fresh)?;
    // A device belongs to the thread that opened it.
    drop(dev);
    let (request, options) = (request.clone(), plan.options);
    let build = move || {
        let Chosen { dev, .. } = choose(&request, &sources, Some(options.slots))?;
        build_with(dev, options, &sources, &request, &mut |_| ())
    };
    let service = serve(build, ServiceOptions { disk, ..ServiceOptions::default() })?;
    let vocab = service.info().vocab as u32;
    Ok(Bench { service, plan, vocab })
}

/// What came of a request, with the times at which its tokens came.
struct Answer {
    ids: Vec<u32>,
    first: Duration,
    /// Rounds: when they came, and with how many tokens.
    rounds: Vec<(Instant, usize)>,
    done: Done,
}

impl Answer {
    fn gaps(&self) -> Vec<Duration> {
        self.rounds.windows(2).map(|pair| pair[1].0 - pair[0].0).collect()
    }
}

impl Bench {
    /// Ids that differ from text to text, and from one another.
    fn tokens(&self, seed: u64, count: usize) -> Vec<u32> {
        let id = |i: u64| (seed << 32 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
        (0..count as u64).map(|i| id(i) as u32 % self.vocab).collect()
    }

    fn submit(
        &self,
        prompt: &[u32],
        boundaries: Vec<usize>,
        max_tokens: usize,
    ) -> anyhow::Result<(RequestId, Instant, Receiver<(Instant, Event)>)> {
        let greedy = SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() };
        let request = Request {
            prompt: prompt.to_vec(),
            boundaries,
            max_tokens,
            stop_tokens: Vec::new(),
            sampler: greedy.resolve(&SamplingDefaults::default(), self.vocab as usize)?,
            logprobs: None,
            constraint: None,
            draft: true,
            priority: Priority::Normal,
            deadline: None,
            cache: CachePolicy::Shared,
        };
        let (sender, events) = channel();
        let begun = Instant::now();
        let sink = Box::new(move |event| drop(sender.send((Instant::now(), event))));
        Ok((self.service.submit(request, sink)?, begun, events))
    }

    fn ask(&self, prompt: &[u32], boundaries: Vec<usize>, max: usize) -> anyhow::Result<Answer> {
        let (_, begun, events) = self.submit(prompt, boundaries, max)?;
        wait(begun, &events)
    }
}

fn wait(begun: Instant, events: &Receiver<(Instant, Event)>) -> anyhow::Result<Answer> {
    let (mut ids, mut rounds) = (Vec::new(), Vec::new());
    loop {
        let (at, event) = events.recv().context("the service has gone")?;
        match event {
            Event::Tokens { tokens, .. } => {
                rounds.push((at, tokens.len()));
                ids.extend(tokens.iter().map(|token| token.id));
            }
            Event::Done(done) => {
                let first = rounds.first().map_or(Duration::ZERO, |(at, _)| *at - begun);
                return Ok(Answer { ids, first, rounds, done });
            }
            Event::Failed(error) => anyhow::bail!(error),
            _ => {}
        }
    }
}

fn shown(mut times: Vec<Duration>) -> String {
    times.sort();
    let ms = |time: &Duration| 1e3 * time.as_secs_f64();
    let (least, most) = (times.first().map_or(0.0, ms), times.last().map_or(0.0, ms));
    format!("{:.1} ({least:.1} to {most:.1})", times.get(times.len() / 2).map_or(0.0, ms))
}

fn first_tokens(request: &LoadRequest) -> anyhow::Result<()> {
    let bench = start(request, &Wishes::default(), None)?;
    println!("## Memory plan\n");
    for (name, value) in memory::section(&bench.plan).facts {
        println!("- {name}: {value}");
    }
    println!("\n## Time to the first token, ms: median (least to most)\n");
    println!("| document | cold | the same again | another question | turn 2 | turn 3 |");
    println!("|---|---|---|---|---|---|");
    for (n, &length) in DOCUMENTS.iter().enumerate() {
        if length + 400 > bench.plan.options.context {
            println!("| {length} | does not fit | | | | |");
            continue;
        }
        let mut times: [Vec<Duration>; 5] = Default::default();
        for repeat in 0..REPEATS {
            let seed = 100 * n as u64 + 10 * repeat;
            let document = bench.tokens(seed, length);
            let question = |q: u64| [&document[..], &bench.tokens(seed + q, 20)].concat();
            let ask = |prompt: &[u32]| bench.ask(prompt, vec![length], 32);
            let cold = ask(&question(1))?;
            anyhow::ensure!(cold.done.cached_tokens == 0, "cold was not cold");
            let again = ask(&question(1))?;
            let other = ask(&question(2))?;
            let turn = |before: &[u32], answer: &Answer, q: u64| {
                [before, &answer.ids, &bench.tokens(seed + q, 20)].concat()
            };
            let second = turn(&question(1), &again, 3);
            let two = ask(&second)?;
            let three = ask(&turn(&second, &two, 4))?;
            for (times, answer) in times.iter_mut().zip([cold, again, other, two, three]) {
                times.push(answer.first);
            }
        }
        let cells = times.map(shown).join(" | ");
        println!("| {length} | {cells} |");
    }
    Ok(())
}

fn rates(request: &LoadRequest) -> anyhow::Result<()> {
    println!("\n## Tokens a second of all lanes together\n");
    println!("| lanes | tokens/s | of one lane |");
    println!("|---|---|---|");
    let mut alone = 0.0;
    for lanes in LANES {
        let wishes = Wishes { lanes: Some(lanes), context: Some(1024), ..Wishes::default() };
        let bench = match start(request, &wishes, None) {
            Ok(bench) => bench,
            Err(error) => {
                println!("| {lanes} | {error:#} | |");
                continue;
            }
        };
        let mut rates: Vec<f64> = Vec::new();
        for repeat in 0..REPEATS {
            let prompts = (0..lanes).map(|i| bench.tokens(1000 * repeat + i as u64, 64));
            let prompts: Vec<Vec<u32>> = prompts.collect();
            let asked = prompts.iter().map(|prompt| bench.submit(prompt, Vec::new(), ANSWER));
            let asked: Vec<_> = asked.collect::<anyhow::Result<_>>()?;
            let answers = asked.iter().map(|(_, begun, events)| wait(*begun, events));
            let answers: Vec<Answer> = answers.collect::<anyhow::Result<_>>()?;
            rates.push(while_all_answer(&answers));
        }
        rates.sort_by(f64::total_cmp);
        let rate = rates[rates.len() / 2];
        alone = if lanes == 1 { rate } else { alone };
        println!("| {lanes} | {rate:.1} | {:.2} x |", rate / alone);
    }
    Ok(())
}

/// Tokens a second from when the last lane began to answer until the first one ended.
fn while_all_answer(answers: &[Answer]) -> f64 {
    let ends = |end: fn(&[(Instant, usize)]) -> Option<&(Instant, usize)>| {
        answers.iter().filter_map(move |answer| end(&answer.rounds)).map(|(at, _)| *at)
    };
    let (Some(from), Some(to)) = (ends(<[_]>::first).max(), ends(<[_]>::last).min()) else {
        return 0.0;
    };
    let rounds = answers.iter().flat_map(|answer| &answer.rounds);
    let within = rounds.filter(|(at, _)| *at > from && *at <= to);
    let tokens: usize = within.map(|(_, tokens)| tokens).sum();
    tokens as f64 / to.saturating_duration_since(from).as_secs_f64().max(1e-9)
}

fn gap(request: &LoadRequest) -> anyhow::Result<()> {
    let wishes = Wishes { lanes: Some(2), ..Wishes::default() };
    let bench = start(request, &wishes, None)?;
    let length = DOCUMENTS[1].min(bench.plan.options.context / 2);
    println!(
        "\n## Gaps between a lane's tokens while a prompt of {length} tokens is computed, ms\n"
    );
    println!("| repeat | median gap alone | longest gap | first token of the other |");
    println!("|---|---|---|---|");
    for repeat in 0..REPEATS {
        let calm = bench.ask(&bench.tokens(7000 + repeat, 64), Vec::new(), 64)?;
        let most = bench.plan.options.context - 128;
        let (id, begun, events) =
            bench.submit(&bench.tokens(8000 + repeat, 64), Vec::new(), most)?;
        std::thread::sleep(Duration::from_millis(200));
        let other = bench.ask(&bench.tokens(9000 + repeat, length), Vec::new(), 1)?;
        let until = begun.elapsed();
        bench.service.cancel(id);
        let running = wait(begun, &events)?;
        let mut calm = calm.gaps();
        calm.sort();
        let ms = |time: Duration| 1e3 * time.as_secs_f64();
        let longest = running.gaps().iter().max().copied().unwrap_or_default();
        let median = calm.get(calm.len() / 2).copied().unwrap_or_default();
        println!(
            "| {repeat} | {:.1} | {:.1} | {:.1} of {:.1} |",
            ms(median),
            ms(longest),
            ms(other.first),
            ms(until)
        );
    }
    Ok(())
}

fn restart(request: &LoadRequest) -> anyhow::Result<()> {
    let dir = std::env::temp_dir().join(format!("th-engine-serving-bench-{}", std::process::id()));
    let disk = DiskOptions {
        dir: dir.clone(),
        quota: 16 << 30,
        write_rate: 1 << 40,
        fingerprint: "serving-bench".to_owned(),
    };
    println!("\n## First token after a restart with a warm disk, ms\n");
    println!("| document | cold | restarted | bytes on disk |");
    println!("|---|---|---|---|");
    for length in DOCUMENTS {
        let bench = start(request, &Wishes::default(), Some(disk.clone()))?;
        if length + 64 > bench.plan.options.context {
            println!("| {length} | does not fit | | |");
            continue;
        }
        let prompt = bench.tokens(length as u64, length);
        let cold = bench.ask(&prompt, Vec::new(), 8)?;
        bench.service.drain(Duration::from_secs(600));
        let bench = start(request, &Wishes::default(), Some(disk.clone()))?;
        let warm = bench.ask(&prompt, Vec::new(), 8)?;
        anyhow::ensure!(warm.ids == cold.ids, "the restarted answer is another");
        let ms = |time: Duration| 1e3 * time.as_secs_f64();
        println!(
            "| {length} | {:.1} | {:.1}, {} tokens cached | {} |",
            ms(cold.first),
            ms(warm.first),
            warm.done.cached_tokens,
            bench.service.stats().disk_bytes
        );
    }
    std::fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())
}
