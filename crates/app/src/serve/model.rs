//! The model that is served: what requests need of it.

use std::ops::Deref;
use std::sync::Arc;
use std::time::SystemTime;

use engine::SamplingDefaults;
use engine::service::{Service, ServiceInfo};

use super::errors::ApiError;
use crate::text::chat::ChatText;
use crate::text::grammar::Grammars;

/// A model that is ready to answer many requests at once.
pub struct Served {
    /// Answers.
    pub service: Arc<dyn Service>,
    /// What is known of it.
    pub facts: Arc<Facts>,
}

impl Deref for Served {
    type Target = Facts;

    fn deref(&self) -> &Facts {
        &self.facts
    }
}

/// What is known of a model, whether it is in memory or not.
pub struct Facts {
    /// What the service can do; it does not change.
    pub info: ServiceInfo,
    /// Tokenizer and templates; synthetic models have none.
    pub text: Option<Arc<ChatText>>,
    /// Compiles what answers have to obey; for models with a tokenizer.
    pub grammars: Option<Arc<Grammars>>,
    /// The model's own name.
    pub name: String,
    /// The draft's name.
    pub draft: Option<String>,
    /// How the model wants to be sampled.
    pub defaults: SamplingDefaults,
    /// Tokens that end its answers.
    pub stop_tokens: Vec<u32>,
    /// When it was ready.
    pub loaded: SystemTime,
}

impl Facts {
    /// Tokenizer and templates, or an error that says what works without them.
    pub fn text(&self) -> Result<&Arc<ChatText>, ApiError> {
        self.text.as_ref().ok_or_else(|| {
            let what = format!(
                "{} has no tokenizer: only /v1/completions with token ids works, and gives no text",
                self.name
            );
            ApiError::bad_request("no_tokenizer", what)
        })
    }
}
