use super::*;
use crate::telemetry::record::Record;
use crate::telemetry::store::{Filter, Reader, Store};
use crate::telemetry::testing::{Numbers, Scratch, any};

/// Percentiles as they are defined: the smallest time that enough of all are no longer than.
fn brute_percentile(times_us: &[u64], percent: f64) -> Option<f64> {
    let mut candidates: Vec<u64> = times_us.to_vec();
    candidates.sort_unstable();
    let enough = |t: &&u64| {
        let covered = times_us.iter().filter(|other| other <= t).count();
        covered as f64 * 100.0 >= percent * times_us.len() as f64
    };
    candidates.iter().find(enough).map(|&us| us as f64 / 1000.0)
}

fn check(summary: &Summary, records: &[&Record]) {
    let ok: Vec<&&Record> = records.iter().filter(|r| r.error.is_none()).collect();
    let durations: Vec<u64> = ok.iter().map(|r| r.duration_us).collect();
    let first: Vec<u64> = ok.iter().filter_map(|r| r.first_token_us).collect();
    for (name, percentiles, times) in [
        ("duration", summary.duration_ms, &durations),
        ("first token", summary.first_token_ms, &first),
    ] {
        assert_eq!(percentiles.p50, brute_percentile(times, 50.0), "{name}");
        assert_eq!(percentiles.p95, brute_percentile(times, 95.0), "{name}");
        assert_eq!(percentiles.p99, brute_percentile(times, 99.0), "{name}");
        assert_eq!(percentiles.max, times.iter().max().map(|&us| us as f64 / 1000.0), "{name}");
    }
    let sum = |of: fn(&Record) -> u64| records.iter().map(|r| of(r)).sum::<u64>() as f64;
    assert_eq!(summary.requests as usize, records.len());
    let failed = records.iter().filter(|r| r.error.is_some() && r.outcome() != "cancelled").count();
    assert_eq!(summary.error_rate, failed as f64 / records.len() as f64);
    let errors = records.iter().filter(|r| r.error.is_some()).count();
    assert_eq!(summary.errors.values().sum::<u64>() as usize, errors);
    assert_eq!(summary.cache_hit_share, Some(sum(|r| r.tokens.cached) / sum(|r| r.tokens.prompt)));
    let rate = sum(|r| r.tokens.output) / (sum(|r| r.decode_us) / 1e6);
    let told = summary.tokens_per_second.unwrap();
    assert!((told - rate).abs() < 1e-9 * rate, "{told} {rate}");
    assert_eq!(summary.tokens_per_round, Some(sum(|r| r.tokens.output) / sum(|r| r.draft.rounds)));
}

#[test]
fn statistics_agree_with_brute_force() {
    let scratch = Scratch::new();
    let mut store = Store::open(&scratch.store()).unwrap();
    let mut numbers = Numbers(3);
    let mut records: Vec<Record> = (0..317).map(|i| any(&mut numbers, 1_000 + 10 * i)).collect();
    store.insert(&mut records).unwrap();
    let reader = Reader::open(&scratch.store().path).unwrap();
    let course = Course::new(1_000, 1_000 + 10 * 317, 7);
    let mut collector = Collector::new(Some(course));
    reader.samples(&Filter::default(), |sample| collector.add(&sample)).unwrap();
    let stats = collector.finish();
    check(&stats.total, &records.iter().collect::<Vec<_>>());
    assert_eq!((stats.models.len(), stats.clients.len()), (2, 3));
    for (model, summary) in &stats.models {
        check(summary, &records.iter().filter(|r| r.model == *model).collect::<Vec<_>>());
    }
    for (client, summary) in &stats.clients {
        check(summary, &records.iter().filter(|r| r.client == *client).collect::<Vec<_>>());
    }
    assert_eq!(stats.series.len(), 7);
    assert_eq!(stats.series.iter().map(|i| i.requests).sum::<u64>(), 317);
    let seconds = course.interval_us as f64 / 1e6;
    for interval in &stats.series {
        let end = interval.start_us + course.interval_us;
        let inside: Vec<&Record> =
            records.iter().filter(|r| (interval.start_us..end).contains(&r.started_us)).collect();
        assert_eq!(interval.requests as usize, inside.len());
        let tokens = inside.iter().map(|r| r.tokens.output).sum::<u64>() as f64;
        assert_eq!(interval.output_tokens_per_second, tokens / seconds);
    }
}

#[test]
fn nothing_gives_nothing_and_no_nan() {
    let stats = Collector::new(Some(Course::new(0, 0, 3))).finish();
    assert_eq!(stats.total, Summary::default());
    assert_eq!(stats.series.len(), 3);
    let text = serde_json::to_string(&stats).unwrap();
    assert_eq!(serde_json::from_str::<Stats>(&text).unwrap(), stats);
}

#[test]
fn a_mean_of_rates_would_be_seen() {
    // One token in a long time, many in a short one: the ratio of sums is 10 a second, the mean of
    // the two rates 50.
    let mut collector = Collector::default();
    for (output, decode_us) in [(1, 10_000_000), (101, 200_000)] {
        collector.add(&Sample { output, decode_us, ..Sample::default() });
    }
    assert_eq!(collector.finish().total.tokens_per_second, Some(10.0));
}

#[test]
fn names_beyond_the_limit_are_added_up() {
    let mut collector = Collector::default();
    for i in 0..200 {
        collector.add(&Sample { client: format!("{i}"), ..Sample::default() });
    }
    let stats = collector.finish();
    assert_eq!(stats.clients.len(), MAX_GROUPS + 1);
    assert_eq!(stats.clients[OTHERS].requests as usize, 200 - MAX_GROUPS);
    assert_eq!(stats.clients.values().map(|s| s.requests).sum::<u64>(), 200);
}

#[test]
fn courses_have_no_gap_and_no_overflow() {
    let course = Course::new(u64::MAX - 10, u64::MAX, 4);
    let mut collector = Collector::new(Some(course));
    collector.add(&Sample { started_us: u64::MAX, ..Sample::default() });
    collector.add(&Sample { started_us: 0, ..Sample::default() });
    assert_eq!(collector.finish().series.len(), 4);
    assert_eq!(Course::new(5, 0, 3), Course { since_us: 5, interval_us: 1, intervals: 3 });
    assert_eq!(Course::new(0, 10, usize::MAX).intervals, MAX_INTERVALS);
}
