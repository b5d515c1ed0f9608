//! The engine on this machine, behind the seam of [`crate::generate`].

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Context;
use engine::ngram::Ngram;
use engine::plan::Wishes;
use engine::{
    DiskOptions, Drafter, Engine, EngineError, EngineOptions, FinishReason, Request,
    SamplingDefaults, ServiceOptions, Session,
};
use model::files::TokenizerSource;
use model::generation::GenerationConfig;
use model::{Draft, DraftSource, Target, TargetSource};
use ops::{Counters, Device, DryRun, Trace};

use crate::bench;
use crate::device::{Chosen, choose};
use crate::forecast;
use crate::generate::{
    DraftRef, Event, Finish, GenerateError, GenerateOptions, Generator, LoadRequest, Loaded,
    Loader, ModelRef, Prefill, Progress, Round, Section, ServeOptions, Serving, TextSource,
};
use crate::memory;
use crate::profile;
use crate::text::gguf_vocab::GgufVocab;

/// Tokens of context unless the request or the model says otherwise.
const DEFAULT_CONTEXT: usize = 8192;
/// Bytes a second that the prefix cache writes to disk at most, on average: 4 TB a day wear a drive out.
const DISK_WRITE_RATE: u64 = 50 << 20;

/// Loads models onto a device of this machine.
#[derive(Debug)]
pub struct Local;

