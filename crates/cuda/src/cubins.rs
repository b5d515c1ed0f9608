//! Compiled kernels on disk, so that a second start compiles nothing.

use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"thcubin1";

/// A folder of compiled kernels, each file named by a hash of all that made it.
#[derive(Debug)]
pub(crate) struct Cubins {
    folder: Option<PathBuf>,
}

impl Cubins {
    /// Nothing is kept without a folder.
    pub(crate) fn new(folder: Option<PathBuf>) -> Cubins {
        Cubins { folder }
    }

    fn path(&self, key: u128) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.join(format!("{key:032x}.cubin")))
    }

    /// A binary whose file is whole.
    pub(crate) fn get(&self, key: u128) -> Option<Vec<u8>> {
        let mut file = std::fs::read(self.path(key)?).ok()?;
        let cubin = file.strip_prefix(MAGIC)?;
        let (sum, cubin) = cubin.split_first_chunk::<16>()?;
        if u128::from_le_bytes(*sum) != hash(&[cubin]) {
            return None;
        }
        file.drain(..MAGIC.len() + 16);
        Some(file)
    }

    /// Keeps a binary. A folder that can't be written costs only time at the next start.
    pub(crate) fn put(&self, key: u128, cubin: &[u8]) {
        if let Some(path) = self.path(key) {
            let _ = write_whole(&path, cubin);
        }
    }
}

/// Under another name first, so that a reader sees all of the file or none.
fn write_whole(path: &Path, cubin: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let unfinished = path.with_extension(format!("{}.part", std::process::id()));
    let sum = hash(&[cubin]).to_le_bytes();
    std::fs::write(&unfinished, [MAGIC, &sum[..], cubin].concat())?;
    std::fs::rename(&unfinished, path)
}

/// FNV-1a over 128 bits of the parts and their lengths.
pub(crate) fn hash(parts: &[&[u8]]) -> u128 {
    const PRIME: u128 = (1 << 88) + 0x13b;
    let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128;
    let mut take = |byte: u8| hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
    for part in parts {
        (part.len() as u64).to_le_bytes().into_iter().for_each(&mut take);
        part.iter().copied().for_each(&mut take);
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::{Cubins, hash};

    #[test]
    fn a_damaged_file_is_not_used() {
        let folder = std::env::temp_dir().join(format!("cubins-{}", std::process::id()));
        let cubins = Cubins::new(Some(folder.clone()));
        assert_eq!(cubins.get(7), None);
        cubins.put(7, b"machine code");
        assert_eq!(cubins.get(7).as_deref(), Some(&b"machine code"[..]));
        let path = cubins.path(7).expect("a folder was given");
        let mut file = std::fs::read(&path).expect("just written");
        for cut in [0, 5, 20, file.len() - 1] {
            std::fs::write(&path, &file[..cut]).expect("a writable folder");
            assert_eq!(cubins.get(7), None, "cut at {cut}");
        }
        *file.last_mut().expect("not empty") ^= 1;
        std::fs::write(&path, &file).expect("a writable folder");
        assert_eq!(cubins.get(7), None);
        std::fs::remove_dir_all(folder).expect("the folder made above");
    }

    #[test]
    fn parts_do_not_run_together() {
        assert_ne!(hash(&[b"ab", b"c"]), hash(&[b"a", b"bc"]));
        assert_eq!(hash(&[b"ab", b"c"]), hash(&[b"ab", b"c"]));
    }
}
