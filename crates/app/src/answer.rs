//! One answer: from prompt ids to streamed text and figures.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::generate::{Event, Finish, GenerateError, GenerateOptions, Generator, Round};
use crate::summary::Figures;
use crate::text::stream::{Delta, OutputStream, StreamOptions};
use crate::text::tokenizer::Tok;

/// A finished answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// What the model thought.
    pub reasoning: String,
    /// What it answered, without the stop string.
    pub text: String,
    /// All tokens it generated, up to the one that completed a stop string.
    pub tokens: Vec<u32>,
    /// Why it ended; `None` only before it has.
    pub finish: Option<Finish>,
    /// Counts and times.
    pub figures: Figures,
}

impl Answer {
    /// One line for people: the figures, and how the answer ended unless it did by itself.
    pub fn line(&self, floor_ms_per_round: Option<f64>) -> String {
        let ending = match self.finish {
            Some(Finish::Cancelled) => " · interrupted",
            Some(Finish::Length) => " · ended at the limit of tokens",
            Some(Finish::Stop) | None => "",
        };
        self.figures.line(floor_ms_per_round) + ending
    }
}

/// Why an answer failed.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// The engine failed or refused.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The text could not be written.
    #[error("cannot write the answer: {0}")]
    Write(#[from] io::Error),
}

/// Where streamed text goes: each piece of text with the new tokens that made it.
pub trait Sink {
    /// Takes new text. Either part may be empty; `ids` are the tokens that arrived.
    fn write(&mut self, delta: &Delta, ids: &[u32]) -> io::Result<()>;
}

/// Generates one answer to `prompt` and streams it to `sink`.
///
/// Without a tokenizer there is no text, and stop strings can't be met. A stop string counts before
/// the limit of tokens: an answer that reaches both ends with "stop".
pub fn answer(
    generator: &mut dyn Generator,
    tok: Option<&dyn Tok>,
    prompt: &[u32],
    options: &GenerateOptions,
    stream: &StreamOptions,
    cancel: &AtomicBool,
    sink: &mut dyn Sink,
) -> Result<Answer, AnswerError> {
    let begun = Instant::now();
    let prefill = generator.start(prompt, options, cancel)?;
    let mut answer = Answer::default();
    answer.figures.answers = 1;
    answer.figures.prompt_tokens = prompt.len();
    answer.figures.cached_tokens = prefill.cached_tokens;
    answer.figures.prefill = begun.elapsed();
    let mut text = tok.map(|tok| OutputStream::new(tok, stream));
    let mut first = None;
    let finish = loop {
        if cancel.load(Ordering::Relaxed) {
            generator.stop();
            break Finish::Cancelled;
        }
        let event = generator.next()?;
        let now = Instant::now();
        let (ids, round) = match event {
            Event::End(finish) => break finish,
            Event::Tokens { ids, round } => (ids, round),
        };
        count(&mut answer.figures, ids.len(), round, first.is_some());
        let first = *first.get_or_insert(now);
        answer.figures.first_token = first - begun;
        answer.figures.decode = now - first;
        if take(&mut answer, tok.zip(text.as_mut()), &ids, sink)? {
            generator.stop();
            break Finish::Stop;
        }
    };
    if first.is_none() {
        answer.figures.first_token = begun.elapsed();
    }
    if let Some(mut text) = text {
        let delta = text.finish();
        let met = delta.stop.is_some();
        give(&mut answer, &delta, &[], sink)?;
        answer.finish = Some(if met { Finish::Stop } else { finish });
    } else {
        answer.finish = Some(finish);
    }
    answer.figures.output_tokens = answer.tokens.len();
    Ok(answer)
}

/// Counts a step. Its time is known only if another step came before it (`timed`): the first one
/// ends together with the prompt's pass.
fn count(figures: &mut Figures, tokens: usize, round: Option<Round>, timed: bool) {
    if timed {
        figures.decode_tokens += tokens;
    }
    if let Some(round) = round {
        figures.rounds += 1;
        figures.round_tokens += tokens;
        figures.timed_rounds += usize::from(timed);
        figures.drafted_rounds += usize::from(round.proposed > 0);
        let full = round.proposed > 0 && round.accepted == round.proposed;
        figures.full_rounds += usize::from(full);
    }
}

/// Turns new tokens into text; true when a stop string was met.
fn take(
    answer: &mut Answer,
    text: Option<(&dyn Tok, &mut OutputStream)>,
    ids: &[u32],
    sink: &mut dyn Sink,
) -> io::Result<bool> {
    let Some((tok, text)) = text else {
        answer.tokens.extend(ids);
        sink.write(&Delta::default(), ids)?;
        return Ok(false);
    };
    let mut joined = Delta::default();
    let before = answer.tokens.len();
    for &id in ids {
        let delta = text.push(tok, id);
        answer.tokens.push(id);
        joined.reasoning += &delta.reasoning;
        joined.answer += &delta.answer;
        joined.stop = delta.stop;
        if joined.stop.is_some() {
            break;
        }
    }
    let ids = answer.tokens[before..].to_vec();
    give(answer, &joined, &ids, sink)?;
    Ok(joined.stop.is_some())
}