impl Loader for Local {
    fn load(
        &self,
        request: &LoadRequest,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> anyhow::Result<Loaded> {
        let sources = Sources::open(request)?;
        let Chosen { dev, options, free, .. } =
            choose(request, &sources, Some(1), &in_conversation(request, &sources))?;
        let act = dev.info().act;
        let fresh = || DryRun::new(act);
        let plan = memory::conversation(request, &sources, options, free, &fresh)?;
        let mut engine = build_with(dev, plan.options, &sources, request, progress)?;
        engine.dev.sync()?;
        let bandwidth = engine.read_bandwidth();
        let bytes = engine.round_bytes(0).total() as f64;
        let floor = (bandwidth > 0.0).then(|| 1e3 * bytes / bandwidth);
        Ok(Loaded {
            text: text_source(sources.target.tokenizer())?,
            model: name_of(&request.model),
            draft: match engine.drafter() {
                Drafter::DFlash => Some(draft_name(&request.draft)),
                Drafter::None => None,
                drafter => Some(drafter.name().to_owned()),
            },
            device: engine.dev.info().name,
            floor_ms_per_round: floor,
            memory: engine.memory(),
            generator: Box::new(LocalGenerator {
                defaults: defaults(sources.target.generation()),
                stops: sources.target.generation().eos_token_ids.clone(),
                session: Session::new(0),
                engine,
                end: Some(Finish::Cancelled),
            }),
        })
    }

    fn serve(
        &self,
        request: &LoadRequest,
        options: &ServeOptions,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> anyhow::Result<Serving> {
        let sources = Sources::open(request)?;
        let text = text_source(sources.target.tokenizer())?;
        let (defaults, stop_tokens) = {
            let generation = sources.target.generation();
            (defaults(generation), generation.eos_token_ids.clone())
        };
        let (tell, told) = mpsc::channel();
        let (for_engine, options) = (request.clone(), options.clone());
        // The engine is built on a thread of its own, perhaps again after a failure; this one tells
        // how far it is.
        let builder = std::thread::spawn(move || {
            let wishes = Wishes {
                context: None,
                lanes: options.lanes,
                cache: options.cache_memory,
                max_memory: options.max_memory,
            };
            let fits = |base, free, fresh: &dyn Fn() -> DryRun| {
                memory::planned(&for_engine, &sources, base, &wishes, free, fresh).map(drop)
            };
            let Chosen { kind, dev, options: base, free, .. } =
                choose(&for_engine, &sources, None, &fits)?;
            // What is built, perhaps again after a failure, is what was planned.
            let for_engine = LoadRequest { device: kind, ..for_engine };
            let act = dev.info().act;
            let fresh = || DryRun::new(act);
            let plan = memory::planned(&for_engine, &sources, base, &wishes, free, &fresh)?;
            let disk = options.disk.as_ref().map(|disk| DiskOptions {
                dir: disk.folder.clone(),
                quota: disk.bytes,
                write_rate: DISK_WRITE_RATE,
                fingerprint: fingerprint(&for_engine, &dev.info().name),
            });
            // A device belongs to the thread that opened it.
            drop(dev);
            let how = ServiceOptions {
                queue: options.queue,
                exact_cache: options.exact_cache,
                disk,
                ..ServiceOptions::default()
            };
            let build = move || {
                let lanes = Some(plan.options.slots);
                let Chosen { dev, .. } = choose(&for_engine, &sources, lanes, &|_, _, _| Ok(()))?;
                build_with(dev, plan.options, &sources, &for_engine, &mut |progress| {
                    // Nobody listens when it is built again.
                    let (done, total) = (progress.done_bytes, progress.total_bytes);
                    let _ = tell.send((progress.phase.to_owned(), done, total));
                })
            };
            engine::serve(build, how)
        });
        while !builder.is_finished() {
            let news = told.recv_timeout(Duration::from_millis(50));
            if let Ok((phase, done_bytes, total_bytes)) = news {
                progress(Progress { phase: &phase, done_bytes, total_bytes });
            }
        }
        let service = builder.join().unwrap_or_else(|_| anyhow::bail!("loading panicked"))?;
        Ok(Serving {
            service,
            text,
            model: name_of(&request.model),
            draft: match &request.draft {
                DraftRef::None => None,
                DraftRef::Ngram => Some("ngram".to_owned()),
                draft => Some(draft_name(draft)),
            },
            defaults,
            stop_tokens,
        })
    }

    fn inspect(&self, request: &LoadRequest) -> anyhow::Result<(Vec<Section>, TextSource)> {
        let sources = Sources::open(request)?;
        let Chosen { dev, dry, options, free, .. } =
            choose(request, &sources, None, &in_conversation(request, &sources))?;
        let device = dev.info();
        let fresh = || DryRun::new(device.act);
        let plan = memory::conversation(request, &sources, options, free, &fresh);
        // What does not fit is described all the same, at the size that was asked for.
        let engine = match &plan {
            Ok(plan) => build_with(dry, plan.options, &sources, request, &mut |_| ())?,
            Err(_) => build(dry, options, &sources, request, &mut |_| ())?,
        };
        let mut sections = forecast::sections(&sources.target, sources.draft.as_ref(), &engine);
        sections.push(match &plan {
            Ok(plan) => memory::section(plan),
            Err(why) => Section {
                title: "Memory plan".to_owned(),
                facts: vec![("refused".to_owned(), format!("{why:#}"))],
            },
        });
        sections.push(forecast::speed(&engine, &device.name, forecast::bandwidth(dev)));
        Ok((sections, text_source(sources.target.tokenizer())?))
    }

    fn bench(&self, request: &LoadRequest, ops: bool) -> anyhow::Result<Vec<Section>> {
        let mut measured = Measured::load(request)?;
        let mut sections = bench::sections(&mut measured.engine)?;
        sections.push(measured.loading);
        if ops {
            let engine = &mut measured.engine;
            sections.push(bench::ops(engine, false)?);
            if !matches!(engine.drafter(), Drafter::None) {
                sections.push(bench::ops(engine, true)?);
            }
        }
        Ok(sections)
    }

    fn profile(&self, request: &LoadRequest) -> anyhow::Result<Vec<Section>> {
        let mut measured = Measured::load(request)?;
        let mut sections = profile::sections(&mut measured.engine)?;
        sections.push(measured.loading);
        Ok(sections)
    }
}

/// Whether a conversation with a model fits a device.
fn in_conversation<'a>(
    request: &'a LoadRequest,
    sources: &'a Sources,
) -> impl Fn(EngineOptions, Option<u64>, &dyn Fn() -> DryRun) -> anyhow::Result<()> + 'a {
    |base, free, fresh| memory::conversation(request, sources, base, free, fresh).map(drop)
}

/// An engine whose ops can be timed, and how long it took to load.
struct Measured {
    engine: Engine<Trace<Box<dyn Device>>>,
    loading: Section,
}

impl Measured {
    fn load(request: &LoadRequest) -> anyhow::Result<Measured> {
        // What is measured must not depend on what the engine makes of it.
        let request = &LoadRequest { always_draft: true, ..request.clone() };
        let sources = Sources::open(request)?;
        let begun = Instant::now();
        let Chosen { dev, options, .. } =
            choose(request, &sources, Some(1), &in_conversation(request, &sources))?;
        let ready = begun.elapsed();
        let begun = Instant::now();
        let mut traced = Trace::new(dev);
        traced.stamping = false;
        let mut engine = build(traced, options, &sources, request, &mut |_| ())?;
        engine.dev.sync()?;
        let seconds = begun.elapsed().as_secs_f64();
        let memory = engine.memory();
        let rate = (memory.weights + memory.draft) as f64 / seconds / 1e9;
        let facts = vec![
            ("device and kernels ready".to_owned(), format!("{:.2} s", ready.as_secs_f64())),
            ("weights".to_owned(), format!("{seconds:.2} s, {rate:.2} GB/s")),
        ];
        Ok(Measured { engine, loading: Section { title: "Loading".into(), facts } })
    }
}

