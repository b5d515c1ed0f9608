//! `th-engine inspect`: what a model is and what it would cost, before any weight is loaded; and
//! `th-engine bench`: what it does cost.

use std::io::Write;

use serde_json::{Map, Value, json};

use crate::Failure;
use crate::cli::{BenchArgs, InspectArgs, ProfileArgs, version};
use crate::generate::{LoadRequest, Loader, Section};
use crate::session::open_text;
use crate::text::chat::ChatText;

/// Runs the command.
pub fn run(loader: &dyn Loader, request: &LoadRequest, args: &InspectArgs) -> Result<(), Failure> {
    let (mut sections, source) = loader.inspect(request).map_err(Failure::Load)?;
    let text = open_text(&source).map_err(Failure::Load)?;
    sections.extend(text.as_ref().map(text_section));
    let output = if args.json { as_json(&sections).to_string() } else { as_text(&sections) };
    writeln!(std::io::stdout(), "{output}").map_err(Failure::write)
}

/// Runs `bench`.
pub fn bench(loader: &dyn Loader, request: &LoadRequest, args: &BenchArgs) -> Result<(), Failure> {
    let sections = loader.bench(request, args.ops).map_err(Failure::Run)?;
    let output = if args.json { as_json(&sections).to_string() } else { as_text(&sections) };
    writeln!(std::io::stdout(), "{output}").map_err(Failure::write)
}

/// Runs `profile`.
pub fn profile(
    loader: &dyn Loader,
    request: &LoadRequest,
    args: &ProfileArgs,
) -> Result<(), Failure> {
    let sections = loader.profile(request).map_err(Failure::Run)?;
    let output = if args.json { as_json(&sections).to_string() } else { as_text(&sections) };
    writeln!(std::io::stdout(), "{output}").map_err(Failure::write)
}

/// What the tokenizer and the template offer.
fn text_section(text: &ChatText) -> Section {
    let tok = text.tok();
    let control = tok.added().iter().filter(|token| token.2).count();
    let yes_no = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
    let mut facts = vec![
        ("token ids".to_owned(), tok.id_count().to_string()),
        ("added tokens".to_owned(), format!("{} ({control} control)", tok.added().len())),
        ("before raw text".to_owned(), format!("{:?}", tok.raw_prefix())),
    ];
    match text.templates().choose(false) {
        None => facts.push(("chat template".into(), "none".into())),
        Some(template) => facts.extend([
            ("chat template".to_owned(), template.origin().to_owned()),
            ("templates".to_owned(), text.templates().names().join(", ")),
            ("tools in the template".to_owned(), yes_no(template.mentions("tools"))),
            ("switch for thinking".to_owned(), yes_no(text.thinking_switch())),
            ("later system messages".to_owned(), yes_no(text.late_system())),
        ]),
    }
    Section { title: "Text".into(), facts }
}

fn as_text(sections: &[Section]) -> String {
    let width = |section: &Section| section.facts.iter().map(|fact| fact.0.chars().count()).max();
    let width = sections.iter().filter_map(width).max().unwrap_or(0);
    let mut lines = Vec::new();
    for section in sections {
        lines.push(section.title.clone());
        lines.extend(section.facts.iter().map(|(name, value)| format!("  {name:width$}  {value}")));
    }
    lines.join("\n")
}

fn as_json(sections: &[Section]) -> Value {
    let facts = |section: &Section| -> Map<String, Value> {
        section.facts.iter().map(|(name, value)| (name.clone(), value.as_str().into())).collect()
    };
    let all: Map<String, Value> =
        sections.iter().map(|section| (section.title.clone(), facts(section).into())).collect();
    json!({"sections": all, "build": version()})
}
