//! `pull`, `list` and `rm`.

use std::io::Write;
use std::sync::atomic::AtomicBool;

use clap::Args;
use serde_json::{Value, json};

use super::drafts::draft_of;
use super::name::ModelName;
use super::{Hub, HubError, HubOptions};
use crate::progress::LoadingBar;
use crate::{Failure, interrupt, terminal};

/// Options of `pull`.
#[derive(Clone, Debug, Args)]
pub struct PullArgs {
    /// The model: OWNER/NAME, or OWNER/NAME:FILE for one .gguf file of several
    #[arg(value_name = "MODEL")]
    pub name: String,
    /// Fetch the draft that matches it as well, if one is known
    #[arg(long)]
    pub with_draft: bool,
}

/// Options of `list`.
#[derive(Clone, Debug, Args)]
pub struct ListArgs {
    /// Print one JSON array instead of text
    #[arg(long)]
    pub json: bool,
}

/// Options of `rm`.
#[derive(Clone, Debug, Args)]
pub struct RmArgs {
    /// The models: OWNER/NAME
    #[arg(value_name = "MODEL", required = true)]
    pub names: Vec<String>,
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Failure {
        match error {
            HubError::Interrupted => Failure::Interrupted,
            HubError::Name(error) => Failure::Usage(error.into()),
            error => Failure::Load(error.into()),
        }
    }
}

/// Fetches a model, with a bar on a terminal.
///
/// # Errors
/// It can't be had.
pub fn fetch(hub: &Hub, name: &ModelName, newest: bool) -> Result<std::path::PathBuf, HubError> {
    let bar = LoadingBar::new();
    let mut progress = |progress: crate::generate::Progress<'_>| bar.update(progress);
    let mut work = |cancel: &AtomicBool| match newest {
        true => hub.pull(name, &mut progress, cancel),
        false => hub.get(name, &mut progress, cancel),
    };
    interrupt::answering(&mut work)
}

/// Fetches what was named.
///
/// # Errors
/// It can't be had.
pub fn pull(args: &PullArgs, options: &HubOptions) -> Result<(), Failure> {
    let hub = Hub::new(options)?;
    let name = ModelName::parse(&args.name).map_err(HubError::from)?;
    let path = fetch(&hub, &name, true)?;
    print(&path.display())?;
    let Some(draft) = draft_of(&name.repo) else { return Ok(()) };
    if args.with_draft {
        // The draft has branches of its own.
        let hub = Hub::new(&HubOptions { revision: None, ..options.clone() })?;
        print(&fetch(&hub, &draft, true)?.display())?;
    } else {
        terminal::note(&format!("a draft that matches it: th-engine pull {draft}"));
    }
    Ok(())
}

/// Lists the models in the cache.
///
/// # Errors
/// The cache can't be read.
pub fn list(args: &ListArgs, options: &HubOptions) -> Result<(), Failure> {
    let cached = Hub::new(options)?.cache().list()?;
    if args.json {
        let entry = |model: &super::cache::Cached| {
            json!({"name": model.repo.to_string(), "revisions": model.revisions, "bytes": model.bytes,
                   "complete": model.whole, "path": model.path.display().to_string()})
        };
        let all: Value = cached.iter().map(entry).collect();
        return print(&all);
    }
    if cached.is_empty() {
        terminal::note(&"no models in the cache; th-engine pull OWNER/NAME fetches one");
    }
    let width = cached.iter().map(|model| model.repo.to_string().len()).max().unwrap_or(0);
    for model in &cached {
        let remark = if model.whole { "" } else { "  (not complete)" };
        let name = model.repo.to_string();
        let size = model.bytes as f64 / 1e9;
        print(&format!("{name:width$}  {size:8.2} GB  {}{remark}", model.revisions.join(" ")))?;
    }
    Ok(())
}

/// Removes models from the cache.
///
/// # Errors
/// One is not there, or can't be removed.
pub fn rm(args: &RmArgs, options: &HubOptions) -> Result<(), Failure> {
    let hub = Hub::new(options)?;
    let names = args.names.iter().map(|name| ModelName::parse(name));
    let names = names.collect::<Result<Vec<_>, _>>().map_err(HubError::from)?;
    for name in names {
        if name.file.is_some() {
            let what = format!(
                "{name}: a model is removed as a whole; leave out the part after its colon"
            );
            return Err(Failure::Usage(anyhow::Error::msg(what)));
        }
        match hub.cache().remove(&name.repo)? {
            Some(bytes) => print(&format!("removed {name}, {:.2} GB", bytes as f64 / 1e9))?,
            None => {
                let cache = hub.cache().root().display();
                return Err(Failure::Load(anyhow::anyhow!("{name} is not in {cache}")));
            }
        }
    }
    Ok(())
}

fn print(line: &dyn std::fmt::Display) -> Result<(), Failure> {
    writeln!(std::io::stdout(), "{line}").map_err(Failure::write)
}
