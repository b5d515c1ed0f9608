//! Calls as XML: `<function=NAME>`, `<parameter=KEY>`, and values between tags.
//!
//! Values are verbatim, so one may hold the very tags that end it. A closing tag ends a parameter
//! only if markup follows. Models also forget tags: the next parameter or the end of the call then
//! ends it, unless a grammar kept them from forgetting ([`Xml::new`]'s `exact`).

use std::collections::HashSet;

use super::parser::{Begins, Emitter, Flow, Input, begins, is_space};
use super::typed::{Param, Shape};
use super::{CALL_CLOSE, CALL_OPEN, check_name};

/// What a function's header begins with.
pub(super) const FUNCTION: &str = "<function=";
const FUNCTION_CLOSE: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_CLOSE: &str = "</parameter>";

/// A function's header, if it is one.
pub(super) enum Head {
    No,
    Maybe,
    /// It is, and takes that many bytes with the white space after it.
    Name {
        name: String,
        length: usize,
    },
}

/// Reads `<function=NAME>`. It only counts if markup follows: models also talk about calls.
pub(super) fn head(text: &str, end: bool) -> Head {
    let after = &text[FUNCTION.len()..];
    let Some(stop) = after.find(['>', '\n', '<']) else {
        let name = unquoted(after);
        let possible = !end && (name.is_empty() || check_name(name).is_ok());
        return if possible { Head::Maybe } else { Head::No };
    };
    let name = unquoted(&after[..stop]);
    if check_name(name).is_err() {
        return Head::No;
    }
    let body = after[stop..].strip_prefix('>').unwrap_or(&after[stop..]);
    let body = body.trim_start_matches(is_space);
    match begins(body, &[PARAMETER, FUNCTION_CLOSE, CALL_CLOSE], end) {
        Begins::Tag(_) => Head::Name { name: name.to_owned(), length: text.len() - body.len() },
        Begins::Maybe => Head::Maybe,
        Begins::Other => Head::No,
    }
}

/// A name without the quotes and spaces that some models put around it.
fn unquoted(name: &str) -> &str {
    name.trim().trim_matches(['"', '\''])
}

/// A call whose name is known.
pub(super) struct Xml {
    /// The tool's name.
    pub(super) name: String,
    /// Its number among the tools, if it is one.
    tool: Option<usize>,
    exact: bool,
    seen: HashSet<String>,
    state: State,
}

enum State {
    /// Between parameters.
    Body,
    /// Inside a value.
    Value(Value),
}

/// A value on its way.
struct Value {
    param: Param,
    /// Bytes of the input known to hold no end.
    scanned: usize,
    /// Whether the line break after the header was looked for.
    begun: bool,
    target: Target,
}

/// What becomes of a value.
enum Target {
    /// A string that leaves as it comes.
    Stream,
    /// It is converted when it is whole.
    Convert,
    /// It was given before, under this key.
    Drop(String),
}

/// Where a value ends.
enum End {
    /// Nowhere in what is there; so many bytes are certainly part of it.
    After(usize),
    /// Here, and its tag takes so many bytes.
    At(usize, usize),
}

impl Xml {
    /// A call of the tool numbered `tool`. `exact`: no tag is missing.
    pub(super) fn new(name: String, tool: Option<usize>, exact: bool) -> Xml {
        Xml { name, tool, exact, seen: HashSet::new(), state: State::Body }
    }

    /// Goes on.
    pub(super) fn step(&mut self, input: &mut Input, emit: &mut Emitter, tools: &[Shape]) -> Flow {
        let shape = self.tool.map(|tool| &tools[tool]);
        match &mut self.state {
            State::Body => self.body(input, emit, shape),
            State::Value(_) => self.value(input, emit, shape),
        }
    }

