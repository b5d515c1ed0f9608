//! Years of service from a seed: arrivals, cancels, deadlines, pressure and faults, on a machine that
//! notices when a lane sees what is not its own.

mod fake;
mod memory;
mod single;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{Core, Job, Limits, Lost, Phase, Rules, check};
use crate::disk::{Disk, Hand};
use crate::sampler::{SamplingDefaults, SamplingOptions};
use crate::scheduler::{OVERTAKING, Turns};
use crate::service::{
    CachePolicy, CacheSource, Constraint, Event, Finish, Priority, Request, RequestError,
    RequestId, ServiceStats,
};
use fake::{Before, Fake, Faults, Random, Time, VOCAB, after, answer};
use memory::Memory;

const STEPS: usize = 10_000;
const SEEDS: u64 = 100;
/// One prefill slice, two rounds with a piece from disk each, and what else may come between: the machine takes 9 ms, 5.5 ms, 4 ms,
/// and less than a millisecond for them.
const LONGEST_GAP: Duration = Duration::from_millis(34);

/// What is done to the core behind its back, so that a check must notice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Sabotage {
    #[default]
    None,
    /// A page is taken and forgotten.
    LosesAPage,
    /// Nobody counts who is overtaken.
    ForgetsWhoWaits,
    /// A request is counted twice.
    LosesACount,
    /// Prefill goes first whenever there is any.
    ForgetsWhoDecodes,
    /// What comes from disk is taken in as a whole.
    TakesAllAtOnce,
    /// Lanes count as ready before a pass of theirs has come back.
    TrustsTooSoon,
}

/// Pages that may come from disk in one step.
const PIECE: usize = 2;
/// Bytes of the disk tier, and what it may write a second.
const QUOTA: (u64, u64) = (60_000, 1 << 20);

/// What happens to the disk tier, once in so many steps; 0 is never.
#[derive(Clone, Copy, Debug, Default)]
struct DiskWorld {
    /// Whether there is one.
    on: bool,
    /// Of reads and writes: those that fail. Then its thread may die as well.
    fails: usize,
    /// A file is damaged.
    harms: usize,
    /// A file is damaged so that its checksum is right, which nobody could tell: the sabotage.
    forges: usize,
    /// The process ends, and another begins with what is on disk.
    restarts: usize,
}

/// One seed's world.
#[derive(Clone, Copy, Debug, Default)]
struct World {
    disk: DiskWorld,
    faults: Faults,
    sabotage: Sabotage,
    /// Short requests that never stop coming, and a long one among them.
    crowd: bool,
}

/// What a request was told.
#[derive(Debug, Default)]
struct Heard {
    state: u64,
    tokens: Vec<u32>,
    started: bool,
    end: Option<Result<Finish, RequestError>>,
    last_tokens: Option<Duration>,
    wrong: Option<String>,
    from_disk: bool,
}

struct Asked {
    prompt: Vec<u32>,
    max_tokens: usize,
    priority: Priority,
    /// Later ones of the same priority that got a lane first.
    passed: u32,
    heard: Arc<Mutex<Heard>>,
}

struct Sim {
    world: World,
    random: Random,
    clock: Time,
    core: Option<Core<Fake>>,
    limits: Limits,
    rules: Rules,
    documents: Vec<Vec<u32>>,
    /// Texts that an answer ended.
    texts: Vec<Vec<u32>>,
    asked: HashMap<RequestId, Asked>,
    next_id: u64,
    ended: u64,
    before: Before,
    memory: Memory,
    hand: Option<Hand>,
    /// Requests that went on from what came from disk.
    disk_hits: u64,
}

/// Breaks now and then.
struct Brittle(Random);

impl Constraint for Brittle {
    fn masks(&mut self, proposals: &[u32], masks: &mut [u32]) -> Result<usize, String> {
        masks.fill(u32::MAX);
        if self.0.one_in(40) { Err("no way to go on".to_owned()) } else { Ok(proposals.len() + 1) }
    }

