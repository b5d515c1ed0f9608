//! From the tokens of one answer to the text that people and programs get.
//!
//! Tokens become text ([`Detokenizer`]), text is split into reasoning and answer ([`Splitter`]),
//! and stop strings are looked for in the answer ([`StopMatcher`]): a stop string met while the
//! model still thinks would end it without a word said.

use super::detokenize::Detokenizer;
use super::reasoning::{CLOSE, OPEN, Split, Splitter, Start, Tag};
use super::stop::{StopMatcher, Stopped};
use super::tokenizer::Tok;

/// How an answer is turned into text.
#[derive(Clone, Debug)]
pub struct StreamOptions {
    /// Stop strings; they and everything after them are left out.
    pub stops: Vec<String>,
    /// How the output begins.
    pub start: Start,
    /// Whether control tokens appear in the text.
    pub keep_special: bool,
}

/// New text, and whether the answer ends here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delta {
    /// New reasoning; it comes before the new answer.
    pub reasoning: String,
    /// New text of the answer.
    pub answer: String,
    /// The stop string that ended the answer.
    pub stop: Option<String>,
}

/// Follows the tokens of one answer.
///
/// The tokenizer comes with every token, so that a stream can outlive any borrow of it.
#[derive(Debug)]
pub struct OutputStream {
    open: Option<u32>,
    close: Option<u32>,
    detokenizer: Detokenizer,
    splitter: Splitter,
    stops: StopMatcher,
}

impl OutputStream {
    /// A stream at its beginning.
    pub fn new(tok: &dyn Tok, options: &StreamOptions) -> OutputStream {
        let (open, close) = (tok.added_id(OPEN), tok.added_id(CLOSE));
        OutputStream {
            open,
            close,
            detokenizer: Detokenizer::new(options.keep_special),
            splitter: Splitter::new(options.start, close.is_none()),
            stops: StopMatcher::new(&options.stops),
        }
    }

    /// Takes the next token. After a stop string, further tokens give no text.
    pub fn push(&mut self, tok: &dyn Tok, id: u32) -> Delta {
        let (mut text, mut split) = (String::new(), Split::default());
        match self.tag(id) {
            Some(tag) => {
                self.detokenizer.finish(&mut text);
                self.splitter.push(&text, &mut split);
                self.splitter.tag(tag, &mut split);
            }
            None => {
                self.detokenizer.push(tok, id, &mut text);
                self.splitter.push(&text, &mut split);
            }
        }
        self.match_stops(split)
    }

    /// Ends the answer and gives the text that was held back.
    pub fn finish(&mut self) -> Delta {
        let (mut text, mut split) = (String::new(), Split::default());
        self.detokenizer.finish(&mut text);
        self.splitter.push(&text, &mut split);
        self.splitter.finish(&mut split);
        let mut delta = self.match_stops(split);
        self.stops.finish(&mut delta.answer);
        delta
    }

    /// Whether the model was thinking so far.
    pub fn in_reasoning(&self) -> bool {
        self.splitter.in_reasoning()
    }

    /// Whether text waits for the tokens that decide what it is.
    pub fn holds(&self) -> bool {
        self.detokenizer.holds() || self.splitter.holds() || self.stops.holds()
    }

    fn tag(&self, id: u32) -> Option<Tag> {
        // Without a closing token the tags are found in the text, so a lone opening token is text.
        self.close?;
        match id {
            _ if Some(id) == self.open => Some(Tag::Open),
            _ if Some(id) == self.close => Some(Tag::Close),
            _ => None,
        }
    }

