//! `th-engine traces`: what servers on this machine kept of their requests. It reads the store
//! itself, so it works without a server, and after one has crashed.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use jiff::tz::TimeZone;
use serde_json::json;

use super::text;
use crate::Failure;
use crate::config::Surroundings;
use crate::telemetry::record::ErrorClass;
use crate::telemetry::stats::{Collector, Stats};
use crate::telemetry::store::{Filter, Reader, now_us};
use crate::telemetry::when;

/// Options of `traces`.
#[derive(Clone, Debug, Args)]
pub struct TracesArgs {
    /// Show one trace with what its time went to: an id of the list, or of the header x-th-trace-id
    #[arg(value_name = "ID", conflicts_with = "stats")]
    pub id: Option<String>,
    /// Show statistics instead of requests
    #[arg(long)]
    pub stats: bool,
    /// Only requests begun since: 15m, 2h or 7d ago, or a time like 2026-11-30T08:00:00Z
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Only requests begun before
    #[arg(long, value_name = "TIME")]
    pub before: Option<String>,
    /// Only requests of this client
    #[arg(long, value_name = "NAME")]
    pub client: Option<String>,
    /// Only requests of this conversation
    #[arg(long, value_name = "KEY")]
    pub session: Option<String>,
    /// Only requests on this route
    #[arg(long, value_name = "ROUTE")]
    pub endpoint: Option<String>,
    /// Only requests that ended so: ok, error, or a class of errors
    #[arg(long, value_name = "OUTCOME", value_parser = outcome)]
    pub outcome: Option<String>,
    /// The most requests, newest first
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: usize,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    /// File that traces are kept in [default: traces.db in the user's data folder]
    #[arg(long, value_name = "FILE")]
    pub trace_file: Option<PathBuf>,
}

fn outcome(text: &str) -> Result<String, String> {
    if ["ok", "error"].contains(&text) || ErrorClass::named(text).is_some() {
        return Ok(text.to_owned());
    }
    let classes: Vec<&str> = ErrorClass::ALL.into_iter().map(ErrorClass::name).collect();
    Err(format!("use ok, error, or one of {}", classes.join(", ")))
}

/// Runs the command; with `--model`, only for requests that this model answered.
///
/// # Errors
/// The store can't be read, or has no such trace.
pub fn run(
    args: &TracesArgs,
    model: Option<&str>,
    surroundings: &Surroundings,
) -> Result<(), Failure> {
    let filter = filter(args, model, now_us()).map_err(Failure::Usage)?;
    let path = args.trace_file.clone().or_else(|| surroundings.traces());
    let path = path.context("no folder for data is known; give --trace-file");
    let path = path.map_err(Failure::Usage)?;
    let shown = path.display().to_string();
    let reader = Reader::open(&path).with_context(|| shown.clone()).map_err(Failure::Run)?;
    let out = report(&reader, args, &filter, &TimeZone::system());
    let out = out.with_context(|| shown).map_err(Failure::Run)?;
    std::io::stdout().write_all(out.as_bytes()).map_err(Failure::write)
}

fn filter(args: &TracesArgs, model: Option<&str>, now_us: u64) -> anyhow::Result<Filter> {
    let time = |option: &str, text: &Option<String>| {
        let parsed = text.as_deref().map(|text| when::parse(text, now_us)).transpose();
        parsed.map_err(|reason| anyhow::anyhow!("{option}: {reason}"))
    };
    Ok(Filter {
        since_us: time("--since", &args.since)?,
        before_us: time("--before", &args.before)?,
        client: args.client.clone(),
        session: args.session.clone(),
        endpoint: args.endpoint.clone(),
        model: model.map(str::to_owned),
        outcome: args.outcome.clone(),
    })
}

/// What is printed.
fn report(
    reader: &Reader,
    args: &TracesArgs,
    filter: &Filter,
    zone: &TimeZone,
) -> anyhow::Result<String> {
    if let Some(id) = &args.id {
        let requests = reader.get(id)?;
        anyhow::ensure!(!requests.is_empty(), "no trace has the id {id}");
        if args.json {
            return Ok(format!("{}\n", json!({ "id": id, "requests": requests })));
        }
        let told = requests.iter().map(|record| text::waterfall(record, zone));
        return Ok(told.collect::<Vec<_>>().join("\n"));
    }
    if args.stats {
        let stats = stats(reader, filter)?;
        return match args.json {
            true => Ok(format!("{}\n", serde_json::to_string(&stats)?)),
            false => Ok(text::statistics(&stats)),
        };
    }
    let records = reader.list(filter, args.limit)?;
    match args.json {
        // A line for each: for jq, and for files that grow.
        true => records.iter().map(|r| Ok(serde_json::to_string(r)? + "\n")).collect(),
        false => Ok(text::table(&records, zone)),
    }
}

fn stats(reader: &Reader, filter: &Filter) -> anyhow::Result<Stats> {
    let mut collector = Collector::default();
    reader.samples(filter, |sample| collector.add(&sample))?;
    Ok(collector.finish())
}

#[cfg(test)]
#[path = "traces_tests.rs"]
mod tests;
