//! The tokenizer a GGUF file describes in its metadata, as the contents of a `tokenizer.json`.
//!
//! GGUF stores tokens, merges and token types, but only the *name* of the pre-tokenizer and nothing
//! of the normaliser. Both follow from the name, as the family's own `tokenizer.json` has them.

use serde_json::{Map, Value, json};

/// The `tokenizer.ggml.*` metadata of a GGUF file.
#[derive(Clone, Debug, Default)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`: "gpt2" for byte-level BPE.
    pub model: String,
    /// `tokenizer.ggml.pre`: the name of the pre-tokenizer.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`, by id; byte-level for normal tokens, plain text for the others.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.merges`, best first, each two tokens with a space between.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.token_type`, by id; empty means that all are normal.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.add_bos_token` (absent means false).
    pub add_bos: bool,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos_token_id: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos_token_id: Option<u32>,
}

/// Token types of GGUF. Control and user-defined ones are matched in text before BPE; unused ones
/// fill up the table.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// How a family cuts text before BPE.
struct PreTokenizer {
    name: &'static str,
    /// Split patterns, applied one after the other; none means GPT-2's own pattern, built into
    /// ByteLevel.
    patterns: &'static [&'static str],
    /// Whether each digit stands alone before anything else is cut.
    digits: bool,
    /// Whether text is brought to NFC first.
    nfc: bool,
    /// Whether a word that is a token as a whole skips the merges.
    ignore_merges: bool,
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";

const PRE_TOKENIZERS: [PreTokenizer; 6] = [
    PreTokenizer { name: "gpt-2", patterns: &[], digits: false, nfc: false, ignore_merges: false },
    PreTokenizer { name: "smollm", patterns: &[], digits: true, nfc: false, ignore_merges: false },
    PreTokenizer {
        name: "llama-bpe",
        patterns: &[LLAMA3],
        digits: false,
        nfc: false,
        ignore_merges: true,
    },
    PreTokenizer {
        name: "qwen2",
        patterns: &[QWEN2],
        digits: false,
        nfc: true,
        ignore_merges: false,
    },
    PreTokenizer {
        name: "qwen35",
        patterns: &[QWEN35],
        digits: false,
        nfc: true,
        ignore_merges: false,
    },
    PreTokenizer {
        name: "default",
        patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        digits: false,
        nfc: false,
        ignore_merges: false,
    },
];

/// The `tokenizer.json` equivalent to a GGUF vocabulary.
pub fn tokenizer_json(vocab: &GgufVocab) -> Result<Value, String> {
    if vocab.model != "gpt2" {
        let model = &vocab.model;
        return Err(format!(
            "tokenizer.ggml.model {model:?} is not supported, only \"gpt2\" (byte-level BPE)"
        ));
    }
    let pre = pre_tokenizer(vocab.pre.as_deref().unwrap_or("default"))?;
    let types = &vocab.token_types;
    if !types.is_empty() && types.len() != vocab.tokens.len() {
        let (types, tokens) = (types.len(), vocab.tokens.len());
        return Err(format!("tokenizer.ggml.token_type has {types} entries for {tokens} tokens"));
    }
    let (words, added) = split_tokens(vocab);
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": if pre.nfc { json!({"type": "NFC"}) } else { Value::Null },
        "pre_tokenizer": pre_tokenizer_json(pre),
        "post_processor": post_processor(vocab)?,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": pre.ignore_merges,
            "vocab": words,
            "merges": merges(vocab)?,
        },
    }))
}

fn pre_tokenizer(name: &str) -> Result<&'static PreTokenizer, String> {
    PRE_TOKENIZERS.iter().find(|pre| pre.name == name).ok_or_else(|| {
        let known: Vec<&str> = PRE_TOKENIZERS.iter().map(|pre| pre.name).collect();
        format!("tokenizer.ggml.pre {name:?} is not supported; known: {}", known.join(", "))
    })
}

/// The vocabulary by content, and the added tokens, which are matched in text as they stand.
///
/// As in the files that Hugging Face tokenizers write, every id up to the last normal token is in
/// the vocabulary; added tokens above it are not.
fn split_tokens(vocab: &GgufVocab) -> (Map<String, Value>, Vec<Value>) {
    let kind = |id: usize| vocab.token_types.get(id).copied().unwrap_or(NORMAL);
    let is_added = |id: usize| matches!(kind(id), CONTROL | USER_DEFINED);
    let is_word = |id: &usize| !is_added(*id) && kind(*id) != UNUSED;
    let last_word = (0..vocab.tokens.len()).rfind(is_word);
    let (mut words, mut added) = (Map::new(), Vec::new());
    for (id, content) in vocab.tokens.iter().enumerate().filter(|(_, c)| !c.is_empty()) {
        if is_added(id) {
            added.push(json!({
                "id": id,
                "content": content,
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": kind(id) == CONTROL,
            }));
        }
        if last_word.is_some_and(|last| id <= last) {
            words.entry(content.clone()).or_insert(id.into());
        }
    }
    (words, added)
}

fn merges(vocab: &GgufVocab) -> Result<Vec<Value>, String> {
    let split = |merge: &String| {
        // A token may itself be a space in odd files, so the separator is looked for after the
        // first character.
        let first = merge.chars().next().map_or(0, char::len_utf8);
        let at = merge[first..].find(' ').map(|at| at + first);
        at.map(|at| json!([merge[..at], merge[at + 1..]]))
            .ok_or_else(|| format!("tokenizer.ggml.merges: {merge:?} is not two tokens"))
    };
    vocab.merges.iter().map(split).collect()
}

fn pre_tokenizer_json(pre: &PreTokenizer) -> Value {
    let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let mut steps = Vec::new();
    if pre.digits {
        steps.push(json!({"type": "Digits", "individual_digits": true}));
    }
    for pattern in pre.patterns {
        steps.push(json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}));
    }
    steps.push(byte_level(pre.patterns.is_empty()));
    match steps.as_slice() {
        [only] => only.clone(),
        _ => json!({"type": "Sequence", "pretokenizers": steps}),
    }
}

/// A post-processor that puts the BOS token first, for the families that ask for it.
fn post_processor(vocab: &GgufVocab) -> Result<Value, String> {
    if !vocab.add_bos {
        return Ok(Value::Null);
    }
    let bos =
        vocab.bos_token_id.ok_or("tokenizer.ggml.add_bos_token is set without a bos_token_id")?;
    let content = vocab.tokens.get(bos as usize);
    let content =
        content.ok_or_else(|| format!("tokenizer.ggml.bos_token_id {bos} is not a token"))?;
    Ok(json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": content, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {content: {"id": content, "ids": [bos], "tokens": [content]}},
    }))
}
