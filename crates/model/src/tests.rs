//! Whole checkpoints of every format, and the bundled ones.

use std::path::Path;

use ops::HeadMap;
use serde_json::{Value, json};

use crate::draft_spec::DraftSpec;
use crate::files::testing::{bundled, safetensors};
use crate::files::{Checkpoint, GgmlType, Kind};
use crate::generation::GenerationConfig;
use crate::spec::{LayerKind, Spec};
use crate::testing::{
    Flavour, Tensors, draft_config, draft_gguf, draft_tensors, target_config, target_file,
    target_gguf, target_tensors,
};
use crate::{DraftSource, FloatDtype, LoadError, Logical, Source, TargetSource, synth};

fn tiny() -> Spec {
    synth::target("tiny").unwrap()
}

fn open_safetensors(config: Value, bytes: Vec<u8>) -> Result<TargetSource, LoadError> {
    let checkpoint = Checkpoint::from_safetensors_bytes(Path::new("m"), config, bytes)?;
    TargetSource::from_checkpoint(checkpoint)
}

fn open_gguf(bytes: Vec<u8>) -> Result<TargetSource, LoadError> {
    TargetSource::from_checkpoint(Checkpoint::from_gguf_bytes(Path::new("m.gguf"), bytes)?)
}

fn open_draft(spec: &DraftSpec, flavour: Flavour) -> Result<DraftSource, LoadError> {
    let bytes = safetensors(&draft_tensors(spec, flavour));
    let config = draft_config(spec);
    let checkpoint = Checkpoint::from_safetensors_bytes(Path::new("d"), config, bytes)?;
    DraftSource::from_checkpoint(checkpoint, &tiny())
}

/// Reads every weight of a target.
fn read_all(source: &TargetSource) {
    for weight in source.spec().weights() {
        if let Some([n, k]) = source.spec().matrix_shape(weight) {
            let matrix = source.matrix(weight).unwrap();
            assert_eq!([matrix.n, matrix.k], [n, k], "{weight:?}");
            let mut scratch = Vec::new();
            let last = matrix.rows(n - 1..n, &mut scratch);
            assert_eq!(last.bytes() * n as u64, matrix.bytes(), "{weight:?}");
        } else {
            let len = source.spec().vector_len(weight).unwrap();
            assert_eq!(source.vector(weight).unwrap().len(), len, "{weight:?}");
        }
    }
}

