//! Text to token ids.
//!
//! [`Tok`] is what the rest of the program sees; [`Tokenizer`] implements it for byte-level BPE on
//! `fastokens`, from a `tokenizer.json` or from the vocabulary in a GGUF file. Ids equal those of
//! Hugging Face `tokenizers`, with one deliberate exception: text that came from data never becomes
//! an added token (see [`super::guard`]).

use std::path::Path;

use fastokens::added_tokens::Segment;
use serde_json::Value;

use super::gguf_vocab::{GgufVocab, tokenizer_json};
use super::guard::Guarded;
use super::least::Least;

/// The ids a tokenizer file may use, per token it lists: bounds the tables a hostile file can ask
/// for.
const IDS_PER_TOKEN: u64 = 8;
/// Slack on top of [`IDS_PER_TOKEN`], for small vocabularies with a few high ids.
const IDS_SLACK: u64 = 1024;

/// A tokenizer: text to ids, and ids to the bytes they stand for.
pub trait Tok: Send + Sync {
    /// Encodes a rendered prompt: added tokens of the template become their ids, all other text is
    /// ordinary.
    fn encode(&self, text: &Guarded) -> Result<Vec<u32>, TokenizerError>;

    /// Encodes text in which nothing is an added token, whatever it looks like.
    fn encode_ordinary(&self, text: &str) -> Result<Vec<u32>, TokenizerError>;

    /// The bytes a token stands for; empty for ids without a token (padding rows).
    fn token_bytes(&self, id: u32) -> &[u8];

    /// One more than the highest id with a token. A model may have more rows.
    fn id_count(&self) -> usize;

    /// Whether a token is a control token, left out of text unless asked for.
    fn is_special(&self, id: u32) -> bool;

    /// The id of an added token with exactly this content.
    fn added_id(&self, content: &str) -> Option<u32>;

    /// Added tokens as (id, content, special), in order of id.
    fn added(&self) -> &[(u32, String, bool)];

    /// Characters that can begin a control token, to be marked in data before a template is
    /// rendered.
    fn guarded_chars(&self) -> &[char];

    /// What the tokenizer puts before raw text (a BOS id for some families, nothing for Qwen).
    fn raw_prefix(&self) -> &[u32];

    /// A text has at least this many tokens, found at a small part of what it takes to make them.
    fn at_least(&self, text: &str) -> usize;
}

/// Why a tokenizer could not be loaded or could not encode a text.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {what}")]
pub struct TokenizerError {
    /// The file, or the part of a GGUF file, that holds the tokenizer.
    pub file: String,
    /// What is wrong with it.
    pub what: String,
}

/// Byte-level BPE on `fastokens`.
pub struct Tokenizer {
    file: String,
    inner: fastokens::Tokenizer,
    bytes: TokenBytes,
    added: Vec<(u32, String, bool)>,
    guarded: Vec<char>,
    raw_prefix: Vec<u32>,
    least: Option<Least>,
}

impl Tokenizer {
    /// Reads `tokenizer.json`, and the added tokens that only `tokenizer_config.json` beside it
    /// lists.
    pub fn open(path: &Path) -> Result<Tokenizer, TokenizerError> {
        let file = path.display().to_string();
        let read = |path: &Path| -> Result<Value, TokenizerError> {
            let err = |what: String| TokenizerError { file: path.display().to_string(), what };
            let text = std::fs::read_to_string(path).map_err(|e| err(e.to_string()))?;
            serde_json::from_str(&text).map_err(|e| err(format!("not valid JSON: {e}")))
        };
        let config_path = path.with_file_name("tokenizer_config.json");
        let config = if config_path.exists() { Some(read(&config_path)?) } else { None };
        Tokenizer::from_json(&file, read(path)?, config.as_ref())
    }

    /// Builds the tokenizer that a GGUF file describes in its metadata.
    pub fn from_gguf(file: &str, vocab: &GgufVocab) -> Result<Tokenizer, TokenizerError> {
        let err = |what| TokenizerError { file: file.to_owned(), what };
        Tokenizer::from_json(file, tokenizer_json(vocab).map_err(err)?, None)
    }

    /// Builds a tokenizer from the contents of `tokenizer.json` and `tokenizer_config.json`; `file`
    /// is named in errors.
    pub fn from_json(
        file: &str,
        mut json: Value,
        config: Option<&Value>,
    ) -> Result<Tokenizer, TokenizerError> {
        let err = |what: String| TokenizerError { file: file.to_owned(), what };
        merge_added_tokens(&mut json, config).map_err(err)?;
        check_supported(&json).map_err(err)?;
        // A prompt is never cut or padded behind the caller's back, whatever the training set-up
        // left in the file.
        for key in ["truncation", "padding"] {
            json[key] = Value::Null;
        }
        let added = added_tokens(&json).map_err(err)?;
        let bytes = TokenBytes::new(&json, &added).map_err(err)?;
        let guarded = guarded_chars(&added);
        let least = Least::of(&json, |id| bytes.get(id), bytes.len());
        fill_holes(&mut json, bytes.len());
        let inner = fastokens::Tokenizer::from_json(json).map_err(|e| err(load_error(&e)))?;
        let raw_prefix = raw_prefix(&inner).map_err(|e| err(one_line(&e)))?;
        Ok(Tokenizer { file: file.to_owned(), inner, bytes, added, guarded, raw_prefix, least })
    }

