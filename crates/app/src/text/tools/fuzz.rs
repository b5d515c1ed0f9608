//! Answers as hostile input: whatever a model writes, parsing ends, arguments are JSON objects,
//! nothing depends on how the text was cut, and no word is lost.

use proptest::collection::vec;
use proptest::prelude::*;

use super::ToolParser;
use super::tests::{parse_pieces, weather};
use crate::text::fuzz::run_cases;

const PIECES: [&str; 34] = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "<function=weather>",
    "<function=now>\n",
    "</function>",
    "<parameter=",
    "<parameter=city>\n",
    "<parameter=days>",
    "\n</parameter>\n",
    "</parameter>",
    "<tool_call>\n<function=weather>\n<parameter=city>\n",
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {",
    "{\"name\": \"now\"",
    "\"arguments\": ",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "\\u12",
    ">",
    "<",
    "</",
    "\n",
    " ",
    "city",
    "word1",
    "word2",
    "3",
    "é🦀",
];

fn answer() -> impl Strategy<Value = (Vec<&'static str>, Vec<prop::sample::Index>)> {
    (vec(prop::sample::select(&PIECES[..]), 0..30), vec(any::<prop::sample::Index>(), 0..6))
}

#[test]
fn fuzz_tool_calls() {
    run_cases(answer(), |(parts, cuts)| {
        let text = parts.concat();
        let whole = parse_pieces(ToolParser::new(&weather(), "c"), [text.as_str()]);
        let chars = text.split_inclusive(|_| true);
        prop_assert_eq!(&parse_pieces(ToolParser::new(&weather(), "c"), chars), &whole);
        let mut cuts: Vec<usize> =
            cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        prop_assert_eq!(&parse_pieces(ToolParser::new(&weather(), "c"), pieces), &whole);
        // Words are somewhere: in the text, in arguments, or in a note, unless it was cut.
        if whole.notes.iter().any(|note| note.contains('…')) {
            return Ok(());
        }
        let calls = whole.calls.iter().map(|call| call.name.as_str().to_owned() + &call.arguments);
        let shown = whole.text.concat() + &calls.collect::<String>() + &whole.notes.concat();
        for word in ["word1", "word2", "é🦀"] {
            let (before, after) = (text.matches(word).count(), shown.matches(word).count());
            prop_assert!(after >= before, "{word} in {text:?}: {whole:?}");
        }
        Ok(())
    });
}
