//! The disk tier of the prefix cache: checkpoints that survive a restart.
//!
//! One folder for each fingerprint of model and build. In it, one file for each full page of a text,
//! named by a hash of the text up to its end, so that checkpoints share pages here as they do in
//! memory; and one file for each checkpoint, with its tokens, its state and the page it ends in. Files
//! are written under another name and renamed, pages before the checkpoints that need them, and
//! carry a checksum: what a crash or a bad disk leaves behind is a miss, never a wrong state.
//!
//! The index lives on the engine's thread; files are read and written on another.

mod blob;
mod index;
#[cfg(test)]
mod tests;
mod thread;

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::time::Duration;

use crate::service::CachePolicy;
pub(crate) use blob::Key;
use index::Index;
use thread::{Outcome, Work};

/// Where checkpoints are kept on disk, and how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// The folder, made if need be.
    pub dir: PathBuf,
    /// The most bytes to keep there.
    pub quota: u64,
    /// The most bytes a second to write, on average.
    pub write_rate: u64,
    /// What decides the bits of a state: model, draft, build and device.
    pub fingerprint: String,
}

/// A checkpoint's bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) text: Vec<u32>,
    /// Up to where prefill passes made it.
    pub(crate) exact_until: usize,
    pub(crate) snapshot: Vec<u8>,
    /// By index; those that the disk has already may be missing when it is written.
    pub(crate) pages: Vec<Option<Vec<u8>>>,
    /// The page in which it ends; empty at a page's end.
    pub(crate) tail: Vec<u8>,
}

/// Work that may wait for the thread.
const QUEUE: usize = 64;

/// See the module.
#[derive(Debug)]
pub(crate) struct Disk {
    index: Index,
    work: SyncSender<Work>,
    outcomes: Receiver<Outcome>,
    thread: Option<std::thread::JoinHandle<()>>,
    write_rate: u64,
    /// Bytes that may be written now, as of this time.
    allowance: (u64, Duration),
    error: Option<String>,
}

impl Disk {
    /// Looks through the folder. Files of other fingerprints go first where the quota is short.
    ///
    /// # Errors
    /// The folder can't be made or read.
    pub(crate) fn open(options: &DiskOptions) -> io::Result<Disk> {
        let index = Index::open(options)?;
        let (work, requests) = sync_channel(QUEUE);
        let (results, outcomes) = sync_channel(2 * QUEUE);
        let builder = std::thread::Builder::new().name("cache-disk".to_owned());
        let folder = index.folder().to_owned();
        let fingerprint = index.fingerprint();
        let thread =
            builder.spawn(move || thread::run(&folder, &fingerprint, &requests, &results))?;
        let (write_rate, thread) = (options.write_rate, Some(thread));
        let allowance = (burst(write_rate), Duration::ZERO);
        Ok(Disk { index, work, outcomes, thread, write_rate, allowance, error: None })
    }

    /// The longest checkpoint that a prompt begins with, and its length.
    pub(crate) fn find(&self, prompt: &[u32], policy: CachePolicy) -> Option<(Key, usize)> {
        self.index.find(prompt, policy)
    }

    /// Whether there is a checkpoint of exactly this text.
    pub(crate) fn has(&self, text: &[u32], exact_until: usize) -> bool {
        self.index.has(text, exact_until)
    }

    /// Which full pages of a text the disk has.
    pub(crate) fn has_pages(&self, text: &[u32], exact_until: usize) -> Vec<bool> {
        self.index.has_pages(text, exact_until)
    }

    /// Asks for a checkpoint; [`Disk::poll`] hands it over. Returns whether it will come.
    pub(crate) fn load(&mut self, key: Key) -> bool {
        let Some(pages) = self.index.open_entry(&key) else { return false };
        self.work.try_send(Work::Load { key, pages }).is_ok()
    }

    /// A checkpoint that was asked for, or that it can't be had.
    pub(crate) fn poll(&mut self) -> Option<(Key, Option<Stored>)> {
        loop {
            match self.outcomes.try_recv() {
                Ok(Outcome::Loaded(key, stored)) => return Some((key, Some(*stored))),
                Ok(Outcome::Damaged(key, why)) => {
                    self.error = Some(why);
                    let gone = self.index.remove(&key);
                    self.delete(gone);
                    return Some((key, None));
                }
                Ok(Outcome::NotWritten(key, why)) => {
                    self.error = Some(why);
                    let gone = self.index.remove(&key);
                    self.delete(gone);
                }
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return None,
            }
        }
    }

    /// Whether the thread still works.
    pub(crate) fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Whether so many bytes may be written now.
    pub(crate) fn may_write(&mut self, bytes: u64, now: Duration) -> bool {
        let (left, since) = self.allowance;
        let more = now.saturating_sub(since).as_secs_f64() * self.write_rate as f64;
        let left = (left + more as u64).min(burst(self.write_rate));
        self.allowance = (left, now);
        // More than a burst is written at the price of a longer pause.
        left >= bytes.min(burst(self.write_rate))
    }

    /// Writes a checkpoint, unless the thread is behind. Others make room if need be.
    pub(crate) fn store(&mut self, stored: Stored) {
        let bytes = stored.bytes();
        let Some((key, pages, gone)) = self.index.add(&stored) else { return };
        self.delete(gone);
        self.allowance.0 = self.allowance.0.saturating_sub(bytes);
        let work = Work::Store { key, pages, stored: Box::new(stored) };
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.work.try_send(work)
        {
            let gone = self.index.remove(&key);
            self.delete(gone);
        }
    }

    fn delete(&mut self, files: Vec<PathBuf>) {
        if !files.is_empty() {
            // If the thread is behind, the files are found to be orphans at the next start.
            let _ = self.work.try_send(Work::Delete(files));
        }
    }

    /// Bytes on disk.
    pub(crate) fn bytes(&self) -> u64 {
        self.index.bytes()
    }

    /// What went wrong last.
    pub(crate) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }
}

impl Drop for Disk {
    /// What was to be written is.
    fn drop(&mut self) {
        let (closed, _) = sync_channel(1);
        self.work = closed;
        if let Some(thread) = self.thread.take() {
            // Outcomes would make the thread wait if nobody took them.
            while !thread.is_finished() {
                while self.outcomes.try_recv().is_ok() {}
                std::thread::sleep(Duration::from_millis(1));
            }
            let _ = thread.join();
        }
    }
}

/// The most bytes to write at once: what ten seconds allow.
fn burst(rate: u64) -> u64 {
    rate.saturating_mul(10)
}

impl Stored {
    fn bytes(&self) -> u64 {
        let pages: usize = self.pages.iter().flatten().map(Vec::len).sum();
        (pages + self.tail.len() + self.snapshot.len() + 4 * self.text.len()) as u64
    }
}
