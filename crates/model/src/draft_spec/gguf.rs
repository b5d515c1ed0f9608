//! [`DraftSpec`] from GGUF metadata of architecture `dflash`.

use ops::RopePairing;

use super::{Dflash2, DraftLayer, DraftSpec, Found, MAX_BLOCK, MAX_TAPS, MAX_TOP_K};
use crate::LoadError;
use crate::fields::{MAX_LAYERS, MAX_ROWS, MAX_SIZE};
use crate::files::Checkpoint;
use crate::keys::Keys;
use crate::spec::{AttentionSpec, RopeSpec};

pub(super) fn read(checkpoint: &Checkpoint, found: &Found) -> Result<DraftSpec, LoadError> {
    let keys = Keys::of(checkpoint)?;
    if keys.arch != "dflash" {
        return keys.error("general.architecture", "dflash, for a draft", keys.arch);
    }
    refuse_unsupported(&keys)?;
    let hidden_size = keys.size("embedding_length")?;
    if let Some(n) = keys.optional("target_hidden_size", MAX_SIZE)?
        && n != hidden_size as u64
    {
        return keys.error("target_hidden_size", format!("{hidden_size}, the draft's own"), n);
    }
    let head_dim = keys.size("attention.key_length")?;
    let ids = keys.list("target_layers")?;
    let ids = match ids {
        Some(ids) if (1..=MAX_TAPS as usize).contains(&ids.len()) => ids,
        Some(ids) => {
            return keys.error("target_layers", format!("1 to {MAX_TAPS} layers"), ids.len());
        }
        None => return keys.missing("target_layers"),
    };
    if let Some(id) = ids.iter().find(|&&id| id > MAX_LAYERS) {
        return keys.error("target_layers", format!("layers up to {MAX_LAYERS}"), id);
    }
    if let Some(n) = found.fc_inputs
        && n != ids.len() * hidden_size
    {
        let expected = format!("as many layers as fc has inputs for: {n} / {hidden_size}");
        return keys.error("target_layers", expected, ids.len());
    }
    Ok(DraftSpec {
        hidden_size,
        intermediate_size: keys.size("feed_forward_length")?,
        rms_norm_eps: keys.positive("attention.layer_norm_rms_epsilon")? as f32,
        attention: AttentionSpec {
            num_heads: keys.size("attention.head_count")?,
            num_kv_heads: keys.size("attention.head_count_kv")?,
            head_dim,
            rope: RopeSpec {
                theta: keys.positive("rope.freq_base")?,
                dims: head_dim,
                scaling: 1.0,
                pairing: RopePairing::Halves,
            },
            gated: false,
            qk_norm: true,
        },
        layers: layers(&keys)?,
        target_layer_ids: ids.into_iter().map(|id| id as usize).collect(),
        ids_uncertain: true,
        mask_token_id: mask_token_id(&keys)?,
        block_size: keys.integer("block_size", 2, MAX_BLOCK)? as usize,
        num_target_layers: None,
        vocab_size: found.vocab_size,
        dflash2: dflash2(&keys, found)?,
    })
}

/// Options that would change the maths.
fn refuse_unsupported(keys: &Keys) -> Result<(), LoadError> {
    match keys.text("rope.scaling.type")? {
        None | Some("none") => {}
        Some(other) => return keys.error("rope.scaling.type", "none", other),
    }
    for (name, neutral) in [("logit_scale", 1.0), ("final_logit_softcapping", 0.0)] {
        match keys.metadata.float(&keys.key(name))? {
            Some(f) if f != neutral && f != 0.0 => {
                return keys.error(name, "none (not yet)", f);
            }
            _ => {}
        }
    }
    Ok(())
}

fn layers(keys: &Keys) -> Result<Vec<DraftLayer>, LoadError> {
    let count = keys.integer("block_count", 1, MAX_LAYERS)? as usize;
    let window = keys.optional("attention.sliding_window", MAX_ROWS)?.filter(|&w| w > 0);
    let causal = keys.metadata.bool(&keys.key("attention.causal"))?;
    let full = DraftLayer { window: None, causal: causal.unwrap_or(false) };
    let Some(window) = window else { return Ok(vec![full; count]) };
    let sliding = DraftLayer { window: Some(window as usize), causal: causal.unwrap_or(true) };
    match keys.list("attention.sliding_window_pattern")? {
        Some(pattern) if pattern.len() == count => {
            Ok(pattern.iter().map(|&s| if s == 0 { full } else { sliding }).collect())
        }
        Some(pattern) => {
            let expected = format!("one entry for each of {count} layers");
            keys.error("attention.sliding_window_pattern", expected, pattern.len())
        }
        None => keys.missing("attention.sliding_window_pattern"),
    }
}

/// llama.cpp's converter keeps the mask with the tokenizer.
fn mask_token_id(keys: &Keys) -> Result<u32, LoadError> {
    let own = keys.optional("mask_token_id", MAX_ROWS)?;
    let id = match own {
        Some(id) => Some(id),
        None => keys.metadata.unsigned("tokenizer.ggml.mask_token_id")?,
    };
    match id {
        Some(id) if id <= MAX_ROWS => Ok(id as u32),
        Some(id) => keys.error("tokenizer.ggml.mask_token_id", "a token id", id),
        None => keys.missing("mask_token_id"),
    }
}

fn dflash2(keys: &Keys, found: &Found) -> Result<Option<Dflash2>, LoadError> {
    if !found.dflash2 {
        return Ok(None);
    }
    let two = Dflash2 {
        conv_kernel_size: keys.integer("conv_kernel_size", 1, MAX_TAPS)? as usize,
        conv_group_size: keys.size("conv_group_size")?,
        selector_rank: keys.size("selector_rank")?,
        selector_top_k: keys.integer("selector_top_k", 1, MAX_TOP_K)? as usize,
    };
    if let Some(rank) = found.selector_rank
        && rank != two.selector_rank
    {
        return keys.error(
            "selector_rank",
            format!("{rank}, as the tensors have"),
            two.selector_rank,
        );
    }
    Ok(Some(two))
}
