//! GGUF: metadata, tensor table and aligned data, all little endian.
//!
//! Everything is checked before it is used: counts and lengths against what is left of the file,
//! sums and products for overflow, offsets for alignment, range and overlap. Arrays stay in the
//! file and are decoded when they are asked for.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Bytes;
use super::ggml::GgmlType;
use crate::LoadError;

/// What one file holds.
#[derive(Debug)]
pub struct Gguf {
    /// The key-value part.
    pub metadata: Metadata,
    /// The tensors, in the order of the table.
    pub tensors: Vec<TableTensor>,
}

/// A tensor of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableTensor {
    /// Name.
    pub name: String,
    /// Block format.
    pub ty: GgmlType,
    /// Outermost first (the reverse of ggml's `ne`).
    pub shape: Vec<usize>,
    /// Bytes of the file.
    pub range: Range<usize>,
}

/// The key-value part of a file.
#[derive(Clone, Debug)]
pub struct Metadata {
    file: PathBuf,
    bytes: Bytes,
    values: Arc<HashMap<String, Value>>,
}

/// A metadata value; arrays are ranges of the file.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Str(Range<usize>),
    Array { ty: u32, len: usize, range: Range<usize> },
}

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_DIMS: u32 = 4;
/// The format's own limit for keys; names of tensors are held to it too.
const MAX_NAME_BYTES: u64 = 65_535;

const T_STRING: u32 = 8;
const T_ARRAY: u32 = 9;

/// Reads the metadata and the tensor table of one whole file. `file` is for errors.
///
/// # Errors
/// If anything in the file is malformed.
pub fn parse(file: &Path, bytes: &Bytes) -> Result<Gguf, LoadError> {
    let mut r = Reader { file, bytes, at: 0, what: "header".to_owned() };
    check_version(&mut r)?;
    let (tensor_count, value_count) = (r.u64()?, r.u64()?);
    // The smallest value takes 14 bytes and the smallest tensor 33, so absurd counts fail here.
    r.fits("metadata count", value_count, 14)?;
    r.fits("tensor count", tensor_count, 33)?;

    let mut values = HashMap::new();
    for i in 0..value_count {
        r.what = format!("metadata key {i}");
        let key = r.name()?;
        r.what.clone_from(&key);
        let ty = r.u32()?;
        let value = r.value(ty)?;
        if values.insert(key, value).is_some() {
            return r.error("each key once", "it twice");
        }
    }
    let metadata =
        Metadata { file: file.to_owned(), bytes: bytes.clone(), values: Arc::new(values) };
    let alignment = alignment(&metadata)?;

    let mut table = Vec::new();
    for i in 0..tensor_count {
        r.what = format!("tensor {i}");
        table.push(r.tensor()?);
    }
    let data_start = (r.at as u64).next_multiple_of(alignment);
    let tensors = place(file, table, data_start, alignment, bytes.len() as u64)?;
    Ok(Gguf { metadata, tensors })
}

fn check_version(r: &mut Reader) -> Result<(), LoadError> {
    let magic = r.take(4)?;
    if magic != MAGIC {
        return r.error("a file that starts with `GGUF`", magic.escape_ascii());
    }
    let version = r.u32()?;
    r.what = "version".to_owned();
    match version {
        2 | 3 => Ok(()),
        v if matches!(v.swap_bytes(), 1..=3) => r.error(
            "a little-endian file; convert it with gguf_convert_endian.py",
            format!("a big-endian file of version {}", v.swap_bytes()),
        ),
        v => r.error("version 2 or 3; convert the model again with a current llama.cpp", v),
    }
}

fn alignment(metadata: &Metadata) -> Result<u64, LoadError> {
    let key = "general.alignment";
    match metadata.unsigned(key)? {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(a) if a.is_power_of_two() && a <= 1 << 20 => Ok(a),
        Some(a) => Err(LoadError::new(&metadata.file, key, "a power of two up to 2^20", a)),
    }
}

