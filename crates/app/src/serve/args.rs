//! The options of `serve` and `launch`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::cli::ModelArg;

/// The port that `serve` listens on and `launch` asks, unless told otherwise.
pub const DEFAULT_PORT: u16 = 8080;

/// Options of `serve`. A configuration file has the same names, without the dashes in front.
#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// The model
    #[command(flatten)]
    pub model: ModelArg,

    /// TOML file with options under their names here, e.g. port = 8081; the command line wins
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the options in effect as such a file, keys of the API left out, and leave
    #[arg(long)]
    pub print_config: bool,

    /// Where to listen and who may ask
    #[command(flatten)]
    pub access: AccessArgs,
    /// Limits of requests
    #[command(flatten)]
    pub limits: LimitArgs,
    /// How many are answered at once
    #[command(flatten)]
    pub lanes: LaneArgs,
    /// When the model is loaded and the server leaves
    #[command(flatten)]
    pub life: LifeArgs,
    /// Traces of requests
    #[command(flatten)]
    pub traces: TraceArgs,

    /// What --print-config prints.
    #[arg(skip)]
    pub effective: String,
}

/// Where to listen and who may ask.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Access")]
pub struct AccessArgs {
    /// Address to listen on; 0.0.0.0 is every network, for which an API key is a good idea
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = DEFAULT_PORT)]
    pub port: u16,
    /// Listen on this UNIX socket instead; only its owner may connect
    #[arg(long, value_name = "PATH")]
    pub unix_socket: Option<PathBuf>,
    /// Key that requests must carry; may be given several times. TH_API_KEY and --api-key-file keep
    /// it out of the list of processes
    #[arg(long, value_name = "KEY", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub api_key: Vec<String>,
    /// File with such keys, one a line
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Further name of this server that browsers may use, or * for any
    #[arg(long, value_name = "NAME")]
    pub allowed_host: Vec<String>,
    /// Origin whose pages may ask, e.g. https://chat.example.org, or * for any
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,
    /// Name under which requests find the model; may be given several times. * takes any name
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub served_model_name: Vec<String>,
}

/// Limits of requests.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// The most bytes of a request's body
    #[arg(long, value_name = "BYTES", default_value_t = 32 << 20)]
    pub max_body: usize,
    /// The most time that a request's head may take to arrive
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub header_timeout: Duration,
    /// The most time that a request's body may take to arrive
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub upload_timeout: Duration,
    /// The most time that a request may take in all [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub request_timeout: Option<Duration>,
    /// How long a streamed reply may be silent before it says that it lives
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub keep_alive: Duration,
}

/// How many are answered at once.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Lanes")]
pub struct LaneArgs {
    /// Requests that are answered at the same time; each may fill the whole context [default: what
    /// memory holds, up to 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub lanes: Option<u16>,
    /// Requests that may wait; more are told to come again
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u16).range(1..))]
    pub queue: u16,
    /// The most MiB that the model may take in all [default: what is free]
    #[arg(long, value_name = "MIB")]
    pub max_memory: Option<u32>,
    /// MiB that keep the state of earlier prompts, so that what begins like them need not be read
    /// again [default: a part of what is free]
    #[arg(long, value_name = "MIB")]
    pub cache_memory: Option<u32>,
    /// Folder in which that state survives restarts
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// The most MiB in that folder
    #[arg(long, value_name = "MIB", default_value_t = 8192)]
    pub cache_disk: u32,
    /// Reuse only what reading prompts made, not what answering made: the text of an answer then never
    /// depends on what was asked before
    #[arg(long)]
    pub exact_cache: bool,
}

/// When the model is loaded and the server leaves.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Lifecycle")]
pub struct LifeArgs {
    /// Give the model's memory back after this time without requests; the next one loads it again
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub idle_release: Option<Duration>,
    /// Run the engine in a process of its own that is started again if it crashes
    #[arg(long)]
    pub supervised: bool,
    /// How long requests may go on after the server was told to leave
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub drain_timeout: Duration,
    /// The socket on which a supervised server is asked.
    #[arg(long, hide = true, value_name = "PATH")]
    pub supervised_socket: Option<PathBuf>,
}

/// Traces of requests.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Traces")]
pub struct TraceArgs {
    /// Keep no traces
    #[arg(long)]
    pub no_traces: bool,
    /// File that traces are kept in [default: traces.db in the user's data folder]
    #[arg(long, value_name = "FILE")]
    pub trace_file: Option<PathBuf>,
    /// Days that traces are kept
    #[arg(long, value_name = "DAYS", default_value_t = 30)]
    pub trace_days: u32,
    /// The most MiB that traces take
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    pub trace_max_mib: u32,
    /// Keep the text of requests and answers too, up to this many bytes of each
    #[arg(long, value_name = "BYTES", num_args = 0..=1, default_missing_value = "65536")]
    pub trace_bodies: Option<usize>,
    /// Regular expression of text that is never kept; may be given several times
    #[arg(long, value_name = "REGEX")]
    pub trace_redact: Vec<String>,
    /// OpenTelemetry collector that spans are sent to, e.g. http://localhost:4318
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Header of each post to the collector, as NAME=VALUE
    #[arg(long, value_name = "HEADER")]
    pub otlp_header: Vec<String>,
}

/// Options of `launch`.
#[derive(Clone, Debug, Args)]
pub struct LaunchArgs {
    /// The agent
    #[arg(value_enum)]
    pub agent: Agent,
    /// The model that `serve` would take; here it is ignored
    #[arg(skip)]
    pub model: ModelArg,
    /// Where the server is
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// The server's API key [default: TH_API_KEY]
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Print what would be set, for a shell, and run nothing
    #[arg(long)]
    pub print: bool,
    /// Arguments of the agent
    #[arg(last = true, value_name = "ARGS")]
    pub rest: Vec<String>,
}

/// Agents that can be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Agent {
    /// Claude Code.
    Claude,
    /// Codex.
    Codex,
    /// opencode.
    Opencode,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    let wrong = || "must be above 0".to_owned();
    let time = Duration::try_from_secs_f64(number).map_err(|_| wrong())?;
    if time.is_zero() { Err(wrong()) } else { Ok(time) }
}
