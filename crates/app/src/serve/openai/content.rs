//! Content of messages: a text, or parts of which only text can be read.

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use utoipa::ToSchema;

use crate::serve::errors::ApiError;

/// A text, or a list of parts.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A text.
    Text(String),
    /// Parts; bare texts among them are parts too.
    Parts(Vec<Part>),
}

/// A part of a message.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, ToSchema)]
pub struct Part {
    /// What it is: `text`, `input_text`, `output_text` and `refusal` can be read.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its text.
    pub text: Option<String>,
    /// The text of a refusal.
    pub refusal: Option<String>,
}

impl Content {
    /// All of it as one text; `path` names the field in errors.
    ///
    /// # Errors
    /// If there is a part that can't be read.
    pub fn text(&self, path: &str) -> Result<String, ApiError> {
        let parts = match self {
            Content::Text(text) => return Ok(text.clone()),
            Content::Parts(parts) => parts,
        };
        let mut all = String::new();
        for (index, part) in parts.iter().enumerate() {
            match (part.kind.as_str(), &part.text, &part.refusal) {
                (
                    "text" | "input_text" | "output_text" | "summary_text" | "reasoning_text",
                    Some(text),
                    _,
                ) => {
                    all += text;
                }
                ("refusal", _, Some(text)) => all += text,
                ("text" | "input_text" | "output_text", None, _) | ("refusal", _, None) => {
                    let what =
                        format!("{path}[{index}]: a part of type {:?} needs a text", part.kind);
                    return Err(ApiError::invalid(format!("{path}[{index}]"), what));
                }
                (kind, ..) => {
                    let what = format!(
                        "{path}[{index}]: parts of type {kind:?} are not supported; this model reads text only"
                    );
                    return Err(ApiError::unsupported(format!("{path}[{index}]"), what));
                }
            }
        }
        Ok(all)
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Content, D::Error> {
        deserializer.deserialize_any(Reader)
    }
}

/// Unlike an untagged enum, says where something is wrong.
struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Content;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a string or a list of parts")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Content, E> {
        Ok(Content::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Content, A::Error> {
        let mut parts = Vec::new();
        while let Some(part) = seq.next_element::<TextOrPart>()? {
            parts.push(part.0);
        }
        Ok(Content::Parts(parts))
    }
}

/// A part, or a bare text that stands for one.
struct TextOrPart(Part);

impl<'de> Deserialize<'de> for TextOrPart {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TextOrPart, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Part;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a part: an object with a type")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Part, E> {
                Ok(Part { kind: "text".into(), text: Some(text.to_owned()), ..Part::default() })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Part, A::Error> {
                Part::deserialize(serde::de::value::MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_any(Reader).map(TextOrPart)
    }
}

impl utoipa::PartialSchema for Content {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, OneOfBuilder, Type};
        OneOfBuilder::new()
            .item(ObjectBuilder::new().schema_type(Type::String))
            .item(ArrayBuilder::new().items(Part::schema()))
            .into()
    }
}

impl ToSchema for Content {}
