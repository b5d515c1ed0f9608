//! The command line: what may be asked, and what it means.

use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use engine::{Rule, SamplingOptions};

use crate::config::Surroundings;
use crate::generate::{DeviceKind, DraftRef, GenerateOptions, Isa, Kv, LoadRequest, ModelRef};
use crate::hub::cache::repo_of;
use crate::hub::commands::{ListArgs, PullArgs, RmArgs, fetch};
use crate::hub::drafts::draft_of;
use crate::hub::name::ModelName;
use crate::hub::{Hub, HubOptions};
use crate::serve;
use crate::serve::args::{LaunchArgs, ServeArgs};
use crate::terminal;
use crate::watch::top::TopArgs;
use crate::watch::traces::TracesArgs;

/// Runs Qwen3.5-family hybrid models in 4 bits, with drafts verified in one pass.
#[derive(Debug, Parser)]
#[command(name = "th-engine", version = version(), arg_required_else_help = true, max_term_width = 100)]
#[command(after_help = "\
Environment: TH_ENGINE_MODELS (folders of models, separated as in PATH), TH_ISA (as --isa), TH_NVRTC (folder of \
libnvrtc.so.13), TH_API_KEY (key of the server), HF_HUB_CACHE, HF_HOME, HF_TOKEN, \
HF_ENDPOINT, HF_HUB_OFFLINE (models by public names), NO_COLOR.
Exit status: 0 done, 1 failed while running, 2 wrong command line, 3 model not found or not loaded, \
130 interrupted.")]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,

    /// Model and machine
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Version and commit of this build.
pub fn version() -> &'static str {
    concat!(env!("CARGO_PKG_VERSION"), " (", env!("TH_ENGINE_COMMIT"), ")")
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Talk with a model
    #[command(long_about = "\
Talk with a model. Answers stream to standard output, figures go to standard error after each one.
With standard input from a file or pipe, each line is one message. Ctrl-C stops an answer; /help \
lists the commands.")]
    Chat(ChatArgs),
    /// Answer one prompt and leave
    #[command(long_about = "\
Answer one prompt and leave. The prompt comes from --prompt, --prompt-file, --tokens or standard \
input; it is one user message in the model's chat template unless --raw or --tokens is given.
The answer goes to standard output. Reasoning is shown there on a terminal, and goes to standard \
error otherwise.")]
    Run(Box<RunArgs>),
    /// Answer the requests of applications: OpenAI's, Anthropic's and Ollama's APIs
    #[command(long_about = "\
Answer the requests of applications, in OpenAI's, Anthropic's and Ollama's APIs. GET /openapi.json
describes them, GET /status tells how the server is. Ctrl-C or SIGTERM let requests end first.")]
    Serve(Box<ServeArgs>),
    /// Start an agent on a server that runs: Claude Code, Codex or opencode
    #[command(long_about = "\
Start an agent on a server that runs, with the context and the limits that the server really has. With \
--print, print what would be set instead, as commands of a shell.")]
    Launch(LaunchArgs),
    /// Describe a model: shapes, memory, expected speed, tokenizer, template
    Inspect(InspectArgs),
    /// Measure prefill, decode and rounds here, next to what the bytes allow
    Bench(BenchArgs),
    /// Show where the time of a prefill and of rounds goes: device time of each op, launches, gaps
    Profile(ProfileArgs),
    /// Show what servers on this machine kept of their requests
    #[command(long_about = "\
Show what servers on this machine kept of their requests: a list, one request with what its time \
went to, or statistics. It reads the store itself, so it needs no server.")]
    Traces(Box<TracesArgs>),
    /// Watch a running server: rates, lanes, queue, cache, latencies
    Top(TopArgs),
    /// Fetch a model by its public name
    #[command(long_about = "\
Fetch a model by its public name into the cache that other programs use too. A download that stopped \
goes on where it was; what arrives is held to its checksum. --revision takes a branch, tag or commit.")]
    Pull(PullArgs),
    /// List the fetched models
    List(ListArgs),
    /// Remove fetched models
    Rm(RmArgs),
}

/// Model and machine, for every command.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model and machine")]
pub struct EngineArgs {
    /// Model: a folder, a .gguf file, a name in a model folder, a public name as OWNER/NAME or
    /// OWNER/NAME:FILE (fetched if need be), or synth:SHAPE [default: th-tiny]
    #[arg(long = "model", global = true, value_name = "MODEL")]
    pub model: Option<String>,