    fn advance(&mut self, _: &[u32]) -> Result<bool, String> {
        Ok(self.0.one_in(30))
    }
}

impl Sim {
    fn new(seed: u64, world: World) -> Sim {
        let mut random = Random(seed);
        let (slots, context, block) = (1 + random.below(5), 640, 1 + random.below(8));
        let max_pages = (context + block).div_ceil(ops::PAGE_TOKENS);
        let limits = Limits {
            context,
            vocab: VOCAB,
            slots,
            pages: max_pages + random.below(slots * max_pages),
            snapshots: if random.one_in(8) { 0 } else { 1 + random.below(12) },
            snapshot_bytes: 8,
            page_bytes: 8 * ops::PAGE_TOKENS,
            block,
            chunk: 128,
            depth: 1 + random.below(2),
            adapts: random.one_in(2),
            like_alone: if random.one_in(2) { usize::MAX } else { 2 * block },
        };
        let rules = Rules {
            decode_share: [0.0, 0.3, 0.5, 0.8][random.below(4)],
            slice: Duration::from_millis(9),
            grid: [64, 128, 256, 2048][random.below(4)],
            exact: random.one_in(4),
            arrival: PIECE * limits.page_bytes,
        };
        let documents = (0..5)
            .map(|_| (0..100 + random.below(400)).map(|_| random.below(VOCAB) as u32).collect())
            .collect();
        let mut sim = Sim {
            world,
            random,
            clock: Time::default(),
            core: None,
            limits,
            rules,
            documents,
            texts: Vec::new(),
            asked: HashMap::new(),
            next_id: 1,
            ended: 0,
            before: Before::default(),
            memory: Memory::new(seed, world.disk.fails),
            hand: None,
            disk_hits: 0,
        };
        sim.core = Some(sim.fresh_core());
        sim
    }

    fn fresh_core(&mut self) -> Core<Fake> {
        let seed = self.random.next();
        let fake = Fake::new(self.limits, seed, self.clock.clone(), self.world.faults);
        let files = self.world.disk.on.then(|| Arc::new(self.memory.clone()));
        // A folder that can't be read: there is no disk tier until the next start.
        let opened = files.and_then(|files| Disk::by_hand(files, QUOTA.0, QUOTA.1).ok());
        let (disk, hand) = opened.unzip();
        self.hand = hand;
        Core::new(fake.knowing(&self.before), self.rules, disk)
    }

    /// The machine is lost, or the whole process: others begin, with the jobs that wait and what is on disk.
    fn start_over(&mut self, why: String, crash: bool) {
        let core = self.core.take().expect("there is one");
        let (jobs, stats) = core.abandon(&RequestError::Device(why));
        if let Some(hand) = self.hand.take() {
            // Closed in order, all that was to be written is.
            let mut left = if crash { self.random.below(6) } else { usize::MAX };
            while left > 0 && hand.is_alive() && hand.step() {
                left -= 1;
            }
        }
        let mut core = self.fresh_core();
        core.count_from(stats);
        jobs.into_iter().for_each(|job| core.resume(job));
        self.core = Some(core);
    }

    /// What happens to the disk in a step.
    fn disk_step(&mut self) {
        let DiskWorld { fails, harms, forges, restarts, .. } = self.world.disk;
        if self.random.one_in(harms) {
            self.memory.harm();
        }
        if self.random.one_in(forges) {
            self.memory.forge();
        }
        if self.random.one_in(restarts) {
            self.start_over("a restart".to_owned(), true);
        }
        let (works, dies) = (self.random.one_in(2), fails > 0 && self.random.one_in(5000));
        if let Some(hand) = self.hand.as_ref().filter(|hand| hand.is_alive()) {
            if works {
                hand.step();
            }
            if dies {
                hand.die();
            }
        }
    }

    fn core(&mut self) -> &mut Core<Fake> {
        self.core.as_mut().expect("there is one between steps")
    }

