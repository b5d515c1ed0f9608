//! Chat templates as hostile input: damaged real ones, and Jinja put together at random. Whatever a
//! checkpoint brings, reading and rendering it ends, in a text or in an error of one line, and in
//! bounded memory.
//!
//! A short run by default; `TH_FUZZ_SECONDS=600 cargo test -p app fuzz` runs each target that long.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{
    Config, RngAlgorithm, RngSeed, TestCaseError, TestError, TestRng, TestRunner,
};
use serde_json::{Map, Value, json};

use super::chat::{ChatText, Message, Role, TemplateOptions, ToolCall};
use super::template::{Template, TemplateError, Templates};
use super::tokenizer::{Tok, Tokenizer};

const DEFAULT_CASES: u32 = 150;
/// The most that one render may hold: 64 bytes for each step that the fuel allows, twice where a
/// result is built from a part of its own size, and the conversation.
const MEMORY: isize = 1 << 30;

// ---------------------------------------------------------------------------------------------
// Running

/// Runs `check` on many values; at least one in `share` must have been rendered, or the strategy
/// makes nothing but noise.
fn run<S: Strategy<Value = String>>(share: usize, strategy: S) {
    let (cases, rendered) = (Cell::new(0), Cell::new(0));
    let check = |source| {
        cases.set(cases.get() + 1);
        rendered.set(rendered.get() + usize::from(check(source)?));
        Ok(())
    };
    run_cases(strategy, check);
    println!("{} of {} templates rendered", rendered.get(), cases.get());
    assert!(rendered.get() * share >= cases.get(), "{} of {}", rendered.get(), cases.get());
}

pub(super) fn run_cases<S: Strategy>(
    strategy: S,
    check: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    #[expect(clippy::disallowed_methods, reason = "tests only: how long to fuzz")]
    let seconds = std::env::var("TH_FUZZ_SECONDS").ok().and_then(|s| s.parse().ok());
    // Other cases every time, whatever the environment says.
    let rng_seed = RngSeed::Random;
    let config = |cases| Config { cases, failure_persistence: None, rng_seed, ..Config::default() };
    let fail = |error: TestError<S::Value>| panic!("{error}");
    let Some(seconds) = seconds else {
        // The same cases every time, so that a failure stays one.
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let mut runner = TestRunner::new_with_rng(config(DEFAULT_CASES), rng);
        return runner.run(&strategy, &check).unwrap_or_else(fail);
    };
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        TestRunner::new(config(DEFAULT_CASES)).run(&strategy, &check).unwrap_or_else(fail);
    }
}

struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    LIVE.set(LIVE.get() + change);
    PEAK.set(PEAK.get().max(LIVE.get()));
}

// SAFETY: every call goes to the system's allocator unchanged; counting neither allocates nor fails.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// ---------------------------------------------------------------------------------------------
// The property

fn clock() -> jiff::Zoned {
    jiff::Zoned::default()
}

fn tok() -> Arc<dyn Tok> {
    static TOK: LazyLock<Arc<dyn Tok>> = LazyLock::new(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/th-tiny/tokenizer.json");
        Arc::new(Tokenizer::open(std::path::Path::new(path)).unwrap())
    });
    TOK.clone()
}

fn conversation() -> Vec<Message> {
    let mut assistant = Message::new(Role::Assistant, "<think>\nHm.\n</think>\n\né {{ x }}");
    assistant.tool_calls = vec![ToolCall {
        id: "1".into(),
        name: "f".into(),
        arguments: json!({"a": [1, 2.5, null, {"b": "c"}]}),
    }];
    let user = |text| Message::new(Role::User, text);
    let system = Message::new(Role::System, "Be brief.");
    vec![system, user("a"), assistant, Message::new(Role::Tool, "{% raw %}"), user("🦀 b")]
}

/// An error is a sentence on one line.
fn check_error(error: &TemplateError) -> Result<(), TestCaseError> {
    let text = error.to_string();
    let refused = matches!(error, TemplateError::Refused(_));
    prop_assert!(!text.is_empty() && (refused || !text.contains('\n')), "{text:?}");
    Ok(())
}

