//! Checkpoints: a folder with `config.json` and safetensors, or a GGUF file. Mapped, never copied.

mod bytes;
mod folder;
mod ggml;
pub mod gguf;
pub mod safetensors;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod tokenizer;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::Value;

pub use bytes::Bytes;
pub use ggml::GgmlType;
pub use tokenizer::{GgufTokenizer, TokenizerSource};

use crate::LoadError;

/// Opens the checkpoint at `path`: a folder with `config.json` and safetensors (one file, or shards
/// with `model.safetensors.index.json`), a folder with one GGUF model, or a `.gguf` file (the first
/// one, if it is split; the others are found by name). Reads headers only.
///
/// The files are mapped and must not be changed or cut while the checkpoint is in use.
///
/// # Errors
/// If a file is missing or malformed.
pub fn open(path: &Path) -> Result<Checkpoint, LoadError> {
    folder::open(path)
}

/// How a checkpoint is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A folder with `config.json`.
    Safetensors,
    /// One or several GGUF files.
    Gguf,
}

/// Storage of the elements of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 32-bit IEEE.
    F32,
    /// 16-bit IEEE.
    F16,
    /// 16-bit brain float.
    Bf16,
    /// 32-bit words, which in MLX files hold packed codes.
    U32,
    /// A block format of ggml.
    Ggml(GgmlType),
    /// Any other safetensors dtype: its name and the bits of an element.
    Other(&'static str, u64),
}

/// The safetensors dtypes that aren't variants of [`Dtype`].
const OTHER_DTYPES: &[(&str, u64)] = &[
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("BOOL", 8),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("I16", 16),
    ("U16", 16),
    ("I32", 32),
    ("C64", 64),
    ("F64", 64),
    ("I64", 64),
    ("U64", 64),
];

impl Dtype {
    fn from_safetensors(name: &str) -> Option<Dtype> {
        match name {
            "F32" => Some(Dtype::F32),
            "F16" => Some(Dtype::F16),
            "BF16" => Some(Dtype::Bf16),
            "U32" => Some(Dtype::U32),
            _ => {
                let &(name, bits) = OTHER_DTYPES.iter().find(|d| d.0 == name)?;
                Some(Dtype::Other(name, bits))
            }
        }
    }

    /// The float types of ggml are the ones of [`Dtype`].
    fn from_ggml(ty: GgmlType) -> Dtype {
        match ty.name() {
            "F32" => Dtype::F32,
            "F16" => Dtype::F16,
            "BF16" => Dtype::Bf16,
            _ => Dtype::Ggml(ty),
        }
    }

    /// Bits of an element of a safetensors dtype.
    fn bits(self) -> u64 {
        match self {
            Dtype::F32 | Dtype::U32 => 32,
            Dtype::F16 | Dtype::Bf16 => 16,
            Dtype::Ggml(ty) => 8 * ty.block().1 as u64,
            Dtype::Other(_, bits) => bits,
        }
    }

    /// The name in files.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "F32",
            Dtype::F16 => "F16",
            Dtype::Bf16 => "BF16",
            Dtype::U32 => "U32",
            Dtype::Ggml(ty) => ty.name(),
            Dtype::Other(name, _) => name,
        }
    }
}

/// The bytes of a tensor, as their dtype says; row-major, little endian, of any alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage<'a> {
    /// 32-bit IEEE.
    F32(&'a [u8]),
    /// 16-bit IEEE.
    F16(&'a [u8]),
    /// 16-bit brain float.
    Bf16(&'a [u8]),
    /// 32-bit words.
    U32(&'a [u8]),
    /// Blocks of ggml along the last dimension.
    Ggml(GgmlType, &'a [u8]),
    /// Another safetensors dtype, by name.
    Other(&'static str, &'a [u8]),
}

impl<'a> Storage<'a> {
    /// The bytes.
    pub fn bytes(&self) -> &'a [u8] {
        match self {
            Storage::F32(b) | Storage::F16(b) | Storage::Bf16(b) | Storage::U32(b) => b,
            Storage::Ggml(_, b) | Storage::Other(_, b) => b,
        }
    }

    /// The name of the dtype in files.
    pub fn dtype_name(&self) -> &'static str {
        match self {
            Storage::F32(_) => "F32",
            Storage::F16(_) => "F16",
            Storage::Bf16(_) => "BF16",
            Storage::U32(_) => "U32",
            Storage::Ggml(ty, _) => ty.name(),
            Storage::Other(name, _) => name,
        }
    }
}

/// A tensor of a checkpoint, in place.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// The file that holds it, for errors.
    pub file: &'a Path,
    /// Row-major, outermost dimension first.
    pub shape: Vec<usize>,
    /// Its bytes. Their number fits shape and dtype.
    pub storage: Storage<'a>,
}

impl Tensor<'_> {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The elements as f32, if the dtype is a float one.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        fn decode<const N: usize>(bytes: &[u8], one: impl Fn([u8; N]) -> f32) -> Vec<f32> {
            bytes.as_chunks::<N>().0.iter().map(|b| one(*b)).collect()
        }
        match self.storage {
            Storage::F32(b) => Some(decode(b, f32::from_le_bytes)),
            Storage::F16(b) => Some(decode(b, |b| half::f16::from_le_bytes(b).to_f32())),
            Storage::Bf16(b) => Some(decode(b, |b| half::bf16::from_le_bytes(b).to_f32())),
            Storage::U32(_) | Storage::Ggml(..) | Storage::Other(..) => None,
        }
    }
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    /// Index of its file.
    file: usize,
    range: Range<usize>,
}

