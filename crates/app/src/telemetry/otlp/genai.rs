//! Records as OpenTelemetry spans with the attributes of its GenAI conventions. The conventions are
//! still in development, and their crate marks every name as deprecated: the names are ours to keep.

use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{Span, Status};
use serde_json::Value;

use crate::telemetry::record::{self, ErrorClass, Record};
use crate::telemetry::trace_context::SpanId;

const PROVIDER: &str = "th_engine";

/// The spans of a record: its root, then what its time went to.
pub(super) fn spans(record: &Record) -> Vec<Span> {
    let mut spans = vec![root(record)];
    for part in &record.spans {
        add(&mut spans, record, part, record.span_id);
    }
    spans
}

fn root(record: &Record) -> Span {
    let operation = operation(&record.endpoint);
    let name = match operation {
        Some(operation) => format!("{operation} {}", record.model),
        None => record.endpoint.clone(),
    };
    let mut span = span(record, record.span_id, record.parent_id, name.trim_end().to_owned());
    span.kind = SpanKind::Server.into();
    span.start_time_unix_nano = nanos(record.started_us);
    span.end_time_unix_nano = nanos(record.started_us.saturating_add(record.duration_us));
    span.attributes = attributes(record, operation);
    // Of a server's errors only its own are errors of the span.
    let fault = record.error.as_ref().filter(|error| {
        matches!(
            error.class,
            ErrorClass::ServerError | ErrorClass::Overloaded | ErrorClass::Timeout
        )
    });
    span.status = fault
        .map(|error| Status { message: error.message.clone(), code: StatusCode::Error.into() });
    span
}

/// What the API does, in the words of the conventions; `None` if it generates nothing.
fn operation(endpoint: &str) -> Option<&'static str> {
    // A route may be spelled with its method: `POST /v1/completions`.
    match endpoint.rsplit(' ').next().unwrap_or_default() {
        "/v1/chat/completions" | "/v1/responses" | "/v1/messages" | "/api/chat" => Some("chat"),
        "/v1/completions" | "/api/generate" => Some("text_completion"),
        _ => None,
    }
}

fn attributes(record: &Record, operation: Option<&'static str>) -> Vec<KeyValue> {
    let mut all = vec![
        attribute("http.route", record.endpoint.as_str().into()),
        attribute("http.response.status_code", record.status.into()),
        attribute("th_engine.client", record.client.as_str().into()),
    ];
    let mut add = |name: &str, value: Option<Value>| {
        all.extend(value.map(|value| attribute(name, value)));
    };
    add("error.type", record.error.as_ref().map(|error| error.class.name().into()));
    add("th_engine.retry_of", record.retry_of.map(|id| id.to_string().into()));
    let Some(operation) = operation else { return all };
    let (tokens, sampling) = (&record.tokens, &record.sampling);
    add("gen_ai.operation.name", Some(operation.into()));
    add("gen_ai.provider.name", Some(PROVIDER.into()));
    add("gen_ai.request.model", Some(record.model.as_str().into()));
    add("gen_ai.response.model", Some(record.model.as_str().into()));
    add("gen_ai.response.id", Some(record.request_id.as_str().into()));
    add("gen_ai.conversation.id", record.session.as_deref().map(Value::from));
    add("gen_ai.request.stream", Some(record.stream.into()));
    add("gen_ai.request.temperature", sampling.temperature.map(decimal));
    add("gen_ai.request.top_p", sampling.top_p.map(decimal));
    add("gen_ai.request.top_k", sampling.top_k.map(Value::from));
    add("gen_ai.request.presence_penalty", sampling.presence_penalty.map(decimal));
    add("gen_ai.request.frequency_penalty", sampling.frequency_penalty.map(decimal));
    add("gen_ai.request.seed", sampling.seed.map(Value::from));
    add("gen_ai.request.max_tokens", sampling.max_tokens.map(Value::from));
    add("gen_ai.request.choice.count", sampling.n.filter(|&n| n != 1).map(Value::from));
    add("gen_ai.request.reasoning.level", sampling.reasoning.as_deref().map(Value::from));
    let json = sampling.constraint.as_deref().filter(|kind| kind.starts_with("json"));
    add("gen_ai.output.type", json.map(|_| "json".into()));
    add("gen_ai.response.finish_reasons", record.finish.as_deref().map(|f| vec![f].into()));
    let first = record.first_token_us.map(|us| (us as f64 / 1e6).into());
    add("gen_ai.response.time_to_first_chunk", first);
    add("gen_ai.usage.input_tokens", Some(tokens.prompt.into()));
    add("gen_ai.usage.output_tokens", Some(tokens.output.into()));
    add("gen_ai.usage.cache_read.input_tokens", Some(tokens.cached.into()));
    add("gen_ai.usage.reasoning.output_tokens", Some(tokens.reasoning.into()));
    add("th_engine.rounds", Some(record.draft.rounds.into()));
    add("th_engine.proposed_tokens", Some(record.draft.proposed.into()));
    add("th_engine.accepted_tokens", Some(record.draft.accepted.into()));
    add("th_engine.queue_seconds", Some((record.queue_us as f64 / 1e6).into()));
    if !record.tool_calls.is_empty() {
        add("th_engine.tool_calls", Some(record.tool_calls.clone().into()));
    }
    if let Some(bodies) = &record.bodies {
        add("th_engine.request_body", Some(bodies.request.as_str().into()));
        add("th_engine.response_body", Some(bodies.response.as_str().into()));
    }
    all
}

