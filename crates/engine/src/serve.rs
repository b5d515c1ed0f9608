//! The service's thread: it owns the engine, does one step after another, and starts over when the
//! device fails.

use std::collections::VecDeque;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ops::Device;

use crate::disk::{Disk, DiskOptions};
use crate::engine::Engine;
use crate::lanes::{Core, Job, Limits, Lost, Machine, Rules, check};
use crate::service::{
    Event, EventSink, Finish, Health, Refusal, Request, RequestError, RequestId, Service,
    ServiceInfo, ServiceStats,
};

/// How an engine serves.
#[derive(Clone, Debug)]
pub struct ServiceOptions {
    /// Requests that may wait for a lane.
    pub queue: usize,
    /// Part of the time that rounds get while prompts are computed, 0 to 0.95.
    pub decode_share: f64,
    /// The longest that a lane which answers waits for a piece of another's prompt.
    pub slice: Duration,
    /// Tokens between checkpoints while a prompt is computed.
    pub checkpoint_every: usize,
    /// Whether requests reuse only state that prefill passes made, whatever they ask for.
    pub exact_cache: bool,
    /// Where checkpoints are kept on disk.
    pub disk: Option<DiskOptions>,
}

impl Default for ServiceOptions {
    fn default() -> ServiceOptions {
        ServiceOptions {
            queue: 64,
            decode_share: 0.5,
            slice: Duration::from_millis(200),
            checkpoint_every: 2048,
            exact_cache: false,
            disk: None,
        }
    }
}

/// Failures within [`CRASH_WINDOW`] after which the service gives up.
const CRASHES: usize = 3;
const CRASH_WINDOW: Duration = Duration::from_secs(60);
/// Between two tries to build the engine again.
const RETRY: Duration = Duration::from_millis(500);
/// How often an idle thread shows that it lives.
const IDLE_BEAT: Duration = Duration::from_millis(500);
/// How often it looks whether the disk has answered.
const DISK_BEAT: Duration = Duration::from_millis(1);
/// A step counts as stuck after this and so many times the longest step so far.
const STUCK: (Duration, u32) = (Duration::from_secs(2), 4);
/// Bytes of a checkpoint from disk that go to the device between two rounds: 20 ms at 3 GB/s.
const ARRIVAL: usize = 64 << 20;
/// What a step may take before any was measured.
const FIRST_STEP: Duration = Duration::from_secs(2);

/// Serves the engine that `build` makes, on a thread of its own, where `build` runs too: an engine
/// never leaves it. `build` is called again after a failure that the device does not recover from.
/// Returns once the engine is there.
///
/// # Errors
/// What `build` says the first time.
pub fn serve<D, E, F>(build: F, options: ServiceOptions) -> Result<Arc<EngineService>, E>
where
    D: Device,
    E: Display + Send + 'static,
    F: FnMut() -> Result<Engine<D>, E> + Send + 'static,
{
    let (sender, commands) = channel();
    let (ready, built) = channel();
    let epoch = Instant::now();
    let spawned = std::thread::Builder::new()
        .name("engine".to_owned())
        .spawn(move || Worker { build, options, commands, epoch }.run(&ready));
    let thread = spawned.unwrap_or_else(|error| panic!("no thread for the engine: {error}"));
    match built.recv() {
        Ok(Ok(shared)) => {
            let thread = Mutex::new(Some(thread));
            Ok(Arc::new(EngineService { shared, commands: sender, thread }))
        }
        Ok(Err(error)) => Err(error),
        Err(_) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("the thread says what became of the engine"),
        },
    }
}

/// An engine that answers many requests at once. Dropping it ends them.
pub struct EngineService {
    shared: Arc<Shared>,
    commands: Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for EngineService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineService").field("info", &self.shared.info).finish_non_exhaustive()
    }
}

enum Command {
    Submit(Box<Job>),
    Cancel(RequestId),
    Finish(RequestId, usize),
    /// Ends when nothing is left to do, or at this time.
    Drain(Duration),
}

/// What the service's thread shows to the others.
struct Shared {
    info: ServiceInfo,
    limits: Limits,
    epoch: Instant,
    next_id: AtomicU64,
    refused: AtomicU64,
    draining: AtomicBool,
    gate: Mutex<Gate>,
    stats: Mutex<ServiceStats>,
    health: Mutex<Health>,
    pulse: Mutex<Pulse>,
    disk_error: Mutex<Option<String>>,
}

