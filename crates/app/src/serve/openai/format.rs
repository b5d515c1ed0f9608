//! `response_format`, and this server's further ways to say what an answer has to be.

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::serve::errors::ApiError;
use crate::text::grammar::ResponseFormat;

/// What an answer has to be.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct FormatOption {
    /// `text`, `json_object`, `json_schema`, `regex` or `grammar`.
    #[serde(rename = "type")]
    pub kind: String,
    /// With `json_schema`: name, schema, strict.
    pub json_schema: Option<JsonSchema>,
    /// With `json_schema`: the schema alone, as some programs send it. With `json_object` too.
    pub schema: Option<Value>,
    /// With a flat `json_schema`: its name.
    pub name: Option<String>,
    /// With a flat `json_schema`: whether it must be enforced to the letter.
    pub strict: Option<bool>,
    /// With a flat `json_schema`: what it is for.
    pub description: Option<String>,
    /// With `regex`: the regular expression.
    #[serde(alias = "regex")]
    pub pattern: Option<String>,
    /// With `grammar`: a grammar in Lark's notation.
    pub grammar: Option<String>,
}

/// A schema with its name.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct JsonSchema {
    /// Its name.
    pub name: Option<String>,
    /// What it is for.
    pub description: Option<String>,
    /// The schema.
    pub schema: Option<Value>,
    /// Whether it must be enforced to the letter.
    pub strict: Option<bool>,
}

/// Reads a format; `path` names the field in errors.
///
/// # Errors
/// If it is incomplete or unknown.
pub fn response_format(
    path: &str,
    option: Option<&FormatOption>,
) -> Result<ResponseFormat, ApiError> {
    let Some(option) = option else { return Ok(ResponseFormat::Text) };
    let needs = |field: &str| {
        let what = format!("{path} of type {:?} needs {field}", option.kind);
        ApiError::invalid(path.to_owned(), what)
    };
    match option.kind.as_str() {
        "text" => Ok(ResponseFormat::Text),
        "json_object" => Ok(match &option.schema {
            Some(schema) => schema_format(None, schema.clone(), None),
            None => ResponseFormat::JsonObject,
        }),
        "json_schema" => {
            let nested = option.json_schema.clone().unwrap_or_default();
            let schema = nested.schema.or_else(|| option.schema.clone());
            let schema = schema.ok_or_else(|| needs("a schema"))?;
            let name = nested.name.or_else(|| option.name.clone());
            Ok(schema_format(name, schema, nested.strict.or(option.strict)))
        }
        "regex" => {
            option.pattern.clone().map(ResponseFormat::Regex).ok_or_else(|| needs("a pattern"))
        }
        "grammar" => {
            option.grammar.clone().map(ResponseFormat::Lark).ok_or_else(|| needs("a grammar"))
        }
        kind => {
            let what = format!(
                "{path} is of type {kind:?}; use text, json_object, json_schema, regex or grammar"
            );
            Err(ApiError::invalid(path.to_owned(), what))
        }
    }
}

fn schema_format(name: Option<String>, schema: Value, strict: Option<bool>) -> ResponseFormat {
    let name = name.unwrap_or_else(|| "response".into());
    ResponseFormat::JsonSchema { name, schema, strict: strict.unwrap_or(false) }
}
