//! Files with a kind, a key and a checksum.
//!
//! `THCACHE2`, kind u32, key of 32 bytes, length u64, payload, BLAKE3 of all before; little endian.

use std::io;

use super::files::Files;

/// Names a file.
pub(crate) type Key = [u8; 32];

const MAGIC: &[u8; 8] = b"THCACHE2";
pub(super) const HEADER: usize = 8 + 4 + 32 + 8;
const SUM: usize = 32;

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Page = 1,
    State = 2,
}

impl Kind {
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Kind::Page => "page",
            Kind::State => "state",
        }
    }
}

/// BLAKE3 of some parts, one after the other: a checkpoint of gigabytes is read in less time than it took to compute.
pub(super) fn hash(parts: &[&[u8]]) -> Key {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// The name of a key's file.
pub(super) fn name(kind: Kind, key: &Key) -> String {
    let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{hex}.{}", kind.suffix())
}

/// The key in a file's name.
pub(super) fn key_of(name: &str, kind: Kind) -> Option<Key> {
    let hex = name.strip_suffix(kind.suffix())?.strip_suffix('.')?;
    let mut key = [0; 32];
    if hex.len() != 64 || !hex.is_ascii() {
        return None;
    }
    for (byte, i) in key.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&hex[i..i + 2], 16).ok()?;
    }
    Some(key)
}

/// Bytes of a file with so much payload.
pub(super) fn file_bytes(payload: usize) -> u64 {
    (HEADER + payload + SUM) as u64
}

fn header(kind: Kind, key: &Key, payload: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&(kind as u32).to_le_bytes());
    header[12..44].copy_from_slice(key);
    header[44..].copy_from_slice(&(payload as u64).to_le_bytes());
    header
}

/// Writes a file as a whole or not at all.
pub(super) fn write(files: &dyn Files, kind: Kind, key: &Key, payload: &[u8]) -> io::Result<()> {
    let header = header(kind, key, payload.len());
    files.write(&name(kind, key), &[&header, payload, &hash(&[&header, payload])])
}

/// Reads a file's payload if all of it is right.
pub(super) fn read(files: &dyn Files, kind: Kind, key: &Key) -> Result<Vec<u8>, String> {
    let name = name(kind, key);
    let wrong = |what: &str| format!("{}: {what}", files.place(&name));
    let mut bytes = files.read(&name, usize::MAX).map_err(|error| wrong(&error.to_string()))?;
    let payload = bytes.len().checked_sub(HEADER + SUM).ok_or_else(|| wrong("too short"))?;
    let (head, sum) = bytes.split_at(HEADER + payload);
    if head[..HEADER] != header(kind, key, payload) {
        return Err(wrong("not the file that its name says"));
    }
    if hash(&[head]) != *sum {
        return Err(wrong("damaged: its checksum is another"));
    }
    bytes.truncate(HEADER + payload);
    bytes.drain(..HEADER);
    Ok(bytes)
}

/// The first bytes of a file's payload, unchecked.
pub(super) fn peek(files: &dyn Files, key: &Key, kind: Kind, most: usize) -> Option<Vec<u8>> {
    let mut start = files.read(&name(kind, key), HEADER + most).ok()?;
    // All of the header but the length, of which nothing is known.
    let head = start.get(..HEADER)?;
    (head[..HEADER - 8] == header(kind, key, 0)[..HEADER - 8]).then(|| start.split_off(HEADER))
}

/// A file with another payload and a checksum that is right: what no reader can tell from what was written.
#[cfg(test)]
pub(crate) fn forge(file: &[u8], change: impl FnOnce(&mut [u8])) -> Option<Vec<u8>> {
    let mut bytes = file.get(..file.len().checked_sub(SUM)?)?.to_vec();
    change(bytes.get_mut(HEADER..)?);
    let sum = hash(&[&bytes]);
    bytes.extend_from_slice(&sum);
    Some(bytes)
}
