//! Whether there is a model to answer with: loading, ready, released while idle, leaving.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use engine::service::Health;
use tokio::sync::watch;

use super::errors::ApiError;
use super::model::{Facts, Served};
use crate::telemetry::ErrorClass;

/// Loads the model; called again after it was released.
pub type Load = Arc<dyn Fn(&dyn Fn(Loading)) -> anyhow::Result<Served> + Send + Sync>;

/// How far loading has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loading {
    /// What is being done.
    pub phase: String,
    /// Bytes done.
    pub done_bytes: u64,
    /// Bytes in all; 0 if unknown.
    pub total_bytes: u64,
}

/// Where the server stands.
#[derive(Clone)]
pub enum Phase {
    /// The model is being loaded.
    Loading(Loading),
    /// The model answers.
    Ready(Arc<Served>),
    /// The model's memory was given back; the next request loads it again.
    Released,
    /// The model can't be loaded.
    Failed(String),
}

impl Phase {
    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Phase::Loading(_) => "loading",
            Phase::Ready(_) => "ready",
            Phase::Released => "released",
            Phase::Failed(_) => "failed",
        }
    }
}

/// How far the server is on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Leaving {
    /// Not at all.
    No,
    /// Nothing more is taken, and what runs may end.
    Draining,
    /// What still runs is cut short.
    Cut,
}

/// Holds the model, and gives its memory back while nobody needs it.
pub struct Lifecycle {
    phase: watch::Sender<Phase>,
    leaving: watch::Sender<Leaving>,
    load: Load,
    /// What is known of the model once it was loaded, and stays known while it is released.
    facts: Mutex<Option<Arc<Facts>>>,
    begun: Instant,
    /// Whether the model was released, and is loaded again when it is needed.
    released: AtomicBool,
    /// Milliseconds from `begun` to the last request that wanted the model.
    last_used: AtomicU64,
}

impl Lifecycle {
    /// Begins to load.
    pub fn start(load: Load) -> Arc<Lifecycle> {
        let lifecycle = Lifecycle::with_phase(load, Phase::Released);
        lifecycle.reload();
        lifecycle
    }

    /// One that holds a model already.
    pub fn ready(served: Served) -> Arc<Lifecycle> {
        let load: Load = Arc::new(|_| anyhow::bail!("this model can't be loaded again"));
        let facts = Arc::clone(&served.facts);
        let lifecycle = Lifecycle::with_phase(load, Phase::Ready(Arc::new(served)));
        lifecycle.remember(&facts);
        lifecycle
    }

    fn with_phase(load: Load, phase: Phase) -> Arc<Lifecycle> {
        Arc::new(Lifecycle {
            phase: watch::Sender::new(phase),
            leaving: watch::Sender::new(Leaving::No),
            load,
            facts: Mutex::default(),
            begun: Instant::now(),
            released: AtomicBool::new(false),
            last_used: AtomicU64::new(0),
        })
    }

    /// Where the server stands.
    pub fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    /// The model, if it is in memory.
    pub fn served(&self) -> Option<Arc<Served>> {
        match self.phase() {
            Phase::Ready(served) => Some(served),
            _ => None,
        }
    }

    /// What is known of the model. Asking neither loads it nor keeps it in memory.
    ///
    /// # Errors
    /// If it was never loaded, with what to do.
    pub fn facts(&self) -> Result<Arc<Facts>, ApiError> {
        let known = self.facts.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match known {
            Some(facts) => Ok(facts),
            None => answer(self.phase()).map(|served| Arc::clone(&served.facts)),
        }
    }