    /// A prompt that may begin like another.
    fn prompt(&mut self) -> Vec<u32> {
        let r = &mut self.random;
        let mut prompt = match r.below(4) {
            0 if !self.texts.is_empty() => self.texts[r.below(self.texts.len())].clone(),
            _ => {
                let document = &self.documents[r.below(self.documents.len())];
                let cut = if r.one_in(3) { document.len() } else { r.below(document.len()) };
                document[..cut].to_vec()
            }
        };
        if !r.one_in(4) || prompt.is_empty() {
            prompt.extend((0..1 + r.below(40)).map(|_| r.below(VOCAB) as u32));
        }
        prompt.truncate(self.limits.context - 1);
        prompt
    }

    fn arrive(&mut self) -> Result<(), String> {
        let mut prompt = self.prompt();
        let crowd = self.world.crowd;
        if crowd && self.next_id != 5 {
            prompt.truncate(20);
        }
        let r = &mut self.random;
        let mut boundaries: Vec<usize> =
            (0..r.below(3)).map(|_| r.below(prompt.len() + 1)).collect();
        boundaries.sort_unstable();
        let now = self.clock.now();
        let late = r.one_in(12).then(|| now + Duration::from_millis(r.below(400) as u64));
        let deadline = late.filter(|_| !crowd);
        let priority = match r.below(10) {
            _ if crowd => Priority::Normal,
            0 => Priority::Low,
            1 => Priority::High,
            _ => Priority::Normal,
        };
        let brittle = Brittle(Random(r.next()));
        let constraint = r.one_in(8).then(|| Box::new(brittle) as Box<dyn Constraint>);
        let greedy = SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() };
        let sampler = greedy.resolve(&SamplingDefaults::default(), VOCAB);
        let request = Request {
            boundaries,
            max_tokens: r.below(40),
            stop_tokens: (0..r.below(12) / 10 * 12).map(|_| r.below(VOCAB) as u32).collect(),
            sampler: sampler.map_err(|e| e.to_string())?,
            logprobs: None,
            constraint,
            draft: r.one_in(2),
            priority,
            deadline: None,
            cache: match r.below(8) {
                0 => CachePolicy::Off,
                1 => CachePolicy::Exact,
                _ => CachePolicy::Shared,
            },
            prompt,
        };
        check(&request, &self.limits).map_err(|e| e.to_string())?;
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let start = request.prompt[..request.prompt.len() - 1].iter();
        let state = start.fold(0, |state, &token| after(state, token));
        let heard = Arc::new(Mutex::new(Heard { state, ..Heard::default() }));
        let asked = Asked {
            prompt: request.prompt.clone(),
            max_tokens: request.max_tokens,
            priority,
            passed: 0,
            heard: Arc::clone(&heard),
        };
        self.asked.insert(id, asked);
        let mut anchor = request.prompt.last().copied().unwrap_or_default();
        let clock = self.clock.clone();
        let events = Box::new(move |event| {
            let mut heard = heard.lock().expect("no panics");
            heard.take(event, &mut anchor, clock.now());
        });
        let remaining = request.prompt.len();
        let (submitted, overtaken, deaf) = (now, 0, false);
        self.core().submit(Job {
            id,
            request,
            events,
            submitted,
            deadline,
            overtaken,
            remaining,
            deaf,
            loading: None,
        });
        Ok(())
    }

    /// One thing happens, then the core does one step, then everything is looked at.
    fn step(&mut self, n: usize, arrivals: bool) -> Result<bool, String> {
        let now = self.clock.now();
        let crowd = self.world.crowd;
        let often = if crowd { 2 } else { 12 };
        if arrivals && self.asked.len() < 24 && self.random.one_in(often) {
            self.arrive()?;
        }
        if !crowd && self.random.one_in(60) {
            let ids: Vec<RequestId> = self.ids();
            if !ids.is_empty() {
                let id = ids[self.random.below(ids.len())];
                let tokens = self.random.below(20);
                match self.random.below(3) {
                    0 => self.core().finish(id, tokens, now),
                    _ => self.core().cancel(id, now),
                }
            }
        }
        match self.world.sabotage {
            Sabotage::LosesAPage if n == 500 => drop(self.core().pages.take()),
            Sabotage::ForgetsWhoWaits => {
                self.core().waiting.iter_mut().for_each(|job| job.overtaken = 0);
            }
            Sabotage::ForgetsWhoDecodes => self.core().turns = Turns::new(0.0),
            Sabotage::TrustsTooSoon => {
                self.core().lanes.iter_mut().flatten().for_each(|running| running.proven = true);
            }
            Sabotage::TakesAllAtOnce => self.core().rules.arrival = usize::MAX,
            Sabotage::LosesACount if n == 500 => self.core().stats.accepted += 1,
            _ => {}
        }
        if self.world.disk.on {
            self.disk_step();
        }
        let clock = self.clock.clone();
        self.core().machine.written = 0;
        let stepped = self.core().step(&|| clock.now());
        if self.core().machine.written > PIECE {
            return Err("others wait for more than a piece from disk".to_owned());
        }
        let busy = match stepped {
            Ok(busy) => busy,
            Err(Lost(error)) => {
                self.start_over(error.to_string(), false);
                true
            }
        };
        if !busy {
            clock.pass(1000);
        }
        self.look(n.is_multiple_of(199))?;
        Ok(busy)
    }

    fn ids(&self) -> Vec<RequestId> {
        let mut ids: Vec<RequestId> = self.asked.keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    fn look(&mut self, closely: bool) -> Result<(), String> {
        let ids = self.ids();
        let mut started = Vec::new();
        for &id in &ids {
            let asked = &self.asked[&id];
            let mut heard = asked.heard.lock().expect("no panics");
            if let Some(wrong) = heard.wrong.take() {
                return Err(format!("{id}: {wrong}"));
            }
            if heard.tokens.len() > asked.max_tokens {
                return Err(format!("{id}: more tokens than asked for"));
            }
            if heard.started && heard.end.is_none() {
                started.push((id, asked.priority));
            }
        }
        self.note_passed(&started)?;
        for id in ids {
            let heard = Arc::clone(&self.asked[&id].heard);
            let heard = heard.lock().expect("no panics");
            if let Some(end) = &heard.end {
                let asked = self.asked.remove(&id).expect("it was there");
                self.ended += 1;
                self.disk_hits += u64::from(heard.from_disk);
                if end.is_ok() && self.texts.len() < 40 {
                    self.texts.push([asked.prompt, heard.tokens.clone()].concat());
                }
            }
        }
        let open = self.asked.len() as u64;
        let ended = self.ended;
        let core = self.core();
        if let Some(wrong) = core.machine.wrong.take() {
            return Err(wrong);
        }
        let stats = core.stats();
        let ServiceStats { accepted, completed, cancelled, failed, waiting, running, .. } = stats;
        if stats.disk_bytes > QUOTA.0 {
            return Err(format!("{} bytes on disk", stats.disk_bytes));
        }
        let going = (waiting + running) as u64;
        if accepted != completed + cancelled + failed + going || going != open {
            return Err(format!(
                "counters: {accepted} accepted, {completed} completed, {cancelled} cancelled, \
                 {failed} failed, {going} going; {open} open and {ended} ended"
            ));
        }
        if closely { look_closely(core) } else { Ok(()) }
    }

    /// Counts who got a lane before whom.
    fn note_passed(&mut self, started: &[(RequestId, Priority)]) -> Result<(), String> {
        for &(id, priority) in started {
            let new = {
                let mut heard = self.asked[&id].heard.lock().expect("no panics");
                std::mem::take(&mut heard.started)
            };
            if !new {
                continue;
            }
            for (&other, asked) in &mut self.asked {
                let heard = asked.heard.lock().expect("no panics");
                let waits = heard.end.is_none() && heard.last_tokens.is_none();
                let in_queue = waits && asked.priority == priority && other < id;
                drop(heard);
                asked.passed += u32::from(in_queue && !asked.prompt.is_empty());
            }
        }
        let core = self.core.as_ref().expect("there is one between steps");
        for job in &core.waiting {
            let passed = self.asked.get(&job.id).map_or(0, |asked| asked.passed);
            // Others of its priority that were overtaken too often may still be before it.
            if passed > 2 * OVERTAKING + 8 {
                return Err(format!("{} starves: {passed} went first", job.id));
            }
        }
        Ok(())
    }
}

