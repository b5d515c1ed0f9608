//! The engine as a service: requests in, streams of events out.
//!
//! A [`Service`] answers many requests at once. [`Service::submit`] hands a request over and returns
//! at once; everything that becomes of it arrives as [`Event`]s, in order, the last of which is
//! [`Event::Done`] or [`Event::Failed`]. Whoever serves applications knows only this file, so that its
//! tests can drive it with a scripted service.

use std::fmt;
use std::time::{Duration, Instant};

use crate::engine::MemoryBytes;
use crate::sampler::Sampler;

/// Answers requests; shared by everyone who has some.
pub trait Service: Send + Sync {
    /// Hands a request over. Events come from the service's own thread, which must not be made to
    /// wait: `events` puts them into a queue, and no more.
    ///
    /// # Errors
    /// A request that can't be taken, with nothing begun.
    fn submit(&self, request: Request, events: EventSink) -> Result<RequestId, Refusal>;

    /// Ends a request within one round or one prefill pass: it is [`Event::Done`] with
    /// [`Finish::Cancelled`]. Does nothing to one that has ended.
    fn cancel(&self, id: RequestId);

    /// Ends a request whose text met a stop string: only its first `tokens` emitted tokens count.
    /// [`Event::Done`] follows with [`Finish::Stop`]; later tokens on their way are void.
    fn finish(&self, id: RequestId, tokens: usize);

    /// What this service can do.
    fn info(&self) -> ServiceInfo;

    /// What it has done, and is doing.
    fn stats(&self) -> ServiceStats;

    /// Whether it answers, as of now: never older than two seconds.
    fn health(&self) -> Health;

    /// What went wrong with the disk tier last, if there is to be one. Requests are answered all the same.
    fn disk_error(&self) -> Option<String> {
        None
    }
}

/// Names a request within one service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Takes the events of one request.
pub type EventSink = Box<dyn FnMut(Event) + Send>;

/// One answer to be made.
pub struct Request {
    /// The whole prompt.
    pub prompt: Vec<u32>,
    /// Positions in the prompt after which another prompt may go on differently, in order: the end of
    /// system and tools, the start of the last user turn. A checkpoint is worth most there.
    pub boundaries: Vec<usize>,
    /// The most tokens to emit.
    pub max_tokens: usize,
    /// Tokens that end the answer. The one that did is emitted, as its last token.
    pub stop_tokens: Vec<u32>,
    /// How tokens are chosen.
    pub sampler: Sampler,
    /// How many alternatives each token reports besides its own log-probability; `None` for neither.
    pub logprobs: Option<usize>,
    /// What the answer has to obey, a grammar say.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Whether rounds may draft.
    pub draft: bool,
    /// Who goes first.
    pub priority: Priority,
    /// When the answer has lost its worth: it ends with [`Finish::Deadline`].
    pub deadline: Option<Instant>,
    /// What may be reused of earlier requests, and kept of this one.
    pub cache: CachePolicy,
}

/// Which tokens may come next.
///
/// The engine calls it once a round: [`Constraint::masks`] with the round's proposals, then
/// [`Constraint::advance`] with what was emitted. A mask has one bit for each token, bit t mod 32 of
/// word t / 32.
pub trait Constraint: Send {
    /// Writes into `masks` (`[proposals.len() + 1][words]`) the tokens allowed after the tokens so
    /// far and the first 0, 1, … proposals. Returns how many masks were written: at least 1, and one
    /// more for each proposal that is itself allowed; the engine accepts no proposal beyond.
    ///
    /// # Errors
    /// The constraint failed, in words; the request fails with them.
    fn masks(&mut self, proposals: &[u32], masks: &mut [u32]) -> Result<usize, String>;

    /// Takes note of emitted tokens. Returns whether the answer is complete and must end here.
    ///
    /// # Errors
    /// As above.
    fn advance(&mut self, tokens: &[u32]) -> Result<bool, String>;
}

/// Who goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// When nothing else waits.
    Low,
    /// In turn.
    #[default]
    Normal,
    /// Before the others.
    High,
}

/// What a request may reuse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CachePolicy {
    /// Whatever fits.
    #[default]
    Shared,
    /// Only state that prefill passes made, not what rounds made while answering.
    Exact,
    /// Nothing; and nothing is kept.
    Off,
}

/// What becomes of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It has a lane.
    Started {
        /// Time it waited.
        queued: Duration,
        /// What the prefix cache had for it.
        cache: CacheUse,
    },
    /// Prompt tokens in the cache so far, of `total`.
    Prefill {
        /// Tokens so far, cached ones included.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// A round's tokens.
    Tokens {
        /// Them, in order; never empty.
        tokens: Vec<Token>,
        /// Proposals that the round verified.
        proposed: usize,
    },
    /// It ended.
    Done(Done),
    /// It failed.
    Failed(RequestError),
}

/// One emitted token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Natural logarithm of its probability before penalties, temperature and cuts, if asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens of its row with theirs, likeliest first, as many as asked for.
    pub alternatives: Vec<(u32, f32)>,
}

