//! Which files make up a checkpoint.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::gguf::{self, Gguf};
use super::{Bytes, Checkpoint, Dtype, Entry, Kind, TokenizerSource, safetensors};
use crate::LoadError;

/// JSON takes up to ten times its size in memory, so the files are bounded.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
const MAX_INDEX_BYTES: u64 = 128 << 20;
/// More files than any model is split into.
const MAX_SHARDS: u64 = 10_000;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

pub(super) fn open(path: &Path) -> Result<Checkpoint, LoadError> {
    let meta = std::fs::metadata(path).map_err(|e| LoadError::io(path, &e))?;
    if !meta.is_dir() {
        return open_gguf(path);
    }
    if path.join("config.json").is_file() {
        return open_safetensors(path);
    }
    match gguf_models(path)?.as_slice() {
        [only] => open_gguf(only),
        [] => {
            let expected = "a folder with config.json and safetensors, or with a .gguf model";
            Err(LoadError::new(path, "folder", expected, "neither"))
        }
        several => {
            let list: Vec<_> = several.iter().filter_map(|p| p.file_name()?.to_str()).collect();
            let expected = "one model; name the .gguf file";
            Err(LoadError::new(path, "folder", expected, list.join(", ")))
        }
    }
}

/// The GGUF models of a folder: no projectors, no drafts, no importance matrices, and of split
/// files only the first.
fn gguf_models(folder: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let io = |e| LoadError::io(folder, &e);
    let mut models = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let later_part = split_name(name).is_some_and(|(_, no, _)| no != 1);
        if !name.ends_with(".gguf") || later_part {
            continue;
        }
        let parsed = gguf::parse(&path, &Bytes::map(&path)?)?;
        let architecture = parsed.metadata.str("general.architecture")?.unwrap_or_default();
        let is_model = !architecture.contains("dflash") && architecture != "clip";
        if is_model && parsed.metadata.str("general.type")?.is_none_or(|t| t == "model") {
            models.push(path);
        }
    }
    models.sort();
    Ok(models)
}

// ---------------------------------------------------------------------------------------------
// Safetensors

fn open_safetensors(folder: &Path) -> Result<Checkpoint, LoadError> {
    let config = read_json(&folder.join("config.json"), MAX_CONFIG_BYTES)?;
    let generation = folder.join("generation_config.json");
    let generation_config = match generation.is_file() {
        true => Some(read_json(&generation, MAX_CONFIG_BYTES)?),
        false => None,
    };
    let index = folder.join(INDEX);
    let weight_map = match index.is_file() {
        true => Some(read_index(&index)?),
        false => None,
    };
    let shards: Vec<String> = match &weight_map {
        Some(map) => {
            let mut names: Vec<_> = map.values().cloned().collect();
            names.sort();
            names.dedup();
            names
        }
        None => vec![single_file(folder)?],
    };
    let mut files = Files::default();
    for shard in &shards {
        let path = folder.join(shard);
        let bytes = Bytes::map(&path)?;
        files.add_safetensors(path, bytes)?;
    }
    for (name, shard) in weight_map.iter().flatten() {
        let found = match files.tensors.get(name) {
            Some(entry) if shards[entry.file] == *shard => continue,
            Some(entry) => shards[entry.file].clone(),
            None => "no such tensor".to_owned(),
        };
        return Err(LoadError::new(&index, name, format!("this tensor in {shard}"), found));
    }
    Ok(Checkpoint {
        path: folder.to_owned(),
        kind: Kind::Safetensors,
        config,
        metadata: None,
        generation_config,
        tokenizer: TokenizerSource::of_folder(folder),
        files: files.list,
        tensors: files.tensors,
    })
}

pub(super) fn safetensors_in_memory(
    path: &Path,
    config: Value,
    bytes: Bytes,
) -> Result<Checkpoint, LoadError> {
    let mut files = Files::default();
    files.add_safetensors(path.join(SINGLE), bytes)?;
    Ok(Checkpoint {
        path: path.to_owned(),
        kind: Kind::Safetensors,
        config,
        metadata: None,
        generation_config: None,
        tokenizer: TokenizerSource::None,
        files: files.list,
        tensors: files.tensors,
    })
}

