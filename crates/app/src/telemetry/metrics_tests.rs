use std::collections::BTreeMap;

use super::*;
use crate::telemetry::record::ErrorClass;
use crate::telemetry::testing::{Figures, Numbers, answered, any, failed};

/// Every sample of a text in Prometheus's format, by name and labels as they are written, and the
/// type of every family.
fn parse(text: &str) -> (BTreeMap<String, f64>, BTreeMap<String, String>) {
    let (mut samples, mut types) = (BTreeMap::new(), BTreeMap::new());
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "twice: {line}");
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let value = value.parse::<f64>().unwrap_or_else(|_| panic!("{line}"));
            assert!(samples.insert(name.to_owned(), value).is_none(), "twice: {line}");
        }
    }
    (samples, types)
}

#[test]
fn histograms_have_right_sums_counts_and_buckets() {
    let metrics = Metrics::new();
    let mut numbers = Numbers(1);
    let records: Vec<Record> = (0..300).map(|_| any(&mut numbers, 0)).collect();
    records.iter().for_each(|record| metrics.observe(record));
    let (samples, types) = parse(&metrics.text());
    let well =
        |r: &&Record| r.model == "model-1" && r.error.is_none() && r.first_token_us.is_some();
    let well: Vec<&Record> = records.iter().filter(well).collect();
    assert!(well.len() > 50);
    for (family, seconds, buckets) in [
        (
            "gen_ai_server_request_duration_seconds",
            (|r| r.duration_us as f64 / 1e6) as fn(&Record) -> f64,
            &SECONDS[..],
        ),
        (
            "gen_ai_server_time_to_first_token_seconds",
            |r| r.first_token_us.unwrap() as f64 / 1e6,
            &SECONDS,
        ),
        ("th_engine_queue_seconds", |r| r.queue_us as f64 / 1e6, &SECONDS),
    ] {
        assert_eq!(types[family], "histogram");
        let label = "{model=\"model-1\"}";
        assert_eq!(samples[&format!("{family}_count{label}")] as usize, well.len());
        let sum: f64 = well.iter().map(|r| seconds(r)).sum();
        let told = samples[&format!("{family}_sum{label}")];
        assert!((told - sum).abs() < 1e-9 * sum.max(1.0), "{family}: {told} {sum}");
        for &bound in buckets {
            let name = bucket(&samples, family, bound);
            let below = well.iter().filter(|r| seconds(r) <= bound).count();
            assert_eq!(samples[&name] as usize, below, "{name}");
        }
        let all = bucket(&samples, family, f64::INFINITY);
        assert_eq!(samples[&all] as usize, well.len());
    }
}

fn bucket(samples: &BTreeMap<String, f64>, family: &str, bound: f64) -> String {
    let of_bound = |name: &&String| {
        let bounded = name.split("le=\"").nth(1).and_then(|rest| rest.split('"').next());
        name.starts_with(&format!("{family}_bucket{{"))
            && name.contains("model=\"model-1\"")
            && bounded.unwrap().parse::<f64>() == Ok(bound)
    };
    samples.keys().find(of_bound).unwrap_or_else(|| panic!("no {family} of {bound}")).clone()
}

#[test]
fn requests_and_tokens_are_counted_by_kind() {
    let metrics = Metrics::new();
    metrics.observe(&answered(0));
    metrics.observe(&answered(0));
    metrics.observe(&failed(0, ErrorClass::Timeout));
    let (samples, types) = parse(&metrics.text());
    let sum = |parts: &[&str]| -> f64 {
        let named = samples.iter().filter(|(name, _)| parts.iter().all(|p| name.contains(p)));
        named.map(|(_, value)| value).sum()
    };
    assert_eq!(sum(&["th_engine_requests", "outcome=\"ok\""]), 2.0);
    assert_eq!(sum(&["th_engine_requests", "outcome=\"timeout\""]), 1.0);
    assert_eq!(sum(&["th_engine_tokens", "kind=\"prompt\""]), 300.0);
    assert_eq!(sum(&["th_engine_tokens", "kind=\"cached\""]), 192.0);
    assert_eq!(sum(&["th_engine_tokens", "kind=\"output\""]), 90.0);
    assert_eq!(types["th_engine_requests_total"], "counter");
    assert_eq!(sum(&["gen_ai_server_request_duration_seconds_count"]), 2.0);
}

#[test]
fn labels_are_bounded_and_escaped() {
    let metrics = Metrics::new();
    for i in 0..1000 {
        let model = format!("m{i}\"}}\n\\");
        metrics.observe(&Record { model, ..answered(0) });
    }
    let text = metrics.text();
    let (samples, _) = parse(&text);
    let of_requests = || samples.iter().filter(|(name, _)| name.starts_with("th_engine_requests"));
    assert_eq!(of_requests().count(), MAX_LABEL_VALUES + 1);
    assert_eq!(of_requests().map(|(_, value)| value).sum::<f64>(), 1000.0);
    assert!(text.contains(r#"model="m0\"}\n\\""#), "{}", &text[..500]);
}

#[test]
fn the_service_is_told_as_it_is_now() {
    let metrics = Metrics::new();
    assert!(!metrics.text().contains("th_engine_lanes"));
    let service: Arc<dyn Service> = Arc::new(Figures);
    // A service that was loaded again takes the place of the one before.
    metrics.watch_service(&service);
    metrics.watch_service(&service);
    let (samples, types) = parse(&metrics.text());
    for (name, value) in [
        ("th_engine_serving", 1.0),
        ("th_engine_lanes", 4.0),
        ("th_engine_lanes_running", 2.0),
        ("th_engine_requests_waiting", 3.0),
        ("th_engine_pages", 9.0),
        ("th_engine_pages_used", 7.0),
        ("th_engine_rounds_total", 100.0),
        ("th_engine_round_seconds_total", 2.5),
        ("th_engine_output_tokens_total", 500.0),
        ("th_engine_round_floor_seconds", 0.003),
        ("th_engine_device_memory_bytes{kind=\"draft\"}", 100.0),
    ] {
        assert_eq!(samples.get(name), Some(&value), "{name}");
    }
    assert_eq!(types["th_engine_lanes"], "gauge");
    assert_eq!(types["th_engine_rounds_total"], "counter");
    assert_eq!(types["th_engine_device_memory_bytes"], "gauge");
}
