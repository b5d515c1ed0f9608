//! Who proposes.

use std::fmt::Debug;

use crate::ngram::Ngram;

/// A drafter on the host: it sees the tokens so far and proposes what may follow. Its proposals are
/// point masses, so any of them, even wrong on purpose, leaves the output's law unchanged.
pub trait HostDrafter: Debug + Send {
    /// For reports.
    fn name(&self) -> &'static str;

    /// Starts over with these tokens.
    fn reset(&mut self, tokens: &[u32]);

    /// Takes note of emitted tokens.
    fn extend(&mut self, tokens: &[u32]);

    /// Writes up to `out.len()` proposals for the tokens after those seen, and returns how many.
    fn propose(&mut self, out: &mut [u32]) -> usize;

    /// One of the same kind for another lane, which has seen nothing yet.
    fn another(&self) -> Box<dyn HostDrafter>;
}

/// Where a round's proposals come from.
#[derive(Debug)]
pub enum Drafter {
    /// Nothing is proposed: plain decoding.
    None,
    /// The DFlash draft on the device.
    DFlash,
    /// Drafters on the host, one for each slot. An engine makes those that are missing.
    Host(Vec<Box<dyn HostDrafter>>),
}

impl Drafter {
    /// For reports.
    pub fn name(&self) -> &'static str {
        match self {
            Drafter::None => "none",
            Drafter::DFlash => "dflash",
            Drafter::Host(drafters) => drafters.first().map_or("none", |drafter| drafter.name()),
        }
    }

    /// The draft, if it is what proposes.
    pub(crate) fn on_device<T>(&self, draft: Option<T>) -> Option<T> {
        draft.filter(|_| matches!(self, Drafter::DFlash))
    }

    /// A drafter on the host.
    pub fn host(drafter: Box<dyn HostDrafter>) -> Drafter {
        Drafter::Host(vec![drafter])
    }

    /// Enough of them for so many slots. A list without any proposes nothing.
    pub(crate) fn for_slots(self, slots: usize) -> Drafter {
        match self {
            Drafter::Host(drafters) if drafters.is_empty() => Drafter::None,
            Drafter::Host(mut drafters) => {
                while drafters.len() < slots {
                    drafters.push(drafters[0].another());
                }
                Drafter::Host(drafters)
            }
            other => other,
        }
    }
}

impl HostDrafter for Ngram {
    fn name(&self) -> &'static str {
        "ngram"
    }

    fn reset(&mut self, tokens: &[u32]) {
        self.clear();
        Ngram::extend(self, tokens);
    }

    fn extend(&mut self, tokens: &[u32]) {
        Ngram::extend(self, tokens);
    }

    fn propose(&mut self, out: &mut [u32]) -> usize {
        if Ngram::propose(self, out) { out.len() } else { 0 }
    }

    fn another(&self) -> Box<dyn HostDrafter> {
        Box::new(Ngram::with_capacity(self.capacity()))
    }
}
