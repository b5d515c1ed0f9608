//! Finds calls in the text of an answer as it arrives.

use super::hermes::Hermes;
use super::json_stream::escape_into;
use super::typed::Shape;
use super::xml::{self, Head, Xml};
use super::{CALL_CLOSE, CALL_OPEN, Tool, ToolDelta};

/// The most notes of one answer.
const MAX_NOTES: usize = 32;

/// Follows an answer and tells text from calls.
///
/// The deltas depend on the text alone, not on how it was cut: neighbours of one kind joined, they
/// are the same for every split. Both formats are understood whatever the template shows, since
/// models mix them. What looks like a call and is none stays text. White space around calls belongs
/// to the markup.
pub struct ToolParser {
    tools: Vec<Shape>,
    state: State,
    input: Input,
    emit: Emitter,
    /// White space at the end of the text so far.
    gap: String,
    /// Whether white space is dropped, because a call ended before it.
    after_call: bool,
    /// Whether the text's last line is blank so far.
    line_blank: bool,
    exact: bool,
}

enum State {
    Text,
    Xml(Xml),
    Hermes(Box<Hermes>),
    /// After a call, where a stray closing tag belongs to it.
    Closing,
}

impl ToolParser {
    /// A parser at the beginning of an answer. The ids of calls are `id_prefix` and a number: it has
    /// to be unique to the answer.
    pub fn new(tools: &[Tool], id_prefix: impl Into<String>) -> ToolParser {
        ToolParser {
            tools: tools.iter().map(Shape::new).collect(),
            state: State::Text,
            input: Input::default(),
            emit: Emitter { prefix: id_prefix.into(), ..Emitter::default() },
            gap: String::new(),
            after_call: false,
            line_blank: true,
            exact: false,
        }
    }

    /// For answers that obey a grammar: only closing tags end a parameter, and what else looks like
    /// markup is part of it.
    pub fn exact(mut self) -> ToolParser {
        self.exact = true;
        self
    }

    /// Takes the next piece of the answer.
    pub fn push(&mut self, text: &str, out: &mut Vec<ToolDelta>) {
        self.input.push(text);
        self.run(out);
    }

    /// Ends the answer: what was held back is text, and an open call is closed.
    pub fn finish(&mut self, out: &mut Vec<ToolDelta>) {
        self.input.end = true;
        self.run(out);
        let gap = std::mem::take(&mut self.gap);
        if !gap.is_empty() {
            self.emit.text(&gap);
        }
        out.append(&mut self.emit.out);
    }

    /// How many calls began.
    pub fn calls(&self) -> usize {
        self.emit.calls
    }

    /// What was not as it should be, a sentence each.
    pub fn notes(&self) -> &[String] {
        &self.emit.notes
    }

    fn run(&mut self, out: &mut Vec<ToolDelta>) {
        loop {
            let flow = match &mut self.state {
                State::Text => self.text(),
                State::Xml(call) => call.step(&mut self.input, &mut self.emit, &self.tools),
                State::Hermes(call) => call.step(&mut self.input, &mut self.emit),
                State::Closing => closing(&mut self.input),
            };
            match flow {
                Flow::More => break,
                Flow::Next => {}
                Flow::Ended => {
                    self.state = match self.state {
                        State::Closing => State::Text,
                        _ => State::Closing,
                    };
                    self.gap.clear();
                    self.after_call = true;
                    self.line_blank = true;
                }
                Flow::NoCall { rescan } => {
                    self.state = State::Text;
                    let length = if rescan { CALL_OPEN.len() } else { self.input.rest().len() };
                    self.emit_text(length);
                }
            }
        }
        out.append(&mut self.emit.out);
    }

    /// Looks for the next call.
    fn text(&mut self) -> Flow {
        let mut from = 0;
        loop {
            let rest = self.input.rest();
            let Some(at) = rest[from..].find('<').map(|offset| from + offset) else {
                self.emit_text(rest.len());
                return Flow::More;
            };
            match self.open(at) {
                Open::No => from = at + 1,
                Open::Maybe => {
                    self.emit_text(at);
                    return Flow::More;
                }
                Open::Xml(length, call) => {
                    self.emit_text(at);
                    self.input.advance(length);
                    self.emit.begin(&call.name);
                    self.state = State::Xml(call);
                    return Flow::Next;
                }
                Open::Hermes(call) => {
                    self.emit_text(at);
                    self.state = State::Hermes(call);
                    return Flow::Next;
                }
            }
        }
    }

    /// Whether a call opens at `at` of what is left.
    fn open(&self, at: usize) -> Open {
        let (before, tail) = self.input.rest().split_at(at);
        let end = self.input.end;
        match begins(tail, &[CALL_OPEN, xml::FUNCTION], end) {
            Begins::Tag(0) => {
                let inner = tail[CALL_OPEN.len()..].trim_start_matches(is_space);
                let skipped = tail.len() - inner.len();
                match begins(inner, &[xml::FUNCTION, "{"], end) {
                    Begins::Tag(0) => self.open_xml(inner, skipped, false),
                    Begins::Tag(_) => Open::Hermes(Box::new(Hermes::new(skipped))),
                    Begins::Maybe => Open::Maybe,
                    Begins::Other => Open::No,
                }
            }
            // Without its wrapper, only at the start of a line: anywhere else it is a mention.
            Begins::Tag(_) if blank_line(before, self.line_blank) => self.open_xml(tail, 0, true),
            Begins::Tag(_) | Begins::Other => Open::No,
            Begins::Maybe => Open::Maybe,
        }
    }