    /// What proposes tokens: auto (the folder MODEL-dflash, if there is one), none, ngram (repeats
    /// of the text so far), synth (made-up weights, to measure speed), or a draft model
    #[arg(long, global = true, value_name = "DRAFT", default_value = "auto", value_parser = draft)]
    pub draft: String,

    /// Branch, tag or commit of a model by its public name [default: main]
    #[arg(long, global = true, value_name = "REVISION")]
    pub revision: Option<String>,

    /// Fetch nothing: a model by its public name has to be in the cache
    #[arg(long, global = true)]
    pub offline: bool,

    /// Draft in every round; otherwise rounds on the CPU draft only while that is faster. The text
    /// is the same
    #[arg(long, global = true)]
    pub always_draft: bool,

    /// Compute threads [default: one per physical core]
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,

    /// Tokens of context [default: what the model allows and memory holds]
    #[arg(long, global = true, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(16..))]
    pub context: Option<u32>,

    /// How keys and values are stored: int8 takes about half the memory of a long context and gives
    /// slightly other text
    #[arg(long, global = true, value_enum, value_name = "FORM", default_value_t)]
    pub kv: Kv,

    /// Instruction set of the host kernels; all give the same bits [default: auto]
    #[arg(long, global = true, value_enum, value_name = "ISA")]
    pub isa: Option<Isa>,

    /// What computes
    #[arg(long, global = true, value_enum, value_name = "DEVICE", default_value_t)]
    pub device: DeviceKind,
}

/// The model as the first argument of a command.
#[derive(Clone, Debug, Default, Args)]
pub struct ModelArg {
    /// The model, as --model
    #[arg(value_name = "MODEL")]
    pub name: Option<String>,
}

/// Options of `chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// The model
    #[command(flatten)]
    pub model: ModelArg,
    /// System message of the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// How answers are made
    #[command(flatten)]
    pub answer: AnswerArgs,
}

/// Options of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The model
    #[command(flatten)]
    pub model: ModelArg,

    /// The prompt
    #[arg(long, value_name = "TEXT", group = "source")]
    pub prompt: Option<String>,
    /// File with the prompt, in UTF-8; - is standard input
    #[arg(long, value_name = "FILE", group = "source")]
    pub prompt_file: Option<PathBuf>,
    /// The prompt as token ids, e.g. "1,2,3"
    #[arg(long, value_name = "IDS", group = "source", value_parser = token_ids, conflicts_with_all = ["raw", "system", "no_think"])]
    pub tokens: Option<TokenIds>,

    /// Continue the prompt as it stands, without the chat template; control tokens in it count
    #[arg(long, conflicts_with_all = ["system", "no_think"])]
    pub raw: bool,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Print one JSON object instead of text: text, reasoning, tokens, finish_reason, usage,
    /// timings, counters, model, draft, device, build
    #[arg(long)]
    pub json: bool,
    /// How the answer is made
    #[command(flatten)]
    pub answer: AnswerArgs,
}

/// Token ids given on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenIds(pub Vec<u32>);

/// Options of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// The model
    #[command(flatten)]
    pub model: ModelArg,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// Options of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The model
    #[command(flatten)]
    pub model: ModelArg,
    /// Also time every kind of op; the rounds themselves get slower by it
    #[arg(long)]
    pub ops: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// Options of `profile`.
#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// The model
    #[command(flatten)]
    pub model: ModelArg,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// Rules by which proposals are accepted. All give exactly the target's distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Acceptance {
    /// Always the target's most likely token, as at temperature 0.
    Greedy,
    /// Token by token: min(1, p/q).
    Token,
    /// The whole block at once; never accepts fewer tokens than the token rule on average.
    Block,
    /// The same tokens for a seed whatever the draft proposes.
    Invariant,
}

impl From<Acceptance> for Rule {
    fn from(acceptance: Acceptance) -> Rule {
        match acceptance {
            Acceptance::Greedy => Rule::Greedy,
            Acceptance::Token => Rule::Token,
            Acceptance::Block => Rule::Block,
            Acceptance::Invariant => Rule::Invariant,
        }
    }
}

