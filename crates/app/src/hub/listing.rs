//! What a repository holds, and which of it a model needs.

use serde::Deserialize;

use super::HubError;
use super::name::{ModelName, check_path, is_commit, is_hex};

/// The most files of a repository.
const MAX_FILES: usize = 10_000;

/// A state of a repository.
#[derive(Clone, Debug)]
pub struct Listing {
    /// The commit.
    pub commit: String,
    /// Its files.
    pub files: Vec<RemoteFile>,
}

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Its path, with slashes; it stays where it starts.
    pub path: String,
    /// Its bytes.
    pub size: u64,
    /// What it has to hash to.
    pub checksum: Checksum,
}

/// What a file has to hash to; also its name among the cache's blobs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Checksum {
    /// SHA-256 of its bytes, as large files have it.
    Sha256(String),
    /// SHA-1 as git makes it, with the length before the bytes.
    Git(String),
}

impl Checksum {
    /// It, in hexadecimal digits.
    pub fn hex(&self) -> &str {
        match self {
            Checksum::Sha256(hex) | Checksum::Git(hex) => hex,
        }
    }
}

#[derive(Deserialize)]
struct Raw {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl Listing {
    /// Reads the site's answer. Files whose names or checksums make no sense are an error: nothing
    /// of such a repository is trusted.
    ///
    /// # Errors
    /// As said.
    pub fn parse(name: &ModelName, json: &[u8]) -> Result<Listing, HubError> {
        let error = |what: String| HubError::Listing { name: name.to_string(), what };
        let raw: Raw = serde_json::from_slice(json).map_err(|e| error(e.to_string()))?;
        if !is_commit(&raw.sha) {
            return Err(error(format!("{:?} is no commit", raw.sha)));
        }
        if raw.siblings.len() > MAX_FILES {
            return Err(error(format!("more than {MAX_FILES} files")));
        }
        let file = |sibling: Sibling| {
            let wrong = |what: &str| error(format!("{:?} {what}", sibling.rfilename));
            check_path(&sibling.rfilename).map_err(wrong)?;
            let (size, checksum) = match (&sibling.lfs, sibling.size, &sibling.blob) {
                (Some(lfs), _, _) if is_hex(&lfs.sha256, 64) => {
                    (lfs.size, Checksum::Sha256(lfs.sha256.clone()))
                }
                (None, Some(size), Some(blob)) if is_hex(blob, 40) => {
                    (size, Checksum::Git(blob.clone()))
                }
                _ => return Err(wrong("has no size or checksum")),
            };
            Ok(RemoteFile { path: sibling.rfilename, size, checksum })
        };
        let files = raw.siblings.into_iter().map(file).collect::<Result<_, _>>()?;
        Ok(Listing { commit: raw.sha, files })
    }

    /// The files that a model needs, and the path among them that opens it: "" for all of them
    /// together, else one file.
    ///
    /// # Errors
    /// No model among them, or several.
    pub fn choose(&self, name: &ModelName) -> Result<(Vec<RemoteFile>, String), HubError> {
        let paths: Vec<&str> = self.files.iter().map(|file| file.path.as_str()).collect();
        let chosen = choose(&paths, name)?;
        let wanted = |file: &&RemoteFile| chosen.files.contains(&file.path);
        Ok((self.files.iter().filter(wanted).cloned().collect(), chosen.opens))
    }
}

/// The files of a model.
#[derive(Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Their paths.
    pub files: Vec<String>,
    /// The one that opens it; empty if it is their folder.
    pub opens: String,
}

