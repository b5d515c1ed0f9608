//! Reads and writes files, one after the other.

use std::sync::mpsc::{Receiver, SyncSender};

use super::Stored;
use super::blob::{self, Key, Kind};
use super::files::Files;
use super::index::{parse_state, state_payload};

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
    let state = parse_state(&payload, fingerprint)
        .ok_or_else(|| own("a checkpoint of another kind".to_owned()))?;
    let read = |page: &Key| {
        let bytes = blob::read(files, Kind::Page, page);
        bytes.map(Some).map_err(|why| Wrong { page: Some(*page), why })
    };
    let pages = pages.iter().map(read).collect::<Result<_, _>>()?;
    files.touch(&blob::name(Kind::State, key));
    Ok(Stored { pages, ..state })
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
