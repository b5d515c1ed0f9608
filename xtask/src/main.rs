//! Repository chores: `cargo xtask tidy`, `cargo xtask size`, `cargo xtask ci`,
//! `cargo xtask check-kernels [--cases]`.

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
        Some("check-kernels") => check_kernels(),
        other => bail!("usage: cargo xtask tidy|size|ci|check-kernels (got {other:?})"),
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

/// Compiles every CUDA kernel for every architecture; needs NVIDIA's compiler library, but no card.
fn check_kernels() -> Result<()> {
    let rest: Vec<String> = std::env::args().skip(2).collect();
    let mut args = vec!["run", "--package", "cuda", "--example", "check_kernels", "--"];
    args.extend(rest.iter().map(String::as_str));
    cargo(&args)
}

fn cargo(args: &[&str]) -> Result<()> {
    let status = Command::new("cargo").args(args).current_dir(root()).status().context("cargo")?;
    if status.success() { Ok(()) } else { bail!("cargo {} failed", args.join(" ")) }
}