/// How answers are made. Absent options take the model's own defaults.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling (defaults: the model's generation_config.json)")]
pub struct AnswerArgs {
    /// Randomness; 0 always takes the most likely token
    #[arg(long, value_name = "T", value_parser = non_negative, allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Keep the K most likely tokens; 0 is off
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Keep the most likely tokens that make up this much of the probability; 1 is off
    #[arg(long, value_name = "P", value_parser = fraction, allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Keep tokens at least this fraction as likely as the best; 0 is off
    #[arg(long, value_name = "P", value_parser = fraction, allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Penalty on tokens that the answer contains, -2 to 2; 0 is off
    #[arg(long, value_name = "X", value_parser = penalty, allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Penalty on tokens for each time the answer contains them, -2 to 2; 0 is off
    #[arg(long, value_name = "X", value_parser = penalty, allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Penalty on tokens that prompt or answer contain, as a factor; 1 is off
    #[arg(long, value_name = "X", value_parser = positive, allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Makes the answer repeatable
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// How proposals are accepted; the distribution of answers is the same for all
    /// [default: greedy at temperature 0, invariant with --seed, else block]
    #[arg(long, value_enum, value_name = "RULE")]
    pub acceptance: Option<Acceptance>,
    /// The most tokens to generate [default: until the model stops or the context is full]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// End the answer before this text; may be given several times
    #[arg(long = "stop", value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stops: Vec<String>,
    /// Ask the model not to think before it answers
    #[arg(long)]
    pub no_think: bool,
}

impl AnswerArgs {
    /// The part that concerns the engine.
    pub fn generate_options(&self) -> GenerateOptions {
        GenerateOptions {
            sampling: SamplingOptions {
                temperature: self.temperature,
                top_k: self.top_k,
                top_p: self.top_p,
                min_p: self.min_p,
                presence_penalty: self.presence_penalty,
                frequency_penalty: self.frequency_penalty,
                repetition_penalty: self.repetition_penalty,
                logit_bias: Vec::new(),
                seed: self.seed,
                rule: self.acceptance.map(Rule::from),
            },
            max_tokens: self.max_tokens.map(|n| n as usize),
        }
    }
}

impl Cli {
    /// Parses a command line and checks what no single option can.
    pub fn parse_checked(
        args: impl IntoIterator<Item = std::ffi::OsString>,
    ) -> Result<Cli, clap::Error> {
        let cli = Cli::parse_with_file(args)?;
        let conflict = |message: String| {
            Err(Cli::command().error(clap::error::ErrorKind::ArgumentConflict, message))
        };
        if let (Some(option), Some(argument)) = (&cli.engine.model, &cli.positional_model().name) {
            return conflict(format!(
                "the model is given twice: --model {option} and {argument}; give one of them"
            ));
        }
        let answer = match &cli.command {
            Command::Chat(args) => Some(&args.answer),
            Command::Run(args) => Some(&args.answer),
            Command::Serve(_) | Command::Launch(_) | Command::Inspect(_) => None,
            Command::Bench(_) | Command::Profile(_) => None,
            Command::Traces(_) | Command::Top(_) => None,
            Command::Pull(_) | Command::List(_) | Command::Rm(_) => None,
        };
        if cli.engine.device == DeviceKind::Cuda && cli.engine.isa.is_some() {
            return conflict(
                "--isa chooses kernels of the CPU; leave it out with --device cuda".into(),
            );
        }
        if let Some(answer) = answer
            && answer.acceptance == Some(Acceptance::Greedy)
            && answer.temperature.is_some_and(|t| t > 0.0)
        {
            return conflict(
                "--acceptance greedy needs temperature 0; leave one of the two out".into(),
            );
        }
        Ok(cli)
    }

    /// Parses a command line, and the configuration file that it names as a part of it.
    fn parse_with_file(
        args: impl IntoIterator<Item = std::ffi::OsString>,
    ) -> Result<Cli, clap::Error> {
        let mut args: Vec<std::ffi::OsString> = args.into_iter().collect();
        let mut command = Cli::command();
        let mut matches = command.try_get_matches_from_mut(&args)?;
        // Built, so that options of all commands are known to this one.
        let serve = command.find_subcommand("serve").cloned();
        if let (Some(("serve", given)), Some(serve)) = (matches.subcommand(), &serve)
            && let Some(path) = given.get_one::<PathBuf>("config")
        {
            let wrong = |what| command.clone().error(clap::error::ErrorKind::InvalidValue, what);
            args.extend(serve::config::arguments(serve, given, path).map_err(wrong)?);
            matches = command.try_get_matches_from_mut(&args)?;
        }
        let mut cli = Cli::from_arg_matches(&matches)?;
        if let (Command::Serve(args), Some((_, given)), Some(serve)) =
            (&mut cli.command, matches.subcommand(), &serve)
            && args.print_config
        {
            args.effective = serve::config::effective(serve, given);
        }
        Ok(cli)
    }

