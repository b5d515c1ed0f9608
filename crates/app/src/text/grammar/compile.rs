//! Grammars into matchers, within limits.
//!
//! Compiling costs milliseconds; a hostile grammar runs into a limit. What is compiled is kept, so
//! that an agent's tools are compiled once and not in every turn.

use std::collections::VecDeque;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::{Matcher, ParserFactory};
use sha2::{Digest, Sha256};
use toktrie::{InferenceCapabilities, TokEnv};

use super::GrammarError;
use super::vocabulary::Vocabulary;

/// The largest grammar, in bytes of its source.
const MAX_SOURCE: usize = 512 << 10;
/// The largest regular expression or Lark grammar of a request.
const MAX_TEXT: usize = 32 << 10;
/// How deep brackets may nest in one.
const MAX_NESTING: usize = 100;
/// Compiling recurses along a grammar's rules. Only what is touched of it costs memory.
const STACK: usize = 256 << 20;
/// How long a request waits for its grammar.
const PATIENCE: Duration = Duration::from_secs(10);
/// How many grammars are compiled at once: those that nobody waits for any more count too.
const MAX_COMPILING: usize = 4;
/// Grammars kept.
const MAX_KEPT: usize = 64;

/// What a grammar may cost. Fuel is llguidance's count of steps: 14,000 to 50,000 of them take a
/// millisecond, so the engine's thread is held for a few milliseconds at most.
fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 1_000_000,
        max_grammar_size: 200_000,
        max_items_in_row: 2_000,
        step_lexer_fuel: 50_000,
        step_max_items: 20_000,
        // At 1 to 2 kB each.
        max_lexer_states: 50_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// Compiles grammars for one tokenizer.
pub(super) struct Compiler {
    factory: Arc<ParserFactory>,
    /// The latest last.
    kept: Mutex<VecDeque<(Key, Kept)>>,
    slots: Arc<Slots>,
}

/// Keeps count of the grammars that are being compiled.
#[derive(Default)]
struct Slots {
    taken: Mutex<usize>,
    freed: Condvar,
}

/// One of the [`MAX_COMPILING`]; free again when dropped.
struct Slot(Arc<Slots>);

impl Slots {
    /// Waits for a slot, as long as a request's patience lasts: clients that arrive together with one
    /// schema each are no reason to send some of them away.
    fn take(self: &Arc<Slots>, patience: Duration) -> Option<Slot> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.freed.wait_timeout_while(taken, patience, |n| *n >= MAX_COMPILING);
        let (mut taken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            return None;
        }
        *taken += 1;
        Some(Slot(Arc::clone(self)))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.freed.notify_one();
    }
}

type Key = [u8; 32];
type Kept = Result<(Compiled, Vec<String>), GrammarError>;

/// A compiled grammar.
#[derive(Clone)]
pub(super) struct Compiled(Arc<Mutex<Matcher>>);

impl Compiled {
    /// A matcher at the grammar's beginning, which shares nothing with others: what one answer makes
    /// of its lexer counts against that answer's limit alone.
    pub(super) fn matcher(&self) -> Matcher {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()
    }
}

impl Compiler {
    pub(super) fn new(vocabulary: Arc<Vocabulary>) -> Result<Compiler, GrammarError> {
        let env: TokEnv = vocabulary;
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| GrammarError::new(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Compiler {
            factory: Arc::new(factory),
            kept: Mutex::new(VecDeque::new()),
            slots: Arc::default(),
        })
    }

    /// Compiles a grammar, or finds it; adds what it says about it to `notes`.
    pub(super) fn compile(
        &self,
        grammar: TopLevelGrammar,
        notes: &mut Vec<String>,
    ) -> Result<Compiled, GrammarError> {
        let source = serde_json::to_vec(&grammar).unwrap_or_default();
        if source.len() > MAX_SOURCE {
            return Err(GrammarError::new(format!(
                "the schemas and grammars of a request may take {} KiB, not {}",
                MAX_SOURCE >> 10,
                source.len() >> 10
            )));
        }
        let key: Key = Sha256::digest(&source).into();
        let kept = match self.find(&key) {
            Some(kept) => kept,
            None => self.compile_once(key, grammar)?,
        };
        let (compiled, warnings) = kept?;
        notes.extend(warnings);
        Ok(compiled)
    }

