//! The prefix cache's disk tier, at work.
//!
//! Checkpoints go to disk while nothing else is to be done, and otherwise a few pages at a time now and
//! then. A job whose prompt the disk knows better than memory waits for its checkpoint, while the
//! others go on.

use std::collections::VecDeque;
use std::time::Duration;

use ops::PAGE_TOKENS;

use super::job::{Job, Phase};
use super::{Core, Lost, Machine};
use crate::cache::{CheckpointId, Parts};
use crate::disk::{Disk, Key, Stored};
use crate::service::CachePolicy;

/// Checkpoints that may wait to be written; more are left out, the oldest first.
const BACKLOG: usize = 256;
/// Bytes that are read from the device at once.
const PIECE: usize = 8 << 20;
/// Time between two pieces while lanes compute.
const BETWEEN: Duration = Duration::from_millis(100);

/// What goes to disk and comes from there.
pub(super) struct Tier {
    pub(super) disk: Disk,
    /// Serial numbers of checkpoints to be written.
    backlog: VecDeque<u64>,
    underway: Option<Underway>,
    arriving: Option<Arriving>,
    /// Rounds when its last piece was written.
    arrived_in: u64,
    last_piece: Duration,
    /// Serial numbers of checkpoints that came from disk.
    loaded: Vec<u64>,
}

/// A checkpoint that is being written.
struct Underway {
    serial: u64,
    parts: Parts,
    stored: Stored,
    /// Which pages the disk has.
    known: Vec<bool>,
}

/// A checkpoint that comes from disk, on its way to the device.
struct Arriving {
    key: Key,
    text: Vec<u32>,
    exact_until: usize,
    state: Vec<u8>,
    /// The pages' bytes, and where they go; the first so many are there.
    pages: Vec<Vec<u8>>,
    own: Vec<u32>,
    written: usize,
    snapshot: u32,
}

impl Tier {
    pub(super) fn new(disk: Disk) -> Tier {
        Tier {
            disk,
            backlog: VecDeque::new(),
            underway: None,
            arriving: None,
            arrived_in: 0,
            last_piece: Duration::ZERO,
            loaded: Vec::new(),
        }
    }
}

impl<M: Machine> Core<M> {
    /// Asks the disk for a checkpoint, if it has a better one than memory.
    pub(super) fn ask_disk(&mut self, job: &mut Job, cached: usize) {
        let policy = self.policy(&job.request);
        let Some(tier) = self.tier.as_mut().filter(|_| policy != CachePolicy::Off) else { return };
        let found = tier.disk.find(&job.request.prompt, policy);
        let Some((key, len)) = found.filter(|&(_, len)| len >= cached + PAGE_TOKENS) else {
            return;
        };
        let underway = self.waiting.iter().any(|job| job.loading == Some((key, len)));
        if underway || tier.disk.load(key) {
            job.loading = Some((key, len));
            job.remaining = job.request.prompt.len() - len;
        }
    }

    /// Takes in what came from disk, a piece at a time, and a piece between two rounds at most. Returns whether there
    /// was anything.
    pub(super) fn poll_disk(&mut self) -> Result<bool, Lost> {
        let decoding = self.lanes.iter().flatten().any(|running| running.phase == Phase::Decode);
        let rounds = self.stats.rounds;
        let Some(tier) = &mut self.tier else { return Ok(false) };
        if decoding && tier.arrived_in == rounds {
            return Ok(false);
        }
        if let Some(arriving) = tier.arriving.take() {
            return self.install(arriving).map(|()| true);
        }
        let alive = tier.disk.is_alive();
        let Some((key, stored)) = tier.disk.poll() else {
            if !alive {
                self.waiting.iter_mut().for_each(|job| job.loading = None);
            }
            return Ok(false);
        };
        match stored.and_then(|stored| self.make_room(key, stored)) {
            Some(arriving) => self.install(arriving)?,
            None => self.arrived(key),
        }
        Ok(true)
    }

