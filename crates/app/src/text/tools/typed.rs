//! The type that a tool's schema gives a parameter, and text as a value of that type.
//!
//! The XML format writes strings verbatim and all else as JSON, so `5` may be a number or the text
//! "5": the schema decides. A text that is no value of its type stays a string, so that the tool
//! and the model see what was written.

use std::collections::HashMap;

use serde_json::Value;

use super::Tool;
use super::json_stream::{compact, escape_into};

/// How deep schemas are followed.
const MAX_DEPTH: usize = 16;

/// The parameters of a tool.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) name: String,
    params: HashMap<String, Param>,
}

/// A parameter of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Param {
    types: Types,
    /// Strings among the values that it is limited to.
    strings: Vec<String>,
}

impl Shape {
    pub(super) fn new(tool: &Tool) -> Shape {
        let mut params = HashMap::new();
        collect(&tool.parameters, &tool.parameters, MAX_DEPTH, &mut params);
        Shape { name: tool.name.clone(), params }
    }

    /// The parameter called `key`, if the schema lists it.
    pub(super) fn param(&self, key: &str) -> Option<&Param> {
        self.params.get(key)
    }
}

impl Param {
    /// One that no schema describes.
    pub(super) const ANY: Param = Param { types: Types::ALL, strings: Vec::new() };

    /// Whether every text is a value as it stands.
    pub(super) fn is_text(&self) -> bool {
        self.types == Types::STRING
    }

    /// `text` as JSON, and what is wrong with it if it had to stay a string.
    pub(super) fn convert(&self, text: &str) -> (String, Option<String>) {
        let as_string = || {
            let mut out = String::from("\"");
            escape_into(text, &mut out);
            out + "\""
        };
        if self.is_text() || self.strings.iter().any(|string| string == text) {
            return (as_string(), None);
        }
        if let Some(json) = compact(text)
            && self.types.allow(&json)
        {
            return (json, None);
        }
        let fits = self.types.contains(Types::STRING);
        let shown: String = text.chars().take(40).collect();
        let note = || format!("{shown:?} is not {}; passed as a string", self.types);
        (as_string(), (!fits).then(note))
    }
}

/// How values of a schema are written in the XML format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// All as they stand.
    Text,
    /// Strings as they stand, others as JSON.
    Either,
    /// All as JSON.
    Json,
}

/// How values of `schema`, which is part of `root`, are written.
pub(crate) fn written(schema: &Value, root: &Value) -> Written {
    let types = Types::of_schema(schema, root, MAX_DEPTH);
    match types {
        Types::STRING => Written::Text,
        _ if types.contains(Types::STRING) => Written::Either,
        _ => Written::Json,
    }
}

/// A set of JSON's types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Types(u8);

impl Types {
    const NONE: Types = Types(0);
    const STRING: Types = Types(1);
    const INTEGER: Types = Types(2);
    const NUMBER: Types = Types(4);
    const BOOLEAN: Types = Types(8);
    const OBJECT: Types = Types(16);
    const ARRAY: Types = Types(32);
    const NULL: Types = Types(64);
    const ALL: Types = Types(127);
    const NAMES: [(&str, Types); 7] = [
        ("string", Types::STRING),
        ("integer", Types::INTEGER),
        ("number", Types::NUMBER),
        ("boolean", Types::BOOLEAN),
        ("object", Types::OBJECT),
        ("array", Types::ARRAY),
        ("null", Types::NULL),
    ];

    fn named(name: &str) -> Types {
        let found = Types::NAMES.iter().find(|(known, _)| *known == name);
        found.map_or(Types::NONE, |(_, types)| *types)
    }

    fn contains(self, other: Types) -> bool {
        self.0 & other.0 != 0
    }

    fn or(self, other: Types) -> Types {
        Types(self.0 | other.0)
    }

    /// What both allow; a number that must be an integer is one.
    fn and(self, other: Types) -> Types {
        let widen = |types: Types| match types.contains(Types::NUMBER) {
            true => types.or(Types::INTEGER),
            false => types,
        };
        Types(widen(self).0 & widen(other).0)
    }

    /// Whether compact JSON that is no string is of these types.
    fn allow(self, json: &str) -> bool {
        match json.as_bytes().first() {
            Some(b'{') => self.contains(Types::OBJECT),
            Some(b'[') => self.contains(Types::ARRAY),
            Some(b't' | b'f') => self.contains(Types::BOOLEAN),
            Some(b'n') => self.contains(Types::NULL),
            // Strings are written without quotes: with them, they are part of the text.
            Some(b'"') | None => false,
            Some(_) => {
                let whole = || json.parse::<f64>().is_ok_and(|number| number.fract() == 0.0);
                self.contains(Types::NUMBER) || self.contains(Types::INTEGER) && whole()
            }
        }
    }

    fn of_value(value: &Value) -> Types {
        match value {
            Value::Null => Types::NULL,
            Value::Bool(_) => Types::BOOLEAN,
            Value::Number(_) => Types::NUMBER.or(Types::INTEGER),
            Value::String(_) => Types::STRING,
            Value::Array(_) => Types::ARRAY,
            Value::Object(_) => Types::OBJECT,
        }
    }

