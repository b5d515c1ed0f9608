use super::*;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use serde_json::json;

use crate::text::chat::{ChatText, Message, Role, TemplateOptions, ToolCall};
use crate::text::template::Templates;
use crate::text::tokenizer::Tokenizer;

const QWEN: &str = include_str!("../../../tests/data/qwen_like.jinja");
/// The manner of templates that show calls as JSON.
const HERMES: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>\
    {% endfor %}<|im_end|>\n{% endfor %}";

/// A call as it came out: its arguments as text, and whether it was complete.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Called {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) arguments: String,
    pub(super) complete: bool,
}

/// Everything that an answer held.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Parsed {
    /// Text, one item for each stretch of it between calls.
    pub(super) text: Vec<String>,
    pub(super) calls: Vec<Called>,
    pub(super) notes: Vec<String>,
    /// All deltas, neighbours of one kind joined.
    pub(super) deltas: Vec<ToolDelta>,
}

/// Parses `pieces` and checks what holds for every answer.
pub(super) fn parse_pieces<'a>(
    mut parser: ToolParser,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Parsed {
    let mut all = Vec::new();
    for piece in pieces {
        let mut deltas = Vec::new();
        parser.push(piece, &mut deltas);
        all.append(&mut deltas);
    }
    parser.finish(&mut all);
    let mut parsed = Parsed { notes: parser.notes().to_vec(), ..Parsed::default() };
    let mut open = false;
    for delta in all {
        match &delta {
            ToolDelta::Text(text) => {
                assert!(!open && !text.is_empty());
                match parsed.deltas.last() {
                    Some(ToolDelta::Text(_)) => *parsed.text.last_mut().unwrap() += text,
                    _ => parsed.text.push(text.clone()),
                }
            }
            ToolDelta::Begin { index, id, name } => {
                assert!(!open && *index == parsed.calls.len());
                open = true;
                parsed.calls.push(Called {
                    id: id.clone(),
                    name: name.clone(),
                    arguments: String::new(),
                    complete: false,
                });
            }
            ToolDelta::Arguments { index, fragment } => {
                assert!(open && !fragment.is_empty() && index + 1 == parsed.calls.len());
                parsed.calls[*index].arguments += fragment;
            }
            ToolDelta::End { index, complete } => {
                assert!(open);
                open = false;
                parsed.calls[*index].complete = *complete;
            }
        }
        match (parsed.deltas.last_mut(), delta) {
            (Some(ToolDelta::Text(last)), ToolDelta::Text(text)) => last.push_str(&text),
            (
                Some(ToolDelta::Arguments { fragment: last, .. }),
                ToolDelta::Arguments { fragment, .. },
            ) => last.push_str(&fragment),
            (_, delta) => parsed.deltas.push(delta),
        }
    }
    assert!(!open);
    for call in &parsed.calls {
        let value: Value = serde_json::from_str(&call.arguments)
            .unwrap_or_else(|error| panic!("{error}: {}", call.arguments));
        assert!(value.is_object(), "{}", call.arguments);
    }
    parsed
}

/// Parses `text` whole and cut at every character, which must be the same.
pub(super) fn parse(tools: &[Tool], text: &str) -> Parsed {
    let parser = || ToolParser::new(tools, "call_x_");
    let whole = parse_pieces(parser(), [text]);
    let chars: Vec<&str> = text.split_inclusive(|_| true).collect();
    assert_eq!(parse_pieces(parser(), chars), whole, "{text:?}");
    for (cut, _) in text.char_indices() {
        assert_eq!(
            parse_pieces(parser(), [&text[..cut], &text[cut..]]),
            whole,
            "{text:?} at {cut}"
        );
    }
    whole
}

fn tool(name: &str, parameters: Value) -> Tool {
    Tool { name: name.into(), description: None, parameters, strict: false }
}

pub(super) fn weather() -> Vec<Tool> {
    let properties = json!({
        "city": {"type": "string"}, "days": {"type": "integer"}, "day": {"type": "string"},
        "where": {"type": "object"}, "exact": {"type": "boolean"},
    });
    vec![
        tool("weather", json!({"type": "object", "properties": properties, "required": ["city"]})),
        tool("now", json!({})),
    ]
}

fn call(name: &str, arguments: &str) -> (String, String) {
    (name.into(), arguments.into())
}