/// Whether a template gives a prompt; an error if it does anything that it may not.
fn check(source: String) -> Result<bool, TestCaseError> {
    let before = LIVE.get();
    PEAK.set(before);
    let parsed = Templates::parse("t", &[("default".into(), source.clone())], clock);
    let templates = match parsed {
        Ok(templates) => templates,
        Err(error) => return check_error(&error).map(|()| false),
    };
    let mut rendered = false;
    let chat = ChatText::new(tok(), templates, Map::new());
    let tools = [json!({"type": "function", "function": {"name": "f", "parameters": {}}})];
    for tools in [&[][..], &tools] {
        let prompt = chat.prompt(&conversation(), tools, &TemplateOptions::default());
        match prompt {
            Ok(prompt) if prompt.text.text().len() < 1 << 20 => {
                rendered = true;
                chat.prompt_ids(&prompt).map_err(|e| TestCaseError::fail(e.to_string()))?;
            }
            Ok(_) => {}
            Err(super::chat::ChatError::Template(error)) => check_error(&error)?,
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
    // Variables of other kinds than those expected.
    let template = Template::parse("t", &source, clock).expect("parsed before");
    for context in [json!({}), json!({"messages": 3, "tools": "x", "ns": [null], "m": {}})] {
        if let Err(error) = template.render(&context) {
            check_error(&error)?;
        }
    }
    let held = PEAK.get() - before;
    prop_assert!(held <= MEMORY, "{held} bytes held by {source:?}");
    Ok(rendered)
}

// ---------------------------------------------------------------------------------------------
// Damaged templates

fn bundled() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/th-tiny/tokenizer_config.json");
    let config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    config["chat_template"].as_str().unwrap().to_owned()
}

/// Pieces that mean something in Jinja.
const PIECES: [&str; 28] = [
    "{{",
    "}}",
    "{%",
    "%}",
    "{%-",
    "-%}",
    "{#",
    "#}",
    "{{ ",
    "'",
    "\"",
    "(",
    ")",
    "[",
    "]",
    "|",
    ".",
    ":",
    "~",
    "-1",
    "99999999999",
    "not ",
    " if ",
    "endfor",
    "{% endif %}",
    "\0",
    "\u{feff}",
    "é",
];

fn damaged(base: String) -> impl Strategy<Value = String> {
    let edit = (any::<prop::sample::Index>(), 0..40usize, prop::sample::select(&PIECES[..]));
    vec((edit, 0..4u8), 1..5).prop_map(move |edits| {
        let mut text: Vec<char> = base.chars().collect();
        for ((at, length, piece), kind) in edits {
            if text.is_empty() {
                break;
            }
            let at = at.index(text.len());
            let part = at..(at + length).min(text.len());
            match kind {
                0 => drop(text.drain(part)),
                1 => drop(text.splice(at..at, piece.chars())),
                2 => {
                    let copy = text[part].to_vec();
                    drop(text.splice(at..at, copy));
                }
                _ => drop(text.splice(part, piece.chars())),
            }
        }
        text.into_iter().collect()
    })
}

#[test]
fn fuzz_damaged_templates() {
    let qwen_like = include_str!("../../tests/data/qwen_like.jinja").to_owned();
    run(20, prop_oneof![damaged(bundled()), damaged(qwen_like)]);
}

// ---------------------------------------------------------------------------------------------
// Random Jinja

/// Not `ns` alone: a namespace that holds itself has no end, and the interpreter prints and compares it all the same.
const ATOMS: [&str; 25] = [
    "messages",
    "messages[0]",
    "m",
    "m.content",
    "m['role']",
    "tools",
    "ns.s",
    "x",
    "loop.index",
    "loop.last",
    "true",
    "none",
    "0",
    "-1",
    "7",
    "1.5",
    "9223372036854775807",
    "1e308",
    "'ab'",
    "'é🦀'",
    "''",
    "'x' * 1000",
    "[1, 'a', none]",
    "{'k': [1]}",
    "range(3000)",
];

const AFTER: [&str; 50] = [
    "|tojson",
    "|tojson(indent=2)",
    "|tojson(indent=100000000)",
    "|length",
    "|trim",
    "|upper",
    "|list",
    "|first",
    "|last",
    "|join(',')",
    "|join(x)",
    "|replace('a', 'aaaa')",
    "|string",
    "|int",
    "|float",
    "|safe",
    "|items",
    "|dictsort",
    "|sort",
    "|reverse",
    "|unique",
    "|default('d')",
    "|map('upper')",
    "|map(attribute='k')",
    "|selectattr('role')",
    "|batch(2)",
    "|batch(100000000)",
    "|slice(3)",
    "|indent(100000000)",
    "|format(1)",
    "|center(5)",
    "|round(2)",
    "|abs",
    "|sum",
    "|urlencode",
    ".split('a')",
    ".strip()",
    ".upper()",
    ".items()",
    ".get('k')",
    ".startswith('a')",
    ".replace('a', ns.s)",
    ".join(messages)",
    "[0]",
    "[-1]",
    "[1:]",
    "[::-1]",
    "[:99999999999]",
    ".k.k",
    "(1)",
];

const BETWEEN: [&str; 20] = [
    " + ",
    " - ",
    " * ",
    " / ",
    " // ",
    " % ",
    " ** ",
    " ~ ",
    " == ",
    " < ",
    " in ",
    " not in ",
    " and ",
    " or ",
    " is ",
    " if x else ",
    ", ",
    " is defined and ",
    " is mapping or ",
    " is string and ",
];

fn expression() -> impl Strategy<Value = String> {
    let atom = prop_oneof![
        8 => prop::sample::select(&ATOMS[..]).prop_map(str::to_owned),
        1 => "[a-z0-9%. '\"]{0,6}".prop_map(|s| format!("{s:?}")),
        1 => "%[-_0^#]?[0-9]{0,12}[a-zA-Z%]{1,2}".prop_map(|f| format!("strftime_now('{f}')")),
        1 => Just("raise_exception('no')".to_owned()),
    ];
    atom.prop_recursive(4, 24, 3, |inner| {
        prop_oneof![
            (inner.clone(), prop::sample::select(&AFTER[..])).prop_map(|(e, a)| format!("{e}{a}")),
            (inner.clone(), prop::sample::select(&BETWEEN[..]), inner.clone())
                .prop_map(|(a, op, b)| format!("({a}{op}{b})")),
            inner.clone().prop_map(|e| format!("(not {e})")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("[{a}, {b}]")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{{'s': {a}, 'k': {b}}}")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{a}[{b}]")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("mac({a}, {b})")),
            inner.prop_map(|e| format!("namespace(s={e})")),
        ]
    })
}

