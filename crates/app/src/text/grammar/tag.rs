//! Watching for a tag in what a model writes: as a token of its own, or spelt out.

use crate::text::tokenizer::Tok;

/// A tag.
pub(super) enum Tag {
    /// It is this token, and nothing else.
    Token(u32),
    /// The tokenizer has none for it, so it may be spread over several.
    Text(Spelt),
}

/// A tag that is looked for in the bytes of tokens.
pub(super) struct Spelt {
    text: &'static str,
    /// For each length of a beginning of the tag: the longest proper beginning that is also its end.
    fallback: Vec<usize>,
    /// For each such length, tokens that would complete the tag and go on: what follows a tag has to
    /// begin with a token of its own.
    beyond: Vec<Vec<u32>>,
}

impl Tag {
    /// The tag `text` in a tokenizer.
    pub(super) fn new(text: &'static str, tok: &dyn Tok) -> Tag {
        match tok.added_id(text) {
            Some(token) => Tag::Token(token),
            None => Tag::Text(Spelt::new(text, tok)),
        }
    }

    /// The tag's token.
    pub(super) fn token(&self) -> Option<u32> {
        match self {
            Tag::Token(token) => Some(*token),
            Tag::Text(_) => None,
        }
    }

    /// The tag in a Lark grammar.
    pub(super) fn lark(&self) -> String {
        match self {
            Tag::Token(token) => format!("<[{token}]>"),
            Tag::Text(spelt) => format!("{:?}", spelt.text),
        }
    }

    /// How much of the tag the text ends with after a token, given how much it ended with before;
    /// `None` once it is complete.
    pub(super) fn step(&self, state: usize, token: u32, bytes: &[u8]) -> Option<usize> {
        match self {
            Tag::Token(tag) => (token != *tag).then_some(0),
            Tag::Text(spelt) => {
                let mut state = state;
                for &byte in bytes {
                    state = spelt.step(state, byte);
                    if state == spelt.text.len() {
                        return None;
                    }
                }
                Some(state)
            }
        }
    }

    /// Tokens that may not come after so much of the tag.
    pub(super) fn beyond(&self, state: usize) -> &[u32] {
        match self {
            Tag::Token(_) => &[],
            Tag::Text(spelt) => &spelt.beyond[state],
        }
    }
}

impl Spelt {
    fn new(text: &'static str, tok: &dyn Tok) -> Spelt {
        let bytes = text.as_bytes();
        let mut spelt = Spelt { text, fallback: vec![0; bytes.len()], beyond: Vec::new() };
        for end in 1..bytes.len() {
            let longest = spelt.fallback[end - 1];
            spelt.fallback[end] = spelt.step(longest, bytes[end]);
        }
        let last = bytes[bytes.len() - 1];
        let candidates: Vec<u32> = (0..tok.id_count() as u32)
            .filter(|&id| {
                let token = tok.token_bytes(id);
                token.len() > 1 && token[..token.len() - 1].contains(&last)
            })
            .collect();
        let completes = |state: usize, id: u32| {
            let (token, mut state) = (tok.token_bytes(id), state);
            token[..token.len() - 1].iter().any(|&byte| {
                state = spelt.step(state, byte);
                state == bytes.len()
            })
        };
        let beyond =
            |state| candidates.iter().copied().filter(|&id| completes(state, id)).collect();
        spelt.beyond = (0..bytes.len()).map(beyond).collect();
        spelt
    }

    /// How much of the tag the text ends with after one more byte; all of it stays all of it only
    /// for the caller to see.
    fn step(&self, state: usize, byte: u8) -> usize {
        let bytes = self.text.as_bytes();
        let mut state = if state == bytes.len() { self.fallback[state - 1] } else { state };
        while state > 0 && bytes[state] != byte {
            state = self.fallback[state - 1];
        }
        state + usize::from(bytes[state] == byte)
    }
}