    fn encode_error(&self, error: &fastokens::Error) -> TokenizerError {
        let what = format!("the text cannot be tokenised: {}", one_line(error));
        TokenizerError { file: self.file.clone(), what }
    }
}

impl Tok for Tokenizer {
    fn encode(&self, text: &Guarded) -> Result<Vec<u32>, TokenizerError> {
        let ordinary = |piece: &str| self.encode_ordinary(&text.restore(piece));
        let Some(added) = self.inner.added_tokens() else { return ordinary(text.marked()) };
        let mut ids = Vec::new();
        for segment in added.split(text.marked()) {
            match segment {
                Segment::Token(id) => ids.push(id),
                Segment::Text(piece) => ids.extend(ordinary(piece)?),
            }
        }
        Ok(ids)
    }

    fn encode_ordinary(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.inner.encode_ordinary(text).map_err(|e| self.encode_error(&e))
    }

    fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id)
    }

    fn id_count(&self) -> usize {
        self.bytes.len()
    }

    fn is_special(&self, id: u32) -> bool {
        let found = self.added.binary_search_by_key(&id, |token| token.0);
        found.is_ok_and(|index| self.added[index].2)
    }

    fn added_id(&self, content: &str) -> Option<u32> {
        self.added.iter().find(|token| token.1 == content).map(|token| token.0)
    }

    fn added(&self) -> &[(u32, String, bool)] {
        &self.added
    }

    fn guarded_chars(&self) -> &[char] {
        &self.guarded
    }

    fn raw_prefix(&self) -> &[u32] {
        &self.raw_prefix
    }

    fn at_least(&self, text: &str) -> usize {
        self.least.as_ref().map_or(0, |least| least.tokens(text))
    }
}

/// The bytes of every token, in one block.
struct TokenBytes {
    block: Vec<u8>,
    /// Token `id` is `block[ends[id - 1]..ends[id]]`.
    ends: Vec<u32>,
}

impl TokenBytes {
    fn new(json: &Value, added: &[(u32, String, bool)]) -> Result<TokenBytes, String> {
        let vocab = json["model"]["vocab"].as_object().ok_or("model.vocab is missing")?;
        let limit = IDS_PER_TOKEN * (vocab.len() + added.len()) as u64 + IDS_SLACK;
        let in_range = |id: u64| id < limit && id <= u64::from(u32::MAX);
        let mut tokens: Vec<Option<(&str, bool)>> = Vec::new();
        let mut place = |id: u64, content, is_added| {
            if !in_range(id) {
                return Err(format!("token id {id} is far above the number of tokens"));
            }
            let index = id as usize;
            if tokens.len() <= index {
                tokens.resize(index + 1, None);
            }
            tokens[index] = Some((content, is_added));
            Ok(())
        };
        for (content, id) in vocab {
            let id = id
                .as_u64()
                .ok_or_else(|| format!("the id of token {content:?} is not a number"))?;
            place(id, content.as_str(), false)?;
        }
        for (id, content, _) in added {
            place(u64::from(*id), content.as_str(), true)?;
        }
        let of_char = byte_of_char();
        let mut bytes = TokenBytes { block: Vec::new(), ends: Vec::with_capacity(tokens.len()) };
        for token in tokens {
            match token {
                Some((content, false)) => match decode_byte_level(content, &of_char) {
                    Some(decoded) => bytes.block.extend(decoded),
                    None => bytes.block.extend(content.as_bytes()),
                },
                Some((content, true)) => bytes.block.extend(content.as_bytes()),
                None => {}
            }
            let end =
                u32::try_from(bytes.block.len()).map_err(|_| "tokens hold over 4 GiB of text")?;
            bytes.ends.push(end);
        }
        Ok(bytes)
    }

    fn len(&self) -> usize {
        self.ends.len()
    }

    fn get(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.block[start as usize..end as usize]
    }
}

/// GPT-2's printable stand-ins for bytes, inverted: entry `c` is the byte that character `c` stands
/// for.
fn byte_of_char() -> Vec<Option<u8>> {
    let mut table = vec![None; 0x144];
    let mut next = 0x100;
    for byte in 0..=255u8 {
        if matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) {
            table[byte as usize] = Some(byte);
        } else {
            table[next] = Some(byte);
            next += 1;
        }
    }
    table
}

/// The bytes a byte-level token stands for; `None` if a character stands for no byte.
fn decode_byte_level(content: &str, of_char: &[Option<u8>]) -> Option<Vec<u8>> {
    content.chars().map(|c| of_char.get(c as usize).copied().flatten()).collect()
}

