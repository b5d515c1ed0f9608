use rusqlite::StatementStatus;

use super::*;
use crate::telemetry::record::Span;
use crate::telemetry::testing::{Numbers, Scratch, answered, any, failed};

fn stored(store: &mut Store, records: &[Record]) -> Vec<Record> {
    let mut records = records.to_vec();
    store.insert(&mut records).unwrap();
    records
}

fn all(options: &StoreOptions) -> Vec<Record> {
    Reader::open(&options.path).unwrap().list(&Filter::default(), 10_000).unwrap()
}

#[test]
fn records_come_back_whole() {
    let scratch = Scratch::new();
    let options = scratch.store();
    let mut store = Store::open(&options).unwrap();
    let mut record = answered(1_000);
    record.spans = vec![Span { name: "queue".into(), duration_us: 3, ..Span::default() }];
    record.bodies = Some(Bodies { request: "é\0".into(), response: "b".into(), truncated: true });
    record.tool_calls = vec!["weather".into()];
    record.sampling.temperature = Some(0.7);
    record.tokens.prompt = u64::MAX;
    stored(&mut store, std::slice::from_ref(&record));
    let reader = Reader::open(&options.path).unwrap();
    assert_eq!(reader.get(&record.trace_id.to_string()).unwrap(), [record.clone()]);
    assert_eq!(reader.get(&record.span_id.to_string()).unwrap(), [record.clone()]);
    assert_eq!(reader.get("' OR 1=1 --").unwrap(), []);
    assert_eq!(reader.get(&TraceId::random().to_string()).unwrap(), []);
    // Lists are short: no spans and no text.
    let listed = Record { spans: Vec::new(), bodies: None, ..record };
    assert_eq!(all(&options), [listed]);
}

#[test]
fn requests_of_one_trace_come_together() {
    let scratch = Scratch::new();
    let mut store = Store::open(&scratch.store()).unwrap();
    let first = answered(1_000);
    let second = Record { trace_id: first.trace_id, ..answered(2_000) };
    stored(&mut store, &[second.clone(), first.clone(), answered(3_000)]);
    let reader = Reader::open(&scratch.store().path).unwrap();
    assert_eq!(reader.get(&first.trace_id.to_string()).unwrap(), [first, second]);
}

#[test]
fn filters_agree_with_a_filter_by_hand() {
    let scratch = Scratch::new();
    let mut store = Store::open(&scratch.store()).unwrap();
    let mut numbers = Numbers(7);
    let records: Vec<Record> = (0..200).map(|i| any(&mut numbers, i * 10)).collect();
    stored(&mut store, &records);
    let reader = Reader::open(&scratch.store().path).unwrap();
    let some = |text: &str| Some(text.to_owned());
    let mut found = 0;
    for (filter, matches) in [
        (Filter::default(), (|_| true) as fn(&Record) -> bool),
        (Filter { client: some("client-1"), ..Filter::default() }, |r| r.client == "client-1"),
        (Filter { model: some("model-0"), ..Filter::default() }, |r| r.model == "model-0"),
        (Filter { outcome: some("ok"), ..Filter::default() }, |r| r.error.is_none()),
        (Filter { outcome: some("error"), ..Filter::default() }, |r| r.error.is_some()),
        (Filter { outcome: some("timeout"), ..Filter::default() }, |r| r.outcome() == "timeout"),
        (Filter { client: some("' OR 1=1"), ..Filter::default() }, |_| false),
        (Filter { since_us: Some(500), before_us: Some(1_000), ..Filter::default() }, |r| {
            (500..1_000).contains(&r.started_us)
        }),
    ] {
        let mut expected: Vec<&Record> = records.iter().filter(|r| matches(r)).collect();
        expected.reverse();
        let listed = reader.list(&filter, 1000).unwrap();
        assert!(listed.iter().eq(expected.iter().copied()), "{filter:?}");
        let mut samples = 0;
        reader.samples(&filter, |_| samples += 1).unwrap();
        assert_eq!(samples, expected.len(), "{filter:?}");
        assert_eq!(reader.list(&filter, 3).unwrap().len(), expected.len().min(3));
        found += usize::from(!expected.is_empty() && expected.len() < records.len());
    }
    assert!(found >= 5, "the filters were hardly tried: {found}");
}

