//! [`Spec`] from config.json.

use std::path::Path;

use ops::{GdnGeometry, HeadMap, RopePairing};
use serde_json::Value;

use super::{Arch, AttentionSpec, CONV_KERNEL, LayerKind, RopeSpec, Spec, check_table};
use crate::LoadError;
use crate::fields::{Fields, MAX_LAYERS};
use crate::files::Checkpoint;
use crate::names::{Logical, Names};

pub(super) fn read(checkpoint: &Checkpoint) -> Result<Spec, LoadError> {
    let file = checkpoint.config_file();
    let mut spec = parse(&file, checkpoint.config())?;
    let names = Names::of_target(checkpoint);
    check_table(checkpoint, &names, spec.hidden_size, Some(spec.vocab_size))?;
    let tied = tie_flag(&file, checkpoint.config())?;
    spec.tie_word_embeddings = tied.unwrap_or(names.find(checkpoint, Logical::LmHead).is_none());
    spec.norm_plus_one = norm_plus_one(checkpoint, &names, &spec)?;
    Ok(spec)
}

/// The part of a [`Spec`] that config.json alone settles: not whether the table is tied when the
/// file doesn't say, nor how norms are stored.
pub(crate) fn parse(file: &Path, config: &Value) -> Result<Spec, LoadError> {
    let root = Fields::root(file, config)?;
    let text = root.object("text_config", "text_config.")?.unwrap_or(root);
    let arch = architecture(&root, &text)?;
    refuse_unsupported(&root, &text)?;

    let hidden_size = text.size("hidden_size")?;
    let num_heads = text.size("num_attention_heads")?;
    let num_kv_heads = text.size("num_key_value_heads")?;
    let (head_dim, layer_types, gdn) = match arch {
        Arch::Qwen35 => {
            let layers = layer_types(&text)?;
            let gdn = match layers.contains(&LayerKind::GatedDelta) {
                true => Some(gdn_geometry(&text)?),
                false => None,
            };
            (text.size("head_dim")?, layers, gdn)
        }
        Arch::Llama => {
            let head_dim = match text.get("head_dim") {
                Some(_) => text.size("head_dim")?,
                None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
                None => {
                    return text.error(
                        "num_attention_heads",
                        "a divisor of hidden_size",
                        num_heads,
                    );
                }
            };
            (head_dim, vec![LayerKind::Attention; num_layers(&text)?], None)
        }
    };
    let gated = arch == Arch::Qwen35 && text.bool("attn_output_gate")?.unwrap_or(true);
    let eps = text.positive("rms_norm_eps")?;
    Ok(Spec {
        arch,
        hidden_size,
        vocab_size: text.rows("vocab_size")?,
        real_vocab: None,
        intermediate_size: text.size("intermediate_size")?,
        rms_norm_eps: text.require("rms_norm_eps", eps)? as f32,
        layer_types,
        attention: AttentionSpec {
            num_heads,
            num_kv_heads,
            head_dim,
            rope: rope(&text, arch, head_dim)?,
            gated,
            qk_norm: arch == Arch::Qwen35,
        },
        gdn,
        tie_word_embeddings: tie_flag(file, config)?.unwrap_or(false),
        max_position_embeddings: text.rows("max_position_embeddings")?,
        norm_plus_one: false,
    })
}

fn architecture(root: &Fields, text: &Fields) -> Result<Arch, LoadError> {
    let architectures = root.strs("architectures")?.unwrap_or_default();
    if architectures.iter().any(|a| a.contains("DFlash")) {
        let expected = "a target model; a draft goes with --draft";
        return root.error("architectures", expected, architectures.join(", "));
    }
    let name = match text.str("model_type")? {
        Some(name) => name,
        None => text.require("model_type", root.str("model_type")?)?,
    };
    match name {
        "qwen3_5" | "qwen3_5_text" => Ok(Arch::Qwen35),
        "llama" => Ok(Arch::Llama),
        "qwen3_5_moe" | "qwen3_5_moe_text" | "qwen3_next" => {
            text.error("model_type", "a dense model (mixtures of experts: not yet)", name)
        }
        "qwen4_exp" => {
            text.error("model_type", "qwen3_5 (Qwen3.8-Flash-Next is another architecture)", name)
        }
        other => text.error("model_type", "qwen3_5, qwen3_5_text or llama", other),
    }
}

/// Options that would change the maths.
pub(crate) fn refuse_unsupported(root: &Fields, text: &Fields) -> Result<(), LoadError> {
    for name in ["num_experts", "num_local_experts", "n_routed_experts"] {
        if text.integer(name, 0, u64::MAX)?.is_some_and(|n| n > 0) {
            let found = text.get(name).map(Value::to_string).unwrap_or_default();
            return text.error(name, "a dense model (mixtures of experts: not yet)", found);
        }
    }
    let choice = |name: &str, allowed: &[&str]| match text.str(name)? {
        Some(found) if !allowed.contains(&found) => text.error(name, allowed.join(" or "), found),
        _ => Ok(()),
    };
    choice("hidden_act", &["silu", "swish"])?;
    choice("output_gate_type", &["swish", "silu"])?;
    for name in ["attention_bias", "mlp_bias"] {
        if text.bool(name)? == Some(true) {
            return text.error(name, "false; biases aren't supported", true);
        }
    }
    // `quantization` is MLX's, and repeated there as `quantization_config` without a method.
    let quantised = root.object("quantization_config", "quantization_config.")?;
    if let Some(method) = quantised.map(|q| q.str("quant_method")).transpose()?.flatten()
        && root.get("quantization").is_none()
    {
        let expected = "unquantised weights, MLX affine quantisation, or a GGUF file instead";
        return root.error("quantization_config.quant_method", expected, method);
    }
    Ok(())
}