    fn body(&mut self, input: &mut Input, emit: &mut Emitter, shape: Option<&Shape>) -> Flow {
        let rest = input.rest();
        let tag = rest.trim_start_matches(is_space);
        let skipped = rest.len() - tag.len();
        let tags = [PARAMETER, FUNCTION_CLOSE, CALL_CLOSE, CALL_OPEN, FUNCTION];
        let complete = match begins(tag, &tags, input.end) {
            Begins::Maybe => return Flow::More,
            Begins::Tag(0) => return self.header(skipped, input, emit, shape),
            Begins::Tag(found @ (1 | 2)) => {
                input.advance(skipped + tags[found].len());
                true
            }
            // Another call: the tags that end this one are missing.
            Begins::Tag(_) => {
                input.advance(skipped);
                true
            }
            Begins::Other => {
                let cut = input.end && tags.iter().any(|whole| whole.starts_with(tag));
                input.advance(if cut { rest.len() } else { skipped });
                false
            }
        };
        if self.tool.is_none() {
            emit.note(|| {
                format!("the model called {:?}, which is no tool of this request", self.name)
            });
        }
        emit.arguments(if self.seen.is_empty() { "{}" } else { "}" });
        emit.end(complete);
        Flow::Ended
    }

    /// Reads `<parameter=KEY>`.
    fn header(
        &mut self,
        skipped: usize,
        input: &mut Input,
        emit: &mut Emitter,
        shape: Option<&Shape>,
    ) -> Flow {
        let start = skipped + PARAMETER.len();
        let after = &input.rest()[start..];
        // A line break before the key is a slip; one after it ends a header without its bracket.
        let text = after.trim_start_matches(is_space);
        let lead = after.len() - text.len();
        let (key, length) = match text.find(['>', '\n', '<']) {
            None if !input.end => return Flow::More,
            Some(stop) if text[stop..].starts_with('>') => (&text[..stop], stop + 1),
            stop => {
                let line = &text[..stop.unwrap_or(text.len())];
                let word = line.find(is_space).unwrap_or(line.len());
                let gap = line[word..].len() - line[word..].trim_start().len();
                (&line[..word], word + gap)
            }
        };
        let key = unquoted(key).to_owned();
        let param = shape.and_then(|shape| shape.param(&key)).unwrap_or(&Param::ANY).clone();
        let target = if self.seen.contains(&key) {
            Target::Drop(key)
        } else {
            let mut lead = String::from(if self.seen.is_empty() { "{\"" } else { ",\"" });
            super::json_stream::escape_into(&key, &mut lead);
            emit.arguments(&(lead + "\":"));
            self.seen.insert(key);
            if param.is_text() {
                emit.arguments("\"");
                Target::Stream
            } else {
                Target::Convert
            }
        };
        self.state = State::Value(Value { param, scanned: 0, begun: false, target });
        input.advance(start + lead + length);
        Flow::Next
    }

    fn value(&mut self, input: &mut Input, emit: &mut Emitter, shape: Option<&Shape>) -> Flow {
        let State::Value(value) = &mut self.state else { return Flow::Next };
        if !value.begun {
            match input.rest().chars().next() {
                None if !input.end => return Flow::More,
                Some('\n') => input.advance(1),
                _ => {}
            }
            value.begun = true;
        }
        let open = |key: &str| {
            !self.exact && !self.seen.contains(key) && shape.is_some_and(|s| s.param(key).is_some())
        };
        match find_end(input.rest(), value.scanned, input.end, self.exact, open) {
            End::After(_) if input.end => {
                value.finish(input.rest(), emit);
                input.advance(input.rest().len());
                self.state = State::Body;
                Flow::Next
            }
            End::After(certain) => {
                value.scanned = certain;
                if matches!(value.target, Target::Stream) {
                    emit.escaped(&input.rest()[..certain]);
                    input.advance(certain);
                    value.scanned = 0;
                }
                Flow::More
            }
            End::At(at, tag) => {
                value.finish(&input.rest()[..at], emit);
                input.advance(at + tag);
                self.state = State::Body;
                Flow::Next
            }
        }
    }
}