/// Who may still come in.
#[derive(Debug, Default)]
struct Gate {
    /// Submitted, and not seen by the thread yet.
    underway: usize,
    waiting: usize,
    free_lanes: usize,
    /// Requests that have been told of their end since the two above were counted.
    ended: usize,
    /// Mean time of a request on a lane.
    service_time: Duration,
}

/// When the thread last showed that it lives.
#[derive(Debug)]
struct Pulse {
    beat: Duration,
    longest: Duration,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    fn set_health(&self, health: Health) {
        *lock(&self.health) = health;
    }

    fn beat(&self, step: Duration) {
        let mut pulse = lock(&self.pulse);
        pulse.beat = self.now();
        pulse.longest = pulse.longest.max(step);
    }
}

impl Service for EngineService {
    fn submit(&self, request: Request, events: EventSink) -> Result<RequestId, Refusal> {
        let shared = &self.shared;
        let outcome = check(&request, &shared.limits).and_then(|()| self.enter(request, events));
        if outcome.is_err() {
            shared.refused.fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }

    fn cancel(&self, id: RequestId) {
        // A thread that has ended has ended its requests too.
        let _ = self.commands.send(Command::Cancel(id));
    }

    fn finish(&self, id: RequestId, tokens: usize) {
        let _ = self.commands.send(Command::Finish(id, tokens));
    }

    fn info(&self) -> ServiceInfo {
        self.shared.info.clone()
    }

    fn stats(&self) -> ServiceStats {
        let refused = self.shared.refused.load(Ordering::Relaxed);
        ServiceStats { refused, ..*lock(&self.shared.stats) }
    }

    fn health(&self) -> Health {
        let health = lock(&self.shared.health).clone();
        let pulse = lock(&self.shared.pulse);
        let silent = self.shared.now().saturating_sub(pulse.beat);
        let patience = STUCK.0 + STUCK.1 * pulse.longest;
        match health {
            Health::Serving | Health::Draining if silent > patience => {
                Health::Recovering(format!("no sign of life for {} s", silent.as_secs()))
            }
            health => health,
        }
    }

    fn disk_error(&self) -> Option<String> {
        lock(&self.shared.disk_error).clone()
    }
}

impl EngineService {
    fn enter(&self, request: Request, events: EventSink) -> Result<RequestId, Refusal> {
        let shared = &self.shared;
        if let Health::Failed(why) = &*lock(&shared.health) {
            return Err(Refusal::Unavailable(format!("the engine has stopped: {why}")));
        }
        if shared.draining.load(Ordering::Acquire) {
            return Err(Refusal::Unavailable("the engine is shutting down".to_owned()));
        }
        let mut gate = lock(&shared.gate);
        let waiting = gate.underway + gate.waiting;
        if waiting >= shared.info.queue + gate.free_lanes + gate.ended {
            let turns = (waiting + 1).div_ceil(shared.info.lanes.max(1)) as u32;
            let retry_after = gate.service_time.saturating_mul(turns);
            let (least, most) = (Duration::from_secs(1), Duration::from_secs(120));
            return Err(Refusal::Busy { waiting, retry_after: retry_after.clamp(least, most) });
        }
        let id = RequestId(shared.next_id.fetch_add(1, Ordering::Relaxed));
        let submitted = shared.now();
        let deadline =
            request.deadline.map(|deadline| deadline.saturating_duration_since(shared.epoch));
        let (overtaken, remaining, deaf, loading) = (0, request.prompt.len(), false, None);
        let events = self.counting(events);
        let job =
            Job { id, request, events, submitted, deadline, overtaken, remaining, deaf, loading };
        let sent = self.commands.send(Command::Submit(Box::new(job)));
        sent.map_err(|_| Refusal::Unavailable("the engine has stopped".to_owned()))?;
        gate.underway += 1;
        Ok(id)
    }

    /// Whoever is told of an end may ask again at once, and finds the room that it left.
    fn counting(&self, mut events: EventSink) -> EventSink {
        let shared = Arc::clone(&self.shared);
        Box::new(move |event| {
            if matches!(event, Event::Done(_) | Event::Failed(_)) {
                lock(&shared.gate).ended += 1;
            }
            events(event);
        })
    }

