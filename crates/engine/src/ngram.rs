//! Prompt lookup: proposes what followed the last time the text ended like this.
//!
//! The longest suffix of 5 down to 2 tokens that occurred before is looked up, its latest
//! occurrence wins, and what followed is proposed, beyond the end of the text by repeating itself.
//!
//! For each length one open-addressing table maps a gram to the index where it was last followed
//! by something. A table holds indices only: a gram is compared in the text itself. Adding a token
//! costs one insertion per length.

/// Lengths of the suffixes that are looked up.
const LENGTHS: std::ops::RangeInclusive<usize> = 2..=5;

/// An index over one lane's tokens.
#[derive(Clone, Debug)]
pub struct Ngram {
    tokens: Vec<u32>,
    tables: Vec<Table>,
}

/// Slots hold the index behind a gram; 0, which no gram can have, marks an empty one.
#[derive(Clone, Debug)]
struct Table {
    length: usize,
    slots: Vec<u32>,
}

impl Ngram {
    /// An empty index with room for this many tokens; more make it grow.
    pub fn with_capacity(tokens: usize) -> Ngram {
        let slots = slots_for(tokens);
        let table = |length| Table { length, slots: vec![0; slots] };
        Ngram { tokens: Vec::with_capacity(tokens), tables: LENGTHS.map(table).collect() }
    }

    /// Forgets the text, keeps the room.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.tables.iter_mut().for_each(|table| table.slots.fill(0));
    }

    /// Tokens that there is room for.
    pub fn capacity(&self) -> usize {
        self.tokens.capacity()
    }

    /// The text so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Adds tokens behind the text.
    pub fn extend(&mut self, tokens: &[u32]) {
        if slots_for(self.tokens.len() + tokens.len()) > self.tables[0].slots.len() {
            self.grow(self.tokens.len() + tokens.len());
        }
        for &token in tokens {
            // Only now is the text's end followed by something.
            self.index_end();
            self.tokens.push(token);
        }
    }

    /// Fills `out` with proposals for what comes next, or leaves it and returns `false` where the
    /// text does not end like any earlier part of it.
    pub fn propose(&self, out: &mut [u32]) -> bool {
        let end = self.tokens.len();
        let hashes = suffix_hashes(&self.tokens);
        let longest_first = self.tables.iter().zip(hashes).rev();
        let found =
            longest_first.filter(|(table, _)| table.length <= end).find_map(|(table, hash)| {
                match table.slots[table.find(&self.tokens, hash)] {
                    0 => None,
                    next => Some(next as usize),
                }
            });
        let Some(next) = found else { return false };
        for i in 0..out.len() {
            out[i] = match self.tokens.get(next + i) {
                Some(&token) => token,
                None => out[next + i - end],
            };
        }
        true
    }

    /// Notes that each suffix of the text occurred at its end.
    fn index_end(&mut self) {
        let hashes = suffix_hashes(&self.tokens);
        for (table, hash) in self.tables.iter_mut().zip(hashes) {
            if table.length <= self.tokens.len() {
                let slot = table.find(&self.tokens, hash);
                table.slots[slot] = self.tokens.len() as u32;
            }
        }
    }

    fn grow(&mut self, tokens: usize) {
        let text = std::mem::replace(self, Ngram::with_capacity(tokens.next_power_of_two())).tokens;
        self.extend(&text);
    }
}

impl Table {
    /// The slot of the text's last gram: its own, or the empty one where it would go.
    fn find(&self, text: &[u32], hash: u32) -> usize {
        let gram = &text[text.len() - self.length..];
        let mask = self.slots.len() - 1;
        let mut slot = hash as usize & mask;
        loop {
            let next = self.slots[slot] as usize;
            if next == 0 || &text[next - self.length..next] == gram {
                return slot;
            }
            slot = (slot + 1) & mask;
        }
    }
}

/// A power of two that this many grams fill to a half at most.
fn slots_for(tokens: usize) -> usize {
    (2 * tokens).next_power_of_two().max(16)
}

/// Hashes of the suffixes of 2, 3, 4 and 5 tokens, as far as the text has them.
fn suffix_hashes(text: &[u32]) -> [u32; 4] {
    let mut hashes = [0; 4];
    let mut hash = 0x9E37_79B9_7F4A_7C15u64;
    for (i, &token) in text.iter().rev().take(*LENGTHS.end()).enumerate() {
        hash = (hash ^ u64::from(token)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        hash ^= hash >> 32;
        if i > 0 {
            hashes[i - 1] = hash as u32;
        }
    }
    hashes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposed(text: &[u32], n: usize) -> Option<Vec<u32>> {
        let mut index = Ngram::with_capacity(text.len());
        index.extend(text);
        let mut out = vec![u32::MAX; n];
        index.propose(&mut out).then_some(out)
    }

    /// The definition: longest suffix first, then the latest earlier end.
    fn naive(text: &[u32], n: usize) -> Option<Vec<u32>> {
        for length in LENGTHS.rev().filter(|&length| length < text.len()) {
            let suffix = &text[text.len() - length..];
            let ends = (length..text.len()).rev();
            if let Some(end) = ends.into_iter().find(|&end| &text[end - length..end] == suffix) {
                let mut all = text.to_vec();
                (0..n).for_each(|i| all.push(all[end + i]));
                return Some(all[text.len()..].to_vec());
            }
        }
        None
    }

    #[test]
    fn proposes_what_followed() {
        assert_eq!(proposed(&[1, 2, 3, 4, 9, 1, 2], 2), Some(vec![3, 4]));
        assert_eq!(proposed(&[1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1), Some(vec![4]), "the latest");
        assert_eq!(proposed(&[7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1), Some(vec![3]), "the longest");
        assert_eq!(proposed(&[5, 6, 5, 6], 5), Some(vec![5, 6, 5, 6, 5]), "beyond the end");
        assert_eq!(proposed(&[4, 4, 4], 3), Some(vec![4, 4, 4]));
        for short in [&[][..], &[1], &[1, 2], &[1, 2, 3, 1]] {
            assert_eq!(proposed(short, 3), None);
        }
    }

    #[test]
    fn agrees_with_a_search_of_the_text() {
        let mut state = 1u64;
        for round in 0..300 {
            let vocab = 2 + round % 7;
            let text: Vec<u32> = (0..round % 90)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    ((state >> 33) % vocab) as u32
                })
                .collect();
            assert_eq!(proposed(&text, 7), naive(&text, 7), "{text:?}");
        }
    }

    #[test]
    fn grows_clears_and_never_allocates_within_its_room() {
        let text: Vec<u32> = (0..5000).map(|i| i * i % 97).collect();
        let mut grown = Ngram::with_capacity(0);
        text.chunks(7).for_each(|part| grown.extend(part));
        let mut roomy = Ngram::with_capacity(text.len());
        let room = |index: &Ngram| {
            let tables = index.tables.iter().map(|t| (t.slots.as_ptr(), t.slots.len()));
            (index.tokens.as_ptr(), index.tokens.capacity(), tables.collect::<Vec<_>>())
        };
        let before = room(&roomy);
        roomy.extend(&[1, 2, 3, 1, 2]);
        roomy.clear();
        assert!(!roomy.propose(&mut [0; 3]));
        text.iter().for_each(|&token| roomy.extend(&[token]));
        assert_eq!(room(&roomy), before);
        let (mut a, mut b) = ([0; 9], [0; 9]);
        assert!(grown.propose(&mut a) && roomy.propose(&mut b));
        assert_eq!(a, b);
        assert_eq!(grown.tokens(), text);
    }
}