/// The calls and the text of an answer.
fn result(text: &str) -> (Vec<(String, String)>, String) {
    let parsed = parse(&weather(), text);
    (parsed.calls.into_iter().map(|c| (c.name, c.arguments)).collect(), parsed.text.join("|"))
}

const XML: &str = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n\
                   <parameter=days>\n3\n</parameter>\n</function>\n</tool_call>";
const JSON: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}\n</tool_call>";
const PARIS: &str = r#"{"city":"Paris","days":3}"#;

#[test]
fn both_formats() {
    for text in [XML, JSON] {
        let parsed = parse(&weather(), text);
        assert_eq!(parsed.text, Vec::<String>::new());
        let expected = Called {
            id: "call_x_0".into(),
            name: "weather".into(),
            arguments: PARIS.into(),
            complete: true,
        };
        assert_eq!(parsed.calls, [expected]);
        assert!(parsed.notes.is_empty(), "{:?}", parsed.notes);
    }
    assert_eq!(ToolFormat::of_template(QWEN), Some(ToolFormat::QwenXml));
    assert_eq!(ToolFormat::of_template(HERMES), Some(ToolFormat::HermesJson));
    assert_eq!(ToolFormat::of_template("{{ messages }}"), None);
}

/// TC-04, TC-08: three calls, any split, one id each, no markup in the text.
#[test]
fn parallel_calls_with_text_around() {
    let text = format!(
        "Let me see.\n\n{XML}\n{JSON}\nand\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n\nDone.\n"
    );
    let parsed = parse(&weather(), &text);
    assert_eq!(parsed.text, ["Let me see.", "and", "Done.\n"]);
    let calls: Vec<_> =
        parsed.calls.iter().map(|c| (c.id.as_str(), c.arguments.as_str())).collect();
    assert_eq!(calls, [("call_x_0", PARIS), ("call_x_1", PARIS), ("call_x_2", "{}")]);
    for size in 1..=20 {
        let chars: Vec<char> = text.chars().collect();
        let pieces: Vec<String> = chars.chunks(size).map(|chunk| chunk.iter().collect()).collect();
        let parser = ToolParser::new(&weather(), "call_x_");
        assert_eq!(parse_pieces(parser, pieces.iter().map(String::as_str)), parsed);
    }
}

/// TC-08: arguments leave before the call is complete.
#[test]
fn arguments_stream() {
    for (head, tail) in [
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\n",
            "\n</parameter>\n</function>\n</tool_call>",
        ),
        ("<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"", "\"}}\n</tool_call>"),
    ] {
        let mut parser = ToolParser::new(&weather(), "c");
        let mut out = Vec::new();
        parser.push(head, &mut out);
        assert!(
            matches!(&out[..], [ToolDelta::Begin { .. }, ToolDelta::Arguments { .. }]),
            "{out:?}"
        );
        for piece in ["a \"b\" ", "é", "\\n"] {
            let piece =
                if head.contains("{\"name\"") { &piece.replace('"', "\\\"") } else { piece };
            out.clear();
            parser.push(piece, &mut out);
            assert!(matches!(&out[..], [ToolDelta::Arguments { .. }]), "{piece:?} {out:?}");
        }
        out.clear();
        parser.push(tail, &mut out);
        assert!(matches!(out.last(), Some(ToolDelta::End { complete: true, .. })));
    }
}

