//! Whole small checkpoints in every format, made from a geometry.

use serde_json::{Value, json};

use crate::draft_spec::DraftSpec;
use crate::files::testing::{GgufWriter, safetensors};
use crate::names::{Logical, Names};
use crate::spec::{LayerKind, Spec};

/// A file format that a checkpoint may come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavour {
    /// Raw HF: bf16, conv `[C, 1, 4]`, norms without their 1, multimodal names.
    Hf,
    /// Converted to MLX: affine 4 bits, conv `[C, 4, 1]`.
    Mlx,
}

/// Name, dtype, shape and bytes of each tensor.
pub(crate) type Tensors = Vec<(String, &'static str, Vec<usize>, Vec<u8>)>;

/// bf16 numbers that depend on their place: 0.5 + i / 64, i from 0 to 15.
pub(crate) fn bf16(count: usize) -> Vec<u8> {
    let value = |i: usize| half::bf16::from_f32(0.5 + (i % 16) as f32 / 64.0);
    (0..count).flat_map(|i| value(i).to_le_bytes()).collect()
}

/// The same numbers in f32.
pub(crate) fn f32s(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| (0.5 + (i % 16) as f32 / 64.0).to_le_bytes()).collect()
}

fn push_matrix(out: &mut Tensors, name: String, [n, k]: [usize; 2], flavour: Flavour) {
    let module = name.strip_suffix(".weight").unwrap_or(&name).to_owned();
    if flavour == Flavour::Hf || name.ends_with("codebook") {
        out.push((name, "BF16", vec![n, k], bf16(n * k)));
        return;
    }
    out.push((name, "U32", vec![n, k / 8], vec![0x21; n * k / 2]));
    for part in ["scales", "biases"] {
        let groups = k / 64;
        out.push((format!("{module}.{part}"), "BF16", vec![n, groups], bf16(n * groups)));
    }
}

/// The tensors of a target as a safetensors file.
pub(crate) fn target_tensors(spec: &Spec, flavour: Flavour) -> Tensors {
    let prefix = match flavour {
        Flavour::Hf => "model.language_model.",
        Flavour::Mlx => "language_model.model.",
    };
    let names = Names::hf(prefix);
    let mut out = Vec::new();
    for weight in spec.weights() {
        let candidates = names.candidates(weight);
        let of_mlx = weight == Logical::LmHead && flavour == Flavour::Mlx;
        let name = candidates[usize::from(of_mlx)].clone();
        if let Some(shape) = spec.matrix_shape(weight) {
            push_matrix(&mut out, name, shape, flavour);
            continue;
        }
        let len = spec.vector_len(weight).unwrap();
        let shape = match (weight, flavour) {
            (Logical::GdnConv(_), Flavour::Hf) => vec![len / 4, 1, 4],
            (Logical::GdnConv(_), Flavour::Mlx) => vec![len / 4, 4, 1],
            _ => vec![len],
        };
        match weight {
            Logical::GdnDecay(_) => out.push((name, "F32", shape, f32s(len))),
            _ => out.push((name, "BF16", shape, bf16(len))),
        }
    }
    out
}

/// A target as a safetensors file.
pub(crate) fn target_file(spec: &Spec, flavour: Flavour) -> Vec<u8> {
    safetensors(&target_tensors(spec, flavour))
}

/// config.json of a target.
pub(crate) fn target_config(spec: &Spec, flavour: Flavour) -> Value {
    let (a, g) = (&spec.attention, spec.gdn.unwrap());
    let layer = |kind: &LayerKind| match kind {
        LayerKind::Attention => "full_attention",
        LayerKind::GatedDelta => "linear_attention",
    };
    let mut config = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": spec.tie_word_embeddings,
        "text_config": {
            "model_type": "qwen3_5_text",
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_hidden_layers": spec.num_hidden_layers(),
            "num_attention_heads": a.num_heads,
            "num_key_value_heads": a.num_kv_heads,
            "head_dim": a.head_dim,
            "hidden_act": "silu",
            "attention_bias": false,
            "attn_output_gate": a.gated,
            "output_gate_type": "swish",
            "max_position_embeddings": spec.max_position_embeddings,
            "rms_norm_eps": 1e-6,
            "layer_types": spec.layer_types.iter().map(layer).collect::<Vec<_>>(),
            "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": g.key_heads,
            "linear_num_value_heads": g.value_heads,
            "linear_key_head_dim": g.key_dim,
            "linear_value_head_dim": g.value_dim,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": a.rope.theta,
                "partial_rotary_factor": a.rope.dims as f64 / a.head_dim as f64,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": true
            }
        }
    });
    if flavour == Flavour::Mlx {
        config["quantization"] = json!({"group_size": 64, "bits": 4});
        config["quantization_config"] = config["quantization"].clone();
    }
    config
}