    /// The model named by either spelling.
    pub fn model_name(&self) -> Option<&str> {
        self.engine.model.as_deref().or(self.positional_model().name.as_deref())
    }

    /// Resolves the names in the command line.
    pub fn load_request(&self, surroundings: &Surroundings) -> anyhow::Result<LoadRequest> {
        let hub = self.hub_options(surroundings);
        let model = match surroundings.find_model(self.model_name()) {
            Ok(model) => model,
            Err(missing) => ModelRef::Path(public(self.model_name(), &hub)?.ok_or(missing)?),
        };
        let draft_hub = HubOptions { revision: None, ..hub };
        let draft = match surroundings.find_draft(&self.engine.draft, &model) {
            Ok(DraftRef::None) if self.engine.draft == "auto" => public_draft(&model, &draft_hub)?,
            Ok(draft) => draft,
            Err(missing) => {
                DraftRef::Path(public(Some(&self.engine.draft), &draft_hub)?.ok_or(missing)?)
            }
        };
        Ok(LoadRequest {
            draft,
            model,
            always_draft: self.engine.always_draft,
            threads: self.engine.threads.map(|n| n as usize),
            context: self.engine.context.map(|n| n as usize),
            kv: self.engine.kv,
            isa: surroundings.isa(self.engine.isa).map_err(anyhow::Error::msg)?,
            device: self.engine.device,
            cuda: surroundings.cuda(self.engine.threads.map_or(0, |n| n as usize)),
        })
    }

    /// Where models by public names come from.
    pub fn hub_options(&self, surroundings: &Surroundings) -> HubOptions {
        let hub = surroundings.hub.clone();
        let offline = hub.offline || self.engine.offline;
        HubOptions { offline, revision: self.engine.revision.clone(), ..hub }
    }

    fn positional_model(&self) -> &ModelArg {
        match &self.command {
            Command::Chat(args) => &args.model,
            Command::Run(args) => &args.model,
            Command::Serve(args) => &args.model,
            Command::Launch(args) => &args.model,
            Command::Inspect(args) => &args.model,
            Command::Bench(args) => &args.model,
            Command::Profile(args) => &args.model,
            Command::Traces(_) | Command::Top(_) => const { &ModelArg { name: None } },
            Command::Pull(_) | Command::List(_) | Command::Rm(_) => {
                const { &ModelArg { name: None } }
            }
        }
    }
}

/// The model by a public name, fetched if need be; `None` if the name is none.
fn public(name: Option<&str>, options: &HubOptions) -> anyhow::Result<Option<PathBuf>> {
    let Some(Ok(name)) = name.map(ModelName::parse) else { return Ok(None) };
    Ok(Some(fetch(&Hub::new(options)?, &name, false)?))
}

/// The public draft of a fetched model, if it was fetched as well; otherwise says that there is one.
fn public_draft(model: &ModelRef, options: &HubOptions) -> anyhow::Result<DraftRef> {
    let ModelRef::Path(path) = model else { return Ok(DraftRef::None) };
    let Some(draft) = repo_of(path).as_ref().and_then(draft_of) else { return Ok(DraftRef::None) };
    match Hub::new(options)?.find(&draft)? {
        Some(path) => Ok(DraftRef::Path(path)),
        None => {
            terminal::note(&format!("faster with its draft: th-engine pull {draft}"));
            Ok(DraftRef::None)
        }
    }
}

fn number(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "not a number".to_owned())?;
    if value.is_finite() { Ok(value) } else { Err("not a finite number".into()) }
}

fn non_negative(text: &str) -> Result<f32, String> {
    number(text).and_then(|x| if x >= 0.0 { Ok(x) } else { Err("must not be negative".into()) })
}

fn positive(text: &str) -> Result<f32, String> {
    number(text).and_then(|x| if x > 0.0 { Ok(x) } else { Err("must be above 0".into()) })
}

