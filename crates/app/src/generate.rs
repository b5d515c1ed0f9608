//! The seam between this program and the engine.
//!
//! The engine takes and gives token ids, one round at a time; text, terminals and files are this
//! side's. The commands know only these types, so the tests drive them with a scripted generator.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use engine::service::Service;
use engine::{MemoryBytes, SamplingDefaults, SamplingOptions};
pub use ops::Counters;
use ops::KvDtype;

use crate::text::gguf_vocab::GgufVocab;

/// What to load, with every name resolved to a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadRequest {
    /// The target model.
    pub model: ModelRef,
    /// What proposes tokens.
    pub draft: DraftRef,
    /// Whether every round drafts, even where that is slower.
    pub always_draft: bool,
    /// Compute threads; `None` lets the engine choose.
    pub threads: Option<usize>,
    /// Tokens of context; `None` lets the engine choose by the memory that is free.
    pub context: Option<usize>,
    /// How keys and values are stored.
    pub kv: Kv,
    /// The instruction set of the host kernels.
    pub isa: Isa,
    /// What computes.
    pub device: DeviceKind,
    /// How an NVIDIA card is opened.
    pub cuda: cuda::Options,
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Kv {
    /// 16 bits.
    #[default]
    Bf16,
    /// 8 bits and a scale for each key and value of a head: about half the bytes. On the CPU only, yet.
    Int8,
}

impl From<Kv> for KvDtype {
    fn from(kv: Kv) -> KvDtype {
        match kv {
            Kv::Bf16 => KvDtype::Bf16,
            Kv::Int8 => KvDtype::Int8,
        }
    }
}

/// What computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum DeviceKind {
    /// An NVIDIA card that can run the model, or else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA card.
    Cuda,
}

/// Where the target model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelRef {
    /// A folder with `config.json`, or a GGUF file.
    Path(PathBuf),
    /// Made-up weights in the shape of a known model, to measure speed.
    Synthetic(String),
}

/// What proposes tokens for the target to verify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DraftRef {
    /// Nothing: one token a round.
    None,
    /// Continuations of earlier occurrences of the last tokens.
    Ngram,
    /// A draft model with made-up weights in the shape that fits the target.
    Synthetic,
    /// A draft model in a folder or file.
    Path(PathBuf),
}

/// Instruction sets of the host kernels. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Isa {
    /// The best this machine has.
    Auto,
    /// AVX-512.
    Avx512,
    /// AVX2.
    Avx2,
    /// No instruction set in particular.
    Portable,
}

/// Options of one generation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateOptions {
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// The most tokens to generate; `None` is until the model stops or the context is full.
    pub max_tokens: Option<usize>,
}

/// What the start of a generation found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefill {
    /// Prompt tokens whose state was reused.
    pub cached_tokens: usize,
}

/// What one step of a generation gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// New tokens.
    Tokens {
        /// Their ids, without any end-of-turn token.
        ids: Vec<u32>,
        /// The round that made them; `None` for what the prompt's own pass gave.
        round: Option<Round>,
    },
    /// The generation is over.
    End(Finish),
}

/// One round: propose, verify, accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Tokens proposed.
    pub proposed: u32,
    /// Of these, tokens accepted.
    pub accepted: u32,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its turn, or a stop string was met.
    Stop,
    /// The limit of tokens or the end of the context was reached.
    Length,
    /// The user interrupted it.
    Cancelled,
}

impl Finish {
    /// The name that APIs use.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Cancelled => "cancelled",
        }
    }
}

/// Why a generation could not begin or go on.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The prompt does not fit.
    #[error(
        "the prompt has {prompt} tokens, but the context holds {context}; shorten it or raise --context"
    )]
    ContextOverflow {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens the context holds.
        context: usize,
    },
    /// An option has a value that the engine can't use.
    #[error("{0}")]
    Option(String),
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(String),
}

/// Generates tokens, one generation at a time.
pub trait Generator {
    /// Reads the prompt and makes ready for [`Generator::next`]; a generation still running is
    /// ended first. Comes back early when `cancel` becomes true.
    fn start(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        cancel: &AtomicBool,
    ) -> Result<Prefill, GenerateError>;

