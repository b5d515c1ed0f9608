use super::*;
use crate::telemetry::record::{Bodies, ErrorClass};
use crate::telemetry::store::Filter;
use crate::telemetry::testing::{Scratch, answered, failed};

const SOON: Duration = Duration::from_secs(20);

fn recorder(store: StoreOptions) -> Arc<Recorder> {
    let options = RecorderOptions { store: Some(store), ..RecorderOptions::default() };
    Recorder::start(options, Arc::new(Metrics::new()))
}

fn listed(recorder: &Recorder) -> Vec<Record> {
    recorder.reader().unwrap().list(&Filter::default(), 100_000).unwrap()
}

/// A metric's value.
fn metric(recorder: &Recorder, name: &str) -> Option<f64> {
    let text = recorder.metrics().text();
    let line = text.lines().find(|line| line.starts_with(&format!("{name} ")))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[test]
fn records_are_written_in_order() {
    let scratch = Scratch::new();
    let recorder = recorder(scratch.store());
    let now = super::super::store::now_us();
    let records: Vec<Record> = (0..150).map(|i| answered(now + i)).collect();
    records.iter().for_each(|record| recorder.record(record.clone()));
    assert!(recorder.flush(SOON));
    let health = recorder.health();
    assert_eq!((health.state, health.written, health.lost, health.waiting), ("ok", 150, 0, 0));
    assert!(health.bytes > 0);
    assert!(listed(&recorder).iter().rev().eq(&records));
    assert_eq!(metric(&recorder, "th_engine_traces_written_total"), Some(150.0));
    assert_eq!(metric(&recorder, "th_engine_trace_store_ok"), Some(1.0));
}

#[test]
fn what_nobody_waits_for_is_written_too() {
    let scratch = Scratch::new();
    let recorder = recorder(scratch.store());
    let begun = Instant::now();
    for count in 1..=3 {
        recorder.record(answered(super::super::store::now_us()));
        while recorder.health().written < count {
            assert!(begun.elapsed() < SOON, "{:?}", recorder.health());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(listed(&recorder).len(), 3);
}

#[test]
fn what_was_taken_is_written_before_the_end() {
    let scratch = Scratch::new();
    let first = recorder(scratch.store());
    let now = super::super::store::now_us();
    (0..50).for_each(|i| first.record(answered(now + i)));
    drop(first);
    assert_eq!(listed(&recorder(scratch.store())).len(), 50);
}

#[test]
fn a_locked_store_costs_nothing_and_catches_up() {
    let scratch = Scratch::new();
    let recorder = recorder(scratch.store());
    assert!(recorder.flush(SOON));
    let lock = rusqlite::Connection::open(scratch.store().path).unwrap();
    lock.execute_batch("BEGIN IMMEDIATE").unwrap();
    let begun = Instant::now();
    (0..10).for_each(|i| recorder.record(answered(super::super::store::now_us() + i)));
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert!(!recorder.flush(SOON));
    let health = recorder.health();
    assert_eq!((health.state, health.waiting, health.lost), ("failing", 10, 0));
    assert!(health.error.unwrap().contains("locked"));
    assert_eq!(metric(&recorder, "th_engine_trace_store_ok"), Some(0.0));
    lock.execute_batch("ROLLBACK").unwrap();
    assert!(recorder.flush(SOON));
    let health = recorder.health();
    assert_eq!((health.state, health.written, health.error), ("ok", 10, None));
}

#[test]
fn overload_drops_and_counts() {
    let scratch = Scratch::new();
    let recorder = recorder(scratch.store());
    assert!(recorder.flush(SOON));
    let lock = rusqlite::Connection::open(scratch.store().path).unwrap();
    lock.execute_batch("BEGIN IMMEDIATE").unwrap();
    let now = super::super::store::now_us();
    let count = MAX_WAITING as u64 + 500;
    let begun = Instant::now();
    (0..count).for_each(|i| recorder.record(answered(now + i)));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert_eq!(recorder.health().lost, 500);
    assert_eq!(recorder.health().waiting, MAX_WAITING);
    lock.execute_batch("ROLLBACK").unwrap();
    assert!(recorder.flush(SOON));
    assert_eq!((recorder.health().written, recorder.health().lost), (MAX_WAITING as u64, 500));
    assert_eq!(metric(&recorder, "th_engine_traces_lost_total"), Some(500.0));
}

#[test]
fn big_bodies_can_not_fill_the_memory() {
    let scratch = Scratch::new();
    let privacy = Privacy { body_bytes: Some(8 << 20), ..Privacy::default() };
    let options = RecorderOptions { store: Some(scratch.store()), privacy, otlp: None };
    let recorder = Recorder::start(options, Arc::new(Metrics::new()));
    assert!(recorder.flush(SOON));
    let lock = rusqlite::Connection::open(scratch.store().path).unwrap();
    lock.execute_batch("BEGIN IMMEDIATE").unwrap();
    for i in 0..6 {
        let bodies = Bodies { request: "x".repeat(8 << 20), ..Bodies::default() };
        let now = super::super::store::now_us();
        recorder.record(Record { bodies: Some(bodies), ..answered(now + i) });
    }
    let health = recorder.health();
    assert_eq!((health.waiting, health.lost), (3, 3));
    lock.execute_batch("ROLLBACK").unwrap();
}

#[test]
fn a_damaged_store_is_set_aside() {
    let scratch = Scratch::new();
    std::fs::write(scratch.store().path, vec![b'x'; 100_000]).unwrap();
    let recorder = recorder(scratch.store());
    recorder.record(answered(super::super::store::now_us()));
    let until = Instant::now() + SOON;
    while !recorder.flush(SOON) && Instant::now() < until {}
    let health = recorder.health();
    assert_eq!((health.state, health.written), ("ok", 1), "{health:?}");
    assert!(health.failures >= 1);
    let aside = std::fs::read(scratch.path().join("traces.db.damaged")).unwrap();
    assert_eq!(aside, vec![b'x'; 100_000]);
}

#[test]
fn a_place_that_can_not_be_written_is_told() {
    let scratch = Scratch::new();
    let file = scratch.path().join("file");
    std::fs::write(&file, "").unwrap();
    let recorder = recorder(StoreOptions::at(file.join("traces.db")));
    recorder.record(answered(1));
    assert!(!recorder.flush(SOON));
    let health = recorder.health();
    assert_eq!((health.state, health.waiting), ("failing", 1));
    let error = health.error.unwrap();
    assert!(!error.contains(scratch.path().to_str().unwrap()), "{error}");
    assert!(recorder.reader().is_err());
}

#[test]
fn a_full_store_is_told_and_recovers() {
    let scratch = Scratch::new();
    let mut store = Store::open(&scratch.store()).unwrap();
    store.limit_pages(20);
    let text = "x".repeat(50_000);
    let now = super::super::store::now_us();
    let mut big = vec![Record { request_id: text, ..answered(now) }; 4];
    big.iter_mut().enumerate().for_each(|(i, r)| r.span_id = answered(i as u64).span_id);
    let error = store.insert(&mut big).unwrap_err();
    assert!(error.to_string().contains("full"), "{error}");
    assert!(!error.is_damage());
    // All or none, and the store goes on.
    store.insert(&mut [answered(now)]).unwrap();
    let reader = Reader::open(&scratch.store().path).unwrap();
    assert_eq!(reader.list(&Filter::default(), 10).unwrap().len(), 1);
}

#[test]
fn without_a_store_requests_are_still_counted() {
    let recorder = Recorder::start(RecorderOptions::default(), Arc::new(Metrics::new()));
    recorder.record(answered(1));
    assert!(recorder.flush(SOON));
    assert_eq!(recorder.health().state, "off");
    assert!(recorder.metrics().text().contains("outcome=\"ok\""));
    assert!(recorder.reader().unwrap_err().to_string().contains("--no-traces"));
}

#[test]
fn retries_are_counted() {
    let scratch = Scratch::new();
    let recorder = recorder(scratch.store());
    let now = super::super::store::now_us();
    let hash = |record: Record| Record { request_hash: Some("h".into()), ..record };
    recorder.record(hash(failed(now, ErrorClass::Cancelled)));
    recorder.record(hash(answered(now + 2_000_000)));
    assert!(recorder.flush(SOON));
    let name = "th_engine_suspected_retries_total{model=\"th-tiny\"}";
    assert_eq!(metric(&recorder, name), Some(1.0));
}
