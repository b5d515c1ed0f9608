//! [`DraftSpec`] from config.json. DFlash's own fields stand at the top level or in
//! `dflash_config`, depending on who wrote the file.

use std::path::Path;

use ops::RopePairing;
use serde_json::Value;

use super::{Dflash2, DraftLayer, DraftSpec, Found, MAX_BLOCK, MAX_TAPS, MAX_TOP_K, default_taps};
use crate::LoadError;
use crate::fields::{Fields, MAX_LAYERS, MAX_ROWS, MAX_SIZE};
use crate::spec::{AttentionSpec, RopeSpec, refuse_unsupported, rope_base};

pub(crate) fn parse(file: &Path, config: &Value, found: &Found) -> Result<DraftSpec, LoadError> {
    let root = Fields::root(file, config)?;
    let own = root.object("dflash_config", "dflash_config.")?;
    let both = Both { root, own };
    let architectures = root.strs("architectures")?.unwrap_or_default();
    if own.is_none() && !architectures.iter().any(|a| a.contains("DFlash")) {
        let found = architectures.join(", ");
        return root.error("architectures", "DFlashDraftModel or DFlash2DraftModel", found);
    }
    if architectures.iter().any(|a| a.contains("DFlash2")) && !found.dflash2 {
        let expected = "DFlashDraftModel, for a file without DFlash 2's tensors";
        return root.error("architectures", expected, architectures.join(", "));
    }
    refuse_unsupported(&root, &root)?;
    refuse_logit_changes(&both)?;

    let hidden_size = root.size("hidden_size")?;
    let layers = layers(&both)?;
    let head_dim = root.size("head_dim")?;
    let (theta, scaling) = rope_base(&root)?;
    let eps = root.positive("rms_norm_eps")?;
    let num_target_layers = both.integer("num_target_layers", 1, MAX_LAYERS)?.map(|n| n as usize);
    let mask = both.integer("mask_token_id", 0, MAX_ROWS)?;
    let block = both.integer("block_size", 2, MAX_BLOCK)?;
    let vocab_size = root.integer("vocab_size", 1, MAX_ROWS)?.map(|n| n as usize);
    Ok(DraftSpec {
        hidden_size,
        intermediate_size: root.size("intermediate_size")?,
        rms_norm_eps: root.require("rms_norm_eps", eps)? as f32,
        attention: AttentionSpec {
            num_heads: root.size("num_attention_heads")?,
            num_kv_heads: root.size("num_key_value_heads")?,
            head_dim,
            // A partial factor in this file is a copy of the target's: drafts turn whole heads.
            rope: RopeSpec { theta, dims: head_dim, scaling, pairing: RopePairing::Halves },
            gated: false,
            qk_norm: true,
        },
        target_layer_ids: taps(&both, found, num_target_layers, hidden_size, layers.len())?,
        layers,
        ids_uncertain: false,
        mask_token_id: root.require("mask_token_id", mask)? as u32,
        block_size: root.require("block_size", block)? as usize,
        num_target_layers,
        vocab_size: vocab_size.or(found.vocab_size),
        dflash2: dflash2(&both, found)?,
    })
}

/// The two objects in which a field may stand.
struct Both<'a> {
    root: Fields<'a>,
    own: Option<Fields<'a>>,
}

impl<'a> Both<'a> {
    /// The object that has the field: `dflash_config` first.
    fn with(&self, name: &str) -> Fields<'a> {
        self.own.filter(|own| own.get(name).is_some()).unwrap_or(self.root)
    }

    fn integer(&self, name: &str, least: u64, most: u64) -> Result<Option<u64>, LoadError> {
        self.with(name).integer(name, least, most)
    }
}

/// Options that change the logits and thereby the proposals' distribution.
fn refuse_logit_changes(both: &Both) -> Result<(), LoadError> {
    let name = "output_multiplier";
    if let Some(f) = both.with(name).number(name)?
        && f != 1.0
    {
        return both.with(name).error(name, "1 (others: not yet)", f);
    }
    for name in ["final_logit_softcapping", "logit_softcap"] {
        if let Some(f) = both.with(name).number(name)?
            && f != 0.0
        {
            return both.with(name).error(name, "none (soft caps: not yet)", f);
        }
    }
    Ok(())
}

