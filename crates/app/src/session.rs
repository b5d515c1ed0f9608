//! A loaded model with its text side: what `chat` and `run` work on.

use std::time::{Duration, Instant};

use anyhow::Context;

use crate::generate::{Generator, LoadRequest, Loaded, Loader, TextSource};
use crate::progress::LoadingBar;
use crate::text::chat::{ChatText, special_tokens};
use crate::text::template::Templates;
use crate::text::tokenizer::{Tok, Tokenizer};

/// A model that is ready to answer.
pub struct Session {
    /// Runs the model.
    pub generator: Box<dyn Generator>,
    /// Tokenizer and templates; synthetic models have none.
    pub text: Option<ChatText>,
    /// The model's name.
    pub model: String,
    /// The draft's name.
    pub draft: Option<String>,
    /// The device, in words.
    pub device: String,
    /// Time that reading the weights for one round takes at least.
    pub floor_ms_per_round: Option<f64>,
    /// How long loading took.
    pub load_time: Duration,
}

impl Session {
    /// Loads a model and shows how far that has come.
    pub fn load(loader: &dyn Loader, request: &LoadRequest) -> anyhow::Result<Session> {
        let begun = Instant::now();
        let bar = LoadingBar::new();
        let loaded = loader.load(request, &mut |progress| bar.update(progress))?;
        drop(bar);
        let Loaded { generator, text, model, draft, device, floor_ms_per_round } = loaded;
        let text = open_text(&text)?;
        let load_time = begun.elapsed();
        Ok(Session { generator, text, model, draft, device, floor_ms_per_round, load_time })
    }

    /// The tokenizer, if the model has one.
    pub fn tok(&self) -> Option<&dyn Tok> {
        self.text.as_ref().map(ChatText::tok)
    }

    /// Tokenizer and templates, or an error that says what works without them.
    pub fn chat_text(&self) -> anyhow::Result<&ChatText> {
        self.text.as_ref().with_context(|| {
            format!("{} has no tokenizer; use run --tokens with token ids", self.model)
        })
    }
}

/// Opens the text side of a model.
pub fn open_text(source: &TextSource) -> anyhow::Result<Option<ChatText>> {
    match source {
        TextSource::None => Ok(None),
        TextSource::Folder(folder) => ChatText::open(folder, jiff::Zoned::now).map(Some),
        TextSource::Gguf { file, vocab, chat_template } => {
            let file = file.display().to_string();
            let tok = Tokenizer::from_gguf(&file, vocab)?;
            let sources: Vec<(String, String)> =
                chat_template.iter().map(|source| ("default".into(), source.clone())).collect();
            let templates = Templates::parse(&file, &sources, jiff::Zoned::now)?;
            let token = |id: Option<u32>| id.and_then(|id| vocab.tokens.get(id as usize));
            let special = special_tokens(&serde_json::json!({
                "bos_token": token(vocab.bos_token_id),
                "eos_token": token(vocab.eos_token_id),
            }));
            Ok(Some(ChatText::new(Box::new(tok), templates, special)))
        }
    }
}
