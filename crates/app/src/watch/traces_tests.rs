use serde_json::json;

use super::*;
use crate::cli::{Cli, Command};
use crate::telemetry::record::{DraftCounts, Fault, Record, Span, TokenCounts};
use crate::telemetry::store::{Store, StoreOptions};

const BEGUN: u64 = 1_790_000_000_000_000;

fn span(name: &str, start_us: u64, duration_us: u64, children: Vec<Span>) -> Span {
    Span { name: name.into(), start_us, duration_us, children, ..Span::default() }
}

fn answered() -> Record {
    let mut lookup = span("cache lookup", 7_000, 0, Vec::new());
    lookup.attributes.insert("tokens".into(), json!(64));
    lookup.attributes.insert("source".into(), json!("memory"));
    Record {
        trace_id: "4bf92f3577b34da6a3ce929d0e0e4736".parse().unwrap(),
        span_id: "00f067aa0ba902b7".parse().unwrap(),
        request_id: "chatcmpl-1".into(),
        started_us: BEGUN,
        duration_us: 1_000_000,
        first_token_us: Some(120_000),
        client: "curl/8".into(),
        endpoint: "/v1/chat/completions".into(),
        model: "th-tiny".into(),
        status: 200,
        finish: Some("stop".into()),
        tokens: TokenCounts { prompt: 100, cached: 64, output: 30, reasoning: 10 },
        queue_us: 5_000,
        prefill_us: 93_000,
        decode_us: 900_000,
        draft: DraftCounts { rounds: 10, proposed: 70, accepted: 20 },
        spans: vec![
            span("template", 500, 500, Vec::new()),
            span("queue", 2_000, 5_000, Vec::new()),
            lookup,
            span("prefill", 7_000, 93_000, vec![span("chunk", 7_000, 93_000, Vec::new())]),
            span("decode", 100_000, 900_000, Vec::new()),
        ],
        ..Record::default()
    }
}

fn timed_out() -> Record {
    let message = "the request's time was up\u{1b}[31m".to_owned();
    Record {
        span_id: "00f067aa0ba902b8".parse().unwrap(),
        started_us: BEGUN + 60_000_000,
        first_token_us: None,
        client: "evil\u{1b}]0;title\u{7}client with a long name".into(),
        status: 408,
        finish: None,
        error: Some(Fault {
            class: ErrorClass::Timeout,
            code: "deadline_exceeded".into(),
            message,
        }),
        tokens: TokenCounts { prompt: 50, ..TokenCounts::default() },
        decode_us: 0,
        draft: DraftCounts::default(),
        spans: Vec::new(),
        ..answered()
    }
}

/// What the command prints.
fn traces(line: &str) -> anyhow::Result<String> {
    let folder = std::env::temp_dir().join(format!(
        "th-engine-traces-{}-{}",
        std::process::id(),
        line.len()
    ));
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("traces.db");
    let _ = std::fs::remove_file(&path);
    Store::open(&StoreOptions::at(path.clone()))?.insert(&mut [answered(), timed_out()])?;
    let words = ["th-engine", "traces"].into_iter().chain(line.split_whitespace());
    let cli = Cli::parse_checked(words.map(Into::into))?;
    let Command::Traces(args) = &cli.command else { anyhow::bail!("another command") };
    let filter = filter(args, cli.engine.model.as_deref(), BEGUN + 120_000_000)?;
    let out = report(&Reader::open(&path)?, args, &filter, &TimeZone::UTC);
    std::fs::remove_dir_all(folder)?;
    out
}

#[test]
fn requests_one_a_line() {
    insta::assert_snapshot!(traces("").unwrap());
    let newest = traces("--limit 1").unwrap();
    assert!(newest.contains("timeout") && !newest.contains("curl"), "{newest}");
    let old = traces("--before 90s").unwrap();
    assert!(!old.contains("timeout") && old.contains("curl"), "{old}");
    assert_eq!(traces("--client nobody").unwrap(), "no requests match\n");
    assert_eq!(traces("--model other").unwrap(), "no requests match\n");
    assert_eq!(traces("--since 10s --stats").unwrap(), "no requests match\n");
    // A client's name can not write to the terminal.
    assert!(!traces("").unwrap().contains(['\u{1b}', '\u{7}']));
}

#[test]
fn one_request_as_a_waterfall() {
    insta::assert_snapshot!(traces("00f067aa0ba902b7").unwrap());
    let both = traces("4bf92f3577b34da6a3ce929d0e0e4736").unwrap();
    assert_eq!(both.matches("outcome").count(), 2);
    assert!(!both.contains('\u{1b}'), "{both}");
    let error = traces("00f067aa0ba902ff").unwrap_err().to_string();
    assert!(error.contains("no trace has the id"), "{error}");
}

#[test]
fn statistics_in_all_and_by_name() {
    insta::assert_snapshot!(traces("--stats").unwrap());
}

#[test]
fn json_for_programs() {
    let lines = traces("--json").unwrap();
    let records: Vec<Record> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((records.len(), records[1].tokens.cached), (2, 64));
    let stats: Stats = serde_json::from_str(&traces("--json --stats").unwrap()).unwrap();
    assert_eq!(stats.total.requests, 2);
    let one: serde_json::Value =
        serde_json::from_str(&traces("--json 00f067aa0ba902b7").unwrap()).unwrap();
    assert_eq!(one["requests"][0]["spans"][0]["name"], "template");
}

#[test]
fn what_can_not_be_asked_is_refused() {
    for (line, word) in [
        ("--since yesterday", "--since"),
        ("--outcome broken", "rate_limited"),
        ("--stats 00f067aa0ba902b7", "cannot be used with"),
    ] {
        let error = traces(line).unwrap_err().to_string();
        assert!(error.contains(word), "{line}: {error}");
    }
}