#[test]
fn retries_are_equal_requests_after_a_failure() {
    let scratch = Scratch::new();
    let mut store = Store::open(&scratch.store()).unwrap();
    let second = 1_000_000;
    let hashed = |record: Record, hash: &str| Record { request_hash: Some(hash.into()), ..record };
    let cancelled = hashed(failed(10 * second, ErrorClass::Cancelled), "a");
    let retry = hashed(answered(12 * second), "a");
    let overlapping = hashed(answered(10 * second + 1), "a");
    let other_text = hashed(answered(12 * second), "b");
    let other_client = Record { client: "x".into(), ..hashed(answered(12 * second), "a") };
    let again_after_success = hashed(answered(14 * second), "a");
    let bad = hashed(failed(20 * second, ErrorClass::BadRequest), "c");
    let after_bad = hashed(answered(22 * second), "c");
    let late_first = hashed(failed(30 * second, ErrorClass::Timeout), "d");
    let late = hashed(answered(700 * second), "d");
    let out = stored(
        &mut store,
        &[
            cancelled.clone(),
            retry,
            overlapping,
            other_text,
            other_client,
            again_after_success,
            bad,
            after_bad,
            late_first,
            late,
            answered(13 * second),
        ],
    );
    let found: Vec<Option<SpanId>> = out.iter().map(|record| record.retry_of).collect();
    let mut expected = vec![None; out.len()];
    expected[1] = Some(cancelled.span_id);
    assert_eq!(found, expected);
    let reader = Reader::open(&scratch.store().path).unwrap();
    let kept = reader.get(&out[1].span_id.to_string()).unwrap();
    assert_eq!(kept[0].retry_of, Some(cancelled.span_id));
}

#[test]
fn what_is_too_old_goes() {
    let scratch = Scratch::new();
    let options = StoreOptions { keep: Duration::from_secs(60), ..scratch.store() };
    let mut store = Store::open(&options).unwrap();
    let now = now_us();
    let kept = answered(now - 59_000_000);
    stored(&mut store, &[answered(now - 61_000_000), kept.clone(), answered(0)]);
    store.retain().unwrap();
    assert_eq!(all(&options), [kept]);
}

#[test]
fn the_oldest_go_while_the_store_is_too_big() {
    let scratch = Scratch::new();
    let options = StoreOptions { max_bytes: 400_000, ..scratch.store() };
    let mut store = Store::open(&options).unwrap();
    let now = now_us();
    let text = "x".repeat(1000);
    let big: Vec<Record> = (0..1000)
        .map(|i| Record { request_id: text.clone(), ..answered(now - 1_000_000 + i) })
        .collect();
    stored(&mut store, &big);
    assert!(store.bytes().unwrap() > options.max_bytes);
    store.retain().unwrap();
    let left = all(&options);
    assert!((50..500).contains(&left.len()), "{}", left.len());
    assert!(left.iter().eq(big.iter().rev().take(left.len())), "not the newest were kept");
    drop(store);
    let on_disk: u64 = std::fs::read_dir(scratch.path())
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    assert!(on_disk <= options.max_bytes + 100_000, "{on_disk}");
    // A limit that nothing fits ends with nothing, not with an endless loop.
    let options = StoreOptions { max_bytes: 0, ..options };
    let mut store = Store::open(&options).unwrap();
    store.retain().unwrap();
    assert_eq!(all(&options), []);
}

#[test]
fn another_versions_store_is_not_touched() {
    let scratch = Scratch::new();
    let options = scratch.store();
    let mut store = Store::open(&options).unwrap();
    stored(&mut store, &[answered(1)]);
    store.connection.pragma_update(None, "user_version", 2).unwrap();
    drop(store);
    let refused = |error: StoreError| assert!(matches!(error, StoreError::Version(2)), "{error}");
    refused(Store::open(&options).unwrap_err());
    refused(Reader::open(&options.path).unwrap_err());
    let connection = Connection::open(&options.path).unwrap();
    let rows: i64 =
        connection.query_row("SELECT count(*) FROM requests", [], |r| r.get(0)).unwrap();
    assert_eq!(rows, 1);
}