fn num_layers(text: &Fields) -> Result<usize, LoadError> {
    let name = "num_hidden_layers";
    let count = text.integer(name, 1, MAX_LAYERS)?;
    Ok(text.require(name, count)? as usize)
}

fn layer_types(text: &Fields) -> Result<Vec<LayerKind>, LoadError> {
    let count = num_layers(text)?;
    let Some(names) = text.strs("layer_types")? else {
        let name = "full_attention_interval";
        let interval = text.integer(name, 1, MAX_LAYERS)?;
        let interval = text.require(name, interval)? as usize;
        let attention = |i: usize| (i + 1).is_multiple_of(interval);
        let kind = |i| if attention(i) { LayerKind::Attention } else { LayerKind::GatedDelta };
        return Ok((0..count).map(kind).collect());
    };
    if names.len() != count {
        return text.error("layer_types", format!("{count} entries"), names.len());
    }
    let kind = |name: &&str| match *name {
        "full_attention" => Ok(LayerKind::Attention),
        "linear_attention" => Ok(LayerKind::GatedDelta),
        other => text.error("layer_types", "full_attention or linear_attention", other),
    };
    names.iter().map(kind).collect()
}

fn gdn_geometry(text: &Fields) -> Result<GdnGeometry, LoadError> {
    let taps = text.size("linear_conv_kernel_dim")?;
    if taps != CONV_KERNEL {
        return text.error("linear_conv_kernel_dim", CONV_KERNEL, taps);
    }
    Ok(GdnGeometry {
        key_heads: text.size("linear_num_key_heads")?,
        value_heads: text.size("linear_num_value_heads")?,
        key_dim: text.size("linear_key_head_dim")?,
        value_dim: text.size("linear_value_head_dim")?,
        head_map: HeadMap::Grouped,
    })
}

/// Rotary fields: nested in `rope_parameters`, or flat.
fn rope(text: &Fields, arch: Arch, head_dim: usize) -> Result<RopeSpec, LoadError> {
    let (theta, scaling) = rope_base(text)?;
    let partial = match rope_number(text, "partial_rotary_factor")? {
        Some(partial) => partial,
        // Llama has no such field unless it is partial; for Qwen3.5 it is a size.
        None if arch == Arch::Llama => 1.0,
        None => text.require("partial_rotary_factor", None)?,
    };
    let dims = head_dim as f64 * partial;
    if dims > head_dim as f64 || dims.fract() != 0.0 {
        let expected = format!("a fraction that leaves whole dims of {head_dim}");
        return text.error("partial_rotary_factor", expected, partial);
    }
    Ok(RopeSpec { theta, dims: dims as usize, scaling, pairing: RopePairing::Halves })
}

/// Base of the frequencies, and the factor of linear scaling (1 without).
pub(crate) fn rope_base(text: &Fields) -> Result<(f64, f64), LoadError> {
    let nested = text.object("rope_parameters", "rope_parameters.")?;
    let flat = text.object("rope_scaling", "rope_scaling.")?;
    let mut factor = 1.0;
    for fields in [nested, flat].into_iter().flatten() {
        let kind = match fields.str("rope_type")? {
            Some(kind) => Some(kind),
            None => fields.str("type")?,
        };
        match kind {
            // With text only, the three streams of mrope are equal: plain rope.
            None | Some("default" | "mrope") => {}
            Some("linear") => {
                let found = fields.positive("factor")?;
                factor = fields.require("factor", found)?;
            }
            Some(other) => {
                let expected = "default or linear; take the field out to use the native context";
                return fields.error("rope_type", expected, other);
            }
        }
    }
    let theta = rope_number(text, "rope_theta")?;
    Ok((text.require("rope_theta", theta)?, factor))
}

/// A number of `rope_parameters`, or of the object around it.
fn rope_number(text: &Fields, name: &str) -> Result<Option<f64>, LoadError> {
    let nested = text.object("rope_parameters", "rope_parameters.")?;
    match nested.map(|f| f.positive(name)).transpose()?.flatten() {
        Some(value) => Ok(Some(value)),
        None => text.positive(name),
    }
}

/// `tie_word_embeddings`: of the text config first, then of the root.
fn tie_flag(file: &Path, config: &Value) -> Result<Option<bool>, LoadError> {
    let root = Fields::root(file, config)?;
    let name = "tie_word_embeddings";
    let text = root.object("text_config", "text_config.")?;
    match text.map(|t| t.bool(name)).transpose()?.flatten() {
        Some(tied) => Ok(Some(tied)),
        None => root.bool(name),
    }
}

/// Raw HF files keep `conv1d.weight` as `[channels, 1, 4]` and norm weights without their 1;
/// converters to MLX turn the first into `[channels, 4, 1]` and add the 1 in the same step.
fn norm_plus_one(checkpoint: &Checkpoint, names: &Names, spec: &Spec) -> Result<bool, LoadError> {
    if spec.arch == Arch::Llama {
        return Ok(false);
    }
    let Some(layer) = spec.layer_types.iter().position(|&k| k == LayerKind::GatedDelta) else {
        let file = checkpoint.config_file();
        let expected =
            "at least one linear_attention layer, whose tensors tell how norms are stored";
        return Err(LoadError::new(&file, "layer_types", expected, "none"));
    };
    let conv = names.require(checkpoint, Logical::GdnConv(layer))?;
    match conv.shape.as_slice() {
        [_, 1, CONV_KERNEL] => Ok(true),
        [_, CONV_KERNEL, 1] => Ok(false),
        other => {
            let expected = "[channels, 1, 4] or [channels, 4, 1]";
            let field = format!("tensor {}", conv.name);
            Err(LoadError::new(conv.file, field, expected, format!("{other:?}")))
        }
    }
}