fn statements() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        4 => expression().prop_map(|e| format!("{{{{ {e} }}}}")),
        1 => "[a-z<|>{}%# \n]{0,8}",
        1 => expression().prop_map(|e| format!("{{% set ns.s = {e} %}}")),
        1 => Just("{% set ns.s = ns.s ~ ns.s %}".to_owned()),
        1 => Just("{% set ns.s = [ns.s, ns.s] %}".to_owned()),
        1 => expression().prop_map(|e| format!("{{%- set x = {e} -%}}")),
        1 => Just("{% break %}".to_owned()),
        1 => Just("{% include x %}".to_owned()),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        let body = vec(inner, 1..4).prop_map(|parts| parts.concat()).boxed();
        let with = |open: &'static str, close: &'static str| {
            let wrap = move |(e, b): (String, String)| open.replace("EXPR", &e) + &b + close;
            (expression(), body.clone()).prop_map(wrap)
        };
        prop_oneof![
            with("{% for m in EXPR %}", "{% endfor %}"),
            with("{% for m in EXPR if m recursive %}{{ loop(m) }}", "{% else %}e{% endfor %}"),
            with("{% if EXPR %}", "{% elif x %}f{% else %}g{% endif %}"),
            with("{% macro mac(a, b=1) %}{{ mac(a) if x == EXPR }}", "{% endmacro %}"),
            with("{% filter replace('a', EXPR) %}", "{% endfilter %}"),
            with("{% call(m) mac(EXPR) %}", "{% endcall %}"),
            with("{% set x %}{{ EXPR }}", "{% endset %}"),
            with("{%- generation -%}{{ EXPR }}", "{% endgeneration %}"),
            with("{% raw %}EXPR", "{% endraw %}"),
            body.clone(),
        ]
    })
}

#[test]
fn fuzz_random_templates() {
    let start = "{% set ns = namespace(s='ab') %}{% set x = messages %}\
                 {% macro mac(a, b) %}{{ a }}{{ b }}{{ caller }}{% endmacro %}";
    let wrapped = (statements(), any::<bool>()).prop_map(move |(body, looped)| match looped {
        false => format!("{start}{body}"),
        true => format!("{start}{{% for m in messages %}}{body}{{% endfor %}}"),
    });
    run(8, wrapped);
}

#[test]
fn fuzz_template_text() {
    let parts = vec(prop::sample::select(&PIECES[..]), 0..30);
    run(100, parts.prop_map(|parts| parts.concat()));
}
