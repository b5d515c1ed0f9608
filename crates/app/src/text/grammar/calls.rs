//! Grammars of tool calls.
//!
//! Arguments come in the order in which the schema lists them, those that are not required may be
//! left out, and each obeys its schema. In the XML format strings are verbatim, so their rules are
//! regular expressions that end at the closing tag; all else is JSON.

use llguidance::regex_to_lark;
use serde_json::{Map, Value, json};

use super::GrammarError;
use super::schema::{self, anchors};
use crate::text::tools::{Tool, ToolFormat, Written, resolve, written};

/// How deep the alternatives of a parameter are followed.
const MAX_DEPTH: usize = 8;
const CLOSE: &str = "</parameter>";

/// How calls are marked.
pub(super) struct Markup<'a> {
    pub(super) format: ToolFormat,
    /// The tags around a call, in Lark.
    pub(super) open: &'a str,
    pub(super) close: &'a str,
}

/// Rules for calls of some tools.
pub(super) struct Calls {
    /// Rules `call` and `after_open`, and those they need.
    pub(super) lark: String,
    /// What is not enforced.
    pub(super) notes: Vec<String>,
    /// Whether less could be asked of some tool.
    pub(super) relaxable: bool,
}

/// The grammar of one call of any of `tools`.
///
/// # Errors
/// A strict tool whose schema can't be enforced.
pub(super) fn lark(tools: &[Tool], markup: &Markup<'_>) -> Result<Calls, GrammarError> {
    let mut rules = Rules { lark: String::new(), notes: Vec::new(), count: 0 };
    let mut names = Vec::new();
    for (number, tool) in tools.iter().enumerate() {
        let name = format!("tool_{number}");
        let fail =
            |error: GrammarError| GrammarError::new(format!("tool {:?}: {error}", tool.name));
        let noted = rules.notes.len();
        let prepared = schema::prepare(&tool.parameters, tool.strict);
        let (parameters, notes) = match prepared {
            Ok(prepared) => (prepared.schema, prepared.notes),
            Err(error) if tool.strict => return Err(fail(error)),
            Err(error) => (json!({}), vec![format!("its arguments are free: {error}")]),
        };
        rules.notes.extend(notes);
        let body = match markup.format {
            ToolFormat::HermesJson => rules.json_call(tool, parameters),
            ToolFormat::QwenXml => rules.xml_call(tool, &parameters),
        };
        let body = body.map_err(fail)?;
        for note in &mut rules.notes[noted..] {
            *note = format!("tool {:?}: {note}", tool.name);
        }
        rules.add(&name, &format!("{body} {}", markup.close));
        names.push(name);
    }
    rules.add("after_open", &format!("\"\\n\"? ({})", names.join(" | ")));
    rules.add("call", &format!("{} after_open", markup.open));
    let relaxable = tools.iter().any(|tool| !tool.strict && tool.parameters != json!({}));
    Ok(Calls { lark: rules.lark, notes: rules.notes, relaxable })
}

/// Rules being written.
struct Rules {
    lark: String,
    notes: Vec<String>,
    count: usize,
}

impl Rules {
    fn add(&mut self, name: &str, body: &str) {
        self.lark += &format!("{name}: {body}\n");
    }

    fn fresh(&mut self) -> usize {
        self.count += 1;
        self.count
    }

    fn json_call(&mut self, tool: &Tool, mut parameters: Value) -> Result<String, GrammarError> {
        if parameters.get("type").is_none() && parameters.get("$ref").is_none() {
            parameters["type"] = "object".into();
        }
        let head = format!("{{\"name\": \"{}\", \"arguments\": ", tool.name);
        Ok(format!("{} %json {parameters} {}", literal(&head), literal("}\n")))
    }

