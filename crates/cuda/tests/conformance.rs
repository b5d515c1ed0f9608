//! Every op's cases on the card, if there is one. `cargo test -p cuda --test conformance -- linear`
//! runs those of some ops only.
//!
//! A case that the kernels refuse is skipped, and listed at the end.

#![expect(clippy::disallowed_methods, reason = "a test picks its compiler by the environment")]

use std::collections::BTreeMap;
use std::panic::catch_unwind;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use cuda::{Cuda, Options};
use ops::Device;
use ops::testing::{all_cases, register, skipped};

static CUDA: Mutex<Option<Cuda>> = Mutex::new(None);

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let after = args.iter().find_map(|a| a.strip_prefix("--after=")?.parse().ok());
    let filters: Vec<&str> =
        args.iter().filter(|a| !a.starts_with('-')).map(String::as_str).collect();
    let all: Vec<(String, fn())> = all_cases()
        .into_iter()
        .flat_map(|(op, cases)| cases.iter().map(move |(name, f)| (format!("{op}::{name}"), *f)))
        .collect();
    let of = |name: &str, filter: &str| name == filter || name.split("::").next() == Some(filter);
    if let Some(filter) = filters.iter().find(|f| !all.iter().any(|(name, _)| of(name, f))) {
        eprintln!("no op and no case is named `{filter}`");
        std::process::exit(2);
    }
    let chosen = all
        .iter()
        .filter(|(name, _)| filters.is_empty() || filters.iter().any(|filter| of(name, filter)));
    let options = Options {
        nvrtc: std::env::var_os("TH_NVRTC").map(PathBuf::from).into_iter().collect(),
        cache: std::env::var_os("TH_CUBINS").map(PathBuf::from),
        check_each: true,
        ..Options::default()
    };
    let cuda = match Cuda::open(&options) {
        Ok(cuda) => cuda,
        Err(why) => return println!("conformance on CUDA skipped: {why}"),
    };
    println!("conformance on {}", cuda.info().name);
    *CUDA.lock().expect("not used yet") = Some(cuda);
    register("cuda", |test| {
        let mut cuda = lock();
        let cuda = cuda.as_mut().expect("opened above");
        cuda.reset().expect("a card that still answers");
        test(cuda);
    });
    let mut failures = 0;
    for (at, (name, case)) in chosen.enumerate().skip(after.unwrap_or(0)) {
        failures += usize::from(!run(name, *case));
        if lock().as_mut().is_some_and(|cuda| cuda.reset().is_err()) {
            // The context is lost: go on in a new process.
            let mut again = Command::new(std::env::current_exe().expect("this program"));
            again.args(&filters).arg(format!("--after={}", at + 1));
            let _ = again.status();
            failures += 1;
            break;
        }
    }
    if let Some(cuda) = lock().take() {
        println!("{} kernels compiled", cuda.compiled());
    }
    if failures > 0 {
        println!("{failures} failed");
        std::process::exit(1);
    }
}

/// A case that failed before must not stop the others.
fn lock() -> MutexGuard<'static, Option<Cuda>> {
    CUDA.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Whether the case passed.
fn run(name: &str, case: fn()) -> bool {
    let start = Instant::now();
    let passed = catch_unwind(case).is_ok();
    let skips = skipped();
    let outcome = if passed { "ok" } else { "FAILED" };
    let count = if skips.is_empty() { String::new() } else { format!(", {} skipped", skips.len()) };
    println!("{name}: {outcome} ({:.2} s){count}", start.elapsed().as_secs_f64());
    let mut reasons = BTreeMap::new();
    skips.iter().for_each(|s| *reasons.entry(s.why.to_string()).or_insert(0) += 1);
    for (why, count) in reasons {
        println!("    skipped {count}x: {why}");
    }
    passed
}