/// A single-precision number as people wrote it, 0.7 and not 0.699999988079071.
fn decimal(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn add(spans: &mut Vec<Span>, record: &Record, part: &record::Span, parent: SpanId) {
    let id = SpanId::random();
    let mut span = span(record, id, Some(parent), part.name.clone());
    span.kind = SpanKind::Internal.into();
    let start = record.started_us.saturating_add(part.start_us);
    span.start_time_unix_nano = nanos(start);
    span.end_time_unix_nano = nanos(start.saturating_add(part.duration_us));
    let own =
        |(name, value): (&String, &Value)| attribute(&format!("th_engine.{name}"), value.clone());
    span.attributes = part.attributes.iter().map(own).collect();
    spans.push(span);
    for child in &part.children {
        add(spans, record, child, id);
    }
}

fn span(record: &Record, id: SpanId, parent: Option<SpanId>, name: String) -> Span {
    Span {
        trace_id: record.trace_id.bytes().to_vec(),
        span_id: id.bytes().to_vec(),
        parent_span_id: parent.map_or(Vec::new(), |parent| parent.bytes().to_vec()),
        trace_state: record.trace_state.clone().unwrap_or_default(),
        // The W3C flag of a sampled trace.
        flags: 1,
        name,
        ..Span::default()
    }
}

fn nanos(micros: u64) -> u64 {
    micros.saturating_mul(1000)
}

/// An attribute of OTLP from a JSON value. Objects don't occur; they would be told as text.
pub(super) fn attribute(name: &str, value: Value) -> KeyValue {
    KeyValue { key: name.to_owned(), value: Some(any(value)), ..KeyValue::default() }
}

fn any(value: Value) -> AnyValue {
    let value = match value {
        Value::Null => None,
        Value::Bool(yes) => Some(Any::BoolValue(yes)),
        Value::Number(number) => Some(match number.as_i64() {
            Some(int) => Any::IntValue(int),
            None => Any::DoubleValue(number.as_f64().unwrap_or(f64::NAN)),
        }),
        Value::String(text) => Some(Any::StringValue(text)),
        Value::Array(items) => {
            let values = items.into_iter().map(any).collect();
            Some(Any::ArrayValue(ArrayValue { values }))
        }
        object @ Value::Object(_) => Some(Any::StringValue(object.to_string())),
    };
    AnyValue { value }
}
