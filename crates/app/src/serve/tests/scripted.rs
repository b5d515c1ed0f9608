//! An engine that does what it is told.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use engine::MemoryBytes;
use engine::service::{
    CacheSource, CacheUse, Done, Event, EventSink, Finish, Health, Refusal, Request, RequestError,
    RequestId, Service, ServiceInfo, ServiceStats, Token,
};

/// What the engine does with a request.
#[derive(Clone, Debug)]
pub(super) enum Act {
    /// A round with these tokens.
    Round(Vec<u32>),
    /// Part of the prompt is in the cache.
    Prefill(usize),
    /// Nothing, for a while.
    Wait(Duration),
    /// The end, unless it came before.
    End(Finish),
    /// The device fails.
    Fail,
    /// Nothing more, until the request is cancelled.
    Hang,
}

/// What happened to the requests of an engine.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) requests: Vec<Noted>,
    pub(super) cancelled: Vec<RequestId>,
    pub(super) finished: Vec<(RequestId, usize)>,
}

/// What a request asked for.
#[derive(Clone, Debug)]
pub(super) struct Noted {
    pub(super) prompt: Vec<u32>,
    pub(super) boundaries: Vec<usize>,
    pub(super) max_tokens: usize,
    pub(super) sampler: engine::Sampler,
    pub(super) logprobs: Option<usize>,
    pub(super) constrained: bool,
}

type Script = Box<dyn Fn(usize, &Request) -> Result<Vec<Act>, Refusal> + Send + Sync>;

/// An engine that does what it is told.
pub(super) struct Scripted {
    script: Script,
    seen: Mutex<Seen>,
    /// What was said of requests: `None` to cancel, `Some(n)` to end after n tokens.
    verdicts: Arc<Mutex<HashMap<RequestId, Option<usize>>>>,
    health: Mutex<Health>,
    pub(super) context: usize,
}

impl Scripted {
    /// An engine that does with request number n what `script` says.
    pub(super) fn new(
        script: impl Fn(usize, &Request) -> Result<Vec<Act>, Refusal> + Send + Sync + 'static,
    ) -> Arc<Scripted> {
        Arc::new(Scripted {
            script: Box::new(script),
            seen: Mutex::default(),
            verdicts: Arc::default(),
            health: Mutex::new(Health::Serving),
            context: 1000,
        })
    }

    pub(super) fn seen(&self) -> Seen {
        self.seen.lock().unwrap().clone()
    }

    pub(super) fn set_health(&self, health: Health) {
        *self.health.lock().unwrap() = health;
    }
}

impl Service for Scripted {
    fn submit(&self, request: Request, events: EventSink) -> Result<RequestId, Refusal> {
        let (tokens, context) = (request.prompt.len(), self.context);
        if tokens >= context {
            return Err(Refusal::TooLong { tokens, context });
        }
        let mut seen = self.seen.lock().unwrap();
        let acts = (self.script)(seen.requests.len(), &request)?;
        let id = RequestId(seen.requests.len() as u64);
        seen.requests.push(Noted {
            prompt: request.prompt.clone(),
            boundaries: request.boundaries.clone(),
            max_tokens: request.max_tokens,
            sampler: request.sampler.clone(),
            logprobs: request.logprobs,
            constrained: request.constraint.is_some(),
        });
        let verdicts = Arc::clone(&self.verdicts);
        tokio::spawn(perform(id, request, acts, events, verdicts));
        Ok(id)
    }

    fn cancel(&self, id: RequestId) {
        self.seen.lock().unwrap().cancelled.push(id);
        self.verdicts.lock().unwrap().insert(id, None);
    }

    fn finish(&self, id: RequestId, tokens: usize) {
        self.seen.lock().unwrap().finished.push((id, tokens));
        self.verdicts.lock().unwrap().insert(id, Some(tokens));
    }

    fn info(&self) -> ServiceInfo {
        ServiceInfo {
            context: self.context,
            lanes: 4,
            vocab: 49154,
            block: 8,
            queue: 16,
            device: "a script".into(),
            memory: MemoryBytes::default(),
            round_bytes: 1000,
            read_bandwidth: 1e6,
        }
    }

    fn stats(&self) -> ServiceStats {
        ServiceStats::default()
    }

    fn health(&self) -> Health {
        self.health.lock().unwrap().clone()
    }
}

async fn perform(
    id: RequestId,
    request: Request,
    acts: Vec<Act>,
    mut events: EventSink,
    verdicts: Arc<Mutex<HashMap<RequestId, Option<usize>>>>,
) {
    let cached = request.prompt.len().min(3);
    let cache = CacheUse { tokens: cached, source: CacheSource::Memory, miss: "" };
    events(Event::Started { queued: Duration::from_millis(2), cache: cache.clone() });
    let mut emitted = 0;
    let mut rounds = 0;
    let done = |finish, output_tokens, rounds| Done {
        finish,
        prompt_tokens: request.prompt.len(),
        cached_tokens: cached,
        output_tokens,
        rounds,
        proposed: rounds * 7,
        accepted: output_tokens.saturating_sub(rounds),
        queued: Duration::from_millis(2),
        prefill: Duration::from_millis(10),
        decode: Duration::from_millis(40),
        cache: cache.clone(),
    };
    for act in acts {
        // Whoever listens gets a turn between events, as with a real engine.
        tokio::task::yield_now().await;
        let verdict = verdicts.lock().unwrap().get(&id).copied();
        match verdict {
            Some(None) => return events(Event::Done(done(Finish::Cancelled, emitted, rounds))),
            Some(Some(tokens)) => return events(Event::Done(done(Finish::Stop, tokens, rounds))),
            None => {}
        }
        match act {
            Act::Round(ids) => {
                let room = request.max_tokens - emitted;
                let ids = &ids[..ids.len().min(room)];
                emitted += ids.len();
                rounds += 1;
                let tokens = ids.iter().map(|&id| token(id, request.logprobs)).collect();
                events(Event::Tokens { tokens, proposed: 7 });
                if emitted == request.max_tokens {
                    tokio::task::yield_now().await;
                    let met = verdicts.lock().unwrap().get(&id).copied();
                    let (finish, tokens) = match met {
                        Some(Some(tokens)) => (Finish::Stop, tokens),
                        _ => (Finish::Length, emitted),
                    };
                    return events(Event::Done(done(finish, tokens, rounds)));
                }
            }
            Act::Prefill(tokens) => {
                events(Event::Prefill { done: tokens, total: request.prompt.len() });
            }
            Act::Wait(time) => tokio::time::sleep(time).await,
            Act::End(finish) => return events(Event::Done(done(finish, emitted, rounds))),
            Act::Fail => {
                return events(Event::Failed(RequestError::Device("it is on fire".into())));
            }
            Act::Hang => loop {
                tokio::time::sleep(Duration::from_millis(1)).await;
                if verdicts.lock().unwrap().contains_key(&id) {
                    return events(Event::Done(done(Finish::Cancelled, emitted, rounds)));
                }
            },
        }
    }
}

/// A token with made-up log-probabilities: its own, and itself and its successors as alternatives.
fn token(id: u32, logprobs: Option<usize>) -> Token {
    let alternative =
        |n: usize| (id + n as u32, if n == 2 { f32::NEG_INFINITY } else { -0.5 - n as f32 });
    Token {
        id,
        logprob: logprobs.map(|_| -0.5),
        alternatives: (0..logprobs.unwrap_or(0)).map(alternative).collect(),
    }
}
