//! What a served model is like: how long it takes to start, first tokens cold and cached and after a restart with a warm
//! disk, the memory of a card, the longest gap while another's prompt is computed, and tokens a second by lanes.
//!
//! `cargo run --release -p app --example serving_bench -- [bench's options] [-- restart|alone|first|memory|gap|lanes …]`
//! prints Markdown: all sections, or those named. `alone` is `memory` with a single lane. The model is loaded once for
//! `restart` and once after it, once for `alone`, and once for all the others together. Run it on a quiet machine: it
//! takes clock time, and says how busy the machine was before and after.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Context;
use app::cli::Cli;
use app::config::Surroundings;
use app::device::{Chosen, choose};
use app::generate::{DeviceKind, LoadRequest};
use app::local::{Sources, build_with};
use app::memory;
use cuda::Cuda;
use engine::plan::{Plan, Wishes};
use engine::service::{CachePolicy, Done, Event, Priority, Request, RequestId, Service};
use engine::{
    DiskOptions, EngineService, SamplingDefaults, SamplingOptions, ServiceOptions, serve,
};
use ops::{Device, DryRun};

const DOCUMENTS: [usize; 3] = [1500, 8000, 32_000];
/// Tokens that a conversation about a document takes besides.
const TALK: usize = 500;
const LANES: [usize; 5] = [1, 2, 4, 8, 16];
const REPEATS: u64 = 3;
/// How long all lanes answer where rates are measured.
const WINDOW: Duration = Duration::from_millis(1200);
/// Nobody asks again before the answer was read. What ends a request is done by then: its checkpoint, and the
/// round that was under way.
const PAUSE: Duration = Duration::from_millis(60);

fn main() -> anyhow::Result<()> {
    let mut words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let mine = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let wanted = words.split_off(mine);
    let wanted = |name: &str| wanted.len() < 2 || wanted.iter().any(|word| word == name);
    let args = ["th-engine", "bench"].map(OsString::from).into_iter().chain(words);
    let cli = Cli::parse_checked(args).unwrap_or_else(|error| error.exit());
    let request = cli.load_request(&Surroundings::read())?;
    load_average("before");
    if request.device == DeviceKind::Cuda {
        let used = Cuda::open(&request.cuda)?.used_memory().unwrap_or(0);
        println!("\nMemory of the card with a context and nothing in it: {:.2} GB", gb(used));
    }
    if wanted("restart") {
        restart(&request)?;
    }
    if wanted("alone") {
        peak(&start(&request, &Wishes { lanes: Some(1), ..Wishes::default() }, None)?)?;
    }
    let rest = ["first", "memory", "gap", "lanes"].map(wanted);
    if rest.contains(&true) {
        let lanes = if rest[3] { Some(LANES[LANES.len() - 1]) } else { None };
        let bench = start(&request, &Wishes { lanes, ..Wishes::default() }, None)?;
        println!("\n## Memory plan\n");
        for (name, value) in memory::section(&bench.plan).facts {
            println!("- {name}: {value}");
        }
        let sections: [fn(&Bench) -> anyhow::Result<()>; 4] = [first_tokens, peak, gap, rates];
        for (section, _) in sections.iter().zip(rest).filter(|(_, wanted)| *wanted) {
            section(&bench)?;
        }
    }
    load_average("after");
    Ok(())
}

fn load_average(when: &str) {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("\nLoad average {when}: {}", load.split(' ').next().unwrap_or("unknown"));
}

