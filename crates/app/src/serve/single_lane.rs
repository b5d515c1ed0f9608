//! A [`Service`] with one lane: requests wait for each other.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use engine::service::{
    CacheSource, CacheUse, Done, Event, EventSink, Finish, Health, Refusal, Request, RequestError,
    RequestId, Service, ServiceInfo, ServiceStats, Token,
};
use engine::{Engine, EngineError, FinishReason, Session};
use ops::Device;

/// Requests that may wait.
const QUEUE: usize = 64;

/// A service with one lane.
pub struct SingleLane {
    shared: Arc<Mutex<Shared>>,
    wake: Sender<()>,
    info: ServiceInfo,
}

#[derive(Default)]
struct Shared {
    next: u64,
    waiting: VecDeque<Job>,
    running: Option<RequestId>,
    /// What was said of the running request: `Some(tokens)` to end it there, `None` to cancel it.
    verdict: Option<Option<usize>>,
    stats: ServiceStats,
    failed: Option<String>,
}

struct Job {
    id: RequestId,
    request: Request,
    events: EventSink,
    submitted: Instant,
}

impl SingleLane {
    /// Builds an engine on a thread of its own, where it stays.
    ///
    /// # Errors
    /// If it can't be built.
    pub fn start<D: Device>(
        build: impl FnOnce() -> anyhow::Result<Engine<D>> + Send + 'static,
    ) -> anyhow::Result<SingleLane> {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (wake, woken) = channel();
        let (ready, built) = channel();
        let on_thread = Arc::clone(&shared);
        let build = move || {
            let mut engine = match build() {
                Ok(engine) => engine,
                Err(error) => return drop(ready.send(Err(error))),
            };
            if ready.send(Ok(info(&mut engine))).is_ok() {
                Lane { shared: on_thread, engine, session: Session::new(0) }.run(&woken);
            }
        };
        std::thread::Builder::new().name("engine".into()).spawn(build)?;
        let info = built.recv().unwrap_or_else(|_| anyhow::bail!("the engine's thread panicked"))?;
        Ok(SingleLane { shared, wake, info })
    }

    fn shared<T>(&self, change: impl FnOnce(&mut Shared) -> T) -> T {
        lock(&self.shared, change)
    }
}

fn info<D: Device>(engine: &mut Engine<D>) -> ServiceInfo {
    ServiceInfo {
        context: engine.context(),
        lanes: 1,
        vocab: engine.target().vocab,
        block: engine.block(),
        queue: QUEUE,
        device: engine.dev.info().name,
        memory: engine.memory(),
        round_bytes: engine.round_bytes(0).total(),
        read_bandwidth: engine.read_bandwidth(),
    }
}