    fn xml_call(&mut self, tool: &Tool, parameters: &Value) -> Result<String, GrammarError> {
        let mut top = parameters;
        for _ in 0..MAX_DEPTH {
            top = resolve(&top["$ref"], parameters).unwrap_or(top);
        }
        for key in
            ["anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties"]
        {
            if top.get(key).is_some() {
                self.not_enforced(tool.strict, &format!("{key} of the arguments as a whole"))?;
            }
        }
        let mut body = literal(&format!("<function={}>\n", tool.name));
        let required = |key: &str| {
            let list = top["required"].as_array();
            list.is_some_and(|list| list.iter().any(|name| name == key))
        };
        let listed = top["properties"].as_object().filter(|listed| !listed.is_empty());
        for (key, param) in listed.into_iter().flatten() {
            if key.contains(['>', '<', '\n']) || key.trim() != key || key.is_empty() {
                return Err(GrammarError::new(format!("a parameter can't be called {key:?}")));
            }
            let place = Param { key, strict: tool.strict, root: parameters };
            let value = self.value(param, &place, MAX_DEPTH)?;
            let name = format!("param_{}", self.fresh());
            self.add(&name, &format!("{} ({value})", literal(&format!("<parameter={key}>\n"))));
            body += &format!(" {name}{}", if required(key) { "" } else { "?" });
        }
        if listed.is_none() && top.get("additionalProperties") != Some(&Value::Bool(false)) {
            let name = format!("param_{}", self.fresh());
            let text = self.text("(?s:.*)", false);
            self.add(
                &name,
                &format!("\"<parameter=\" /[A-Za-z_][A-Za-z0-9_.\\-]{{0,63}}/ \">\\n\" {text}"),
            );
            body += &format!(" {name}*");
        }
        Ok(body + " " + &literal("</function>\n"))
    }

    /// A value and its closing tag.
    fn value(
        &mut self,
        schema: &Value,
        param: &Param<'_>,
        depth: usize,
    ) -> Result<String, GrammarError> {
        let kind = written(schema, param.root);
        if kind == Written::Json || depth == 0 {
            return self.json(schema, param);
        }
        if let Some(target) = resolve(&schema["$ref"], param.root) {
            return self.value(target, param, depth - 1);
        }
        let listed = schema["enum"].as_array().map(Vec::as_slice);
        if let Some(values) = listed.or(schema.get("const").map(std::slice::from_ref)) {
            let written = |value: &Value| match value.as_str() {
                Some(text) => text.to_owned(),
                None => value.to_string(),
            };
            let choices =
                values.iter().map(|value| literal(&format!("{}\n{CLOSE}\n", written(value))));
            return Ok(choices.collect::<Vec<_>>().join(" | "));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(choices) = schema[key].as_array() {
                let choices = choices.iter().map(|choice| self.value(choice, param, depth - 1));
                return Ok(choices.collect::<Result<Vec<_>, _>>()?.join(" | "));
            }
        }
        if schema.get("allOf").is_some() {
            self.not_enforced(param.strict, &format!("allOf of parameter {:?}", param.key))?;
        }
        let text = self.string(schema, param)?;
        if kind == Written::Text || !schema["type"].is_array() {
            return Ok(text);
        }
        // A list of types: what is no string keeps its own rules.
        let mut others = schema.clone();
        if let Some(types) = others["type"].as_array_mut() {
            types.retain(|name| name != "string");
        }
        Ok(format!("{text} | {}", self.json(&others, param)?))
    }

