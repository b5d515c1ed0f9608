//! Cases on devices other than the CPU.

use std::sync::Mutex;

use half::bf16;

use super::{
    Builder, Elsewhere, Kind, Outcome, Ran, Rows, Tolerance, assert_close, assert_rounded, compare,
    run_on, same_rows,
};
#[cfg(feature = "cases")]
use crate::DryRun;
#[cfg(feature = "cases")]
use crate::kernel::{Card, Launch};
use crate::simd::Isa;
use crate::{ActDtype, Device, Host, HostMode, Op, Unsupported};

/// A function of a case file, by name.
pub type Case = (&'static str, fn());

/// Calls back with an empty device.
pub type WithDevice = fn(&mut dyn FnMut(&mut dyn Device));

/// A case that a device can't run.
#[derive(Clone, Debug)]
pub struct Skip {
    /// The case.
    pub label: String,
    /// Why.
    pub why: Unsupported,
}

struct Registered {
    name: String,
    with: WithDevice,
}

static DEVICE: Mutex<Option<Registered>> = Mutex::new(None);
static SKIPPED: Mutex<Vec<Skip>> = Mutex::new(Vec::new());

/// Planned launches, while [`plans`] runs.
#[cfg(feature = "cases")]
static PLANS: Mutex<Option<(Card, Vec<Launch>)>> = Mutex::new(None);

/// Every kernel, by its first launch, that the cases of all ops need on a card. Runs nothing.
#[cfg(feature = "cases")]
pub fn plans(card: Card) -> Vec<Launch> {
    let lock = || PLANS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    *lock() = Some((card, Vec::new()));
    all_cases().iter().flat_map(|(_, cases)| *cases).for_each(|(_, case)| case());
    lock().take().map_or(Vec::new(), |(_, launches)| launches)
}

/// Whether cases are only planned, and then this one was.
fn planned<O: Op>(build: &impl Fn(&mut Builder) -> O) -> bool {
    #[cfg(feature = "cases")]
    if let Some((card, launches)) =
        &mut *PLANS.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    {
        let mut dry = DryRun::on_card(*card);
        dry.launches = std::mem::take(launches);
        let op = build(&mut Builder::new(&mut dry));
        dry.run(&op);
        *launches = dry.launches;
        return true;
    }
    let _ = build;
    false
}

/// From now on, cases run on this device, not on the CPU.
pub fn register(name: &str, with: WithDevice) {
    *DEVICE.lock().expect("no case panics while registering") =
        Some(Registered { name: name.to_owned(), with });
}

/// The cases skipped since the last call.
pub fn skipped() -> Vec<Skip> {
    std::mem::take(&mut SKIPPED.lock().expect("a list of skips"))
}

/// The cases of every op that run on every device.
#[cfg(feature = "cases")]
pub fn all_cases() -> Vec<(&'static str, &'static [Case])> {
    vec![
        ("accept", crate::accept::cases::CASES),
        ("attention", crate::attention::cases::CASES),
        ("attn_mix", crate::attn_mix::cases::CASES),
        ("attn_prepare", crate::attn_prepare::cases::CASES),
        ("block_conv", crate::block_conv::cases::CASES),
        ("copy_rows", crate::copy_rows::cases::CASES),
        ("embed", crate::embed::cases::CASES),
        ("gated_delta", crate::gated_delta::cases::CASES),
        ("gated_norm", crate::gated_norm::cases::CASES),
        ("gdn_mix", crate::gdn_mix::cases::CASES),
        ("gdn_prepare", crate::gdn_prepare::cases::CASES),
        ("head_gate", crate::head_gate::cases::CASES),
        ("linear", crate::linear::cases::CASES),
        ("propose", crate::propose::cases::CASES),
        ("rms_norm", crate::rms_norm::cases::CASES),
        ("silu_mul", crate::silu_mul::cases::CASES),
        ("top_k", crate::top_k::cases::CASES),
    ]
}

/// Runs a test of a sequence of ops on the registered device, or else on the CPU with every
/// instruction set. For tests that [`conformance`](super::conformance) can't express; an op that the
/// device can't run shows at `sync` as [`Unsupported`](crate::DeviceError::Unsupported): hand it back and it counts as skipped.
pub fn on_each_device(
    label: &str,
    mut test: impl FnMut(&str, &mut dyn Device) -> Result<(), Unsupported>,
) {
    #[cfg(feature = "cases")]
    if PLANS.lock().is_ok_and(|plans| plans.is_some()) {
        return;
    }
    if let Some((name, with)) = registered() {
        let label = format!("{label} on {name}");
        with(&mut |dev| {
            if let Err(why) = test(&label, dev) {
                skip(&label, why);
            }
        });
        return;
    }
    for isa in Isa::available() {
        let label = format!("{label} on {}", isa.name());
        let mut host = Host::with(HostMode::Simd, isa, 2, ActDtype::I8);
        test(&label, &mut host).unwrap_or_else(|e| panic!("{label}: {e}"));
    }
}

fn registered() -> Option<(String, WithDevice)> {
    let device = DEVICE.lock().expect("no case panics while registering");
    device.as_ref().map(|d| (d.name.clone(), d.with))
}

fn skip(label: &str, why: Unsupported) {
    let label = label.to_owned();
    SKIPPED.lock().expect("a list of skips").push(Skip { label, why });
}

/// Runs a case on an empty registered device; `None` if it can't.
fn outcomes<O: Op>(
    label: &str,
    with: WithDevice,
    build: &impl Fn(&mut Builder) -> O,
) -> Option<(ActDtype, Vec<Outcome>)> {
    let mut result = None;
    with(&mut |dev| {
        let rows = Rows::of(dev);
        result = Some((dev.info().act, run_on(label, dev, rows, build)));
    });
    let (act, run) = result.expect("the device was called back with");
    match run {
        Ok(ran) => Some((act, ran.outcomes)),
        Err(why) => {
            skip(label, why);
            None
        }
    }
}

/// Whether a device is registered, and then the case ran there or was skipped.
pub(super) fn conformance<O: Op>(
    label: &str,
    tolerance: Tolerance,
    build: &impl Fn(&mut Builder) -> O,
) -> bool {
    if planned(build) {
        return true;
    }
    let Some((name, with)) = registered() else { return false };
    let label = format!("{label} on {name}");
    let Some((act, got)) = outcomes(&label, with, build) else { return true };
    let rows = if act == ActDtype::Bf16 { Rows::RoundedF32 } else { Rows::AsAsked };
    let mut reference = Host::with(HostMode::Reference, Isa::Portable, 1, ActDtype::I8);
    let ran = run_on(&label, &mut reference, rows, build);
    let Ran { op, outcomes: want, .. } = ran.unwrap_or_else(|e| panic!("{label}: {e}"));
    let rounded = match tolerance.elsewhere {
        Elsewhere::Rounded => op.rounded(reference.mem()),
        Elsewhere::Same | Elsewhere::Relative(_) => None,
    };
    let tolerance = match tolerance.elsewhere {
        Elsewhere::Relative(rel) => Tolerance::relative(rel),
        Elsewhere::Same | Elsewhere::Rounded => Tolerance::relative(tolerance.rel),
    };
    for (w, g) in want.iter().zip(&got) {
        match (g.kind, &rounded) {
            (_, Some(rounded)) if g.name == "out" => assert_rounded(&label, rounded, g),
            (Kind::Act(act), _) if act.dtype == ActDtype::Bf16 => {
                close_bf16(&label, w, g, tolerance);
            }
            _ => compare(&label, w, g, tolerance),
        }
    }
    if let Some((_, again)) = outcomes(&label, with, build) {
        for (first, second) in got.iter().zip(&again) {
            let name = &first.name;
            assert!(first.bytes == second.bytes, "{label}: `{name}` differs between two runs");
        }
    }
    true
}

/// bf16 rows against the definition's f32: within the tolerance, and then rounded.
fn close_bf16(label: &str, want: &Outcome, got: &Outcome, tolerance: Tolerance) {
    if tolerance.rel > 0.0 {
        // One unit in the last place: a small difference may round to the other neighbour.
        let tolerance = Tolerance::relative(tolerance.rel + 1.0 / 256.0);
        return assert_close(label, &want.name, &want.values, &got.values, tolerance);
    }
    for (i, (&w, &g)) in want.values.iter().zip(&got.values).enumerate() {
        let rounded = bf16::from_f32(w).to_f32();
        let same = rounded.to_bits() == g.to_bits() || (w.is_nan() && g.is_nan());
        assert!(same, "{label}: `{}`[{i}] want {w} as {rounded} got {g}", want.name);
    }
}

/// Whether a device is registered, and then the cases ran there or were skipped.
pub(super) fn row_invariance<O: Op>(
    label: &str,
    max: usize,
    build: &impl Fn(&mut Builder, usize) -> O,
) -> bool {
    if planned(&|b: &mut Builder| build(b, max)) {
        return (1..max).all(|rows| planned(&|b: &mut Builder| build(b, rows)));
    }
    let Some((name, with)) = registered() else { return false };
    let label = format!("{label} rows on {name}");
    let run = |rows: usize| outcomes(&label, with, &|b: &mut Builder| build(b, rows));
    if let Some((_, all)) = run(max) {
        same_rows(&label, max, &all, |rows| run(rows).map_or(Vec::new(), |(_, outcomes)| outcomes));
    }
    true
}