fn lock<T>(shared: &Mutex<Shared>, change: impl FnOnce(&mut Shared) -> T) -> T {
    change(&mut shared.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Service for SingleLane {
    fn submit(&self, request: Request, events: EventSink) -> Result<RequestId, Refusal> {
        let (tokens, context) = (request.prompt.len(), self.info.context);
        if tokens >= context {
            return Err(Refusal::TooLong { tokens, context });
        }
        if tokens == 0 {
            return Err(Refusal::Invalid("the prompt is empty: give at least one token".into()));
        }
        let vocab = self.info.vocab;
        if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= vocab) {
            let what = format!("token {id} is not in the vocabulary of {vocab}");
            return Err(Refusal::Invalid(what));
        }
        if request.logprobs.is_some() || request.constraint.is_some() {
            let what = "this engine gives no log-probabilities and obeys no grammar";
            return Err(Refusal::Invalid(what.into()));
        }
        let id = self.shared(|shared| {
            if let Some(failed) = &shared.failed {
                return Err(Refusal::Unavailable(failed.clone()));
            }
            if shared.waiting.len() >= QUEUE {
                shared.stats.refused += 1;
                let retry_after = Duration::from_secs(5);
                return Err(Refusal::Busy { waiting: shared.waiting.len(), retry_after });
            }
            shared.next += 1;
            shared.stats.accepted += 1;
            let id = RequestId(shared.next);
            shared.waiting.push_back(Job { id, request, events, submitted: Instant::now() });
            Ok(id)
        })?;
        // The thread is gone only after a failure, which the next request is told.
        let _ = self.wake.send(());
        Ok(id)
    }

    fn cancel(&self, id: RequestId) {
        let waiting = self.shared(|shared| {
            if shared.running == Some(id) {
                shared.verdict = Some(None);
            }
            let at = shared.waiting.iter().position(|job| job.id == id)?;
            shared.stats.cancelled += 1;
            shared.waiting.remove(at)
        });
        if let Some(mut job) = waiting {
            let done = ended(&job, Finish::Cancelled, &Session::new(0), job.submitted.elapsed());
            (job.events)(Event::Done(done));
        }
    }

    fn finish(&self, id: RequestId, tokens: usize) {
        self.shared(|shared| {
            if shared.running == Some(id) {
                shared.verdict = Some(Some(tokens));
            }
        });
    }

    fn info(&self) -> ServiceInfo {
        self.info.clone()
    }

    fn stats(&self) -> ServiceStats {
        self.shared(|shared| ServiceStats {
            waiting: shared.waiting.len(),
            running: usize::from(shared.running.is_some()),
            ..shared.stats
        })
    }

    fn health(&self) -> Health {
        self.shared(|shared| match &shared.failed {
            Some(what) => Health::Failed(what.clone()),
            None => Health::Serving,
        })
    }
}

/// The engine's thread.
struct Lane<D> {
    shared: Arc<Mutex<Shared>>,
    engine: Engine<D>,
    session: Session,
}

impl<D: Device> Lane<D> {
    fn run(mut self, woken: &Receiver<()>) {
        while woken.recv().is_ok() {
            while let Some(mut job) = self.next() {
                let queued = job.submitted.elapsed();
                let result = self.answer(&mut job, queued);
                let event = lock(&self.shared, |shared| {
                    (shared.running, shared.verdict) = (None, None);
                    match result {
                        Ok(finish) => {
                            let done = ended(&job, finish, &self.session, queued);
                            account(&mut shared.stats, &done);
                            Event::Done(done)
                        }
                        Err(error) => {
                            shared.stats.failed += 1;
                            Event::Failed(failure(error))
                        }
                    }
                });
                (job.events)(event);
            }
        }
    }

    fn next(&self) -> Option<Job> {
        lock(&self.shared, |shared| {
            let job = shared.waiting.pop_front()?;
            (shared.running, shared.verdict) = (Some(job.id), None);
            Some(job)
        })
    }

    fn answer(&mut self, job: &mut Job, queued: Duration) -> Result<Finish, EngineError> {
        let Lane { shared, engine, session } = self;
        let request = engine::Request {
            prompt: job.request.prompt.clone(),
            max_tokens: job.request.max_tokens,
            stop_tokens: job.request.stop_tokens.clone(),
            sampler: job.request.sampler.clone(),
        };
        let late = |deadline: Option<Instant>| deadline.is_some_and(|at| Instant::now() >= at);
        let deadline = job.request.deadline;
        let cancelled = || lock(shared, |shared| shared.verdict.is_some()) || late(deadline);
        let total = request.prompt.len();
        session.begin(engine, request, &cancelled)?;
        let cache = cache_use(session);
        (job.events)(Event::Started { queued, cache });
        (job.events)(Event::Prefill { done: total, total });
        let mut emitted = 0;
        loop {
            if let Some(verdict) = lock(shared, |shared| shared.verdict.take()) {
                let last = session.last_tokens().len();
                let keep = verdict.map_or(last, |tokens| last.saturating_sub(emitted - tokens));
                session.truncate(engine, keep);
                return Ok(verdict.map_or(Finish::Cancelled, |_| Finish::Stop));
            }
            if late(deadline) {
                session.truncate(engine, session.last_tokens().len());
                return Ok(Finish::Deadline);
            }
            let proposed = session.stats().proposed;
            let (ids, end) = session.next(engine)?;
            let token = |&id: &u32| Token { id, logprob: None, alternatives: Vec::new() };
            let tokens: Vec<Token> = ids.iter().map(token).collect();
            emitted += tokens.len();
            if !tokens.is_empty() {
                let proposed = session.stats().proposed - proposed;
                (job.events)(Event::Tokens { tokens, proposed });
            }
            if let Some(end) = end {
                return Ok(match end {
                    FinishReason::Stop => Finish::Stop,
                    FinishReason::Length => Finish::Length,
                    FinishReason::Context => Finish::Context,
                    FinishReason::Cancelled if late(deadline) => Finish::Deadline,
                    FinishReason::Cancelled => Finish::Cancelled,
                });
            }
        }
    }
}

fn cache_use(session: &Session) -> CacheUse {
    let tokens = session.stats().cached_tokens;
    let source = if tokens > 0 { CacheSource::Memory } else { CacheSource::None };
    CacheUse { tokens, source, miss: "" }
}

fn ended(job: &Job, finish: Finish, session: &Session, queued: Duration) -> Done {
    let stats = session.stats();
    Done {
        finish,
        prompt_tokens: job.request.prompt.len(),
        cached_tokens: stats.cached_tokens,
        output_tokens: stats.completion_tokens,
        rounds: stats.rounds,
        proposed: stats.proposed,
        accepted: stats.accepted,
        queued,
        prefill: stats.prefill,
        decode: stats.decode,
        cache: cache_use(session),
    }
}

fn account(stats: &mut ServiceStats, done: &Done) {
    match done.finish {
        Finish::Cancelled | Finish::Deadline => stats.cancelled += 1,
        _ => stats.completed += 1,
    }
    stats.prompt_tokens += done.prompt_tokens as u64;
    stats.cached_tokens += done.cached_tokens as u64;
    stats.output_tokens += done.output_tokens as u64;
    stats.rounds += done.rounds as u64;
    stats.round_time += done.decode;
    stats.prefill_time += done.prefill;
    stats.proposed += done.proposed as u64;
    stats.accepted_proposals += done.accepted as u64;
}

fn failure(error: EngineError) -> RequestError {
    match error {
        EngineError::Device(error) => RequestError::Device(error.to_string()),
        other => RequestError::Request(other.to_string()),
    }
}
