//! Which device a model gets.

use anyhow::Context;
use cuda::{Cuda, OpenError};
use engine::EngineOptions;
use ops::kernel::Card;
use ops::{ActDtype, Device, DryRun, Host};

use crate::generate::{DeviceKind, Isa, LoadRequest};
use crate::local::{Sources, build};
use crate::memory::host_free;
use crate::terminal;

/// A device, and what suits it.
pub struct Chosen {
    /// What it is: never [`DeviceKind::Auto`].
    pub kind: DeviceKind,
    /// The device.
    pub dev: Box<dyn Device>,
    /// A dry run with the same plans.
    pub dry: DryRun,
    /// Rows of a prefill pass, and whether rounds are submitted ahead.
    pub options: EngineOptions,
    /// Bytes that are free where the model is to lie, if that is known.
    pub free: Option<u64>,
}

/// Says whether the model fits a device: what suits the device, bytes that are free there, and dry runs like it.
pub type Fits<'a> =
    dyn Fn(EngineOptions, Option<u64>, &dyn Fn() -> DryRun) -> anyhow::Result<()> + 'a;

/// The device that a request asks for; ready to run its model if `lanes` says for how many lanes. Where it asks for none: the
/// first card, if it is of a kind that was tried, can run the model and `fits`; or else the CPU, and why a card that is
/// there is left alone is told.
pub fn choose(
    request: &LoadRequest,
    sources: &Sources,
    lanes: Option<usize>,
    fits: &Fits<'_>,
) -> anyhow::Result<Chosen> {
    match request.device {
        DeviceKind::Cpu => cpu(request),
        // What doesn't fit is refused later, with the numbers.
        DeviceKind::Cuda => card(request, sources, lanes, None).context("can't use CUDA"),
        // Who says how the CPU should compute wants it to.
        DeviceKind::Auto if request.threads.is_some() || request.isa != Isa::Auto => cpu(request),
        DeviceKind::Auto => card(request, sources, lanes, Some(fits)).or_else(|why| {
            if is_there(&why) {
                terminal::note(&format!(
                    "computing on the CPU, since the card can't be used: {why:#} (--device cpu leaves it alone, --device cuda takes it)"
                ));
            }
            cpu(request)
        }),
    }
}

/// Whether a card that can't be used is there at all.
fn is_there(why: &anyhow::Error) -> bool {
    let absent =
        |e: &OpenError| matches!(e, OpenError::NoDriver | OpenError::NoDevice { count: 0, .. });
    !why.downcast_ref().is_some_and(absent)
}

/// Refuses cards of kinds on which nothing was tried.
fn tried(card: &Card) -> anyhow::Result<()> {
    let arch = card.arch;
    anyhow::ensure!(
        arch == 90,
        "its kernels were only tried on cards of sm_90, and this is sm_{arch}"
    );
    Ok(())
}

fn cpu(request: &LoadRequest) -> anyhow::Result<Chosen> {
    let threads = request.threads.unwrap_or_else(physical_cores);
    let dev = Box::new(Host::new(isa(request.isa)?, threads));
    let options = EngineOptions { kv: request.kv.into(), ..EngineOptions::default() };
    let dry = DryRun::new(ActDtype::I8);
    Ok(Chosen { kind: DeviceKind::Cpu, dev, dry, options, free: host_free() })
}

fn card(
    request: &LoadRequest,
    sources: &Sources,
    lanes: Option<usize>,
    if_it_fits: Option<&Fits<'_>>,
) -> anyhow::Result<Chosen> {
    let mut dev = Cuda::open(&request.cuda)?;
    let card = *dev.card();
    let kv = request.kv.into();
    let options = EngineOptions { chunk: 2048, ahead: true, kv, ..EngineOptions::default() };
    let free = dev.free_memory();
    if let Some(fits) = if_it_fits {
        tried(&card)?;
        let act = dev.info().act;
        fits(options, free, &|| DryRun::new(act))?;
    }
    let mut dry = DryRun::on_card(card);
    let rehearsed = EngineOptions { slots: lanes.unwrap_or(1), ..options };
    build(DryRun::on_card(card), rehearsed, sources, request, &mut |_| ())?.rehearse(&mut dry);
    if let Some(first) = dry.unsupported.first() {
        let more = match dry.unsupported.len() - 1 {
            0 => String::new(),
            n => format!(" (and {n} more)"),
        };
        anyhow::bail!("this model needs {first}{more}");
    }
    if lanes.is_some() {
        dev.prepare(&dry.launches)?;
    }
    let dry = DryRun::on_card(card);
    Ok(Chosen { kind: DeviceKind::Cuda, dev: Box::new(dev), dry, options, free })
}

fn isa(isa: Isa) -> anyhow::Result<ops::simd::Isa> {
    let available = ops::simd::Isa::available();
    let name = match isa {
        Isa::Auto => return Ok(available[0]),
        Isa::Avx512 => "avx512",
        Isa::Avx2 => "avx2",
        Isa::Portable => "portable",
    };
    let names: Vec<&str> = available.iter().map(|isa| isa.name()).collect();
    available
        .into_iter()
        .find(|isa| isa.name() == name)
        .with_context(|| format!("this machine has no {name}; it has {}", names.join(", ")))
}

/// Cores that don't share their arithmetic with another hardware thread; all logical ones where the
/// system doesn't say.
fn physical_cores() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, usize::from);
    let siblings = (0..logical).filter_map(|cpu| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        std::fs::read_to_string(path).ok()
    });
    let mut cores: Vec<String> = siblings.collect();
    cores.sort();
    cores.dedup();
    if cores.is_empty() { logical } else { cores.len().min(logical) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_card_that_is_there_is_spoken_of() {
        let why = |e: OpenError| anyhow::Error::from(e).context("can't use CUDA");
        assert!(!is_there(&why(OpenError::NoDriver)));
        assert!(!is_there(&why(OpenError::NoDevice { ordinal: 0, count: 0 })));
        assert!(is_there(&why(OpenError::NoDevice { ordinal: 3, count: 1 })));
        assert!(is_there(&why(OpenError::NoCompiler("no libnvrtc".to_owned()))));
        assert!(is_there(&anyhow::anyhow!("this model needs more")));
    }

    #[test]
    fn kinds_that_were_not_tried_are_left_alone() {
        let of = |arch| Card { arch, sms: 100, shared: 100 << 10 };
        assert!(tried(&of(90)).is_ok());
        for arch in [75, 80, 89, 100, 120] {
            let why = tried(&of(arch)).expect_err("nothing was tried there").to_string();
            assert!(why.contains(&format!("sm_{arch}")), "{why}");
        }
    }
}