    fn match_stops(&mut self, split: Split) -> Delta {
        let mut answer = String::new();
        let stop = match self.stops.push(&split.answer, &mut answer) {
            Stopped::No => None,
            Stopped::At(stop) => Some(stop),
        };
        Delta { reasoning: split.reasoning, answer, stop }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::Tokenizer;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use std::path::Path;
    use std::sync::LazyLock;

    /// The bundled tokenizer, without and with tokens for the reasoning tags.
    static TOKS: LazyLock<[Tokenizer; 2]> = LazyLock::new(|| {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/th-tiny/tokenizer.json");
        let json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut tagged = json.clone();
        for (id, content) in [(49152, OPEN), (49153, CLOSE)] {
            let token = json!({"id": id, "content": content, "special": false});
            tagged["added_tokens"].as_array_mut().unwrap().push(token);
        }
        [json, tagged].map(|json| Tokenizer::from_json("t", json, None).unwrap())
    });

    fn options(start: Start, stops: &[&str]) -> StreamOptions {
        let stops = stops.iter().map(|stop| (*stop).to_owned()).collect();
        StreamOptions { stops, start, keep_special: false }
    }

    /// All text of a stream, and after how many tokens it stopped.
    fn run(tok: &dyn Tok, options: &StreamOptions, ids: &[u32]) -> (Split, Option<usize>) {
        let (mut stream, mut all) = (OutputStream::new(tok, options), Split::default());
        let mut add = |delta: Delta| {
            all.reasoning += &delta.reasoning;
            all.answer += &delta.answer;
            delta.stop.is_some()
        };
        for (index, &id) in ids.iter().enumerate() {
            if add(stream.push(tok, id)) {
                return (all, Some(index + 1));
            }
        }
        let stopped = add(stream.finish());
        (all, stopped.then_some(ids.len()))
    }

    fn encode(tok: &Tokenizer, text: &str) -> Vec<u32> {
        tok.encode(&crate::text::guard::Guarded::trusted(text)).unwrap()
    }

    #[test]
    fn characters_spread_over_tokens_arrive_whole() {
        let tok = &TOKS[0];
        let text = "👩‍👩‍👧‍👦 🇯🇵 漢字 é 𝄞";
        let ids = encode(tok, text);
        let mut stream = OutputStream::new(tok, &options(Start::Answer, &[]));
        let deltas: Vec<String> = ids.iter().map(|&id| stream.push(tok, id).answer).collect();
        assert!(deltas.iter().any(String::is_empty) && !deltas.concat().contains('\u{FFFD}'));
        assert_eq!(deltas.concat(), text);
    }

    #[test]
    fn control_tokens_are_left_out_unless_asked_for() {
        let tok = &TOKS[0];
        let ids = encode(tok, "a<|im_end|>b");
        assert_eq!(run(tok, &options(Start::Answer, &[]), &ids).0.answer, "ab");
        let keep = StreamOptions { keep_special: true, ..options(Start::Answer, &[]) };
        assert_eq!(run(tok, &keep, &ids).0.answer, "a<|im_end|>b");
    }

    #[test]
    fn stop_strings_end_the_answer_but_not_the_reasoning() {
        for tok in TOKS.iter() {
            let ids = encode(tok, "Stop here? No.</think>\n\nThis is it. Stop here, please.");
            let (split, stopped) = run(tok, &options(Start::Reasoning, &["Stop here"]), &ids);
            assert_eq!(split.reasoning, "Stop here? No.");
            assert_eq!(split.answer, "This is it. ");
            assert!(stopped.is_some_and(|count| count < ids.len()));
        }
    }

    #[test]
    fn a_tag_spelt_out_is_text_where_it_is_a_token() {
        let tok = &TOKS[1];
        let mut ids = tok.encode_ordinary("I close with </think>, right?").unwrap();
        ids.push(49153);
        ids.extend(encode(tok, "\n\nDone."));
        let (split, _) = run(tok, &options(Start::Reasoning, &[]), &ids);
        assert_eq!(split.reasoning, "I close with </think>, right?");
        assert_eq!(split.answer, "Done.");
    }

    #[test]
    fn a_character_cut_off_by_the_end_is_a_replacement_character() {
        let tok = &TOKS[0];
        let ids = encode(tok, "ok 🚀");
        let (split, _) = run(tok, &options(Start::Answer, &[]), &ids[..ids.len() - 1]);
        assert_eq!(split.answer, "ok \u{FFFD}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// Whatever the tokens are: text before the first stop string, nothing after it.
        #[test]
        fn stops_do_not_depend_on_tokens(
            text in "[abc .é🚀]{0,30}",
            cuts in proptest::collection::vec(0usize..30, 0..6),
            stop in "[abc .é]{1,4}",
        ) {
            let tok = &TOKS[0];
            // Cut anywhere between characters and encode the parts alone: other tokens, same text.
            let chars: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (chars.len() + 1)).collect();
            cuts.extend([0, chars.len()]);
            cuts.sort_unstable();
            let part = |pair: &[usize]| chars[pair[0]..pair[1]].iter().collect::<String>();
            let ids: Vec<u32> =
                cuts.windows(2).flat_map(|pair| tok.encode_ordinary(&part(pair)).unwrap()).collect();
            let (split, stopped) = run(tok, &options(Start::Answer, &[&stop]), &ids);
            match text.find(&stop) {
                Some(at) => prop_assert_eq!(split.answer.as_str(), &text[..at]),
                None => prop_assert_eq!(split.answer.as_str(), text.as_str()),
            }
            prop_assert_eq!(stopped.is_some(), text.contains(&stop));
        }
    }
}