/// Where each tensor's bytes lie, checked against the file and against each other.
fn place(
    file: &Path,
    table: Vec<RawTensor>,
    data_start: u64,
    alignment: u64,
    file_len: u64,
) -> Result<Vec<TableTensor>, LoadError> {
    let mut names = HashSet::new();
    let mut spans = Vec::with_capacity(table.len());
    let mut tensors = Vec::with_capacity(table.len());
    for t in table {
        let error = |expected: String, found: String| {
            Err(LoadError::new(file, format_args!("tensor {}", t.name), expected, found))
        };
        if !names.insert(t.name.clone()) {
            return error("each name once".to_owned(), "it twice".to_owned());
        }
        if !t.offset.is_multiple_of(alignment) {
            return error(format!("an offset that {alignment} divides"), t.offset.to_string());
        }
        let end = data_start.checked_add(t.offset).and_then(|s| Some((s, s.checked_add(t.size)?)));
        let Some((start, end)) = end.filter(|&(_, end)| end <= file_len) else {
            let needed = u128::from(data_start) + u128::from(t.offset) + u128::from(t.size);
            let expected = format!("a file of at least {needed} bytes");
            return error(expected, format!("{file_len} bytes (an incomplete download?)"));
        };
        spans.push((start, end, tensors.len()));
        let range = start as usize..end as usize;
        tensors.push(TableTensor { name: t.name, ty: t.ty, shape: t.shape, range });
    }
    spans.sort_unstable();
    for pair in spans.windows(2) {
        let ((_, end, a), (start, _, b)) = (pair[0], pair[1]);
        if start < end {
            let field = format!("tensor {}", tensors[b].name);
            let found = format!("bytes shared with {}", tensors[a].name);
            return Err(LoadError::new(file, field, "bytes of its own", found));
        }
    }
    // Writers pad the last tensor to the alignment; anything beyond that isn't ours.
    if let Some(&(_, end, _)) = spans.last()
        && file_len - end >= alignment
    {
        let found = format!("{file_len} bytes");
        return Err(LoadError::new(file, "file size", format!("{end} bytes and padding"), found));
    }
    Ok(tensors)
}

/// A tensor's entry before its place is known.
struct RawTensor {
    name: String,
    ty: GgmlType,
    shape: Vec<usize>,
    offset: u64,
    size: u64,
}

/// Reads forward, never beyond the file. `what` is being read, for errors.
struct Reader<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    at: usize,
    what: String,
}

