//! Repository chores: `cargo xtask tidy`, `cargo xtask size`, `cargo xtask ci`.

use std::process::Command;

use anyhow::{Context, Result, bail};
use xtask::{root, size, tidy};

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("tidy") => report(&tidy::check(&root())?),
        Some("size") => {
            size::print(&root())?;
            Ok(())
        }
        Some("ci") => ci(),
        other => bail!("usage: cargo xtask tidy|size|ci (got {other:?})"),
    }
}

fn report(faults: &[String]) -> Result<()> {
    faults.iter().for_each(|fault| eprintln!("tidy: {fault}"));
    if faults.is_empty() { Ok(()) } else { bail!("{} faults", faults.len()) }
}

/// Everything that must hold before a change lands.
fn ci() -> Result<()> {
    report(&tidy::check(&root())?)?;
    cargo(&["fmt", "--all", "--check"])?;
    cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"])?;
    cargo(&["test", "--workspace", "--locked"])
}

fn cargo(args: &[&str]) -> Result<()> {
    let status = Command::new("cargo").args(args).current_dir(root()).status().context("cargo")?;
    if status.success() { Ok(()) } else { bail!("cargo {} failed", args.join(" ")) }
}
