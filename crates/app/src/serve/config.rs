//! The configuration file: options of `serve` under their names, in TOML.
//!
//! A file becomes arguments behind those of the command line, so that both are checked by the same
//! code and an option works in a file because it works on the command line.

use std::ffi::OsString;
use std::path::Path;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml::{Table, Value};

/// Options that make no sense in a file.
const ONLY_COMMAND_LINE: [&str; 5] =
    ["config", "print-config", "help", "version", "supervised-socket"];
/// Options that are never printed.
const SECRET: [&str; 2] = ["api-key", "otlp-header"];

/// The arguments that a configuration file adds to those of the command line.
///
/// # Errors
/// In words: the file can't be read, or has an option that there isn't.
pub fn arguments(
    serve: &Command,
    matches: &ArgMatches,
    path: &Path,
) -> Result<Vec<OsString>, String> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|e| format!("{shown}: {e}"))?;
    let table: Table = text.parse().map_err(|e| format!("{shown}: {e}"))?;
    let mut arguments = Vec::new();
    for (key, value) in &table {
        let option = options(serve).find(|arg| arg.get_long() == Some(key));
        let option = option.ok_or_else(|| unknown(serve, path, key))?;
        if given(matches, option) {
            continue;
        }
        let wrong = || format!("{shown}: {key} has a value of the wrong kind");
        let flag = matches!(option.get_action(), ArgAction::SetTrue);
        let many = matches!(option.get_action(), ArgAction::Append);
        match value {
            Value::Boolean(true) if flag => arguments.push(format!("--{key}").into()),
            Value::Boolean(false) if flag => {}
            _ if flag => return Err(wrong()),
            Value::Array(values) if many => {
                for value in values {
                    arguments.push(argument(key, value).ok_or_else(wrong)?);
                }
            }
            value => arguments.push(argument(key, value).ok_or_else(wrong)?),
        }
    }
    Ok(arguments)
}

/// Options in effect, as a configuration file.
pub fn effective(serve: &Command, matches: &ArgMatches) -> String {
    let mut table = Table::new();
    for option in options(serve) {
        let (Some(name), id) = (option.get_long(), option.get_id().as_str()) else { continue };
        if SECRET.contains(&name) || matches.try_contains_id(id).is_err() {
            continue;
        }
        if matches!(option.get_action(), ArgAction::SetTrue) {
            table.insert(name.into(), matches.get_flag(id).into());
            continue;
        }
        let Some(values) = matches.get_raw(id) else { continue };
        let mut values: Vec<Value> = values.map(|value| typed(&value.to_string_lossy())).collect();
        let many = matches!(option.get_action(), ArgAction::Append);
        let value = match values.len() {
            1 if !many => values.remove(0),
            _ => Value::Array(values),
        };
        table.insert(name.into(), value);
    }
    if let Some(model) = matches.get_one::<String>("name") {
        table.insert("model".into(), model.as_str().into());
    }
    table.to_string()
}

/// Options that may stand in a file.
fn options(serve: &Command) -> impl Iterator<Item = &Arg> {
    let allowed =
        |arg: &&Arg| arg.get_long().is_some_and(|long| !ONLY_COMMAND_LINE.contains(&long));
    serve.get_arguments().filter(allowed)
}

fn given(matches: &ArgMatches, option: &Arg) -> bool {
    let id = option.get_id().as_str();
    let positional = id == "model" && matches.contains_id("name");
    positional || matches.value_source(id) == Some(ValueSource::CommandLine)
}

fn argument(key: &str, value: &Value) -> Option<OsString> {
    let value = match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        _ => return None,
    };
    Some(format!("--{key}={value}").into())
}

/// Numbers as numbers, all else as text.
fn typed(text: &str) -> Value {
    match (text.parse::<i64>(), text.parse::<f64>()) {
        (Ok(number), _) => number.into(),
        (_, Ok(number)) if number.is_finite() => number.into(),
        _ => text.into(),
    }
}

fn unknown(serve: &Command, path: &Path, key: &str) -> String {
    let names: Vec<&str> = options(serve).filter_map(Arg::get_long).collect();
    format!("{}: there is no option {key:?}; options are {}", path.display(), names.join(", "))
}
