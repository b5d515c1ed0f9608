//! Splits a model's output into reasoning and answer.
//!
//! A thinking model writes `<think>\n…\n</think>\n\n…`. Templates usually open the block in the
//! prompt, so the output begins inside it. Where the tags are tokens of their own, only those
//! tokens count: the same characters spelt out in the text are a mention, not markup. Where the
//! tokenizer has no such tokens, the text is searched. Line breaks next to the tags belong to the
//! markup.

/// The tag that opens a block of reasoning.
pub const OPEN: &str = "<think>";
/// The tag that closes it.
pub const CLOSE: &str = "</think>";

/// How the output begins, which the end of the rendered prompt decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The prompt opened a block of reasoning.
    Reasoning,
    /// The prompt opened and closed one: thinking is off and everything is the answer.
    Answer,
    /// The prompt says nothing; the output may open a block as its first text.
    Either,
}

impl Start {
    /// Reads how the output begins from the end of the rendered prompt.
    pub fn of_prompt(prompt: &str) -> Start {
        let end = prompt.trim_end();
        if end.ends_with(OPEN) {
            Start::Reasoning
        } else if end.ends_with(CLOSE) {
            Start::Answer
        } else {
            Start::Either
        }
    }
}

/// One of the two tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// `<think>`
    Open,
    /// `</think>`
    Close,
}

/// New text of each kind; within one delta the reasoning comes first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// What the model thinks.
    pub reasoning: String,
    /// What it answers.
    pub answer: String,
}

/// Follows an output and splits it.
#[derive(Debug)]
pub struct Splitter {
    state: State,
    tags_in_text: bool,
    /// Text that may be part of the markup.
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before any text that is not white space.
    Beginning,
    /// Just inside the block, where line breaks are dropped.
    Opened,
    Reasoning,
    /// Just after the block, where line breaks are dropped.
    Closed,
    Answer,
}

impl Splitter {
    /// Follows an output that begins as `start` says. `tags_in_text`: the tokenizer has no tokens
    /// for the tags, so they are looked for in the text.
    pub fn new(start: Start, tags_in_text: bool) -> Splitter {
        let state = match start {
            Start::Reasoning => State::Opened,
            Start::Answer => State::Answer,
            Start::Either => State::Beginning,
        };
        Splitter { state, tags_in_text, held: String::new() }
    }

    /// Takes a tag that arrived as a token; where it is not markup it is text.
    pub fn tag(&mut self, tag: Tag, out: &mut Split) {
        match (self.state, tag) {
            (State::Beginning, Tag::Open) => {
                self.held.clear();
                self.state = State::Opened;
            }
            (State::Opened | State::Reasoning, Tag::Close) => self.close("", out),
            (_, Tag::Open) => self.push(OPEN, out),
            (_, Tag::Close) => self.push(CLOSE, out),
        }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, text: &str, out: &mut Split) {
        self.held.push_str(text);
        loop {
            let moved = match self.state {
                State::Beginning => self.begin(),
                State::Opened => self.drop_line_breaks(State::Reasoning),
                State::Closed => self.drop_line_breaks(State::Answer),
                State::Reasoning => self.reason(out),
                State::Answer => {
                    out.answer.push_str(&self.held);
                    self.held.clear();
                    false
                }
            };
            if !moved {
                return;
            }
        }
    }

    /// Ends the output: what was held back is text.
    pub fn finish(&mut self, out: &mut Split) {
        match self.state {
            State::Beginning | State::Answer => out.answer.push_str(&self.held),
            State::Opened | State::Reasoning => out.reasoning.push_str(&self.held),
            State::Closed => {}
        }
        self.held.clear();
    }

    /// Whether the output was inside the block of reasoning so far.
    pub fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Opened | State::Reasoning)
    }

    /// Whether text waits for what follows to show what it is.
    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Decides what the output begins with; false while it can't be told.
    fn begin(&mut self) -> bool {
        let text = self.held.trim_start();
        if self.tags_in_text && text.len() < OPEN.len() && OPEN.starts_with(text) || text.is_empty()
        {
            return false;
        }
        match text.strip_prefix(OPEN).filter(|_| self.tags_in_text) {
            Some(rest) => {
                self.held = rest.to_owned();
                self.state = State::Opened;
            }
            None => self.state = State::Answer,
        }
        true
    }

    /// Drops line breaks next to a tag; false while there is nothing else.
    fn drop_line_breaks(&mut self, next: State) -> bool {
        let breaks = self.held.len() - self.held.trim_start_matches('\n').len();
        self.held.drain(..breaks);
        if self.held.is_empty() {
            return false;
        }
        self.state = next;
        true
    }

    /// Hands out reasoning; true when the block ended and what is held comes after it.
    fn reason(&mut self, out: &mut Split) -> bool {
        if self.tags_in_text
            && let Some(at) = self.held.find(CLOSE)
        {
            let rest = self.held.split_off(at + CLOSE.len());
            self.held.truncate(at);
            self.close(&rest, out);
            return true;
        }
        let tag = if self.tags_in_text { partial_suffix(&self.held, CLOSE) } else { 0 };
        let body = self.held[..self.held.len() - tag].trim_end_matches('\n').len();
        out.reasoning.push_str(&self.held[..body]);
        self.held.drain(..body);
        false
    }

    fn close(&mut self, rest: &str, out: &mut Split) {
        out.reasoning.push_str(self.held.trim_end_matches('\n'));
        self.held = rest.to_owned();
        self.state = State::Closed;
    }
}