impl<'a> Reader<'a> {
    fn error<T>(
        &self,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> Result<T, LoadError> {
        Err(LoadError::new(self.file, &self.what, expected, found))
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// Fails unless `count` items of at least `bytes` each may still follow.
    fn fits(&self, what: &str, count: u64, bytes: u64) -> Result<(), LoadError> {
        let most = self.left() / bytes;
        if count <= most {
            return Ok(());
        }
        let expected = format!("at most {most}, for the {} bytes that are left", self.left());
        Err(LoadError::new(self.file, what, expected, count))
    }

    fn take(&mut self, count: u64) -> Result<&'a [u8], LoadError> {
        if count > self.left() {
            let found = format!("{} (a truncated file?)", self.left());
            return self.error(format!("{count} more bytes"), found);
        }
        let part = &self.bytes[self.at..][..count as usize];
        self.at += part.len();
        Ok(part)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], LoadError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32, LoadError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, LoadError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// The range of a string, checked to be UTF-8.
    fn string(&mut self) -> Result<Range<usize>, LoadError> {
        let len = self.u64()?;
        let text = self.take(len)?;
        if std::str::from_utf8(text).is_err() {
            return self.error("UTF-8 text", text.escape_ascii());
        }
        Ok(self.at - text.len()..self.at)
    }

    /// A key or a tensor's name.
    fn name(&mut self) -> Result<String, LoadError> {
        let range = self.string()?;
        let len = range.len() as u64;
        if len == 0 || len > MAX_NAME_BYTES {
            return self.error("a name of 1 to 65535 bytes", format!("{len} bytes"));
        }
        Ok(String::from_utf8_lossy(&self.bytes[range]).into_owned())
    }

    fn value(&mut self, ty: u32) -> Result<Value, LoadError> {
        if ty == T_STRING {
            return Ok(Value::Str(self.string()?));
        }
        if ty != T_ARRAY {
            let Some(size) = scalar_bytes(ty) else {
                return self.error("a value type of 0 to 12", ty);
            };
            return Ok(scalar(ty, self.take(size)?));
        }
        let (ty, len) = (self.u32()?, self.u64()?);
        let start = self.at;
        match scalar_bytes(ty) {
            Some(size) => {
                self.fits(&self.what, len, size)?;
                self.take(len * size)?;
            }
            None if ty == T_STRING => {
                self.fits(&self.what, len, 8)?;
                for _ in 0..len {
                    self.string()?;
                }
            }
            None if ty == T_ARRAY => {
                return self.error("an array of plain values", "nested arrays");
            }
            None => return self.error("an element type of 0 to 12", ty),
        }
        Ok(Value::Array { ty, len: len as usize, range: start..self.at })
    }

    fn tensor(&mut self) -> Result<RawTensor, LoadError> {
        let name = self.name()?;
        self.what = format!("tensor {name}");
        let dims = self.u32()?;
        if !(1..=MAX_DIMS).contains(&dims) {
            return self.error("1 to 4 dimensions", dims);
        }
        let mut ne = Vec::new();
        for _ in 0..dims {
            ne.push(self.u64()?);
        }
        let id = self.u32()?;
        let offset = self.u64()?;
        let Some(ty) = GgmlType::from_id(id) else {
            return self.error("a known ggml type", format!("type id {id}"));
        };
        let (elements, bytes) = ty.block();
        let product = ne.iter().try_fold(1u64, |n, &d| n.checked_mul(d).filter(|&n| n > 0));
        let size = product
            .filter(|_| ne[0].is_multiple_of(elements as u64))
            .and_then(|n| (n / elements as u64).checked_mul(bytes as u64))
            .filter(|&size| size <= i64::MAX as u64);
        let Some(size) = size else {
            let expected = format!("positive sizes within 2^63, the first divided by {elements}");
            return self.error(expected, format!("{ne:?} of {}", ty.name()));
        };
        let shape = ne.iter().rev().map(|&d| d as usize).collect();
        Ok(RawTensor { name, ty, shape, offset, size })
    }
}

/// Bytes of a scalar of this type; `None` for strings, arrays and unknown types.
fn scalar_bytes(ty: u32) -> Option<u64> {
    match ty {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

/// Decodes a scalar whose size [`scalar_bytes`] gave.
fn scalar(ty: u32, bytes: &[u8]) -> Value {
    let mut word = [0u8; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    let raw = u64::from_le_bytes(word);
    match ty {
        1 => Value::Signed(i64::from(raw as u8 as i8)),
        3 => Value::Signed(i64::from(raw as u16 as i16)),
        5 => Value::Signed(i64::from(raw as u32 as i32)),
        6 => Value::Float(f64::from(f32::from_bits(raw as u32))),
        7 => Value::Bool(raw != 0),
        11 => Value::Signed(raw as i64),
        12 => Value::Float(f64::from_bits(raw)),
        _ => Value::Unsigned(raw),
    }
}

impl Metadata {
    /// The file, for errors.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Whether the key is there.
    pub fn contains(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// The keys, in no particular order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// A whole number of any width that isn't negative.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, LoadError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(value) => match value.unsigned() {
                Some(n) => Ok(Some(n)),
                None => self.mistyped(key, "a whole number that isn't negative", value),
            },
        }
    }

    /// A finite number of any type.
    pub fn float(&self, key: &str) -> Result<Option<f64>, LoadError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Float(f)) if f.is_finite() => Ok(Some(*f)),
            Some(Value::Unsigned(n)) => Ok(Some(*n as f64)),
            Some(Value::Signed(n)) => Ok(Some(*n as f64)),
            Some(value) => self.mistyped(key, "a finite number", value),
        }
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, LoadError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(value) => self.mistyped(key, "true or false", value),
        }
    }

    /// A text.
    pub fn str(&self, key: &str) -> Result<Option<&str>, LoadError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Str(range)) => Ok(Some(self.text(range.clone()))),
            Some(value) => self.mistyped(key, "a text", value),
        }
    }

    /// The elements of an array of texts.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, LoadError> {
        let (len, range) = match self.values.get(key) {
            None => return Ok(None),
            Some(Value::Array { ty: T_STRING, len, range }) => (*len, range.clone()),
            Some(value) => return self.mistyped(key, "an array of texts", value),
        };
        // `parse` walked the same bytes, so every length is known to fit.
        let (mut out, mut at) = (Vec::with_capacity(len), range.start);
        while out.len() < len {
            let (size, start) = (le_u64(&self.bytes[at..at + 8]) as usize, at + 8);
            out.push(self.text(start..start + size));
            at = start + size;
        }
        Ok(Some(out))
    }

    /// An array of whole numbers or truth values, none negative. A single number is an array of one.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<u64>>, LoadError> {
        let wrong = |value| self.mistyped(key, "whole numbers that aren't negative", value);
        match self.values.get(key) {
            None => Ok(None),
            Some(value @ Value::Array { ty, range, .. }) => {
                let Some(size) = scalar_bytes(*ty) else { return wrong(value) };
                let items = self.bytes[range.clone()].chunks_exact(size as usize);
                match items.map(|b| scalar(*ty, b).integer()).collect() {
                    Some(list) => Ok(Some(list)),
                    None => wrong(value),
                }
            }
            Some(value) => match value.integer() {
                Some(n) => Ok(Some(vec![n])),
                None => wrong(value),
            },
        }
    }

    fn text(&self, range: Range<usize>) -> &str {
        // `parse` checked that it is UTF-8.
        std::str::from_utf8(&self.bytes[range]).unwrap_or_default()
    }

    fn mistyped<T>(&self, key: &str, expected: &str, found: &Value) -> Result<T, LoadError> {
        let found = match found {
            Value::Str(range) => format!("{:?}", self.text(range.clone())),
            Value::Array { ty, len, .. } => format!("an array of {len} values of type {ty}"),
            Value::Unsigned(n) => n.to_string(),
            Value::Signed(n) => n.to_string(),
            Value::Float(f) => f.to_string(),
            Value::Bool(b) => b.to_string(),
        };
        Err(LoadError::new(&self.file, key, expected, found))
    }
}

impl Value {
    fn unsigned(&self) -> Option<u64> {
        match self {
            Value::Unsigned(n) => Some(*n),
            Value::Signed(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    /// [`Value::unsigned`], with false and true as 0 and 1.
    fn integer(&self) -> Option<u64> {
        match self {
            Value::Bool(b) => Some(u64::from(*b)),
            other => other.unsigned(),
        }
    }
}

fn le_u64(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(bytes);
    u64::from_le_bytes(word)
}
