//! [`Spec`] from GGUF metadata. The kind of each layer is read off its tensors, because files differ
//! in how, and whether, they say it; what they do say must agree.

use ops::{GdnGeometry, HeadMap, RopePairing};

use super::{Arch, AttentionSpec, CONV_KERNEL, LayerKind, RopeSpec, Spec, check_table};
use crate::LoadError;
use crate::fields::{MAX_LAYERS, MAX_ROWS, MAX_SIZE};
use crate::files::Checkpoint;
use crate::keys::Keys;
use crate::names::{Logical, Names};

pub(super) fn read(checkpoint: &Checkpoint) -> Result<Spec, LoadError> {
    let keys = Keys::of(checkpoint)?;
    let (arch, tiled) = match keys.arch {
        "qwen35" => (Arch::Qwen35, true),
        "llama" => (Arch::Llama, false),
        "qwen35moe" | "qwen3next" => {
            let expected = "a dense model (mixtures of experts: not yet)";
            return keys.error("general.architecture", expected, keys.arch);
        }
        draft if draft.contains("dflash") => {
            let expected = "a target model; a draft goes with --draft";
            return keys.error("general.architecture", expected, draft);
        }
        other => return keys.error("general.architecture", "qwen35 or llama", other),
    };
    if keys.optional("expert_count", MAX_SIZE)?.is_some_and(|n| n > 0) {
        return keys.error(
            "expert_count",
            "a dense model (mixtures of experts: not yet)",
            "experts",
        );
    }

    let layer_types = layer_types(checkpoint, &keys, arch)?;
    let hidden_size = keys.size("embedding_length")?;
    let num_heads = keys.size("attention.head_count")?;
    let head_dim = head_dim(&keys, arch, hidden_size, num_heads)?;
    let gdn = match layer_types.contains(&LayerKind::GatedDelta) {
        true => Some(gdn_geometry(&keys, tiled)?),
        false => None,
    };
    let names = Names::of_target(checkpoint);
    let vocab = keys.optional("vocab_size", MAX_ROWS)?.map(|n| n as usize);
    let vocab_size = check_table(checkpoint, &names, hidden_size, vocab)?;
    Ok(Spec {
        arch,
        hidden_size,
        vocab_size,
        real_vocab: None,
        intermediate_size: keys.size("feed_forward_length")?,
        rms_norm_eps: keys.positive("attention.layer_norm_rms_epsilon")? as f32,
        attention: AttentionSpec {
            num_heads,
            num_kv_heads: kv_heads(&keys, &layer_types, num_heads)?,
            head_dim,
            rope: rope(checkpoint, &keys, arch, head_dim)?,
            gated: arch == Arch::Qwen35,
            qk_norm: arch == Arch::Qwen35,
        },
        layer_types,
        gdn,
        tie_word_embeddings: names.find(checkpoint, Logical::LmHead).is_none(),
        max_position_embeddings: keys.rows("context_length")?,
        norm_plus_one: false,
    })
}

fn layer_types(
    checkpoint: &Checkpoint,
    keys: &Keys,
    arch: Arch,
) -> Result<Vec<LayerKind>, LoadError> {
    let blocks = keys.integer("block_count", 1, MAX_LAYERS)?;
    // Files with a multi-token-prediction head count it as a block.
    let extra = keys.optional("nextn_predict_layers", MAX_LAYERS)?.unwrap_or(0);
    if extra >= blocks {
        return keys.error("nextn_predict_layers", format!("less than {blocks} blocks"), extra);
    }
    let count = (blocks - extra) as usize;
    if arch == Arch::Llama {
        return Ok(vec![LayerKind::Attention; count]);
    }
    let interval = keys.optional("full_attention_interval", MAX_LAYERS)?.filter(|&n| n > 0);
    let recurrent = keys.list("attention.recurrent_layers")?;
    let mut kinds = Vec::with_capacity(count);
    for i in 0..count {
        let delta = checkpoint.contains(&format!("blk.{i}.ssm_a"));
        let attention = checkpoint.contains(&format!("blk.{i}.attn_q.weight"));
        let field = format!("blk.{i}");
        if delta == attention {
            let found = if delta { "both" } else { "neither" };
            return keys.error(&field, "one of the tensors ssm_a and attn_q.weight", found);
        }
        let says = |attention_said: bool, key: &str| match attention_said == attention {
            true => Ok(()),
            false => keys.error(&field, format!("the kind of layer that {key} says"), "the other"),
        };
        if let Some(n) = interval {
            says((i as u64 + 1).is_multiple_of(n), "full_attention_interval")?;
        }
        if let Some(flag) = recurrent.as_ref().and_then(|r| r.get(i)) {
            says(*flag == 0, "attention.recurrent_layers")?;
        }
        kinds.push(if delta { LayerKind::GatedDelta } else { LayerKind::Attention });
    }
    Ok(kinds)
}