    /// Jobs that waited for a checkpoint can go on, with it or without.
    fn arrived(&mut self, key: Key) {
        let waited = |job: &&mut Job| job.loading.is_some_and(|(of, _)| of == key);
        self.waiting.iter_mut().filter(waited).for_each(|job| job.loading = None);
    }

    /// Finds room for what came from disk, if it is wanted and there is some.
    fn make_room(&mut self, key: Key, stored: Stored) -> Option<Arriving> {
        let Stored { text, exact_until, snapshot: state, pages, tail } = stored;
        let tail = (!tail.is_empty()).then_some(tail);
        let pages: Vec<Vec<u8>> = pages.into_iter().flatten().chain(tail).collect();
        let sized = pages.iter().all(|page| page.len() == self.limits.page_bytes)
            && pages.len() == text.len().div_ceil(PAGE_TOKENS)
            && state.len() == self.limits.snapshot_bytes;
        if !sized || self.cache.has(&text, text.len() <= exact_until) {
            return None;
        }
        let snapshot = self.cache.reserve(&mut self.pages)?;
        let Some(own) = self.take_pages(pages.len(), None) else {
            self.cache.give_back(snapshot);
            return None;
        };
        Some(Arriving { key, text, exact_until, state, pages, own, written: 0, snapshot })
    }

    /// Writes a piece of what came from disk to the device, and makes a checkpoint of it after the last one.
    fn install(&mut self, mut arriving: Arriving) -> Result<(), Lost> {
        let mut bytes = 0;
        while arriving.written < arriving.own.len() && bytes < self.rules.arrival {
            let page = &arriving.pages[arriving.written];
            self.machine.write_page(arriving.own[arriving.written], page);
            (arriving.written, bytes) = (arriving.written + 1, bytes + page.len());
        }
        if let Some(tier) = &mut self.tier {
            tier.arrived_in = self.stats.rounds;
            if arriving.written < arriving.own.len() {
                tier.arriving = Some(arriving);
                return Ok(());
            }
        }
        let Arriving { key, text, exact_until, state, own, snapshot, .. } = arriving;
        self.machine.write_snapshot(snapshot, &state);
        let synced = self.machine.sync();
        // Somebody may have computed it meanwhile.
        if synced.is_ok() && !self.cache.has(&text, text.len() <= exact_until) {
            let serial = self.cache.insert(&text, &own, exact_until, snapshot, &mut self.pages);
            self.taken += 1;
            if let Some(tier) = &mut self.tier {
                tier.loaded.retain(|&serial| self.cache.exists(serial));
                tier.loaded.push(serial);
            }
        } else {
            self.cache.give_back(snapshot);
        }
        own.into_iter().for_each(|page| self.pages.release(page));
        self.arrived(key);
        synced.or_else(|error| self.note_failure(error))
    }

    /// What is arriving does so no more; whoever waits for it goes on without.
    pub(super) fn drop_arriving(&mut self) {
        let arriving = self.tier.as_mut().and_then(|tier| tier.arriving.take());
        let Some(Arriving { key, own, snapshot, .. }) = arriving else { return };
        self.cache.give_back(snapshot);
        own.into_iter().for_each(|page| self.pages.release(page));
        self.arrived(key);
    }

    /// Pages of what is arriving.
    #[cfg(test)]
    pub(super) fn arriving_pages(&self) -> Vec<u32> {
        let arriving = self.tier.iter().filter_map(|tier| tier.arriving.as_ref());
        arriving.flat_map(|arriving| arriving.own.clone()).collect()
    }

    /// Whether a checkpoint came from disk and is gone on from for the first time.
    pub(super) fn is_from_disk(&mut self, id: CheckpointId) -> bool {
        let (serial, Some(tier)) = (self.cache.serial(id), &mut self.tier) else { return false };
        let before = tier.loaded.len();
        tier.loaded.retain(|&loaded| Some(loaded) != serial);
        tier.loaded.len() < before
    }

