//! What a model is, needs and may give, before any weight is loaded: `inspect`'s sections.

use engine::{Drafter, Engine};
use model::spec::LayerKind;
use model::{DraftSource, TargetSource};
use ops::{Device, DryRun};

use crate::generate::Section;

/// Bytes of the buffer that stands for the weights when bandwidth is measured without them.
const PROBE_BYTES: usize = 1 << 30;

/// Bytes per second that this machine reads from a fresh buffer, 0 where there is no memory for it.
pub fn bandwidth(mut dev: Box<dyn Device>) -> f64 {
    let Ok(buf) = dev.alloc(PROBE_BYTES, "bandwidth probe") else { return 0.0 };
    // Untouched pages would all be one zero page: write them first.
    dev.upload(buf, 1 << 20, &|_, _, piece| piece.fill(1));
    dev.read_bandwidth(&[buf])
}

/// Geometry, draft, memory plan and routes.
pub fn sections(
    target: &TargetSource,
    draft: Option<&DraftSource>,
    engine: &Engine<DryRun>,
) -> Vec<Section> {
    let mut all = vec![geometry(target)];
    all.extend(draft.map(draft_section));
    all.push(memory(engine));
    all.push(routes(engine));
    all
}

fn section(title: &str, facts: Vec<(&str, String)>) -> Section {
    let facts = facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Section { title: title.to_owned(), facts }
}

fn geometry(source: &TargetSource) -> Section {
    let (spec, a) = (source.spec(), &source.spec().attention);
    let layers = format!(
        "{} ({} attention, {} GatedDeltaNet)",
        spec.num_hidden_layers(),
        spec.layers_of(LayerKind::Attention),
        spec.layers_of(LayerKind::GatedDelta)
    );
    let gated = if a.gated { ", gated" } else { "" };
    let mut facts = vec![
        ("path", source.path().display().to_string()),
        ("architecture", spec.arch.name().to_owned()),
        ("layers", layers),
        ("hidden size", spec.hidden_size.to_string()),
        ("MLP size", spec.intermediate_size.to_string()),
        ("vocabulary", spec.vocab_size.to_string()),
        (
            "attention heads",
            format!(
                "{} of {}, {} for keys and values{gated}",
                a.num_heads, a.head_dim, a.num_kv_heads
            ),
        ),
    ];
    if let Some(g) = &spec.gdn {
        let (nk, dk, nv, dv) = (g.key_heads, g.key_dim, g.value_heads, g.value_dim);
        facts.push((
            "GatedDeltaNet heads",
            format!("{nk} of {dk} for keys, {nv} of {dv} for values"),
        ));
    }
    facts.push(("tied head", if spec.tie_word_embeddings { "yes" } else { "no" }.to_owned()));
    facts.push(("longest context", format!("{} tokens", spec.max_position_embeddings)));
    section("Model", facts)
}

fn draft_section(source: &DraftSource) -> Section {
    let spec = source.spec();
    let taps: Vec<String> = spec.target_layer_ids.iter().map(usize::to_string).collect();
    let version = if spec.dflash2.is_some() { "DFlash 2" } else { "DFlash" };
    section(
        "Draft",
        vec![
            ("path", source.path().display().to_string()),
            ("kind", version.to_owned()),
            (
                "block",
                format!(
                    "{} rows: the anchor and {} proposals",
                    spec.block_size,
                    spec.block_size - 1
                ),
            ),
            ("layers", spec.num_hidden_layers().to_string()),
            ("taps after layers", taps.join(", ")),
        ],
    )
}

fn memory(engine: &Engine<DryRun>) -> Section {
    let (memory, total) = (engine.memory(), engine.dev.bytes() as u64);
    let mut facts = vec![("weights", megabytes(memory.weights))];
    if memory.draft > 0 {
        facts.push(("draft", megabytes(memory.draft)));
    }
    facts.extend([
        ("keys and values", format!("{} for {} tokens", megabytes(memory.kv), engine.context())),
        ("recurrent state", megabytes(memory.state)),
        ("working buffers", megabytes(total.saturating_sub(memory.total()))),
        ("in all", megabytes(total)),
    ]);
    section("Memory", facts)
}

fn routes(engine: &Engine<DryRun>) -> Section {
    let facts = engine.round_ops().into_iter().map(|(name, op)| {
        let bytes = op.cost.weight_bytes + op.cost.other_bytes;
        (
            name.to_owned(),
            format!(
                "{:>4} runs  {:>10}  {:>8.1} MFLOP",
                op.runs,
                megabytes(bytes),
                op.cost.flops as f64 / 1e6
            ),
        )
    });
    let refused = engine.dev.unsupported.iter().map(|why| ("refused".to_owned(), why.to_string()));
    Section { title: "One round, by op".to_owned(), facts: facts.chain(refused).collect() }
}

/// The floor and what it allows.
pub fn speed(engine: &Engine<DryRun>, device: &str, bandwidth: f64) -> Section {
    let bytes = engine.round_bytes(0);
    let floor_s = bytes.total() as f64 / bandwidth.max(1.0);
    let rows = engine.block();
    let forecast = match engine.drafter() {
        Drafter::None => format!("at most {:.0} tokens/s", 1.0 / floor_s),
        _ => format!(
            "at most {:.0} tokens/s at 1 token a round, {:.0} at {rows}",
            1.0 / floor_s,
            rows as f64 / floor_s
        ),
    };
    section(
        "Speed",
        vec![
            ("device", device.to_owned()),
            ("read bandwidth", format!("{:.1} GB/s, measured now", bandwidth / 1e9)),
            (
                "bytes of a round",
                format!("{} (weights {})", megabytes(bytes.total()), megabytes(bytes.weights)),
            ),
            ("floor", format!("{:.2} ms a round", 1e3 * floor_s)),
            ("forecast", forecast),
        ],
    )
}

fn megabytes(bytes: u64) -> String {
    if bytes >= 1_000_000_000 {
        format!("{:.2} GB", bytes as f64 / 1e9)
    } else {
        format!("{:.1} MB", bytes as f64 / 1e6)
    }
}
