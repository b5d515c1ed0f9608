//! A disk in memory, which fails and decays as told.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use super::fake::Random;
use crate::disk::files::{Files, Listed};
use crate::disk::forge;

/// Files that outlive a core. What is read from them is right, or an error, unless someone harms them.
#[derive(Clone, Debug)]
pub(super) struct Memory(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// With when they were last used.
    files: BTreeMap<String, (Vec<u8>, u64)>,
    uses: u64,
    random: Random,
    fails: usize,
}

impl Memory {
    /// An empty disk, on which one in so many reads and writes fails; 0 is none.
    pub(super) fn new(seed: u64, fails: usize) -> Memory {
        let state = State { files: BTreeMap::new(), uses: 0, random: Random(seed), fails };
        Memory(Arc::new(Mutex::new(state)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panics")
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.lock().files.values().map(|(bytes, _)| bytes.len() as u64).sum()
    }

    /// Damages a file: a bit, its end, all of it, or it gets what another has.
    pub(super) fn harm(&self) {
        let state = &mut *self.lock();
        let names: Vec<String> = state.files.keys().cloned().collect();
        if names.is_empty() {
            return;
        }
        let name = &names[state.random.below(names.len())];
        let other = &names[state.random.below(names.len())];
        let stale = state.files[other].0.clone();
        let how = state.random.below(4);
        let at = state.random.next() as usize;
        let Some((bytes, _)) = state.files.get_mut(name) else { return };
        match how {
            0 if !bytes.is_empty() => {
                let at = at % bytes.len();
                bytes[at] ^= 1 << (at % 8);
            }
            1 => bytes.truncate(at % (bytes.len() + 1)),
            2 => *bytes = stale,
            _ => drop(state.files.remove(name)),
        }
    }

    /// Puts something else into a file, with a checksum that is right.
    pub(super) fn forge(&self) {
        let state = &mut *self.lock();
        let pages = state.files.keys().filter(|name| name.ends_with("page"));
        let names: Vec<String> = pages.cloned().collect();
        let at = state.random.next() as usize;
        if let Some((bytes, _)) =
            names.get(at % names.len().max(1)).and_then(|name| state.files.get_mut(name))
            && let Some(forged) = forge(bytes, |payload| payload[at % 512] ^= 1)
        {
            *bytes = forged;
        }
    }
}

impl State {
    fn may_fail(&mut self) -> io::Result<()> {
        if self.random.one_in(self.fails) { Err(io::Error::other("as asked for")) } else { Ok(()) }
    }

    fn used(&mut self) -> u64 {
        self.uses += 1;
        self.uses
    }
}

impl Files for Memory {
    fn place(&self, name: &str) -> String {
        format!("memory/{name}")
    }

    fn list(&self) -> io::Result<Vec<Listed>> {
        let state = &mut *self.lock();
        state.may_fail()?;
        let listed = |(name, (bytes, used)): (&String, &(Vec<u8>, u64))| Listed {
            name: name.clone(),
            bytes: bytes.len() as u64,
            used: SystemTime::UNIX_EPOCH + Duration::from_secs(*used),
        };
        Ok(state.files.iter().map(listed).collect())
    }

    fn read(&self, name: &str, most: usize) -> io::Result<Vec<u8>> {
        let state = &mut *self.lock();
        state.may_fail()?;
        let (bytes, _) = state.files.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(bytes[..bytes.len().min(most)].to_vec())
    }

    fn write(&self, name: &str, parts: &[&[u8]]) -> io::Result<()> {
        let state = &mut *self.lock();
        let (bytes, used) = (parts.concat(), state.used());
        if let Err(error) = state.may_fail() {
            // As far as it came, under the name that a file has until it is whole.
            let came = state.random.below(bytes.len());
            state.files.insert(format!("{name}.tmp"), (bytes[..came].to_vec(), used));
            return Err(error);
        }
        state.files.insert(name.to_owned(), (bytes, used));
        Ok(())
    }

    fn remove(&self, name: &str) {
        self.lock().files.remove(name);
    }

    fn touch(&self, name: &str) {
        let state = &mut *self.lock();
        let now = state.used();
        if let Some((_, used)) = state.files.get_mut(name) {
            *used = now;
        }
    }
}
