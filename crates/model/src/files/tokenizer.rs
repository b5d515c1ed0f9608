//! Where a checkpoint keeps its tokenizer and chat template.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::Bytes;
use super::gguf::Metadata;
use crate::LoadError;

/// Where the tokenizer and the chat template are. Reading them is the application's work.
#[derive(Clone, Debug)]
pub enum TokenizerSource {
    /// Files of a folder.
    Folder {
        /// `tokenizer.json`.
        tokenizer: PathBuf,
        /// `tokenizer_config.json`, which may hold the chat template.
        config: Option<PathBuf>,
        /// `chat_template.jinja`, which takes precedence.
        template: Option<PathBuf>,
    },
    /// Metadata of a GGUF file.
    Gguf(GgufTokenizer),
    /// None: drafts and synthetic models.
    None,
}

impl TokenizerSource {
    pub(super) fn of_folder(folder: &Path) -> TokenizerSource {
        let existing = |name: &str| Some(folder.join(name)).filter(|p| p.is_file());
        match existing("tokenizer.json") {
            None => TokenizerSource::None,
            Some(tokenizer) => TokenizerSource::Folder {
                tokenizer,
                config: existing("tokenizer_config.json"),
                template: existing("chat_template.jinja"),
            },
        }
    }

    pub(super) fn of_gguf(metadata: &Metadata) -> TokenizerSource {
        if metadata.contains("tokenizer.ggml.tokens") {
            TokenizerSource::Gguf(GgufTokenizer { metadata: metadata.clone() })
        } else {
            TokenizerSource::None
        }
    }
}

impl TokenizerSource {
    /// One more than the highest id of the vocabulary; `None` if there is no tokenizer or it says
    /// nothing. Rows of the embedding from there on are padding.
    ///
    /// # Errors
    /// If the tokenizer's file is malformed.
    pub fn id_count(&self) -> Result<Option<usize>, LoadError> {
        match self {
            TokenizerSource::None => Ok(None),
            TokenizerSource::Folder { tokenizer, .. } => id_count(tokenizer),
            TokenizerSource::Gguf(tokenizer) => {
                const UNUSED: u64 = 5;
                let types = tokenizer.token_types()?;
                Ok(types.iter().rposition(|&t| t != UNUSED).map(|last| last + 1))
            }
        }
    }
}

/// [`TokenizerSource::id_count`] of a tokenizer.json. Reads the ids and skips everything else, so that it
/// costs a fraction of building the tokenizer.
fn id_count(path: &Path) -> Result<Option<usize>, LoadError> {
    let bytes = Bytes::map(path)?;
    let file: IdsOfFile = serde_json::from_slice(&bytes)
        .map_err(|e| LoadError::new(path, "file", "a tokenizer.json", e))?;
    let added = file.added_tokens.iter().map(|t| t.id).max();
    let last = added.max(file.model.and_then(|m| m.vocab.0));
    match last {
        Some(id) if id > crate::fields::MAX_ROWS => {
            Err(LoadError::new(path, "ids", format!("ids up to {}", crate::fields::MAX_ROWS), id))
        }
        other => Ok(other.map(|id| id as usize + 1)),
    }
}

#[derive(Deserialize)]
struct IdsOfFile {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    model: Option<IdsOfModel>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u64,
}

#[derive(Deserialize)]
struct IdsOfModel {
    #[serde(default)]
    vocab: HighestId,
}

/// The highest id of `{token: id}`, or of a list that holds the tokens in order.
#[derive(Default)]
struct HighestId(Option<u64>);

impl<'de> Deserialize<'de> for HighestId {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<HighestId, D::Error> {
        struct Ids;
        impl<'de> Visitor<'de> for Ids {
            type Value = HighestId;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of ids, or a list of tokens")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HighestId, A::Error> {
                let mut highest = None;
                while let Some((_, id)) = map.next_entry::<IgnoredAny, u64>()? {
                    highest = highest.max(Some(id));
                }
                Ok(HighestId(highest))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<HighestId, A::Error> {
                let mut count = 0u64;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(HighestId(count.checked_sub(1)))
            }
        }
        d.deserialize_any(Ids)
    }
}

/// The `tokenizer.*` keys of a GGUF file. Nothing is decoded until it is asked for.
#[derive(Clone, Debug)]
pub struct GgufTokenizer {
    metadata: Metadata,
}

impl GgufTokenizer {
    /// The file, for errors.
    pub fn file(&self) -> &Path {
        self.metadata.file()
    }

    /// `tokenizer.ggml.model`, e.g. "gpt2".
    pub fn model(&self) -> Result<&str, LoadError> {
        self.required("tokenizer.ggml.model", self.metadata.str("tokenizer.ggml.model")?)
    }

    /// `tokenizer.ggml.pre`, e.g. "qwen35".
    pub fn pre(&self) -> Result<Option<&str>, LoadError> {
        self.metadata.str("tokenizer.ggml.pre")
    }

    /// All tokens in order of id.
    pub fn tokens(&self) -> Result<Vec<&str>, LoadError> {
        self.required("tokenizer.ggml.tokens", self.metadata.strings("tokenizer.ggml.tokens")?)
    }

    /// Merges in order of rank; empty for tokenizers without.
    pub fn merges(&self) -> Result<Vec<&str>, LoadError> {
        Ok(self.metadata.strings("tokenizer.ggml.merges")?.unwrap_or_default())
    }

    /// For each token 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte; empty if
    /// the file says nothing.
    pub fn token_types(&self) -> Result<Vec<u64>, LoadError> {
        Ok(self.metadata.integers("tokenizer.ggml.token_type")?.unwrap_or_default())
    }

    /// The id under `tokenizer.ggml.<name>_token_id`: bos, eos, eot, padding, unknown.
    pub fn special_id(&self, name: &str) -> Result<Option<u32>, LoadError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = self.metadata.unsigned(&key)? else { return Ok(None) };
        match u32::try_from(id) {
            Ok(id) => Ok(Some(id)),
            Err(_) => Err(LoadError::new(self.file(), key, "a token id", id)),
        }
    }

    /// Whether a prompt starts with the bos token.
    pub fn add_bos(&self) -> Result<bool, LoadError> {
        Ok(self.metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(false))
    }

    /// `tokenizer.chat_template`.
    pub fn chat_template(&self) -> Result<Option<&str>, LoadError> {
        self.metadata.str("tokenizer.chat_template")
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, LoadError> {
        value.ok_or_else(|| LoadError::new(self.file(), key, "this key", "none"))
    }
}