fn give(answer: &mut Answer, delta: &Delta, ids: &[u32], sink: &mut dyn Sink) -> io::Result<()> {
    answer.reasoning += &delta.reasoning;
    answer.text += &delta.answer;
    sink.write(delta, ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::Prefill;
    use crate::terminal::Silent;
    use crate::text::detokenize::decode;
    use crate::text::reasoning::Start;
    use crate::text::tokenizer::Tokenizer;
    use std::path::Path;
    use std::sync::LazyLock;

    static TOK: LazyLock<Tokenizer> = LazyLock::new(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/th-tiny/tokenizer.json");
        Tokenizer::open(Path::new(path)).unwrap()
    });

    /// Gives its tokens in rounds of these sizes, the first one with the prompt's pass.
    struct Rounds {
        ids: Vec<u32>,
        size: usize,
        first: bool,
        left: usize,
        stopped: bool,
    }

    impl Generator for Rounds {
        fn start(
            &mut self,
            _prompt: &[u32],
            options: &GenerateOptions,
            _cancel: &AtomicBool,
        ) -> Result<Prefill, GenerateError> {
            self.left = options.max_tokens.unwrap_or(usize::MAX);
            Ok(Prefill { cached_tokens: 1 })
        }

        fn next(&mut self) -> Result<Event, GenerateError> {
            assert!(!self.stopped);
            if self.left == 0 {
                return Ok(Event::End(Finish::Length));
            }
            if self.ids.is_empty() {
                return Ok(Event::End(Finish::Stop));
            }
            let first = std::mem::replace(&mut self.first, false);
            let count = if first { 1 } else { self.size.min(self.ids.len()).min(self.left) };
            self.left -= count;
            let accepted = count as u32 - 1;
            let round = Round { proposed: self.size as u32 - 1, accepted };
            let ids = self.ids.drain(..count).collect();
            Ok(Event::Tokens { ids, round: (!first).then_some(round) })
        }

        fn stop(&mut self) {
            self.stopped = true;
        }
    }

    fn run(text: &str, size: usize, max_tokens: Option<usize>, stops: &[&str]) -> Answer {
        let ids = TOK.encode_ordinary(text).unwrap();
        let mut rounds = Rounds { ids, size, first: true, left: 0, stopped: false };
        let options = GenerateOptions { max_tokens, ..GenerateOptions::default() };
        let stops = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let stream = StreamOptions { stops, start: Start::Either, keep_special: false };
        let cancel = AtomicBool::new(false);
        let tok = Some(&*TOK as &dyn Tok);
        answer(&mut rounds, tok, &[1, 2], &options, &stream, &cancel, &mut Silent).unwrap()
    }

    #[test]
    fn a_stop_string_counts_before_the_limit() {
        let text = "The quick brown fox jumps over the lazy dog.";
        let ids = TOK.encode_ordinary(text).unwrap();
        let meets = |n: &usize| decode(&*TOK, &ids[..*n], false).contains("own fox");
        let needed = (1..=ids.len()).find(meets).unwrap();
        for size in 1..6 {
            for limit in 1..ids.len() + 2 {
                let answer = run(text, size, Some(limit), &["own fox"]);
                let (finish, expected) = match limit >= needed {
                    true => (Finish::Stop, "The quick br".to_owned()),
                    false => (Finish::Length, decode(&*TOK, &ids[..limit], false)),
                };
                assert_eq!(answer.finish, Some(finish), "{size} {limit}");
                assert_eq!(answer.text, expected, "{size} {limit}");
                assert_eq!(answer.tokens, ids[..limit.min(needed)], "{size} {limit}");
            }
        }
    }

    #[test]
    fn figures_count_what_was_measured() {
        let text = "one two three four five six seven eight";
        let answer = run(text, 3, None, &[]);
        assert_eq!((answer.text.as_str(), answer.finish), (text, Some(Finish::Stop)));
        let figures = answer.figures;
        assert_eq!((figures.prompt_tokens, figures.cached_tokens), (2, 1));
        assert_eq!((figures.output_tokens, figures.decode_tokens), (8, 7));
        // 1 + 3 + 3 + 1: three rounds, two of them accepted whole.
        assert_eq!((figures.rounds, figures.timed_rounds, figures.round_tokens), (3, 3, 7));
        assert_eq!((figures.drafted_rounds, figures.full_rounds), (3, 2));
        assert!(figures.first_token > std::time::Duration::ZERO);
    }

    #[test]
    fn an_empty_answer_has_a_time_too() {
        let answer = run("", 1, None, &["x"]);
        assert_eq!((answer.text.as_str(), answer.finish), ("", Some(Finish::Stop)));
        assert!(answer.figures.first_token > std::time::Duration::ZERO);
    }

    #[test]
    fn an_interrupted_answer_keeps_its_text() {
        struct Interrupt<'a>(&'a AtomicBool);
        impl Sink for Interrupt<'_> {
            fn write(&mut self, _delta: &Delta, _ids: &[u32]) -> io::Result<()> {
                self.0.store(true, Ordering::Relaxed);
                Ok(())
            }
        }
        let ids = TOK.encode_ordinary("one two three").unwrap();
        let mut rounds = Rounds { ids, size: 1, first: true, left: 0, stopped: false };
        let stream = StreamOptions { stops: vec![], start: Start::Answer, keep_special: false };
        let cancel = AtomicBool::new(false);
        let options = GenerateOptions::default();
        let tok = Some(&*TOK as &dyn Tok);
        let mut sink = Interrupt(&cancel);
        let answer = answer(&mut rounds, tok, &[1], &options, &stream, &cancel, &mut sink).unwrap();
        assert_eq!((answer.text.as_str(), answer.finish), ("one", Some(Finish::Cancelled)));
        assert!(rounds.stopped);
    }
}
