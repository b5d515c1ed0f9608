//! What lies in the folder.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use ops::PAGE_TOKENS;

use super::Stored;
use super::blob::{self, Key, Kind};
use super::files::Files;
use crate::service::CachePolicy;

/// Longest text of a checkpoint: what its file says about its length is not believed beyond.
const MOST_TOKENS: usize = 1 << 24;

#[derive(Debug)]
struct Entry {
    text: Vec<u32>,
    exact_until: usize,
    pages: Vec<Key>,
    bytes: u64,
    used: u64,
}

#[derive(Debug)]
struct PageFile {
    bytes: u64,
    entries: usize,
}

#[derive(Debug)]
pub(super) struct Index {
    files: Arc<dyn Files>,
    fingerprint: Key,
    quota: u64,
    entries: HashMap<Key, Entry>,
    pages: HashMap<Key, PageFile>,
    bytes: u64,
    clock: u64,
}

/// The keys of a text's full pages, of which the first may be exact.
fn page_keys(fingerprint: &Key, text: &[u32], exact_until: usize) -> Vec<Key> {
    let mut before = *fingerprint;
    let pages = text.chunks_exact(PAGE_TOKENS).enumerate();
    pages
        .map(|(i, tokens)| {
            let exact = [u8::from((i + 1) * PAGE_TOKENS <= exact_until)];
            before = blob::hash(&[&before, &exact, bytemuck::cast_slice(tokens)]);
            before
        })
        .collect()
}

impl Index {
    /// Looks through the files. `make_way` is told how many bytes they have, before the quota is looked at.
    pub(super) fn open(
        files: Arc<dyn Files>,
        fingerprint: Key,
        quota: u64,
        make_way: impl FnOnce(u64) -> io::Result<()>,
    ) -> io::Result<Index> {
        let mut index = Index {
            files,
            fingerprint,
            quota,
            entries: HashMap::new(),
            pages: HashMap::new(),
            bytes: 0,
            clock: 0,
        };
        index.scan()?;
        make_way(index.bytes)?;
        let gone = index.shrink(None);
        gone.iter().for_each(|name| index.files.remove(name));
        Ok(index)
    }

    /// Reads names, sizes and texts. Whatever belongs to no whole checkpoint is deleted.
    fn scan(&mut self) -> io::Result<()> {
        let mut sizes = HashMap::new();
        let mut states = Vec::new();
        for file in self.files.list()? {
            if let Some(key) = blob::key_of(&file.name, Kind::Page) {
                sizes.insert(key, file.bytes);
            } else if let Some(key) = blob::key_of(&file.name, Kind::State) {
                states.push((file.used, key, file.bytes));
            } else {
                self.files.remove(&file.name);
            }
        }
        states.sort_unstable();
        for (_, key, bytes) in states {
            let text = peek_text(&*self.files, &key, &self.fingerprint);
            let entry = text.map(|(text, exact_until)| {
                let pages = page_keys(&self.fingerprint, &text, exact_until);
                Entry { text, exact_until, pages, bytes, used: 0 }
            });
            match entry.filter(|entry| entry.pages.iter().all(|page| sizes.contains_key(page))) {
                Some(entry) => self.insert(key, entry, |page| sizes[page]),
                None => self.files.remove(&blob::name(Kind::State, &key)),
            }
        }
        let orphans = sizes.keys().filter(|key| !self.pages.contains_key(*key));
        orphans.for_each(|key| self.files.remove(&blob::name(Kind::Page, key)));
        Ok(())
    }