fn ms(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

fn gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

/// A model ready to be asked.
struct Bench {
    service: Arc<EngineService>,
    plan: Plan,
    request: LoadRequest,
    /// What it took to get there.
    started: Duration,
    vocab: u32,
}

fn start(
    request: &LoadRequest,
    wishes: &Wishes,
    disk: Option<DiskOptions>,
) -> anyhow::Result<Bench> {
    let begun = Instant::now();
    let sources = Sources::open(request)?;
    let fits = |base, free, fresh: &dyn Fn() -> DryRun| {
        memory::planned(request, &sources, base, wishes, free, fresh).map(drop)
    };
    let Chosen { kind, dev, options, free, .. } = choose(request, &sources, None, &fits)?;
    let act = dev.info().act;
    let fresh = || DryRun::new(act);
    let plan = memory::planned(request, &sources, options, wishes, free, &fresh)?;
    // A device belongs to the thread that opened it.
    drop(dev);
    let (of, options) = (LoadRequest { device: kind, ..request.clone() }, plan.options);
    let build = move || {
        let Chosen { dev, .. } = choose(&of, &sources, Some(options.slots), &|_, _, _| Ok(()))?;
        build_with(dev, options, &sources, &of, &mut |_| ())
    };
    let service = serve(build, ServiceOptions { disk, ..ServiceOptions::default() })?;
    let vocab = service.info().vocab as u32;
    let request = LoadRequest { device: kind, ..request.clone() };
    let started = begun.elapsed();
    Ok(Bench { service, plan, request, started, vocab })
}

/// A request on its way, with what came of it so far.
struct Asked {
    id: RequestId,
    begun: Instant,
    events: Receiver<(Instant, Event)>,
    ids: Vec<u32>,
    /// Rounds: when they came, and with how many tokens.
    rounds: Vec<(Instant, usize)>,
}

impl Asked {
    /// Waits for the next event; the account, if it was the last.
    fn next(&mut self) -> anyhow::Result<Option<Done>> {
        let (at, event) = self.events.recv().context("the service has gone")?;
        match event {
            Event::Tokens { tokens, .. } => {
                self.rounds.push((at, tokens.len()));
                self.ids.extend(tokens.iter().map(|token| token.id));
            }
            Event::Done(done) => return Ok(Some(done)),
            Event::Failed(error) => anyhow::bail!(error),
            _ => {}
        }
        Ok(None)
    }

    /// Waits until it answers.
    fn begin(&mut self) -> anyhow::Result<()> {
        while self.rounds.is_empty() {
            let ended = self.next()?;
            anyhow::ensure!(ended.is_none(), "ended without a token: {ended:?}");
        }
        Ok(())
    }

    /// Waits for the end.
    fn end(mut self) -> anyhow::Result<Answer> {
        loop {
            if let Some(done) = self.next()? {
                let Asked { begun, ids, rounds, .. } = self;
                let first = rounds.first().map_or(Duration::ZERO, |(at, _)| *at - begun);
                return Ok(Answer { ids, first, rounds, done });
            }
        }
    }
}

/// What came of a request.
struct Answer {
    ids: Vec<u32>,
    first: Duration,
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

    /// Documents that fit, each length once.
    fn documents(&self) -> Vec<usize> {
        let most = self.plan.options.context.saturating_sub(TALK);
        let mut lengths = DOCUMENTS.map(|length| length.min(most)).to_vec();
        lengths.dedup();
        lengths
    }

    fn submit(
        &self,
        prompt: &[u32],
        boundaries: Vec<usize>,
        max_tokens: usize,
        draft: bool,
    ) -> anyhow::Result<Asked> {
        let greedy = SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() };
        let request = Request {
            prompt: prompt.to_vec(),
            boundaries,
            max_tokens,
            stop_tokens: Vec::new(),
            sampler: greedy.resolve(&SamplingDefaults::default(), self.vocab as usize)?,
            logprobs: None,
            constraint: None,
            draft,
            priority: Priority::Normal,
            deadline: None,
            cache: CachePolicy::Shared,
        };
        let (sender, events) = channel();
        let begun = Instant::now();
        let sink = Box::new(move |event| drop(sender.send((Instant::now(), event))));
        let id = self.service.submit(request, sink)?;
        Ok(Asked { id, begun, events, ids: Vec::new(), rounds: Vec::new() })
    }

    fn ask(&self, prompt: &[u32], boundaries: Vec<usize>, max: usize) -> anyhow::Result<Answer> {
        sleep(PAUSE);
        self.submit(prompt, boundaries, max, true)?.end()
    }
}

fn shown(mut times: Vec<Duration>) -> String {
    times.sort();
    let of = |time: Option<&Duration>| time.copied().map_or(0.0, ms);
    let (least, most) = (of(times.first()), of(times.last()));
    format!("{:.1} ({least:.1} to {most:.1})", of(times.get(times.len() / 2)))
}