/// Chooses a model's files among the paths of a repository.
///
/// # Errors
/// No model among them, or several.
pub fn choose(paths: &[&str], name: &ModelName) -> Result<Chosen, HubError> {
    let error = |what: String| Err(HubError::Files { name: name.to_string(), what });
    let ends = |path: &str, end: &str| path.to_ascii_lowercase().ends_with(end);
    let at_root = |path: &&&str| !path.contains('/');
    if name.file.is_none() && paths.iter().filter(at_root).any(|path| ends(path, ".safetensors")) {
        let wanted = |path: &&&str| {
            let small = [".json", ".jinja", "merges.txt"].iter().any(|end| ends(path, end));
            small || ends(path, ".safetensors") && !path.starts_with("consolidated")
        };
        let files = paths.iter().filter(at_root).filter(wanted);
        return Ok(Chosen {
            files: files.map(|p| (*p).to_owned()).collect(),
            opens: String::new(),
        });
    }
    let projector = |path: &str| path.to_ascii_lowercase().contains("mmproj");
    let mut models: Vec<&str> =
        paths.iter().copied().filter(|path| ends(path, ".gguf") && !projector(path)).collect();
    models.sort_unstable();
    let all = models.clone();
    if let Some(file) = &name.file {
        let file = file.to_ascii_lowercase();
        models.retain(|path| path.to_ascii_lowercase().contains(&file));
        // A name in full is meant, however many others contain it.
        let stem = |path: &str| path.to_ascii_lowercase().trim_end_matches(".gguf").to_owned();
        let full = |path: &&str| {
            let stem = stem(path);
            stem == file.trim_end_matches(".gguf") || stem.ends_with(&format!("-{file}"))
        };
        if models.iter().any(full) {
            models.retain(full);
        }
    }
    let whole = |path: &str| {
        path.rsplit_once("-of-").map_or(path.to_owned(), |(head, tail)| {
            format!("{}-of-{tail}", head.trim_end_matches(|c: char| c.is_ascii_digit()))
        })
    };
    let mut names: Vec<String> = models.iter().map(|path| whole(path)).collect();
    names.dedup();
    match (names.len(), models.first()) {
        (1, Some(first)) => Ok(Chosen {
            opens: (*first).to_owned(),
            files: models.iter().map(|path| (*path).to_owned()).collect(),
        }),
        (0, _) if all.is_empty() => error("it holds neither .safetensors nor .gguf files".into()),
        (0, _) => error(format!("no .gguf file is called so; there are {}", all.join(", "))),
        _ => error(format!(
            "say which file, as in {}:Q4_K_M; there are {}",
            name.repo,
            models.join(", ")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_a_model() {
        let name = |text: &str| ModelName::parse(text).unwrap();
        let paths = [
            "README.md",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "chat_template.jinja",
            "onnx/model.safetensors",
            "pytorch_model.bin",
            "x-Q4_K_M.gguf",
        ];
        let chosen = choose(&paths, &name("a/b")).unwrap();
        assert_eq!((chosen.files.len(), chosen.opens.as_str()), (6, ""));
        assert!(chosen.files.iter().all(|path| !path.contains('/') && path != "pytorch_model.bin"));
        assert_eq!(choose(&paths, &name("a/b:q4_k_m")).unwrap().opens, "x-Q4_K_M.gguf");
        let paths = [
            "m-Q4_K_M.gguf",
            "m-UD-Q4_K_M.gguf",
            "m-Q8_0-00001-of-00002.gguf",
            "m-Q8_0-00002-of-00002.gguf",
            "mmproj-F16.gguf",
        ];
        let shards = choose(&paths, &name("a/b:Q8_0")).unwrap();
        assert_eq!((shards.files.len(), shards.opens.as_str()), (2, "m-Q8_0-00001-of-00002.gguf"));
        assert_eq!(choose(&paths, &name("a/b:UD-Q4_K_M")).unwrap().files, ["m-UD-Q4_K_M.gguf"]);
        assert_eq!(choose(&paths, &name("a/b:m-Q4_K_M.gguf")).unwrap().files, ["m-Q4_K_M.gguf"]);
        for (wanted, word) in
            [("a/b", "m-UD-Q4_K_M.gguf"), ("a/b:Q2", "m-Q4_K_M.gguf"), ("a/b:Q4", "say which")]
        {
            let error = choose(&paths, &name(wanted)).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        assert!(choose(&["README.md"], &name("a/b")).unwrap_err().to_string().contains("neither"));
        assert_eq!(choose(&["only.gguf"], &name("a/b")).unwrap().opens, "only.gguf");
    }

    #[test]
    fn listings_of_strangers() {
        let name = ModelName::parse("a/b").unwrap();
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let parse = |sha: &str, sibling: &str| {
            Listing::parse(&name, format!(r#"{{"sha":"{sha}","siblings":[{sibling}]}}"#).as_bytes())
        };
        let good = format!(r#"{{"rfilename":"config.json","size":2,"blobId":"{commit}"}}"#);
        assert_eq!(parse(commit, &good).unwrap().files[0].checksum, Checksum::Git(commit.into()));
        assert!(parse("../../x", &good).is_err());
        for bad in ["../config.json", "/etc/passwd", "a\\\\b", "C:x", "nul", "a/../../b"] {
            assert!(parse(commit, &good.replace("config.json", bad)).is_err(), "{bad}");
        }
        assert!(parse(commit, &good.replace(commit, "../../blob")).is_err());
        assert!(parse(commit, r#"{"rfilename":"a","size":2}"#).is_err());
        assert!(parse(commit, r#"{"rfilename":"a","lfs":{"sha256":"x","size":1}}"#).is_err());
        assert!(Listing::parse(&name, b"<html>").is_err());
    }
}
