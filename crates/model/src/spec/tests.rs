use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::files::testing::GgufWriter;
use crate::testing::{Flavour, target_config, target_file, target_gguf};

fn base() -> Value {
    target_config(&crate::synth::target("tiny").unwrap(), Flavour::Hf)
}

fn parse(config: &Value) -> Result<Spec, LoadError> {
    Spec::from_config(Path::new("config.json"), config)
}

/// The error of the tiny model's config.json with one field of `text_config` replaced.
fn with(field: &str, value: Value) -> String {
    let mut config = base();
    config["text_config"][field] = value;
    parse(&config).unwrap_err().to_string()
}

#[track_caller]
fn says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

#[test]
fn every_size_is_required_by_name() {
    let required = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "linear_conv_kernel_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    ];
    for field in required {
        says(&with(field, Value::Null), &[&format!("text_config.{field}:"), "no default"]);
        for bad in [json!(0), json!(-4), json!(1.5), json!("8"), json!(u64::MAX), json!([])] {
            if field == "rms_norm_eps" && bad.is_number() && bad != 0 && bad != -4 {
                continue;
            }
            says(&with(field, bad), &[field]);
        }
    }
    for field in ["rope_theta", "partial_rotary_factor"] {
        let mut config = base();
        config["text_config"]["rope_parameters"][field] = Value::Null;
        says(&parse(&config).unwrap_err().to_string(), &[field, "no default"]);
    }
    let mut config = base();
    config["text_config"]["layer_types"] = Value::Null;
    says(&parse(&config).unwrap_err().to_string(), &["full_attention_interval", "no default"]);
}

