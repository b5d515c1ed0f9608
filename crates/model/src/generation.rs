//! How a checkpoint wants to be sampled, and what ends its answers.

use crate::LoadError;
use crate::fields::{Fields, MAX_ROWS};
use crate::files::gguf::Metadata;
use crate::files::{Checkpoint, TokenizerSource};

/// Sampling defaults of a checkpoint. `None` where it says nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Ids that end an answer, ascending.
    pub eos_token_ids: Vec<u32>,
    /// False: greedy, whatever the rest says.
    pub do_sample: Option<bool>,
    /// At least 0.
    pub temperature: Option<f32>,
    /// 0 keeps all.
    pub top_k: Option<u32>,
    /// From 0 to 1.
    pub top_p: Option<f32>,
    /// From 0 to 1.
    pub min_p: Option<f32>,
    /// Above 0; 1 changes nothing.
    pub repetition_penalty: Option<f32>,
    /// 0 changes nothing.
    pub presence_penalty: Option<f32>,
    /// 0 changes nothing.
    pub frequency_penalty: Option<f32>,
    /// Fields of generation_config.json that would change the output and that we don't know.
    pub ignored: Vec<String>,
}

/// Fields that change nothing here: ids, limits and notes.
const HARMLESS: &[&str] = &[
    "_from_model_config",
    "assistant_early_exit",
    "bos_token_id",
    "cache_implementation",
    "max_length",
    "max_new_tokens",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict_in_generate",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
];

/// Texts of tokens that end a turn in the families we run; llama.cpp treats them so too.
const END_TEXTS: &[&str] =
    &["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>"];

impl GenerationConfig {
    /// What `generation_config.json` says; else config.json's eos ids. Of a GGUF file, its
    /// tokenizer's ends of turn and its `general.sampling` keys.
    ///
    /// # Errors
    /// If a field has a value that makes no sense.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<GenerationConfig, LoadError> {
        if let Some(metadata) = checkpoint.metadata() {
            return from_gguf(metadata, checkpoint.tokenizer());
        }
        let file = checkpoint.path().join("generation_config.json");
        let mut out = match checkpoint.generation_config() {
            Some(json) => parse(&Fields::root(&file, json)?)?,
            None => GenerationConfig::default(),
        };
        if out.eos_token_ids.is_empty() {
            let file = checkpoint.config_file();
            let root = Fields::root(&file, checkpoint.config())?;
            if let Some(text) = root.object("text_config", "text_config.")? {
                out.eos_token_ids = eos(&text)?;
            }
            if out.eos_token_ids.is_empty() {
                out.eos_token_ids = eos(&root)?;
            }
        }
        Ok(out)
    }
}

/// What one generation_config.json says.
pub(crate) fn parse(fields: &Fields) -> Result<GenerationConfig, LoadError> {
    let number = |name: &str, least: f64, most: f64| match fields.number(name)? {
        Some(f) if !(least..=most).contains(&f) => {
            fields.error(name, format!("a number from {least} to {most}"), f)
        }
        other => Ok(other.map(|f| f as f32)),
    };
    let any = f64::from(f32::MAX);
    let known = |name: &str| {
        let ours = ["eos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p"];
        let penalties = ["repetition_penalty", "presence_penalty", "frequency_penalty"];
        ours.contains(&name) || penalties.contains(&name) || HARMLESS.contains(&name)
    };
    let set = |name: &&str| fields.get(name).is_some();
    // −1 is how some files say that top_k is off.
    let top_k = match fields.get("top_k").and_then(serde_json::Value::as_i64) {
        Some(-1) => Some(0),
        _ => fields.integer("top_k", 0, MAX_ROWS)?,
    };
    Ok(GenerationConfig {
        eos_token_ids: eos(fields)?,
        do_sample: fields.bool("do_sample")?,
        temperature: number("temperature", 0.0, any)?,
        top_k: top_k.map(|k| k as u32),
        top_p: number("top_p", 0.0, 1.0)?,
        min_p: number("min_p", 0.0, 1.0)?,
        repetition_penalty: number("repetition_penalty", f64::from(f32::MIN_POSITIVE), any)?,
        presence_penalty: number("presence_penalty", -any, any)?,
        frequency_penalty: number("frequency_penalty", -any, any)?,
        ignored: fields.names().filter(|n| !known(n)).filter(set).map(str::to_owned).collect(),
    })
}

