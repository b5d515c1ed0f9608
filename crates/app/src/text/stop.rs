//! Stop strings in streamed text.
//!
//! The first stop string to be complete ends the text, and of those complete at the same byte the
//! one that begins first. This depends on the text alone, never on how it was cut into tokens. Text
//! is held back only while it is the beginning of some stop string: each stop string is followed by
//! a Knuth-Morris-Pratt automaton, whose state is the length of the longest such beginning.

/// Watches streamed text for stop strings.
#[derive(Debug, Default)]
pub struct StopMatcher {
    stops: Vec<Automaton>,
    /// Text that may be the beginning of a stop string.
    held: String,
    done: bool,
}

/// Whether the text may go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// No stop string yet.
    No,
    /// This stop string was met; all further text is dropped.
    At(String),
}

impl StopMatcher {
    /// Watches for `stops`; empty strings among them can't be met and are ignored.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> StopMatcher {
        let stops = stops.iter().map(AsRef::as_ref).filter(|stop: &&str| !stop.is_empty());
        StopMatcher { stops: stops.map(Automaton::new).collect(), held: String::new(), done: false }
    }

    /// Takes the next piece of text and appends to `out` what is certainly before any stop string.
    pub fn push(&mut self, text: &str, out: &mut String) -> Stopped {
        if self.done {
            return Stopped::No;
        }
        if self.stops.is_empty() {
            out.push_str(text);
            return Stopped::No;
        }
        for (index, &byte) in text.as_bytes().iter().enumerate() {
            self.stops.iter_mut().for_each(|stop| stop.step(byte));
            let met = self.stops.iter().filter(|stop| stop.complete());
            if let Some(met) = met.max_by_key(|stop| stop.text.len()) {
                let found = met.text.clone();
                self.held.push_str(&text[..=index]);
                out.push_str(&self.held[..self.held.len() - found.len()]);
                self.held.clear();
                self.done = true;
                return Stopped::At(found);
            }
        }
        self.held.push_str(text);
        let keep = self.stops.iter().map(|stop| stop.state).max().unwrap_or(0);
        let free = self.held.len() - keep;
        out.push_str(&self.held[..free]);
        self.held.drain(..free);
        Stopped::No
    }

    /// Whether the text ends with what may be the beginning of a stop string.
    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Ends the text: what was held back is no stop string after all.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
        self.done = true;
    }
}

/// One stop string and how much of it the text ends with.
#[derive(Debug)]
struct Automaton {
    text: String,
    /// For each prefix length: the longest proper prefix of it that is also its suffix.
    fallback: Vec<usize>,
    /// Length in bytes of the longest prefix of `text` with which the input ends.
    state: usize,
}

impl Automaton {
    fn new(text: &str) -> Automaton {
        let bytes = text.as_bytes();
        let mut fallback = vec![0; bytes.len() + 1];
        let mut longest = 0;
        for end in 1..bytes.len() {
            while longest > 0 && bytes[end] != bytes[longest] {
                longest = fallback[longest];
            }
            if bytes[end] == bytes[longest] {
                longest += 1;
            }
            fallback[end + 1] = longest;
        }
        Automaton { text: text.to_owned(), fallback, state: 0 }
    }

    fn step(&mut self, byte: u8) {
        let bytes = self.text.as_bytes();
        while self.state > 0 && bytes[self.state] != byte {
            self.state = self.fallback[self.state];
        }
        if bytes[self.state] == byte {
            self.state += 1;
        }
    }

    fn complete(&self) -> bool {
        self.state == self.text.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Feeds `text` in pieces; gives what came out of each piece, and the stop string met.
    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<String>) {
        let mut matcher = StopMatcher::new(stops);
        let (mut deltas, mut met) = (Vec::new(), None);
        for piece in pieces {
            let mut out = String::new();
            if let Stopped::At(stop) = matcher.push(piece, &mut out) {
                met = Some(stop);
            }
            deltas.push(out);
        }
        let mut out = String::new();
        matcher.finish(&mut out);
        deltas.push(out);
        (deltas, met)
    }