/// TC-01: a value that does not fit its type does not cost the call.
#[test]
fn unfit_values_stay_strings() {
    let text = XML.replace('3', "2026-01-15");
    let parsed = parse(&weather(), &text);
    assert_eq!(parsed.calls[0].arguments, r#"{"city":"Paris","days":"2026-01-15"}"#);
    assert_eq!(parsed.notes, ["\"2026-01-15\" is not integer; passed as a string"]);
}

/// TC-02, TC-12: headers and ends that are wrong or missing.
#[test]
fn damaged_markup() {
    let paris = || (vec![call("weather", r#"{"city":"Paris"}"#)], String::new());
    for text in [
        // Headers.
        "<tool_call>\n<function=weather>\n<parameter=\ncity>\nParis\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city\nParis\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city Paris</parameter>\n</function>\n</tool_call>",
        "<tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>",
        "<tool_call>\n<function=\"weather\">\n<parameter='city'>\nParis\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        // Without the wrapper, or half of it.
        "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
        "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>",
        // Ends.
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</fun",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</param",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis",
    ] {
        assert_eq!(result(text), paris(), "{text:?}");
    }
    let two = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>\n</tool_call>";
    assert_eq!(result(two), (vec![call("weather", PARIS)], String::new()));
    // A call that was never ended before the next.
    let next = format!("<tool_call>\n<function=now>\n<tool_call>\n{XML}");
    assert_eq!(result(&next).0.len(), 1);
    let open =
        format!("<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n{XML}");
    assert_eq!(result(&open).0, [call("weather", r#"{"city":"Paris"}"#), call("weather", PARIS)]);
}

/// TC-13, and mentions: what is no call stays text, to the letter.
#[test]
fn text_that_looks_like_a_call() {
    for text in [
        "<tool_call>\nI can't do that.\n</tool_call>\nSorry.",
        "Write `<tool_call>` and then `<function=weather>` to call.",
        "<function=weather> is how it begins.",
        "<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>",
        "<tool_call>\n<function=we ather>\n</function>",
        "<tool_call>\n<function=weather>\nbut no parameters",
        "<tool_call>\n<func",
        "<tool_call>",
        "a < b && c > d <",
        "<tool_call>\n{\"nam",
        "<tool_call>\n{\"name\": 5}\n</tool_call>",
        "<tool_call>\n{\"arguments\": {}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"a b\", \"arguments\": {}}\n</tool_call>",
        "<tool_call>\n{oops}\n</tool_call>",
        "line\n\n  <tool_call> \n\n",
        "   ",
        "",
    ] {
        assert_eq!(result(text), (vec![], text.into()), "{text:?}");
    }
    // The tag may be wrong and what follows right.
    let text = format!("<tool_call>\n{{oops}} {XML}");
    assert_eq!(result(&text), (vec![call("weather", PARIS)], "<tool_call>\n{oops}".into()));
}

#[test]
fn values_that_hold_markup() {
    let value = "Use </parameter> or <parameter=x>\nlike\n<tool_call>\n<function=weather>\n</function> here.\n";
    let text = format!(
        "<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>"
    );
    let arguments = json!({"city": value}).to_string();
    assert_eq!(result(&text), (vec![call("weather", &arguments)], String::new()));
    // With a grammar no tag is missing, so even these are part of the value.
    let value = "a\n<parameter=days>\n5\n</function>\n</tool_call>\n";
    let text = format!(
        "<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>"
    );
    let parser = ToolParser::new(&weather(), "c").exact();
    let parsed = parse_pieces(parser, text.split_inclusive(|_| true));
    assert_eq!(parsed.calls[0].arguments, json!({"city": value}).to_string());
    assert_ne!(result(&text).0[0].1, json!({"city": value}).to_string());
}

#[test]
fn what_is_odd_is_noted() {
    let twice = XML.replace("</function>", "<parameter=city>\nRome\n</parameter>\n</function>");
    let parsed = parse(&weather(), &twice);
    assert_eq!(parsed.calls[0].arguments, PARIS);
    assert_eq!(parsed.notes, ["parameter \"city\" was given twice; \"Rome\" was left out"]);
    let long = parse(&weather(), &twice.replace("Rome", &"x".repeat(60)));
    assert_eq!(
        long.notes,
        [format!("parameter \"city\" was given twice; {:?} … was left out", "x".repeat(40))]
    );
    let unknown = XML.replace("=weather", "=climate").replace("=days", "=x");
    let parsed = parse(&weather(), &unknown);
    assert_eq!(parsed.calls[0].arguments, r#"{"city":"Paris","x":3}"#);
    assert!(parsed.notes[0].contains("\"climate\""), "{:?}", parsed.notes);
}

#[test]
fn json_calls_of_every_kind() {
    let one = |text: &str| {
        let parsed = parse(&weather(), text);
        assert_eq!(parsed.calls.len(), 1, "{text}");
        (
            parsed.calls[0].arguments.clone(),
            parsed.calls[0].complete,
            parsed.text.concat(),
            parsed.notes.len(),
        )
    };
    let ok = |arguments: &str| (arguments.to_owned(), true, String::new(), 0);
    let wrap = |object: &str| format!("<tool_call>\n{object}\n</tool_call>");
    // Orders, aliases, strings of JSON, no arguments at all.
    assert_eq!(
        one(&wrap(r#"{"arguments": {"city": "a"}, "name": "weather"}"#)),
        ok(r#"{"city":"a"}"#)
    );
    assert_eq!(
        one(&wrap(r#"{"name": "weather", "parameters": {"city": "a"}}"#)),
        ok(r#"{"city":"a"}"#)
    );
    assert_eq!(
        one(&wrap(r#"{"name": "weather", "arguments": "{\"city\": \"a\"}"}"#)),
        ok(r#"{"city":"a"}"#)
    );
    assert_eq!(one(&wrap(r#"{"name": "now"}"#)), ok("{}"));
    assert_eq!(one(&wrap(r#"{"name": "now", "arguments": null}"#)), ok("{}"));
    assert_eq!(one(&wrap(r#"{"name": "now", "arguments": ""}"#)), ok("{}"));
    assert_eq!(one(r#"<tool_call>{"name": "now", "arguments": {}}"#), ok("{}"));
    // Arguments of another kind, and fields that mean nothing.
    let (arguments, complete, text, notes) = one(&wrap(r#"{"name": "now", "arguments": [1]}"#));
    assert_eq!(
        (arguments.as_str(), complete, text.as_str(), notes),
        (r#"{"arguments":[1]}"#, true, "", 1)
    );
    let extra = one(&wrap(r#"{"name": "now", "arguments": {}, "id": "7"}"#));
    assert_eq!(extra, ("{}".into(), true, String::new(), 1));
    // Brackets missing, and a tag inside a string.
    assert_eq!(
        one(&wrap(r#"{"name": "weather", "arguments": {"city": "a"}"#)).0,
        r#"{"city":"a"}"#
    );
    let (arguments, complete, text, _) =
        one(&wrap(r#"{"name": "weather", "arguments": {"city": "a""#));
    assert_eq!((arguments.as_str(), complete, text.as_str()), (r#"{"city":"a"}"#, false, ""));
    let tag = r#"{"city":"</tool_call>"}"#;
    assert_eq!(one(&wrap(&format!(r#"{{"name": "weather", "arguments": {tag}}}"#))), ok(tag));
    // Garbage in the arguments: what was understood is closed, and the rest is text.
    let (arguments, complete, text, notes) =
        one(&wrap(r#"{"name": "weather", "arguments": {"city": "a", "days": oh no}}"#));
    assert_eq!((arguments.as_str(), complete, notes), (r#"{"city":"a"}"#, false, 1));
    assert_eq!(text, ", \"days\": oh no}}\n</tool_call>");
    let (_, complete, text, notes) = one(&wrap(r#"{"name": "now", "arguments": {}, "id": oh}"#));
    assert_eq!((complete, notes), (false, 0));
    assert_eq!(text, ", \"id\": oh}\n</tool_call>");
}

#[test]
fn definitions() {
    let definition = json!({"type": "function", "function": {
        "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": true}});
    let tool = Tool::from_definition(&definition).unwrap();
    assert!(tool.strict);
    assert_eq!(Tool::from_definition(&tool.definition()).unwrap(), Tool { strict: false, ..tool });
    for bad in [
        json!({}),
        json!({"function": {"name": ""}}),
        json!({"function": {"name": "a b"}}),
        json!({"function": {"name": "a>\n<"}}),
        json!({"function": {"name": "x".repeat(129)}}),
        json!({"name": "f", "parameters": [1]}),
    ] {
        assert!(Tool::from_definition(&bad).is_err(), "{bad}");
    }
}

// ---------------------------------------------------------------------------------------------
// Render and parse

fn chat(template: &str) -> ChatText {
    static TOK: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/th-tiny/tokenizer.json");
        Arc::new(Tokenizer::open(&path).unwrap())
    });
    let templates =
        Templates::parse("t", &[("default".into(), template.into())], jiff::Zoned::default);
    ChatText::new(TOK.clone(), templates.unwrap(), Map::new())
}

/// What the template shows of an assistant's turn that makes `calls`.
fn render(chat: &ChatText, text: &str, calls: &[(String, Value)]) -> String {
    let mut assistant = Message::new(Role::Assistant, text);
    let call = |(name, arguments): &(String, Value)| ToolCall {
        id: String::new(),
        name: name.clone(),
        arguments: arguments.clone(),
    };
    assistant.tool_calls = calls.iter().map(call).collect();
    let messages = [Message::new(Role::User, "?"), assistant];
    let prompt = chat.prompt(&messages, &[], &TemplateOptions::default()).unwrap();
    let prompt = prompt.text.text().into_owned();
    let turn = prompt.split("<|im_start|>assistant\n").nth(1).unwrap();
    let turn = turn.rsplit_once("<|im_end|>").unwrap().0;
    turn.split_once("</think>\n\n").map_or(turn, |(_, answer)| answer).to_owned()
}

/// Text with everything that could be taken for markup, but for what the format can't tell apart:
/// `</parameter>` with markup after it.
fn words() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        4 => "[ -~]{0,8}",
        2 => "\\PC{0,4}",
        2 => prop::sample::select(&["\n", "\t", "\\", "\"", "{", "}", "5", "true", "null", "[1]", "🦀", "\u{1}"][..])
            .prop_map(str::to_owned),
        1 => prop::sample::select(&["<tool_call>", "<function=f0>", "<parameter=x>", "</thin", "</parameter> ", "<|im_end|>"][..])
            .prop_map(str::to_owned),
    ];
    let words = proptest::collection::vec(word, 0..5).prop_map(|words| words.concat());
    words.prop_filter("markup after </parameter>", |text| {
        let mut closed =
            text.match_indices("</parameter>").map(|(at, tag)| &text[at + tag.len()..]);
        !closed.any(|after| after.trim_start().starts_with('<'))
    })
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e12f64..1e12).prop_map(Value::from),
        words().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            proptest::collection::vec(("[a-z\"<é]{0,4}", inner), 0..3)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

/// A parameter: its schema and a value.
fn parameter() -> impl Strategy<Value = (Value, Value)> {
    prop_oneof![
        3 => words().prop_map(|s| (json!({"type": "string"}), s.into())),
        1 => any::<i64>().prop_map(|n| (json!({"type": "integer"}), n.into())),
        1 => (-1e9f64..1e9).prop_map(|n| (json!({"type": "number"}), n.into())),
        1 => any::<bool>().prop_map(|b| (json!({"type": "boolean"}), b.into())),
        2 => any_json().prop_filter_map("a container", |v| {
            let kind = if v.is_object() { "object" } else { "array" };
            (v.is_object() || v.is_array()).then(|| (json!({"type": kind}), v))
        }),
        1 => any_json().prop_filter_map("no string", |v| (!v.is_string()).then_some((json!({}), v))),
        1 => any::<Option<i64>>().prop_map(|n| (json!({"type": ["integer", "null"]}), n.into())),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Rendered by a template and parsed, calls are what they were: over 1,000 of them.
    #[test]
    fn calls_survive_the_template(
        calls in proptest::collection::vec(proptest::collection::vec(parameter(), 0..4), 1..4),
        text in prop_oneof![Just(String::new()), "[a-z][a-z .<]{0,20}[a-z.]"],
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let mut tools = Vec::new();
        let mut wanted: Vec<(String, Value)> = Vec::new();
        for (number, params) in calls.iter().enumerate() {
            let key = |i: usize| format!("p{i}");
            let properties: Map<String, Value> =
                params.iter().enumerate().map(|(i, p)| (key(i), p.0.clone())).collect();
            let arguments = params.iter().enumerate().map(|(i, p)| (key(i), p.1.clone())).collect();
            tools.push(tool(&format!("f{number}"), json!({"type": "object", "properties": properties})));
            wanted.push((format!("f{number}"), Value::Object(arguments)));
        }
        for template in [QWEN, HERMES] {
            let rendered = render(&chat(template), &text, &wanted);
            let mut cuts: Vec<usize> = cuts
                .iter()
                .map(|cut| rendered.floor_char_boundary(cut.index(rendered.len() + 1)))
                .collect();
            cuts.extend([0, rendered.len()]);
            cuts.sort_unstable();
            let pieces = cuts.windows(2).map(|pair| &rendered[pair[0]..pair[1]]);
            let parsed = parse_pieces(ToolParser::new(&tools, "c"), pieces);
            let got: Vec<(String, Value)> = parsed.calls.iter()
                .map(|call| (call.name.clone(), serde_json::from_str(&call.arguments).unwrap()))
                .collect();
            prop_assert_eq!(&got, &wanted, "{}", rendered);
            prop_assert!(parsed.calls.iter().all(|call| call.complete));
            let shown: Vec<&str> = [text.trim()].into_iter().filter(|t| !t.is_empty()).collect();
            prop_assert_eq!(parsed.text, shown);
        }
    }
}
