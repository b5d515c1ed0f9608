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
pub(crate) mod files;
mod index;
#[cfg(test)]
mod tests;
mod thread;

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::service::CachePolicy;
pub(crate) use blob::Key;
#[cfg(test)]
pub(crate) use blob::forge;
use files::{Files, Folder};
use index::Index;
use thread::{Outcome, Work, Wrong};

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
    hands: Hands,
    write_rate: u64,
    /// Bytes that may be written now, as of this time.
    allowance: (u64, Duration),
    error: Option<String>,
    /// Files to be deleted once the thread can take that.
    gone: Vec<String>,
    /// Held as long as this is: see [`lock`].
    _lock: Option<File>,
}

/// Who reads and writes files.
#[derive(Debug)]
enum Hands {
    Thread(Option<JoinHandle<()>>),
    /// A test, as long as this is true.
    #[cfg(test)]
    Test(Arc<AtomicBool>),
}

impl Disk {
    /// Looks through the folder. Files of other fingerprints go first where the quota is short.
    ///
    /// # Errors
    /// The folder can't be made or read, or another process has it.
    pub(crate) fn open(options: &DiskOptions) -> io::Result<Disk> {
        let lock = lock(&options.dir)?;
        let fingerprint = blob::hash(&[options.fingerprint.as_bytes()]);
        let hex: String = fingerprint[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let folder = options.dir.join(hex);
        fs::create_dir_all(&folder)?;
        let files: Arc<dyn Files> = Arc::new(Folder(folder.clone()));
        let index = Index::open(Arc::clone(&files), fingerprint, options.quota, |bytes| {
            files::make_way(&options.dir, &folder, bytes, options.quota)
        })?;
        let (work, requests) = sync_channel(QUEUE);
        let (results, outcomes) = sync_channel(2 * QUEUE);
        let builder = std::thread::Builder::new().name("cache-disk".to_owned());
        let thread =
            builder.spawn(move || thread::run(&*files, &fingerprint, &requests, &results))?;
        let hands = Hands::Thread(Some(thread));
        let (write_rate, lock) = (options.write_rate, Some(lock));
        let allowance = (burst(write_rate), Duration::ZERO);
        let (error, gone) = (None, Vec::new());
        Ok(Disk { index, work, outcomes, hands, write_rate, allowance, error, gone, _lock: lock })
    }

    /// A disk of files without a thread: the test does its work when it likes.
    #[cfg(test)]
    pub(crate) fn by_hand(
        files: Arc<dyn Files>,
        quota: u64,
        write_rate: u64,
    ) -> io::Result<(Disk, Hand)> {
        let fingerprint = blob::hash(&[b"test"]);
        let index = Index::open(Arc::clone(&files), fingerprint, quota, |_| Ok(()))?;
        let (work, requests) = sync_channel(QUEUE);
        let (results, outcomes) = sync_channel(2 * QUEUE);
        let alive = Arc::new(AtomicBool::new(true));
        let hand = Hand {
            files,
            fingerprint,
            work: requests,
            outcomes: results,
            alive: Arc::clone(&alive),
        };
        let allowance = (burst(write_rate), Duration::ZERO);
        let (hands, error, gone) = (Hands::Test(alive), None, Vec::new());
        let disk =
            Disk { index, work, outcomes, hands, write_rate, allowance, error, gone, _lock: None };
        Ok((disk, hand))
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
        self.delete_gone();
        loop {
            match self.outcomes.try_recv() {
                Ok(Outcome::Loaded(key, stored)) => return Some((key, Some(*stored))),
                Ok(Outcome::Damaged(key, wrong)) => {
                    self.forget(&key, wrong);
                    return Some((key, None));
                }
                Ok(Outcome::NotWritten(key, wrong)) => self.forget(&key, wrong),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return None,
            }
        }
    }

    /// A checkpoint is no good, nor is any other that needs the same page: whoever comes by that text next
    /// writes it anew.
    fn forget(&mut self, key: &Key, wrong: Wrong) {
        self.error = Some(wrong.why);
        let mut gone = self.index.remove(key);
        if let Some(page) = wrong.page {
            gone.extend(self.index.remove_page(&page));
        }
        self.delete(gone);
    }

    /// Whether the thread still works.
    pub(crate) fn is_alive(&self) -> bool {
        match &self.hands {
            Hands::Thread(thread) => thread.as_ref().is_some_and(|thread| !thread.is_finished()),
            #[cfg(test)]
            Hands::Test(alive) => alive.load(Ordering::Relaxed),
        }
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
        // First: a file that is written now must not be deleted by what was to go before.
        self.delete(gone);
        let work = Work::Store { key, pages, stored: Box::new(stored) };
        if self.gone.is_empty() && self.work.try_send(work).is_ok() {
            self.allowance.0 = self.allowance.0.saturating_sub(bytes);
        } else {
            let gone = self.index.remove(&key);
            self.delete(gone);
        }
    }

    fn delete(&mut self, files: Vec<String>) {
        self.gone.extend(files);
        self.delete_gone();
    }

    /// Tells the thread what to delete, unless it is behind: then another time.
    fn delete_gone(&mut self) {
        if self.gone.is_empty() {
            return;
        }
        let work = Work::Delete(std::mem::take(&mut self.gone));
        if let Err(TrySendError::Full(Work::Delete(files))) = self.work.try_send(work) {
            self.gone = files;
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

/// Does the work of the thread, one piece at a time.
#[cfg(test)]
pub(crate) struct Hand {
    files: Arc<dyn Files>,
    fingerprint: Key,
    work: Receiver<Work>,
    outcomes: SyncSender<Outcome>,
    alive: Arc<AtomicBool>,
}

#[cfg(test)]
impl Hand {
    /// Returns whether there was anything to do.
    pub(crate) fn step(&self) -> bool {
        let Ok(work) = self.work.try_recv() else { return false };
        if let Some(outcome) = thread::perform(work, &*self.files, &self.fingerprint) {
            // Nobody listens once the disk is closed; what is to be written then still is.
            let _ = self.outcomes.try_send(outcome);
        }
        true
    }

    /// From now on nothing is done any more.
    pub(crate) fn die(&self) {
        self.alive.store(false, Ordering::Relaxed);
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }
}

impl Drop for Disk {
    /// What was to be written is.
    fn drop(&mut self) {
        let thread = match &mut self.hands {
            Hands::Thread(thread) => thread.take(),
            #[cfg(test)]
            Hands::Test(_) => None,
        };
        let Some(thread) = thread else { return };
        let (closed, _) = sync_channel(1);
        loop {
            self.delete_gone();
            if self.gone.is_empty() {
                self.work = closed.clone();
            }
            if thread.is_finished() {
                break;
            }
            // Outcomes would make the thread wait if nobody took them.
            while self.outcomes.try_recv().is_ok() {}
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = thread.join();
    }
}

/// How long to wait for whoever has the folder: it may be about to leave, as an engine is whose memory is given back.
const LEAVING: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });

/// Takes the folder for this process, with all fingerprints in it: to make room, folders of others are deleted. Two
/// processes would each delete what the other's index says is there. The second goes on without a disk
/// tier, since a cache is no reason not to answer.
fn lock(dir: &Path) -> io::Result<File> {
    fs::create_dir_all(dir)?;
    let path = dir.join("lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path)?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if begun.elapsed() < LEAVING => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(TryLockError::WouldBlock) => {
                let why =
                    "another process keeps its prefix cache here; give each its own --cache-dir";
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
            }
            Err(TryLockError::Error(error)) => {
                let why = format!("{} can't be locked: {error}", path.display());
                return Err(io::Error::new(error.kind(), why));
            }
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