/// A target as a GGUF file: matrices in Q8_0, and a block of multi-token prediction at the end.
pub(crate) fn target_gguf(spec: &Spec) -> GgufWriter {
    let (a, g, layers) = (&spec.attention, spec.gdn.unwrap(), spec.num_hidden_layers());
    let mut w = GgufWriter::default();
    w.str("general.architecture", "qwen35");
    w.u32("qwen35.block_count", layers as u32 + 1).u32("qwen35.nextn_predict_layers", 1);
    w.u32("qwen35.embedding_length", spec.hidden_size as u32);
    w.u32("qwen35.feed_forward_length", spec.intermediate_size as u32);
    w.u32("qwen35.context_length", spec.max_position_embeddings as u32);
    w.u32("qwen35.attention.head_count", a.num_heads as u32);
    w.u32("qwen35.attention.head_count_kv", a.num_kv_heads as u32);
    w.u32("qwen35.attention.key_length", a.head_dim as u32);
    w.u32("qwen35.attention.value_length", a.head_dim as u32);
    w.f32("qwen35.attention.layer_norm_rms_epsilon", 1e-6);
    w.f32("qwen35.rope.freq_base", a.rope.theta as f32);
    w.u32("qwen35.rope.dimension_count", a.rope.dims as u32);
    w.i32s("qwen35.rope.dimension_sections", &[3, 3, 2, 0]);
    w.u32("qwen35.ssm.conv_kernel", 4).u32("qwen35.ssm.state_size", g.key_dim as u32);
    w.u32("qwen35.ssm.group_count", g.key_heads as u32);
    w.u32("qwen35.ssm.time_step_rank", g.value_heads as u32);
    w.u32("qwen35.ssm.inner_size", g.values() as u32);
    w.u32("qwen35.full_attention_interval", 4);
    w.str("tokenizer.ggml.model", "gpt2").str("tokenizer.ggml.pre", "qwen35");
    let tokens: Vec<String> = (0..spec.vocab_size).map(|i| token(i, spec)).collect();
    w.strs("tokenizer.ggml.tokens", &tokens.iter().map(String::as_str).collect::<Vec<_>>());
    let real = spec.real_vocab.unwrap_or(spec.vocab_size);
    let ty = |i: usize| {
        if i >= real {
            5
        } else if i + 3 >= real {
            3
        } else {
            1
        }
    };
    w.i32s("tokenizer.ggml.token_type", &(0..spec.vocab_size).map(ty).collect::<Vec<_>>());
    w.strs("tokenizer.ggml.merges", &["a b"]).u32("tokenizer.ggml.eos_token_id", real as u32 - 1);
    w.f32("general.sampling.temp", 0.7).raw("general.sampling.top_k", 5, &20i32.to_le_bytes());
    for weight in spec.weights() {
        let name = Names::gguf().candidates(weight)[0].clone();
        if let Some([n, k]) = spec.matrix_shape(weight) {
            w.tensor(&name, 8, &[n, k], &vec![1; n * k / 32 * 34]);
            continue;
        }
        let len = spec.vector_len(weight).unwrap();
        match weight {
            Logical::GdnConv(_) => w.tensor(&name, 0, &[len / 4, 4], &f32s(len)),
            _ => w.tensor(&name, 0, &[len], &f32s(len)),
        }
    }
    w.tensor(&format!("blk.{layers}.nextn.enorm.weight"), 0, &[4], &f32s(4));
    w.tensor(&format!("blk.{layers}.attn_norm.weight"), 0, &[4], &f32s(4));
    w
}

/// The last three real tokens of a test vocabulary are control tokens.
fn token(i: usize, spec: &Spec) -> String {
    match spec.real_vocab.unwrap_or(spec.vocab_size).saturating_sub(i) {
        1 => "<|im_end|>".to_owned(),
        2 => "<|im_start|>".to_owned(),
        3 => "<|endoftext|>".to_owned(),
        _ => format!("t{i}"),
    }
}