/// The name of the only safetensors file of a folder without index.
fn single_file(folder: &Path) -> Result<String, LoadError> {
    if folder.join(SINGLE).is_file() {
        return Ok(SINGLE.to_owned());
    }
    let io = |e| LoadError::io(folder, &e);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") {
            names.push(name);
        }
    }
    names.sort();
    match names.as_slice() {
        [only] if split_name(only).is_none() => Ok(only.clone()),
        [] => Err(LoadError::new(folder, "folder", format!("{SINGLE} or {INDEX}"), "neither")),
        several => {
            let found = format!("{} without an index", several.join(", "));
            Err(LoadError::new(folder, "folder", format!("{SINGLE} or {INDEX}"), found))
        }
    }
}

/// The index's map from tensor names to file names, all of them plain names in the same folder.
fn read_index(index: &Path) -> Result<BTreeMap<String, String>, LoadError> {
    let json = read_json(index, MAX_INDEX_BYTES)?;
    let Some(map) = json.get("weight_map").and_then(Value::as_object) else {
        return Err(LoadError::new(index, "weight_map", "an object", "none"));
    };
    let mut out = BTreeMap::new();
    for (name, file) in map {
        let plain =
            |f: &&str| !f.is_empty() && !f.contains(['/', '\\', '\0']) && !f.starts_with('.');
        let Some(file) = file.as_str().filter(plain) else {
            let expected = "the name of a file in the same folder";
            return Err(LoadError::new(index, format!("weight_map.{name}"), expected, file));
        };
        out.insert(name.clone(), file.to_owned());
    }
    if out.is_empty() {
        return Err(LoadError::new(index, "weight_map", "at least one tensor", "none"));
    }
    Ok(out)
}

fn read_json(path: &Path, max_bytes: u64) -> Result<Value, LoadError> {
    let io = |e| LoadError::io(path, &e);
    let len = std::fs::metadata(path).map_err(io)?.len();
    if len > max_bytes {
        let expected = format!("at most {max_bytes} bytes");
        return Err(LoadError::new(path, "file size", expected, format!("{len} bytes")));
    }
    let text = std::fs::read(path).map_err(io)?;
    serde_json::from_slice(&text).map_err(|e| LoadError::new(path, "file", "valid JSON", e))
}

// ---------------------------------------------------------------------------------------------
// GGUF

fn open_gguf(path: &Path) -> Result<Checkpoint, LoadError> {
    let bytes = Bytes::map(path)?;
    if !bytes.starts_with(b"GG") && !bytes.starts_with(b"FUGG") {
        let expected = "a model folder with config.json, or a .gguf file";
        return Err(LoadError::new(path, "file", expected, "another kind of file"));
    }
    let first = gguf::parse(path, &bytes)?;
    let parts = match first.metadata.unsigned("split.count")? {
        None | Some(0 | 1) => 1,
        Some(n) if n <= MAX_SHARDS => n,
        Some(n) => {
            return Err(LoadError::new(path, "split.count", format!("at most {MAX_SHARDS}"), n));
        }
    };
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let mut files = Files::default();
    let metadata = first.metadata.clone();
    check_part(&first, 0, parts)?;
    files.add_gguf(path.to_owned(), bytes, first)?;
    if parts > 1 {
        let Some((stem, 1, count)) = split_name(name).filter(|s| s.2 == parts) else {
            let expected = format!("the first part, named …-00001-of-{parts:05}.gguf");
            return Err(LoadError::new(path, "file name", expected, name));
        };
        for no in 2..=count {
            let path = path.with_file_name(format!("{stem}-{no:05}-of-{count:05}.gguf"));
            let bytes = Bytes::map(&path)?;
            let part = gguf::parse(&path, &bytes)?;
            check_part(&part, no - 1, parts)?;
            files.add_gguf(path, bytes, part)?;
        }
    }
    if let Some(total) = metadata.unsigned("split.tensors.count")?
        && parts > 1
        && total != files.tensors.len() as u64
    {
        let found = files.tensors.len();
        return Err(LoadError::new(path, "split.tensors.count", total, found));
    }
    Ok(gguf_checkpoint(path, metadata, files))
}

