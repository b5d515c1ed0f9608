//! Names of models, revisions and files, none of which leads out of the cache.

use std::fmt;

/// The longest owner or name.
const MAX_PART: usize = 96;
/// The longest path of a file, and how deep it may lie.
const MAX_PATH: usize = 255;
const MAX_DEPTH: usize = 8;

/// A name that can't be used, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {name:?} {why}")]
pub struct NameError {
    what: &'static str,
    name: String,
    why: &'static str,
}

/// A repository: `OWNER/NAME`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Repo {
    owner: String,
    name: String,
}

impl Repo {
    /// Reads `OWNER/NAME`.
    ///
    /// # Errors
    /// Anything else.
    pub fn parse(text: &str) -> Result<Repo, NameError> {
        let error = |why| NameError { what: "the model name", name: text.to_owned(), why };
        let (owner, name) = text.split_once('/').ok_or(error("is not OWNER/NAME"))?;
        for part in [owner, name] {
            // Two hyphens part owner and name in the cache.
            if part.is_empty()
                || part.len() > MAX_PART
                || part.contains("--")
                || part.contains("..")
            {
                return Err(error("is not OWNER/NAME"));
            }
            let inner = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            if !part.chars().all(inner)
                || part.starts_with(['.', '-'])
                || part.ends_with(['.', '-'])
            {
                return Err(error(
                    "may hold letters, digits and . _ - within a part, and no other characters",
                ));
            }
        }
        Ok(Repo { owner: owner.to_owned(), name: name.to_owned() })
    }

    /// Its folder in the cache.
    pub fn folder(&self) -> String {
        format!("models--{}--{}", self.owner, self.name)
    }

    /// The repository whose folder this is.
    pub fn of_folder(folder: &str) -> Option<Repo> {
        let (owner, name) = folder.strip_prefix("models--")?.split_once("--")?;
        Repo::parse(&format!("{owner}/{name}")).ok()
    }

    /// Its name without its owner.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

/// A model: a repository, and which of its GGUF files if it has several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// The repository.
    pub repo: Repo,
    /// A part of the file's name, `Q4_K_M` say.
    pub file: Option<String>,
}

impl ModelName {
    /// Reads `OWNER/NAME` or `OWNER/NAME:FILE`.
    ///
    /// # Errors
    /// Anything else.
    pub fn parse(text: &str) -> Result<ModelName, NameError> {
        let (repo, file) = match text.split_once(':') {
            Some((repo, file)) => (repo, Some(file)),
            None => (text, None),
        };
        let repo = Repo::parse(repo)?;
        if let Some(file) = file {
            let inner = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            if file.is_empty() || file.len() > MAX_PART || !file.chars().all(inner) {
                let why = "names a file by letters, digits and . _ - after its colon";
                return Err(NameError { what: "the model name", name: text.to_owned(), why });
            }
        }
        Ok(ModelName { repo, file: file.map(str::to_owned) })
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            Some(file) => write!(f, "{}:{file}", self.repo),
            None => self.repo.fmt(f),
        }
    }
}

/// A branch, a tag, a reference or a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision(String);

impl Revision {
    /// Reads a revision.
    ///
    /// # Errors
    /// What can't be one.
    pub fn parse(text: &str) -> Result<Revision, NameError> {
        let error = |why| NameError { what: "the revision", name: text.to_owned(), why };
        check_path(text).map_err(error)?;
        let inner = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
        match text.chars().all(inner) {
            true => Ok(Revision(text.to_owned())),
            false => Err(error("may hold letters, digits and . _ - /")),
        }
    }

    /// It, as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it is a commit, which never changes.
    pub fn is_commit(&self) -> bool {
        is_commit(&self.0)
    }
}

/// Whether a text is the name of a commit.
pub fn is_commit(text: &str) -> bool {
    is_hex(text, 40)
}