fn layers(both: &Both) -> Result<Vec<DraftLayer>, LoadError> {
    let root = &both.root;
    let count = root.integer("num_hidden_layers", 1, MAX_LAYERS)?;
    let count = root.require("num_hidden_layers", count)? as usize;
    let window = root.integer("sliding_window", 1, MAX_ROWS)?.map(|w| w as usize);
    let causal = both.with("is_causal").bool("is_causal")?;
    // Without the key, sliding layers are causal inside the block and full ones aren't.
    let full = DraftLayer { window: None, causal: causal.unwrap_or(false) };
    let Some(types) = root.strs("layer_types")? else {
        let sliding = root.bool("use_sliding_window")? == Some(true) && window.is_some();
        if sliding {
            let expected = "this list, because use_sliding_window is true";
            return root.error("layer_types", expected, "none");
        }
        return Ok(vec![full; count]);
    };
    if types.len() != count {
        return root.error("layer_types", format!("{count} entries"), types.len());
    }
    let layer = |name: &&str| match *name {
        "full_attention" => Ok(full),
        "sliding_attention" => {
            let window = Some(root.require("sliding_window", window)?);
            Ok(DraftLayer { window, causal: causal.unwrap_or(true) })
        }
        other => root.error("layer_types", "full_attention or sliding_attention", other),
    };
    types.iter().map(layer).collect()
}

fn taps(
    both: &Both,
    found: &Found,
    num_target_layers: Option<usize>,
    hidden_size: usize,
    layers: usize,
) -> Result<Vec<usize>, LoadError> {
    let name = "target_layer_ids";
    let fields = both.with(name);
    let taps = match fields.integers(name, MAX_LAYERS)? {
        Some(ids) => ids.into_iter().map(|id| id as usize).collect(),
        None => {
            // The reference takes as many taps as the draft has layers; `fc` knows better.
            let count = found.fc_inputs.map_or(layers, |inputs| inputs / hidden_size);
            if count as u64 > MAX_TAPS {
                return fields.error(name, format!("at most {MAX_TAPS} layers"), count);
            }
            let target = both.root.require("num_target_layers", num_target_layers)?;
            default_taps(fields.file, count, target)?
        }
    };
    if taps.is_empty() || taps.len() as u64 > MAX_TAPS {
        return fields.error(name, format!("1 to {MAX_TAPS} layers"), taps.len());
    }
    let inputs = taps.len() * hidden_size;
    match found.fc_inputs {
        Some(n) if n != inputs => {
            let expected = format!("as many layers as fc has inputs for: {n} / {hidden_size}");
            fields.error(name, expected, taps.len())
        }
        _ => Ok(taps),
    }
}

fn dflash2(both: &Both, found: &Found) -> Result<Option<Dflash2>, LoadError> {
    if !found.dflash2 {
        return Ok(None);
    }
    let need = |name: &str, most: u64| {
        let value = both.integer(name, 1, most)?;
        Ok::<_, LoadError>(both.root.require(name, value)? as usize)
    };
    let two = Dflash2 {
        conv_kernel_size: need("conv_kernel_size", MAX_TAPS)?,
        conv_group_size: need("conv_group_size", MAX_SIZE)?,
        selector_rank: need("selector_rank", MAX_SIZE)?,
        selector_top_k: need("selector_top_k", MAX_TOP_K)?,
    };
    let said = [
        ("conv_kernel_size", two.conv_kernel_size, found.conv_kernel_size),
        ("selector_rank", two.selector_rank, found.selector_rank),
    ];
    for (name, said, found) in said {
        if let Some(found) = found
            && said != found
        {
            return both.with(name).error(name, format!("{found}, as the tensors have"), said);
        }
    }
    Ok(Some(two))
}
