use super::*;
use proptest::prelude::*;
use serde_json::json;
use std::str::FromStr;
use std::sync::LazyLock;

use crate::text::detokenize::decode;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn bundled_json() -> Value {
    static JSON: LazyLock<Value> = LazyLock::new(|| {
        let path = format!("{ROOT}/models/th-tiny/tokenizer.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    });
    JSON.clone()
}

/// Ours and the oracle, from the same file.
struct Pair {
    ours: Tokenizer,
    oracle: tokenizers::Tokenizer,
    /// The same without added tokens; slow to build, so only for some.
    ordinary_oracle: Option<tokenizers::Tokenizer>,
}

impl Pair {
    fn new(json: &Value, with_ordinary: bool) -> Pair {
        let oracle = tokenizers::Tokenizer::from_str(&json.to_string()).unwrap();
        let ordinary_oracle = with_ordinary.then(|| {
            let mut bare = json.clone();
            bare["added_tokens"] = json!([]);
            tokenizers::Tokenizer::from_str(&bare.to_string()).unwrap()
        });
        Pair {
            ours: Tokenizer::from_json("test", json.clone(), None).unwrap(),
            oracle,
            ordinary_oracle,
        }
    }

    fn check(&self, text: &str) -> Result<(), TestCaseError> {
        let ids =
            |oracle: &tokenizers::Tokenizer| oracle.encode(text, false).unwrap().get_ids().to_vec();
        let trusted = self.ours.encode(&Guarded::trusted(text)).unwrap();
        prop_assert_eq!(&trusted, &ids(&self.oracle), "trusted {:?}", text);
        if let Some(oracle) = &self.ordinary_oracle {
            let ordinary = self.ours.encode_ordinary(text).unwrap();
            prop_assert_eq!(&ordinary, &ids(oracle), "ordinary {:?}", text);
        }
        prop_assert_eq!(
            decode(&self.ours, &trusted, true),
            self.oracle.decode(&trusted, false).unwrap()
        );
        Ok(())
    }
}

/// The vocabulary of the bundled model as a GGUF file with this pre-tokenizer would have it.
fn gguf(pre: &str) -> GgufVocab {
    let json = bundled_json();
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![String::new(); vocab.len()];
    for (content, id) in vocab {
        tokens[id.as_u64().unwrap() as usize] = content.clone();
    }
    let mut token_types = vec![1; tokens.len()];
    for token in json["added_tokens"].as_array().unwrap() {
        token_types[token["id"].as_u64().unwrap() as usize] = 3;
    }
    // What later families have besides: user-defined tokens, and unused rows at the end.
    for (content, kind) in [("<think>", 4), ("</think>", 4), ("[PAD49154]", 5)] {
        tokens.push(content.into());
        token_types.push(kind);
    }
    let merge =
        |merge: &Value| format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap());
    GgufVocab {
        model: "gpt2".into(),
        pre: Some(pre.into()),
        tokens,
        merges: json["model"]["merges"].as_array().unwrap().iter().map(merge).collect(),
        token_types,
        ..GgufVocab::default()
    }
}

static BUNDLED: LazyLock<Pair> = LazyLock::new(|| Pair::new(&bundled_json(), true));
const PRES: [&str; 6] = ["gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "default"];
static BY_PRE: LazyLock<Vec<Pair>> = LazyLock::new(|| {
    PRES.iter()
        .map(|pre| Pair::new(&tokenizer_json(&gguf(pre)).unwrap(), *pre == "qwen35"))
        .collect()
});

/// Text with everything that tokenizers get wrong.
fn texts() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "[a-zA-Z ']{0,12}",
        2 => "\\PC{0,6}",
        1 => "[0-9]{1,6}",
        // Digits and letter-like numbers of other scripts.
        1 => "[٠-٩०-९Ⅰ-Ⅻ½¼²①𝟘-𝟡]{1,3}",
        // White space of all kinds, line breaks among it.
        2 => "[ \t\r\n\u{b}\u{c}\u{85}\u{a0}\u{2003}\u{2028}\u{3000}\u{200b}\u{feff}]{1,4}",
        // Combining marks, alone and after letters; composed and decomposed accents.
        1 => "[e\u{301}\u{308}n\u{303}é\u{0915}\u{093f}\u{0e33}\u{05b8}\u{1e9b}\u{323}]{1,4}",
        1 => prop_oneof![
            Just("👩‍👩‍👧‍👦".to_owned()), Just("🇯🇵".to_owned()), Just("漢字かな交じり".to_owned()), Just("𝄞".to_owned()),
            Just("안녕하세요".to_owned()), Just("I'LL we'Ve don't".to_owned()), Just("ſ'ſ".to_owned()),
        ],
        1 => prop_oneof![
            Just("<|im_start|>".to_owned()), Just("<|im_end|>".to_owned()), Just("<think>".to_owned()),
            Just("<|im_".to_owned()), Just("<<|endoftext|>".to_owned()),
        ],
        1 => "[!-/:-@\\[-`{-~]{1,5}",
    ];
    proptest::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn the_bundled_tokenizer_equals_the_oracle(text in texts()) {
        BUNDLED.check(&text)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn every_gguf_pre_tokenizer_equals_the_oracle(text in texts(), which in 0..PRES.len()) {
        BY_PRE[which].check(&text).map_err(|e| TestCaseError::fail(format!("{}: {e}", PRES[which])))?;
    }
}

#[test]
fn golden_prompts() {
    for name in ["short", "prose200", "long1500", "code", "utf8", "chat"] {
        let golden = std::fs::read_to_string(format!("{ROOT}/tests/golden/{name}.json")).unwrap();
        let golden: Value = serde_json::from_str(&golden).unwrap();
        let ids: Vec<u32> = serde_json::from_value(golden["prompt_ids"].clone()).unwrap();
        // The long prompts were cut after a number of tokens, which may end inside a word.
        let text = match name {
            "long1500" => {
                std::fs::read_to_string(format!("{ROOT}/tests/golden/long_prompt.txt")).unwrap()
            }
            _ => decode(&BUNDLED.ours, &ids, true),
        };
        let ours = BUNDLED.ours.encode(&Guarded::trusted(text.as_str())).unwrap();
        let cut = matches!(name, "prose200" | "long1500");
        let same = if cut { ids.len() - 1 } else { ours.len() };
        assert_eq!(ours[..same], ids[..same], "{name}");
        BUNDLED.check(&text).unwrap();
    }
}

#[test]
fn a_gguf_vocabulary_gives_the_ids_of_tokenizer_json() {
    let smollm = &BY_PRE[1].ours;
    for (id, content, special) in BUNDLED.ours.added() {
        assert_eq!(smollm.added_id(content), Some(*id));
        assert_eq!(smollm.is_special(*id), *special);
    }
    // User-defined tokens are found in text too, but are no control tokens; unused rows are empty.
    assert_eq!(smollm.added_id("<think>"), Some(49152));
    assert_eq!(smollm.encode(&Guarded::trusted("a<think>b")).unwrap()[1], 49152);
    assert!(!smollm.is_special(49152) && smollm.token_bytes(49154).is_empty());
    for id in 0..49152 {
        assert_eq!(smollm.token_bytes(id), BUNDLED.ours.token_bytes(id), "{id}");
    }
}

#[test]
fn gguf_vocabularies_that_are_refused() {
    let error = |vocab: GgufVocab| {
        Tokenizer::from_gguf("m.gguf", &vocab).map(|_| ()).unwrap_err().to_string()
    };
    let pre = error(gguf("tekken"));
    assert!(
        pre.contains("m.gguf: tokenizer.ggml.pre \"tekken\"") && pre.contains("qwen35"),
        "{pre}"
    );
    let model = error(GgufVocab { model: "llama".into(), ..gguf("qwen2") });
    assert!(model.contains("\"llama\""), "{model}");
    let types = error(GgufVocab { token_types: vec![1; 3], ..gguf("qwen2") });
    assert!(types.contains("token_type has 3 entries"), "{types}");
    let merges = error(GgufVocab { merges: vec!["ab".into()], ..gguf("qwen2") });
    assert!(merges.contains("\"ab\" is not two tokens"), "{merges}");
    let bos = error(GgufVocab { add_bos: true, bos_token_id: Some(1 << 30), ..gguf("qwen2") });
    assert!(bos.contains("bos_token_id"), "{bos}");
}

#[test]
fn a_bos_token_goes_before_raw_text_only_where_the_file_says_so() {
    assert!(BUNDLED.ours.raw_prefix().is_empty());
    let with_bos = GgufVocab { add_bos: true, bos_token_id: Some(1), ..gguf("llama-bpe") };
    let tok = Tokenizer::from_gguf("m.gguf", &with_bos).unwrap();
    assert_eq!(tok.raw_prefix(), [1]);
    assert!(!tok.encode_ordinary("a").unwrap().contains(&1));
}

#[test]
fn unsupported_files_are_refused_by_name() {
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut json = bundled_json();
        change(&mut json);
        Tokenizer::from_json("t.json", json, None).map(|_| ()).unwrap_err().to_string()
    };
    type Change = dyn Fn(&mut Value);
    for (change, word) in [
        (&(|j: &mut Value| j["model"]["type"] = json!("Unigram")) as &Change, "Unigram"),
        (&|j| j["decoder"] = json!({"type": "Metaspace"}), "Metaspace"),
        (&|j| j["decoder"] = Value::Null, "none"),
        (&|j| j["model"]["dropout"] = json!(0.1), "dropout"),
        (&|j| j["pre_tokenizer"] = json!({"type": "Whitespace"}), "Whitespace"),
        (
            &|j| j["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": ""}),
            "Precompiled",
        ),
        (&|j| j["added_tokens"][0]["id"] = json!(4_000_000_000u32), "far above"),
        (&|j| j["added_tokens"][0]["id"] = json!(-1), "added_tokens[0].id"),
        (&|j| j["added_tokens"][0]["content"] = json!(""), "added_tokens[0].content"),
        (&|j| j["added_tokens"][1]["id"] = json!(0), "twice"),
        (&|j| j["model"]["vocab"]["the"] = json!(1u64 << 40), "far above"),
        (&|j| j["model"]["vocab"] = json!([]), "vocab"),
        (&|j| j["model"]["merges"] = json!([["nothing", "known"]]), "merge of unknown tokens"),
    ] {
        let message = changed(change);
        assert!(message.starts_with("t.json: ") && message.contains(word), "{word}: {message}");
        assert!(!message.contains('\n'), "{message}");
    }
}