/// Length of the longest end of `text` that is a beginning of `tag`, but not all of it.
fn partial_suffix(text: &str, tag: &str) -> usize {
    (1..tag.len()).rev().find(|&len| text.ends_with(&tag[..len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(start: Start, tags_in_text: bool, pieces: &[&str]) -> Split {
        let (mut splitter, mut out) = (Splitter::new(start, tags_in_text), Split::default());
        for piece in pieces {
            match *piece {
                OPEN if !tags_in_text => splitter.tag(Tag::Open, &mut out),
                CLOSE if !tags_in_text => splitter.tag(Tag::Close, &mut out),
                text => splitter.push(text, &mut out),
            }
        }
        splitter.finish(&mut out);
        out
    }

    fn split(reasoning: &str, answer: &str) -> Split {
        Split { reasoning: reasoning.into(), answer: answer.into() }
    }

    #[test]
    fn the_prompt_decides_how_the_output_begins() {
        assert_eq!(Start::of_prompt("<|im_start|>assistant\n<think>\n"), Start::Reasoning);
        assert_eq!(
            Start::of_prompt("<|im_start|>assistant\n<think>\n\n</think>\n\n"),
            Start::Answer
        );
        assert_eq!(Start::of_prompt("<|im_start|>assistant\n"), Start::Either);
    }

    #[test]
    fn output_inside_the_block() {
        for in_text in [true, false] {
            let pieces = ["\nHm.\n\nYes", ".\n", "\n", CLOSE, "\n", "\n4\n", "\n"];
            assert_eq!(
                run(Start::Reasoning, in_text, &pieces),
                split("Hm.\n\nYes.", "4\n\n"),
                "{in_text}"
            );
            assert_eq!(run(Start::Reasoning, in_text, &[CLOSE, "4"]), split("", "4"));
            assert_eq!(
                run(Start::Reasoning, in_text, &["never", " ends\n"]),
                split("never ends\n", "")
            );
        }
    }

    #[test]
    fn output_that_opens_the_block_itself() {
        for in_text in [true, false] {
            let pieces = ["\n", OPEN, "\na\n", CLOSE, "\n\nb"];
            assert_eq!(run(Start::Either, in_text, &pieces), split("a", "b"), "{in_text}");
            assert_eq!(
                run(Start::Either, in_text, &["  plain ", "text"]),
                split("", "  plain text")
            );
            assert_eq!(run(Start::Either, in_text, &["\n"]), split("", "\n"));
        }
        // Only the first text counts: later tags are text.
        assert_eq!(
            run(Start::Either, true, &["a <think>b</think>"]),
            split("", "a <think>b</think>")
        );
        assert_eq!(run(Start::Either, false, &["a", OPEN, CLOSE]), split("", "a<think></think>"));
    }

    #[test]
    fn thinking_off_leaves_the_answer_whole() {
        for in_text in [true, false] {
            let pieces = [OPEN, "x", CLOSE, "\n\ny"];
            let whole = split("", "<think>x</think>\n\ny");
            assert_eq!(run(Start::Answer, in_text, &pieces), whole, "{in_text}");
        }
    }

    #[test]
    fn spelt_out_tags_are_text_where_the_tags_are_tokens() {
        let pieces = ["I write </think> next", CLOSE, "done"];
        let expected = split("I write </think> next", "done");
        assert_eq!(run(Start::Reasoning, false, &pieces), expected);
    }

    #[test]
    fn reasoning_leaves_at_once() {
        let (mut splitter, mut out) = (Splitter::new(Start::Reasoning, true), Split::default());
        splitter.push("a</thi", &mut out);
        assert_eq!(out.reasoning, "a");
        splitter.push("s", &mut out);
        assert_eq!(out.reasoning, "a</this");
        splitter.push("\n", &mut out);
        assert_eq!(out.reasoning, "a</this");
        splitter.push("b", &mut out);
        assert_eq!(out.reasoning, "a</this\nb");
    }

    proptest! {
        #[test]
        fn no_split_changes_the_result(
            parts in proptest::collection::vec(
                prop_oneof![Just("<think>"), Just("</think>"), Just("\n"), Just("a"), Just("é <"), Just("</")],
                0..12,
            ),
            start in prop_oneof![Just(Start::Reasoning), Just(Start::Answer), Just(Start::Either)],
        ) {
            let text = parts.concat();
            let chars: Vec<String> = text.chars().map(String::from).collect();
            let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
            prop_assert_eq!(run(start, true, &chars), run(start, true, &[&text]));
            prop_assert_eq!(run(start, true, &parts), run(start, true, &[&text]));
        }
    }
}