#[track_caller]
fn says<T: std::fmt::Debug>(result: Result<T, LoadError>, parts: &[&str]) {
    let error = result.unwrap_err().to_string();
    for part in parts {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

#[test]
fn one_model_in_three_formats() {
    let spec = tiny();
    let mlx =
        open_safetensors(target_config(&spec, Flavour::Mlx), target_file(&spec, Flavour::Mlx));
    let hf = open_safetensors(target_config(&spec, Flavour::Hf), target_file(&spec, Flavour::Hf));
    let gguf = open_gguf(target_gguf(&spec).bytes());
    let (mlx, hf, gguf) = (mlx.unwrap(), hf.unwrap(), gguf.unwrap());
    for source in [&mlx, &hf, &gguf] {
        read_all(source);
    }

    let expected = Spec { real_vocab: None, ..spec.clone() };
    assert_eq!(*mlx.spec(), expected);
    assert_eq!(*hf.spec(), Spec { norm_plus_one: true, ..expected.clone() });
    let mut tiled = Spec { real_vocab: Some(500), ..expected };
    tiled.gdn.as_mut().unwrap().head_map = HeadMap::Tiled;
    tiled.rms_norm_eps = gguf.spec().rms_norm_eps;
    assert!((tiled.rms_norm_eps - 1e-6).abs() < 1e-12);
    assert_eq!(*gguf.spec(), tiled);
    assert_eq!([mlx.kind(), gguf.kind()], [Some(Kind::Safetensors), Some(Kind::Gguf)]);

    // Element i of every stored vector is 0.5 + (i mod 16) / 64.
    let stored = |i: usize| 0.5 + (i % 16) as f32 / 64.0;
    for norm in [Logical::FinalNorm, Logical::InputNorm(0), Logical::PostNorm(3), Logical::QNorm(3)]
    {
        assert_eq!(mlx.vector(norm).unwrap()[5], stored(5));
        assert_eq!(hf.vector(norm).unwrap()[5], 1.0 + stored(5));
        assert_eq!(gguf.vector(norm).unwrap()[5], stored(5));
    }
    for source in [&mlx, &hf, &gguf] {
        assert_eq!(source.vector(Logical::GdnNorm(0)).unwrap()[7], stored(7));
        assert_eq!(source.vector(Logical::GdnDtBias(0)).unwrap()[3], stored(3));
        let conv = source.vector(Logical::GdnConv(0)).unwrap();
        let channels = spec.gdn.unwrap().channels();
        // Stored [channel][tap], read [tap][channel].
        assert_eq!(conv[2 * channels + 9], stored(9 * 4 + 2));
    }
    let decay = -f64::from(stored(4)).exp() as f32;
    assert_eq!(mlx.vector(Logical::GdnDecay(0)).unwrap()[4], decay);
    assert_eq!(hf.vector(Logical::GdnDecay(0)).unwrap()[4], decay);
    assert_eq!(gguf.vector(Logical::GdnDecay(0)).unwrap()[4], stored(4));

    let down = |s: &TargetSource| format!("{:?}", s.matrix(Logical::Down(1)).unwrap().source);
    assert!(down(&hf).starts_with("Dense { dtype: Bf16"));
    assert!(down(&mlx).starts_with("Mlx { bits: 4, group: 64, scale: Bf16"));
    assert!(down(&gguf).starts_with("Ggml { ty: Q8_0"));
    assert_eq!(gguf.generation().eos_token_ids, [497, 499]);
    assert_eq!(gguf.generation().top_k, Some(20));
    says(hf.matrix(Logical::Q(0)), &["Q(0)", "a matrix that this model has"]);
    says(hf.vector(Logical::Q(3)), &["Q(3)", "a vector that this model has"]);
}

#[test]
fn the_bundled_target() {
    let source = TargetSource::open(&bundled("th-tiny")).unwrap();
    let spec = source.spec();
    assert_eq!((spec.hidden_size, spec.vocab_size, spec.intermediate_size), (576, 49152, 1536));
    assert_eq!(spec.layers_of(LayerKind::Attention), 7);
    assert_eq!(spec.layers_of(LayerKind::GatedDelta), 23);
    let a = &spec.attention;
    assert_eq!((a.num_heads, a.num_kv_heads, a.head_dim, a.rope.dims), (9, 3, 64, 32));
    assert!((a.rope.theta - 316.227_766).abs() < 1e-6 && a.gated && a.qk_norm);
    let g = spec.gdn.unwrap();
    assert_eq!((g.key_heads, g.value_heads, g.channels()), (6, 12, 1536));
    assert!(spec.tie_word_embeddings && !spec.norm_plus_one);
    assert_eq!(spec.max_position_embeddings, 8192);
    assert_eq!(spec.real_vocab, Some(49152));
    read_all(&source);

    let embed = source.matrix(Logical::Embed).unwrap();
    let Source::Mlx { bits: 4, group: 64, scale: FloatDtype::Bf16, codes, scales, biases } =
        embed.source
    else {
        panic!("{embed:?}")
    };
    assert_eq!((codes.len(), scales.len()), (49152 * 288, 49152 * 9 * 2));
    assert_eq!(biases.len(), scales.len());
    let a = source.matrix(Logical::GdnA(0)).unwrap();
    assert!(matches!(a.source, Source::Dense { dtype: FloatDtype::Bf16, .. }));
    // Trained norms with their 1 are near 1, not near 0; decays are negative.
    let norm = source.vector(Logical::InputNorm(3)).unwrap();
    let mean = norm.iter().sum::<f32>() / norm.len() as f32;
    assert!(mean > 0.02, "{mean}");
    assert!(source.vector(Logical::GdnDecay(0)).unwrap().iter().all(|&d| d < 0.0));

    let g = source.generation();
    assert_eq!((g.eos_token_ids.as_slice(), g.top_k), ([0, 2].as_slice(), Some(40)));
    assert_eq!((g.temperature, g.top_p), (Some(0.5), Some(0.9)));
    assert_eq!((g.repetition_penalty, g.do_sample), (Some(1.1), Some(true)));
    assert!(g.ignored.is_empty(), "{:?}", g.ignored);
    // 157.6 M weights at 4.5 bits, and some in bf16.
    let mb = source.matrix_bytes().unwrap() as f64 / 1e6;
    assert!((85.0..95.0).contains(&mb), "{mb} MB");
}

#[test]
fn the_bundled_draft() {
    let target = TargetSource::open(&bundled("th-tiny")).unwrap();
    let draft = DraftSource::open(&bundled("th-tiny-dflash"), target.spec()).unwrap();
    let spec = draft.spec();
    assert_eq!((spec.num_hidden_layers(), spec.block_size, spec.mask_token_id), (4, 8, 16));
    assert_eq!(spec.target_layer_ids, [6, 14, 22, 25, 28]);
    assert!(spec.layers.iter().all(|l| l.window.is_none() && !l.causal));
    assert_eq!(spec.dflash2, None);
    let fc = draft.matrix(Logical::Fc).unwrap();
    assert_eq!([fc.n, fc.k], [576, 5 * 576]);
    assert!(matches!(fc.source, Source::Mlx { bits: 8, group: 64, .. }));
    for weight in spec.weights() {
        match spec.matrix_shape(weight) {
            Some([n, k]) => {
                let matrix = draft.matrix(weight).unwrap();
                assert_eq!([matrix.n, matrix.k], [n, k]);
            }
            None => {
                assert_eq!(draft.vector(weight).unwrap().len(), spec.vector_len(weight).unwrap())
            }
        }
    }
    says(TargetSource::open(&bundled("th-tiny-dflash")), &["architectures", "--draft"]);
    says(
        DraftSource::open(&bundled("th-tiny"), target.spec()),
        &["architectures", "DFlashDraftModel"],
    );
    says(
        DraftSource::open(&bundled("th-tiny-dflash"), &tiny()),
        &["hidden_size", "128, the target's", "found 576"],
    );
}

#[test]
fn a_missing_misshapen_or_unknown_tensor_is_named() {
    let spec = tiny();
    let open = |edit: &dyn Fn(&mut Tensors)| {
        let mut tensors = target_tensors(&spec, Flavour::Mlx);
        edit(&mut tensors);
        open_safetensors(target_config(&spec, Flavour::Mlx), safetensors(&tensors))
    };
    let layer = "language_model.model.layers.0.";
    let position = |tensors: &[(String, &str, Vec<usize>, Vec<u8>)], name: &str| {
        tensors.iter().position(|t| t.0 == format!("{layer}{name}")).unwrap()
    };
    says(
        open(&|t| drop(t.remove(position(t, "mlp.up_proj.weight")))),
        &["m: tensor language_model.model.layers.0.mlp.up_proj.weight", "none of this name"],
    );
    says(
        open(&|t| drop(t.remove(position(t, "mlp.up_proj.scales")))),
        &["mlp.up_proj.weight", "shape [320, 128]"],
    );
    says(
        open(&|t| drop(t.remove(position(t, "mlp.up_proj.biases")))),
        &["mlp.up_proj.biases", "none of this name"],
    );
    says(
        open(&|t| {
            let i = position(t, "linear_attn.A_log");
            t[i].1 = "I32";
        }),
        &["A_log", "F32, F16 or BF16", "I32"],
    );
    says(
        open(&|t| {
            let i = position(t, "linear_attn.A_log");
            t[i].2 = vec![5];
            t[i].3.truncate(20);
        }),
        &["A_log", "6 elements", "[5]"],
    );
    says(
        open(&|t| {
            let i = position(t, "linear_attn.conv1d.weight");
            t[i].2 = vec![4, 1, t[i].2[0]];
        }),
        &["conv1d.weight", "[channels, 1, 4] or [channels, 4, 1]"],
    );
    // 8-bit codes where config.json says 4.
    says(
        open(&|t| {
            let i = position(t, "mlp.up_proj.weight");
            t[i].2[1] *= 2;
            let doubled = t[i].3.repeat(2);
            t[i].3 = doubled;
        }),
        &["mlp.up_proj.weight", "4 bits in groups of 64", "found 8 bits"],
    );
    says(
        open(&|t| t.push((format!("{layer}self_attn.q_proj.bias"), "F32", vec![1], vec![0; 4]))),
        &["self_attn.q_proj.bias", "one it doesn't know"],
    );
    let harmless = ["mtp.fc.weight", "vision_tower.x", "language_model.mtp.norm.weight"];
    for name in harmless {
        open(&|t| t.push((name.to_owned(), "F32", vec![1], vec![0; 4]))).unwrap();
    }
    let nan = open(&|t| {
        let i = position(t, "linear_attn.A_log");
        t[i].3[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    says(nan.unwrap().vector(Logical::GdnDecay(0)), &["A_log", "finite", "NaN"]);
}

#[test]
fn quantisation_overrides() {
    let spec = tiny();
    let module = "language_model.model.layers.3.self_attn.v_proj";
    let name = format!("{module}.weight");
    // One module in 8 bits, as mixed recipes have them.
    let mut tensors = target_tensors(&spec, Flavour::Mlx);
    let t = tensors.iter_mut().find(|t| t.0 == name).unwrap();
    t.2[1] *= 2;
    t.3 = t.3.repeat(2);
    let file = safetensors(&tensors);
    let open = |over: Value| {
        let mut config = target_config(&spec, Flavour::Mlx);
        config["quantization"][module] = over;
        open_safetensors(config, file.clone())
    };
    for over in [json!({"bits": 8, "group_size": 64}), json!(false)] {
        let source = open(over).unwrap();
        let v = source.matrix(Logical::V(3)).unwrap();
        assert!(matches!(v.source, Source::Mlx { bits: 8, group: 64, .. }), "{v:?}");
        assert!(matches!(
            source.matrix(Logical::K(3)).unwrap().source,
            Source::Mlx { bits: 4, .. }
        ));
    }
    says(open(json!({"bits": 6, "group_size": 64})), &[&name, "6 bits", "found 8 bits"]);
    says(open(json!({"bits": 8})), &["group_size", "no default"]);
    says(open(json!(true)), &[&name, "4 bits"]);
    says(open(json!({"bits": 8, "group_size": 64, "mode": "mxfp8"})), &["mode", "affine", "mxfp8"]);
    says(open(json!(7)), &[module, "an object"]);
    // A file without any entry still has its shapes.
    let mut config = target_config(&spec, Flavour::Hf);
    config["text_config"]["tie_word_embeddings"] = Value::Null;
    assert!(open_safetensors(config, file.clone()).is_ok());
    for (key, method) in [("compressed-tensors", "compressed-tensors"), ("fp8", "fp8")] {
        let mut config = target_config(&spec, Flavour::Hf);
        config["quantization_config"] = json!({"quant_method": key});
        says(open_safetensors(config, file.clone()), &["quant_method", method]);
    }
}

#[test]
fn tied_tables() {
    let untied = tiny();
    let tied = Spec { tie_word_embeddings: true, ..untied.clone() };
    let open = |config: Value, spec: &Spec| {
        open_safetensors(config, target_file(spec, Flavour::Hf)).unwrap().spec().tie_word_embeddings
    };
    let config = target_config(&untied, Flavour::Hf);
    let mut silent = config.clone();
    silent["tie_word_embeddings"] = Value::Null;
    assert!(!open(silent.clone(), &untied));
    assert!(open(silent, &tied));
    // The text config's flag wins over the root's; a copy of a tied table is ignored.
    let mut both = config.clone();
    both["text_config"]["tie_word_embeddings"] = true.into();
    assert!(open(both, &untied));
    says(
        open_safetensors(config, target_file(&tied, Flavour::Hf)),
        &["lm_head.weight", "none of this name"],
    );
}

#[test]
fn drafts_in_every_format() {
    for name in ["tiny", "tiny-dflash2"] {
        let expected = synth::draft(name).unwrap();
        let gguf = Checkpoint::from_gguf_bytes(Path::new("d.gguf"), draft_gguf(&expected).bytes());
        let gguf = DraftSource::from_checkpoint(gguf.unwrap(), &tiny()).unwrap();
        let hf = open_draft(&expected, Flavour::Hf).unwrap();
        let mlx = open_draft(&expected, Flavour::Mlx).unwrap();
        assert_eq!(*hf.spec(), expected);
        assert_eq!(*mlx.spec(), expected);
        assert_eq!(gguf.spec().target_layer_ids, expected.target_layer_ids);
        assert_eq!(gguf.spec().dflash2, expected.dflash2);
        for source in [&hf, &mlx, &gguf] {
            for weight in source.spec().weights() {
                let ok = match source.spec().matrix_shape(weight) {
                    Some(_) => source.matrix(weight).map(|_| ()),
                    None => source.vector(weight).map(|_| ()),
                };
                ok.unwrap();
            }
        }
    }
    let v2 = open_draft(&synth::draft("tiny-dflash2").unwrap(), Flavour::Mlx).unwrap();
    let table = v2.matrix(Logical::SelectorPredecessor).unwrap();
    assert_eq!([table.n, table.k], [512, 32]);
    assert!(matches!(table.source, Source::Dense { dtype: FloatDtype::Bf16, .. }));
}

#[test]
fn synthetic_models() {
    for name in synth::NAMES {
        let path = format!("synth:{name}");
        let target = TargetSource::open(Path::new(&path)).unwrap();
        let draft = DraftSource::open(Path::new(&path), target.spec()).unwrap();
        assert!(target.generation() == &GenerationConfig::default());
        // Every shape can be quantised, and every weight has one.
        for weight in target.spec().weights() {
            let vector = target.spec().vector_len(weight).is_some();
            assert!(vector || target.matrix(weight).is_ok(), "{weight:?}");
        }
        for weight in draft.spec().weights() {
            let vector = draft.spec().vector_len(weight).is_some();
            assert!(vector || draft.matrix(weight).is_ok(), "{weight:?}");
        }
    }
    let big = TargetSource::open(Path::new("synth:qwen3.8-27b:7")).unwrap();
    let gb = big.matrix_bytes().unwrap() as f64 / 1e9;
    // 26.9 B weights at 4.5 bits.
    assert!((15.0..15.2).contains(&gb), "{gb}");
    let draft = DraftSource::open(Path::new("synth:qwen3.8-27b"), big.spec()).unwrap();
    let count = |w: Logical| {
        let spec = draft.spec();
        spec.matrix_shape(w).map_or_else(|| spec.vector_len(w).unwrap(), |[n, k]| n * k)
    };
    let params: usize = draft.spec().weights().into_iter().map(count).sum();
    // The published draft has about 1.92 B.
    assert!((1.90e9..1.94e9).contains(&(params as f64)), "{params}");

    let tiny = TargetSource::open(Path::new("synth:tiny")).unwrap();
    read_all(&tiny);
    says(
        DraftSource::open(Path::new("synth:qwen3.5-4b"), tiny.spec()),
        &["hidden_size", "found 2560"],
    );
    says(TargetSource::open(Path::new("synth:gpt-5")), &["synth:gpt-5", "qwen3.8-27b"]);
    says(TargetSource::open(Path::new("synth:tiny:x")), &["seed"]);
}

#[test]
fn ggml_types_reach_the_uploader() {
    let source = open_gguf(target_gguf(&tiny()).bytes()).unwrap();
    let q8 = GgmlType::from_id(8).unwrap();
    let m = source.matrix(Logical::Down(0)).unwrap();
    let Source::Ggml { ty, data } = m.source else { panic!("{m:?}") };
    assert_eq!((ty, data.len()), (q8, 128 * 320 / 32 * 34));
    let mut scratch = Vec::new();
    let rows = m.rows(2..5, &mut scratch);
    assert_eq!((rows.n, rows.bytes()), (3, 3 * 340));
}
