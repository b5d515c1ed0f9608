//! Downloads: on from where they stopped, held to their checksums, named when they are whole.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::cache::Cache;
use super::client::{Client, network};
use super::listing::{Checksum, Listing, RemoteFile};
use super::name::{ModelName, Revision};
use super::{HubError, at};
use crate::generate::Progress;

/// How often in a row a connection may bring nothing before the download is given up.
const MAX_FAILURES: u32 = 5;
const BUFFER: usize = 1 << 18;

/// A download of one model.
pub struct Fetch<'a> {
    client: &'a Client,
    cache: &'a Cache,
    progress: &'a mut dyn FnMut(Progress<'_>),
    cancel: &'a AtomicBool,
    /// The wait after the first failure; it doubles.
    pub(super) patience: Duration,
    phase: String,
    done: u64,
    total: u64,
}

impl<'a> Fetch<'a> {
    /// A download into `cache`, until `cancel` becomes true.
    pub fn new(
        client: &'a Client,
        cache: &'a Cache,
        progress: &'a mut dyn FnMut(Progress<'_>),
        cancel: &'a AtomicBool,
    ) -> Fetch<'a> {
        let patience = Duration::from_secs(1);
        Fetch { client, cache, progress, cancel, patience, phase: String::new(), done: 0, total: 0 }
    }

    /// Fetches what the cache lacks of a model; gives what opens it.
    ///
    /// # Errors
    /// It can't be had.
    pub fn model(&mut self, name: &ModelName, revision: &Revision) -> Result<PathBuf, HubError> {
        let encoded = revision.as_str().replace('/', "%2F");
        let path = format!("/api/models/{}/revision/{encoded}?blobs=true", name.repo);
        let shown = match revision.as_str() {
            "main" => name.repo.to_string(),
            other => format!("{} at revision {other}", name.repo),
        };
        let listing = Listing::parse(name, &self.client.get(&shown, &path)?)?;
        let (files, opens) = listing.choose(name)?;
        self.phase = format!("fetching {name}");
        self.total = files.iter().map(|file| file.size).sum();
        let folder = self.cache.folder(&name.repo);
        let snapshot = folder.join("snapshots").join(&listing.commit);
        // A link in the place of the folder is seen before anything is written through it.
        fs::create_dir_all(&folder).map_err(at(&folder))?;
        self.cache.inside(&folder)?;
        for part in [folder.join("blobs"), snapshot.clone(), folder.join("refs")] {
            fs::create_dir_all(&part).map_err(at(&part))?;
            self.cache.inside(&part)?;
        }
        for file in &files {
            let url = format!("/{}/resolve/{}/{}", name.repo, listing.commit, encode(&file.path));
            let blob = folder.join("blobs").join(file.checksum.hex());
            self.blob(name, file, &url, &blob)?;
            self.link(file, &blob, &snapshot)?;
        }
        // Last of all, so that the model is offered only now.
        if !revision.is_commit() {
            let path = folder.join("refs").join(revision.as_str());
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent).map_err(at(parent))?;
                self.cache.inside(parent)?;
            }
            replace(&path, listing.commit.as_bytes())?;
        }
        Ok(if opens.is_empty() { snapshot } else { snapshot.join(opens) })
    }

    /// Fetches a file's contents unless they are there.
    fn blob(
        &mut self,
        name: &ModelName,
        file: &RemoteFile,
        url: &str,
        blob: &Path,
    ) -> Result<(), HubError> {
        let before = self.done;
        let there = |blob: &Path| fs::metadata(blob).is_ok_and(|kind| kind.len() == file.size);
        if !there(blob) {
            // One process at a time: others wait, and find it there.
            let lock = self.lock(name, file)?;
            lock.lock().map_err(at(blob))?;
            if !there(blob) {
                self.download(name, file, url, blob)?;
            }
        }
        self.done = before + file.size;
        self.report();
        Ok(())
    }

    fn lock(&self, name: &ModelName, file: &RemoteFile) -> Result<File, HubError> {
        let folder = self.cache.root().join(".locks").join(name.repo.folder());
        fs::create_dir_all(&folder).map_err(at(&folder))?;
        self.cache.inside(&folder)?;
        let path = folder.join(format!("{}.lock", file.checksum.hex()));
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).write(true).open(&path).map_err(at(&path))
    }

    fn download(
        &mut self,
        name: &ModelName,
        file: &RemoteFile,
        url: &str,
        blob: &Path,
    ) -> Result<(), HubError> {
        let partial = blob.with_extension("incomplete");
        let before = self.done;
        for again in [false, true] {
            self.done = before;
            let (digest, length) = self.fill(name, file, url, &partial)?;
            if digest == file.checksum.hex() {
                return fs::rename(&partial, blob).map_err(at(blob));
            }
            fs::remove_file(&partial).map_err(at(&partial))?;
            if again {
                let what = match length == file.size {
                    true => "its checksum is another".to_owned(),
                    false => format!("{length} bytes instead of {}", file.size),
                };
                return Err(HubError::Damaged {
                    file: format!("{}: {}", name.repo, file.path),
                    what,
                });
            }
        }
        Ok(())
    }

    /// Fetches a file to its end, over as many connections as it takes. Gives its checksum and its
    /// length.
    fn fill(
        &mut self,
        name: &ModelName,
        file: &RemoteFile,
        url: &str,
        partial: &Path,
    ) -> Result<(String, u64), HubError> {
        let mut options = OpenOptions::new();
        let options = options.create(true).truncate(false).read(true).write(true);
        let mut target = options.open(partial).map_err(at(partial))?;
        let mut sum = Sum::new(file);
        let mut length = self.read_back(&mut target, &mut sum).map_err(at(partial))?;
        if length > file.size {
            (sum, length) = restart(&mut target, file).map_err(at(partial))?;
        }
        self.done += length;
        self.report();
        let mut failures = 0;
        while length < file.size {
            let before = length;
            let outcome = self.client.file(&name.repo.to_string(), url, length);
            let outcome = outcome.and_then(|(start, response)| {
                if start != length {
                    self.done -= length;
                    (sum, length) = restart(&mut target, file).map_err(at(partial))?;
                }
                let mut body = response.into_body().into_reader();
                self.copy(name, &mut body, file.size, (&mut target, partial), &mut sum, &mut length)
            });
            match outcome {
                Ok(()) => break,
                Err(error @ (HubError::Network { .. } | HubError::Status { .. })) => {
                    failures = if length > before { 1 } else { failures + 1 };
                    if failures >= MAX_FAILURES {
                        return Err(error);
                    }
                    self.wait(failures)?;
                }
                Err(error) => return Err(error),
            }
        }
        target.sync_all().map_err(at(partial))?;
        Ok((sum.finish(), length))
    }

    /// Copies an answer to its end; one that stops early is an error of the network.
    fn copy(
        &mut self,
        name: &ModelName,
        body: &mut dyn Read,
        size: u64,
        (target, path): (&mut File, &Path),
        sum: &mut Sum,
        length: &mut u64,
    ) -> Result<(), HubError> {
        let mut buffer = vec![0; BUFFER];
        loop {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(HubError::Interrupted);
            }
            let count =
                body.read(&mut buffer).map_err(|error| network(&name.to_string(), &error))?;
            if count == 0 {
                return match *length < size {
                    true => Err(network(&name.to_string(), &"the connection ended early")),
                    false => Ok(()),
                };
            }
            target.write_all(&buffer[..count]).map_err(at(path))?;
            sum.update(&buffer[..count]);
            *length += count as u64;
            self.done += count as u64;
            self.report();
            // More than there is can only be something else.
            if *length > size {
                return Ok(());
            }
        }
    }

    /// Adds what is there to the checksum; gives its length.
    fn read_back(&self, target: &mut File, sum: &mut Sum) -> std::io::Result<u64> {
        let mut buffer = vec![0; BUFFER];
        let mut length = 0;
        loop {
            match target.read(&mut buffer)? {
                0 => return Ok(length),
                count => {
                    sum.update(&buffer[..count]);
                    length += count as u64;
                }
            }
        }
    }

    fn wait(&self, failures: u32) -> Result<(), HubError> {
        let mut left = self.patience * 2u32.pow(failures - 1);
        while !left.is_zero() {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(HubError::Interrupted);
            }
            let nap = left.min(Duration::from_millis(100));
            std::thread::sleep(nap);
            left -= nap;
        }
        Ok(())
    }

    fn report(&mut self) {
        let progress =
            Progress { phase: &self.phase, done_bytes: self.done, total_bytes: self.total };
        (self.progress)(progress);
    }

    /// Makes a file appear in the snapshot.
    fn link(&self, file: &RemoteFile, blob: &Path, snapshot: &Path) -> Result<(), HubError> {
        let path = snapshot.join(&file.path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(at(parent))?;
            self.cache.inside(parent)?;
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(at(&path)(error));
            }
            _ => {}
        }
        let depth = file.path.split('/').count() + 1;
        let target = "../".repeat(depth) + "blobs/" + file.checksum.hex();
        // Where there are no links, the contents are there twice.
        symlink(Path::new(&target), &path)
            .or_else(|_| fs::hard_link(blob, &path))
            .or_else(|_| fs::copy(blob, &path).map(drop))
            .map_err(at(&path))
    }
}

