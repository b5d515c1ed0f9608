//! Token ids back to text, as they arrive.
//!
//! Tokens stand for bytes, and a character may be spread over several of them. The decoder hands
//! out every complete character at once and keeps back only an unfinished one, so that the deltas
//! joined together are, for every split, what decoding the whole sequence at once gives.

use super::tokenizer::Tok;

/// U+FFFD in UTF-8 output, for bytes that are not text.
const REPLACEMENT: char = '\u{FFFD}';

/// Incremental bytes-to-text decoding: equal to [`String::from_utf8_lossy`] of all bytes.
#[derive(Debug, Default)]
pub struct Utf8Decoder {
    /// The beginning of a character whose other bytes have not arrived; at most 3 bytes.
    pending: Vec<u8>,
}

impl Utf8Decoder {
    /// Appends to `out` all text that `bytes` completes.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    let Some(bad) = error.error_len() else { break };
                    out.push(REPLACEMENT);
                    rest = &rest[bad..];
                }
            }
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
    }

    /// Ends the text: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(REPLACEMENT);
        }
    }

    /// Whether a character has begun and not ended.
    pub fn holds(&self) -> bool {
        !self.pending.is_empty()
    }
}

/// Decodes a stream of token ids.
#[derive(Debug, Default)]
pub struct Detokenizer {
    utf8: Utf8Decoder,
    keep_special: bool,
}

impl Detokenizer {
    /// A decoder that leaves control tokens out of the text unless `keep_special`.
    pub fn new(keep_special: bool) -> Detokenizer {
        Detokenizer { utf8: Utf8Decoder::default(), keep_special }
    }

    /// Appends to `out` the text that token `id` completes. Ids without a token add nothing.
    pub fn push(&mut self, tok: &dyn Tok, id: u32, out: &mut String) {
        if self.keep_special || !tok.is_special(id) {
            self.utf8.push(tok.token_bytes(id), out);
        }
    }

    /// Ends the text: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        self.utf8.finish(out);
    }

    /// Whether a character has begun and not ended.
    pub fn holds(&self) -> bool {
        self.utf8.holds()
    }
}

/// The text of a whole sequence of tokens.
pub fn decode(tok: &dyn Tok, ids: &[u32], keep_special: bool) -> String {
    let (mut decoder, mut out) = (Detokenizer::new(keep_special), String::new());
    ids.iter().for_each(|&id| decoder.push(tok, id, &mut out));
    decoder.finish(&mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn in_pieces(bytes: &[u8], cuts: &[usize]) -> Vec<String> {
        let mut decoder = Utf8Decoder::default();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let mut deltas = Vec::new();
        for pair in cuts.windows(2) {
            let mut out = String::new();
            decoder.push(&bytes[pair[0]..pair[1]], &mut out);
            deltas.push(out);
        }
        let mut out = String::new();
        decoder.finish(&mut out);
        deltas.push(out);
        deltas
    }

    #[test]
    fn complete_characters_leave_at_once() {
        let text = "hi 🇯🇵 é";
        let mut decoder = Utf8Decoder::default();
        let mut seen = String::new();
        for (index, byte) in text.bytes().enumerate() {
            decoder.push(&[byte], &mut seen);
            let complete = (0..=index + 1).rev().find(|&end| text.is_char_boundary(end)).unwrap();
            assert_eq!(seen, &text[..complete]);
        }
    }

    #[test]
    fn bad_bytes_become_replacement_characters() {
        // A lone continuation byte, a truncated sequence before ASCII, a byte that never occurs,
        // a surrogate, an overlong form.
        for bytes in [
            &b"a\x80b"[..],
            b"\xE2\x82a",
            b"\xFF\xFE",
            b"\xED\xA0\x80",
            b"\xC0\xAF",
            b"\xF0\x9F\x91",
        ] {
            for cut in 0..=bytes.len() {
                let joined = in_pieces(bytes, &[cut]).concat();
                assert_eq!(joined, String::from_utf8_lossy(bytes), "{bytes:x?} cut at {cut}");
            }
        }
    }

    proptest! {
        #[test]
        fn deltas_join_to_the_whole(
            bytes in prop_oneof![
                proptest::collection::vec(any::<u8>(), 0..40),
                "\\PC{0,20}".prop_map(String::into_bytes),
                proptest::collection::vec(
                    prop_oneof![Just(0xF0u8), Just(0x9F), Just(0x91), Just(0xE2), Just(b'a')],
                    0..12,
                ),
            ],
            cuts in proptest::collection::vec(any::<usize>(), 0..6),
        ) {
            prop_assert_eq!(in_pieces(&bytes, &cuts).concat(), String::from_utf8_lossy(&bytes));
        }
    }
}