    /// Takes no more requests, lets those that are there end within `patience`, and stops. The rest
    /// are cancelled.
    pub fn drain(&self, patience: Duration) {
        self.shared.draining.store(true, Ordering::Release);
        let until = self.shared.now().saturating_add(patience);
        let _ = self.commands.send(Command::Drain(until));
        if let Some(thread) = lock(&self.thread).take() {
            // Its panics were told to whoever had a request.
            let _ = thread.join();
        }
    }
}

impl Drop for EngineService {
    fn drop(&mut self) {
        self.drain(Duration::ZERO);
    }
}

struct Worker<F> {
    build: F,
    options: ServiceOptions,
    commands: Receiver<Command>,
    epoch: Instant,
}

/// Why a core stopped.
enum Stop {
    Drained,
    Failed(String),
}

/// Says that the service is gone, however its thread ends.
struct Gone(Arc<Shared>);

impl Drop for Gone {
    fn drop(&mut self) {
        let mut health = lock(&self.0.health);
        if std::thread::panicking() {
            *health = Health::Failed("its thread panicked".to_owned());
        }
        if !matches!(*health, Health::Failed(_)) {
            *health = Health::Failed("it was shut down".to_owned());
        }
    }
}

impl<D, E, F> Worker<F>
where
    D: Device,
    E: Display + Send + 'static,
    F: FnMut() -> Result<Engine<D>, E> + Send + 'static,
{
    fn run(mut self, ready: &Sender<Result<Arc<Shared>, E>>) {
        let mut engine = match (self.build)() {
            Ok(engine) => engine,
            Err(error) => {
                // Whoever waits for it is there until it comes.
                let _ = ready.send(Err(error));
                return;
            }
        };
        let shared = Arc::new(self.shared(&mut engine));
        let _gone = Gone(Arc::clone(&shared));
        let mut disk = self.disk(&engine, &shared);
        let _ = ready.send(Ok(Arc::clone(&shared)));
        let mut crashes: VecDeque<Duration> = VecDeque::new();
        let mut stats = ServiceStats::default();
        let mut jobs = Vec::new();
        let mut drain = None;
        loop {
            let mut core = Core::new(engine, self.rules(), disk);
            core.count_from(stats);
            jobs.drain(..).for_each(|job| core.resume(job));
            if drain.is_none() {
                shared.set_health(Health::Serving);
            }
            let stop = self.work(&mut core, &shared, &mut drain);
            let Stop::Failed(why) = stop else { return };
            (jobs, stats) = core.abandon(&RequestError::Device(why.clone()));
            stats.restarts += 1;
            *lock(&shared.stats) = stats;
            match self.rebuild(&shared, &mut crashes, why) {
                Ok(rebuilt) => engine = rebuilt,
                Err(why) => return self.give_up(&shared, jobs, stats, why),
            }
            disk = self.disk(&engine, &shared);
        }
    }

    fn shared(&self, engine: &mut Engine<D>) -> Shared {
        let limits = engine.limits();
        let info = ServiceInfo {
            context: limits.context,
            lanes: limits.slots,
            vocab: limits.vocab,
            block: limits.block,
            queue: self.options.queue,
            device: engine.dev.info().name,
            memory: engine.memory(),
            round_bytes: engine.round_bytes(0).total(),
            read_bandwidth: engine.read_bandwidth(),
        };
        let gate = Gate { free_lanes: limits.slots, ..Gate::default() };
        Shared {
            info,
            limits,
            epoch: self.epoch,
            next_id: AtomicU64::new(1),
            refused: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            gate: Mutex::new(gate),
            stats: Mutex::new(ServiceStats::default()),
            health: Mutex::new(Health::Serving),
            pulse: Mutex::new(Pulse { beat: self.epoch.elapsed(), longest: FIRST_STEP }),
            disk_error: Mutex::new(None),
        }
    }

    /// The disk tier; `shared` says why there is none although one was asked for.
    fn disk(&self, engine: &Engine<D>, shared: &Shared) -> Option<Disk> {
        let options = self.options.disk.as_ref()?;
        // Pages of another form belong to another state, whatever else is the same.
        let kv = engine.page_shape().kv.name();
        let fingerprint = format!("{}\nkeys and values in {kv}", options.fingerprint);
        let opened = Disk::open(&DiskOptions { fingerprint, ..options.clone() });
        let why_not = opened.as_ref().err();
        *lock(&shared.disk_error) =
            why_not.map(|error| format!("{}: {error}", options.dir.display()));
        opened.ok()
    }

    fn rules(&self) -> Rules {
        Rules {
            decode_share: self.options.decode_share,
            slice: self.options.slice,
            grid: self.options.checkpoint_every,
            exact: self.options.exact_cache,
            arrival: ARRIVAL,
        }
    }

    /// Steps until there is nothing left to do and the service drains, or the machine is lost.
    fn work(
        &self,
        core: &mut Core<Engine<D>>,
        shared: &Shared,
        drain: &mut Option<Duration>,
    ) -> Stop {
        let clock = || shared.now();
        let mut busy = false;
        loop {
            self.commands_in(core, shared, drain, busy);
            if let Some(until) = *drain {
                if core.is_idle() && (clock() >= until || !core.has_backlog()) {
                    return Stop::Drained;
                }
                shared.set_health(Health::Draining);
                if clock() >= until {
                    core.end_all(Finish::Cancelled, clock());
                }
            }
            let begun = clock();
            let stepped = catch_unwind(AssertUnwindSafe(|| core.step(&clock)));
            self.show(core, shared);
            shared.beat(clock().saturating_sub(begun));
            busy = match stepped {
                Ok(Ok(busy)) => busy,
                Ok(Err(Lost(error))) => return Stop::Failed(error.to_string()),
                Err(panic) => return Stop::Failed(format!("a panic: {}", words(&*panic))),
            };
        }
    }

    /// Takes in what was sent; waits for something if there is nothing else to do.
    fn commands_in(
        &self,
        core: &mut Core<Engine<D>>,
        shared: &Shared,
        drain: &mut Option<Duration>,
        busy: bool,
    ) {
        let mut wait = (!busy).then(|| {
            let now = shared.now();
            let next = core.next_deadline().into_iter().chain(*drain);
            let most = if core.waits_for_disk() { DISK_BEAT } else { IDLE_BEAT };
            next.map(|at| at.saturating_sub(now)).fold(most, Duration::min)
        });
        loop {
            let command = match wait.take() {
                Some(time) => match self.commands.recv_timeout(time) {
                    Ok(command) => command,
                    Err(RecvTimeoutError::Timeout) => return,
                    // Nobody can ask for anything any more.
                    Err(RecvTimeoutError::Disconnected) => return *drain = Some(Duration::ZERO),
                },
                None => match self.commands.try_recv() {
                    Ok(command) => command,
                    Err(_) => return,
                },
            };
            let now = shared.now();
            match command {
                Command::Submit(job) => {
                    let mut gate = lock(&shared.gate);
                    gate.underway -= 1;
                    gate.waiting += 1;
                    drop(gate);
                    core.submit(*job);
                }
                Command::Cancel(id) => core.cancel(id, now),
                Command::Finish(id, tokens) => core.finish(id, tokens, now),
                Command::Drain(until) => *drain = Some(until),
            }
        }
    }

    /// Shows the others how things stand.
    fn show(&self, core: &mut Core<Engine<D>>, shared: &Shared) {
        let stats = core.stats();
        let mut gate = lock(&shared.gate);
        gate.waiting = stats.waiting;
        gate.ended = 0;
        gate.free_lanes = shared.limits.slots - stats.running.min(shared.limits.slots);
        gate.service_time = core.service_time();
        drop(gate);
        *lock(&shared.stats) = stats;
        if let Some(error) = core.disk_error() {
            *lock(&shared.disk_error) = Some(error.to_owned());
        }
    }

    /// Builds the engine again, unless that was necessary too often lately.
    fn rebuild(
        &mut self,
        shared: &Shared,
        crashes: &mut VecDeque<Duration>,
        mut why: String,
    ) -> Result<Engine<D>, String> {
        loop {
            let now = shared.now();
            crashes.push_back(now);
            crashes.retain(|&at| now.saturating_sub(at) < CRASH_WINDOW);
            if crashes.len() >= CRASHES {
                let count = crashes.len();
                return Err(format!("{count} failures within a minute, the last: {why}"));
            }
            shared.set_health(Health::Recovering(why.clone()));
            match catch_unwind(AssertUnwindSafe(&mut self.build)) {
                Ok(Ok(engine)) => return Ok(engine),
                Ok(Err(error)) => why = error.to_string(),
                Err(panic) => why = format!("a panic: {}", words(&*panic)),
            }
            std::thread::sleep(RETRY);
        }
    }

    fn give_up(&self, shared: &Shared, jobs: Vec<Job>, mut stats: ServiceStats, why: String) {
        shared.set_health(Health::Failed(why.clone()));
        let error = RequestError::Stopped(why);
        // Whoever still held the gate has sent its job by now.
        drop(lock(&shared.gate));
        let late = self.commands.try_iter().filter_map(|command| match command {
            Command::Submit(job) => {
                stats.accepted += 1;
                Some(*job)
            }
            _ => None,
        });
        let lost: Vec<Job> = jobs.into_iter().chain(late).collect();
        // Whoever hears of it finds it counted.
        *lock(&shared.stats) = ServiceStats { failed: stats.failed + lost.len() as u64, ..stats };
        for mut job in lost {
            job.tell(Event::Failed(error.clone()));
        }
    }
}

/// What a panic said.
fn words(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a word")
}
