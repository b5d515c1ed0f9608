//! JSON schemas before they are compiled: what they may cost, and which of their keywords count.
//!
//! llguidance passes over keywords that it does not know, a misspelt one too. Here each keyword is
//! either enforced or named: in the error of a strict schema, else in the notes.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::GrammarError;

/// The deepest nesting of a schema.
const MAX_DEPTH: usize = 64;
/// The most values in a schema.
const MAX_VALUES: usize = 20_000;
/// The most cases that `allOf` of `anyOf` may multiply to.
const MAX_CASES: u64 = 1_000;

/// White space between JSON's tokens: enough for any layout, too little to be lost in.
const WHITE_SPACE: &str = r"( |\n[ \t]{0,40})";

/// Keywords that are enforced.
const ENFORCED: [&str; 27] = [
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "required",
    "type",
];
/// Keywords that ask for nothing.
const REMARKS: [&str; 16] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "deprecated",
    "description",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
];
/// Keywords whose value is a schema, a list of schemas, or a table of schemas.
const ONE: [&str; 3] = ["additionalItems", "additionalProperties", "items"];
const LIST: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
const TABLE: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];

/// A schema that can be compiled.
pub(super) struct Prepared {
    pub(super) schema: Value,
    /// What of it is not enforced.
    pub(super) notes: Vec<String>,
}

/// Checks a schema and leaves out what can't be enforced.
///
/// # Errors
/// A schema that is none, costs too much, refers to what is not there or, if `strict`, asks for
/// what can't be enforced.
pub(super) fn prepare(schema: &Value, strict: bool) -> Result<Prepared, GrammarError> {
    check_size(schema)?;
    let root = match schema {
        Value::Object(_) => schema.clone(),
        Value::Bool(true) => json!({}),
        Value::Bool(false) => {
            return Err(GrammarError::new("the schema allows nothing: it is false"));
        }
        _ => return Err(GrammarError::new("a JSON schema is an object")),
    };
    let mut walk = Walk { root: &root, ignored: Vec::new() };
    let mut schema = walk.schema(&root, "")?;
    let ignored = walk.ignored;
    if strict && !ignored.is_empty() {
        return Err(GrammarError::new(format!(
            "a strict schema can't have keywords that are not enforced: {}",
            ignored.join(", ")
        )));
    }
    if Cases::most(&schema) > MAX_CASES {
        return Err(GrammarError::new(format!(
            "the alternatives of the schema multiply to more than {MAX_CASES} cases: use fewer anyOf \
             within allOf"
        )));
    }
    let options = json!({"whitespace_pattern": WHITE_SPACE, "lenient": !strict});
    schema["x-guidance"] = options;
    let note = |keyword: String| format!("the schema's {keyword} is not enforced");
    Ok(Prepared { schema, notes: ignored.into_iter().map(note).collect() })
}

/// Whether a regular expression is anchored at its beginning and its end, and what is between.
pub(super) fn anchors(regex: &str) -> (bool, &str, bool) {
    let inner = regex.strip_prefix('^').unwrap_or(regex);
    let escapes =
        inner.strip_suffix('$').map(|head| head.len() - head.trim_end_matches('\\').len());
    match escapes {
        Some(escapes) if escapes % 2 == 0 => {
            (inner.len() < regex.len(), &inner[..inner.len() - 1], true)
        }
        _ => (inner.len() < regex.len(), inner, false),
    }
}

/// Counts values without recursion.
fn check_size(root: &Value) -> Result<(), GrammarError> {
    let mut queue = vec![(root, 0)];
    let mut count = 0;
    while let Some((value, depth)) = queue.pop() {
        count += 1;
        if depth > MAX_DEPTH || count > MAX_VALUES {
            return Err(GrammarError::new(format!(
                "a schema may hold {MAX_VALUES} values and nest {MAX_DEPTH} deep"
            )));
        }
        match value {
            Value::Array(items) => queue.extend(items.iter().map(|item| (item, depth + 1))),
            Value::Object(map) => queue.extend(map.values().map(|item| (item, depth + 1))),
            _ => {}
        }
    }
    Ok(())
}

struct Walk<'a> {
    root: &'a Value,
    /// Keywords that are not enforced, with their places.
    ignored: Vec<String>,
}

