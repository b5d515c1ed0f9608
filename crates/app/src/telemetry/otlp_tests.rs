use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::Sender;

use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;

use super::*;
use crate::telemetry::record::{self, ErrorClass};
use crate::telemetry::testing::{answered, failed};

/// A collector that answers each post with the next of these statuses, and keeps what it got.
fn collector(statuses: Vec<u16>) -> (String, Receiver<(String, ExportTraceServiceRequest)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (sender, posts) = mpsc::channel();
    std::thread::spawn(move || {
        for status in statuses {
            let (stream, _) = listener.accept().unwrap();
            answer(stream, status, &sender);
        }
    });
    (endpoint, posts)
}

fn answer(stream: TcpStream, status: u16, sender: &Sender<(String, ExportTraceServiceRequest)>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
        head += &line;
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let _ = sender.send((head, ExportTraceServiceRequest::decode(&body[..]).unwrap()));
    let reply = format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    (&stream).write_all(reply.as_bytes()).unwrap();
}

fn options(endpoint: String) -> OtlpOptions {
    let headers = vec![("x-key".to_owned(), "hidden".to_owned())];
    OtlpOptions { endpoint, headers, service_name: "th-engine".into() }
}

fn value(span: &Span, name: &str) -> Option<Any> {
    let found = span.attributes.iter().find(|attribute| attribute.key == name)?;
    found.value.clone()?.value
}

#[test]
fn a_collector_gets_one_tree_for_each_request() {
    let (endpoint, posts) = collector(vec![200]);
    let exporter = Exporter::start(options(format!("{endpoint}/")));
    let chunk = record::Span { name: "chunk".into(), start_us: 10, ..record::Span::default() };
    let prefill = record::Span {
        name: "prefill".into(),
        start_us: 10,
        duration_us: 30,
        children: vec![chunk],
        ..record::Span::default()
    };
    let mut request = answered(1_000_000);
    request.spans = vec![prefill];
    request.sampling.temperature = Some(0.7);
    exporter.export(&request);
    exporter.export(&failed(2_000_000, ErrorClass::ServerError));
    let (head, body) = posts.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
    assert!(head.to_lowercase().contains("content-type: application/x-protobuf"), "{head}");
    assert!(head.contains("x-key: hidden"), "{head}");
    let spans = &body.resource_spans[0].scope_spans[0].spans;
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["chat th-tiny", "prefill", "chunk", "chat th-tiny"]);
    assert_eq!(spans[0].span_id, request.span_id.bytes());
    assert_eq!(spans[0].parent_span_id, Vec::<u8>::new());
    assert_eq!(spans[1].parent_span_id, spans[0].span_id);
    assert_eq!(spans[2].parent_span_id, spans[1].span_id);
    assert!(spans[..3].iter().all(|span| span.trace_id == request.trace_id.bytes()));
    assert_eq!(spans[1].start_time_unix_nano, 1_000_010_000);
    assert_eq!(spans[1].end_time_unix_nano, 1_000_040_000);
    for (name, expected) in [
        ("gen_ai.operation.name", Any::StringValue("chat".into())),
        ("gen_ai.usage.input_tokens", Any::IntValue(100)),
        ("gen_ai.usage.cache_read.input_tokens", Any::IntValue(64)),
        ("gen_ai.request.temperature", Any::DoubleValue(0.7)),
        ("gen_ai.response.time_to_first_chunk", Any::DoubleValue(0.12)),
    ] {
        assert_eq!(value(&spans[0], name), Some(expected), "{name}");
    }
    assert!(spans[0].status.is_none() && spans[3].status.as_ref().unwrap().code == 2);
    let wait = Instant::now();
    while exporter.health().sent < 2 && wait.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(exporter.health(), ExportHealth { sent: 2, lost: 0, error: None });
}

#[test]
fn a_busy_collector_is_asked_again_and_a_refusing_one_is_not() {
    for (statuses, tries, sent) in [(vec![503, 200], 2, 1), (vec![400], 1, 0)] {
        let (endpoint, posts) = collector(statuses);
        let exporter = Exporter::start(options(endpoint));
        exporter.export(&answered(1));
        for _ in 0..tries {
            posts.recv_timeout(Duration::from_secs(20)).unwrap();
        }
        let wait = Instant::now();
        let over = || exporter.health().sent + exporter.health().lost > 0;
        while !over() && wait.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!((exporter.health().sent, exporter.health().lost), (sent, 1 - sent));
        assert_eq!(exporter.health().error.is_some(), sent == 0);
    }
}

#[test]
fn nobody_waits_for_a_collector_that_is_not_there() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // It accepts connections, and never says a word.
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let exporter = Exporter::start(options(endpoint));
    let begun = Instant::now();
    (0..2 * MAX_WAITING as u64 + BATCH as u64).for_each(|i| exporter.export(&answered(i)));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert!(exporter.health().lost >= MAX_WAITING as u64);
    let begun = Instant::now();
    drop(exporter);
    assert!(begun.elapsed() < TIMEOUT + LAST_CALL + LAST_CALL, "{:?}", begun.elapsed());
}
