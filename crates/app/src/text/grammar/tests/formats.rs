//! Formats, and thinking before them.

use super::*;

/// Schemas of every kind.
fn schemas() -> impl Strategy<Value = Value> {
    use proptest::prelude::*;
    let words = || prop::collection::vec("[a-zé\"\\\\ ]{1,6}", 1..4);
    let leaf = prop_oneof![
        Just(json!({"type": "string"})),
        Just(json!({"type": "boolean"})),
        Just(json!({"type": "null"})),
        Just(json!({"type": "integer"})),
        Just(json!({"type": ["string", "null"]})),
        (0..5u32, 0..6u32)
            .prop_map(|(a, b)| json!({"type": "string", "minLength": a, "maxLength": a + b})),
        (-50..50i64, 0..100i64)
            .prop_map(|(a, b)| json!({"type": "integer", "minimum": a, "maximum": a + b})),
        (0..9i64).prop_map(|a| json!({"type": "number", "exclusiveMinimum": a, "maximum": a + 3})),
        (1..9i64).prop_map(
            |a| json!({"type": "integer", "multipleOf": a, "minimum": 0, "maximum": 1000})
        ),
        words().prop_map(|words| json!({"enum": words})),
        words().prop_map(|words| json!({"const": words})),
        Just(json!({"enum": [1, "1", null, true, [1, {"a": 2}]]})),
        Just(json!({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"})),
        Just(json!({"type": "string", "pattern": "[a-z]"})),
        Just(json!({"type": "string", "format": "date"})),
        Just(json!({"type": "string", "format": "uuid"})),
        Just(json!({"type": "string", "format": "ipv4"})),
        Just(json!({"$ref": "#/$defs/leaf"})),
        Just(json!({"$ref": "#/$defs/tree"})),
    ];
    let inner = leaf.prop_recursive(3, 12, 3, |inner| {
        let keys = || prop::sample::select(&["a", "b c", "é", "name", "x/y", "~0", "\""][..]);
        let properties = prop::collection::vec((keys(), inner.clone(), any::<bool>()), 0..4);
        prop_oneof![
            3 => (properties, any::<bool>()).prop_map(|(list, open)| {
                let needed: std::collections::BTreeSet<&str> =
                    list.iter().filter(|p| p.2).map(|p| p.0).collect();
                let properties: serde_json::Map<String, Value> =
                    list.iter().map(|p| (p.0.to_owned(), p.1.clone())).collect();
                json!({"type": "object", "properties": properties, "required": needed,
                       "additionalProperties": open})
            }),
            2 => (inner.clone(), 0..3u32, 0..3u32)
                .prop_map(|(item, a, b)| json!({"type": "array", "items": item, "minItems": a, "maxItems": a + b})),
            1 => prop::collection::vec(inner.clone(), 1..3)
                .prop_map(|items| json!({"type": "array", "prefixItems": items, "minItems": items.len(), "items": false})),
            1 => prop::collection::vec(inner.clone(), 2..4).prop_map(|all| json!({"anyOf": all})),
            1 => inner.prop_map(|value| json!({"type": "object", "additionalProperties": value, "maxProperties": 3})),
        ]
    });
    inner.prop_map(|schema| {
        let tree = json!({"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
                          "required": ["kids"], "additionalProperties": false});
        let mut root = schema;
        root["$defs"] = json!({"leaf": {"type": "string", "enum": ["x", "y"]}, "tree": tree});
        root
    })
}

#[test]
fn two_hundred_schemas_give_only_valid_documents() {
    let mut strange = 0;
    for (number, schema) in samples(200, schemas()).into_iter().enumerate() {
        let seed = number as u64;
        let validator = validator(&schema);
        let format = schema_format(schema.clone(), true);
        let rules = AnswerRules { format: &format, ..NO_RULES };
        let model = if number % 2 == 0 { &*PLAIN } else { &*TAGGED };
        let tokens = answer(model, &rules, &picker(model, seed, 20 + number % 40));
        let document = json_of(model, &tokens);
        assert!(validator.is_valid(&document), "{schema} gave {document}");
        // Without the grammar the same model writes nothing of the kind.
        let free: Vec<u32> = (0..20).map(|i| (hash(&[seed, i]) % 49_152) as u32).collect();
        let text = model.text(&free);
        strange +=
            usize::from(serde_json::from_str(&text).is_ok_and(|value| validator.is_valid(&value)));
    }
    assert_eq!(strange, 0);
}

#[test]
fn json_objects_regexes_and_grammars() {
    for seed in 0..6 {
        let rules = AnswerRules { format: &ResponseFormat::JsonObject, ..NO_RULES };
        assert!(json_of(&PLAIN, &answer(&PLAIN, &rules, &picker(&PLAIN, seed, 30))).is_object());
        let format = ResponseFormat::Regex("^(yes|no), [a-f]{3,5}/\\d+$".into());
        let rules = AnswerRules { format: &format, ..NO_RULES };
        let text = PLAIN.text(&answer(&PLAIN, &rules, &picker(&PLAIN, seed, 8)));
        let (word, rest) = text.split_once(", ").unwrap();
        let (letters, digits) = rest.split_once('/').unwrap();
        assert!(["yes", "no"].contains(&word) && (3..=5).contains(&letters.len()), "{text}");
        assert!(!digits.is_empty() && digits.chars().all(char::is_numeric), "{text}");
        let format =
            ResponseFormat::Lark("start: \"(\" start \")\" | NAME\nNAME: /[a-z]{1,4}/".into());
        let rules = AnswerRules { format: &format, ..NO_RULES };
        let text = PLAIN.text(&answer(&PLAIN, &rules, &picker(&PLAIN, seed, 6)));
        let name = text.trim_matches(['(', ')']);
        assert!((1..=4).contains(&name.len()), "{text}");
        assert_eq!(text.matches('(').count(), text.matches(')').count(), "{text}");
    }
}

/// SO-01: free thinking, then JSON in the answer; and a budget closes the block.
#[test]
fn thinking_comes_first() {
    let format = schema_format(
        json!({"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}},
        "required": ["a"], "additionalProperties": false}),
        true,
    );
    for model in [&*PLAIN, &*TAGGED] {
        let close =
            model.tok.encode(&crate::text::guard::Guarded::trusted("</think>\n\n")).unwrap();
        for budget in [None, Some(0), Some(1), Some(5), Some(40)] {
            let mut script: Vec<u32> = (300..320).collect();
            script.extend(&close);
            let picker = Picker { model, seed: 5, patience: 60, script: &script };
            let rules = AnswerRules {
                start: Start::Reasoning,
                reasoning_budget: budget,
                format: &format,
                ..NO_RULES
            };
            let tokens = answer(model, &rules, &picker);
            let options =
                StreamOptions { stops: vec![], start: Start::Reasoning, keep_special: false };
            let mut stream = OutputStream::new(model.tok.as_ref(), &options);
            let (mut reasoning, mut answer, mut thought) = (String::new(), String::new(), 0);
            for &token in &tokens {
                let delta = stream.push(model.tok.as_ref(), token);
                thought += usize::from(answer.is_empty() && delta.answer.is_empty());
                reasoning += &delta.reasoning;
                answer += &delta.answer;
            }
            answer += &stream.finish().answer;
            let value: Value =
                serde_json::from_str(&answer).unwrap_or_else(|e| panic!("{e}: {answer}"));
            assert!(value["a"].is_i64(), "{value}");
            assert!(!reasoning.contains("</") && !reasoning.contains('{'), "{reasoning}");
            assert_eq!(reasoning.is_empty(), budget == Some(0), "{reasoning}");
            if let Some(budget @ ..20) = budget {
                // The closing tokens, line breaks after them, and a character not cut in two.
                assert!(thought <= budget + close.len() + 6, "{thought} of {budget}");
            }
        }
    }
    // A budget alone leaves the answer free, and one that is not reached changes nothing.
    let rules = AnswerRules { start: Start::Reasoning, reasoning_budget: Some(3), ..NO_RULES };
    let script: Vec<u32> = (300..303).chain([700]).collect();
    let picker = Picker { model: &TAGGED, seed: 1, patience: 9, script: &script };
    let tokens = answer(&TAGGED, &rules, &picker);
    assert!(TAGGED.text(&tokens[3..]).starts_with("\n</think>"), "{:?}", TAGGED.text(&tokens));
    let script = [300, 301, 49_153];
    let tokens = answer(&TAGGED, &rules, &Picker { script: &script, ..picker });
    assert_eq!(&tokens[..3], &script);
    assert!(!TAGGED.text(&tokens[3..]).contains(CLOSE));
}

/// A model may open the block itself, or not.
#[test]
fn thinking_that_the_model_opens() {
    let format = ResponseFormat::JsonObject;
    let rules = AnswerRules { start: Start::Either, format: &format, ..NO_RULES };
    let script = [49_152, 300, 301, 49_153];
    let thought = Picker { model: &TAGGED, seed: 3, patience: 12, script: &script };
    let tokens = answer(&TAGGED, &rules, &thought);
    assert_eq!(&tokens[..4], &script);
    assert!(json_of(&TAGGED, &tokens[4..]).is_object());
    let at_once = Picker { script: &[], ..thought };
    let tokens = answer(&TAGGED, &rules, &at_once);
    assert!(!tokens.contains(&49_152) && json_of(&TAGGED, &tokens).is_object());
    // Without a token for it nobody could tell; the answer begins at once.
    assert!(json_of(&PLAIN, &answer(&PLAIN, &rules, &picker(&PLAIN, 3, 12))).is_object());
}
