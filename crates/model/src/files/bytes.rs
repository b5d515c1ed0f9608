//! The bytes of a file, shared.

use std::fs::File;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

#[cfg(unix)]
use memmap2::UncheckedAdvice;
use memmap2::{Advice, Mmap};

use crate::LoadError;

/// A whole file, mapped or in memory. Cloning shares it.
#[derive(Clone)]
pub struct Bytes(Arc<Inner>);

enum Inner {
    Mapped(Mmap),
    Memory(Vec<u8>),
}

impl Bytes {
    /// Maps a file for reading.
    pub(super) fn map(path: &Path) -> Result<Bytes, LoadError> {
        let io = |e| LoadError::io(path, &e);
        let file = File::open(path).map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            return Err(LoadError::new(path, "file", "a regular file", "something else"));
        }
        // SAFETY: the map is private and only read. Another process that cuts the file short while
        // we read it makes the system end ours (SIGBUS); `open` documents that nobody may.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Bytes(Arc::new(Inner::Mapped(map))))
    }

    pub(super) fn advise_sequential(&self) {
        if let Inner::Mapped(map) = &*self.0 {
            // Advice changes speed only, so a system that refuses it does no harm.
            let _ = map.advise(Advice::Sequential);
        }
    }

    /// Gives a mapped file's pages back; what is read again comes from the file again.
    pub(super) fn release(&self) {
        #[cfg(unix)]
        if let Inner::Mapped(map) = &*self.0 {
            // SAFETY: dropping pages loses only what was written to them, and this map of a file is
            // read-only.
            let _ = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
        }
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Bytes {
        Bytes(Arc::new(Inner::Memory(bytes)))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &*self.0 {
            Inner::Mapped(map) => map,
            Inner::Memory(bytes) => bytes,
        }
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}
