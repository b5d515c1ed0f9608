//! The program: command line, text, terminals. It is the only crate that sees text and the only
//! one that reads the environment; the engine is behind [`generate`].

pub mod answer;
pub mod bench;
pub mod chat;
pub mod cli;
pub mod config;
pub mod device;
pub mod forecast;
pub mod generate;
pub mod hub;
pub mod inspect;
pub mod interrupt;
pub mod local;
pub mod memory;
pub mod profile;
pub mod progress;
pub mod run;
pub mod serve;
pub mod session;
pub mod summary;
pub mod telemetry;
pub mod terminal;
pub mod text;
pub mod watch;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use crate::answer::AnswerError;
use crate::cli::{Cli, Command};
use crate::config::Surroundings;
use crate::generate::Loader;

/// Why a command ended without success.
#[derive(Debug)]
pub enum Failure {
    /// The command line asks for something impossible.
    Usage(anyhow::Error),
    /// The model was not found or could not be loaded.
    Load(anyhow::Error),
    /// It failed while running.
    Run(anyhow::Error),
    /// Ctrl-C.
    Interrupted,
    /// Whoever read the output has left; there is nobody to tell.
    Closed,
}

impl Failure {
    /// A failure to write output.
    pub fn write(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::Closed,
            _ => Failure::Run(anyhow::Error::new(error).context("cannot write the output")),
        }
    }

    /// The exit status, after the reason was told.
    fn report(self) -> u8 {
        let (status, reason) = match self {
            Failure::Run(reason) => (1, reason),
            Failure::Usage(reason) => (2, reason),
            Failure::Load(reason) => (3, reason),
            Failure::Interrupted => return interrupt::EXIT_STATUS,
            Failure::Closed => return 0,
        };
        terminal::error(&format!("{reason:#}"));
        status
    }
}

impl From<AnswerError> for Failure {
    fn from(error: AnswerError) -> Failure {
        match error {
            AnswerError::Write(error) => Failure::write(error),
            other => Failure::Run(other.into()),
        }
    }
}

/// Runs the program on a command line whose first item is its own name.
pub fn main_with(
    args: impl IntoIterator<Item = OsString>,
    loader: &'static dyn Loader,
) -> ExitCode {
    let cli = match Cli::parse_checked(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are "errors" too, with their own stream and status. A closed pipe
            // is nothing to report.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    // A server drains when it is interrupted, and listens for that itself.
    if !matches!(cli.command, Command::Serve(_)) {
        interrupt::install();
    }
    match command(&cli, loader) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => ExitCode::from(failure.report()),
    }
}

fn command(cli: &Cli, loader: &'static dyn Loader) -> Result<(), Failure> {
    let surroundings = Surroundings::read();
    let options = cli.hub_options(&surroundings);
    match &cli.command {
        // These look at servers, and load no model.
        Command::Traces(args) => {
            return watch::traces::run(args, cli.engine.model.as_deref(), &surroundings);
        }
        Command::Top(args) => return watch::top::run(args, &surroundings),
        Command::Launch(args) => return serve::launch::run(args, &surroundings),
        Command::Serve(args) if args.print_config => {
            return write!(std::io::stdout(), "{}", args.effective).map_err(Failure::write);
        }
        Command::Pull(args) => return hub::commands::pull(args, &options),
        Command::List(args) => return hub::commands::list(args, &options),
        Command::Rm(args) => return hub::commands::rm(args, &options),
        _ => {}
    }
    let request = cli.load_request(&surroundings).map_err(Failure::Load)?;
    match &cli.command {
        Command::Traces(_) | Command::Top(_) | Command::Launch(_) => Ok(()),
        Command::Pull(_) | Command::List(_) | Command::Rm(_) => Ok(()),
        Command::Chat(args) => chat::run(loader, &request, args),
        Command::Run(args) => run::run(loader, &request, args),
        Command::Serve(args) => serve::run::run(loader, &request, args, &surroundings),
        Command::Inspect(args) => inspect::run(loader, &request, args),
        Command::Bench(args) => inspect::bench(loader, &request, args),
        Command::Profile(args) => inspect::profile(loader, &request, args),
    }
}
