//! Which device a model gets.

use anyhow::Context;
use cuda::Cuda;
use engine::EngineOptions;
use ops::{ActDtype, Device, DryRun, Host};

use crate::generate::{DeviceKind, Isa, LoadRequest};
use crate::local::{Sources, build};
use crate::memory::host_free;

/// A device, and what suits it.
pub struct Chosen {
    /// The device.
    pub dev: Box<dyn Device>,
    /// A dry run with the same plans.
    pub dry: DryRun,
    /// Rows of a prefill pass, and whether rounds are submitted ahead.
    pub options: EngineOptions,
    /// Bytes that are free where the model is to lie, if that is known.
    pub free: Option<u64>,
}

/// The device that a request asks for; ready to run its model if `lanes` says for how many lanes.
pub fn choose(
    request: &LoadRequest,
    sources: &Sources,
    lanes: Option<usize>,
) -> anyhow::Result<Chosen> {
    match request.device {
        // A card is taken only when asked for, until it is settled what else happens where a card is there
        // but can't be used.
        DeviceKind::Auto | DeviceKind::Cpu => cpu(request),
        DeviceKind::Cuda => card(request, sources, lanes).context("can't use CUDA"),
    }
}

fn cpu(request: &LoadRequest) -> anyhow::Result<Chosen> {
    let threads = request.threads.unwrap_or_else(physical_cores);
    let dev = Box::new(Host::new(isa(request.isa)?, threads));
    let options = EngineOptions { kv: request.kv.into(), ..EngineOptions::default() };
    let dry = DryRun::new(ActDtype::I8);
    Ok(Chosen { dev, dry, options, free: host_free() })
}

fn card(request: &LoadRequest, sources: &Sources, lanes: Option<usize>) -> anyhow::Result<Chosen> {
    let mut dev = Cuda::open(&request.cuda)?;
    let kv = request.kv.into();
    let options = EngineOptions { chunk: 2048, ahead: true, kv, ..EngineOptions::default() };
    let mut dry = DryRun::on_card(*dev.card());
    let rehearsed = EngineOptions { slots: lanes.unwrap_or(1), ..options };
    build(DryRun::on_card(*dev.card()), rehearsed, sources, request, &mut |_| ())?
        .rehearse(&mut dry);
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
    let dry = DryRun::on_card(*dev.card());
    let free = dev.free_memory();
    Ok(Chosen { dev: Box::new(dev), dry, options, free })
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
