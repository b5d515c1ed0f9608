//! Models by their public names: `Qwen/Qwen3.5-4B`, or `unsloth/Qwen3.5-4B-GGUF:Q4_K_M` for one
//! file of several.
//!
//! Models lie in the cache that other programs use too ([`cache`]), so what they fetched is found
//! and what is fetched here is found by them. A download goes on where it stopped, is held to its
//! checksum, and appears under its name only when it is whole ([`fetch`]).
//!
//! Names, listings and the cache itself are taken for hostile: nothing outside the cache is read,
//! written or removed ([`name`]), and a download is not redirected into a private network
//! ([`client`]).

pub mod cache;
pub mod client;
pub mod commands;
pub mod drafts;
pub mod fetch;
pub mod listing;
pub mod name;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use self::cache::Cache;
use self::client::Client;
use self::name::{ModelName, Revision};
use crate::generate::Progress;

/// Where models come from, and where they are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HubOptions {
    /// The cache's folder.
    pub cache: Option<PathBuf>,
    /// The site; `None` for the usual one.
    pub endpoint: Option<String>,
    /// What opens models that not everyone may have.
    pub token: Option<Token>,
    /// Whether the network is off limits.
    pub offline: bool,
    /// The branch, tag or commit wanted.
    pub revision: Option<String>,
}

/// A secret; it is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(pub String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

/// Why a model can't be had, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The name is none.
    #[error(transparent)]
    Name(#[from] name::NameError),
    /// No folder to keep models in.
    #[error("no folder for models: set HF_HUB_CACHE")]
    NoCache,
    /// The network is off limits.
    #[error(
        "{name} is not in {cache}, and --offline (or HF_HUB_OFFLINE) keeps it from being fetched"
    )]
    Offline {
        /// The model.
        name: String,
        /// Where it was looked for.
        cache: String,
    },
    /// There is nothing by that name.
    #[error("{name} does not exist at {site}: check its name{hint}", hint = hint(*.token))]
    NotFound {
        /// The model, with its revision if one was asked for.
        name: String,
        /// The site.
        site: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// It is not for everyone.
    #[error(
        "{site} refuses {name} ({status}): accept its terms at {site}/{name}{hint}",
        hint = hint(*.token)
    )]
    Refused {
        /// The model.
        name: String,
        /// The site.
        site: String,
        /// The status of the answer.
        status: u16,
        /// Whether a token was sent.
        token: bool,
    },
    /// The site does not answer as it should.
    #[error("{site} answered {name} with status {status}: try again later")]
    Status {
        /// The model.
        name: String,
        /// The site.
        site: String,
        /// The status.
        status: u16,
    },
    /// No answer, or none that ends.
    #[error("{name} could not be fetched: {what}; what has arrived is kept, so try again")]
    Network {
        /// The model.
        name: String,
        /// What happened.
        what: String,
    },
    /// A redirection to where no download leads.
    #[error("{0}")]
    Redirect(String),
    /// The site's listing makes no sense.
    #[error("{name}: the listing of its files is not understood: {what}")]
    Listing {
        /// The model.
        name: String,
        /// Why.
        what: String,
    },
    /// None of the files is a model, or several are.
    #[error("{name}: {what}")]
    Files {
        /// The model.
        name: String,
        /// Why.
        what: String,
    },
    /// Not what the site said.
    #[error("{file} arrived damaged twice ({what}); it was removed: try again later")]
    Damaged {
        /// The file.
        file: String,
        /// How that shows.
        what: String,
    },
    /// The cache.
    #[error("{path}: {source}")]
    Io {
        /// Where.
        path: String,
        /// What.
        source: std::io::Error,
    },
    /// A path of the cache leads elsewhere.
    #[error("{0} leads out of the cache: remove it")]
    Outside(String),
    /// Ctrl-C.
    #[error("interrupted; what has arrived is kept")]
    Interrupted,
}

fn hint(token: bool) -> &'static str {
    if token { "" } else { ", and set HF_TOKEN if it is not public" }
}

/// Turns an error of the file system into one that names its place.
pub(crate) fn at(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> HubError + '_ {
    move |source| HubError::Io { path: path.display().to_string(), source }
}

/// A place to get models from.
pub struct Hub {
    cache: Cache,
    options: HubOptions,
}

impl Hub {
    /// Opens the cache; it need not exist.
    ///
    /// # Errors
    /// No folder for it.
    pub fn new(options: &HubOptions) -> Result<Hub, HubError> {
        let root = options.cache.clone().ok_or(HubError::NoCache)?;
        Ok(Hub { cache: Cache::new(root), options: options.clone() })
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The model in the cache, if it is there and whole.
    ///
    /// # Errors
    /// A revision that is none, or a cache that leads elsewhere.
    pub fn find(&self, name: &ModelName) -> Result<Option<PathBuf>, HubError> {
        self.cache.find(name, &self.revision()?)
    }

    /// The model, fetched if it is not in the cache.
    ///
    /// # Errors
    /// It can't be had.
    pub fn get(
        &self,
        name: &ModelName,
        progress: &mut dyn FnMut(Progress<'_>),
        cancel: &AtomicBool,
    ) -> Result<PathBuf, HubError> {
        match self.find(name)? {
            Some(path) => Ok(path),
            None => self.pull(name, progress, cancel),
        }
    }

    /// Fetches what the cache lacks of a model's newest state.
    ///
    /// # Errors
    /// It can't be had.
    pub fn pull(
        &self,
        name: &ModelName,
        progress: &mut dyn FnMut(Progress<'_>),
        cancel: &AtomicBool,
    ) -> Result<PathBuf, HubError> {
        if self.options.offline {
            let cache = self.cache.root().display().to_string();
            return Err(HubError::Offline { name: name.to_string(), cache });
        }
        let client = Client::new(self.options.endpoint.as_deref(), self.options.token.clone())?;
        let revision = self.revision()?;
        let mut fetch = fetch::Fetch::new(&client, &self.cache, progress, cancel);
        fetch.model(name, &revision)
    }

    fn revision(&self) -> Result<Revision, HubError> {
        Ok(Revision::parse(self.options.revision.as_deref().unwrap_or("main"))?)
    }
}