    /// Notes a checkpoint to be written to disk.
    pub(super) fn note_for_disk(&mut self, serial: u64) {
        let Some(tier) = &mut self.tier else { return };
        if tier.backlog.len() == BACKLOG {
            tier.backlog.pop_front();
        }
        tier.backlog.push_back(serial);
    }

    /// Whether a piece may go to disk although lanes compute.
    pub(super) fn persist_is_due(&self, now: Duration) -> bool {
        self.tier.as_ref().is_some_and(|tier| now >= tier.last_piece + BETWEEN)
    }

    /// What went wrong on disk last.
    pub(crate) fn disk_error(&self) -> Option<&str> {
        self.tier.as_ref().and_then(|tier| tier.disk.error())
    }

    /// Whether a job waits for the disk.
    pub(crate) fn waits_for_disk(&self) -> bool {
        self.waiting.iter().any(|job| job.loading.is_some())
    }

    /// Whether anything is still to be written.
    pub(crate) fn has_backlog(&self) -> bool {
        self.tier.as_ref().is_some_and(|t| t.underway.is_some() || !t.backlog.is_empty())
    }

    /// Reads a piece of a checkpoint for the disk. Returns whether there was anything to do.
    pub(super) fn persist(&mut self, now: Duration) -> Result<bool, Lost> {
        let Some(tier) = &mut self.tier else { return Ok(false) };
        tier.last_piece = now;
        let underway = match tier.underway.take() {
            // Its pages may belong to others by now.
            Some(underway) if !self.cache.exists(underway.serial) => return Ok(true),
            Some(underway) => underway,
            None => match self.next_underway(now) {
                Some(underway) => underway,
                None => return Ok(false),
            },
        };
        self.persist_piece(underway)?;
        Ok(true)
    }

    fn next_underway(&mut self, now: Duration) -> Option<Underway> {
        let tier = self.tier.as_mut()?;
        while let Some(&serial) = tier.backlog.front() {
            let parts = self.cache.parts(serial);
            let new = parts.filter(|p| !tier.disk.has(&p.text, p.exact_until));
            let Some(parts) = new else {
                tier.backlog.pop_front();
                continue;
            };
            let known = tier.disk.has_pages(&parts.text, parts.exact_until);
            let missing = known.iter().filter(|known| !**known).count() + 1;
            let bytes = missing * self.limits.page_bytes + self.limits.snapshot_bytes;
            if !tier.disk.may_write(bytes as u64, now) {
                return None;
            }
            tier.backlog.pop_front();
            let (text, exact_until) = (parts.text.clone(), parts.exact_until);
            let stored = Stored { text, exact_until, ..Stored::default() };
            return Some(Underway { serial, parts, stored, known });
        }
        None
    }

    fn persist_piece(&mut self, mut underway: Underway) -> Result<(), Lost> {
        let Underway { parts, stored, known, .. } = &mut underway;
        let mut read = 0;
        while stored.pages.len() < parts.pages.len() && read < PIECE {
            let at = stored.pages.len();
            let page = (!known[at]).then(|| {
                let mut bytes = Vec::with_capacity(self.limits.page_bytes);
                self.machine.read_page(parts.pages[at], &mut bytes);
                read += bytes.len();
                bytes
            });
            stored.pages.push(page);
        }
        let whole = stored.pages.len() == parts.pages.len();
        if whole {
            if let Some(page) = parts.tail_page {
                self.machine.read_page(page, &mut stored.tail);
            }
            self.machine.read_snapshot(parts.snapshot, &mut stored.snapshot);
        }
        if let Err(error) = self.machine.sync() {
            return self.note_failure(error);
        }
        if let Some(tier) = &mut self.tier {
            if whole {
                tier.disk.store(underway.stored);
            } else {
                tier.underway = Some(underway);
            }
        }
        Ok(())
    }
}