fn head_dim(
    keys: &Keys,
    arch: Arch,
    hidden_size: usize,
    num_heads: usize,
) -> Result<usize, LoadError> {
    let key = keys.optional("attention.key_length", MAX_SIZE)?.map(|n| n as usize);
    let dim = match key {
        Some(dim) => dim,
        None if arch == Arch::Llama && hidden_size.is_multiple_of(num_heads) => {
            hidden_size / num_heads
        }
        None => keys.size("attention.key_length")?,
    };
    match keys.optional("attention.value_length", MAX_SIZE)? {
        Some(n) if n != dim as u64 => {
            keys.error("attention.value_length", format!("{dim}, the length of a key"), n)
        }
        _ => Ok(dim),
    }
}

/// One number for all layers, or one for each, where the layers without attention have 0.
fn kv_heads(keys: &Keys, layers: &[LayerKind], num_heads: usize) -> Result<usize, LoadError> {
    let name = "attention.head_count_kv";
    let list = match keys.list(name)? {
        Some(list) => list,
        // llama.cpp's rule for models without grouped queries.
        None if layers.iter().all(|&k| k == LayerKind::Attention) => vec![num_heads as u64],
        None => return keys.error(name, "this key", "none"),
    };
    let attention = |&(i, _): &(usize, &LayerKind)| layers[i] == LayerKind::Attention;
    let mut heads = match list.as_slice() {
        [one] => vec![*one],
        per_layer if per_layer.len() >= layers.len() => {
            layers.iter().enumerate().filter(attention).map(|(i, _)| per_layer[i]).collect()
        }
        short => {
            let expected = format!("one number, or one for each of {} layers", layers.len());
            return keys.error(name, expected, format!("{} numbers", short.len()));
        }
    };
    heads.dedup();
    match heads.as_slice() {
        [n] if (1..=MAX_SIZE).contains(n) => Ok(*n as usize),
        other => keys.error(name, "the same number in all attention layers", format!("{other:?}")),
    }
}

fn gdn_geometry(keys: &Keys, tiled: bool) -> Result<GdnGeometry, LoadError> {
    let taps = keys.size("ssm.conv_kernel")?;
    if taps != CONV_KERNEL {
        return keys.error("ssm.conv_kernel", CONV_KERNEL, taps);
    }
    let value_heads = keys.size("ssm.time_step_rank")?;
    let inner = keys.size("ssm.inner_size")?;
    if !inner.is_multiple_of(value_heads) {
        return keys.error("ssm.inner_size", format!("a multiple of {value_heads} heads"), inner);
    }
    Ok(GdnGeometry {
        key_heads: keys.size("ssm.group_count")?,
        value_heads,
        key_dim: keys.size("ssm.state_size")?,
        value_dim: inner / value_heads,
        head_map: if tiled { HeadMap::Tiled } else { HeadMap::Grouped },
    })
}

fn rope(
    checkpoint: &Checkpoint,
    keys: &Keys,
    arch: Arch,
    head_dim: usize,
) -> Result<RopeSpec, LoadError> {
    if checkpoint.contains("rope_freqs.weight") {
        let expected = "plain frequencies (those of Llama 3.1 and later: not yet)";
        return keys.error("rope_freqs.weight", expected, "frequency factors");
    }
    let scaling = match keys.text("rope.scaling.type")? {
        None | Some("none") => 1.0,
        Some("linear") => keys.positive("rope.scaling.factor")?,
        Some(other) => return keys.error("rope.scaling.type", "none or linear", other),
    };
    let dims = match keys.optional("rope.dimension_count", MAX_SIZE)? {
        Some(n) => n as usize,
        // llama.cpp's rule: the whole head.
        None if arch == Arch::Llama => head_dim,
        None => keys.size("rope.dimension_count")?,
    };
    let pairing = match arch {
        Arch::Qwen35 => RopePairing::Halves,
        Arch::Llama => RopePairing::Adjacent,
    };
    Ok(RopeSpec { theta: keys.positive("rope.freq_base")?, dims, scaling, pairing })
}