/// config.json of a draft.
pub(crate) fn draft_config(spec: &DraftSpec) -> Value {
    let a = &spec.attention;
    let layer = |l: &crate::draft_spec::DraftLayer| match l.window {
        Some(_) => "sliding_attention",
        None => "full_attention",
    };
    let name = if spec.dflash2.is_some() { "DFlash2DraftModel" } else { "DFlashDraftModel" };
    let mut config = json!({
        "architectures": [name],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "dflash_config": {
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": spec.target_layer_ids
        },
        "num_target_layers": spec.num_target_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_hidden_layers(),
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": a.rope.theta,
        "layer_types": spec.layers.iter().map(layer).collect::<Vec<_>>(),
        "sliding_window": spec.layers.iter().find_map(|l| l.window),
        "is_causal": spec.layers[0].causal
    });
    if let Some(two) = spec.dflash2 {
        config["dflash_config"]["conv_kernel_size"] = two.conv_kernel_size.into();
        config["dflash_config"]["conv_group_size"] = two.conv_group_size.into();
        config["selector_rank"] = two.selector_rank.into();
        config["selector_top_k"] = two.selector_top_k.into();
    }
    config
}

/// The tensors of a draft as a safetensors file.
pub(crate) fn draft_tensors(spec: &DraftSpec, flavour: Flavour) -> Tensors {
    let names = Names::hf("");
    let mut out = Vec::new();
    for weight in spec.weights() {
        let name = names.candidates(weight)[0].clone();
        if let Some(shape) = spec.matrix_shape(weight) {
            push_matrix(&mut out, name, shape, flavour);
            continue;
        }
        let len = spec.vector_len(weight).unwrap();
        let shape = match weight {
            Logical::AttnConvBase(_) | Logical::MlpConvBase(_) => {
                vec![2, len / 2 / spec.hidden_size, spec.hidden_size]
            }
            _ => vec![len],
        };
        out.push((name, "BF16", shape, bf16(len)));
    }
    out
}

/// A draft as a GGUF file, its taps counted from 1 as llama.cpp's converter does.
pub(crate) fn draft_gguf(spec: &DraftSpec) -> GgufWriter {
    let a = &spec.attention;
    let mut w = GgufWriter::default();
    w.str("general.architecture", "dflash");
    w.u32("dflash.block_count", spec.num_hidden_layers() as u32);
    w.u32("dflash.embedding_length", spec.hidden_size as u32);
    w.u32("dflash.feed_forward_length", spec.intermediate_size as u32);
    w.u32("dflash.attention.head_count", a.num_heads as u32);
    w.u32("dflash.attention.head_count_kv", a.num_kv_heads as u32);
    w.u32("dflash.attention.key_length", a.head_dim as u32);
    w.f32("dflash.attention.layer_norm_rms_epsilon", 1e-6);
    w.f32("dflash.rope.freq_base", a.rope.theta as f32);
    w.u32("dflash.block_size", spec.block_size as u32);
    w.u32("tokenizer.ggml.mask_token_id", spec.mask_token_id);
    let shifted: Vec<i32> = spec.target_layer_ids.iter().map(|&id| id as i32 + 1).collect();
    w.i32s("dflash.target_layers", &shifted);
    if let Some(two) = spec.dflash2 {
        w.u32("dflash.conv_kernel_size", two.conv_kernel_size as u32);
        w.u32("dflash.conv_group_size", two.conv_group_size as u32);
        w.u32("dflash.selector_rank", two.selector_rank as u32);
        w.u32("dflash.selector_top_k", two.selector_top_k as u32);
    }
    for weight in spec.weights() {
        let candidates = Names::gguf().candidates(weight);
        let base = matches!(weight, Logical::AttnConvBase(_) | Logical::MlpConvBase(_));
        let name = if base { &candidates[1] } else { &candidates[0] };
        match spec.matrix_shape(weight) {
            Some([n, k]) => w.tensor(name, 30, &[n, k], &bf16(n * k)),
            None => {
                let len = spec.vector_len(weight).unwrap();
                let h = spec.hidden_size;
                let shape = if base { vec![2, len / 2 / h, h] } else { vec![len] };
                w.tensor(name, 0, &shape, &f32s(len));
            }
        }
    }
    w
}