#[test]
fn a_file_that_is_no_store_is_told_apart() {
    let scratch = Scratch::new();
    let options = scratch.store();
    assert!(matches!(Reader::open(&options.path).unwrap_err(), StoreError::Missing));
    std::fs::write(&options.path, "not a database, but long enough to be looked at".repeat(100))
        .unwrap();
    let error = Store::open(&options).unwrap_err();
    assert!(error.is_damage() && !error.is_passing(), "{error}");
    // Errors are shown to clients: they name no folder.
    let folder = scratch.path().to_str().unwrap();
    assert!(!error.to_string().contains(folder), "{error}");
    Store::set_aside(&options.path).unwrap();
    stored(&mut Store::open(&options).unwrap(), &[answered(5)]);
    assert_eq!(all(&options).len(), 1);
    assert!(scratch.path().join("traces.db.damaged").exists());
}

#[cfg(unix)]
#[test]
fn only_its_user_may_read_it() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new();
    // One that was readable by others is not any more.
    std::fs::write(scratch.store().path, "").unwrap();
    let open = std::fs::Permissions::from_mode(0o644);
    std::fs::set_permissions(scratch.store().path, open).unwrap();
    let mut store = Store::open(&scratch.store()).unwrap();
    stored(&mut store, &[answered(1)]);
    let mut files = 0;
    for entry in std::fs::read_dir(scratch.path()).unwrap() {
        let mode = entry.unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{mode:o}");
        files += 1;
    }
    assert!(files >= 2, "the log beside the file was not looked at");
}

#[test]
fn committed_records_survive_a_crash() {
    let scratch = Scratch::new();
    let options = scratch.store();
    let mut store = Store::open(&options).unwrap();
    stored(&mut store, &[answered(1), answered(2)]);
    // As the files are when the process is killed: nothing was closed or checkpointed.
    let copy = scratch.path().join("copy");
    std::fs::create_dir(&copy).unwrap();
    for name in ["traces.db", "traces.db-wal"] {
        std::fs::copy(scratch.path().join(name), copy.join(name)).unwrap();
    }
    let after = StoreOptions::at(copy.join("traces.db"));
    let reopened = Store::open(&after).unwrap();
    assert_eq!(all(&after).len(), 2);
    drop(reopened);
    // Half a record at the end of the log, as a crash in the middle of a write leaves it.
    let torn = scratch.path().join("torn");
    std::fs::create_dir(&torn).unwrap();
    std::fs::copy(scratch.path().join("traces.db"), torn.join("traces.db")).unwrap();
    let log = std::fs::read(scratch.path().join("traces.db-wal")).unwrap();
    stored(&mut store, &[answered(3)]);
    let longer = std::fs::read(scratch.path().join("traces.db-wal")).unwrap();
    assert!(longer.len() > log.len());
    std::fs::write(torn.join("traces.db-wal"), &longer[..(log.len() + longer.len()) / 2]).unwrap();
    let after = StoreOptions::at(torn.join("traces.db"));
    let _reopened = Store::open(&after).unwrap();
    assert_eq!(all(&after).len(), 2);
}

#[test]
fn statements_are_planned_once() {
    let planned = |stable: bool| {
        let scratch = Scratch::new();
        let mut store = Store::open(&scratch.store()).unwrap();
        let setting = DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG;
        assert!(store.connection.db_config(setting).unwrap());
        store.connection.set_db_config(setting, stable).unwrap();
        for i in 0..20 {
            let hash = Some(format!("hash {}", i % 3));
            stored(&mut store, &[Record { request_hash: hash, ..answered(1_000 * i) }]);
        }
        let plan: String = store
            .connection
            .query_row(
                &format!("EXPLAIN QUERY PLAN {EQUAL_REQUEST}"),
                params!["hash 1", "c", 0, 9, "s"],
                |row| row.get("detail"),
            )
            .unwrap();
        assert!(plan.contains("by_hash (request_hash=? AND started_us>?"), "{plan}");
        let query = store.connection.prepare_cached(EQUAL_REQUEST).unwrap();
        query.get_status(StatementStatus::RePrepare)
    };
    assert_eq!(planned(true), 0);
    assert!(planned(false) > 0, "nothing to prevent any more");
}