fn first_tokens(bench: &Bench) -> anyhow::Result<()> {
    println!("\n## Time to the first token, ms: median (least to most)\n");
    println!("| document | cold | the same again | another question | turn 2 | turn 3 |");
    println!("|---|---|---|---|---|---|");
    let before = bench.service.stats();
    for (n, length) in bench.documents().into_iter().enumerate() {
        let mut times: [Vec<Duration>; 5] = Default::default();
        for repeat in 0..REPEATS {
            let seed = 100 * n as u64 + 10 * repeat;
            let document = bench.tokens(seed, length);
            let question = |q: u64| [&document[..], &bench.tokens(seed + q, 20)].concat();
            let ask = |prompt: &[u32], cached: usize| {
                let answer = bench.ask(prompt, vec![length], 32)?;
                let Done { cached_tokens: got, cache, .. } = &answer.done;
                anyhow::ensure!(*got >= cached, "{got} of {cached} tokens cached: {cache:?}");
                anyhow::ensure!(cached > 0 || *got == 0, "cold was not cold");
                anyhow::Ok(answer)
            };
            let turn = |before: &[u32], answer: &Answer, q: u64| {
                [before, &answer.ids, &bench.tokens(seed + q, 20)].concat()
            };
            let cold = ask(&question(1), 0)?;
            let again = ask(&question(1), length + 19)?;
            let other = ask(&question(2), length / 64 * 64)?;
            let second = turn(&question(1), &again, 3);
            let two = ask(&second, length + 20)?;
            let three = ask(&turn(&second, &two, 4), second.len())?;
            for (times, answer) in times.iter_mut().zip([cold, again, other, two, three]) {
                times.push(answer.first);
            }
        }
        let cells = times.map(shown).join(" | ");
        println!("| {length} | {cells} |");
    }
    let after = bench.service.stats();
    let taken = after.checkpoints_taken - before.checkpoints_taken;
    let each = (after.checkpoint_time - before.checkpoint_time).div_f64(taken.max(1) as f64);
    let footprint = &bench.plan.footprint;
    println!(
        "\nA checkpoint: {:.1} MB of state and pages of {:.2} MB; {:.2} ms each, the mean of {taken}; {} evicted.",
        footprint.snapshot as f64 / 1e6,
        footprint.page as f64 / 1e6,
        ms(each),
        after.evictions - before.evictions
    );
    Ok(())
}

/// The most memory of a card that is in use while a prompt is computed.
fn peak(bench: &Bench) -> anyhow::Result<()> {
    if bench.request.device != DeviceKind::Cuda {
        println!("\nMemory of a card: not on this device.");
        return Ok(());
    }
    let length = bench.documents().get(1).copied().unwrap_or(DOCUMENTS[0]);
    let (over, options) = (Arc::new(AtomicBool::new(false)), bench.request.cuda.clone());
    let until = Arc::clone(&over);
    let (ready, reads) = channel();
    let meter = std::thread::spawn(move || {
        let card = Cuda::open(&options)?;
        let mut most = 0;
        let _ = ready.send(());
        while !until.load(Ordering::Relaxed) {
            most = most.max(card.used_memory().unwrap_or(0));
            sleep(Duration::from_millis(1));
        }
        anyhow::Ok(most)
    });
    // A card that can't be opened is told of below.
    let _ = reads.recv();
    bench.ask(&bench.tokens(600, length), Vec::new(), 8)?;
    over.store(true, Ordering::Relaxed);
    let most = meter.join().map_err(|_| anyhow::anyhow!("the meter panicked"))??;
    let m = bench.plan.footprint.memory;
    let lanes = bench.plan.options.slots;
    println!("\n## Memory of the card while {length} tokens are computed, {lanes} lanes, GB\n");
    let footprint = &bench.plan.footprint;
    let parts = [
        ("weights", m.weights),
        ("draft", m.draft),
        ("keys and values", m.kv),
        ("states of the lanes", m.state),
        ("kept states", m.snapshots),
        ("working buffers", footprint.working),
        ("kernels, recordings and the driver", most.saturating_sub(footprint.total())),
    ];
    println!("- in use, of all processes: {:.2}", gb(most));
    for (name, bytes) in parts {
        println!("- {name}: {:.2}", gb(bytes));
    }
    Ok(())
}

fn rates(bench: &Bench) -> anyhow::Result<()> {
    println!("\n## Tokens a second of all lanes together: median (least to most)\n");
    let drafting = if bench.request.always_draft { "drafting" } else { "drafting while that pays" };
    println!("| lanes | {drafting} | of one lane | not drafting | of one lane |");
    println!("|---|---|---|---|---|");
    let most = bench.plan.options.context.min(2048) - 64;
    let mut alone = [0.0; 2];
    for lanes in LANES.into_iter().filter(|&lanes| lanes <= bench.plan.options.slots) {
        let mut cells = Vec::new();
        for (draft, alone) in [true, false].into_iter().zip(&mut alone) {
            let mut rates: Vec<f64> = Vec::new();
            for repeat in 0..REPEATS {
                let seed = 10_000 * (1 + lanes as u64) + 1000 * repeat + 100 * u64::from(draft);
                let prompts = (0..lanes).map(|i| bench.tokens(seed + i as u64, 64));
                let prompts: Vec<Vec<u32>> = prompts.collect();
                let submit = |prompt: &Vec<u32>| bench.submit(prompt, Vec::new(), most, draft);
                let mut asked: Vec<Asked> =
                    prompts.iter().map(submit).collect::<anyhow::Result<_>>()?;
                asked.iter_mut().try_for_each(Asked::begin)?;
                sleep(WINDOW);
                asked.iter().for_each(|asked| bench.service.cancel(asked.id));
                let answers: Vec<Answer> =
                    asked.into_iter().map(Asked::end).collect::<anyhow::Result<_>>()?;
                rates.push(while_all_answer(&answers));
            }
            rates.sort_by(f64::total_cmp);
            let [least, rate, most] = [0, rates.len() / 2, rates.len() - 1].map(|i| rates[i]);
            *alone = if lanes == 1 { rate } else { *alone };
            cells.push(format!("{rate:.1} ({least:.1} to {most:.1}) | {:.2} x", rate / *alone));
        }
        println!("| {lanes} | {} |", cells.join(" | "));
    }
    Ok(())
}

