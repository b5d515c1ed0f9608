//! Rules that can't be obeyed, or cost too much.

use super::*;

/// SO-03: refused, or named as not enforced; never free text without a word.
#[test]
fn what_cannot_be_enforced_is_told() {
    let try_schema = |schema: Value, strict: bool| {
        let format = schema_format(schema, strict);
        PLAIN.grammars.guide(&AnswerRules { format: &format, ..NO_RULES })
    };
    let error =
        |schema: Value, strict| try_schema(schema, strict).err().expect("refused").to_string();
    let object = |key: &str, value: Value| json!({"type": "object", "properties": {"a": {"type": "string", key: value}}});
    for (schema, word) in [
        (object("pattern", json!("(a")), "regex"),
        (json!({"$ref": "https://example.com/s.json"}), "$defs"),
        (json!({"$ref": "#/$defs/none"}), "nowhere"),
        (json!({"$ref": 5}), "string"),
        (json!(false), "false"),
        (json!(7), "object"),
        (json!({"type": "strnig"}), "strnig"),
        (json!({"type": "integer", "minimum": 5, "maximum": 2}), ""),
    ] {
        for strict in [true, false] {
            let error = error(schema.clone(), strict);
            assert!(error.contains(word) && !error.contains('\n'), "{schema}: {error}");
        }
    }
    for (schema, place) in [
        (object("formatt", json!("date")), "/properties/a/formatt"),
        (json!({"type": "array", "uniqueItems": true}), "/uniqueItems"),
        (json!({"not": {"type": "string"}}), "/not"),
        (json!({"tpye": "string"}), "/tpye"),
        (json!({"type": "object", "x-guidance": {"lenient": true}}), "/x-guidance"),
    ] {
        assert!(error(schema.clone(), true).contains(place));
        let notes = try_schema(schema.clone(), false).unwrap().notes;
        assert!(notes.iter().any(|note| note.contains(place)), "{schema}: {notes:?}");
    }
    let unknown = try_schema(object("format", json!("made-up")), false).unwrap();
    assert!(unknown.notes.iter().any(|note| note.contains("made-up")), "{:?}", unknown.notes);
    assert!(error(object("format", json!("made-up")), true).contains("made-up"));
    // A parameter may be called like a keyword that does not exist.
    let named = json!({"type": "object", "properties": {"not": {"type": "string"}, "tpye": {"const": {"if": 1}}}});
    assert!(try_schema(named, true).unwrap().notes.is_empty());
    for (format, word) in [
        (ResponseFormat::Regex("(a".into()), "regex"),
        (ResponseFormat::Lark("start: nothing".into()), "nothing"),
        (ResponseFormat::Lark("start: a\na[stop=\"x\"]: /[a-z]+/".into()), "rollback"),
        (ResponseFormat::Lark(String::new()), ""),
    ] {
        let error = refused(&PLAIN, &AnswerRules { format: &format, ..NO_RULES });
        assert!(error.contains(word), "{format:?}: {error}");
    }
    // A tool that is not strict stays callable; a strict one is refused.
    for strict in [true, false] {
        let parameters =
            json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "(a"}}});
        let tool = [Tool { name: "t".into(), description: None, parameters, strict }];
        let rules = AnswerRules { tools: &tool, choice: &ToolChoice::Required, ..NO_RULES };
        match PLAIN.grammars.guide(&rules) {
            Err(error) => assert!(strict && !error.to_string().is_empty()),
            Ok(guided) => {
                assert!(!strict && guided.notes[0].contains("arguments"), "{:?}", guided.notes)
            }
        }
    }
}

/// SO-04: a reference means what it refers to.
#[test]
fn references_are_followed() {
    let inline = json!({"type": "object", "properties": {"m": {"enum": ["fast", "slow"]}},
        "required": ["m"], "additionalProperties": false});
    let mut apart = inline.clone();
    apart["properties"]["m"] = json!({"$ref": "#/$defs/mode"});
    apart["$defs"] =
        json!({"mode": {"$ref": "#/$defs/again"}, "again": {"enum": ["fast", "slow"]}});
    for seed in 0..4 {
        let text = |schema: &Value| {
            let format = schema_format(schema.clone(), true);
            let rules = AnswerRules { format: &format, ..NO_RULES };
            PLAIN.text(&answer(&PLAIN, &rules, &picker(&PLAIN, seed, 20)))
        };
        assert_eq!(text(&inline), text(&apart));
    }
}

