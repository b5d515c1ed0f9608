//! Writers of small files for tests.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// A folder that is removed when dropped.
pub(crate) struct TempDir(PathBuf);

impl TempDir {
    pub(crate) fn new(name: &str) -> TempDir {
        let dir = std::env::temp_dir().join(format!("th-model-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        TempDir(dir)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A folder of the repository's `models`.
pub(crate) fn bundled(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(name)
}

/// A safetensors file of (name, dtype, shape, bytes).
pub(crate) fn safetensors(tensors: &[(String, &str, Vec<usize>, Vec<u8>)]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let end = data.len() + bytes.len();
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [data.len(), end]});
        header.insert(name.clone(), entry);
        data.extend(bytes);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

/// A safetensors file of this header text.
pub(crate) fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(data);
    out
}

/// Writes a GGUF file piece by piece; nothing is checked, so malformed ones can be made too.
#[derive(Clone)]
pub(crate) struct GgufWriter {
    pub(crate) version: u32,
    pub(crate) alignment: usize,
    values: Vec<Vec<u8>>,
    tensors: Vec<(Vec<u8>, Vec<u8>)>,
    data_len: usize,
}

impl Default for GgufWriter {
    fn default() -> GgufWriter {
        let (values, tensors) = (Vec::new(), Vec::new());
        GgufWriter { version: 3, alignment: 32, values, tensors, data_len: 0 }
    }
}

fn text(s: &str) -> Vec<u8> {
    let mut out = (s.len() as u64).to_le_bytes().to_vec();
    out.extend(s.as_bytes());
    out
}

impl GgufWriter {
    /// A value of any type as raw bytes.
    pub(crate) fn raw(&mut self, key: &str, ty: u32, bytes: &[u8]) -> &mut GgufWriter {
        let mut entry = text(key);
        entry.extend(ty.to_le_bytes());
        entry.extend(bytes);
        self.values.push(entry);
        self
    }

    pub(crate) fn u32(&mut self, key: &str, value: u32) -> &mut GgufWriter {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub(crate) fn f32(&mut self, key: &str, value: f32) -> &mut GgufWriter {
        self.raw(key, 6, &value.to_le_bytes())
    }

    pub(crate) fn bool(&mut self, key: &str, value: bool) -> &mut GgufWriter {
        self.raw(key, 7, &[u8::from(value)])
    }

    pub(crate) fn str(&mut self, key: &str, value: &str) -> &mut GgufWriter {
        self.raw(key, 8, &text(value))
    }

    pub(crate) fn strs(&mut self, key: &str, values: &[&str]) -> &mut GgufWriter {
        let mut out = 8u32.to_le_bytes().to_vec();
        out.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|v| out.extend(text(v)));
        self.raw(key, 9, &out)
    }

    pub(crate) fn i32s(&mut self, key: &str, values: &[i32]) -> &mut GgufWriter {
        let mut out = 5u32.to_le_bytes().to_vec();
        out.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|v| out.extend(v.to_le_bytes()));
        self.raw(key, 9, &out)
    }

    /// Takes back the values of a key.
    pub(crate) fn remove(&mut self, key: &str) -> &mut GgufWriter {
        self.values.retain(|entry| !entry.starts_with(&text(key)));
        self
    }

    /// A tensor with its data; `shape` is outermost first.
    pub(crate) fn tensor(&mut self, name: &str, ty: u32, shape: &[usize], data: &[u8]) {
        let ne: Vec<u64> = shape.iter().rev().map(|&d| d as u64).collect();
        self.entry(name, &ne, ty, self.data_len as u64);
        let mut data = data.to_vec();
        data.resize(data.len().next_multiple_of(self.alignment), 0);
        self.data_len += data.len();
        self.tensors.last_mut().unwrap().1 = data;
    }

    /// A tensor's entry of the table alone.
    pub(crate) fn entry(&mut self, name: &str, ne: &[u64], ty: u32, offset: u64) {
        let mut entry = text(name);
        entry.extend((ne.len() as u32).to_le_bytes());
        ne.iter().for_each(|d| entry.extend(d.to_le_bytes()));
        entry.extend(ty.to_le_bytes());
        entry.extend(offset.to_le_bytes());
        self.tensors.push((entry, Vec::new()));
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.values.len() as u64).to_le_bytes());
        self.values.iter().for_each(|v| out.extend(v));
        self.tensors.iter().for_each(|(entry, _)| out.extend(entry));
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        self.tensors.iter().for_each(|(_, data)| out.extend(data));
        out
    }
}