#[test]
fn what_cannot_be_run_is_refused_with_the_reason() {
    says(&with("model_type", json!("qwen3_5_moe_text")), &["model_type", "not yet"]);
    says(&with("model_type", json!("qwen4_exp")), &["model_type", "another architecture"]);
    says(&with("model_type", json!("gemma3")), &["qwen3_5", "gemma3"]);
    says(&with("num_experts", json!(256)), &["num_experts", "not yet", "256"]);
    says(&with("hidden_act", json!("gelu")), &["hidden_act", "silu", "gelu"]);
    says(&with("output_gate_type", json!("sigmoid")), &["output_gate_type", "swish", "sigmoid"]);
    says(&with("attention_bias", json!(true)), &["attention_bias", "false"]);
    says(&with("linear_conv_kernel_dim", json!(3)), &["linear_conv_kernel_dim", "4", "found 3"]);
    says(&with("head_dim", json!(40)), &["head_dim", "multiple of 16"]);
    says(&with("linear_key_head_dim", json!(24)), &["linear_key_head_dim", "multiple of 16"]);
    says(&with("num_key_value_heads", json!(4)), &["num_attention_heads", "multiple of 4"]);
    says(&with("linear_num_value_heads", json!(7)), &["linear_num_value_heads", "multiple of 2"]);
    says(&with("rms_norm_eps", json!(1e-60)), &["rms_norm_eps", "between 0 and 1"]);
    says(&with("hidden_size", json!(100)), &["hidden_size", "multiple of 64"]);
    says(&with("layer_types", json!(["full_attention"])), &["layer_types", "8 entries", "found 1"]);
    let wrong = json!(vec!["mamba"; 8]);
    says(&with("layer_types", wrong), &["layer_types", "linear_attention", "mamba"]);
    let rope = |rope: Value| with("rope_parameters", rope);
    let yarn = json!({"rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 0.5});
    says(&rope(yarn), &["rope_parameters.rope_type", "native context", "yarn"]);
    let odd = json!({"rope_theta": 1e4, "partial_rotary_factor": 0.3});
    says(&rope(odd), &["partial_rotary_factor", "whole dims"]);
    let beyond = json!({"rope_theta": 1e4, "partial_rotary_factor": 2.0});
    says(&rope(beyond), &["partial_rotary_factor"]);
    let none = json!({"rope_theta": 1e4, "partial_rotary_factor": 1e-9});
    says(&rope(none), &["partial_rotary_factor"]);
    says(&with("rope_scaling", json!({"type": "yarn"})), &["rope_scaling.rope_type", "yarn"]);
    let mut draft = base();
    draft["architectures"] = json!(["DFlash2DraftModel"]);
    says(&parse(&draft).unwrap_err().to_string(), &["--draft"]);
    says(&parse(&json!([])).unwrap_err().to_string(), &["a JSON object", "a list"]);
    says(
        &parse(&json!({"text_config": 3})).unwrap_err().to_string(),
        &["text_config", "an object"],
    );
}

#[test]
fn both_layouts_of_config_json() {
    let nested = parse(&base()).unwrap();
    // A text-only export: everything at the root, rope fields flat, layers by interval.
    let mut flat = base()["text_config"].clone();
    for (key, value) in [
        ("rope_theta", json!(1e4)),
        ("partial_rotary_factor", json!(0.5)),
        ("rope_scaling", json!({"type": "mrope", "mrope_section": [3, 3, 2]})),
        ("full_attention_interval", json!(4)),
        ("layer_types", Value::Null),
        ("rope_parameters", Value::Null),
    ] {
        flat[key] = value;
    }
    assert_eq!(parse(&flat).unwrap(), nested);
    flat["rope_scaling"] = json!({"rope_type": "linear", "factor": 4.0});
    let scaled = parse(&flat).unwrap().attention.rope;
    assert_eq!(scaled.scaling, 4.0);
    let plain = nested.attention.rope.inv_freq();
    assert_eq!(plain.len(), 8);
    assert_eq!(plain[0], 1.0);
    assert_eq!(plain[4], 1e-2);
    assert_eq!(scaled.inv_freq()[4], 2.5e-3);
}

#[test]
fn published_sizes() {
    // Parameter counts of the published table, without MTP and vision.
    let counts = [
        ("qwen3.5-0.8b", 0.752e9),
        ("qwen3.5-4b", 4.206e9),
        ("qwen3.5-9b", 8.954e9),
        ("qwen3.8-27b", 26.896e9),
    ];
    for (name, expected) in counts {
        let spec = crate::synth::target(name).unwrap();
        spec.check(Path::new(name)).unwrap();
        let size = |w: Logical| {
            let matrix = spec.matrix_shape(w).map(|[n, k]| n * k);
            matrix.or_else(|| spec.vector_len(w)).unwrap()
        };
        let count: usize = spec.weights().into_iter().map(size).sum();
        assert!((count as f64 / expected - 1.0).abs() < 1e-3, "{name}: {count}");
    }
    let big = crate::synth::target("qwen3.8-27b").unwrap();
    assert_eq!(big.layers_of(LayerKind::Attention), 16);
    assert_eq!(big.gdn.unwrap().channels(), 10240);
    assert_eq!(big.matrix_shape(Logical::Q(3)), Some([24 * 512, 5120]));
    assert_eq!(big.matrix_shape(Logical::Q(2)), None);
    assert_eq!(big.matrix_shape(Logical::Q(64)), None);
    assert_eq!(big.matrix_shape(Logical::GdnQkv(2)), Some([10240, 5120]));
    assert_eq!(big.vector_len(Logical::GdnConv(3)), None);
}

// ---------------------------------------------------------------------------------------------
// GGUF

fn gguf(w: &GgufWriter) -> Result<Spec, LoadError> {
    Spec::from_checkpoint(&Checkpoint::from_gguf_bytes(Path::new("m.gguf"), w.bytes())?)
}

/// A llama model of two layers, as SmolLM2's files are.
fn llama(edit: impl Fn(&mut GgufWriter)) -> GgufWriter {
    let mut w = GgufWriter::default();
    w.str("general.architecture", "llama").u32("llama.block_count", 2);
    w.u32("llama.embedding_length", 64).u32("llama.feed_forward_length", 128);
    w.u32("llama.context_length", 128).u32("llama.attention.head_count", 4);
    w.f32("llama.attention.layer_norm_rms_epsilon", 1e-5).f32("llama.rope.freq_base", 1e5);
    edit(&mut w);
    w.tensor("token_embd.weight", 0, &[10, 64], &[0; 2560]);
    w
}

#[test]
fn llama_in_gguf() {
    let spec = gguf(&llama(|w| drop(w.u32("llama.attention.head_count_kv", 2).bytes()))).unwrap();
    let a = spec.attention;
    assert_eq!((spec.arch, spec.num_hidden_layers(), a.head_dim), (Arch::Llama, 2, 16));
    assert_eq!((a.num_heads, a.num_kv_heads, a.rope.dims), (4, 2, 16));
    assert_eq!(a.rope.pairing, RopePairing::Adjacent);
    assert!(!a.gated && !a.qk_norm && spec.tie_word_embeddings && spec.gdn.is_none());
    assert_eq!(spec.weights().len(), 2 + 2 * 9);
    assert_eq!(gguf(&llama(|_| ())).unwrap().attention.num_kv_heads, 4);

    let error = |edit: fn(&mut GgufWriter) -> &mut GgufWriter| {
        gguf(&llama(|w| drop(edit(w).bytes()))).unwrap_err().to_string()
    };
    says(&error(|w| w.u32("llama.expert_count", 8)), &["llama.expert_count", "not yet"]);
    says(&error(|w| w.str("llama.rope.scaling.type", "yarn")), &["rope.scaling.type", "yarn"]);
    says(&error(|w| w.str("llama.rope.scaling.type", "linear")), &["rope.scaling.factor"]);
    says(&error(|w| w.u32("llama.attention.value_length", 8)), &["value_length", "found 8"]);
    says(&error(|w| w.u32("llama.attention.key_length", 24)), &["head_dim", "multiple of 16"]);
    says(&error(|w| w.u32("llama.attention.head_count_kv", 3)), &["num_attention_heads"]);
    says(&error(|w| w.u32("llama.attention.head_count_kv", 0)), &["head_count_kv"]);
    says(&error(|w| w.i32s("llama.attention.head_count_kv", &[2, 4])), &["the same number"]);
    says(&error(|w| w.i32s("llama.attention.head_count_kv", &[])), &["one number, or one"]);
    says(&error(|w| w.u32("llama.nextn_predict_layers", 2)), &["nextn_predict_layers"]);
    says(&error(|w| w.u32("llama.vocab_size", 11)), &["token_embd.weight", "11 rows", "found 10"]);
    let mut freqs = llama(|_| ());
    freqs.tensor("rope_freqs.weight", 0, &[8], &[0; 32]);
    says(&gguf(&freqs).unwrap_err().to_string(), &["rope_freqs.weight", "not yet"]);
    let linear = gguf(&llama(|w| {
        w.str("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 2.0);
    }));
    assert_eq!(linear.unwrap().attention.rope.scaling, 2.0);
    let small = |key: &str| {
        let mut w = GgufWriter::default();
        w.str("general.architecture", key);
        gguf(&w).unwrap_err().to_string()
    };
    says(&small("llama"), &["llama.block_count", "no default"]);
    says(&small("qwen35moe"), &["not yet"]);
    says(&small("dflash"), &["--draft"]);
    says(&small("phi3"), &["general.architecture", "qwen35 or llama", "phi3"]);
    says(&gguf(&GgufWriter::default()).unwrap_err().to_string(), &["general.architecture"]);
}

#[test]
fn layers_of_a_gguf_file_must_agree_with_its_keys() {
    let tiny = crate::synth::target("tiny").unwrap();
    let mut w = target_gguf(&tiny);
    let ok = |w: &GgufWriter| gguf(w).map(|s| s.layers_of(LayerKind::Attention));
    assert_eq!(ok(&w).unwrap(), 2);
    let recurrent = |i: &i32| i32::from((i + 1) % 4 != 0);
    let flags: Vec<i32> = (0..9).collect::<Vec<_>>().iter().map(recurrent).collect();
    w.i32s("qwen35.attention.recurrent_layers", &flags);
    assert_eq!(ok(&w).unwrap(), 2);
    let mut wrong = target_gguf(&tiny);
    wrong.i32s("qwen35.attention.recurrent_layers", &[1, 1, 0]);
    says(&gguf(&wrong).unwrap_err().to_string(), &["blk.2", "recurrent_layers"]);
    let mut both = target_gguf(&tiny);
    both.tensor("blk.0.attn_q.weight", 0, &[1], &[0; 4]);
    says(&gguf(&both).unwrap_err().to_string(), &["blk.0", "found both"]);
}

#[test]
fn per_layer_kv_heads_with_zeros() {
    let tiny = crate::synth::target("tiny").unwrap();
    let key = "qwen35.attention.head_count_kv";
    let heads = |list: Option<&[i32]>| {
        let mut w = target_gguf(&tiny);
        w.remove(key);
        list.map(|list| w.i32s(key, list).version);
        gguf(&w).map(|s| s.attention.num_kv_heads).map_err(|e| e.to_string())
    };
    assert_eq!(heads(Some(&[0, 0, 0, 2, 0, 0, 0, 2, 2])).unwrap(), 2);
    assert_eq!(heads(Some(&[2])).unwrap(), 2);
    says(&heads(Some(&[0, 0, 0, 2, 0, 0, 0, 3, 2])).unwrap_err(), &["the same number", "[2, 3]"]);
    says(&heads(Some(&[0, 0, 0, 2])).unwrap_err(), &["each of 8 layers", "4 numbers"]);
    says(&heads(Some(&[-1; 8])).unwrap_err(), &["head_count_kv", "negative"]);
    says(&heads(None).unwrap_err(), &["head_count_kv", "this key"]);
}

#[test]
fn raw_and_converted_norms_are_told_apart_by_the_convolution() {
    let tiny = crate::synth::target("tiny").unwrap();
    for (flavour, plus_one) in [(Flavour::Hf, true), (Flavour::Mlx, false)] {
        let bytes = target_file(&tiny, flavour);
        let config = target_config(&tiny, flavour);
        let c = Checkpoint::from_safetensors_bytes(Path::new("m"), config, bytes).unwrap();
        assert_eq!(Spec::from_checkpoint(&c).unwrap().norm_plus_one, plus_one);
    }
    // Without a GatedDeltaNet layer nothing tells.
    let all = Spec { layer_types: vec![LayerKind::Attention; 2], ..tiny };
    let bytes = target_file(&all, Flavour::Hf);
    let config = target_config(&all, Flavour::Hf);
    let c = Checkpoint::from_safetensors_bytes(Path::new("m"), config, bytes).unwrap();
    says(&Spec::from_checkpoint(&c).unwrap_err().to_string(), &["layer_types", "how norms are"]);
}