impl Walk<'_> {
    /// The schema without keywords that are not enforced.
    fn schema(&mut self, schema: &Value, place: &str) -> Result<Value, GrammarError> {
        let Some(map) = schema.as_object() else { return Ok(schema.clone()) };
        let mut kept = Map::new();
        for (key, value) in map {
            let key = key.as_str();
            let place = format!("{place}/{key}");
            let value = match value {
                _ if key == "$ref" => self.reference(value, &place)?,
                Value::Array(items) if LIST.contains(&key) => {
                    let items = items.iter().enumerate();
                    items
                        .map(|(i, item)| self.schema(item, &format!("{place}/{i}")))
                        .collect::<Result<_, _>>()?
                }
                Value::Object(table) if TABLE.contains(&key) => Value::Object(
                    table
                        .iter()
                        .map(|(name, item)| {
                            Ok((name.clone(), self.schema(item, &format!("{place}/{name}"))?))
                        })
                        .collect::<Result<_, GrammarError>>()?,
                ),
                _ if ONE.contains(&key) => self.schema(value, &place)?,
                _ if ENFORCED.contains(&key) || REMARKS.contains(&key) => value.clone(),
                _ => {
                    self.ignored.push(place);
                    continue;
                }
            };
            kept.insert(key.to_owned(), value);
        }
        Ok(Value::Object(kept))
    }

    /// A reference within the schema, which must lead somewhere.
    fn reference(&self, value: &Value, place: &str) -> Result<Value, GrammarError> {
        let wrong =
            |what: &str| Err(GrammarError::new(format!("the schema's {place} {what}: {value}")));
        let Some(mut text) = value.as_str() else { return wrong("is no string") };
        let mut seen = Vec::new();
        // Follow references that lead to nothing but references.
        loop {
            let Some(pointer) = text.strip_prefix('#').or(text.is_empty().then_some("")) else {
                return wrong("leads out of the schema; put what it refers to into $defs");
            };
            if seen.contains(&pointer) {
                return wrong("leads in a circle");
            }
            seen.push(pointer);
            let Some(target) = self.root.pointer(pointer) else { return wrong("leads nowhere") };
            let bare = target.as_object().is_some_and(|map| {
                map.keys().all(|key| key == "$ref" || REMARKS.contains(&key.as_str()))
            });
            match target.get("$ref").and_then(Value::as_str) {
                Some(next) if bare => text = next,
                _ => break,
            }
        }
        // The empty reference is the schema itself, as "#" is.
        Ok(Value::from(value.as_str().filter(|text| !text.is_empty()).unwrap_or("#")))
    }
}

/// How many alternatives the parts of a schema multiply to: those of `anyOf` add, and those of
/// schemas that hold together multiply. What lies inside objects and arrays is compiled apart.
struct Cases<'a> {
    root: &'a Value,
    known: HashMap<*const Value, u64>,
    most: u64,
}

impl Cases<'_> {
    /// The most of any part.
    fn most(root: &Value) -> u64 {
        let mut cases = Cases { root, known: HashMap::new(), most: 0 };
        cases.of(root);
        cases.most
    }

    fn of(&mut self, schema: &Value) -> u64 {
        let Some(map) = schema.as_object() else { return 1 };
        if let Some(cases) = self.known.get(&std::ptr::from_ref(schema)) {
            return *cases;
        }
        // A schema inside itself counts once.
        self.known.insert(schema, 1);
        let mut product: u64 = 1;
        for (key, value) in map {
            let count = match (key.as_str(), value) {
                ("anyOf" | "oneOf", Value::Array(items)) => {
                    items.iter().map(|item| self.of(item)).fold(0, u64::saturating_add).max(1)
                }
                ("allOf", Value::Array(items)) => {
                    items.iter().map(|item| self.of(item)).fold(1, u64::saturating_mul)
                }
                ("$ref", Value::String(text)) => {
                    let target = self.root.pointer(text.trim_start_matches('#'));
                    target.map_or(1, |target| self.of(target))
                }
                (key, Value::Object(table)) if TABLE.contains(&key) => {
                    table.values().for_each(|item| self.inside(item));
                    1
                }
                ("prefixItems" | "items", Value::Array(items)) => {
                    items.iter().for_each(|item| self.inside(item));
                    1
                }
                (key, value) if ONE.contains(&key) => {
                    self.inside(value);
                    1
                }
                _ => 1,
            };
            product = product.saturating_mul(count);
        }
        self.known.insert(schema, product);
        self.most = self.most.max(product);
        product
    }

    /// A schema of something within, which multiplies with nothing here.
    fn inside(&mut self, schema: &Value) {
        self.of(schema);
    }
}