/// Every page is referred to as often as is counted, and every checkpoint holds what it says.
fn look_closely(core: &Core<Fake>) -> Result<(), String> {
    let checkpoints = core.cache.all();
    for (text, snapshot, pages) in &checkpoints {
        core.machine.holds(text, *snapshot, pages)?;
    }
    let mut used: Vec<u32> = checkpoints.iter().flat_map(|(.., pages)| pages.clone()).collect();
    used.extend(core.lanes.iter().flatten().flat_map(|running| running.pages.clone()));
    used.extend(core.arriving_pages());
    used.sort_unstable();
    used.dedup();
    if used.len() != core.pages.used() {
        let (used, counted) = (used.len(), core.pages.used());
        return Err(format!("{counted} pages count as used, and {used} are"));
    }
    for running in core.lanes.iter().flatten().filter(|r| r.phase == Phase::Decode) {
        let (pos, text) = (running.lane.pos as usize, running.text.len());
        if pos + 1 != text {
            return Err(format!("a lane at {pos} with a text of {text}"));
        }
    }
    Ok(())
}

impl Heard {
    fn take(&mut self, event: Event, anchor: &mut u32, now: Duration) {
        if self.end.is_some() {
            self.wrong = Some(format!("{event:?} after the end"));
        }
        match event {
            Event::Started { cache, .. } => {
                self.started = true;
                self.from_disk = cache.source == CacheSource::Disk;
            }
            Event::Prefill { done, total } => {
                if done >= total {
                    self.wrong = Some(format!("{done} of {total} prompt tokens"));
                }
            }
            Event::Tokens { tokens, .. } => {
                let gap = self.last_tokens.map_or(Duration::ZERO, |last| now - last);
                if gap > LONGEST_GAP {
                    self.wrong = Some(format!("a gap of {gap:?} between tokens"));
                }
                self.last_tokens = Some(now);
                for token in tokens {
                    self.state = after(self.state, *anchor);
                    *anchor = answer(self.state);
                    if token.id != *anchor {
                        let (got, want) = (token.id, *anchor);
                        self.wrong = Some(format!("token {got}, alone it would be {want}"));
                    }
                    self.tokens.push(token.id);
                }
            }
            Event::Done(done) => {
                self.tokens.truncate(done.output_tokens);
                self.end = Some(Ok(done.finish));
            }
            Event::Failed(error) => self.end = Some(Err(error)),
        }
    }
}

