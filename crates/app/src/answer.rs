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
        if take(&mut answer, text.as_mut(), &ids, sink)? {
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
    text: Option<&mut OutputStream<'_>>,
    ids: &[u32],
    sink: &mut dyn Sink,
) -> io::Result<bool> {
    let Some(text) = text else {
        answer.tokens.extend(ids);
        sink.write(&Delta::default(), ids)?;
        return Ok(false);
    };
    let mut joined = Delta::default();
    let before = answer.tokens.len();
    for &id in ids {
        let delta = text.push(id);
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
