//! Typed reading of the GGUF keys of one architecture.

use crate::LoadError;
use crate::fields::{MAX_ROWS, MAX_SIZE};
use crate::files::Checkpoint;
use crate::files::gguf::Metadata;

/// The keys of one architecture.
pub(crate) struct Keys<'a> {
    pub(crate) metadata: &'a Metadata,
    pub(crate) arch: &'a str,
}

impl<'a> Keys<'a> {
    pub(crate) fn of(checkpoint: &'a Checkpoint) -> Result<Keys<'a>, LoadError> {
        let key = "general.architecture";
        let missing = |file| LoadError::new(file, key, "this key", "none");
        let Some(metadata) = checkpoint.metadata() else { return Err(missing(checkpoint.path())) };
        let arch = metadata.str(key)?.ok_or_else(|| missing(metadata.file()))?;
        Ok(Keys { metadata, arch })
    }

    /// What an absent key of no default is.
    pub(crate) fn missing<T>(&self, name: &str) -> Result<T, LoadError> {
        let (file, key) = (self.metadata.file(), self.key(name));
        Err(LoadError::new(file, key, "this key; it has no default", "none"))
    }

    pub(crate) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    /// An error about a key, or about a tensor if there is no key of that name.
    pub(crate) fn error<T>(
        &self,
        name: &str,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> Result<T, LoadError> {
        let full = self.key(name);
        let field = if self.metadata.contains(&full) { &full } else { name };
        Err(LoadError::new(self.metadata.file(), field, expected, found))
    }

    /// A number up to `most`, if the key is there.
    pub(crate) fn optional(&self, name: &str, most: u64) -> Result<Option<u64>, LoadError> {
        match self.metadata.unsigned(&self.key(name))? {
            Some(n) if n > most => self.error(name, format!("a number up to {most}"), n),
            other => Ok(other),
        }
    }

    /// A number from `least` to `most`.
    pub(crate) fn integer(&self, name: &str, least: u64, most: u64) -> Result<u64, LoadError> {
        match self.optional(name, most)? {
            Some(n) if n >= least => Ok(n),
            Some(n) => self.error(name, format!("a number from {least} to {most}"), n),
            None => self.missing(name),
        }
    }

    /// A size: 1 to [`MAX_SIZE`].
    pub(crate) fn size(&self, name: &str) -> Result<usize, LoadError> {
        Ok(self.integer(name, 1, MAX_SIZE)? as usize)
    }

    /// A number of rows or positions: 1 to [`MAX_ROWS`].
    pub(crate) fn rows(&self, name: &str) -> Result<usize, LoadError> {
        Ok(self.integer(name, 1, MAX_ROWS)? as usize)
    }

    /// A number above zero.
    pub(crate) fn positive(&self, name: &str) -> Result<f64, LoadError> {
        match self.metadata.float(&self.key(name))? {
            Some(f) if f > 0.0 => Ok(f),
            Some(f) => self.error(name, "a number above zero", f),
            None => self.missing(name),
        }
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>, LoadError> {
        self.metadata.str(&self.key(name))
    }

    /// Numbers or truth values; a single number is a list of one.
    pub(crate) fn list(&self, name: &str) -> Result<Option<Vec<u64>>, LoadError> {
        self.metadata.integers(&self.key(name))
    }
}
