//! `th-engine run`: one prompt, one answer.

use std::io::{IsTerminal, Read, Write};
use std::path::Path;

use anyhow::Context;
use serde_json::{Value, json};

use crate::answer::{Answer, answer};
use crate::cli::{RunArgs, TokenIds, version};
use crate::generate::{Counters, Finish, LoadRequest, Loader};
use crate::session::Session;
use crate::terminal::{Silent, TextSink, note};
use crate::text::chat::{ChatText, Message, Role, TemplateOptions};
use crate::text::reasoning::Start;
use crate::text::stream::StreamOptions;
use crate::{Failure, interrupt};

/// A prompt as it was given.
enum Source {
    Text(String),
    Ids(Vec<u32>),
}

/// Runs the command.
pub fn run(loader: &dyn Loader, request: &LoadRequest, args: &RunArgs) -> Result<(), Failure> {
    // The prompt is read first: a mistake in it should not cost the time of loading a model.
    let source = source(args).map_err(Failure::Usage)?;
    let mut session = Session::load(loader, request).map_err(Failure::Load)?;
    let (ids, start) = prompt(&session, args, &source).map_err(Failure::Run)?;
    let stream = StreamOptions { stops: args.answer.stops.clone(), start, keep_special: false };
    if session.text.is_none() && !stream.stops.is_empty() {
        let what = "--stop needs a tokenizer, which this model does not have";
        return Err(Failure::Usage(anyhow::anyhow!(what)));
    }
    let options = args.answer.generate_options();
    let tok = session.text.as_ref().map(ChatText::tok);
    let generator = session.generator.as_mut();
    let before = generator.counters();
    let mut text_sink = TextSink::stdout(tok.is_none());
    let result = interrupt::answering(|cancel| {
        if args.json {
            answer(generator, tok, &ids, &options, &stream, cancel, &mut Silent)
        } else {
            answer(generator, tok, &ids, &options, &stream, cancel, &mut text_sink)
        }
    });
    let answer = result.map_err(Failure::from)?;
    let spent = generator.counters() - before;
    if args.json {
        let line = report(&session, &answer, spent).to_string();
        writeln!(std::io::stdout(), "{line}").map_err(Failure::write)?;
    } else {
        text_sink.finish().map_err(Failure::write)?;
        note(&answer.line(session.floor_ms_per_round));
    }
    match answer.finish {
        Some(Finish::Cancelled) => Err(Failure::Interrupted),
        _ => Ok(()),
    }
}

/// Reads the prompt from where the options say, else from standard input.
fn source(args: &RunArgs) -> anyhow::Result<Source> {
    if let Some(TokenIds(ids)) = &args.tokens {
        return Ok(Source::Ids(ids.clone()));
    }
    let text = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => return Ok(Source::Text(text.clone())),
        (None, Some(path)) if path != Path::new("-") => {
            let bytes = std::fs::read(path);
            utf8(bytes.with_context(|| path.display().to_string())?, &path.display())?
        }
        (None, file) => {
            if file.is_none() && std::io::stdin().is_terminal() {
                anyhow::bail!(
                    "no prompt; give --prompt, --prompt-file or --tokens, or pipe one in"
                );
            }
            let mut bytes = Vec::new();
            std::io::stdin().read_to_end(&mut bytes).context("standard input")?;
            utf8(bytes, &"standard input")?
        }
    };
    // A file or `echo` ends with a line break that is no part of a message; raw text stays as it
    // is.
    let trimmed = text.strip_suffix('\n').map(|t| t.strip_suffix('\r').unwrap_or(t));
    Ok(Source::Text(match trimmed {
        Some(trimmed) if !args.raw => trimmed.to_owned(),
        _ => text,
    }))
}

fn utf8(bytes: Vec<u8>, origin: &dyn std::fmt::Display) -> anyhow::Result<String> {
    let wrong = |e: std::string::FromUtf8Error| {
        anyhow::anyhow!("{origin} is not UTF-8 text (byte {})", e.utf8_error().valid_up_to())
    };
    String::from_utf8(bytes).map_err(wrong)
}

/// The prompt's token ids, and how the output begins.
fn prompt(session: &Session, args: &RunArgs, source: &Source) -> anyhow::Result<(Vec<u32>, Start)> {
    let text = match source {
        Source::Ids(ids) => return Ok((ids.clone(), Start::Answer)),
        Source::Text(text) => text,
    };
    let chat = session.chat_text()?;
    if args.raw {
        let ids = chat.raw_ids(text)?;
        anyhow::ensure!(!ids.is_empty(), "the prompt is empty");
        return Ok((ids, Start::Answer));
    }
    let mut messages = Vec::new();
    messages.extend(args.system.iter().map(|text| Message::new(Role::System, text)));
    messages.push(Message::new(Role::User, text));
    let options = template_options(chat, args.answer.no_think);
    let prompt = chat.prompt(&messages, &[], &options)?;
    Ok((chat.prompt_ids(&prompt)?, prompt.start))
}

/// Turns `--no-think` into a variable of the template, or says that there is no such switch.
pub fn template_options(chat: &ChatText, no_think: bool) -> TemplateOptions {
    if no_think && !chat.thinking_switch() {
        note(&"--no-think changes nothing: the model's chat template has no switch for thinking");
    }
    TemplateOptions { enable_thinking: no_think.then_some(false), ..TemplateOptions::default() }
}

/// The object that `--json` prints.
fn report(session: &Session, answer: &Answer, spent: Counters) -> Value {
    let figures = &answer.figures;
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    let mut report = json!({"text": answer.text});
    if !answer.reasoning.is_empty() {
        report["reasoning"] = answer.reasoning.as_str().into();
    }
    let rest = json!({
        "tokens": answer.tokens,
        "finish_reason": answer.finish.map(Finish::name),
        "usage": {
            "prompt_tokens": figures.prompt_tokens,
            "completion_tokens": figures.output_tokens,
            "cached_tokens": figures.cached_tokens,
        },
        "timings": {
            "load_ms": ms(session.load_time),
            "prefill_ms": ms(figures.prefill),
            "first_token_ms": ms(figures.first_token),
            "decode_ms": ms(figures.decode),
            "rounds": figures.rounds,
            "tokens_per_round": figures.tokens_per_round(),
            "decode_tps": figures.decode_tps(),
            "floor_ms_per_round": session.floor_ms_per_round,
        },
        "memory": {
            "weights_bytes": session.memory.weights,
            "draft_bytes": session.memory.draft,
            "kv_bytes": session.memory.kv,
            "state_bytes": session.memory.state,
        },
        "counters": {
            "kernel_launches": spent.launches,
            "submissions": spent.submissions,
            "idle_waits": spent.waits,
            "device_allocations": spent.allocations,
        },
        "model": session.model,
        "draft": session.draft,
        "device": session.device,
        "build": version(),
    });
    if let (Value::Object(report), Value::Object(rest)) = (&mut report, rest) {
        report.extend(rest);
    }
    report
}
