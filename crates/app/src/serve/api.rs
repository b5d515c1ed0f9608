//! The APIs that are spoken, told apart by path.

/// An API, for the form of its errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    /// OpenAI's, and everything of our own.
    OpenAi,
    /// Anthropic's.
    Anthropic,
    /// Ollama's.
    Ollama,
}

impl Api {
    /// The API that a path belongs to.
    pub fn of_path(path: &str) -> Api {
        let under = |prefix: &str| {
            path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if under("/v1/messages") {
            Api::Anthropic
        } else if under("/api") {
            Api::Ollama
        } else {
            Api::OpenAi
        }
    }
}
