//! Published geometries.

use ops::{GdnGeometry, HeadMap, RopePairing};

use crate::draft_spec::{Dflash2, DraftLayer, DraftSpec};
use crate::spec::{Arch, AttentionSpec, LayerKind, RopeSpec, Spec};

/// The names that [`target`] and [`draft`] know.
pub const NAMES: &[&str] =
    &["qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.8-27b", "tiny", "tiny-dflash2"];

/// What differs between the sizes of the family.
struct Size {
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    value_heads: usize,
    tied: bool,
}

/// The target of this name.
pub fn target(name: &str) -> Option<Spec> {
    let size = |hidden, intermediate, layers, heads, kv_heads, value_heads, tied| Size {
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads,
        value_heads,
        tied,
    };
    Some(match name {
        "qwen3.5-0.8b" => qwen35(&size(1024, 3584, 24, 8, 2, 16, true)),
        "qwen3.5-4b" => qwen35(&size(2560, 9216, 32, 16, 4, 32, true)),
        "qwen3.5-9b" => qwen35(&size(4096, 12288, 32, 16, 4, 32, false)),
        "qwen3.8-27b" => qwen35(&size(5120, 17408, 64, 24, 4, 48, false)),
        "tiny" | "tiny-dflash2" => tiny(),
        _ => return None,
    })
}

/// The draft for the target of this name: DFlash 2 for `qwen3.8-27b` and `tiny-dflash2`.
pub fn draft(name: &str) -> Option<DraftSpec> {
    let target = target(name)?;
    let full = |count| vec![DraftLayer { window: None, causal: false }; count];
    let sliding = |window, count, causal| vec![DraftLayer { window: Some(window), causal }; count];
    let attention = |num_heads, num_kv_heads, head_dim| AttentionSpec {
        num_heads,
        num_kv_heads,
        head_dim,
        rope: RopeSpec {
            theta: target.attention.rope.theta,
            dims: head_dim,
            scaling: 1.0,
            pairing: RopePairing::Halves,
        },
        gated: false,
        qk_norm: true,
    };
    let with = |layers, taps: &[usize], mask_token_id, block_size, attention, dflash2| DraftSpec {
        hidden_size: target.hidden_size,
        intermediate_size: target.intermediate_size,
        rms_norm_eps: target.rms_norm_eps,
        attention,
        layers,
        target_layer_ids: taps.to_vec(),
        ids_uncertain: false,
        mask_token_id,
        block_size,
        num_target_layers: Some(target.num_hidden_layers()),
        vocab_size: Some(target.vocab_size),
        dflash2,
    };
    // Five sliding layers and a full one, which are causal and bidirectional by default.
    let mixed = [sliding(4096, 5, true), full(1)].concat();
    let eight_taps = [1, 5, 9, 13, 17, 21, 25, 29];
    let two = |conv_group_size, selector_rank| {
        Some(Dflash2 { conv_kernel_size: 2, conv_group_size, selector_rank, selector_top_k: 16 })
    };
    Some(match name {
        "qwen3.5-0.8b" => {
            with(full(5), &[3, 7, 11, 15, 19], 248_077, 16, attention(16, 4, 128), None)
        }
        "qwen3.5-4b" | "qwen3.5-9b" => {
            with(mixed, &eight_taps, 248_077, 16, attention(32, 8, 128), None)
        }
        "qwen3.8-27b" => {
            let (layers, taps) = (sliding(2048, 5, false), [5, 19, 33, 47, 61]);
            with(layers, &taps, 248_070, 8, attention(32, 8, 128), two(16, 256))
        }
        "tiny" => with(full(2), &[1, 3, 5], 500, 8, attention(4, 2, 32), None),
        "tiny-dflash2" => {
            let layers = sliding(48, 2, false);
            with(layers, &[1, 3, 5], 500, 8, attention(4, 2, 32), two(16, 32))
        }
        _ => return None,
    })
}

fn qwen35(size: &Size) -> Spec {
    Spec {
        arch: Arch::Qwen35,
        hidden_size: size.hidden,
        vocab_size: 248_320,
        real_vocab: Some(248_077),
        intermediate_size: size.intermediate,
        rms_norm_eps: 1e-6,
        layer_types: every_fourth(size.layers),
        attention: AttentionSpec {
            num_heads: size.heads,
            num_kv_heads: size.kv_heads,
            head_dim: 256,
            rope: RopeSpec { theta: 1e7, dims: 64, scaling: 1.0, pairing: RopePairing::Halves },
            gated: true,
            qk_norm: true,
        },
        gdn: Some(GdnGeometry {
            key_heads: 16,
            value_heads: size.value_heads,
            key_dim: 128,
            value_dim: 128,
            head_map: HeadMap::Grouped,
        }),
        tie_word_embeddings: size.tied,
        max_position_embeddings: 262_144,
        norm_plus_one: false,
    }
}

/// Small enough for tests of whole models; no two widths are equal by accident where it matters.
fn tiny() -> Spec {
    Spec {
        arch: Arch::Qwen35,
        hidden_size: 128,
        vocab_size: 512,
        real_vocab: Some(500),
        intermediate_size: 320,
        rms_norm_eps: 1e-6,
        layer_types: every_fourth(8),
        attention: AttentionSpec {
            num_heads: 6,
            num_kv_heads: 2,
            head_dim: 32,
            rope: RopeSpec { theta: 1e4, dims: 16, scaling: 1.0, pairing: RopePairing::Halves },
            gated: true,
            qk_norm: true,
        },
        gdn: Some(GdnGeometry {
            key_heads: 2,
            value_heads: 6,
            key_dim: 32,
            value_dim: 32,
            head_map: HeadMap::Grouped,
        }),
        tie_word_embeddings: false,
        max_position_embeddings: 4096,
        norm_plus_one: false,
    }
}

fn every_fourth(layers: usize) -> Vec<LayerKind> {
    let attention = |i: usize| (i + 1).is_multiple_of(4);
    let kind = |i| if attention(i) { LayerKind::Attention } else { LayerKind::GatedDelta };
    (0..layers).map(kind).collect()
}