    fn insert(&mut self, key: Key, mut entry: Entry, size: impl Fn(&Key) -> u64) {
        self.clock += 1;
        entry.used = self.clock;
        self.bytes += entry.bytes;
        for page in &entry.pages {
            let file = self.pages.entry(*page).or_insert_with(|| {
                let bytes = size(page);
                self.bytes += bytes;
                PageFile { bytes, entries: 0 }
            });
            file.entries += 1;
        }
        self.entries.insert(key, entry);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn state_key(&self, text: &[u32], exact_until: usize) -> Key {
        let exact = [u8::from(text.len() <= exact_until)];
        blob::hash(&[&self.fingerprint, b"state", &exact, bytemuck::cast_slice(text)])
    }

    pub(super) fn find(&self, prompt: &[u32], policy: CachePolicy) -> Option<(Key, usize)> {
        let usable = prompt.len().saturating_sub(1);
        let fits = |entry: &Entry| {
            let len = entry.text.len();
            let as_cold = len.is_multiple_of(PAGE_TOKENS) || len == usable;
            let exact = len <= entry.exact_until && as_cold;
            let allowed = match policy {
                CachePolicy::Off => false,
                CachePolicy::Exact => exact,
                CachePolicy::Shared => true,
            };
            allowed && len <= usable && prompt.starts_with(&entry.text)
        };
        let found = self.entries.iter().filter(|(_, entry)| fits(entry));
        let longest = found.max_by_key(|(key, entry)| (entry.text.len(), entry.exact_until, **key));
        longest.map(|(key, entry)| (*key, entry.text.len()))
    }

    pub(super) fn has(&self, text: &[u32], exact_until: usize) -> bool {
        self.entries.contains_key(&self.state_key(text, exact_until))
    }

    pub(super) fn has_pages(&self, text: &[u32], exact_until: usize) -> Vec<bool> {
        let keys = page_keys(&self.fingerprint, text, exact_until);
        keys.iter().map(|key| self.pages.contains_key(key)).collect()
    }

    /// A checkpoint's pages; it counts as used.
    pub(super) fn open_entry(&mut self, key: &Key) -> Option<Vec<Key>> {
        self.clock += 1;
        let entry = self.entries.get_mut(key)?;
        entry.used = self.clock;
        Some(entry.pages.clone())
    }

    /// Makes room for a checkpoint and notes it. Returns its key, its pages' keys, and the files to
    /// delete; `None` if it can never fit or is there.
    pub(super) fn add(&mut self, stored: &Stored) -> Option<(Key, Vec<Key>, Vec<String>)> {
        let key = self.state_key(&stored.text, stored.exact_until);
        let pages = page_keys(&self.fingerprint, &stored.text, stored.exact_until);
        let payload = state_payload_bytes(stored);
        let bytes = blob::file_bytes(payload);
        let page_bytes: HashMap<Key, u64> = pages
            .iter()
            .zip(&stored.pages)
            .filter_map(|(key, page)| Some((*key, blob::file_bytes(page.as_ref()?.len()))))
            .collect();
        let missing = pages.iter().filter(|page| !self.pages.contains_key(*page));
        let new: Option<u64> = missing.map(|page| page_bytes.get(page)).sum::<Option<u64>>();
        let needed = new? + bytes;
        if needed > self.quota || self.entries.contains_key(&key) {
            return None;
        }
        let (text, exact_until) = (stored.text.clone(), stored.exact_until);
        let entry = Entry { text, exact_until, pages: pages.clone(), bytes, used: 0 };
        self.insert(key, entry, |page| page_bytes.get(page).copied().unwrap_or(0));
        let gone = self.shrink(Some(&key));
        Some((key, pages, gone))
    }

    /// Forgets checkpoints, the least recently used first, until the quota holds.
    fn shrink(&mut self, spared: Option<&Key>) -> Vec<String> {
        let mut gone = Vec::new();
        while self.bytes > self.quota {
            let others = self.entries.iter().filter(|(key, _)| Some(*key) != spared);
            let Some(oldest) = others.min_by_key(|(_, entry)| entry.used).map(|(key, _)| *key)
            else {
                break;
            };
            gone.extend(self.remove(&oldest));
        }
        gone
    }

    /// Forgets every checkpoint that needs a page. Returns the files that nobody needs any more.
    pub(super) fn remove_page(&mut self, page: &Key) -> Vec<String> {
        let entries = self.entries.iter().filter(|(_, entry)| entry.pages.contains(page));
        let keys: Vec<Key> = entries.map(|(key, _)| *key).collect();
        keys.iter().flat_map(|key| self.remove(key)).collect()
    }

    /// Forgets a checkpoint. Returns the files that nobody needs any more.
    pub(super) fn remove(&mut self, key: &Key) -> Vec<String> {
        let Some(entry) = self.entries.remove(key) else { return Vec::new() };
        self.bytes -= entry.bytes;
        let mut gone = vec![blob::name(Kind::State, key)];
        for page in &entry.pages {
            let Some(file) = self.pages.get_mut(page) else { continue };
            file.entries -= 1;
            if file.entries == 0 {
                self.bytes -= file.bytes;
                self.pages.remove(page);
                gone.push(blob::name(Kind::Page, page));
            }
        }
        gone
    }
}

/// Fingerprint, `exact_until` and length as u64, tokens; then the tail's length as u64, the tail, the
/// snapshot.
pub(super) fn state_payload(fingerprint: &Key, stored: &Stored) -> Vec<u8> {
    let mut payload = Vec::with_capacity(state_payload_bytes(stored));
    payload.extend_from_slice(fingerprint);
    payload.extend_from_slice(&(stored.exact_until as u64).to_le_bytes());
    payload.extend_from_slice(&(stored.text.len() as u64).to_le_bytes());
    payload.extend(stored.text.iter().flat_map(|token| token.to_le_bytes()));
    payload.extend_from_slice(&(stored.tail.len() as u64).to_le_bytes());
    payload.extend_from_slice(&stored.tail);
    payload.extend_from_slice(&stored.snapshot);
    payload
}

fn state_payload_bytes(stored: &Stored) -> usize {
    32 + 8 + 8 + 4 * stored.text.len() + 8 + stored.tail.len() + stored.snapshot.len()
}

/// The text of a payload, `exact_until`, and what follows.
fn text_of<'a>(payload: &'a [u8], fingerprint: &Key) -> Option<(Vec<u32>, usize, &'a [u8])> {
    let rest = payload.strip_prefix(fingerprint.as_slice())?;
    let (exact, rest) = rest.split_first_chunk::<8>()?;
    let (len, rest) = rest.split_first_chunk::<8>()?;
    let len = usize::try_from(u64::from_le_bytes(*len)).ok().filter(|&len| len <= MOST_TOKENS)?;
    let (tokens, rest) = rest.split_at_checked(4 * len)?;
    let tokens = tokens.chunks_exact(4).map(|t| u32::from_le_bytes([t[0], t[1], t[2], t[3]]));
    Some((tokens.collect(), usize::try_from(u64::from_le_bytes(*exact)).ok()?, rest))
}

pub(super) fn parse_state(mut payload: Vec<u8>, fingerprint: &Key) -> Option<Stored> {
    let (text, exact_until, rest) = text_of(&payload, fingerprint)?;
    let (tail, rest) = rest.split_first_chunk::<8>()?;
    let tail = usize::try_from(u64::from_le_bytes(*tail)).ok()?;
    let (tail, snapshot) = rest.split_at_checked(tail)?;
    let (tail, before) = (tail.to_vec(), payload.len() - snapshot.len());
    // In place: it is most of the file.
    payload.drain(..before);
    Some(Stored { text, exact_until, snapshot: payload, pages: Vec::new(), tail })
}

fn peek_text(files: &dyn Files, key: &Key, fingerprint: &Key) -> Option<(Vec<u32>, usize)> {
    let start = blob::peek(files, key, Kind::State, 48)?;
    let len = u64::from_le_bytes(*start.get(40..48)?.first_chunk()?);
    let len = usize::try_from(len).ok().filter(|&len| len <= MOST_TOKENS)?;
    let start = blob::peek(files, key, Kind::State, 48 + 4 * len)?;
    text_of(&start, fingerprint).map(|(text, exact_until, _)| (text, exact_until))
}