/// Runs a world to its end.
fn run(seed: u64, world: World, steps: usize) -> Result<(ServiceStats, u64), String> {
    let mut sim = Sim::new(seed, world);
    let told = |n: usize, why: String| format!("seed {seed}, step {n}: {why}");
    for n in 0..steps {
        sim.step(n, true).map_err(|why| told(n, why))?;
    }
    // Then nobody comes any more, and everything must end.
    for n in 0..20_000 {
        let busy = sim.step(steps + n, false).map_err(|why| told(steps + n, why))?;
        let worked = sim.hand.as_ref().is_some_and(|hand| hand.is_alive() && hand.step());
        if !busy && !worked && sim.core().is_idle() {
            break;
        }
    }
    let (disk_hits, on_disk) = (sim.disk_hits, sim.memory.bytes());
    let core = sim.core();
    look_closely(core).map_err(|why| told(steps, why))?;
    if !core.is_idle() {
        return Err(format!("seed {seed}: {:?} at the end", core.stats()));
    }
    let stats = core.stats();
    let alone = core.cache.pages_alone(&core.pages);
    let DiskWorld { fails, harms, forges, .. } = world.disk;
    if fails + harms + forges == 0 && stats.disk_bytes != on_disk {
        return Err(format!("seed {seed}: {} bytes count, {on_disk} are there", stats.disk_bytes));
    }
    core.cache.clear(&mut core.pages);
    if alone != stats.pages_used || core.pages.used() != 0 {
        return Err(format!("seed {seed}: {} pages are left", core.pages.used()));
    }
    Ok((stats, disk_hits))
}

