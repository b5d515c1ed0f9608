//! Invariants of the layout: arrows between crates, complete op folders, file sizes, who reads the
//! environment, and nothing left unfinished.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::files;

const MAX_LINES: usize = 700;

/// Which workspace crates each crate may depend on.
const ARROWS: [(&str, &[&str]); 6] = [
    ("ops", &[]),
    ("cuda", &["ops"]),
    ("model", &["ops"]),
    ("engine", &["model", "ops"]),
    ("app", &["cuda", "engine", "model", "ops"]),
    ("xtask", &[]),
];

/// Every fault found, each a sentence that names the place.
pub fn check(root: &Path) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    arrows(root, &mut faults)?;
    op_folders(root, &mut faults)?;
    sources(root, &mut faults)?;
    Ok(faults)
}

fn arrows(root: &Path, faults: &mut Vec<String>) -> Result<()> {
    let output = Command::new("cargo")
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root)
        .output()
        .context("cargo metadata")?;
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("cargo metadata's output")?;
    let members = metadata["packages"].as_array().context("packages")?;
    let names: Vec<&str> = members.iter().filter_map(|p| p["name"].as_str()).collect();
    for package in members {
        let name = package["name"].as_str().unwrap_or_default();
        let Some((_, allowed)) = ARROWS.iter().find(|(from, _)| *from == name) else {
            faults.push(format!("crate {name} is missing from the drawing in xtask/src/tidy.rs"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let to = dependency["name"].as_str().unwrap_or_default();
            if names.contains(&to) && !allowed.contains(&to) && dependency["kind"].is_null() {
                faults.push(format!("crate {name} may not depend on {to}"));
            }
        }
    }
    Ok(())
}

fn op_folders(root: &Path, faults: &mut Vec<String>) -> Result<()> {
    let ops = root.join("crates/ops/src");
    let lib = std::fs::read_to_string(ops.join("lib.rs"))?;
    for entry in std::fs::read_dir(&ops)? {
        let dir = entry?.path();
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !dir.is_dir() || ["device", "simd", "testing"].contains(&name.as_str()) {
            continue;
        }
        if !lib.contains(&format!("pub mod {name};")) {
            faults.push(format!("op folder {name} is not declared in ops/src/lib.rs"));
        }
        for part in ["mod.rs", "host.rs", "cases.rs"] {
            if !dir.join(part).exists() {
                faults.push(format!("op folder {name} lacks {part}"));
            }
        }
        if let Ok(cases) = std::fs::read_to_string(dir.join("cases.rs")) {
            unlisted_cases(&format!("ops/src/{name}/cases.rs"), &cases, faults);
        }
    }
    Ok(())
}

/// A case marked for every device runs on the others only if its file's list names it.
pub fn unlisted_cases(shown: &str, text: &str, faults: &mut Vec<String>) {
    let list = text.split("cases!(").nth(1).and_then(|rest| rest.split(')').next()).unwrap_or("");
    let listed: Vec<&str> = list.split(',').map(str::trim).collect();
    for rest in text.split("#[cfg_attr(test, test)]\n").skip(1) {
        let name = rest.split("fn ").nth(1).and_then(|rest| rest.split('(').next()).unwrap_or("");
        if !listed.contains(&name) {
            faults.push(format!("{shown}: `{name}` is missing from cases!"));
        }
    }
}

fn sources(root: &Path, faults: &mut Vec<String>) -> Result<()> {
    for file in files(&root.join("crates"), &[".rs", ".cu", ".wgsl"])? {
        let text = std::fs::read_to_string(&file)?;
        let shown = file.strip_prefix(root).unwrap_or(&file).display().to_string();
        source(&shown, &text, faults);
    }
    Ok(())
}

/// The checks of one source file.
pub fn source(shown: &str, text: &str, faults: &mut Vec<String>) {
    let lines = text.lines().count();
    if lines > MAX_LINES {
        faults.push(format!("{shown} has {lines} lines; split it (limit {MAX_LINES})"));
    }
    let test = ["/tests/", "/examples/", "/fuzz.rs"].iter().any(|part| shown.contains(part));
    let may_read_env = test || shown.ends_with("app/src/config.rs");
    for (number, line) in text.lines().enumerate() {
        let at = format!("{shown}:{}", number + 1);
        if !may_read_env && (line.contains("env::var(") || line.contains("env::var_os(")) {
            faults.push(format!("{at} reads the environment; only app/src/config.rs may"));
        }
        for word in ["TODO", "FIXME", "XXX", "todo!(", "unimplemented!("] {
            if line.contains(word) {
                faults.push(format!("{at} says {word}: finish it or write it down in docs/"));
            }
        }
        if line.trim() == "#[ignore]" {
            faults.push(format!("{at} ignores a test without a reason"));
        }
    }
}
