use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::files::testing::GgufWriter;
use crate::testing::{draft_config, draft_gguf};

fn tiny(name: &str) -> DraftSpec {
    crate::synth::draft(name).unwrap()
}

fn found(spec: &DraftSpec) -> Found {
    Found {
        fc_inputs: Some(spec.fc_inputs()),
        dflash2: spec.dflash2.is_some(),
        conv_kernel_size: spec.dflash2.map(|d| d.conv_kernel_size),
        selector_rank: spec.dflash2.map(|d| d.selector_rank),
        vocab_size: None,
    }
}

fn parse(config: &Value, found: &Found) -> Result<DraftSpec, LoadError> {
    let spec = config::parse(Path::new("config.json"), config, found)?;
    spec.check(Path::new("config.json"))?;
    Ok(spec)
}

fn gguf(w: &GgufWriter) -> Result<DraftSpec, LoadError> {
    DraftSpec::from_checkpoint(&Checkpoint::from_gguf_bytes(Path::new("d.gguf"), w.bytes())?)
}

#[track_caller]
fn says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

#[test]
fn default_taps_are_those_of_the_published_drafts() {
    let taps = |count, layers| default_taps(Path::new("d"), count, layers).unwrap();
    assert_eq!(taps(5, 64), [1, 16, 31, 46, 61]);
    assert_eq!(taps(5, 32), [1, 8, 15, 22, 29]);
    assert_eq!(taps(8, 32), [1, 5, 9, 13, 17, 21, 25, 29]);
    assert_eq!(taps(5, 40), [1, 10, 19, 28, 37]);
    assert_eq!(taps(8, 40), [1, 6, 11, 16, 22, 27, 32, 37]);
    assert_eq!(taps(1, 32), [16]);
    assert!(default_taps(Path::new("d"), 3, 3).is_err());
    assert!(default_taps(Path::new("d"), 0, 30).is_err());

    let mut config = draft_config(&tiny("tiny"));
    config["dflash_config"]["target_layer_ids"] = Value::Null;
    let spec = tiny("tiny");
    assert_eq!(parse(&config, &found(&spec)).unwrap().target_layer_ids, [1, 3, 5]);
    // Without `fc`'s shape, as many taps as the draft has layers.
    let packed = Found { fc_inputs: None, ..found(&spec) };
    assert_eq!(parse(&config, &packed).unwrap().target_layer_ids, [1, 5]);
    config["num_target_layers"] = Value::Null;
    says(&parse(&config, &packed).unwrap_err().to_string(), &["num_target_layers"]);
}

#[test]
fn masks_of_layers() {
    let base = draft_config(&tiny("tiny"));
    let layers = |edits: &[(&str, Value)]| {
        let mut config = base.clone();
        for (field, value) in edits {
            config[*field] = value.clone();
        }
        parse(&config, &found(&tiny("tiny"))).map(|s| s.layers).map_err(|e| e.to_string())
    };
    let full = DraftLayer { window: None, causal: false };
    assert_eq!(layers(&[]).unwrap(), [full; 2]);
    assert_eq!(layers(&[("layer_types", Value::Null)]).unwrap(), [full; 2]);
    let mixed = json!(["sliding_attention", "full_attention"]);
    // Without `is_causal`, sliding layers are causal and full ones aren't.
    let silent = layers(&[
        ("layer_types", mixed.clone()),
        ("sliding_window", json!(2048)),
        ("is_causal", Value::Null),
    ]);
    assert_eq!(silent.unwrap(), [DraftLayer { window: Some(2048), causal: true }, full]);
    let causal = layers(&[("is_causal", json!(true))]);
    assert_eq!(causal.unwrap(), [DraftLayer { window: None, causal: true }; 2]);
    let said = layers(&[("layer_types", mixed.clone()), ("sliding_window", json!(9))]);
    assert_eq!(said.unwrap()[0], DraftLayer { window: Some(9), causal: false });
    says(&layers(&[("layer_types", mixed)]).unwrap_err(), &["sliding_window", "no default"]);
    let sliding = [
        ("layer_types", Value::Null),
        ("sliding_window", json!(9)),
        ("use_sliding_window", json!(true)),
    ];
    says(&layers(&sliding).unwrap_err(), &["layer_types", "use_sliding_window"]);
    let wrong = layers(&[("layer_types", json!(["linear_attention", "full_attention"]))]);
    says(&wrong.unwrap_err(), &["layer_types", "linear_attention"]);
}

