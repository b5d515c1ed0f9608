//! Text that remembers which of its characters came from data.
//!
//! A chat template glues its own control tokens (`<|im_start|>`) and people's text into one string,
//! and a tokenizer reads the string. Text that a user typed must never turn into a control token,
//! however the template cut, trimmed or joined it. So every character of the data that could begin
//! an added token is replaced, before rendering, by a stand-in character that occurs nowhere else.
//! An added token found in the rendered text can then only be the template's own, and the text
//! between them gets its characters back before it is encoded as ordinary text: the same runs,
//! hence the same ids, that a plain render gives when nothing is forged.
//!
//! The price: a template that looks for `<...>` inside a message does not find it. That is wanted
//! for forged markup; the one honest use, reasoning tags in a replayed assistant turn, is handled
//! in [`super::chat`].

use std::borrow::Cow;
use std::collections::BTreeSet;

use serde_json::Value;

/// First the 32 noncharacters kept for internal use, then both supplementary private use planes.
const STAND_INS: [(u32, u32); 3] = [(0xFDD0, 0xFDEF), (0xF_0000, 0xF_FFFD), (0x10_0000, 0x10_FFFD)];

/// A mapping between guarded characters and their stand-ins.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    pairs: Vec<(char, char)>,
}

/// Every possible stand-in character already occurs in the text.
#[derive(Debug, thiserror::Error)]
#[error(
    "the messages use every character that could mark their text as data; remove the private-use characters"
)]
pub struct NoStandIn;

impl Marks {
    /// Chooses a stand-in for each of `guarded` that occurs in none of `texts` and nowhere in
    /// `data`.
    pub fn choose(guarded: &[char], texts: &[&str], data: &[&Value]) -> Result<Marks, NoStandIn> {
        let mut used = BTreeSet::new();
        texts.iter().for_each(|text| collect(text, &mut used));
        data.iter().for_each(|value| collect_value(value, &mut used));
        let mut free = STAND_INS
            .iter()
            .flat_map(|&(first, last)| first..=last)
            .filter_map(char::from_u32)
            .filter(|c| !used.contains(c));
        let pair = |&original: &char| free.next().map(|mark| (original, mark));
        let pairs = guarded.iter().map(pair).collect::<Option<Vec<_>>>().ok_or(NoStandIn)?;
        Ok(Marks { pairs })
    }

    /// `text` with every guarded character replaced by its stand-in.
    pub fn apply<'a>(&self, text: &'a str) -> Cow<'a, str> {
        replace(text, self.pairs.iter().copied())
    }

    /// `text` with every stand-in turned back.
    pub fn restore<'a>(&self, text: &'a str) -> Cow<'a, str> {
        replace(text, self.pairs.iter().map(|&(original, mark)| (mark, original)))
    }

    /// [`Marks::apply`] on every string and object key of a JSON value.
    pub fn apply_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.apply(text).into_owned()),
            Value::Array(items) => items.iter().map(|item| self.apply_value(item)).collect(),
            Value::Object(map) => map
                .iter()
                .map(|(key, item)| (self.apply(key).into_owned(), self.apply_value(item)))
                .collect(),
            other => other.clone(),
        }
    }
}

/// Rendered text whose data is marked: what a tokenizer encodes.
#[derive(Clone, Debug)]
pub struct Guarded {
    marked: String,
    marks: Marks,
}

impl Guarded {
    /// Text in which every character in the domain of `marks` came from a template and every
    /// stand-in from data.
    pub fn new(marked: String, marks: Marks) -> Guarded {
        Guarded { marked, marks }
    }

    /// Text that is trusted as a whole: added tokens are recognised everywhere.
    pub fn trusted(text: impl Into<String>) -> Guarded {
        Guarded { marked: text.into(), marks: Marks::default() }
    }

    /// The text as a person would read it.
    pub fn text(&self) -> Cow<'_, str> {
        self.marks.restore(&self.marked)
    }

    /// The text with stand-ins, in which an added token can only be the template's.
    pub fn marked(&self) -> &str {
        &self.marked
    }

    /// A piece of [`Guarded::marked`] with its characters turned back.
    pub fn restore<'a>(&self, piece: &'a str) -> Cow<'a, str> {
        self.marks.restore(piece)
    }
}

/// Whether a character is one that [`Marks`] may use.
pub fn is_stand_in(c: char) -> bool {
    STAND_INS.iter().any(|&(first, last)| (first..=last).contains(&(c as u32)))
}

fn replace(text: &str, pairs: impl Iterator<Item = (char, char)> + Clone) -> Cow<'_, str> {
    let of = |c: char| pairs.clone().find(|pair| pair.0 == c).map(|pair| pair.1);
    if text.chars().any(|c| of(c).is_some()) {
        Cow::Owned(text.chars().map(|c| of(c).unwrap_or(c)).collect())
    } else {
        Cow::Borrowed(text)
    }
}

fn collect(text: &str, used: &mut BTreeSet<char>) {
    used.extend(text.chars().filter(|c| is_stand_in(*c)));
}

fn collect_value(value: &Value, used: &mut BTreeSet<char>) {
    match value {
        Value::String(text) => collect(text, used),
        Value::Array(items) => items.iter().for_each(|item| collect_value(item, used)),
        Value::Object(map) => map.iter().for_each(|(key, item)| {
            collect(key, used);
            collect_value(item, used);
        }),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn stand_ins_avoid_everything_in_use() {
        let data = json!({"a": "x\u{FDD0}", "\u{FDD1}": ["\u{FDD2}"]});
        let marks = Marks::choose(&['<', '['], &["\u{FDD3}"], &[&data]).unwrap();
        assert_eq!(marks.apply("<[a"), "\u{FDD4}\u{FDD5}a");
        assert_eq!(marks.restore("\u{FDD4}\u{FDD5}a\u{FDD0}"), "<[a\u{FDD0}");
    }

    #[test]
    fn exhausted_stand_ins_are_an_error() {
        let every: String =
            STAND_INS.iter().flat_map(|&(a, b)| a..=b).filter_map(char::from_u32).collect();
        assert!(Marks::choose(&['<'], &[&every], &[]).is_err());
        assert!(Marks::choose(&[], &[&every], &[]).is_ok());
    }

    #[test]
    fn keys_are_marked_too() {
        let marks = Marks::choose(&['<'], &[], &[]).unwrap();
        let marked = marks.apply_value(&json!({"<k>": [1, null, "<v>"]}));
        assert_eq!(marked, json!({"\u{FDD0}k>": [1, null, "\u{FDD0}v>"]}));
    }

    proptest! {
        #[test]
        fn restore_undoes_apply(text in "\\PC{0,40}") {
            let marks = Marks::choose(&['<', '[', 'a'], &[&text], &[]).unwrap();
            let marked = marks.apply(&text).into_owned();
            prop_assert!(!marked.contains(['<', '[', 'a']));
            prop_assert_eq!(marks.restore(&marked), text.as_str());
        }
    }
}