#[test]
fn nothing_leaks_changes_or_starves() {
    let (mut sum, mut disk_hits) = (ServiceStats::default(), 0);
    for seed in 0..SEEDS {
        let faults = match seed % 4 {
            0 => Faults { fails: 150, lost: 5, ..Faults::default() },
            1 => Faults { fails: 1000, lost: 2, ..Faults::default() },
            _ => Faults::default(),
        };
        // Half of them have a disk tier: one on which all is well, one that decays, one that fails too.
        let on = DiskWorld { on: true, restarts: 700, ..DiskWorld::default() };
        let disk = match seed % 6 {
            0 => on,
            2 => DiskWorld { harms: 200, ..on },
            4 => DiskWorld { harms: 400, fails: 30, ..on },
            _ => DiskWorld::default(),
        };
        let world = World { disk, faults, crowd: seed % 10 == 9, ..World::default() };
        let (stats, hits) = run(seed, world, STEPS).unwrap_or_else(|why| panic!("{why}"));
        disk_hits += hits;
        sum.completed += stats.completed;
        sum.cancelled += stats.cancelled;
        sum.failed += stats.failed;
        sum.cached_tokens += stats.cached_tokens;
        sum.prompt_tokens += stats.prompt_tokens;
        sum.evictions += stats.evictions;
    }
    println!("{sum:?}, {disk_hits} from disk");
    // Everything that was to be tested did happen.
    assert!(sum.completed > 20_000 && sum.cancelled > 2_000 && sum.failed > 1_000, "{sum:?}");
    assert!(10 * sum.cached_tokens > sum.prompt_tokens && sum.evictions > 5_000, "{sum:?}");
    assert!(disk_hits > 500, "{disk_hits} requests went on from what was on disk");
}

/// The checks notice what they are there for.
#[test]
fn a_broken_core_is_found_out() {
    let found = |world: World, word: &str| {
        let outcomes = (0..30).map(|seed| run(seed, world, 4_000));
        let why: Vec<String> = outcomes.filter_map(Result::err).collect();
        assert!(why.iter().any(|why| why.contains(word)), "{world:?}: {why:?}");
    };
    let with = |faults: Faults| World { faults, ..World::default() };
    let by = |sabotage: Sabotage, crowd: bool| World { sabotage, crowd, ..World::default() };
    found(with(Faults { forgets_copies: true, ..Faults::default() }), "another text's position");
    found(with(Faults { spoils_snapshots: true, ..Faults::default() }), "snapshot");
    let faults = Faults { fails: 150, ..Faults::default() };
    let soon = World { sabotage: Sabotage::TrustsTooSoon, faults, ..World::default() };
    found(soon, "another text's position");
    let disk = DiskWorld { on: true, restarts: 700, forges: 20, ..DiskWorld::default() };
    found(World { disk, ..World::default() }, "was changed");
    let all = World { sabotage: Sabotage::TakesAllAtOnce, ..World::default() };
    found(World { disk: DiskWorld { forges: 0, ..disk }, ..all }, "a piece from disk");
    found(by(Sabotage::LosesAPage, false), "pages count as used");
    found(by(Sabotage::LosesACount, false), "counters");
    found(by(Sabotage::ForgetsWhoWaits, true), "starves");
    found(by(Sabotage::ForgetsWhoDecodes, false), "between tokens");
}