#[test]
fn fields_stand_at_the_top_or_in_dflash_config() {
    let spec = tiny("tiny-dflash2");
    let nested = draft_config(&spec);
    assert_eq!(parse(&nested, &found(&spec)).unwrap(), spec);
    let mut flat = nested.clone();
    for field in ["mask_token_id", "target_layer_ids", "conv_kernel_size", "conv_group_size"] {
        flat[field] = nested["dflash_config"][field].clone();
    }
    flat["dflash_config"] = Value::Null;
    assert_eq!(parse(&flat, &found(&spec)).unwrap(), spec);
    let mut inner = nested.clone();
    for field in ["block_size", "selector_rank", "selector_top_k", "is_causal"] {
        inner["dflash_config"][field] = nested[field].clone();
        inner[field] = Value::Null;
    }
    assert_eq!(parse(&inner, &found(&spec)).unwrap(), spec);
}

#[test]
fn what_a_draft_lacks_or_cannot_have_is_named() {
    let spec = tiny("tiny-dflash2");
    let with = |field: &str, value: Value| {
        let mut config = draft_config(&spec);
        config["dflash_config"][field] = Value::Null;
        config[field] = value;
        parse(&config, &found(&spec)).unwrap_err().to_string()
    };
    for field in ["mask_token_id", "block_size", "conv_kernel_size", "conv_group_size"] {
        says(&with(field, Value::Null), &[field, "no default"]);
        says(&with(field, json!("x")), &[field, "a whole number"]);
    }
    for field in ["selector_rank", "selector_top_k", "head_dim", "hidden_size", "rms_norm_eps"] {
        says(&with(field, Value::Null), &[field, "no default"]);
    }
    says(&with("block_size", json!(1)), &["block_size", "from 2"]);
    says(&with("selector_top_k", json!(33)), &["selector_top_k", "32"]);
    says(&with("selector_rank", json!(31)), &["selector_rank", "32, as the tensors have"]);
    says(&with("conv_kernel_size", json!(3)), &["conv_kernel_size", "2, as the tensors have"]);
    says(&with("conv_group_size", json!(24)), &["conv_group_size", "divisor"]);
    says(&with("target_layer_ids", json!([1, 2])), &["target_layer_ids", "384 / 128"]);
    says(&with("target_layer_ids", json!([])), &["target_layer_ids", "found 0"]);
    says(&with("target_layer_ids", json!([1, -2, 3])), &["target_layer_ids"]);
    says(&with("output_multiplier", json!(2.0)), &["output_multiplier", "not yet"]);
    says(&with("final_logit_softcapping", json!(30)), &["final_logit_softcapping", "not yet"]);
    says(&with("rope_scaling", json!({"rope_type": "yarn"})), &["rope_type", "yarn"]);
    says(&with("attention_bias", json!(true)), &["attention_bias"]);
    says(&with("hidden_act", json!("relu")), &["hidden_act"]);
    says(&with("architectures", json!(["DFlash2DraftModel", 3])), &["architectures"]);

    // The tensors decide which version it is; a label without its tensors is an incomplete file.
    let config = draft_config(&spec);
    let without = Found { dflash2: false, ..found(&spec) };
    says(&parse(&config, &without).unwrap_err().to_string(), &["architectures", "DFlash 2"]);
    let mut label = config.clone();
    label["architectures"] = json!(["DFlashDraftModel"]);
    assert!(parse(&label, &found(&spec)).unwrap().dflash2.is_some());
    let mut other = config;
    other["architectures"] = json!(["Qwen3ForCausalLM"]);
    other["dflash_config"] = Value::Null;
    says(&parse(&other, &found(&spec)).unwrap_err().to_string(), &["DFlashDraftModel"]);
}

