//! `th-engine launch`: agents pointed at a server, with the sizes that it really has.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};

use super::args::{Agent, LaunchArgs};
use crate::Failure;
use crate::config::Surroundings;

/// The most time that a server may take to tell about itself.
const PATIENCE: Duration = Duration::from_secs(10);
/// Tokens of an answer that an agent may ask for: a quarter of the context, within these limits.
const OUTPUT: (u64, u64) = (1024, 32_000);
/// How long an agent waits for the first token, in milliseconds. A long prompt takes its time on one's own
/// machine, and what keeps a connection alive meanwhile is no event to Claude Code and Codex: they would
/// give up after five minutes and send it again.
const WAIT_MS: u64 = 3_600_000;

/// What an agent needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Server {
    url: String,
    key: Option<String>,
    model: String,
    context: u64,
}

/// How an agent is started.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Start {
    program: &'static str,
    arguments: Vec<String>,
    environment: BTreeMap<&'static str, String>,
}

/// Runs the command.
pub fn run(args: &LaunchArgs, surroundings: &Surroundings) -> Result<(), Failure> {
    let key = args.api_key.clone();
    let key = key.or_else(|| surroundings.api_key.as_ref().map(|key| key.0.clone()));
    let server = ask(&args.url, key).map_err(Failure::Run)?;
    let start = start(args.agent, &server, &args.rest);
    if args.print {
        let text = shell(&start);
        return write!(std::io::stdout(), "{text}").map_err(Failure::write);
    }
    let Start { program, arguments, environment } = start;
    let status = Command::new(program).args(arguments).envs(environment).status();
    let status = status
        .with_context(|| {
            format!("can't start {program}; install it, or use --print to see what to set")
        })
        .map_err(Failure::Run)?;
    match status.success() {
        true => Ok(()),
        false => Err(Failure::Run(anyhow::anyhow!("{program}: {status}"))),
    }
}

/// Asks a server what it serves.
fn ask(url: &str, key: Option<String>) -> anyhow::Result<Server> {
    let url = url.trim_end_matches('/').to_owned();
    let config = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).build();
    let mut request = ureq::Agent::new_with_config(config).get(format!("{url}/v1/models"));
    if let Some(key) = &key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    let reply = request.call().with_context(|| {
        format!(
            "can't ask the server at {url}; start it with th-engine serve, or name it with --url"
        )
    })?;
    let models: Value = reply.into_body().read_json().context("the server's list of models")?;
    let first = &models["data"][0];
    let model = first["id"].as_str().context("the server names no model")?.to_owned();
    let context = first["context_length"].as_u64().context("the server tells no context length")?;
    Ok(Server { url, key, model, context })
}

fn start(agent: Agent, server: &Server, rest: &[String]) -> Start {
    let output = (server.context / 4).clamp(OUTPUT.0, OUTPUT.1).min(server.context);
    match agent {
        Agent::Claude => claude(server, output, rest),
        Agent::Codex => codex(server, rest),
        Agent::Opencode => opencode(server, output, rest),
    }
}

/// Agents want a key even where none is needed.
fn key_of(server: &Server) -> String {
    server.key.clone().unwrap_or_else(|| "none".to_owned())
}

fn claude(server: &Server, output: u64, rest: &[String]) -> Start {
    let model = || server.model.clone();
    let environment = BTreeMap::from([
        ("ANTHROPIC_BASE_URL", server.url.clone()),
        ("ANTHROPIC_AUTH_TOKEN", key_of(server)),
        ("ANTHROPIC_MODEL", model()),
        ("ANTHROPIC_DEFAULT_OPUS_MODEL", model()),
        ("ANTHROPIC_DEFAULT_SONNET_MODEL", model()),
        ("ANTHROPIC_DEFAULT_HAIKU_MODEL", model()),
        ("CLAUDE_CODE_SUBAGENT_MODEL", model()),
        ("CLAUDE_CODE_MAX_OUTPUT_TOKENS", output.to_string()),
        ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", server.context.to_string()),
        ("CLAUDE_CODE_AUTO_COMPACT_WINDOW", server.context.to_string()),
        ("API_TIMEOUT_MS", WAIT_MS.to_string()),
        ("CLAUDE_STREAM_IDLE_TIMEOUT_MS", WAIT_MS.to_string()),
        ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1".to_owned()),
    ]);
    Start { program: "claude", arguments: rest.to_vec(), environment }
}