    /// Runs one round. After [`Event::End`] a new generation has to be started.
    fn next(&mut self) -> Result<Event, GenerateError>;

    /// Ends the generation early, for a stop string or the user. What was generated stays usable
    /// for the next prompt.
    fn stop(&mut self);

    /// What the device did since it was opened.
    fn counters(&self) -> Counters {
        Counters::default()
    }
}

/// Where the text side of a model is found.
#[derive(Clone, Debug)]
pub enum TextSource {
    /// `tokenizer.json` and the chat template in a folder.
    Folder(PathBuf),
    /// The metadata of a GGUF file.
    Gguf {
        /// The file, for messages.
        file: PathBuf,
        /// The tokenizer.
        vocab: Box<GgufVocab>,
        /// `tokenizer.chat_template`.
        chat_template: Option<String>,
    },
    /// None: synthetic models work on token ids only.
    None,
}

/// A model that is ready.
pub struct Loaded {
    /// Runs it.
    pub generator: Box<dyn Generator>,
    /// Where its text side is found.
    pub text: TextSource,
    /// Its name.
    pub model: String,
    /// The draft's name, or `None` without one.
    pub draft: Option<String>,
    /// The device, in words.
    pub device: String,
    /// Time of a round in ms if nothing but the weights' bytes counted, where it is known.
    pub floor_ms_per_round: Option<f64>,
    /// What it takes on the device.
    pub memory: MemoryBytes,
}

/// How a model answers many requests at once. What is `None` follows from the memory that is free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServeOptions {
    /// Requests that are answered at the same time.
    pub lanes: Option<usize>,
    /// Requests that may wait.
    pub queue: usize,
    /// Bytes of the prefix cache.
    pub cache_memory: Option<u64>,
    /// Bytes that may be used in all.
    pub max_memory: Option<u64>,
    /// Where the prefix cache is kept over restarts.
    pub disk: Option<DiskCache>,
    /// Whether only state that prefill passes made is reused.
    pub exact_cache: bool,
}

/// The part of the prefix cache that lies on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskCache {
    /// Its folder, made if need be.
    pub folder: PathBuf,
    /// The most bytes that it takes.
    pub bytes: u64,
}

/// A model that is ready to answer many requests at once.
pub struct Serving {
    /// Answers them.
    pub service: Arc<dyn Service>,
    /// Where its text side is found.
    pub text: TextSource,
    /// Its name.
    pub model: String,
    /// The draft's name, or `None` without one.
    pub draft: Option<String>,
    /// How the model wants to be sampled.
    pub defaults: SamplingDefaults,
    /// Tokens that end its answers.
    pub stop_tokens: Vec<u32>,
}

/// How far loading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    /// What is being done, in a few words.
    pub phase: &'a str,
    /// Bytes done.
    pub done_bytes: u64,
    /// Bytes in all; 0 if unknown.
    pub total_bytes: u64,
}

/// A titled list of facts for `inspect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// What the facts are about.
    pub title: String,
    /// Names and values.
    pub facts: Vec<(String, String)>,
}

/// Turns a request into a running model.
pub trait Loader: Sync {
    /// Loads model and draft.
    fn load(
        &self,
        request: &LoadRequest,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> anyhow::Result<Loaded>;

    /// Loads model and draft to answer many requests at once.
    fn serve(
        &self,
        request: &LoadRequest,
        options: &ServeOptions,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> anyhow::Result<Serving>;

    /// Describes model, draft, memory plan and expected speed without loading weights.
    fn inspect(&self, request: &LoadRequest) -> anyhow::Result<(Vec<Section>, TextSource)>;

    /// Measures speed; with `ops`, also of every kind of op.
    fn bench(&self, request: &LoadRequest, ops: bool) -> anyhow::Result<Vec<Section>>;

    /// Measures where the time of each phase goes.
    fn profile(&self, request: &LoadRequest) -> anyhow::Result<Vec<Section>>;
}
