//! JSON that can be closed at any moment.
//!
//! A model's JSON arrives in pieces, may stop anywhere and may be wrong. [`JsonStream`] hands on
//! only what is certain: whatever it has written, together with what [`JsonStream::close`] adds, is
//! valid JSON. A key leaves together with the first character of its value, a number or a word when
//! it is complete, a string as it comes.
//!
//! Small mistakes that models make are mended: line breaks inside strings, half a surrogate pair,
//! Python's `True`, `False` and `None`. White space outside strings is left out.

/// The deepest nesting; serde_json reads 128 levels.
const MAX_DEPTH: usize = 100;

/// Follows one JSON value.
#[derive(Clone, Debug)]
pub(super) struct JsonStream {
    /// Open containers; true for an object.
    stack: Vec<bool>,
    state: State,
    /// What can't leave before the value that it belongs to begins: a comma, a key, a colon.
    lead: String,
    /// A number, a word or an escape that is not complete.
    part: String,
    /// The characters taken that are not in the output.
    held: String,
    /// A high surrogate that waits for its other half.
    surrogate: Option<u16>,
}

/// What became of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It was taken.
    Taken,
    /// It was taken and the value is complete.
    Done,
    /// No JSON goes on like that; it was not taken.
    Bad,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A value has to begin.
    Value,
    /// The first item of an array, or its end.
    FirstItem,
    /// The first key of an object, or its end.
    FirstKey,
    /// A key.
    Key,
    /// Inside a key.
    InKey,
    /// The colon after a key.
    Colon,
    /// Inside a string that is a value.
    InString,
    /// Inside a number or a word.
    InWord,
    /// After a value: a comma, or the end of its container.
    After,
}

impl JsonStream {
    /// Before a value.
    pub(super) fn new() -> JsonStream {
        JsonStream {
            stack: Vec::new(),
            state: State::Value,
            lead: String::new(),
            part: String::new(),
            held: String::new(),
            surrogate: None,
        }
    }

    /// Inside an object, after one of its values.
    pub(super) fn after_value_of_object() -> JsonStream {
        JsonStream { stack: vec![true], state: State::After, ..JsonStream::new() }
    }

    /// Takes the next character.
    pub(super) fn push(&mut self, c: char, out: &mut String) -> Step {
        match self.state {
            State::InKey | State::InString => self.string(c, out),
            State::InWord => {
                if c.is_ascii_alphanumeric() || "+-._".contains(c) {
                    self.part.push(c);
                    self.held.push(c);
                    return Step::Taken;
                }
                let Some(word) = word(&self.part) else { return Step::Bad };
                self.emit(&word, out);
                self.part.clear();
                self.state = State::After;
                self.after(c, out)
            }
            _ if is_space(c) => self.space(c),
            State::Value => self.value(c, out),
            State::FirstItem if c == ']' => self.pop(c, out),
            State::FirstItem => self.value(c, out),
            State::FirstKey if c == '}' => self.pop(c, out),
            State::FirstKey | State::Key if c == '"' => {
                self.hold('"', "\"");
                self.state = State::InKey;
                Step::Taken
            }
            State::FirstKey | State::Key => Step::Bad,
            State::Colon if c == ':' => {
                self.hold(c, ":");
                self.state = State::Value;
                Step::Taken
            }
            State::Colon => Step::Bad,
            State::After => self.after(c, out),
        }
    }

    /// Whether all that is missing is the end of a number or word: nothing but its end can tell that
    /// it is complete.
    pub(super) fn ends_here(&self) -> bool {
        self.stack.is_empty() && self.state == State::InWord && word(&self.part).is_some()
    }

    /// Completes the value: closes what is open. Gives the characters taken that found no place.
    pub(super) fn close(&mut self, out: &mut String) -> String {
        match self.state {
            State::InWord => {
                let word = word(&self.part);
                let alone = self.stack.is_empty().then(|| "null".to_owned());
                if let Some(word) = word.or(alone) {
                    self.emit(&word, out);
                }
            }
            State::InString => {
                self.lone_surrogate(out);
                out.push('"');
            }
            State::Value if self.stack.is_empty() => out.push_str("null"),
            _ => {}
        }
        for object in self.stack.drain(..).rev() {
            out.push(if object { '}' } else { ']' });
        }
        self.state = State::After;
        std::mem::take(&mut self.held)
    }