/// An open checkpoint: headers in memory, data mapped.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    kind: Kind,
    config: Value,
    metadata: Option<gguf::Metadata>,
    generation_config: Option<Value>,
    tokenizer: TokenizerSource,
    files: Vec<(PathBuf, Bytes)>,
    tensors: HashMap<String, Entry>,
}

impl Checkpoint {
    /// A GGUF checkpoint of one file whose bytes are in memory. `path` is for errors.
    ///
    /// # Errors
    /// If the file is malformed or is one part of several.
    pub fn from_gguf_bytes(path: &Path, bytes: Vec<u8>) -> Result<Checkpoint, LoadError> {
        folder::gguf_in_memory(path, Bytes::from(bytes))
    }

    /// A safetensors checkpoint of one file whose bytes are in memory. `path` is for errors.
    ///
    /// # Errors
    /// If the file is malformed.
    pub fn from_safetensors_bytes(
        path: &Path,
        config: Value,
        bytes: Vec<u8>,
    ) -> Result<Checkpoint, LoadError> {
        folder::safetensors_in_memory(path, config, Bytes::from(bytes))
    }

    /// The folder, or the (first) GGUF file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How it is stored.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The file that holds the geometry, for errors: `config.json` or the GGUF file.
    pub fn config_file(&self) -> PathBuf {
        match self.kind {
            Kind::Safetensors => self.path.join("config.json"),
            Kind::Gguf => self.path.clone(),
        }
    }

    /// `config.json`; null for GGUF.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The metadata of a GGUF file.
    pub fn metadata(&self) -> Option<&gguf::Metadata> {
        self.metadata.as_ref()
    }

    /// `generation_config.json`, if there is one.
    pub fn generation_config(&self) -> Option<&Value> {
        self.generation_config.as_ref()
    }

    /// Where the tokenizer and the chat template are.
    pub fn tokenizer(&self) -> &TokenizerSource {
        &self.tokenizer
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.tensors.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Whether a tensor of this name exists.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let (name, entry) = self.tensors.get_key_value(name)?;
        let (file, bytes) = &self.files[entry.file];
        let bytes = &bytes[entry.range.clone()];
        let storage = match entry.dtype {
            Dtype::F32 => Storage::F32(bytes),
            Dtype::F16 => Storage::F16(bytes),
            Dtype::Bf16 => Storage::Bf16(bytes),
            Dtype::U32 => Storage::U32(bytes),
            Dtype::Ggml(ty) => Storage::Ggml(ty, bytes),
            Dtype::Other(name, _) => Storage::Other(name, bytes),
        };
        Some(Tensor { name, file, shape: entry.shape.clone(), storage })
    }

    /// The tensor of this name and shape.
    ///
    /// # Errors
    /// If it is missing or has another shape.
    pub fn require(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, LoadError> {
        let Some(tensor) = self.tensor(name) else {
            let field = format!("tensor {name}");
            let expected = format!("a tensor of shape {shape:?}");
            return Err(LoadError::new(&self.path, field, expected, "none of this name"));
        };
        if tensor.shape != shape {
            let (expected, found) = (format!("shape {shape:?}"), format!("{:?}", tensor.shape));
            return Err(LoadError::new(tensor.file, format!("tensor {name}"), expected, found));
        }
        Ok(tensor)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, bytes)| bytes.len() as u64).sum()
    }

    /// Tells the system that the files will be read once, front to back.
    pub fn advise_sequential(&self) {
        for (_, bytes) in &self.files {
            bytes.advise_sequential();
        }
    }

    /// Gives the memory back that what was read so far takes; reading it again is slower, no more.
    pub fn release(&self) {
        for (_, bytes) in &self.files {
            bytes.release();
        }
    }
}