    fn find(&self, key: &Key) -> Option<Kept> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(known, _)| known == key)?;
        let entry = kept.remove(at)?;
        let found = entry.1.clone();
        kept.push_back(entry);
        Some(found)
    }

    fn keep(&self, key: Key, entry: Kept) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == MAX_KEPT {
            kept.pop_front();
        }
        kept.push_back((key, entry));
    }

    /// Compiles in a slot of its own what nobody compiled while this request waited for it.
    fn compile_once(&self, key: Key, grammar: TopLevelGrammar) -> Result<Kept, GrammarError> {
        let slot = self.slots.take(PATIENCE);
        if let Some(kept) = self.find(&key) {
            return Ok(kept);
        }
        let slot = slot
            .ok_or_else(|| GrammarError::busy("too many grammars are being compiled: try again"))?;
        let kept = self.compile_apart(grammar, slot)?;
        self.keep(key, kept.clone());
        Ok(kept)
    }

    /// Compiles on a thread that has stack enough and may be given up. An error here is no property
    /// of the grammar that could be kept.
    fn compile_apart(&self, grammar: TopLevelGrammar, slot: Slot) -> Result<Kept, GrammarError> {
        let (sender, receiver) = sync_channel(1);
        let factory = self.factory.clone();
        let work = move || {
            let kept = build(&factory, grammar);
            drop(slot);
            // Nobody may be waiting any more.
            let _ = sender.send(kept);
        };
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK);
        if let Err(error) = thread.spawn(work) {
            return Err(GrammarError::busy(format!("no thread to compile a grammar on: {error}")));
        }
        match receiver.recv_timeout(PATIENCE) {
            Ok(kept) => Ok(kept),
            Err(RecvTimeoutError::Timeout) => Err(GrammarError::new(format!(
                "the grammar could not be compiled within {} seconds: make it simpler",
                PATIENCE.as_secs()
            ))),
            Err(RecvTimeoutError::Disconnected) => {
                Err(GrammarError::new("the grammar could not be compiled: make it simpler"))
            }
        }
    }
}

fn build(factory: &ParserFactory, grammar: TopLevelGrammar) -> Kept {
    let failed = |error: anyhow::Error| GrammarError::new(one_line(&error.to_string()));
    let parser = factory.create_parser_from_init_default(GrammarInit::Serialized(grammar));
    let mut matcher = Matcher::new(Ok(parser.map_err(failed)?));
    if let Some(error) = matcher.get_error() {
        return Err(GrammarError::new(one_line(&error)));
    }
    let mut warnings: Vec<String> =
        matcher.grammar_warnings().iter().map(|warning| one_line(warning)).collect();
    warnings.dedup();
    // The first step shows whether the grammar allows anything, and whether steps can be undone,
    // as drafts need.
    let mut probe = matcher.deep_clone();
    let first = probe.compute_mask_or_eos().map_err(failed)?;
    if let Some(token) = first.first_bit_set() {
        let undone = probe.consume_token(token as u32).and_then(|()| probe.rollback(1));
        undone.map_err(failed)?;
    }
    Ok((Compiled(Arc::new(Mutex::new(matcher))), warnings))
}

/// Refuses text that compiling would recurse into without end.
pub(super) fn check_text(what: &str, text: &str) -> Result<(), GrammarError> {
    if text.len() > MAX_TEXT {
        return Err(GrammarError::new(format!(
            "{what} may have {} KiB, not {}",
            MAX_TEXT >> 10,
            text.len() >> 10
        )));
    }
    let (mut depth, mut deepest, mut escaped) = (0usize, 0, false);
    for c in text.chars() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    if deepest > MAX_NESTING {
        return Err(GrammarError::new(format!(
            "brackets in {what} may nest {MAX_NESTING} deep, not {deepest}"
        )));
    }
    Ok(())
}

/// A message without line breaks and without what follows it for developers.
pub(super) fn one_line(message: &str) -> String {
    let message = message.split("\n<backtrace>").next().unwrap_or(message);
    let message = message.replace("<non-verbose/>", "");
    if message.trim() == "NoExtensionBias" {
        return "nothing that this model can write obeys it".into();
    }
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(400) {
        Some((cut, _)) => format!("{}…", &line[..cut]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_waited_for_and_free_again_even_after_a_panic() {
        let slots = Arc::new(Slots::default());
        let mut held: Vec<Slot> =
            (0..MAX_COMPILING).map(|_| slots.take(Duration::ZERO).expect("a free slot")).collect();
        assert!(slots.take(Duration::from_millis(10)).is_none(), "one slot too many");
        let waiter = {
            let slots = Arc::clone(&slots);
            std::thread::spawn(move || slots.take(PATIENCE).is_some())
        };
        let slot = held.pop();
        let panicked = std::thread::spawn(move || {
            let _slot = slot;
            std::panic::resume_unwind(Box::new("a compiler's bug"));
        });
        assert!(panicked.join().is_err());
        assert!(waiter.join().expect("it waits"), "the slot was not given back");
    }
}