/// Adds what `tokenizer_config.json` lists in `added_tokens_decoder` and `tokenizer.json` lacks.
fn merge_added_tokens(json: &mut Value, config: Option<&Value>) -> Result<(), String> {
    let Some(listed) = config.and_then(|c| c["added_tokens_decoder"].as_object()) else {
        return Ok(());
    };
    if json["added_tokens"].is_null() {
        json["added_tokens"] = Value::Array(Vec::new());
    }
    let tokens = json["added_tokens"].as_array_mut().ok_or("added_tokens is not a list")?;
    let known: Vec<u64> = tokens.iter().filter_map(|token| token["id"].as_u64()).collect();
    for (id, token) in listed {
        let id: u32 =
            id.parse().map_err(|_| format!("added_tokens_decoder: {id:?} is not a token id"))?;
        if known.contains(&u64::from(id)) {
            continue;
        }
        let mut token = token.clone();
        let entry = token.as_object_mut();
        let entry =
            entry.ok_or_else(|| format!("added_tokens_decoder: entry {id} is not an object"))?;
        entry.insert("id".into(), id.into());
        tokens.push(token);
    }
    Ok(())
}

/// Refuses, by name, what would tokenise or decode differently from what this program assumes.
fn check_supported(json: &Value) -> Result<(), String> {
    let model = json["model"]["type"].as_str().unwrap_or("BPE");
    if model != "BPE" {
        return Err(format!("model type {model} is not supported, only byte-level BPE"));
    }
    if json["model"]["dropout"].as_f64().is_some_and(|dropout| dropout != 0.0) {
        return Err("model.dropout would make the ids random".into());
    }
    let decoder = &json["decoder"];
    let name = decoder["type"].as_str().unwrap_or("none");
    let byte_level = |d: &Value| d["type"] == "ByteLevel";
    let parts = decoder["decoders"].as_array();
    let only_byte_level =
        name == "Sequence" && parts.is_some_and(|parts| parts.len() == 1 && byte_level(&parts[0]));
    if byte_level(decoder) || only_byte_level {
        Ok(())
    } else {
        Err(format!("decoder {name} is not supported, only ByteLevel"))
    }
}

fn added_tokens(json: &Value) -> Result<Vec<(u32, String, bool)>, String> {
    let mut tokens = Vec::new();
    for (index, token) in json["added_tokens"].as_array().into_iter().flatten().enumerate() {
        let id = token["id"].as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id.ok_or_else(|| format!("added_tokens[{index}].id is not a token id"))?;
        let content = token["content"].as_str().filter(|content| !content.is_empty());
        let content = content.ok_or_else(|| format!("added_tokens[{index}].content is missing"))?;
        tokens.push((id, content.to_owned(), token["special"].as_bool().unwrap_or(false)));
    }
    tokens.sort();
    if let Some(pair) = tokens.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(format!("added_tokens lists id {} twice", pair[0].0));
    }
    Ok(tokens)
}

/// Gives every id below the highest one of the vocabulary a token, as `fastokens` requires.
///
/// Files that keep their control tokens out of the vocabulary leave holes where those have low ids.
/// The filler is not in the byte-level alphabet, so no text can contain it.
fn fill_holes(json: &mut Value, id_count: usize) {
    let Some(vocab) = json["model"]["vocab"].as_object_mut() else { return };
    let mut taken = vec![false; id_count];
    let mut count = 0;
    for id in vocab.values().filter_map(Value::as_u64) {
        taken[id as usize] = true;
        count = count.max(id as usize + 1);
    }
    let holes = (0..count).filter(|&id| !taken[id]);
    vocab.extend(holes.map(|id| (format!("\u{E000}{id}"), Value::from(id))).collect::<Vec<_>>());
}

/// What `fastokens` says, except that it calls every malformed BPE model one of another type.
fn load_error(error: &fastokens::Error) -> String {
    match one_line(error) {
        text if text.contains("unsupported model type: Other") => {
            "model.vocab or model.merges is malformed (an entry of the wrong kind, or a merge of \
             unknown tokens)"
                .into()
        }
        text => text,
    }
}

/// One character of each added token that data must not supply.
///
/// That is the first one which is neither a letter, a digit nor white space, since replacing those
/// would disturb what templates do with text (trimming, changing case). Added tokens made only of
/// such characters are vocabulary (runs of spaces, words) and stay available to data, unless they
/// are flagged special.
fn guarded_chars(added: &[(u32, String, bool)]) -> Vec<char> {
    let mut chars: Vec<char> = added
        .iter()
        .filter_map(|(_, content, special)| {
            let mark = content.chars().find(|c| !c.is_alphanumeric() && !c.is_whitespace());
            mark.or_else(|| content.chars().next().filter(|_| *special))
        })
        .collect();
    chars.sort_unstable();
    chars.dedup();
    chars
}

/// The ids put before a text by the tokenizer's post-processor. Ids put after it are for training,
/// not for prompts.
fn raw_prefix(inner: &fastokens::Tokenizer) -> Result<Vec<u32>, fastokens::Error> {
    let (bare, framed) = (inner.encode("a")?, inner.encode_with_special_tokens("a", true)?);
    let at = framed.windows(bare.len().max(1)).position(|window| window == bare);
    Ok(framed[..at.unwrap_or(0)].to_vec())
}

/// An error message without line breaks.
fn one_line(error: &dyn std::fmt::Display) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
