//! JSON as Python's `json.dumps` writes it, for the `tojson` filter of chat templates.
//!
//! Models were trained on prompts rendered in Python, so separators, escapes and the form of
//! numbers have to be Python's, not those of a Rust serialiser.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Deeper values than any API accepts; a guard against values built by a template.
const MAX_DEPTH: usize = 200;

/// Bytes of output that cost one unit of fuel, as in the template engine.
const BYTES_PER_FUEL: usize = 64;

/// The `tojson` filter, with the arguments that `transformers` gives it.
///
/// Fuel is taken while the text grows: a list that holds itself twice, a hundred times over, is
/// small as a value and endless as text.
pub fn tojson(state: &State, value: &Value, args: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = args.get("indent")?;
    let indent = match indent {
        None => None,
        Some(value) if value.is_none() => None,
        Some(value) => Some(match (value.as_str(), value.as_usize()) {
            (Some(text), _) => text.to_owned(),
            (None, Some(width)) if width <= 32 => " ".repeat(width),
            _ => return Err(invalid("indent must be a string or a number up to 32")),
        }),
    };
    let separators: Option<Vec<String>> = args.get("separators")?;
    let (item, key) = match separators.as_deref() {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("separators must be a pair of strings")),
    };
    let writer = Writer {
        charge: &|fuel| state.consume_fuel(fuel),
        item,
        key,
        indent,
        ascii: args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: args.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    args.assert_all_used()?;
    let mut out = String::new();
    writer.write(value, 0, &mut out)?;
    Ok(Value::from(out))
}

struct Writer<'a> {
    charge: &'a dyn Fn(u64) -> Result<(), Error>,
    item: String,
    key: String,
    indent: Option<String>,
    ascii: bool,
    sort: bool,
}

impl Writer<'_> {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: the value is nested too deeply"));
        }
        let bytes = value.as_str().map_or(0, str::len);
        (self.charge)(1 + (bytes / BYTES_PER_FUEL) as u64)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value, out)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list(&items, ['[', ']'], depth, out, |item, out| {
                    self.write(item, depth + 1, out)
                })?;
            }
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in value.try_iter()? {
                    pairs.push((self.key_text(&key)?, value.get_item(&key)?));
                }
                if self.sort {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.list(&pairs, ['{', '}'], depth, out, |(key, item), out| {
                    self.string(key, out);
                    out.push_str(&self.key);
                    self.write(item, depth + 1, out)
                })?;
            }
            kind => return Err(invalid(format!("tojson: {kind} can't be written as JSON"))),
        }
        Ok(())
    }

    fn list<T>(
        &self,
        items: &[T],
        brackets: [char; 2],
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(&T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(brackets[0]);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item);
            }
            self.line(depth + 1, out);
            write(item, out)?;
        }
        if !items.is_empty() {
            self.line(depth, out);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn key_text(&self, key: &Value) -> Result<String, Error> {
        match key.kind() {
            ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                let mut text = String::new();
                self.write(key, 0, &mut text)?;
                Ok(text)
            }
            kind => Err(invalid(format!("tojson: {kind} can't be a key"))),
        }
    }

    fn number(&self, value: &Value, out: &mut String) -> Result<(), Error> {
        if value.is_integer() {
            let _ = write!(out, "{value}");
        } else {
            out.push_str(&float_repr(f64::try_from(value.clone())?));
        }
        Ok(())
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 => escape(c, out),
                // Stand-ins for guarded ASCII characters must survive until they are turned back.
                c if self.ascii && !c.is_ascii() && !super::guard::is_stand_in(c) => escape(c, out),
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn escape(c: char, out: &mut String) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        let _ = write!(out, "\\u{unit:04x}");
    }
}

/// A float as Python prints it: the shortest digits, and an exponent outside 1e-4 to 1e16.
fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "NaN".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity".into() } else { "-Infinity".into() };
    }
    if x == 0.0 || (1e-4..1e16).contains(&x.abs()) {
        let text = x.to_string();
        return if text.contains('.') { text } else { text + ".0" };
    }
    let text = format!("{x:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

fn invalid(what: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::Environment;
    use minijinja::value::Serde;
    use serde_json::json;

    fn render(expression: &str, x: serde_json::Value) -> String {
        let mut env = Environment::new();
        env.add_filter("tojson", tojson);
        let source = format!("{{{{ {expression} }}}}");
        env.render_str(&source, minijinja::context!(x => Value::from(Serde(x)))).unwrap()
    }

    #[test]
    fn as_python_writes_it() {
        // Expected strings are the output of CPython 3.11's json.dumps(x, ensure_ascii=False, ...).
        let x = json!({"b": [1, -2.5, true, null, "é<&>'\"\\\n\u{7f}\u{1}"], "a": {}, "c": []});
        assert_eq!(
            render("x|tojson", x.clone()),
            "{\"b\": [1, -2.5, true, null, \"é<&>'\\\"\\\\\\n\u{7f}\\u0001\"], \"a\": {}, \"c\": []}"
        );
        assert_eq!(
            render("x|tojson(sort_keys=true, separators=(',', ':'))", json!({"b": 1, "a": [2, 3]})),
            r#"{"a":[2,3],"b":1}"#
        );
        assert_eq!(
            render("x|tojson(indent=2)", json!({"a": [1, {}], "b": {"c": []}})),
            "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": {\n    \"c\": []\n  }\n}"
        );
        assert_eq!(render("x|tojson(ensure_ascii=true)", json!("é𝄞")), "\"\\u00e9\\ud834\\udd1e\"");
        assert_eq!(render("x|tojson(indent=none)", json!([1, 2])), "[1, 2]");
    }

    #[test]
    fn floats_as_python_prints_them() {
        for (x, expected) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (123456789.125, "123456789.125"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1e20, "1e+20"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(float_repr(x), expected);
        }
    }

    #[test]
    fn wrong_arguments_are_errors() {
        let mut env = Environment::new();
        env.add_filter("tojson", tojson);
        for expression in ["nothing|tojson", "1|tojson(indent=99)", "1|tojson(colour=1)"] {
            assert!(
                env.render_str(&format!("{{{{ {expression} }}}}"), ()).is_err(),
                "{expression}"
            );
        }
    }
}