/// What the prefix cache had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheUse {
    /// Prompt tokens that need not be computed.
    pub tokens: usize,
    /// Where the state came from.
    pub source: CacheSource,
    /// Why no more was found, in words; empty if all was.
    pub miss: &'static str,
}

/// Where reused state came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheSource {
    /// Nowhere.
    None,
    /// Memory.
    Memory,
    /// The disk tier.
    Disk,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finish {
    /// A stop token, or [`Service::finish`].
    Stop,
    /// The constraint is complete.
    Constraint,
    /// `max_tokens`.
    Length,
    /// The context is full.
    Context,
    /// [`Service::cancel`].
    Cancelled,
    /// The request's deadline.
    Deadline,
}

/// The account of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of those, not computed.
    pub cached_tokens: usize,
    /// Tokens emitted, a final stop token included.
    pub output_tokens: usize,
    /// Rounds.
    pub rounds: usize,
    /// Proposals verified.
    pub proposed: usize,
    /// Proposals accepted.
    pub accepted: usize,
    /// From submission to a lane.
    pub queued: Duration,
    /// From the lane to the prompt's last token in the cache.
    pub prefill: Duration,
    /// From the end of prefill to the last token.
    pub decode: Duration,
    /// What the prefix cache had.
    pub cache: CacheUse,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// It makes no sense to this model.
    #[error("{0}")]
    Invalid(String),
    /// It does not fit.
    #[error(
        "the prompt has {tokens} tokens and the context holds {context}: shorten it or raise --context"
    )]
    TooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens the context holds.
        context: usize,
    },
    /// Too many wait.
    #[error("{waiting} requests wait already: try again in {} s", whole_seconds(*retry_after))]
    Busy {
        /// Requests that wait.
        waiting: usize,
        /// When one may be taken.
        retry_after: Duration,
    },
    /// The service does not answer.
    #[error("{0}")]
    Unavailable(String),
}

/// Rounded up: nobody should come back too early.
fn whole_seconds(time: Duration) -> u64 {
    time.as_secs_f64().ceil().max(1.0) as u64
}

/// Why a request that had been taken failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// The device failed, and with it the lanes that it ran.
    #[error("the device failed: {0}")]
    Device(String),
    /// The request's own constraint, or numbers of the model that make no sense.
    #[error("{0}")]
    Request(String),
    /// The service stopped.
    #[error("the engine stopped: {0}")]
    Stopped(String),
}

/// What a service can do.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceInfo {
    /// Tokens that a lane holds.
    pub context: usize,
    /// Lanes.
    pub lanes: usize,
    /// Ids that exist.
    pub vocab: usize,
    /// Rows of a verify pass.
    pub block: usize,
    /// Requests that may wait.
    pub queue: usize,
    /// The device, in words.
    pub device: String,
    /// What the model takes there.
    pub memory: MemoryBytes,
    /// Bytes that one round of one lane must move, and the rate at which the device reads: its floor.
    pub round_bytes: u64,
    /// Bytes per second; 0 if unknown.
    pub read_bandwidth: f64,
}

/// What a service has done since it began, and is doing now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ServiceStats {
    /// Requests taken.
    pub accepted: u64,
    /// Requests refused.
    pub refused: u64,
    /// Requests that ended well, cancelled ones left out.
    pub completed: u64,
    /// Requests cancelled, or past their deadline.
    pub cancelled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests that wait.
    pub waiting: usize,
    /// Lanes that compute.
    pub running: usize,
    /// Prompt tokens of all requests that got a lane.
    pub prompt_tokens: u64,
    /// Of those, not computed.
    pub cached_tokens: u64,
    /// Tokens emitted.
    pub output_tokens: u64,
    /// Rounds, of however many lanes.
    pub rounds: u64,
    /// Time they took.
    pub round_time: Duration,
    /// Prefill passes.
    pub prefill_passes: u64,
    /// Time they took.
    pub prefill_time: Duration,
    /// Proposals verified.
    pub proposed: u64,
    /// Proposals accepted.
    pub accepted_proposals: u64,
    /// Pages that hold keys and values of lanes or checkpoints.
    pub pages_used: usize,
    /// Pages in all.
    pub pages: usize,
    /// Checkpoints in memory, and what they alone hold.
    pub checkpoints: usize,
    /// Their bytes.
    pub checkpoint_bytes: u64,
    /// Checkpoints taken.
    pub checkpoints_taken: u64,
    /// Time that took, while nobody computed anything else.
    pub checkpoint_time: Duration,
    /// Bytes of the disk tier.
    pub disk_bytes: u64,
    /// Checkpoints evicted.
    pub evictions: u64,
    /// Times that the loop was rebuilt after a failure.
    pub restarts: u64,
}

/// Whether a service answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// It does.
    Serving,
    /// It rebuilds itself after a failure: the failure, in words.
    Recovering(String),
    /// It ends what runs and takes nothing more.
    Draining,
    /// It has given up: why.
    Failed(String),
}