#[test]
fn a_draft_for_another_target_is_refused() {
    let target = crate::synth::target("tiny").unwrap();
    let refuse = |edit: fn(&mut DraftSpec)| {
        let mut spec = tiny("tiny");
        edit(&mut spec);
        spec.check_against(&target, Path::new("d")).unwrap_err().to_string()
    };
    tiny("tiny").check_against(&target, Path::new("d")).unwrap();
    says(&refuse(|s| s.hidden_size = 64), &["hidden_size", "128", "found 64"]);
    says(&refuse(|s| s.num_target_layers = Some(9)), &["num_target_layers", "8", "found 9"]);
    says(&refuse(|s| s.vocab_size = Some(500)), &["vocab_size", "512", "found 500"]);
    says(&refuse(|s| s.target_layer_ids[1] = 8), &["target_layer_ids", "below 8", "found 8"]);
    says(&refuse(|s| s.mask_token_id = 512), &["mask_token_id", "512 rows", "found 512"]);
    let mut silent = tiny("tiny");
    (silent.num_target_layers, silent.vocab_size) = (None, None);
    assert_eq!(silent.fitted_to(&target, Path::new("d")).unwrap().vocab_size, Some(512));
}

#[test]
fn taps_of_gguf_drafts_count_from_one_unless_they_end_where_raw_ids_do() {
    let target = crate::synth::target("tiny").unwrap();
    let spec = tiny("tiny");
    let fitted = |ids: &[usize]| {
        let mut w = DraftSpec { target_layer_ids: ids.to_vec(), ..spec.clone() };
        w.ids_uncertain = true;
        w.fitted_to(&target, Path::new("d")).map(|s| s.target_layer_ids)
    };
    // Eight layers: the last raw id is 5.
    assert_eq!(fitted(&[1, 3, 5]).unwrap(), [1, 3, 5]);
    assert_eq!(fitted(&[2, 4, 6]).unwrap(), [1, 3, 5]);
    assert_eq!(fitted(&[2, 4, 8]).unwrap(), [1, 3, 7]);
    says(&fitted(&[0, 4, 6]).unwrap_err().to_string(), &["target_layers", "counted from 1"]);
    says(&fitted(&[2, 4, 9]).unwrap_err().to_string(), &["target_layer_ids", "below 8"]);

    let read = gguf(&draft_gguf(&spec)).unwrap();
    assert_eq!(read.target_layer_ids, [2, 4, 6]);
    let read = read.fitted_to(&target, Path::new("d")).unwrap();
    assert_eq!(read.target_layer_ids, [1, 3, 5]);
    assert_eq!((read.mask_token_id, read.block_size), (500, 8));
}

#[test]
fn gguf_drafts() {
    let spec = tiny("tiny-dflash2");
    let sliding = |w: &mut GgufWriter| {
        w.u32("dflash.attention.sliding_window", 48);
        w.i32s("dflash.attention.sliding_window_pattern", &[1, 0]);
    };
    let mut w = draft_gguf(&spec);
    sliding(&mut w);
    let layers = gguf(&w).unwrap().layers;
    assert_eq!(layers[0], DraftLayer { window: Some(48), causal: true });
    assert_eq!(layers[1], DraftLayer { window: None, causal: false });
    w.bool("dflash.attention.causal", false);
    assert!(gguf(&w).unwrap().layers.iter().all(|l| !l.causal));

    let error = |edit: fn(&mut GgufWriter) -> &mut GgufWriter| {
        let mut w = draft_gguf(&tiny("tiny-dflash2"));
        gguf(edit(&mut w)).unwrap_err().to_string()
    };
    says(
        &error(|w| w.u32("dflash.attention.sliding_window", 48)),
        &["sliding_window_pattern", "no default"],
    );
    says(
        &error(|w| {
            w.u32("dflash.attention.sliding_window", 48);
            w.i32s("dflash.attention.sliding_window_pattern", &[1])
        }),
        &["sliding_window_pattern", "2 layers", "found 1"],
    );
    says(&error(|w| w.u32("dflash.target_hidden_size", 64)), &["target_hidden_size", "128"]);
    says(&error(|w| w.f32("dflash.logit_scale", 2.0)), &["logit_scale", "not yet"]);
    says(&error(|w| w.str("dflash.rope.scaling.type", "yarn")), &["rope.scaling.type", "yarn"]);
    let mut other = GgufWriter::default();
    other.str("general.architecture", "qwen35-dflash-draft");
    says(&gguf(&other).unwrap_err().to_string(), &["general.architecture", "qwen35-dflash-draft"]);
    let mut bare = GgufWriter::default();
    bare.str("general.architecture", "dflash");
    says(&gguf(&bare).unwrap_err().to_string(), &["dflash.embedding_length", "no default"]);
}
