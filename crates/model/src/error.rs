//! Why a checkpoint can't be used.

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// A file that can't be used as it is: which file, which field of it, what would be accepted and
/// what is there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {field}: expected {expected}, found {found}", file.display())]
pub struct LoadError {
    /// The file, or the folder when no single file is at fault.
    pub file: PathBuf,
    /// The field, tensor or part of the file.
    pub field: String,
    /// What would be accepted, with what to do where that helps.
    pub expected: String,
    /// What is there.
    pub found: String,
}

/// The longest text taken from a file into an error, in characters.
const MAX_CHARS: usize = 200;

impl LoadError {
    /// An error about `field` of `file`. Texts are made safe to print on one line: they may hold
    /// names that come from a hostile file.
    pub fn new(
        file: &Path,
        field: impl Display,
        expected: impl Display,
        found: impl Display,
    ) -> LoadError {
        LoadError {
            file: file.to_path_buf(),
            field: printable(&field.to_string()),
            expected: printable(&expected.to_string()),
            found: printable(&found.to_string()),
        }
    }

    /// An error of the operating system about the whole of `file`.
    pub(crate) fn io(file: &Path, error: &std::io::Error) -> LoadError {
        LoadError::new(file, "file", "a readable file", error)
    }
}

/// `text` on one line, without control characters, cut to [`MAX_CHARS`].
fn printable(text: &str) -> String {
    let mut out = String::new();
    for (i, c) in text.chars().enumerate() {
        if i == MAX_CHARS {
            out.push('…');
            break;
        }
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_printable_line() {
        let name = format!("a\n\u{1b}[31m{}", "x".repeat(1000));
        let e = LoadError::new(Path::new("m.gguf"), name, "a name", 7).to_string();
        assert!(e.starts_with("m.gguf: a\\n\\u{1b}[31mxxx"), "{e}");
        assert!(e.ends_with("…: expected a name, found 7"), "{e}");
        assert!(e.len() < 300 && !e.contains(char::is_control));
    }
}
