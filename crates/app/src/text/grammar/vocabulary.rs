//! A tokenizer as grammars see it.

use std::sync::Arc;

use toktrie::{TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use super::GrammarError;
use crate::text::tokenizer::Tok;

/// The longest token that a grammar may use; no real one is near.
const MAX_TOKEN: usize = 250;

/// The tokens of a model, and a tree of their bytes.
pub(super) struct Vocabulary {
    tok: Arc<dyn Tok>,
    trie: TokTrie,
    stops: Vec<u32>,
    /// Ids that stand for something: the only ones ever allowed.
    existing: Vec<u32>,
}

impl Vocabulary {
    /// Sorts the tokens.
    pub(super) fn new(tok: Arc<dyn Tok>, stops: &[u32]) -> Result<Vocabulary, GrammarError> {
        let count = tok.id_count();
        let mut stops: Vec<u32> = stops.to_vec();
        stops.retain(|&id| (id as usize) < count);
        let Some(&first) = stops.first() else {
            return Err(GrammarError::new(
                "the model names no token that ends an answer, so nothing can be enforced",
            ));
        };
        let added = |id: u32| tok.added().binary_search_by_key(&id, |token| token.0).is_ok();
        let word = |id: usize| {
            let id = id as u32;
            let bytes = tok.token_bytes(id);
            match bytes.len() {
                0 | MAX_TOKEN.. => Vec::new(),
                // Markup: only a rule that names the token allows it, never text.
                _ if added(id) => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
                _ => bytes.to_vec(),
            }
        };
        let words: Vec<Vec<u8>> = (0..count).map(word).collect();
        let info = TokRxInfo::new(count as u32, first);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&stops);
        let mut existing = vec![0; count.div_ceil(32)];
        for id in (0..count).filter(|&id| !tok.token_bytes(id as u32).is_empty()) {
            existing[id / 32] |= 1 << (id % 32);
        }
        Ok(Vocabulary { tok, trie, stops, existing })
    }

    /// The tokens that end an answer; at least one.
    pub(super) fn stops(&self) -> &[u32] {
        &self.stops
    }

    /// The bytes of a token.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        self.tok.token_bytes(id)
    }

    /// Allows every token that there is.
    pub(super) fn allow_all(&self, mask: &mut [u32]) {
        copy_mask(&self.existing, mask);
    }

    /// Allows only the tokens that end an answer.
    pub(super) fn allow_stops(&self, mask: &mut [u32]) {
        mask.fill(0);
        self.stops.iter().for_each(|&stop| set(mask, stop, true));
    }

    /// Allows these tokens as far as they exist.
    pub(super) fn allow(&self, from: &[u32], mask: &mut [u32]) {
        copy_mask(from, mask);
        mask.iter_mut().zip(&self.existing).for_each(|(word, existing)| *word &= existing);
    }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            let ids = self.tok.encode_ordinary(text);
            ids.unwrap_or_else(|_| self.trie.greedy_tokenize(text.as_bytes()))
        })
    }
}

/// Whether a mask allows a token.
pub(super) fn allows(mask: &[u32], id: u32) -> bool {
    mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
}

/// Allows or forbids a token; one beyond the mask does not exist.
pub(super) fn set(mask: &mut [u32], id: u32, allowed: bool) {
    if let Some(word) = mask.get_mut(id as usize / 32) {
        let bit = 1 << (id % 32);
        *word = if allowed { *word | bit } else { *word & !bit };
    }
}

/// The engine's masks may have more words, for padding rows, or fewer.
fn copy_mask(from: &[u32], to: &mut [u32]) {
    let shared = from.len().min(to.len());
    to[..shared].copy_from_slice(&from[..shared]);
    to[shared..].fill(0);
}