    fn remember(&self, facts: &Arc<Facts>) {
        *self.facts.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(facts));
    }

    /// Whether the server is leaving.
    pub fn draining(&self) -> bool {
        *self.leaving.borrow() != Leaving::No
    }

    /// Takes nothing more.
    pub fn drain(&self) {
        self.leaving.send_if_modified(|leaving| {
            let begins = *leaving == Leaving::No;
            *leaving = (*leaving).max(Leaving::Draining);
            begins
        });
    }

    /// Cuts short what still runs: its time to end is over.
    pub fn cut(&self) {
        self.leaving.send_replace(Leaving::Cut);
    }

    /// Waits until what still runs is cut short, and says what to tell its clients.
    pub fn when_cut(&self) -> impl Future<Output = ApiError> + Send + use<> {
        let mut leaving = self.leaving.subscribe();
        async move {
            // A server that is gone cuts everything short too.
            let _ = leaving.wait_for(|leaving| *leaving == Leaving::Cut).await;
            stopped()
        }
    }

    /// The model, loaded again if it was released.
    ///
    /// # Errors
    /// If there is none now, with what to do.
    pub async fn model(self: &Arc<Lifecycle>) -> Result<Arc<Served>, ApiError> {
        self.used();
        if self.draining() {
            return Err(draining());
        }
        match self.phase() {
            Phase::Released => self.reload(),
            // What was wrong when it was loaded again may have been put right.
            Phase::Failed(_) if self.released.load(Ordering::Relaxed) => self.reload(),
            // The first load is a matter of the server's start, of which clients are told; a later one
            // is a part of the requests that need it.
            Phase::Loading(_) if self.released.load(Ordering::Relaxed) => {}
            phase => return answer(phase),
        }
        answer(self.settled().await)
    }

    /// Takes note that the model is needed now.
    fn used(&self) {
        let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_used.fetch_max(now, Ordering::Relaxed);
    }

    /// Loads the model if it is not there, on a thread of its own.
    fn reload(self: &Arc<Lifecycle>) {
        let begins = self.phase.send_if_modified(|phase| {
            let begins = matches!(phase, Phase::Released | Phase::Failed(_));
            if begins {
                *phase = Phase::Loading(Loading::default());
            }
            begins
        });
        if !begins {
            return;
        }
        let lifecycle = Arc::clone(self);
        std::thread::spawn(move || {
            let report = |loading| {
                lifecycle.phase.send_replace(Phase::Loading(loading));
            };
            let phase = match (lifecycle.load)(&report) {
                Ok(served) => {
                    lifecycle.remember(&served.facts);
                    // Loading is no idleness.
                    lifecycle.used();
                    Phase::Ready(Arc::new(served))
                }
                Err(error) => Phase::Failed(format!("{error:#}")),
            };
            lifecycle.phase.send_replace(phase);
        });
    }

    /// Waits until loading has ended, well or not.
    pub async fn settled(&self) -> Phase {
        let mut phases = self.phase.subscribe();
        let settled = phases.wait_for(|phase| !matches!(phase, Phase::Loading(_))).await;
        settled.map(|phase| phase.clone()).unwrap_or(Phase::Released)
    }

    /// Gives the model's memory back if nobody has wanted it for `idle` and nothing runs.
    pub fn release_if_idle(&self, idle: Duration) -> bool {
        let used = Duration::from_millis(self.last_used.load(Ordering::Relaxed));
        if self.begun.elapsed() < used + idle {
            return false;
        }
        let mut released = None;
        self.phase.send_if_modified(|phase| {
            let Phase::Ready(served) = phase else { return false };
            let stats = served.service.stats();
            // A request holds the model from before it is submitted until its last event.
            let idle = stats.running == 0 && stats.waiting == 0 && Arc::strong_count(served) == 1;
            if idle {
                self.released.store(true, Ordering::Relaxed);
                released = Some(std::mem::replace(phase, Phase::Released));
            } else {
                // The time begins with the last request's end.
                self.used();
            }
            idle
        });
        let Some(model) = released else { return false };
        // Its end takes a while, and nobody should wait for it.
        std::thread::spawn(move || drop(model));
        true
    }
}

/// What a request is told that comes while the server stops.
pub fn draining() -> ApiError {
    let what = "the server is stopping and takes nothing more";
    ApiError::unavailable("draining", what, Duration::from_secs(10))
}

/// What a request is told that was cut short because the server stops.
pub fn stopped() -> ApiError {
    let what = "the server stopped before the reply was complete; send the request again";
    ApiError::unavailable("server_stopped", what, Duration::from_secs(10))
}

fn answer(phase: Phase) -> Result<Arc<Served>, ApiError> {
    let wait = Duration::from_secs(5);
    match phase {
        Phase::Ready(served) => match served.service.health() {
            Health::Serving => Ok(served),
            Health::Recovering(what) => {
                let what = format!("the engine is being rebuilt after a failure: {what}");
                Err(ApiError::unavailable("recovering", what, wait))
            }
            Health::Draining => {
                Err(ApiError::unavailable("draining", "the engine is stopping", wait))
            }
            Health::Failed(what) => Err(ApiError::unavailable(
                "engine_failed",
                format!("the engine has failed and must be restarted: {what}"),
                wait,
            )),
        },
        Phase::Loading(loading) => {
            let what = match loading.total_bytes {
                0 => "the model is being loaded".to_owned(),
                total => {
                    let share = 100 * loading.done_bytes / total;
                    format!("the model is being loaded ({}, {share} %)", loading.phase)
                }
            };
            Err(ApiError::unavailable("model_loading", what, wait))
        }
        Phase::Released => Err(ApiError::unavailable("model_released", "try again", wait)),
        Phase::Failed(_) => Err(ApiError::new(
            ErrorClass::ServerError,
            StatusCode::SERVICE_UNAVAILABLE,
            "model_failed",
            // Names of files stay in the log.
            "the model could not be loaded; the server's log says why",
        )),
    }
}