/// Opened checkpoints, nothing loaded.
pub struct Sources {
    target: TargetSource,
    draft: Option<DraftSource>,
}

impl Sources {
    /// Opens what a request names.
    ///
    /// # Errors
    /// Files that are not there or not what they should be.
    pub fn open(request: &LoadRequest) -> anyhow::Result<Sources> {
        let path = model_path(&request.model);
        let target = TargetSource::open(&path)?;
        let draft = match &request.draft {
            DraftRef::None | DraftRef::Ngram => None,
            DraftRef::Path(path) => Some(DraftSource::open(path, target.spec())?),
            DraftRef::Synthetic => Some(DraftSource::open(&path, target.spec()).with_context(
                || "a synthetic draft needs a synthetic model: use --model synth:NAME",
            )?),
        };
        Ok(Sources { target, draft })
    }

    /// The longest context that the model was made for.
    pub fn longest_context(&self) -> usize {
        self.target.spec().max_position_embeddings
    }

    fn bytes(&self) -> anyhow::Result<u64> {
        let draft = self.draft.as_ref().map_or(Ok(0), DraftSource::matrix_bytes)?;
        Ok(self.target.matrix_bytes()? + draft)
    }
}

/// Loads weights and allocates one conversation's memory on any device.
pub fn build<D: Device>(
    dev: D,
    options: EngineOptions,
    sources: &Sources,
    request: &LoadRequest,
    progress: &mut dyn FnMut(Progress<'_>),
) -> anyhow::Result<Engine<D>> {
    let most = sources.longest_context().min(DEFAULT_CONTEXT);
    let options = EngineOptions { context: request.context.unwrap_or(most), ..options };
    build_with(dev, options, sources, request, progress)
}

/// Loads weights and allocates what the options say on any device.
pub fn build_with<D: Device>(
    mut dev: D,
    options: EngineOptions,
    sources: &Sources,
    request: &LoadRequest,
    progress: &mut dyn FnMut(Progress<'_>),
) -> anyhow::Result<Engine<D>> {
    let total_bytes = sources.bytes()?;
    let mut phase = "loading the model";
    let mut base = 0;
    let mut report = |done: u64| {
        progress(Progress { phase, done_bytes: base + done, total_bytes });
    };
    let target = Target::load(&mut dev, &sources.target, &mut report)?;
    (phase, base) = ("loading the draft", sources.target.matrix_bytes()?);
    let mut report = |done: u64| {
        progress(Progress { phase, done_bytes: base + done, total_bytes });
    };
    let draft = match &sources.draft {
        None => None,
        Some(source) => Some(Draft::load(&mut dev, source, &mut report)?),
    };
    let drafter = match (&request.draft, &draft) {
        (_, Some(_)) => Drafter::DFlash,
        (DraftRef::Ngram, None) => Drafter::host(Box::new(Ngram::with_capacity(options.context))),
        _ => Drafter::None,
    };
    let options = EngineOptions { adapt: !request.always_draft, ..options };
    Ok(Engine::new(dev, target, draft, drafter, options)?)
}

fn model_path(model: &ModelRef) -> PathBuf {
    match model {
        ModelRef::Path(path) => path.clone(),
        ModelRef::Synthetic(name) => PathBuf::from(format!("synth:{name}")),
    }
}

/// What people call a model: its public name, else the name of its file or folder.
fn file_name(path: &Path) -> String {
    if let Some(repo) = crate::hub::cache::repo_of(path) {
        return repo.to_string();
    }
    path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into())
}

fn name_of(model: &ModelRef) -> String {
    match model {
        ModelRef::Path(path) => file_name(path),
        ModelRef::Synthetic(name) => format!("synth:{name}"),
    }
}

/// Names what decides the bits of a state: the files of model and draft, the build, the device.
fn fingerprint(request: &LoadRequest, device: &str) -> String {
    let mut parts = vec![crate::cli::version().to_owned(), device.to_owned()];
    parts.push(format!("{:?}", request.draft));
    let draft = match &request.draft {
        DraftRef::Path(path) => Some(path.clone()),
        _ => None,
    };
    for path in [Some(model_path(&request.model)), draft].into_iter().flatten() {
        let path = path.canonicalize().unwrap_or(path);
        parts.push(path.display().to_string());
        let files =
            std::fs::read_dir(&path).into_iter().flatten().flatten().map(|file| file.path());
        let mut files: Vec<PathBuf> = files.chain([path]).collect();
        files.sort();
        for file in files {
            let Ok(about) = std::fs::metadata(&file) else { continue };
            parts.push(format!("{} {} {:?}", file.display(), about.len(), about.modified().ok()));
        }
    }
    parts.join("\n")
}

fn draft_name(draft: &DraftRef) -> String {
    match draft {
        DraftRef::Path(path) => file_name(path),
        _ => "synth".to_owned(),
    }
}

fn text_source(source: &TokenizerSource) -> anyhow::Result<TextSource> {
    match source {
        TokenizerSource::None => Ok(TextSource::None),
        TokenizerSource::Folder { tokenizer, .. } => {
            let folder = tokenizer.parent().unwrap_or(Path::new("."));
            Ok(TextSource::Folder(folder.to_owned()))
        }
        TokenizerSource::Gguf(gguf) => {
            let owned = |list: Vec<&str>| list.into_iter().map(str::to_owned).collect();
            Ok(TextSource::Gguf {
                file: gguf.file().to_owned(),
                vocab: Box::new(GgufVocab {
                    model: gguf.model()?.to_owned(),
                    pre: gguf.pre()?.map(str::to_owned),
                    tokens: owned(gguf.tokens()?),
                    merges: owned(gguf.merges()?),
                    token_types: gguf.token_types()?.into_iter().map(|t| t as i32).collect(),
                    add_bos: gguf.add_bos()?,
                    bos_token_id: gguf.special_id("bos")?,
                    eos_token_id: gguf.special_id("eos")?,
                }),
                chat_template: gguf.chat_template()?.map(str::to_owned),
            })
        }
    }
}

fn defaults(config: &GenerationConfig) -> SamplingDefaults {
    SamplingDefaults {
        do_sample: config.do_sample,
        temperature: config.temperature,
        top_k: config.top_k,
        top_p: config.top_p,
        min_p: config.min_p,
        presence_penalty: config.presence_penalty,
        frequency_penalty: config.frequency_penalty,
        repetition_penalty: config.repetition_penalty,
    }
}

/// One conversation on the engine.
struct LocalGenerator {
    engine: Engine<Box<dyn Device>>,
    session: Session,
    defaults: SamplingDefaults,
    /// Ids that end an answer.
    stops: Vec<u32>,
    /// Set when the answer is over: what to say after its last tokens.
    end: Option<Finish>,
}

impl Generator for LocalGenerator {
    fn start(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        cancel: &AtomicBool,
    ) -> Result<Prefill, GenerateError> {
        let vocab = self.engine.target().vocab;
        let sampler = options
            .sampling
            .resolve(&self.defaults, vocab)
            .map_err(|error| GenerateError::Option(error.to_string()))?;
        let request = Request {
            prompt: prompt.to_vec(),
            max_tokens: options.max_tokens.unwrap_or(usize::MAX),
            stop_tokens: self.stops.clone(),
            sampler,
        };
        let cancelled = || cancel.load(Ordering::Relaxed);
        self.session.begin(&mut self.engine, request, &cancelled).map_err(generate_error)?;
        self.end = None;
        Ok(Prefill { cached_tokens: self.session.stats().cached_tokens })
    }

    fn next(&mut self) -> Result<Event, GenerateError> {
        if let Some(finish) = self.end {
            return Ok(Event::End(finish));
        }
        let before = *self.session.stats();
        let (tokens, ended) = self.session.next(&mut self.engine).map_err(generate_error)?;
        let mut ids = tokens.to_vec();
        if let Some(why) = ended {
            // The end comes with the last tokens; a stop token is not part of the answer.
            self.end = Some(finish(why));
            if why == FinishReason::Stop {
                ids.pop();
            }
        }
        let now = self.session.stats();
        let round = (now.rounds > before.rounds).then(|| Round {
            proposed: (now.proposed - before.proposed) as u32,
            accepted: (now.accepted - before.accepted) as u32,
        });
        Ok(Event::Tokens { ids, round })
    }

    fn stop(&mut self) {
        self.end = Some(Finish::Cancelled);
    }

    fn counters(&self) -> Counters {
        self.engine.dev.counters()
    }
}

fn finish(why: FinishReason) -> Finish {
    match why {
        FinishReason::Stop => Finish::Stop,
        FinishReason::Length | FinishReason::Context => Finish::Length,
        FinishReason::Cancelled => Finish::Cancelled,
    }
}

fn generate_error(error: EngineError) -> GenerateError {
    match error {
        EngineError::PromptTooLong { tokens, context } => {
            GenerateError::ContextOverflow { prompt: tokens, context }
        }
        EngineError::Device(error) => GenerateError::Device(error.to_string()),
        other => GenerateError::Option(other.to_string()),
    }
}