/// SO-06 and others: an error or a finite grammar, within bounds, and the process alive.
#[test]
fn hostile_schemas() {
    let deep = |levels: usize| {
        let nested = r#"{"type":"array","items":"#.repeat(levels);
        serde_json::from_str(&(nested + "true" + &"}".repeat(levels))).unwrap()
    };
    let any = |count: usize, of: usize| {
        let alternatives = |i: usize| -> Vec<Value> {
            let one = |j: usize| json!({"properties": {format!("p{i}"): {"const": j}}});
            (0..of).map(one).collect()
        };
        json!({"type": "object", "allOf": (0..count).map(|i| json!({"anyOf": alternatives(i)})).collect::<Vec<_>>()})
    };
    let chain: serde_json::Map<String, Value> = (0..2000)
        .map(|i| {
            (
                format!("d{i}"),
                json!({"type": "array", "items": {"$ref": format!("#/$defs/d{}", (i + 1) % 2000)}}),
            )
        })
        .collect();
    let doubling: serde_json::Map<String, Value> = (0..60)
        .map(|i| {
            let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
            (format!("d{i}"), json!({"anyOf": [next, next]}))
        })
        .chain([("d60".to_owned(), json!({"type": "null"}))])
        .collect();
    let mut shapes: Vec<(&str, ResponseFormat)> = vec![
        (
            "empty reference",
            schema_format(json!({"type": "object", "properties": {"a": {"$ref": ""}}}), false),
        ),
        (
            "root reference",
            schema_format(
                json!({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}),
                false,
            ),
        ),
        ("itself", schema_format(json!({"$ref": "#"}), false)),
        ("itself, empty", schema_format(json!({"$ref": ""}), false)),
        (
            "a circle",
            schema_format(
                json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
                false,
            ),
        ),
        (
            "a circle through allOf",
            schema_format(
                json!({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}),
                false,
            ),
        ),
        (
            "a circle through anyOf",
            schema_format(
                json!({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}),
                false,
            ),
        ),
        ("deep", schema_format(deep(60), false)),
        ("cases", schema_format(any(30, 4), false)),
        ("few cases", schema_format(any(5, 3), false)),
        ("a chain", schema_format(json!({"$ref": "#/$defs/d0", "$defs": chain}), false)),
        ("doubling", schema_format(json!({"$ref": "#/$defs/d0", "$defs": doubling}), false)),
        (
            "a long string",
            schema_format(
                json!({"type": "string", "minLength": 1_000_000, "maxLength": 2_000_000}),
                false,
            ),
        ),
        (
            "a long array",
            schema_format(
                json!({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}),
                false,
            ),
        ),
        (
            "many values",
            schema_format(
                json!({"enum": (0..9000).map(|i| format!("value {i}")).collect::<Vec<_>>()}),
                false,
            ),
        ),
        ("a large schema", schema_format(json!({"enum": vec!["x".repeat(1000); 700]}), false)),
        (
            "a slow pattern",
            schema_format(json!({"type": "string", "pattern": "^(.*a.{30}|.*b.{29})$"}), false),
        ),
        (
            "nested repeats",
            schema_format(json!({"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}$"}), false),
        ),
        ("brackets", ResponseFormat::Regex("(".repeat(15_000) + "a" + &")".repeat(15_000))),
        ("an alternation", ResponseFormat::Regex("(a|aa)*(b|a{200})*c".into())),
        ("ambiguous", ResponseFormat::Lark("start: start start start | \"a\" | \"\"".into())),
    ];
    let rules: String = (0..2000).map(|i| format!("r{i}: r{} \"b\"\n", i + 1)).collect();
    shapes.push(("rules", ResponseFormat::Lark(format!("start: r0\n{rules}r2000: \"a\""))));
    for (name, format) in shapes {
        let begun = Instant::now();
        let rules = AnswerRules { format: &format, ..NO_RULES };
        let guided = PLAIN.grammars.guide(&rules);
        let compiled = begun.elapsed();
        let mut slowest = Duration::ZERO;
        let outcome = match guided {
            Err(error) => {
                assert!(
                    error.to_string().len() < 1500 && !error.to_string().contains('\n'),
                    "{error}"
                );
                error.to_string()
            }
            Ok(guided) => {
                let mut constraint = guided.constraint.unwrap();
                let picker = picker(&PLAIN, 1, 30);
                let mut end = "went on".to_owned();
                let mut tokens = Vec::new();
                while tokens.len() < 40 {
                    let mut masks = vec![0; WORDS];
                    let begun = Instant::now();
                    let masked = constraint.masks(&[], &mut masks);
                    slowest = slowest.max(begun.elapsed());
                    let step = masked.and_then(|_| {
                        tokens.push(picker.pick(&masks, &tokens));
                        let begun = Instant::now();
                        let step = constraint.advance(&tokens[tokens.len() - 1..]);
                        slowest = slowest.max(begun.elapsed());
                        step
                    });
                    match step {
                        Ok(false) => {}
                        Ok(true) => {
                            end = "ended".into();
                            break;
                        }
                        Err(error) => {
                            end = error;
                            break;
                        }
                    }
                }
                end
            }
        };
        println!("{name}: compiled in {compiled:?}, slowest step {slowest:?}: {outcome}");
        assert!(compiled < Duration::from_secs(15) && slowest < Duration::from_secs(3), "{name}");
    }
}

/// A schema that no JSON reader lets through, on a thread with little stack.
#[test]
fn a_schema_deeper_than_the_stack() {
    let work = || {
        let mut schema = json!({"type": "string"});
        for _ in 0..5000 {
            let mut outer = serde_json::Map::new();
            outer.insert("items".into(), schema);
            schema = Value::Object(outer);
        }
        let format = schema_format(schema, false);
        let rules = AnswerRules { format: &format, ..NO_RULES };
        std::thread::scope(|scope| {
            let small = std::thread::Builder::new().stack_size(256 << 10);
            let refused = small.spawn_scoped(scope, || refused(&PLAIN, &rules)).unwrap();
            assert!(refused.join().unwrap().contains("nest 64 deep"));
        });
    };
    // Dropping it takes stack as well.
    std::thread::Builder::new().stack_size(64 << 20).spawn(work).unwrap().join().unwrap();
}

#[test]
fn compiled_grammars_are_kept() {
    let format = schema_format(
        json!({"type": "object", "title": "kept", "properties": {"kept": {"enum": (0..3000).collect::<Vec<_>>()}}}),
        true,
    );
    let rules = AnswerRules { format: &format, ..NO_RULES };
    let time = || {
        let begun = Instant::now();
        assert!(PLAIN.grammars.guide(&rules).unwrap().constraint.is_some());
        begun.elapsed()
    };
    let (first, second) = (time(), (0..5).map(|_| time()).min().unwrap());
    assert!(second < first, "{first:?} {second:?}");
}
