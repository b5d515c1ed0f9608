//! How few tokens a text can have, known without making them: what is far too long for a context is
//! refused before it costs the time to tokenise it. The bound never exceeds the number of tokens.

use serde_json::Value;

/// Canonical composition leaves at least this part of a text's bytes (U+1FEF, three bytes, becomes
/// one; U+1FBE with two marks, seven bytes, becomes two).
const NFC_SHRINKS: usize = 4;

/// What the tokens of a vocabulary can hold at most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Least {
    /// Bytes of a text that one token may take up.
    bytes: usize,
    /// Which bytes of ASCII have tokens; those that have none are dropped.
    ascii: [bool; 0x80],
    /// Whether all bytes have tokens.
    all: bool,
    /// Letters of ASCII in one token. They are few compared with the longest token, which is made of
    /// spaces or dashes.
    letters: usize,
}

impl Least {
    /// The bounds of a tokenizer file whose tokens, `count` of them, stand for these bytes; `None` if
    /// it may drop parts of a text, so that there are none.
    pub(super) fn of<'a>(
        json: &Value,
        token: impl Fn(u32) -> &'a [u8],
        count: usize,
    ) -> Option<Least> {
        if !keeps_text(json) {
            return None;
        }
        let shrinks = match json["normalizer"]["type"].as_str() {
            None => 1,
            Some("NFC") => NFC_SHRINKS,
            Some(_) => return None,
        };
        let mut single = [false; 0x100];
        let (mut longest, mut letters) = (1, 1);
        for id in 0..count as u32 {
            let bytes = token(id);
            if let [byte] = bytes {
                single[usize::from(*byte)] = true;
            }
            longest = longest.max(bytes.len());
            letters = letters.max(bytes.iter().filter(|byte| byte.is_ascii_alphabetic()).count());
        }
        // UTF-8 never has some of them.
        let never = |byte: usize| matches!(byte, 0xC0 | 0xC1 | 0xF5..);
        let all = (0..0x100).all(|byte| single[byte] || never(byte));
        let ascii = std::array::from_fn(|byte| single[byte]);
        Some(Least { bytes: shrinks * longest, ascii, all, letters })
    }

    /// A text has at least as many tokens.
    pub(super) fn tokens(&self, text: &str) -> usize {
        let bytes = text.as_bytes();
        // What comes before a byte that is not ASCII may become part of a composed character.
        let stays = |pair: &&[u8]| pair.is_ascii() && self.ascii[usize::from(pair[0])];
        let stay = || bytes.windows(2).filter(stays).map(|pair| pair[0]);
        let letters = stay().filter(u8::is_ascii_alphabetic).count();
        let counted = if self.all { bytes.len() } else { stay().count() };
        counted.div_ceil(self.bytes).max(letters.div_ceil(self.letters))
    }
}

/// Whether a tokenizer takes up all of a text before it looks for tokens.
fn keeps_text(json: &Value) -> bool {
    let strips = |token: &Value| token["lstrip"] == true || token["rstrip"] == true;
    let strips = json["added_tokens"].as_array().into_iter().flatten().any(strips);
    !strips && cuts_only(&json["pre_tokenizer"])
}

/// Whether a pre-tokenizer only says where a text is cut.
fn cuts_only(step: &Value) -> bool {
    match step["type"].as_str() {
        None => step.is_null(),
        Some("ByteLevel" | "Digits") => true,
        Some("Split") => step["behavior"] != "Removed",
        Some("Sequence") => {
            step["pretokenizers"].as_array().is_some_and(|steps| steps.iter().all(cuts_only))
        }
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::text::guard::Guarded;
    use crate::text::tokenizer::{Tok, Tokenizer};

    fn bundled() -> Value {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/th-tiny/tokenizer.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn tokenizer(json: &Value) -> Tokenizer {
        Tokenizer::from_json("t", json.clone(), None).unwrap()
    }

    fn least(json: &Value, tok: &Tokenizer) -> Option<Least> {
        Least::of(json, |id| tok.token_bytes(id), tok.id_count())
    }

    #[test]
    fn no_text_has_fewer_tokens() {
        let mut json = bundled();
        for normalizer in [json!(null), json!({"type": "NFC"})] {
            json["normalizer"] = normalizer;
            let tok = tokenizer(&json);
            let least = least(&json, &tok).unwrap();
            let mut texts: Vec<String> = (0..tok.id_count() as u32)
                .filter_map(|id| String::from_utf8(tok.token_bytes(id).to_vec()).ok())
                .collect();
            texts.push(texts.concat());
            texts.extend(
                [
                    "\u{1100}\u{1161}\u{11A8}",
                    "\u{1FBE}\u{308}\u{301}",
                    "\u{1FEF}",
                    "a\u{301}",
                    "\u{212A}",
                    " ",
                    "-",
                    "e",
                ]
                .map(|piece| piece.repeat(2000)),
            );
            for text in texts {
                let tokens = tok.encode(&Guarded::trusted(text.as_str())).unwrap().len();
                assert!(least.tokens(&text) <= tokens, "{tokens} {text:?}");
            }
        }
    }

    #[test]
    fn the_bound_is_worth_having() {
        let json = bundled();
        let least = least(&json, &tokenizer(&json)).unwrap();
        let text = "The quick brown fox jumps over the lazy dog. ".repeat(1000);
        assert!(least.tokens(&text) > 1000, "{least:?} {}", least.tokens(&text));
    }

    #[test]
    fn tokenizers_that_drop_text_have_no_bound() {
        for (field, value) in [
            ("normalizer", json!({"type": "Lowercase"})),
            (
                "pre_tokenizer",
                json!({"type": "Sequence", "pretokenizers": [
                    {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": false},
                    {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
                ]}),
            ),
            (
                "added_tokens",
                json!([
                    {"id": 0, "content": "<|endoftext|>", "special": true, "lstrip": true}
                ]),
            ),
        ] {
            let json = bundled();
            let tok = tokenizer(&json);
            let mut other = json;
            other[field] = value;
            assert_eq!(least(&other, &tok), None, "{field}");
        }
    }
}