    /// A string that obeys its schema.
    fn string(&mut self, schema: &Value, param: &Param<'_>) -> Result<String, GrammarError> {
        let mut patterns = Vec::new();
        let length = |key: &str| schema[key].as_u64();
        if let (least, Some(most)) = (length("minLength").unwrap_or(0), length("maxLength")) {
            patterns.push(format!("(?s:.{{{least},{most}}})"));
        } else if let Some(least) = length("minLength").filter(|least| *least > 0) {
            patterns.push(format!("(?s:.{{{least},}})"));
        }
        if let Some(pattern) = schema["pattern"].as_str() {
            super::compile::check_text("a pattern", pattern)?;
            let (start, inner, end) = anchors(pattern);
            let any = |anchored: bool| if anchored { "" } else { "(?s:.*)" };
            patterns.push(format!("{}(?:{}){}", any(start), regex_to_lark(inner, "dw"), any(end)));
        }
        if let Some(format) = schema["format"].as_str() {
            match format_regex(format) {
                Some(regex) => patterns.push(regex),
                None => {
                    let what = format!("format {format:?} of parameter {:?}", param.key);
                    self.not_enforced(param.strict, &what)?;
                }
            }
        }
        Ok(match patterns.as_slice() {
            [] => self.text("(?s:.*)", false),
            patterns => {
                let all: Vec<String> =
                    patterns.iter().map(|pattern| format!("{pattern}\\n")).collect();
                self.text(&all.join("/ & /"), true)
            }
        })
    }

    /// Text up to the closing tag. A text without rules ends at the first one; in a text with rules
    /// there is none, and a line break, which is not part of it, comes last.
    fn text(&mut self, regex: &str, rules: bool) -> String {
        let name = format!("text_{}", self.fresh());
        let without = if rules { " & ~/(?s:.*)<\\/parameter>(?s:.*)/" } else { "" };
        self.add(&format!("{name}[suffix=\"{CLOSE}\"]"), &format!("/{regex}/{without}"));
        format!("{name} \"\\n\"")
    }

    fn json(&mut self, schema: &Value, param: &Param<'_>) -> Result<String, GrammarError> {
        let mut whole = match schema {
            Value::Object(map) => map.clone(),
            Value::Bool(false) => return Err(GrammarError::new("a parameter allows nothing")),
            _ => Map::new(),
        };
        for key in ["$defs", "definitions", "x-guidance"] {
            if let Some(value) = param.root.get(key) {
                whole.entry(key).or_insert_with(|| value.clone());
            }
        }
        let text = Value::Object(whole).to_string();
        let outside = text
            .split("\"$ref\":\"#")
            .skip(1)
            .any(|rest| !rest.starts_with("/$defs/") && !rest.starts_with("/definitions/"));
        if outside {
            self.not_enforced(
                param.strict,
                &format!("$ref outside of $defs in parameter {:?}", param.key),
            )?;
            return Ok(format!("%json {{}} {}", literal(&format!("\n{CLOSE}\n"))));
        }
        Ok(format!("%json {text} {}", literal(&format!("\n{CLOSE}\n"))))
    }

    fn not_enforced(&mut self, strict: bool, what: &str) -> Result<(), GrammarError> {
        if strict {
            return Err(GrammarError::new(format!("a strict schema can't have {what}")));
        }
        self.notes.push(format!("{what} is not enforced"));
        Ok(())
    }
}

/// A parameter whose rules are being written.
struct Param<'a> {
    key: &'a str,
    strict: bool,
    /// The schema of all arguments.
    root: &'a Value,
}

/// Text as a literal of Lark, whose strings are those of JSON.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// Formats of strings, as far as a regular expression tells them.
fn format_regex(format: &str) -> Option<String> {
    // The 29th of February, which only some years have, is left out.
    const DATE: &str = "[0-9]{4}-(((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01]))\
        |((0[469]|11)-(0[1-9]|[12][0-9]|30))|(02-(0[1-9]|1[0-9]|2[0-8])))";
    const TIME: &str = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
    const BYTE: &str = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    Some(match format {
        "date" => DATE.to_owned(),
        "time" => TIME.to_owned(),
        "date-time" => format!("{DATE}T{TIME}"),
        "uuid" => "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}".to_owned(),
        "email" => r"[A-Za-z0-9_+-]{1,32}(\.[A-Za-z0-9_+-]{1,32}){0,3}@[A-Za-z0-9]{1,32}(-[A-Za-z0-9]{1,16})?(\.[A-Za-z]{2,16}){1,3}".to_owned(),
        "ipv4" => format!(r"({BYTE}\.){{3}}{BYTE}"),
        _ => return None,
    })
}