impl Value {
    /// Hands out the value, or what is left of it.
    fn finish(&self, text: &str, emit: &mut Emitter) {
        let text = text.strip_suffix('\n').unwrap_or(text);
        match &self.target {
            Target::Stream => {
                emit.escaped(text);
                emit.arguments("\"");
            }
            Target::Convert => {
                let (json, note) = self.param.convert(text);
                emit.arguments(&json);
                if let Some(note) = note {
                    emit.note(|| note);
                }
            }
            Target::Drop(key) => {
                // Notes go into a header, so a long text is cut, and says so.
                let cut = text.char_indices().nth(40);
                let (shown, more) = cut.map_or((text, ""), |(at, _)| (&text[..at], " …"));
                emit.note(|| {
                    format!("parameter {key:?} was given twice; {shown:?}{more} was left out")
                });
            }
        }
    }
}

/// Looks for the end of a value from byte `from` on. `open` tells keys that may open the next
/// parameter though this one was not closed.
fn find_end(text: &str, from: usize, end: bool, exact: bool, open: impl Fn(&str) -> bool) -> End {
    let mut from = from;
    while let Some(at) = text[from..].find('<').map(|offset| from + offset) {
        let tail = &text[at..];
        let tags = [PARAMETER_CLOSE, FUNCTION_CLOSE, CALL_CLOSE, PARAMETER];
        let found = match begins(tail, if exact { &tags[..1] } else { &tags }, end) {
            Begins::Tag(0) => {
                let next: &[&str] = if exact {
                    &[PARAMETER, FUNCTION_CLOSE]
                } else {
                    &[PARAMETER, FUNCTION_CLOSE, CALL_CLOSE, CALL_OPEN]
                };
                follow(&tail[PARAMETER_CLOSE.len()..], next, end, PARAMETER_CLOSE.len())
            }
            Begins::Tag(1) => {
                follow(&tail[FUNCTION_CLOSE.len()..], &[CALL_CLOSE, CALL_OPEN, FUNCTION], end, 0)
            }
            Begins::Tag(2) => follow(&tail[CALL_CLOSE.len()..], &[CALL_OPEN], end, 0),
            Begins::Tag(_) if text[..at].ends_with('\n') => {
                match tail[PARAMETER.len()..].split_once(['>', '\n']) {
                    Some((key, _)) if open(key) => Found::Yes(0),
                    None if !end && open_key(&tail[PARAMETER.len()..]) => Found::Maybe,
                    _ => Found::No,
                }
            }
            Begins::Tag(_) | Begins::Other => Found::No,
            Begins::Maybe => Found::Maybe,
        };
        match found {
            Found::Yes(tag) => return End::At(at, tag),
            Found::Maybe => return End::After(without_line_break(text, at)),
            Found::No => from = at + 1,
        }
    }
    // Cut off inside the closing tag.
    if end && let Some(at) = text.rfind('<') {
        let tail = &text[at..];
        if tail.len() > 1 && PARAMETER_CLOSE.starts_with(tail) {
            return End::At(at, tail.len());
        }
    }
    End::After(without_line_break(text, text.len()))
}

enum Found {
    Yes(usize),
    Maybe,
    No,
}

/// Whether markup follows a tag that takes `length` bytes, or nothing does.
fn follow(text: &str, tags: &[&str], end: bool, length: usize) -> Found {
    let text = text.trim_start_matches(is_space);
    match begins(text, tags, end) {
        Begins::Tag(_) => Found::Yes(length),
        Begins::Maybe => Found::Maybe,
        Begins::Other if end && tags.iter().any(|tag| tag.starts_with(text)) => Found::Yes(length),
        Begins::Other => Found::No,
    }
}

/// Whether a text without an end may still be a key.
fn open_key(text: &str) -> bool {
    text.len() <= 256
}

/// The line break before a closing tag is markup, so one at the end is held back.
fn without_line_break(text: &str, at: usize) -> usize {
    at - usize::from(text[..at].ends_with('\n'))
}