/// `eos_token_id`: one id or several.
fn eos(fields: &Fields) -> Result<Vec<u32>, LoadError> {
    let ids = fields.integers("eos_token_id", MAX_ROWS)?.unwrap_or_default();
    Ok(ascending(ids.into_iter().map(|id| id as u32).collect()))
}

fn ascending(mut ids: Vec<u32>) -> Vec<u32> {
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn from_gguf(
    metadata: &Metadata,
    tokenizer: &TokenizerSource,
) -> Result<GenerationConfig, LoadError> {
    let mut ids = Vec::new();
    if let TokenizerSource::Gguf(tokenizer) = tokenizer {
        const CONTROL: u64 = 3;
        for name in ["eos", "eot"] {
            ids.extend(tokenizer.special_id(name)?);
        }
        // Files name one eos; models end their answers with others of the family too.
        let types = tokenizer.token_types()?;
        for (id, text) in tokenizer.tokens()?.into_iter().enumerate() {
            if types.get(id) == Some(&CONTROL) && END_TEXTS.contains(&text) {
                ids.push(id as u32);
            }
        }
    }
    let number = |key: &str, least: f64, most: f64| {
        let key = format!("general.sampling.{key}");
        match metadata.float(&key)? {
            Some(f) if !(least..=most).contains(&f) => {
                let expected = format!("a number from {least} to {most}");
                Err(LoadError::new(metadata.file(), key, expected, f))
            }
            other => Ok(other.map(|f| f as f32)),
        }
    };
    let any = f64::from(f32::MAX);
    Ok(GenerationConfig {
        eos_token_ids: ascending(ids),
        temperature: number("temp", 0.0, any)?,
        top_k: number("top_k", -1.0, any)?.map(|k| k.max(0.0) as u32),
        top_p: number("top_p", 0.0, 1.0)?,
        min_p: number("min_p", 0.0, 1.0)?,
        repetition_penalty: number("penalty_repeat", f64::from(f32::MIN_POSITIVE), any)?,
        ..GenerationConfig::default()
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::files;
    use crate::files::testing::{TempDir, safetensors};

    fn of(json: &Value) -> Result<GenerationConfig, String> {
        let fields = Fields::root(Path::new("g.json"), json).unwrap();
        parse(&fields).map_err(|e| e.to_string())
    }

    #[test]
    fn fields() {
        let g = of(&json!({
            "eos_token_id": [7, 3, 7], "do_sample": true, "temperature": 0.6, "top_k": 20,
            "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 1.5,
            "pad_token_id": 1, "bos_token_id": null, "transformers_version": "5",
            "typical_p": 0.9, "num_beams": null
        }))
        .unwrap();
        assert_eq!(g.eos_token_ids, [3, 7]);
        assert_eq!((g.temperature, g.top_k, g.top_p), (Some(0.6), Some(20), Some(0.95)));
        assert_eq!((g.presence_penalty, g.frequency_penalty), (Some(1.5), None));
        assert_eq!(g.ignored, ["typical_p"]);
        assert_eq!(of(&json!({"eos_token_id": 5})).unwrap().eos_token_ids, [5]);
        assert_eq!(of(&json!({"top_k": -1})).unwrap().top_k, Some(0));
        for (field, bad) in [
            ("temperature", json!(-0.1)),
            ("temperature", json!("hot")),
            ("top_p", json!(1.5)),
            ("top_k", json!(-2)),
            ("top_k", json!(0.5)),
            ("repetition_penalty", json!(0)),
            ("eos_token_id", json!([1, -2])),
            ("do_sample", json!(1)),
        ] {
            let error = of(&json!({field: bad})).unwrap_err();
            assert!(error.starts_with(&format!("g.json: {field}: expected")), "{error}");
        }
    }

    #[test]
    fn eos_falls_back_to_the_config() {
        let dir = TempDir::new("generation");
        dir.write("model.safetensors", safetensors(&[]));
        let eos = |config: Value| {
            dir.write("config.json", config.to_string());
            let c = files::open(dir.path()).unwrap();
            GenerationConfig::from_checkpoint(&c).unwrap().eos_token_ids
        };
        let both = json!({"eos_token_id": 2, "text_config": {"eos_token_id": 9}});
        assert_eq!(eos(both.clone()), [9]);
        assert_eq!(eos(json!({"eos_token_id": 2, "text_config": {}})), [2]);
        assert_eq!(eos(json!({})), [0u32; 0]);
        dir.write("generation_config.json", "{\"eos_token_id\": [4, 5]}");
        assert_eq!(eos(both), [4, 5]);
    }
}