/// Tokens a second from when the last lane began to answer until the first one's last round.
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

fn gap(bench: &Bench) -> anyhow::Result<()> {
    let length = DOCUMENTS[1].min(bench.plan.options.context / 2);
    println!(
        "\n## Gaps between a lane's tokens while a prompt of {length} tokens is computed, ms\n"
    );
    println!("| repeat | median gap alone | longest gaps | first token of the other |");
    println!("|---|---|---|---|");
    for repeat in 0..REPEATS {
        let calm = bench.ask(&bench.tokens(7000 + repeat, 64), Vec::new(), 64)?;
        let most = bench.plan.options.context - 128;
        let mut running = bench.submit(&bench.tokens(8000 + repeat, 64), Vec::new(), most, true)?;
        running.begin()?;
        sleep(Duration::from_millis(200));
        let other = bench.ask(&bench.tokens(9000 + repeat, length), Vec::new(), 1)?;
        bench.service.cancel(running.id);
        let running = running.end()?;
        let (mut calm, mut gaps) = (calm.gaps(), running.gaps());
        calm.sort();
        gaps.sort_by(|a, b| b.cmp(a));
        let longest = gaps.iter().take(4).map(|&gap| format!("{:.1}", ms(gap)));
        let longest = longest.collect::<Vec<_>>().join(", ");
        let median = calm.get(calm.len() / 2).copied().unwrap_or_default();
        println!("| {repeat} | {:.1} | {longest} | {:.1} |", ms(median), ms(other.first));
    }
    Ok(())
}

/// A folder that goes when it is dropped.
struct Folder(std::path::PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn restart(request: &LoadRequest) -> anyhow::Result<()> {
    let dir = std::env::temp_dir().join(format!("th-engine-serving-bench-{}", std::process::id()));
    let folder = Folder(dir.clone());
    let fingerprint = "serving-bench".to_owned();
    let disk = DiskOptions { dir, quota: 16 << 30, write_rate: 1 << 40, fingerprint };
    let bench = start(request, &Wishes::default(), Some(disk.clone()))?;
    let first_start = bench.started;
    let mut cold = Vec::new();
    for length in bench.documents() {
        let prompt = bench.tokens(700_000 + length as u64, length);
        let answer = bench.ask(&prompt, Vec::new(), 8)?;
        cold.push((length, prompt, answer));
    }
    let written = Instant::now();
    bench.service.drain(Duration::from_secs(60));
    let written = written.elapsed();
    drop(bench);
    let bench = start(request, &Wishes::default(), Some(disk))?;
    println!("\n## First token after a restart with a warm disk, ms\n");
    println!("| document | cold | restarted | tokens cached | the same once more |");
    println!("|---|---|---|---|---|");
    for (length, prompt, cold) in cold {
        let warm = bench.ask(&prompt, Vec::new(), 8)?;
        anyhow::ensure!(warm.ids == cold.ids, "the restarted answer is another");
        let more = bench.ask(&prompt, Vec::new(), 8)?;
        println!(
            "| {length} | {:.1} | {:.1} | {} | {:.1} |",
            ms(cold.first),
            ms(warm.first),
            warm.done.cached_tokens,
            ms(more.first)
        );
    }
    println!(
        "\n{:.1} GB on disk; the first process left {:.1} s after it was told to. It started in {:.1} s, the second in {:.1} s.",
        bench.service.stats().disk_bytes as f64 / 1e9,
        written.as_secs_f64(),
        first_start.as_secs_f64(),
        bench.started.as_secs_f64()
    );
    drop(folder);
    Ok(())
}