fn codex(server: &Server, rest: &[String]) -> Start {
    let quoted = |text: &str| toml::Value::from(text).to_string();
    let provider = format!(
        "{{ name = \"th-engine\", base_url = {}, env_key = \"TH_API_KEY\", \
         wire_api = \"responses\", stream_idle_timeout_ms = {WAIT_MS} }}",
        quoted(&format!("{}/v1", server.url))
    );
    let settings = [
        ("model_provider", quoted("th-engine")),
        ("model_providers.th-engine", provider),
        ("model", quoted(&server.model)),
        ("model_context_window", server.context.to_string()),
    ];
    let settings =
        settings.iter().flat_map(|(name, value)| ["-c".to_owned(), format!("{name}={value}")]);
    let arguments = settings.chain(rest.iter().cloned()).collect();
    Start {
        program: "codex",
        arguments,
        environment: BTreeMap::from([("TH_API_KEY", key_of(server))]),
    }
}

fn opencode(server: &Server, output: u64, rest: &[String]) -> Start {
    let name = format!("th-engine/{}", server.model);
    let config = json!({
        "$schema": "https://opencode.ai/config.json",
        "model": name,
        "small_model": name,
        "provider": {"th-engine": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "th-engine",
            "options": {"baseURL": format!("{}/v1", server.url), "apiKey": key_of(server)},
            "models": {&server.model: {
                "name": server.model,
                "limit": {"context": server.context, "output": output},
            }},
        }},
    });
    let environment = BTreeMap::from([("OPENCODE_CONFIG_CONTENT", config.to_string())]);
    Start { program: "opencode", arguments: rest.to_vec(), environment }
}

/// The start as commands of a shell.
fn shell(start: &Start) -> String {
    let set = |(name, value): (&&str, &String)| format!("export {name}={}\n", quoted(value));
    let mut text: String = start.environment.iter().map(set).collect();
    text += start.program;
    for argument in &start.arguments {
        text.push(' ');
        text += &quoted(argument);
    }
    text.push('\n');
    text
}

fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(context: u64) -> Server {
        Server {
            url: "http://h:1".into(),
            key: Some("it's".into()),
            model: "org/m".into(),
            context,
        }
    }

    #[test]
    fn sizes_are_those_of_the_server() {
        for (context, output) in [(512, "512"), (2048, "1024"), (8192, "2048"), (1 << 20, "32000")]
        {
            let start = start(Agent::Claude, &server(context), &[]);
            assert_eq!(start.environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"], output);
            assert_eq!(start.environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"], context.to_string());
        }
        let start = start(Agent::Opencode, &server(8192), &["run".into()]);
        let config: Value =
            serde_json::from_str(&start.environment["OPENCODE_CONFIG_CONTENT"]).unwrap();
        let limit = &config["provider"]["th-engine"]["models"]["org/m"]["limit"];
        assert_eq!(*limit, json!({"context": 8192, "output": 2048}));
        assert_eq!(
            (config["model"].as_str(), start.arguments),
            (Some("th-engine/org/m"), vec!["run".to_owned()])
        );
    }

    #[test]
    fn settings_of_codex_are_toml() {
        let start = start(Agent::Codex, &server(8192), &["exec".into()]);
        assert_eq!(start.arguments.last().unwrap(), "exec");
        let settings: Vec<&String> = start.arguments.iter().filter(|a| a.contains('=')).collect();
        let text = settings.iter().map(|s| s.replacen("model_providers.th-engine", "p", 1));
        let text = text.collect::<Vec<_>>().join("\n");
        let table: toml::Table = text.parse().unwrap();
        assert_eq!(table["p"]["base_url"].as_str(), Some("http://h:1/v1"));
        assert_eq!(table["p"]["stream_idle_timeout_ms"].as_integer(), Some(3_600_000));
        assert_eq!(table["model_context_window"].as_integer(), Some(8192));
    }

    #[test]
    fn what_a_shell_reads_is_what_was_meant() {
        let start = start(Agent::Claude, &server(8192), &["-p".into(), "a b".into()]);
        let script = shell(&start).replace("claude -p", "printf '%s|%s' \"$ANTHROPIC_AUTH_TOKEN\"");
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "it's|a b");
    }
}
