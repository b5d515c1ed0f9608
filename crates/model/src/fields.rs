//! Typed reading of JSON objects; every failure names the field.

use std::path::Path;

use serde_json::{Map, Value};

use crate::LoadError;

/// No size in a model file is larger; keeps products of three sizes within 64 bits.
pub(crate) const MAX_SIZE: u64 = 1 << 20;
/// Bound of token ids, table rows and positions.
pub(crate) const MAX_ROWS: u64 = 1 << 31;
/// Bound of the number of layers.
pub(crate) const MAX_LAYERS: u64 = 4096;

/// One object of a file, with the path that leads to it.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    pub(crate) file: &'a Path,
    /// Put before a field's name in errors: "" or "text_config.".
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The root object of a file.
    pub(crate) fn root(file: &'a Path, root: &'a Value) -> Result<Fields<'a>, LoadError> {
        match root.as_object() {
            Some(map) => Ok(Fields { file, prefix: "", map }),
            None => Err(LoadError::new(file, "file", "a JSON object", kind(root))),
        }
    }

    /// The object under `name`, unless it is absent or null. `prefix` is `name` with a dot.
    pub(crate) fn object(
        &self,
        name: &str,
        prefix: &'a str,
    ) -> Result<Option<Fields<'a>>, LoadError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields { file: self.file, prefix, map })),
            Some(other) => self.error(name, "an object", kind(other)),
        }
    }

    /// The value under `name`, unless it is absent or null.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// The names of all fields.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    pub(crate) fn error<T>(
        &self,
        name: &str,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> Result<T, LoadError> {
        let field = format!("{}{name}", self.prefix);
        Err(LoadError::new(self.file, field, expected, found))
    }

    /// What an optional field must be to be there at all.
    pub(crate) fn require<T>(&self, name: &str, value: Option<T>) -> Result<T, LoadError> {
        match value {
            Some(value) => Ok(value),
            None => self.error(name, "this field; it has no default", "none"),
        }
    }

    /// A whole number from `least` to `most`.
    pub(crate) fn integer(
        &self,
        name: &str,
        least: u64,
        most: u64,
    ) -> Result<Option<u64>, LoadError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_u64().filter(|n| (least..=most).contains(n)) {
            Some(n) => Ok(Some(n)),
            None => self.error(name, format!("a whole number from {least} to {most}"), value),
        }
    }

    /// A size: 1 to [`MAX_SIZE`].
    pub(crate) fn size(&self, name: &str) -> Result<usize, LoadError> {
        let value = self.integer(name, 1, MAX_SIZE)?;
        Ok(self.require(name, value)? as usize)
    }

    /// A number of rows or positions: 1 to [`MAX_ROWS`].
    pub(crate) fn rows(&self, name: &str) -> Result<usize, LoadError> {
        let value = self.integer(name, 1, MAX_ROWS)?;
        Ok(self.require(name, value)? as usize)
    }

    /// A finite number.
    pub(crate) fn number(&self, name: &str) -> Result<Option<f64>, LoadError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64().filter(|f| f.is_finite()) {
            Some(f) => Ok(Some(f)),
            None => self.error(name, "a number", value),
        }
    }

    /// A finite number above zero.
    pub(crate) fn positive(&self, name: &str) -> Result<Option<f64>, LoadError> {
        match self.number(name)? {
            Some(f) if f <= 0.0 => self.error(name, "a number above zero", f),
            other => Ok(other),
        }
    }

    pub(crate) fn bool(&self, name: &str) -> Result<Option<bool>, LoadError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(other) => self.error(name, "true or false", other),
        }
    }

    pub(crate) fn str(&self, name: &str) -> Result<Option<&'a str>, LoadError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => self.error(name, "a text", other),
        }
    }

    /// A list of whole numbers up to `most`; a single number is a list of one.
    pub(crate) fn integers(&self, name: &str, most: u64) -> Result<Option<Vec<u64>>, LoadError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let one = std::slice::from_ref(value);
        let items = value.as_array().map_or(one, Vec::as_slice);
        match items.iter().map(|v| v.as_u64().filter(|&n| n <= most)).collect() {
            Some(list) => Ok(Some(list)),
            None => self.error(name, format!("whole numbers up to {most}"), value),
        }
    }

    /// A list of texts.
    pub(crate) fn strs(&self, name: &str) -> Result<Option<Vec<&'a str>>, LoadError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let items = value.as_array().map(|list| list.iter().map(Value::as_str).collect());
        match items {
            Some(Some(list)) => Ok(Some(list)),
            _ => self.error(name, "a list of texts", value),
        }
    }
}

/// What kind of JSON value this is, for errors.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
