//! The cache, as the Python packages of the site lay it out.
//!
//! ```text
//! models--OWNER--NAME/
//!   blobs/CHECKSUM                      contents, once each
//!   refs/main                           the commit that a branch was at
//!   snapshots/COMMIT/config.json        links to blobs
//! ```
//!
//! Others write here too, so a snapshot may be half there: a model counts only if its files do.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::listing::choose;
use super::name::{ModelName, Repo, Revision, check_path, is_commit};
use super::{HubError, at};

/// A folder of models.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cached {
    /// Its repository.
    pub repo: Repo,
    /// The branches and tags by which it was fetched.
    pub revisions: Vec<String>,
    /// Bytes that it takes.
    pub bytes: u64,
    /// Whether there is a model that could be loaded.
    pub whole: bool,
    /// Its folder.
    pub path: PathBuf,
}

impl Cache {
    /// A cache in a folder that need not exist.
    pub fn new(root: PathBuf) -> Cache {
        Cache { root }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A repository's folder.
    pub fn folder(&self, repo: &Repo) -> PathBuf {
        self.root.join(repo.folder())
    }

    /// The folder or file that opens a model, if all of it is there.
    ///
    /// # Errors
    /// Links that lead out of the cache.
    pub fn find(&self, name: &ModelName, revision: &Revision) -> Result<Option<PathBuf>, HubError> {
        let folder = self.folder(&name.repo);
        let commit = if revision.is_commit() {
            revision.as_str().to_owned()
        } else {
            match fs::read_to_string(folder.join("refs").join(revision.as_str())) {
                Ok(commit) if is_commit(commit.trim()) => commit.trim().to_owned(),
                _ => return Ok(None),
            }
        };
        self.open(name, &folder.join("snapshots").join(commit))
    }

    /// What opens the model in a snapshot.
    fn open(&self, name: &ModelName, snapshot: &Path) -> Result<Option<PathBuf>, HubError> {
        let Ok(entries) = fs::read_dir(snapshot) else { return Ok(None) };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let names: Vec<String> = names.filter(|name| check_path(name).is_ok()).collect();
        let paths: Vec<&str> = names.iter().map(String::as_str).collect();
        let Ok(chosen) = choose(&paths, name) else { return Ok(None) };
        let opens_folder = chosen.opens.is_empty();
        let mut needed = chosen.files;
        if opens_folder {
            needed.push("config.json".into());
            match weights(snapshot) {
                Some(weights) => needed.extend(weights),
                None => return Ok(None),
            }
        } else if !shards_complete(&needed) {
            return Ok(None);
        }
        for file in &needed {
            let path = snapshot.join(file);
            // A link to a blob that is not there, because its download stopped, is no file.
            if check_path(file).is_err() || !path.is_file() {
                return Ok(None);
            }
            self.inside(&path)?;
        }
        Ok(Some(if opens_folder { snapshot.to_owned() } else { snapshot.join(chosen.opens) }))
    }

    /// Refuses a path whose links lead out of the cache.
    ///
    /// # Errors
    /// As said.
    pub fn inside(&self, path: &Path) -> Result<(), HubError> {
        let root = self.root.canonicalize().map_err(at(&self.root))?;
        let real = path.canonicalize().map_err(at(path))?;
        match real.starts_with(&root) {
            true => Ok(()),
            false => Err(HubError::Outside(path.display().to_string())),
        }
    }

    /// All models in the cache, by name.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn list(&self) -> Result<Vec<Cached>, HubError> {
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(at(&self.root)(error)),
        };
        let mut all = Vec::new();
        for entry in entries.filter_map(Result::ok) {
            let folder = entry.file_name().to_str().and_then(Repo::of_folder);
            if let Some(repo) = folder.filter(|_| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            {
                all.push(self.describe(repo));
            }
        }
        all.sort_by(|a, b| a.repo.cmp(&b.repo));
        Ok(all)
    }

    fn describe(&self, repo: Repo) -> Cached {
        let path = self.folder(&repo);
        let mut revisions: Vec<String> = fs::read_dir(path.join("refs"))
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        revisions.sort();
        let name = ModelName { repo, file: None };
        let snapshots = fs::read_dir(path.join("snapshots")).into_iter().flatten();
        let whole =
            snapshots.filter_map(Result::ok).any(|entry| self.any_model(&name, &entry.path()));
        let bytes = bytes_below(&path);
        Cached { repo: name.repo, revisions, bytes, whole, path }
    }

    /// Whether a snapshot holds a model, or several of which one could be named.
    fn any_model(&self, name: &ModelName, snapshot: &Path) -> bool {
        let gguf = |entry: fs::DirEntry| {
            let path = entry.path();
            path.extension().is_some_and(|end| end == "gguf") && path.is_file()
        };
        matches!(self.open(name, snapshot), Ok(Some(_)))
            || fs::read_dir(snapshot).into_iter().flatten().filter_map(Result::ok).any(gguf)
    }

    /// Removes all of a repository. Gives the bytes that it took; `None` if there was nothing.
    ///
    /// # Errors
    /// It can't be removed, or is no folder of this cache.
    pub fn remove(&self, repo: &Repo) -> Result<Option<u64>, HubError> {
        let folder = self.folder(repo);
        match fs::symlink_metadata(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(at(&folder)(error)),
            // Whatever a link leads to belongs to somebody else.
            Ok(kind) if !kind.is_dir() => {
                return Err(HubError::Outside(folder.display().to_string()));
            }
            Ok(_) => {}
        }
        let bytes = bytes_below(&folder);
        // Under another name first, so that a model half removed is none.
        let doomed = self.root.join(format!(".removing-{}-{}", repo.folder(), std::process::id()));
        fs::rename(&folder, &doomed).map_err(at(&folder))?;
        fs::remove_dir_all(&doomed).map_err(at(&doomed))?;
        let _ = fs::remove_dir_all(self.root.join(".locks").join(repo.folder()));
        Ok(Some(bytes))
    }
}

/// The repository whose model a path opens, if it lies in a cache.
pub fn repo_of(path: &Path) -> Option<Repo> {
    let snapshot = path.ancestors().find(|path| {
        path.parent().and_then(Path::file_name).is_some_and(|name| name == "snapshots")
    })?;
    Repo::of_folder(snapshot.parent()?.parent()?.file_name()?.to_str()?)
}

/// The files of weights that a folder's index names; none for a model in one file; `None` for an
/// index that is none.
fn weights(snapshot: &Path) -> Option<Vec<String>> {
    let path = snapshot.join("model.safetensors.index.json");
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Some(Vec::new()),
        Err(_) => return None,
    };
    let index: Value = serde_json::from_str(&text).ok()?;
    let files =
        index["weight_map"].as_object()?.values().map(|file| file.as_str().map(str::to_owned));
    let mut files = files.collect::<Option<Vec<String>>>()?;
    files.sort();
    files.dedup();
    Some(files)
}

/// Whether all parts of a file in parts are among the files.
fn shards_complete(files: &[String]) -> bool {
    let Some((_, count)) = files[0].rsplit_once("-of-") else { return true };
    let count = count.split('.').next().and_then(|count| count.parse::<usize>().ok());
    count.is_none_or(|count| count == files.len())
}

/// Bytes of the files below a folder; links are not followed.
fn bytes_below(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    entries
        .map(|entry| match entry.metadata() {
            Ok(kind) if kind.is_dir() => bytes_below(&entry.path()),
            Ok(kind) if kind.is_file() => kind.len(),
            _ => 0,
        })
        .sum()
}