    fn open_xml(&self, text: &str, skipped: usize, bare: bool) -> Open {
        let listed = |name: &str| self.tools.iter().position(|tool| tool.name == name);
        match xml::head(text, self.input.end) {
            Head::Name { name, length } => match listed(&name) {
                None if bare => Open::No,
                tool => Open::Xml(skipped + length, Xml::new(name, tool, self.exact)),
            },
            Head::Maybe => Open::Maybe,
            Head::No => Open::No,
        }
    }

    /// Hands out the next `length` bytes as text.
    fn emit_text(&mut self, length: usize) {
        let mut text = &self.input.rest()[..length];
        self.line_blank = blank_line(text, self.line_blank);
        if self.after_call {
            text = text.trim_start_matches(is_space);
        }
        let body = text.trim_end_matches(is_space);
        if !body.is_empty() {
            self.after_call = false;
            self.emit.text(&std::mem::take(&mut self.gap));
            self.emit.text(body);
        }
        self.gap.push_str(&text[body.len()..]);
        self.input.advance(length);
    }
}

/// How a call may open.
enum Open {
    No,
    Maybe,
    Xml(usize, Xml),
    Hermes(Box<Hermes>),
}

/// Where a state leaves the parser.
pub(super) enum Flow {
    /// More text is needed, or there is none.
    More,
    /// Something was done; on with it.
    Next,
    /// The state is over.
    Ended,
    /// What looked like a call is none: all of it is text or, with `rescan`, its tag is.
    NoCall {
        /// Whether a call may begin within it.
        rescan: bool,
    },
}

/// Text that has arrived and is not yet understood.
#[derive(Default)]
pub(super) struct Input {
    text: String,
    at: usize,
    /// Whether nothing follows.
    pub(super) end: bool,
}

impl Input {
    fn push(&mut self, text: &str) {
        self.text.drain(..self.at);
        self.at = 0;
        self.text.push_str(text);
    }

    pub(super) fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    pub(super) fn advance(&mut self, bytes: usize) {
        self.at += bytes;
    }

    /// Puts text before what is left.
    pub(super) fn put_back(&mut self, text: &str) {
        self.text.insert_str(self.at, text);
    }
}

/// Puts deltas together.
#[derive(Default)]
pub(super) struct Emitter {
    out: Vec<ToolDelta>,
    prefix: String,
    calls: usize,
    notes: Vec<String>,
}

impl Emitter {
    pub(super) fn text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.out.last_mut() {
            Some(ToolDelta::Text(last)) => last.push_str(text),
            _ => self.out.push(ToolDelta::Text(text.to_owned())),
        }
    }

    pub(super) fn begin(&mut self, name: &str) {
        let (index, id) = (self.calls, format!("{}{}", self.prefix, self.calls));
        self.calls += 1;
        self.out.push(ToolDelta::Begin { index, id, name: name.to_owned() });
    }

    pub(super) fn arguments(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let index = self.calls - 1;
        match self.out.last_mut() {
            Some(ToolDelta::Arguments { fragment, .. }) => fragment.push_str(text),
            _ => self.out.push(ToolDelta::Arguments { index, fragment: text.to_owned() }),
        }
    }

    /// Arguments inside a JSON string.
    pub(super) fn escaped(&mut self, text: &str) {
        let mut escaped = String::with_capacity(text.len());
        escape_into(text, &mut escaped);
        self.arguments(&escaped);
    }

    pub(super) fn end(&mut self, complete: bool) {
        self.out.push(ToolDelta::End { index: self.calls - 1, complete });
    }

    pub(super) fn note(&mut self, note: impl FnOnce() -> String) {
        if self.notes.len() < MAX_NOTES {
            self.notes.push(note());
        }
    }
}

/// How a text begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begins {
    /// With this one of the tags.
    Tag(usize),
    /// With what may become one.
    Maybe,
    /// Otherwise.
    Other,
}

/// How `text` begins, given that nothing follows it if `end`.
pub(super) fn begins(text: &str, tags: &[&str], end: bool) -> Begins {
    if let Some(tag) = tags.iter().position(|tag| text.starts_with(tag)) {
        Begins::Tag(tag)
    } else if !end && tags.iter().any(|tag| tag.starts_with(text)) {
        Begins::Maybe
    } else {
        Begins::Other
    }
}

/// White space of markup.
pub(super) fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

/// Whether the last line of `text` is blank, after a line that was or was not.
fn blank_line(text: &str, before: bool) -> bool {
    match text.rsplit_once('\n') {
        Some((_, line)) => line.chars().all(is_space),
        None => before && text.chars().all(is_space),
    }
}

/// Drops the tag that closes a call.
fn closing(input: &mut Input) -> Flow {
    let rest = input.rest();
    let tag = rest.trim_start_matches(is_space);
    let skipped = rest.len() - tag.len();
    match begins(tag, &[CALL_CLOSE], input.end) {
        Begins::Tag(_) => input.advance(skipped + CALL_CLOSE.len()),
        Begins::Maybe => return Flow::More,
        // Cut off in the middle.
        Begins::Other if input.end && tag.len() > 1 && CALL_CLOSE.starts_with(tag) => {
            input.advance(skipped + tag.len());
        }
        Begins::Other => {}
    }
    Flow::Ended
}
