//! Chat templates: the checkpoint's own Jinja, run as `transformers` runs it.
//!
//! A template is input like any other: it runs with a limited amount of fuel, has no access to
//! anything but the conversation, and every failure is an error of one line. What it can't be kept from is to
//! nest a value millions deep (many levels in each step), or to put a namespace into itself, and print it: that
//! overflows the stack, and minijinja has no guard there.

use std::path::Path;

use jiff::Zoned;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::Value as Json;

/// Steps a render may take; the work and, at 64 bytes a step, the memory of a hostile template.
/// A conversation of 10,000 messages needs about 3 million.
const FUEL: u64 = 8_000_000;
/// Stack of a render, in bytes: values are printed, compared and dropped by recursion, and nest a level for each step
/// of a loop. It is reserved, and becomes memory where it is used. A thread that has as much left renders on its own
/// stack (and keeps the memory): mapping and unmapping one takes several times as long as a short conversation's render.
pub const STACK: usize = 512 << 20;

/// Where the time for `strftime_now` comes from.
pub type Clock = fn() -> Zoned;

/// One chat template, ready to render.
pub struct Template {
    env: Environment<'static>,
    source: String,
    origin: String,
}

/// Why a template could not be read or rendered.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template refused the conversation by `raise_exception`.
    #[error("the chat template refused the conversation: {0}")]
    Refused(String),
    /// The template does not parse, or failed while it ran.
    #[error("{origin}: {what}")]
    Broken {
        /// The file that holds the template.
        origin: String,
        /// What went wrong, with the line.
        what: String,
    },
}

impl Template {
    /// Parses a template; `origin` names it in errors.
    pub fn parse(origin: &str, source: &str, clock: Clock) -> Result<Template, TemplateError> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|e| broken(origin, &e))?);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        env.set_fuel(Some(FUEL));
        // They show variables, with work that no fuel pays for.
        env.set_debug(false);
        env.remove_filter("pprint");
        env.remove_global("debug");
        env.add_filter("tojson", super::python_json::tojson);
        env.add_function("raise_exception", raise_exception);
        env.add_function("strftime_now", move |format: &str| strftime(&clock(), format));
        env.add_template_owned("chat", without_generation_tags(source))
            .map_err(|e| broken(origin, &e))?;
        Ok(Template { env, source: source.to_owned(), origin: origin.to_owned() })
    }

    /// Renders with the variables in `context`, an object.
    pub fn render(&self, context: &Json) -> Result<String, TemplateError> {
        let template = self.env.get_template("chat").map_err(|e| broken(&self.origin, &e))?;
        let render = || template.render(Value::from(Serde(context)));
        let rendered = stacker::maybe_grow(STACK, STACK, render);
        rendered.map_err(|error| match refusal(&error) {
            Some(message) => TemplateError::Refused(message),
            None => broken(&self.origin, &error),
        })
    }

    /// Whether the template mentions a variable: how an option is found to have an effect.
    pub fn mentions(&self, variable: &str) -> bool {
        self.source.contains(variable)
    }

    /// The template as it was read.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The file it was read from.
    pub fn origin(&self) -> &str {
        &self.origin
    }
}

/// The templates of a model by name; most have only "default".
pub struct Templates {
    named: Vec<(String, Template)>,
}

impl Templates {
    /// Parses `(name, source)` pairs found in `origin`.
    pub fn parse(
        origin: &str,
        sources: &[(String, String)],
        clock: Clock,
    ) -> Result<Templates, TemplateError> {
        let parse = |(name, source): &(String, String)| {
            Template::parse(origin, source, clock).map(|template| (name.clone(), template))
        };
        Ok(Templates { named: sources.iter().map(parse).collect::<Result<_, _>>()? })
    }

    /// Reads the templates of a model folder; none is fine for a base model.
    ///
    /// `chat_template.jinja` wins over `chat_template` in `tokenizer_config.json` (a string, or a
    /// list of `{name, template}`), and that over `chat_template.json`.
    pub fn open(folder: &Path, clock: Clock) -> Result<Templates, TemplateError> {
        let jinja = folder.join("chat_template.jinja");
        if jinja.exists() {
            let source = read(&jinja)?;
            return Templates::parse(&shown(&jinja), &[("default".into(), source)], clock);
        }
        for name in ["tokenizer_config.json", "chat_template.json"] {
            let path = folder.join(name);
            if !path.exists() {
                continue;
            }
            let json: Json = serde_json::from_str(&read(&path)?)
                .map_err(|e| broken(&shown(&path), &format!("not valid JSON: {e}")))?;
            let sources = sources(&json["chat_template"]).map_err(|e| broken(&shown(&path), &e))?;
            if !sources.is_empty() {
                return Templates::parse(&shown(&path), &sources, clock);
            }
        }
        Ok(Templates { named: Vec::new() })
    }

    /// The template for a conversation: "tool_use" if there are tools and it exists, else
    /// "default", else the only one there is.
    pub fn choose(&self, with_tools: bool) -> Option<&Template> {
        let by_name = |wanted: &str| self.named.iter().find(|(name, _)| name == wanted);
        let tool_use = by_name("tool_use").filter(|_| with_tools);
        let only = self.named.first().filter(|_| self.named.len() == 1);
        tool_use.or_else(|| by_name("default")).or(only).map(|(_, template)| template)
    }

    /// Names of all templates.
    pub fn names(&self) -> Vec<&str> {
        self.named.iter().map(|(name, _)| name.as_str()).collect()
    }
}

/// The `chat_template` field: absent, one template, or a list of named ones.
fn sources(field: &Json) -> Result<Vec<(String, String)>, String> {
    match field {
        Json::Null => Ok(Vec::new()),
        Json::String(source) => Ok(vec![("default".into(), source.clone())]),
        Json::Array(items) => {
            let one = |(index, item): (usize, &Json)| {
                let text = |key: &str| item[key].as_str().map(str::to_owned);
                let pair = text("name").zip(text("template"));
                pair.ok_or_else(|| format!("chat_template[{index}] needs a name and a template"))
            };
            items.iter().enumerate().map(one).collect()
        }
        _ => Err("chat_template is neither a string nor a list".into()),
    }
}

/// `{% generation %}` marks what to train on. It becomes a block without effect, so that its
/// white-space control keeps working.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let name = tag[2..end].trim_end_matches("%}").trim_matches(['-', '+']).trim();
        let plain = match name {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        match plain {
            Some(plain) => out.push_str(&tag[..end].replace(name, plain)),
            // Only the opening is passed over: "%}" may be inside a string of the tag.
            None => {
                out.push_str("{%");
                rest = &tag[2..];
                continue;
            }
        }
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}

/// Carries the text of `raise_exception` through the interpreter.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: &str) -> Result<Value, Error> {
    let error = Error::new(ErrorKind::InvalidOperation, message.to_owned());
    Err(error.with_source(Raised(message.to_owned())))
}

/// The message given to `raise_exception`, if that is what ended the render.
fn refusal(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(raised) = cause.downcast_ref::<Raised>() {
            return Some(raised.0.clone());
        }
        source = cause.source();
    }
    None
}

fn strftime(now: &Zoned, format: &str) -> Result<String, Error> {
    let formatted = jiff::fmt::strtime::format(format, now);
    formatted.map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
}

fn broken(origin: &str, what: &dyn std::fmt::Display) -> TemplateError {
    let what = what.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    TemplateError::Broken { origin: origin.to_owned(), what }
}

fn read(path: &Path) -> Result<String, TemplateError> {
    std::fs::read_to_string(path).map_err(|e| broken(&shown(path), &e))
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
