//! A folder of files that are written as a whole or not at all: the seam at which tests put a disk of their own.

use std::fmt::Debug;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A file in the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// When it was last used.
    pub(crate) used: SystemTime,
}

/// See the module.
pub(crate) trait Files: Debug + Send + Sync {
    /// Where they are, for people.
    fn place(&self, name: &str) -> String;
    /// All of them.
    fn list(&self) -> io::Result<Vec<Listed>>;
    /// The first bytes of a file, at most so many.
    fn read(&self, name: &str, most: usize) -> io::Result<Vec<u8>>;
    /// Writes a file, of parts one after the other.
    fn write(&self, name: &str, parts: &[&[u8]]) -> io::Result<()>;
    /// Deletes a file. What can't be deleted is found again at the next start.
    fn remove(&self, name: &str);
    /// Notes that a file was used, so that the least recently used goes first after the next start as well.
    fn touch(&self, name: &str);
}

/// A folder.
#[derive(Debug)]
pub(super) struct Folder(pub(super) PathBuf);

impl Folder {
    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Files for Folder {
    fn place(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn list(&self) -> io::Result<Vec<Listed>> {
        let mut all = Vec::new();
        for file in fs::read_dir(&self.0)? {
            let file = file?;
            let (meta, name) = (file.metadata()?, file.file_name());
            let used = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            all.push(Listed { name: name.to_string_lossy().into_owned(), bytes: meta.len(), used });
        }
        Ok(all)
    }

    fn read(&self, name: &str, most: usize) -> io::Result<Vec<u8>> {
        let file = File::open(self.path(name))?;
        let length = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX).min(most);
        let mut bytes = Vec::new();
        // What the system says of a file's length need not be true.
        bytes.try_reserve_exact(length)?;
        file.take(most as u64).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn write(&self, name: &str, parts: &[&[u8]]) -> io::Result<()> {
        let path = self.path(name);
        let draft = path.with_extension("tmp");
        let written = write_all(&draft, parts).and_then(|()| fs::rename(&draft, &path));
        if written.is_err() {
            // Half a file takes room where there may be none.
            let _ = fs::remove_file(&draft);
        }
        written
    }

    fn remove(&self, name: &str) {
        let _ = fs::remove_file(self.path(name));
    }

    fn touch(&self, name: &str) {
        let file = File::options().append(true).open(self.path(name));
        let _ = file.and_then(|file| file.set_modified(SystemTime::now()));
    }
}

fn write_all(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let mut file = File::create(path)?;
    parts.iter().try_for_each(|part| file.write_all(part))
}

/// Folders beside `own`, of other fingerprints, are deleted, oldest first, as long as all together take more
/// than the quota.
pub(super) fn make_way(dir: &Path, own: &Path, own_bytes: u64, quota: u64) -> io::Result<()> {
    let mut others = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let ours = name.len() == 16 && name.bytes().all(|b| b.is_ascii_hexdigit());
        if path != own && ours && path.is_dir() {
            let used = fs::metadata(&path).and_then(|meta| meta.modified());
            let files = fs::read_dir(&path)?.flatten();
            let bytes: u64 = files.filter_map(|f| f.metadata().ok()).map(|m| m.len()).sum();
            others.push((used.unwrap_or(SystemTime::UNIX_EPOCH), path, bytes));
        }
    }
    others.sort();
    let mut all = own_bytes + others.iter().map(|(.., bytes)| bytes).sum::<u64>();
    for (_, path, bytes) in others {
        if all <= quota {
            break;
        }
        // What can't be deleted is not ours to worry about.
        let _ = fs::remove_dir_all(path);
        all -= bytes;
    }
    Ok(())
}