/// A checksum on its way.
enum Sum {
    Sha256(Sha256),
    Git(Sha1),
}

impl Sum {
    fn new(file: &RemoteFile) -> Sum {
        match &file.checksum {
            Checksum::Sha256(_) => Sum::Sha256(Sha256::new()),
            Checksum::Git(_) => Sum::Git(Sha1::new_with_prefix(format!("blob {}\0", file.size))),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Sum::Sha256(sum) => sum.update(bytes),
            Sum::Git(sum) => sum.update(bytes),
        }
    }

    fn finish(self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Sum::Sha256(sum) => hex(&sum.finalize()),
            Sum::Git(sum) => hex(&sum.finalize()),
        }
    }
}

/// Begins a file again.
fn restart(target: &mut File, file: &RemoteFile) -> std::io::Result<(Sum, u64)> {
    target.set_len(0)?;
    target.seek(SeekFrom::Start(0))?;
    Ok((Sum::new(file), 0))
}

/// Writes a small file so that nobody sees half of it.
fn replace(path: &Path, contents: &[u8]) -> Result<(), HubError> {
    let fresh = path.with_extension(format!("new{}", std::process::id()));
    fs::write(&fresh, contents).map_err(at(&fresh))?;
    fs::rename(&fresh, path).map_err(at(path))
}

#[cfg(unix)]
fn symlink(target: &Path, path: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, path)
}

#[cfg(windows)]
fn symlink(target: &Path, path: &Path) -> std::io::Result<()> {
    std::os::windows::fs::symlink_file(target, path)
}

#[cfg(not(any(unix, windows)))]
fn symlink(_target: &Path, _path: &Path) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// A path in an address.
fn encode(path: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    path.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}
