//! Compiles every kernel that shipped models need, for every architecture, without a card; with
//! `--cases` also those of all ops' cases. `cargo xtask check-kernels` runs this.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use cuda::Nvrtc;
use engine::{Drafter, Engine, EngineOptions};
use model::{Draft, DraftSource, Target, TargetSource, synth};
use ops::DryRun;
use ops::kernel::{Card, Launch, PRELUDE};

/// A card of each architecture: compute capability, multiprocessors, shared memory of a block.
const CARDS: [(u32, u32, u32); 5] = [
    (80, 108, 163 << 10),
    (89, 128, 99 << 10),
    (90, 132, 227 << 10),
    (100, 148, 227 << 10),
    (120, 170, 99 << 10),
];

fn main() -> ExitCode {
    #[expect(clippy::disallowed_methods, reason = "a tool of developers, not the program")]
    let folders: Vec<PathBuf> =
        std::env::var_os("TH_NVRTC").map(PathBuf::from).into_iter().collect();
    let nvrtc = match Nvrtc::find(&folders) {
        Ok(nvrtc) => nvrtc,
        Err(why) => {
            println!("kernels not checked: {why}");
            return ExitCode::SUCCESS;
        }
    };
    let (major, minor) = nvrtc.version();
    println!("NVRTC {major}.{minor}, {}", nvrtc.path().display());
    let cases = std::env::args().any(|arg| arg == "--cases");
    let mut failures = 0;
    for (arch, sms, shared) in CARDS {
        let start = Instant::now();
        let card = Card { arch, sms, shared };
        let mut launches = shipped(card);
        if cases {
            launches.extend(ops::testing::plans(card));
        }
        let (kernels, failed) = compile(&nvrtc, &card, &launches);
        failures += failed;
        let time = start.elapsed().as_secs_f64();
        println!("sm_{arch}: {kernels} kernels in {time:.1} s, {failed} failed");
    }
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The kernels of every model that this repository knows the shape of.
fn shipped(card: Card) -> Vec<Launch> {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let bundled = models.join("th-tiny");
    let mut names: Vec<PathBuf> =
        synth::NAMES.iter().map(|name| format!("synth:{name}").into()).collect();
    if bundled.join("config.json").exists() {
        names.push(bundled);
    }
    let mut dry = DryRun::on_card(card);
    for name in names {
        let source = TargetSource::open(&name).expect("a known model");
        let draft = match name.to_str().filter(|name| name.starts_with("synth:")) {
            Some(_) => DraftSource::open(&name, source.spec()).ok(),
            None => DraftSource::open(&models.join("th-tiny-dflash"), source.spec()).ok(),
        };
        let mut dev = DryRun::on_card(card);
        let target = Target::load(&mut dev, &source, &mut |_| ()).expect("a dry run");
        let draft = draft.map(|d| Draft::load(&mut dev, &d, &mut |_| ()).expect("a dry run"));
        let drafter = if draft.is_some() { Drafter::DFlash } else { Drafter::None };
        // Lanes enough for every number of blocks of rows.
        let options = EngineOptions { chunk: 2048, slots: 8, ..EngineOptions::default() };
        let engine = Engine::new(dev, target, draft, drafter, options).expect("a dry run");
        dry.unsupported.clear();
        engine.rehearse(&mut dry);
        for why in &dry.unsupported {
            println!("sm_{}, {}: no plan for {why}", card.arch, name.display());
        }
    }
    dry.launches
}

/// Compiles each module once; returns how many there are and how many failed.
fn compile(nvrtc: &Nvrtc, card: &Card, launches: &[Launch]) -> (usize, usize) {
    let mut modules: Vec<&Launch> = Vec::new();
    for launch in launches {
        if !modules.iter().any(|m| (m.source, m.defines) == (launch.source, launch.defines)) {
            modules.push(launch);
        }
    }
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(m) = modules.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (name, defines) = (m.source.name, m.defines.as_slice());
                    let text = format!("{PRELUDE}\n#line 1 \"{name}\"\n{}", m.source.text);
                    if let Err(log) = nvrtc.compile(name, &text, defines, card.arch) {
                        *failed.lock().expect("no panic here") += 1;
                        println!("sm_{}: {name} with {defines:?}:\n{log}", card.arch);
                    }
                }
            });
        }
    });
    (modules.len(), failed.into_inner().expect("no panic here"))
}
