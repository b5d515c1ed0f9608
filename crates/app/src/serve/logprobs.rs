//! Log-probabilities of the tokens whose text has been given out.
//!
//! Text is held back while it may be part of a character, of markup or of a stop text. The tokens
//! that made it wait here, so that a client never sees the tokens of a text that it does not get.

use engine::service::Token;

use super::generation::TokenLogprob;
use crate::text::tokenizer::Tok;

/// Tokens of an answer that wait for their text.
#[derive(Debug, Default)]
pub struct Waiting {
    tokens: Vec<TokenLogprob>,
}

impl Waiting {
    /// Takes a token of the answer.
    pub fn push(&mut self, tok: &dyn Tok, token: &Token) {
        let bytes = |id| tok.token_bytes(id).to_vec();
        let finite = |logprob: f32| logprob.max(LOWEST);
        let top = token.alternatives.iter().map(|&(id, p)| (id, bytes(id), finite(p)));
        self.tokens.push(TokenLogprob {
            id: token.id,
            bytes: bytes(token.id),
            logprob: finite(token.logprob.unwrap_or(LOWEST)),
            top: top.collect(),
        });
    }

    /// All of them: nothing is held back any more.
    pub fn release(&mut self) -> Vec<TokenLogprob> {
        std::mem::take(&mut self.tokens)
    }

    /// Those whose bytes lie within the first `bytes` that waited; the others' text was cut off.
    pub fn cut(&mut self, bytes: usize) -> Vec<TokenLogprob> {
        let mut tokens = self.release();
        let mut end = 0;
        let given = tokens.iter().take_while(|token| {
            end += token.bytes.len();
            end <= bytes
        });
        let keep = given.count();
        tokens.truncate(keep);
        tokens
    }
}

/// JSON has no infinity: a token that can't be has this log-probability, as in OpenAI's replies.
pub const LOWEST: f32 = -9999.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(texts: &[&str]) -> Waiting {
        let token = |text: &&str| TokenLogprob {
            id: 0,
            bytes: text.as_bytes().to_vec(),
            logprob: 0.0,
            top: Vec::new(),
        };
        Waiting { tokens: texts.iter().map(token).collect() }
    }

    #[test]
    fn only_tokens_whose_text_was_given_come_out() {
        for (bytes, expected) in [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 3), (9, 3)] {
            let mut waiting = waiting(&["ab", "cd", "e"]);
            assert_eq!(waiting.cut(bytes).len(), expected, "{bytes}");
            assert!(waiting.release().is_empty());
        }
        assert_eq!(waiting(&["ab", "c"]).release().len(), 2);
    }
}