fn fraction(text: &str) -> Result<f32, String> {
    let inside = |x: &f32| (0.0..=1.0).contains(x);
    number(text).and_then(|x| Some(x).filter(inside).ok_or("must be from 0 to 1".into()))
}

fn penalty(text: &str) -> Result<f32, String> {
    let inside = |x: &f32| (-2.0..=2.0).contains(x);
    number(text).and_then(|x| Some(x).filter(inside).ok_or("must be from -2 to 2".into()))
}

fn draft(text: &str) -> Result<String, String> {
    match text {
        "" => Err("must not be empty".into()),
        _ if text.starts_with("synth:") => {
            Err("the shape of a made-up draft follows the model; use --draft synth".into())
        }
        _ => Ok(text.to_owned()),
    }
}

fn token_ids(text: &str) -> Result<TokenIds, String> {
    let id = |part: &str| {
        part.trim().parse::<u32>().map_err(|_| format!("{:?} is not a token id", part.trim()))
    };
    text.split(',').map(id).collect::<Result<_, _>>().map(TokenIds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, String> {
        let args = std::iter::once("th-engine").chain(line.split_whitespace());
        Cli::parse_checked(args.map(Into::into)).map_err(|e| e.to_string())
    }

    fn run_args(line: &str) -> RunArgs {
        match parse(&format!("run {line}")).unwrap().command {
            Command::Run(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_reach_the_engine() {
        let args = run_args(
            "--temperature 0.5 --top-k 0 --top-p 1 --min-p 0 --presence-penalty -0.5 \
             --frequency-penalty 2 --repetition-penalty 1.1 --seed 42 --max-tokens 7 \
             --acceptance token --stop a --stop b --no-think",
        );
        let expected = SamplingOptions {
            temperature: Some(0.5),
            top_k: Some(0),
            top_p: Some(1.0),
            min_p: Some(0.0),
            presence_penalty: Some(-0.5),
            frequency_penalty: Some(2.0),
            repetition_penalty: Some(1.1),
            logit_bias: Vec::new(),
            seed: Some(42),
            rule: Some(Rule::Token),
        };
        let options = args.answer.generate_options();
        assert_eq!(options, GenerateOptions { sampling: expected, max_tokens: Some(7) });
        assert_eq!((args.answer.stops, args.answer.no_think), (vec!["a".into(), "b".into()], true));
    }

    #[test]
    fn engine_options_stand_on_either_side_of_the_command() {
        for line in ["--threads 3 run --isa avx2", "run --threads 3 --isa avx2 m"] {
            let cli = parse(line).unwrap();
            assert_eq!((cli.engine.threads, cli.engine.isa), (Some(3), Some(Isa::Avx2)));
        }
        assert_eq!(parse("run m").unwrap().model_name(), Some("m"));
        assert_eq!(parse("run --model m").unwrap().model_name(), Some("m"));
    }

    #[test]
    fn token_lists() {
        assert_eq!(run_args("--tokens 1,2,3").tokens, Some(TokenIds(vec![1, 2, 3])));
        for bad in ["--tokens 1,,2", "--tokens x", "--tokens -1"] {
            assert!(parse(&format!("run {bad}")).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_cannot_be_asked_is_refused() {
        for (line, word) in [
            ("run --temperature -1", "negative"),
            ("run --temperature nan", "finite"),
            ("run --top-p 1.5", "from 0 to 1"),
            ("run --presence-penalty 3", "-2 to 2"),
            ("run --repetition-penalty 0", "above 0"),
            ("run --max-tokens 0", "max-tokens"),
            ("run --stop=", "stop"),
            ("run --threads 0", "threads"),
            ("run --draft synth:tiny", "--draft synth"),
            ("run --model a b", "given twice"),
            ("run --prompt a --prompt-file b", "cannot be used with"),
            ("run --prompt a --tokens 1", "cannot be used with"),
            ("run --tokens 1 --raw", "cannot be used with"),
            ("run --raw --no-think", "cannot be used with"),
            ("run --acceptance greedy --temperature 1", "temperature 0"),
            ("run --acceptance best", "possible values"),
            ("run --colour", "--colour"),
        ] {
            let message = parse(line).map(|_| ()).unwrap_err();
            assert!(message.contains(word), "{line}: {message}");
        }
    }
}