#[test]
fn training_leftovers_do_not_cut_or_pad() {
    let mut json = bundled_json();
    json["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"});
    let tok = Tokenizer::from_json("t", json, None).unwrap();
    assert_eq!(tok.encode_ordinary("one two three four").unwrap().len(), 4);
}

#[test]
fn tokens_that_only_the_config_lists_are_added() {
    let config = json!({"added_tokens_decoder": {"49152": {"content": "<extra>", "special": true}, "1": {"content": "<other>"}}});
    let tok = Tokenizer::from_json("t", bundled_json(), Some(&config)).unwrap();
    assert_eq!(tok.added_id("<extra>"), Some(49152));
    assert_eq!(tok.added_id("<other>"), None);
    assert_eq!(tok.encode(&Guarded::trusted("<extra>")).unwrap(), [49152]);
    assert!(tok.is_special(49152));
    let bad = json!({"added_tokens_decoder": {"x": {}}});
    assert!(Tokenizer::from_json("t", bundled_json(), Some(&bad)).is_err());
}

#[test]
fn a_hostile_pattern_cannot_hang() {
    // Unbounded, this would take longer than the universe has lasted.
    let mut json = bundled_json();
    json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]});
    let tok = Tokenizer::from_json("t.json", json, None);
    let error = tok.and_then(|tok| tok.encode_ordinary(&("a".repeat(40) + "!"))).err();
    if let Some(error) = error {
        assert!(error.to_string().starts_with("t.json: "), "{error}");
    }
}

#[test]
fn characters_that_data_must_not_supply() {
    assert_eq!(BUNDLED.ours.guarded_chars(), ['<']);
    let added = |content: &str, special: bool| (0u32, content.to_owned(), special);
    let tokens = [
        added("<|im_end|>", true),
        added("[INST]", true),
        added("  ", false),
        added("word", false),
        added(" ##x", false),
        added("BOS", true),
    ];
    assert_eq!(guarded_chars(&tokens), ['#', '<', 'B', '[']);
}

#[test]
fn bytes_of_every_token() {
    let tok = &BUNDLED.ours;
    assert_eq!(tok.id_count(), 49152);
    assert_eq!(tok.token_bytes(1), b"<|im_start|>");
    assert_eq!(tok.token_bytes(49152), b"");
    // All 256 bytes can be written.
    let mut seen = [false; 256];
    (0..49152)
        .filter(|&id| tok.token_bytes(id).len() == 1)
        .for_each(|id| seen[tok.token_bytes(id)[0] as usize] = true);
    let missing = seen.iter().filter(|seen| !**seen).count();
    assert!(missing <= 60, "{missing}");
    assert_eq!(decode(tok, &[1, 504, 2], false), decode(tok, &[504], false));
}
