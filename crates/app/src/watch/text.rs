//! Requests and statistics as text for terminals.

use std::fmt::Write;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::telemetry::record::{Record, Span};
use crate::telemetry::stats::{Percentiles, Stats, Summary};

/// Columns that a bar of the waterfall has.
const BAR: usize = 40;

/// Requests, one a line, the newest first.
pub fn table(records: &[Record], zone: &TimeZone) -> String {
    if records.is_empty() {
        return "no requests match\n".into();
    }
    let mut rows = vec![
        [
            "TIME", "ID", "OUTCOME", "CLIENT", "MODEL", "PROMPT", "CACHED", "OUT", "FIRST",
            "TOTAL", "TOK/S",
        ]
        .map(String::from),
    ];
    rows.extend(records.iter().map(|record| {
        let tokens = &record.tokens;
        [
            time(record.started_us, zone),
            record.span_id.to_string(),
            record.outcome().to_owned() + if record.retry_of.is_some() { " (retry)" } else { "" },
            shown(&record.client, 16),
            shown(&record.model, 20),
            tokens.prompt.to_string(),
            tokens.cached.to_string(),
            tokens.output.to_string(),
            record.first_token_us.map_or("-".into(), |us| duration(us as f64 / 1e3)),
            duration(record.duration_us as f64 / 1e3),
            rate(tokens.output, record.decode_us).map_or("-".into(), |x| format!("{x:.1}")),
        ]
    }));
    aligned(&rows, 5)
}

/// One request and what its time went to.
pub fn waterfall(record: &Record, zone: &TimeZone) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            // Writing to a string does not fail.
            let _ = writeln!(out, "{name:<10}{value}");
        }
    };
    let (tokens, draft) = (&record.tokens, &record.draft);
    line("trace", record.trace_id.to_string());
    line("request", format!("{} {}", record.span_id, record.request_id));
    line("begun", time(record.started_us, zone));
    line("asked", format!("{} by {}", record.endpoint, shown(&record.client, 60)));
    line("model", shown(&record.model, 60));
    line("session", record.session.as_deref().map_or_else(String::new, |s| shown(s, 60)));
    let finish = record.finish.as_deref().map_or_else(String::new, |finish| format!(" ({finish})"));
    line("outcome", format!("{}, status {}{finish}", record.outcome(), record.status));
    if let Some(error) = &record.error {
        line("error", format!("{}: {}", error.code, shown(&error.message, 200)));
    }
    line("retry of", record.retry_of.map_or_else(String::new, |id| id.to_string()));
    line(
        "tokens",
        format!(
            "prompt {} ({} cached), output {} ({} reasoning)",
            tokens.prompt, tokens.cached, tokens.output, tokens.reasoning
        ),
    );
    if draft.rounds > 0 {
        let per_round = tokens.output as f64 / draft.rounds as f64;
        line(
            "rounds",
            format!(
                "{}, {per_round:.2} tokens each; {} of {} proposals accepted",
                draft.rounds, draft.accepted, draft.proposed
            ),
        );
    }
    if let Some(rate) = rate(tokens.output, record.decode_us) {
        line("rate", format!("{rate:.1} tokens/s"));
    }
    line("miss", shown(&record.cache.miss, 100));
    line("tools", shown(&record.tool_calls.join(", "), 100));
    let sampling = serde_json::to_string(&record.sampling).unwrap_or_default();
    line("sampling", if sampling == "{}" { String::new() } else { sampling });
    out.push('\n');
    bars(&mut out, record);
    if let Some(bodies) = &record.bodies {
        let cut = if bodies.truncated { " (cut)" } else { "" };
        for (name, body) in [("request", &bodies.request), ("answer", &bodies.response)] {
            let _ = write!(out, "\n{name}{cut}:\n{}\n", printable(body));
        }
    }
    out
}

fn bars(out: &mut String, record: &Record) {
    let mut rows = Vec::new();
    let whole = Span { name: "request".into(), duration_us: record.duration_us, ..Span::default() };
    flatten(&mut rows, &whole, 0);
    record.spans.iter().for_each(|span| flatten(&mut rows, span, 1));
    let width = rows.iter().map(|(depth, span)| 2 * depth + span.name.chars().count()).max();
    let width = width.unwrap_or(0);
    for (depth, span) in rows {
        let name = format!("{:indent$}{}", "", span.name, indent = 2 * depth);
        let (from, to) = (span.start_us, span.start_us.saturating_add(span.duration_us));
        let column = |us: u64| {
            (us as f64 / record.duration_us.max(1) as f64 * BAR as f64).round().min(BAR as f64)
                as usize
        };
        let (from, to) = (column(from).min(BAR - 1), column(to));
        // What took hardly any time is still seen.
        let bar = format!("{:from$}{}", "", "█".repeat(to.saturating_sub(from).max(1)));
        let attributes = span.attributes.iter().map(|(name, value)| match value.as_str() {
            Some(text) => format!("{name}={}", shown(text, 60)),
            None => format!("{name}={value}"),
        });
        let attributes = attributes.collect::<Vec<_>>().join(" ");
        let time = duration(span.duration_us as f64 / 1e3);
        let row = format!("{name:<width$}  {bar:<BAR$}  {time:>8}  {attributes}");
        let _ = writeln!(out, "{}", row.trim_end());
    }
}