    /// The definition: try every end, and for each end the longest stop string.
    fn naive(stops: &[&str], text: &str) -> (String, Option<String>) {
        for end in 1..=text.len() {
            let head = &text.as_bytes()[..end];
            let met =
                stops.iter().filter(|stop| !stop.is_empty() && head.ends_with(stop.as_bytes()));
            if let Some(stop) = met.max_by_key(|stop| stop.len()) {
                return (text[..end - stop.len()].to_owned(), Some((*stop).to_owned()));
            }
        }
        (text.to_owned(), None)
    }

    #[test]
    fn half_a_stop_string_never_leaves() {
        let (deltas, met) = run(&["own fox"], &["The quick br", "own", " f", "ox jumps"]);
        assert_eq!(deltas, ["The quick br", "", "", "", ""]);
        assert_eq!(met.as_deref(), Some("own fox"));
    }

    #[test]
    fn held_text_is_freed_as_soon_as_it_cannot_match() {
        let (deltas, met) = run(&["own fox"], &["br", "own", " c", "ow", "n"]);
        assert_eq!(deltas, ["br", "", "own c", "", "", "own"]);
        assert_eq!(met, None);
    }

    #[test]
    fn a_stop_string_that_overlaps_itself() {
        let (deltas, met) = run(&["aab"], &["a", "a", "a", "b"]);
        assert_eq!(deltas, ["", "", "a", "", ""]);
        assert_eq!(met.as_deref(), Some("aab"));
    }

    #[test]
    fn several_stop_strings() {
        // One a prefix of another: the shorter is complete first.
        let (deltas, met) = run(&["END", "ENDING"], &["x ENDING"]);
        assert_eq!((deltas.concat().as_str(), met.as_deref()), ("x ", Some("END")));
        // One inside another: it is complete first as well.
        let (deltas, met) = run(&["abcd", "bc"], &["xab", "cd"]);
        assert_eq!((deltas.concat().as_str(), met.as_deref()), ("xa", Some("bc")));
        // One the end of another: the longer begins first.
        let (deltas, met) = run(&["bc", "abc"], &["xab", "c"]);
        assert_eq!((deltas.concat().as_str(), met.as_deref()), ("x", Some("abc")));
    }

    #[test]
    fn nothing_leaves_after_the_stop() {
        let mut matcher = StopMatcher::new(&["."]);
        let mut out = String::new();
        assert_eq!(matcher.push("a.b", &mut out), Stopped::At(".".into()));
        assert_eq!(matcher.push("c", &mut out), Stopped::No);
        matcher.finish(&mut out);
        assert_eq!(out, "a");
    }

    #[test]
    fn empty_stop_strings_and_none_at_all() {
        assert_eq!(run(&[""], &["a", "b"]), (vec!["a".into(), "b".into(), String::new()], None));
        assert_eq!(run(&[], &["ab"]), (vec!["ab".into(), String::new()], None));
    }

    proptest! {
        #[test]
        fn equals_the_definition_for_every_split(
            stops in proptest::collection::vec("[ab€]{0,5}", 0..4),
            pieces in proptest::collection::vec("[ab€c]{0,4}", 0..10),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let (deltas, met) = run(&stops, &pieces);
            let text = pieces.concat();
            prop_assert_eq!((deltas.concat(), met), naive(&stops, &text));
            // Only what may still become a stop string is held back.
            let mut sent = 0;
            for (count, delta) in deltas.iter().take(pieces.len()).enumerate() {
                sent += delta.len();
                let seen = pieces[..=count].concat();
                if naive(&stops, &seen).1.is_some() {
                    break;
                }
                let held = &seen[sent..];
                prop_assert!(held.is_empty() || stops.iter().any(|stop| stop.starts_with(held)));
            }
        }
    }
}
