//! Calls as JSON: `{"name": …, "arguments": {…}}` between the tags.
//!
//! Where the name comes first, arguments leave as they come. Other orders and arguments as a string
//! of JSON wait until the object is whole.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::check_name;
use super::json_stream::{JsonStream, Step, compact};
use super::parser::{Begins, Emitter, Flow, Input, begins, is_space};

/// A call after its opening tag.
pub(super) struct Hermes {
    /// Bytes of the input before the object.
    start: usize,
    state: State,
}

enum State {
    /// Nothing is certain, and nothing of the input is taken.
    Head {
        /// Whether the usual order is still possible.
        usual: bool,
        whole: JsonStream,
        /// Bytes of the object that `whole` has seen.
        seen: usize,
        compact: String,
    },
    /// The arguments leave as they come.
    Arguments(JsonStream),
    /// What follows them in the object.
    Extras { rest: JsonStream, dropped: String },
}

/// The object of a call.
#[derive(Deserialize)]
struct Call<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

impl Hermes {
    /// A call whose object begins `start` bytes into the input, at a brace.
    pub(super) fn new(start: usize) -> Hermes {
        let state =
            State::Head { usual: true, whole: JsonStream::new(), seen: 0, compact: String::new() };
        Hermes { start, state }
    }

    /// Goes on.
    pub(super) fn step(&mut self, input: &mut Input, emit: &mut Emitter) -> Flow {
        match &mut self.state {
            State::Head { .. } => self.head(input, emit),
            State::Arguments(_) => self.arguments(input, emit),
            State::Extras { .. } => self.extras(input, emit),
        }
    }

    fn head(&mut self, input: &mut Input, emit: &mut Emitter) -> Flow {
        let State::Head { usual, whole, seen, compact } = &mut self.state else {
            return Flow::Next;
        };
        let object = &input.rest()[self.start..];
        if *usual {
            match usual_head(object, input.end) {
                Ok((name, length)) => {
                    emit.begin(name);
                    input.advance(self.start + length);
                    self.state = State::Arguments(JsonStream::new());
                    return Flow::Next;
                }
                Err(Begins::Maybe) => return Flow::More,
                Err(_) => *usual = false,
            }
        }
        for c in object[*seen..].chars() {
            match whole.push(c, compact) {
                Step::Taken => *seen += c.len_utf8(),
                Step::Bad => return Flow::NoCall { rescan: true },
                Step::Done => {
                    let taken = self.start + *seen + c.len_utf8();
                    if !emit_whole(compact, emit) {
                        return Flow::NoCall { rescan: true };
                    }
                    input.advance(taken);
                    return Flow::Ended;
                }
            }
        }
        if input.end { Flow::NoCall { rescan: false } } else { Flow::More }
    }

    fn arguments(&mut self, input: &mut Input, emit: &mut Emitter) -> Flow {
        let State::Arguments(stream) = &mut self.state else { return Flow::Next };
        let (mut out, mut taken, mut last) = (String::new(), 0, Step::Taken);
        for c in input.rest().chars() {
            last = stream.push(c, &mut out);
            if last != Step::Bad {
                taken += c.len_utf8();
            }
            if last != Step::Taken {
                break;
            }
        }
        input.advance(taken);
        match last {
            Step::Done => {
                emit.arguments(&out);
                let rest = JsonStream::after_value_of_object();
                self.state = State::Extras { rest, dropped: String::new() };
                return Flow::Next;
            }
            Step::Taken if !input.end => {
                emit.arguments(&out);
                return Flow::More;
            }
            _ => {}
        }
        let held = stream.close(&mut out);
        emit.arguments(&out);
        if last == Step::Bad {
            emit.note(|| format!("the arguments of a call are no JSON; closed before {held:?}"));
        }
        emit.end(false);
        // What found no place in the arguments is text.
        input.put_back(&held);
        Flow::Ended
    }

    fn extras(&mut self, input: &mut Input, emit: &mut Emitter) -> Flow {
        let State::Extras { rest, dropped } = &mut self.state else { return Flow::Next };
        let (mut taken, mut last) = (0, Step::Taken);
        for c in input.rest().chars() {
            last = rest.push(c, dropped);
            if last != Step::Bad {
                taken += c.len_utf8();
            }
            if last != Step::Taken {
                break;
            }
        }
        input.advance(taken);
        if last == Step::Taken && !input.end {
            return Flow::More;
        }
        // What is no field, or not a whole one, is text.
        let held = if last == Step::Done { String::new() } else { rest.close(dropped) };
        let dropped = dropped.trim_end_matches('}');
        if !dropped.is_empty() {
            emit.note(|| {
                format!("a call has more than a name and arguments; {dropped:?} was left out")
            });
        }
        emit.end(last == Step::Done);
        input.put_back(&held);
        Flow::Ended
    }
}

/// Reads `{"name": "…", "arguments": ` before a brace: the name, and the bytes that it takes.
fn usual_head(text: &str, end: bool) -> Result<(&str, usize), Begins> {
    let left = ["{", "\"name\"", ":"].iter().try_fold(text, |left, tag| skip(left, &[tag], end))?;
    let after = skip(left, &["\""], end)?;
    let name = &after[..after.find(['"', '\\']).unwrap_or(after.len())];
    if name.len() == after.len() {
        let possible = !end && (name.is_empty() || check_name(name).is_ok());
        return Err(if possible { Begins::Maybe } else { Begins::Other });
    }
    if check_name(name).is_err() {
        return Err(Begins::Other);
    }
    let left = skip(&after[name.len()..], &["\""], end)?;
    let left = skip(left, &[","], end)?;
    let left = skip(left, &["\"arguments\"", "\"parameters\""], end)?;
    let value = skip(left, &[":"], end)?.trim_start_matches(is_space);
    match begins(value, &["{"], end) {
        Begins::Tag(_) => Ok((name, text.len() - value.len())),
        other => Err(other),
    }
}

/// What follows one of `tags` and the white space before it.
fn skip<'a>(text: &'a str, tags: &[&str], end: bool) -> Result<&'a str, Begins> {
    let text = text.trim_start_matches(is_space);
    match begins(text, tags, end) {
        Begins::Tag(tag) => Ok(&text[tags[tag].len()..]),
        other => Err(other),
    }
}

/// Hands out a call that is whole; false if the object is none.
fn emit_whole(object: &str, emit: &mut Emitter) -> bool {
    let Ok(call) = serde_json::from_str::<Call<'_>>(object) else { return false };
    if check_name(&call.name).is_err() {
        return false;
    }
    emit.begin(&call.name);
    let given = call.arguments.map_or("{}", RawValue::get);
    let inner = serde_json::from_str::<String>(given).ok();
    let parsed = inner.as_deref().and_then(compact);
    let arguments = parsed.as_deref().unwrap_or(given);
    if arguments.starts_with('{') {
        emit.arguments(arguments);
    } else if arguments == "null" || inner.as_deref().is_some_and(|text| text.trim().is_empty()) {
        emit.arguments("{}");
    } else {
        emit.note(|| {
            "the arguments of a call are no object; passed as one called \"arguments\"".into()
        });
        emit.arguments(&format!("{{\"arguments\":{given}}}"));
    }
    emit.end(true);
    true
}
