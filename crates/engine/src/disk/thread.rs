//! Reads and writes files, one after the other.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender};

use super::Stored;
use super::blob::{self, Key, Kind};
use super::index::{parse_state, state_payload};

pub(super) enum Work {
    Load { key: Key, pages: Vec<Key> },
    Store { key: Key, pages: Vec<Key>, stored: Box<Stored> },
    Delete(Vec<PathBuf>),
}

#[derive(Debug)]
pub(super) enum Outcome {
    Loaded(Key, Box<Stored>),
    Damaged(Key, String),
    NotWritten(Key, String),
}

pub(super) fn run(
    folder: &Path,
    fingerprint: &Key,
    work: &Receiver<Work>,
    outcomes: &SyncSender<Outcome>,
) {
    for work in work {
        let outcome = match work {
            Work::Load { key, pages } => match load(folder, fingerprint, &key, &pages) {
                Ok(stored) => Outcome::Loaded(key, Box::new(stored)),
                Err(why) => Outcome::Damaged(key, why),
            },
            Work::Store { key, pages, stored } => {
                match store(folder, fingerprint, &key, &pages, &stored) {
                    Ok(()) => continue,
                    Err(error) => {
                        let why = format!("{}: {error}", folder.display());
                        Outcome::NotWritten(key, why)
                    }
                }
            }
            Work::Delete(files) => {
                // What is left over is found at the next start.
                files.iter().for_each(|file| drop(fs::remove_file(file)));
                continue;
            }
        };
        if outcomes.send(outcome).is_err() {
            return;
        }
    }
}

fn load(folder: &Path, fingerprint: &Key, key: &Key, pages: &[Key]) -> Result<Stored, String> {
    let payload = blob::read(folder, Kind::State, key)?;
    let state = parse_state(&payload, fingerprint).ok_or("a checkpoint of another kind")?;
    let read = |page: &Key| blob::read(folder, Kind::Page, page).map(Some);
    let pages = pages.iter().map(read).collect::<Result<_, _>>()?;
    // So that the least recently used goes first after the next start as well.
    let now = std::time::SystemTime::now();
    let file = fs::File::options().append(true).open(folder.join(blob::name(Kind::State, key)));
    let _ = file.and_then(|file| file.set_modified(now));
    Ok(Stored { pages, ..state })
}

fn store(
    folder: &Path,
    fingerprint: &Key,
    key: &Key,
    pages: &[Key],
    stored: &Stored,
) -> std::io::Result<()> {
    for (key, page) in pages.iter().zip(&stored.pages) {
        if let Some(page) = page {
            blob::write(folder, Kind::Page, key, page)?;
        }
    }
    blob::write(folder, Kind::State, key, &state_payload(fingerprint, stored))
}