fn flatten<'a>(rows: &mut Vec<(usize, &'a Span)>, span: &'a Span, depth: usize) {
    rows.push((depth, span));
    span.children.iter().for_each(|child| flatten(rows, child, depth + 1));
}

/// Statistics in all, by model and by client.
pub fn statistics(stats: &Stats) -> String {
    if stats.total.requests == 0 {
        return "no requests match\n".into();
    }
    let mut rows = vec![
        [
            "",
            "REQUESTS",
            "ERRORS",
            "RETRIES",
            "FIRST p50",
            "p95",
            "p99",
            "TOTAL p50",
            "p95",
            "p99",
            "TOK/S",
            "TOK/ROUND",
            "CACHED",
        ]
        .map(String::from),
    ];
    rows.push(summary("all", &stats.total));
    rows.extend(
        stats.models.iter().map(|(name, s)| summary(&format!("model {}", shown(name, 30)), s)),
    );
    rows.extend(
        stats.clients.iter().map(|(name, s)| summary(&format!("client {}", shown(name, 30)), s)),
    );
    let mut out = aligned(&rows, 1);
    if !stats.total.errors.is_empty() {
        let classes = stats.total.errors.iter().map(|(class, count)| format!("{class} {count}"));
        let _ = writeln!(out, "\nended badly: {}", classes.collect::<Vec<_>>().join(", "));
    }
    out
}

fn summary(name: &str, summary: &Summary) -> [String; 13] {
    let percent = |share: f64| format!("{:.1}%", share * 100.0);
    let number = |x: Option<f64>, digits: usize| x.map_or("-".into(), |x| format!("{x:.digits$}"));
    let [f50, f95, f99] = percentiles(&summary.first_token_ms);
    let [d50, d95, d99] = percentiles(&summary.duration_ms);
    [
        name.to_owned(),
        summary.requests.to_string(),
        percent(summary.error_rate),
        summary.retries.to_string(),
        f50,
        f95,
        f99,
        d50,
        d95,
        d99,
        number(summary.tokens_per_second, 1),
        number(summary.tokens_per_round, 2),
        summary.cache_hit_share.map_or("-".into(), percent),
    ]
}

fn percentiles(times: &Percentiles) -> [String; 3] {
    [times.p50, times.p95, times.p99].map(|ms| ms.map_or("-".into(), duration))
}

/// Columns as wide as they must be; those from `right` on are numbers.
fn aligned<const N: usize>(rows: &[[String; N]], right: usize) -> String {
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if column < right { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        out.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        out.push('\n');
    }
    out
}

/// Tokens a second.
pub fn rate(tokens: u64, time_us: u64) -> Option<f64> {
    (time_us > 0 && tokens > 0).then(|| tokens as f64 * 1e6 / time_us as f64)
}

/// A time in a unit that suits it.
pub fn duration(ms: f64) -> String {
    match ms {
        _ if ms < 1.0 => format!("{:.0} µs", ms * 1e3),
        _ if ms < 100.0 => format!("{ms:.1} ms"),
        _ if ms < 10_000.0 => format!("{ms:.0} ms"),
        _ if ms < 600_000.0 => format!("{:.1} s", ms / 1e3),
        _ => format!("{:.1} min", ms / 60e3),
    }
}

fn time(us: u64, zone: &TimeZone) -> String {
    let at = i64::try_from(us).ok().and_then(|us| Timestamp::from_microsecond(us).ok());
    at.map_or("?".into(), |at| at.to_zoned(zone.clone()).strftime("%Y-%m-%d %H:%M:%S").to_string())
}

/// Text of clients on one line of a terminal: printable and not too long.
fn shown(text: &str, most: usize) -> String {
    let mut shown: String =
        text.chars().take(most).map(|c| if c.is_control() { '?' } else { c }).collect();
    if text.chars().nth(most).is_some() {
        shown.pop();
        shown.push('…');
    }
    shown
}

/// Text of clients on many lines: no control character reaches the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '?' } else { c }).collect()
}
