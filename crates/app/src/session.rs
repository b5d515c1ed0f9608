//! A loaded model with its text side: what `chat` and `run` work on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use engine::MemoryBytes;

use crate::generate::{Generator, LoadRequest, Loaded, Loader, TextSource};
use crate::progress::LoadingBar;
use crate::text::chat::{ChatText, special_tokens};
use crate::text::template::Templates;
use crate::text::tokenizer::Tokenizer;

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
    /// What the model takes on the device.
    pub memory: MemoryBytes,
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
        let Loaded { generator, text, model, draft, device, floor_ms_per_round, memory } = loaded;
        let text = open_text(&text)?;
        let load_time = begun.elapsed();
        Ok(Session { generator, text, model, draft, device, floor_ms_per_round, memory, load_time })
    }

    /// Tokenizer and templates, or an error that says what works without them.
    pub fn chat_text(&self) -> anyhow::Result<&ChatText> {
        self.text.as_ref().with_context(|| no_tokenizer(&self.model))
    }

    /// [`Session::chat_text`], taken out of the session.
    pub fn take_text(&mut self) -> anyhow::Result<ChatText> {
        self.text.take().with_context(|| no_tokenizer(&self.model))
    }
}

fn no_tokenizer(model: &str) -> String {
    format!("{model} has no tokenizer; use run --tokens with token ids")
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
            Ok(Some(ChatText::new(Arc::new(tok), templates, special)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::chat::{Message, Role, TemplateOptions};
    use crate::text::gguf_vocab::GgufVocab;
    use std::path::PathBuf;

    /// A vocabulary of the 256 bytes and two control tokens.
    fn byte_vocab() -> GgufVocab {
        let printable = |b: &u32| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let mut chars: Vec<u32> = (0..256).filter(printable).collect();
        let others = 256 - chars.len() as u32;
        chars.extend(0x100..0x100 + others);
        let mut tokens: Vec<String> =
            chars.iter().filter_map(|&c| char::from_u32(c)).map(String::from).collect();
        tokens.extend(["<s>".to_owned(), "</s>".to_owned()]);
        let token_types = (0..258).map(|id| if id < 256 { 1 } else { 3 }).collect();
        GgufVocab {
            model: "gpt2".into(),
            pre: Some("qwen35".into()),
            tokens,
            token_types,
            bos_token_id: Some(256),
            eos_token_id: Some(257),
            ..GgufVocab::default()
        }
    }

    fn gguf(chat_template: Option<&str>) -> TextSource {
        TextSource::Gguf {
            file: PathBuf::from("model.gguf"),
            vocab: Box::new(byte_vocab()),
            chat_template: chat_template.map(str::to_owned),
        }
    }

    #[test]
    fn the_text_side_of_a_gguf_file() {
        let source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}";
        let text = open_text(&gguf(Some(source))).unwrap().unwrap();
        let messages = [Message::new(Role::User, "né</s>")];
        let prompt = text.prompt(&messages, &[], &TemplateOptions::default()).unwrap();
        assert_eq!(prompt.text.text(), "<s>né</s></s>");
        let ids = text.prompt_ids(&prompt).unwrap();
        assert_eq!((ids[0], ids[ids.len() - 1]), (256, 257));
        assert!(ids[1..ids.len() - 1].iter().all(|&id| id < 256));
        assert_eq!(ids.len(), 2 + "né</s>".len());
    }

    #[test]
    fn a_gguf_file_without_a_template_still_has_a_tokenizer() {
        let text = open_text(&gguf(None)).unwrap().unwrap();
        assert_eq!(text.raw_ids("<s>a").unwrap().len(), 2);
        let error = open_text(&gguf(Some("{% if %}"))).map(|_| ()).unwrap_err().to_string();
        assert!(error.starts_with("model.gguf: "), "{error}");
        assert!(open_text(&TextSource::None).unwrap().is_none());
    }
}