    fn of_schema(schema: &Value, root: &Value, depth: usize) -> Types {
        let (Some(object), true) = (schema.as_object(), depth > 0) else { return Types::ALL };
        let inner = |schema: &Value| Types::of_schema(schema, root, depth - 1);
        let mut types = match &object.get("type") {
            Some(Value::String(name)) => Types::named(name),
            Some(Value::Array(names)) => names
                .iter()
                .filter_map(Value::as_str)
                .fold(Types::NONE, |all, name| all.or(Types::named(name))),
            _ if object.contains_key("properties") => Types::OBJECT,
            _ if object.contains_key("items") => Types::ARRAY,
            _ => Types::ALL,
        };
        if let Some(target) = object.get("$ref").and_then(|r| resolve(r, root)) {
            types = types.and(inner(target));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(Value::Array(choices)) = object.get(key) {
                types = types.and(choices.iter().map(inner).fold(Types::NONE, Types::or));
            }
        }
        if let Some(Value::Array(all)) = object.get("allOf") {
            types = all.iter().map(inner).fold(types, Types::and);
        }
        if let Some(values) = object.get("enum").and_then(Value::as_array) {
            types = types.and(values.iter().map(Types::of_value).fold(Types::NONE, Types::or));
        }
        if let Some(value) = object.get("const") {
            types = types.and(Types::of_value(value));
        }
        if object.get("nullable") == Some(&Value::Bool(true)) {
            types = types.or(Types::NULL);
        }
        // A schema that nothing satisfies tells nothing.
        if types == Types::NONE { Types::ALL } else { types }
    }
}

impl std::fmt::Display for Types {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = Types::NAMES.iter().filter(|(_, types)| self.contains(*types));
        let names: Vec<&str> = names.map(|(name, _)| *name).collect();
        f.write_str(&names.join(" or "))
    }
}

/// What a reference within the schema points at.
pub(crate) fn resolve<'a>(reference: &Value, root: &'a Value) -> Option<&'a Value> {
    root.pointer(reference.as_str()?.strip_prefix('#')?)
}

/// Gathers the parameters that a schema and the parts it is made of list.
fn collect(schema: &Value, root: &Value, depth: usize, params: &mut HashMap<String, Param>) {
    if depth == 0 {
        return;
    }
    for (key, schema) in schema["properties"].as_object().into_iter().flatten() {
        let types = Types::of_schema(schema, root, MAX_DEPTH);
        let listed = schema["enum"].as_array().into_iter().flatten();
        let strings = listed.chain([&schema["const"]]).filter_map(Value::as_str);
        let param = Param { types, strings: strings.map(str::to_owned).collect() };
        params.entry(key.clone()).or_insert(param);
    }
    if let Some(target) = resolve(&schema["$ref"], root) {
        collect(target, root, depth - 1, params);
    }
    for key in ["allOf", "anyOf", "oneOf"] {
        for part in schema[key].as_array().into_iter().flatten() {
            collect(part, root, depth - 1, params);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn convert(schema: Value, text: &str) -> (String, bool) {
        let parameters = json!({
            "properties": {"x": schema},
            "$defs": {"Mode": {"enum": ["fast", "slow"]}, "Loop": {"$ref": "#/$defs/Loop"}},
        });
        let tool = Tool { name: "f".into(), description: None, parameters, strict: false };
        let (json, note) = Shape::new(&tool).param("x").unwrap().convert(text);
        serde_json::from_str::<Value>(&json).unwrap();
        (json, note.is_some())
    }

    #[test]
    fn values_of_their_types() {
        for (schema, text, expected) in [
            (json!({"type": "string"}), "5", "\"5\""),
            (json!({"type": "string"}), " \"a\"\n", "\" \\\"a\\\"\\n\""),
            (json!({"type": "integer"}), "5", "5"),
            (json!({"type": "integer"}), " 5.0\n", "5.0"),
            (
                json!({"type": "integer"}),
                "123456789012345678901234567890",
                "123456789012345678901234567890",
            ),
            (json!({"type": "number"}), "-1.25e3", "-1.25e3"),
            (json!({"type": "number"}), "7", "7"),
            (json!({"type": "boolean"}), "true", "true"),
            (json!({"type": "boolean"}), "False", "false"),
            (json!({"type": "object"}), "{\"a\": [1, 2]}", "{\"a\":[1,2]}"),
            (json!({"type": "array"}), "[ ]", "[]"),
            (json!({"type": "null"}), "None", "null"),
            (json!({"type": ["string", "null"]}), "null", "null"),
            (json!({"type": ["string", "null"]}), "5", "\"5\""),
            (json!({"type": "string", "nullable": true}), "null", "null"),
            (json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}), "5", "5"),
            (json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}), "5x", "\"5x\""),
            (json!({"enum": ["1", 2]}), "1", "\"1\""),
            (json!({"enum": ["1", 2]}), "2", "2"),
            (json!({"$ref": "#/$defs/Mode"}), "5", "\"5\""),
            (json!({"properties": {}}), "{}", "{}"),
            (json!({}), "5", "5"),
            (json!(true), "plain", "\"plain\""),
            (json!({}), "\"quoted\"", "\"\\\"quoted\\\"\""),
            (json!({"$ref": "#/$defs/Loop"}), "5", "5"),
            (json!({"$ref": "#/$defs/None"}), "5", "5"),
            (json!({"allOf": [{"type": "number"}, {"type": "integer"}]}), "5", "5"),
        ] {
            assert_eq!(
                convert(schema.clone(), text),
                (expected.into(), false),
                "{schema} {text:?}"
            );
        }
    }

    #[test]
    fn what_does_not_fit_stays_a_string_and_is_told() {
        for (kind, text) in [
            ("integer", "2026-01-15"),
            ("integer", "1.5"),
            ("number", "NaN"),
            ("boolean", "yes"),
            ("object", "{\"a\": }"),
            ("object", "[1]"),
            ("array", "1, 2"),
            ("null", "nothing"),
            ("integer", "\"5\""),
            ("integer", ""),
        ] {
            let expected = serde_json::to_string(text).unwrap();
            assert_eq!(convert(json!({"type": kind}), text), (expected, true), "{kind} {text:?}");
        }
    }
}