pub(super) fn gguf_in_memory(path: &Path, bytes: Bytes) -> Result<Checkpoint, LoadError> {
    let parsed = gguf::parse(path, &bytes)?;
    check_part(&parsed, 0, 1)?;
    let metadata = parsed.metadata.clone();
    let mut files = Files::default();
    files.add_gguf(path.to_owned(), bytes, parsed)?;
    Ok(gguf_checkpoint(path, metadata, files))
}

fn gguf_checkpoint(path: &Path, metadata: gguf::Metadata, files: Files) -> Checkpoint {
    Checkpoint {
        path: path.to_owned(),
        kind: Kind::Gguf,
        config: Value::Null,
        tokenizer: TokenizerSource::of_gguf(&metadata),
        metadata: Some(metadata),
        generation_config: None,
        files: files.list,
        tensors: files.tensors,
    }
}

/// Whether this file says of itself that it is part `no` (from 0) of `count`.
fn check_part(part: &Gguf, no: u64, count: u64) -> Result<(), LoadError> {
    let metadata = &part.metadata;
    for (key, expected, default) in [("split.no", no, 0), ("split.count", count, 1)] {
        let found = metadata.unsigned(key)?.unwrap_or(default);
        // A file that was never split may say 0 of 0.
        if found != expected && !(key == "split.count" && count == 1 && found == 0) {
            return Err(LoadError::new(metadata.file(), key, expected, found));
        }
    }
    Ok(())
}

/// `stem-00002-of-00003.gguf` (or `.safetensors`) as (stem, 2, 3).
fn split_name(name: &str) -> Option<(&str, u64, u64)> {
    let name = name.strip_suffix(".gguf").or_else(|| name.strip_suffix(".safetensors"))?;
    let (rest, count) = name.rsplit_once("-of-")?;
    let (stem, no) = rest.rsplit_once('-')?;
    let number = |s: &str| s.parse().ok().filter(|_| s.len() == 5);
    Some((stem, number(no)?, number(count)?))
}

// ---------------------------------------------------------------------------------------------

/// The files opened so far and their tensors.
#[derive(Default)]
struct Files {
    list: Vec<(PathBuf, Bytes)>,
    tensors: HashMap<String, Entry>,
}

impl Files {
    fn add_safetensors(&mut self, path: PathBuf, bytes: Bytes) -> Result<(), LoadError> {
        let tensors = safetensors::parse(&path, &bytes)?;
        self.list.push((path, bytes));
        let file = self.list.len() - 1;
        for t in tensors {
            let entry = Entry { dtype: t.dtype, shape: t.shape, file, range: t.range };
            self.insert(t.name, entry)?;
        }
        Ok(())
    }

    fn add_gguf(&mut self, path: PathBuf, bytes: Bytes, parsed: Gguf) -> Result<(), LoadError> {
        self.list.push((path, bytes));
        let file = self.list.len() - 1;
        for t in parsed.tensors {
            let dtype = Dtype::from_ggml(t.ty);
            self.insert(t.name, Entry { dtype, shape: t.shape, file, range: t.range })?;
        }
        Ok(())
    }

    fn insert(&mut self, name: String, entry: Entry) -> Result<(), LoadError> {
        let file = entry.file;
        match self.tensors.insert(name.clone(), entry) {
            None => Ok(()),
            Some(before) => {
                let found = format!("it also in {}", self.list[before.file].0.display());
                let field = format!("tensor {name}");
                Err(LoadError::new(&self.list[file].0, field, "each name once", found))
            }
        }
    }
}
