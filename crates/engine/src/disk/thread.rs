//! Reads and writes files, one after the other.

use std::sync::mpsc::{Receiver, SyncSender};

use super::Stored;
use super::blob::{self, Key, Kind};
use super::files::Files;
use super::index::{parse_state, state_payload};

/// Threads that read a checkpoint's pages, at most.
const READERS: usize = 8;

pub(crate) enum Work {
    Load { key: Key, pages: Vec<Key> },
    Store { key: Key, pages: Vec<Key>, stored: Box<Stored> },
    Delete(Vec<String>),
}

#[derive(Debug)]
pub(crate) enum Outcome {
    Loaded(Key, Box<Stored>),
    Damaged(Key, Wrong),
    NotWritten(Key, Wrong),
}

/// What was wrong with a checkpoint's files.
#[derive(Debug)]
pub(crate) struct Wrong {
    /// The page whose file it was, which other checkpoints may need as well; `None` for its own.
    pub(crate) page: Option<Key>,
    pub(crate) why: String,
}

pub(super) fn run(
    files: &dyn Files,
    fingerprint: &Key,
    work: &Receiver<Work>,
    outcomes: &SyncSender<Outcome>,
) {
    for work in work {
        let outcome = perform(work, files, fingerprint);
        if outcome.is_some_and(|outcome| outcomes.send(outcome).is_err()) {
            return;
        }
    }
}

/// Does a piece of work. Returns what there is to tell of it.
pub(super) fn perform(work: Work, files: &dyn Files, fingerprint: &Key) -> Option<Outcome> {
    match work {
        Work::Load { key, pages } => Some(match load(files, fingerprint, &key, &pages) {
            Ok(stored) => Outcome::Loaded(key, Box::new(stored)),
            Err(wrong) => Outcome::Damaged(key, wrong),
        }),
        Work::Store { key, pages, stored } => {
            let wrong = store(files, fingerprint, &key, &pages, &stored).err()?;
            Some(Outcome::NotWritten(key, wrong))
        }
        Work::Delete(names) => {
            names.iter().for_each(|name| files.remove(name));
            None
        }
    }
}

fn load(files: &dyn Files, fingerprint: &Key, key: &Key, pages: &[Key]) -> Result<Stored, Wrong> {
    let own = |why: String| Wrong { page: None, why };
    let payload = blob::read(files, Kind::State, key).map_err(own)?;
    let state = parse_state(payload, fingerprint)
        .ok_or_else(|| own("a checkpoint of another kind".to_owned()))?;
    let pages = read_pages(files, pages)?;
    files.touch(&blob::name(Kind::State, key));
    Ok(Stored { pages, ..state })
}

/// Pages' bytes, in order. Several threads read: a long text has thousands of megabytes of them, and
/// somebody waits.
fn read_pages(files: &dyn Files, pages: &[Key]) -> Result<Vec<Option<Vec<u8>>>, Wrong> {
    let read = |page: &Key| {
        let bytes = blob::read(files, Kind::Page, page);
        bytes.map(Some).map_err(|why| Wrong { page: Some(*page), why })
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let each = pages.len().div_ceil((cores / 2).clamp(1, READERS)).max(1);
    let mut parts = pages.chunks(each);
    let own = parts.next().unwrap_or(&[]);
    std::thread::scope(|scope| {
        let others: Vec<_> = parts
            .map(|part| scope.spawn(move || part.iter().map(read).collect::<Result<Vec<_>, _>>()))
            .collect();
        let mut all: Vec<_> = own.iter().map(read).collect::<Result<_, _>>()?;
        for other in others {
            let panicked = |_| Wrong { page: None, why: "a reading thread panicked".to_owned() };
            all.extend(other.join().map_err(panicked)??);
        }
        Ok(all)
    })
}

fn store(
    files: &dyn Files,
    fingerprint: &Key,
    key: &Key,
    pages: &[Key],
    stored: &Stored,
) -> Result<(), Wrong> {
    let wrong = |page: Option<Key>| {
        let place = files.place("");
        move |error: std::io::Error| Wrong { page, why: format!("{place}: {error}") }
    };
    for (key, page) in pages.iter().zip(&stored.pages) {
        if let Some(page) = page {
            blob::write(files, Kind::Page, key, page).map_err(wrong(Some(*key)))?;
        }
    }
    let state = state_payload(fingerprint, stored);
    blob::write(files, Kind::State, key, &state).map_err(wrong(None))
}