    fn value(&mut self, c: char, out: &mut String) -> Step {
        match c {
            '{' | '[' => {
                if self.stack.len() == MAX_DEPTH {
                    return Step::Bad;
                }
                self.stack.push(c == '{');
                self.emit(c.encode_utf8(&mut [0; 4]), out);
                self.state = if c == '{' { State::FirstKey } else { State::FirstItem };
            }
            '"' => {
                self.emit("\"", out);
                self.state = State::InString;
            }
            '-' | '0'..='9' | 'a'..='z' | 'A'..='Z' => {
                self.part.push(c);
                self.held.push(c);
                self.state = State::InWord;
            }
            _ => return Step::Bad,
        }
        Step::Taken
    }

    fn after(&mut self, c: char, out: &mut String) -> Step {
        match (c, self.stack.last()) {
            (',', Some(&object)) => {
                self.hold(c, ",");
                self.state = if object { State::Key } else { State::Value };
                Step::Taken
            }
            ('}', Some(true)) | (']', Some(false)) => self.pop(c, out),
            (_, Some(_)) if is_space(c) => self.space(c),
            _ => Step::Bad,
        }
    }

    fn pop(&mut self, c: char, out: &mut String) -> Step {
        self.stack.pop();
        out.push(c);
        self.state = State::After;
        if self.stack.is_empty() { Step::Done } else { Step::Taken }
    }

    fn string(&mut self, c: char, out: &mut String) -> Step {
        if !self.part.is_empty() {
            return self.escape(c, out);
        }
        match c {
            '\\' => {
                self.part.push(c);
                self.held.push(c);
            }
            '"' => {
                self.lone_surrogate(out);
                self.character("\"", '"', out);
                if self.state == State::InKey {
                    self.state = State::Colon;
                } else {
                    self.state = State::After;
                    if self.stack.is_empty() {
                        return Step::Done;
                    }
                }
            }
            c => {
                self.lone_surrogate(out);
                let mut escaped = String::new();
                escape_into(c.encode_utf8(&mut [0; 4]), &mut escaped);
                self.character(&escaped, c, out);
            }
        }
        Step::Taken
    }

    /// A character inside an escape.
    fn escape(&mut self, c: char, out: &mut String) -> Step {
        let taken = self.part.len();
        let fits = match taken {
            1 => "\"\\/bfnrtu".contains(c),
            _ => c.is_ascii_hexdigit(),
        };
        if !fits {
            return Step::Bad;
        }
        self.part.push(c);
        self.held.push(c);
        if taken == 1 && c != 'u' || taken == 5 {
            let part = std::mem::take(&mut self.part);
            match u16::from_str_radix(part.get(2..).unwrap_or_default(), 16) {
                Ok(unit) => self.code_unit(unit, &part, out),
                Err(_) => {
                    self.lone_surrogate(out);
                    self.finished(&part, out);
                }
            }
        }
        Step::Taken
    }

    fn code_unit(&mut self, unit: u16, part: &str, out: &mut String) {
        match (unit, self.surrogate.take()) {
            (0xDC00..=0xDFFF, Some(high)) => {
                self.finished(&format!("\\u{high:04x}{part}"), out);
            }
            (0xD800..=0xDBFF, before) => {
                self.surrogate = before;
                self.lone_surrogate(out);
                self.surrogate = Some(unit);
            }
            (unit, before) => {
                self.surrogate = before;
                self.lone_surrogate(out);
                let alone = matches!(unit, 0xDC00..=0xDFFF);
                self.finished(if alone { "\\ufffd" } else { part }, out);
            }
        }
    }

