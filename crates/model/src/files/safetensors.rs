//! The header of a safetensors file: 8 bytes of length (little endian), then JSON
//! `{name: {dtype, shape, data_offsets}}`, then the data.
//!
//! We read the header ourselves instead of through the `safetensors` crate because that keeps the
//! last of two tensors of one name without a word, can overflow when it adds up the sizes of a hostile
//! header, and names neither the tensor nor the sizes in most of its errors. The crate stays as
//! the oracle of our fuzz tests.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::Dtype;
use crate::LoadError;

/// A tensor of the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderTensor {
    /// Name.
    pub name: String,
    /// Storage of the elements.
    pub dtype: Dtype,
    /// Outermost first.
    pub shape: Vec<usize>,
    /// Bytes of the file.
    pub range: Range<usize>,
}

const LENGTH_BYTES: usize = 8;
/// As in the reference implementation: a larger header is an attack or a mistake.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// More than any weight has; bounds what one tensor's shape may allocate.
const MAX_DIMS: usize = 8;

/// The tensors of a whole file's `bytes`, in the order of their data. `file` is for errors.
///
/// # Errors
/// If the header isn't valid, or its tensors don't tile the rest of the file exactly.
pub fn parse(file: &Path, bytes: &[u8]) -> Result<Vec<HeaderTensor>, LoadError> {
    let error = |field: &str, expected: String, found: String| {
        Err(LoadError::new(file, field, expected, found))
    };
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        let found = format!("{} bytes", bytes.len());
        return error("file", "a safetensors file of at least 8 bytes".to_owned(), found);
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES || length > rest.len() as u64 {
        let limit = MAX_HEADER_BYTES.min(rest.len() as u64);
        let expected = format!("at most {limit} bytes in this file of {} bytes", bytes.len());
        return error("header length", expected, length.to_string());
    }
    let (header, data) = rest.split_at(length as usize);
    let data_start = LENGTH_BYTES + header.len();
    let mut raw = parse_header(file, header)?;
    raw.sort_by_key(|t| t.offsets);

    // The tensors must tile the data: each starts where the one before it ended. A short file is
    // told from a malformed header, because it is what an interrupted download leaves.
    let mut tensors = Vec::with_capacity(raw.len());
    let mut end = 0u64;
    for t in raw {
        let [from, to] = t.offsets;
        let field = format!("{}.data_offsets", t.name);
        if from != end || to < from {
            let expected = format!("the data to go on at byte {end}, without gap or overlap");
            return error(&field, expected, format!("[{from}, {to}]"));
        }
        let Some(size) = byte_size(t.dtype.bits(), &t.shape) else {
            let found = format!("{:?} of {}", t.shape, t.dtype.name());
            return error(&t.name, "a shape of whole bytes within 2^63".to_owned(), found);
        };
        if to - from != size {
            let expected = format!("{size} bytes for shape {:?} of {}", t.shape, t.dtype.name());
            return error(&field, expected, format!("{} bytes", to - from));
        }
        end = to;
        if end <= data.len() as u64 {
            let range = data_start + from as usize..data_start + to as usize;
            tensors.push(HeaderTensor { name: t.name, dtype: t.dtype, shape: t.shape, range });
        }
    }
    if end != data.len() as u64 {
        let expected =
            format!("{} bytes as its header says", end.saturating_add(data_start as u64));
        let found = format!("{} bytes (an incomplete download?)", bytes.len());
        return error("file size", expected, found);
    }
    Ok(tensors)
}

/// Bytes of a tensor, unless they overflow or aren't whole.
fn byte_size(bits: u64, shape: &[usize]) -> Option<u64> {
    let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64))?;
    let bits = elements.checked_mul(bits)?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// One entry of the header, before its offsets are checked.
struct RawTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    offsets: [u64; 2],
}

fn parse_header(file: &Path, header: &[u8]) -> Result<Vec<RawTensor>, LoadError> {
    let mut json = serde_json::Deserializer::from_slice(header);
    let parsed = json.deserialize_map(HeaderVisitor).and_then(|t| json.end().map(|()| t));
    parsed.map_err(|e| LoadError::new(file, "header", "valid safetensors JSON", e))
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Vec<RawTensor>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object with one entry for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<RawTensor>, A::Error> {
        let (mut tensors, mut names) = (Vec::new(), HashSet::new());
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(serde::de::Error::custom(format_args!("`{name}` occurs twice")));
            }
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else {
                tensors.push(map.next_value_seed(TensorSeed { name })?);
            }
        }
        Ok(tensors)
    }
}

/// Reads one tensor's entry; knows its name for the errors.
struct TensorSeed {
    name: String,
}

impl<'de> DeserializeSeed<'de> for TensorSeed {
    type Value = RawTensor;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<RawTensor, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TensorSeed {
    type Value = RawTensor;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "an object with dtype, shape and data_offsets for `{}`", self.name)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawTensor, A::Error> {
        let name = self.name;
        let custom = |what: &str| serde::de::Error::custom(format_args!("`{name}`: {what}"));
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(key) = map.next_key::<String>()? {
            let seen = match key.as_str() {
                "dtype" => {
                    let text: String = map.next_value()?;
                    let known = Dtype::from_safetensors(&text);
                    let unknown = || custom(&format!("unknown dtype {text}"));
                    dtype.replace(known.ok_or_else(unknown)?).is_some()
                }
                "shape" => shape.replace(map.next_value_seed(Numbers { max: MAX_DIMS })?).is_some(),
                "data_offsets" => {
                    offsets.replace(map.next_value_seed(Numbers { max: 2 })?).is_some()
                }
                other => return Err(custom(&format!("unknown field {other}"))),
            };
            if seen {
                return Err(custom(&format!("{key} occurs twice")));
            }
        }
        let (Some(dtype), Some(shape), Some(offsets)) = (dtype, shape, offsets) else {
            return Err(custom("dtype, shape or data_offsets is missing"));
        };
        let shape: Result<Vec<usize>, _> = shape.into_iter().map(usize::try_from).collect();
        let shape = shape.map_err(|_| custom("a dimension is too large"))?;
        let offsets = <[u64; 2]>::try_from(offsets).map_err(|_| custom("two data_offsets"))?;
        Ok(RawTensor { name, dtype, shape, offsets })
    }
}

/// A short list of whole numbers.
struct Numbers {
    max: usize,
}

impl<'de> DeserializeSeed<'de> for Numbers {
    type Value = Vec<u64>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Vec<u64>, D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Numbers {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "at most {} whole numbers", self.max)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let mut out = Vec::new();
        while let Some(n) = seq.next_element()? {
            if out.len() == self.max {
                return Err(serde::de::Error::invalid_length(out.len() + 1, &self));
            }
            out.push(n);
        }
        Ok(out)
    }
}