/// Whether a text is a number of so many hexadecimal digits.
pub fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Whether a path with slashes stays where it starts, on every system.
///
/// # Errors
/// Why it may not.
pub fn check_path(path: &str) -> Result<(), &'static str> {
    if path.is_empty() || path.len() > MAX_PATH || path.split('/').count() > MAX_DEPTH {
        return Err("is empty, too long or too deep");
    }
    for part in path.split('/') {
        if part.is_empty() || part == "." || part == ".." {
            return Err("leads elsewhere");
        }
        let bad = |c: char| c.is_control() || "\\:*?\"<>|".contains(c);
        if part.contains(bad) || part.ends_with(['.', ' ']) || part.starts_with(' ') {
            return Err("has characters that some systems do not allow in a file's name");
        }
        let stem = part.split('.').next().unwrap_or(part).to_ascii_uppercase();
        let numbered = |device: &str| {
            let number = stem.strip_prefix(device);
            number.is_some_and(|n| n.chars().count() == 1 && n.chars().all(char::is_numeric))
        };
        let device = ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"].contains(&stem.trim_end());
        if device || numbered("COM") || numbered("LPT") {
            return Err("is a device on some systems");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let name = ModelName::parse("Qwen/Qwen3.5-4B").unwrap();
        assert_eq!(name.repo.folder(), "models--Qwen--Qwen3.5-4B");
        assert_eq!(Repo::of_folder("models--Qwen--Qwen3.5-4B"), Some(name.repo.clone()));
        assert_eq!(name.to_string(), "Qwen/Qwen3.5-4B");
        let name = ModelName::parse("a/b_c:Q4_K_M").unwrap();
        assert_eq!(
            (name.file.as_deref(), name.to_string().as_str()),
            (Some("Q4_K_M"), "a/b_c:Q4_K_M")
        );
    }

    #[test]
    fn what_leads_elsewhere_is_no_name() {
        for bad in [
            "",
            "a",
            "/",
            "a/",
            "/b",
            "a/b/c",
            "../b",
            "a/..",
            "a/../../etc",
            "/etc/passwd",
            "a\\b",
            "C:/x",
            "a/C:x:y",
            "a/b\0",
            "a/b c",
            "a/.b",
            "a/b.",
            "-a/b",
            "a--b/c",
            "a/b--c",
            "a/b:",
            "a/b:../c",
            "a/b:c/d",
            "~/x",
            "a/é",
            "\\\\server\\share",
            "a/b\n",
            "..%2f/b",
        ] {
            assert!(ModelName::parse(bad).is_err(), "{bad:?}");
        }
        assert!(ModelName::parse(&format!("a/{}", "x".repeat(97))).is_err());
        for bad in
            ["models--a", "models--a--b--c", "models--..--x", "datasets--a--b", "models--a--..", ""]
        {
            assert_eq!(Repo::of_folder(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn paths_and_revisions() {
        for good in ["main", "v1.0", "refs/pr/3", "0123456789abcdef0123456789abcdef01234567"] {
            assert!(Revision::parse(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "..",
            "a/../b",
            "/a",
            "a/",
            "a//b",
            "./a",
            "a\\b",
            "C:x",
            "CON",
            "a/nul.txt",
            "com1.json",
            "LPT9",
            "a.",
            "a ",
            " a",
            "a\0",
            "a|b",
            "a/b/c/d/e/f/g/h/i",
            "aux .txt",
        ] {
            assert!(check_path(bad).is_err(), "{bad:?}");
            assert!(Revision::parse(bad).is_err(), "{bad:?}");
        }
        for good in [
            "model-00001-of-00002.safetensors",
            "original/config.json",
            "community.txt",
            "a b.gguf",
        ] {
            assert_eq!(check_path(good), Ok(()), "{good}");
        }
        assert!(Revision::parse("main").is_ok_and(|r| !r.is_commit()));
        assert!(!is_commit("0123456789ABCDEF0123456789abcdef01234567"));
    }
}