    /// Half a pair without the other is no character.
    fn lone_surrogate(&mut self, out: &mut String) {
        if self.surrogate.take().is_some() {
            self.finished("\\ufffd", out);
        }
    }

    /// A character of a string: into the key that is held, or out.
    fn character(&mut self, escaped: &str, raw: char, out: &mut String) {
        if self.state == State::InKey {
            self.hold(raw, escaped);
        } else {
            out.push_str(escaped);
        }
    }

    /// An escape that is complete.
    fn finished(&mut self, escaped: &str, out: &mut String) {
        if self.state == State::InKey {
            self.lead.push_str(escaped);
        } else {
            self.held.clear();
            out.push_str(escaped);
        }
    }

    /// White space outside strings; it only matters if what it stands in finds no place.
    fn space(&mut self, c: char) -> Step {
        if !self.held.is_empty() {
            self.held.push(c);
        }
        Step::Taken
    }

    fn hold(&mut self, raw: char, text: &str) {
        self.lead.push_str(text);
        self.held.push(raw);
    }

    fn emit(&mut self, text: &str, out: &mut String) {
        out.push_str(&self.lead);
        out.push_str(text);
        self.lead.clear();
        self.held.clear();
    }
}

/// `text` as the inside of a JSON string.
pub(super) fn escape_into(text: &str, out: &mut String) {
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if (c as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
}

/// `text` as compact JSON, if that is what it is.
pub(super) fn compact(text: &str) -> Option<String> {
    let (mut stream, mut out) = (JsonStream::new(), String::new());
    let mut done = false;
    for c in text.trim().chars() {
        match stream.push(c, &mut out) {
            _ if done => return None,
            Step::Bad => return None,
            Step::Done => done = true,
            Step::Taken => {}
        }
    }
    if stream.ends_here() {
        stream.close(&mut out);
        done = true;
    }
    done.then_some(out)
}

/// A number or a word as JSON has it.
fn word(text: &str) -> Option<String> {
    match text {
        "true" | "false" | "null" => return Some(text.to_owned()),
        "True" => return Some("true".to_owned()),
        "False" => return Some("false".to_owned()),
        "None" => return Some("null".to_owned()),
        _ => {}
    }
    let digits =
        |text: &str| text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let rest = text.strip_prefix('-').unwrap_or(text);
    let whole = digits(rest);
    if whole == 0 || whole > 1 && rest.starts_with('0') {
        return None;
    }
    let mut rest = &rest[whole..];
    if let Some(fraction) = rest.strip_prefix('.') {
        let count = digits(fraction);
        if count == 0 {
            return None;
        }
        rest = &fraction[count..];
    }
    if let Some(exponent) = rest.strip_prefix(['e', 'E']) {
        let exponent = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        let count = digits(exponent);
        if count == 0 {
            return None;
        }
        rest = &exponent[count..];
    }
    // A number beyond all bounds is one that readers refuse.
    let finite = text.parse::<f64>().is_ok_and(f64::is_finite);
    (rest.is_empty() && finite).then(|| text.to_owned())
}

fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    /// What comes of `text`: the output closed, and whether the value was complete.
    fn run(text: &str) -> (String, bool) {
        let (mut stream, mut out) = (JsonStream::new(), String::new());
        for c in text.chars() {
            match stream.push(c, &mut out) {
                Step::Taken => {}
                Step::Done => return (out, true),
                Step::Bad => break,
            }
        }
        stream.close(&mut out);
        (out, false)
    }

    #[test]
    fn closes_at_any_moment() {
        let text =
            r#" { "a" : [ 1.5e3 , -2, {"b\u00e9\n":"x\ud83d\ude00\"y"} ], "c":true, "d" : null } "#;
        let whole: Value = serde_json::from_str(text).unwrap();
        for (end, _) in text.char_indices().chain([(text.len(), ' ')]) {
            let (out, done) = run(&text[..end]);
            let value: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"));
            assert!(!done || value == whole, "{out}");
        }
        assert!(run(text).1 && !run(text.trim_end().trim_end_matches('}')).1);
        assert_eq!(
            run(text).0,
            r#"{"a":[1.5e3,-2,{"b\u00e9\n":"x\ud83d\ude00\"y"}],"c":true,"d":null}"#
        );
    }

    #[test]
    fn keys_wait_for_their_values() {
        assert_eq!(run(r#"{"a":1,"b"#).0, r#"{"a":1}"#);
        assert_eq!(run(r#"{"a":1,"b":"#).0, r#"{"a":1}"#);
        assert_eq!(run(r#"{"a":1,"b":""#).0, r#"{"a":1,"b":""}"#);
        assert_eq!(run(r#"{"a":1,"b":tru"#).0, r#"{"a":1}"#);
        assert_eq!(run(r#"{"a":12"#).0, r#"{"a":12}"#);
        assert_eq!(run(r#"{"a":12."#).0, "{}");
        assert_eq!(run("[1,").0, "[1]");
    }

    #[test]
    fn what_found_no_place_is_given_back() {
        let (mut stream, mut out) = (JsonStream::new(), String::new());
        for c in r#"{"a":1,"b":x1"#.chars() {
            assert_eq!(stream.push(c, &mut out), Step::Taken);
        }
        assert_eq!(stream.push('}', &mut out), Step::Bad);
        assert_eq!(stream.close(&mut out), r#","b":x1"#);
        assert_eq!(out, r#"{"a":1}"#);
    }

    #[test]
    fn mends_what_models_get_wrong() {
        assert_eq!(run("{\"a\":\"x\ny\tz\"}").0, r#"{"a":"x\ny\tz"}"#);
        assert_eq!(
            run(r#"["\ud83dx","\ude00","\ud83d\ud83d\ude00","\ud83d\n"]"#).0,
            r#"["\ufffdx","\ufffd","\ufffd\ud83d\ude00","\ufffd\n"]"#
        );
        assert_eq!(run("[True,False,None]").0, "[true,false,null]");
    }

    #[test]
    fn refuses_the_rest() {
        for bad in [
            "{a", "[1 2", "[01]", "[1e999]", "[NaN]", "{\"a\" 1", "[,", "}", "[\"\\x", "[.5]",
            "[1,]",
        ] {
            let (mut stream, mut out) = (JsonStream::new(), String::new());
            let steps: Vec<Step> = bad.chars().map(|c| stream.push(c, &mut out)).collect();
            assert!(steps.contains(&Step::Bad), "{bad}: {steps:?}");
        }
        let (deep, fits) = ("[".repeat(MAX_DEPTH + 1), "[".repeat(MAX_DEPTH));
        assert_eq!(run(&deep).0.len(), 2 * MAX_DEPTH);
        assert!(serde_json::from_str::<Value>(&run(&fits).0).is_ok());
    }

    #[test]
    fn whole_texts() {
        assert_eq!(compact(" 12 ").as_deref(), Some("12"));
        assert_eq!(compact("{\"a\": [1, \"b c\"]}\n").as_deref(), Some("{\"a\":[1,\"b c\"]}"));
        assert_eq!(compact("True").as_deref(), Some("true"));
        for text in ["", "1 2", "{", "\"a\" b", "[1] x", "2026-01-15", "nul"] {
            assert_eq!(compact(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_the_output_is_json(
            parts in proptest::collection::vec(prop::sample::select(&[
                "{", "}", "[", "]", ",", ":", "\"", "\\", "\\u", "d83d", "\\ude00", "a", "1", "-", ".", "e",
                "true", "null", " ", "\n", "é", "\"k\":", "\u{1}",
            ][..]), 0..24),
        ) {
            let text = parts.concat();
            let (out, done) = run(&text);
            let value = serde_json::from_str::<Value>(&out);
            prop_assert!(value.is_ok(), "{text:?} became {out:?}");
            // Valid JSON is never refused.
            if let Ok(right) = serde_json::from_str::<Value>(&text) && (right.is_object() || right.is_array()) {
                prop_assert!(done);
                prop_assert_eq!(value.unwrap(), right);
            }
        }
    }
}
