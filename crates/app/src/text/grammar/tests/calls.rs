//! Calls that must be made, and calls in free text.

use super::*;

fn tools(strict: bool) -> Vec<Tool> {
    let tool = |name: &str, parameters: Value| Tool {
        name: name.into(),
        description: None,
        parameters,
        strict,
    };
    let first = json!({"type": "object", "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 12},
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
        "unit": {"enum": ["celsius", "kelvin", 5]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "place": {"$ref": "#/$defs/place"},
        "note": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    }, "required": ["city", "unit", "days"], "additionalProperties": false,
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number", "minimum": 0, "maximum": 9}},
        "required": ["lat"], "additionalProperties": false}}});
    vec![
        tool("weather", first),
        tool("now", json!({"type": "object", "properties": {}, "additionalProperties": false})),
    ]
}

/// Parses an answer and holds the calls to their schemas; gives their names and the text.
fn check_calls(model: &Model, tokens: &[u32], tools: &[Tool]) -> (Vec<String>, String) {
    let text = model.text(tokens);
    let mut parser = ToolParser::new(tools, "c").exact();
    let mut deltas = Vec::new();
    parser.push(&text, &mut deltas);
    parser.finish(&mut deltas);
    let (mut names, mut arguments, mut shown) = (Vec::new(), String::new(), String::new());
    for delta in deltas {
        match delta {
            ToolDelta::Text(text) => shown += &text,
            ToolDelta::Begin { name, .. } => names.push(name),
            ToolDelta::Arguments { fragment, .. } => arguments += &fragment,
            ToolDelta::End { complete, .. } => {
                assert!(complete, "{text}");
                let tool = tools.iter().find(|tool| Some(&tool.name) == names.last()).unwrap();
                let value: Value = serde_json::from_str(&arguments).unwrap();
                let valid = validator(&tool.parameters).is_valid(&value);
                assert!(valid, "{value} of {text}");
                arguments.clear();
            }
        }
    }
    (names, shown)
}

/// TC-10: required and named are obeyed, in both formats, with thinking, one call or several.
#[test]
fn calls_that_must_be_made() {
    let tools = tools(true);
    let named = [ToolChoice::Named("now".into()), ToolChoice::Named("weather".into())];
    for (number, choice) in [&ToolChoice::Required, &named[0], &named[1]].into_iter().enumerate() {
        for format in [ToolFormat::QwenXml, ToolFormat::HermesJson] {
            for seed in 0..6u64 {
                let model = if seed % 2 == 0 { &*PLAIN } else { &*TAGGED };
                let parallel = seed % 3 == 0;
                let (start, reasoning_budget) =
                    if seed < 3 { (Start::Answer, None) } else { (Start::Reasoning, Some(4)) };
                let rules = AnswerRules {
                    start,
                    reasoning_budget,
                    tools: &tools,
                    choice,
                    parallel,
                    tool_format: Some(format),
                    ..NO_RULES
                };
                let guided = model.grammars.guide(&rules).unwrap();
                assert!(guided.exact_calls && guided.notes.is_empty(), "{:?}", guided.notes);
                let mut tokens = answer(model, &rules, &picker(model, seed, 40));
                if start == Start::Reasoning {
                    let text = model.text(&tokens);
                    let after = text.find(CLOSE).unwrap() + CLOSE.len();
                    tokens = model
                        .tok
                        .encode(&crate::text::guard::Guarded::trusted(&text[after..]))
                        .unwrap();
                }
                let (names, shown) = check_calls(model, &tokens, &tools);
                assert_eq!(shown, "");
                assert!(if parallel { !names.is_empty() } else { names.len() == 1 }, "{names:?}");
                if number > 0 {
                    let ToolChoice::Named(only) = choice else { unreachable!() };
                    assert!(names.iter().all(|name| name == only), "{names:?}");
                }
            }
        }
    }
}

/// TC-10: what can't be is refused, `none` forbids the tag, and `auto` alone asks nothing.
#[test]
fn tool_choices() {
    let tools = tools(false);
    let rules = AnswerRules { tools: &tools, ..NO_RULES };
    let missing = ToolChoice::Named("later".into());
    assert!(refused(&PLAIN, &AnswerRules { choice: &missing, ..rules }).contains("\"later\""));
    let required = AnswerRules { choice: &ToolChoice::Required, ..rules };
    assert!(refused(&PLAIN, &AnswerRules { tools: &[], ..required }).contains("no tools"));
    assert!(refused(&PLAIN, &AnswerRules { tool_format: None, ..required }).contains("template"));
    assert!(PLAIN.grammars.guide(&rules).unwrap().constraint.is_none());
    let none = AnswerRules { choice: &ToolChoice::None, ..rules };
    let mut constraint = TAGGED.grammars.guide(&none).unwrap().constraint.unwrap();
    let mut masks = vec![0; WORDS];
    assert_eq!(constraint.masks(&[], &mut masks), Ok(1));
    assert!(!allows(&masks, 49_154) && allows(&masks, 49_153) && allows(&masks, END));
    // Rows without a token are never allowed.
    assert!(!allows(&masks, 49_160) && !allows(&masks, 49_279));
}

/// Strict tools and single calls in an answer that is free otherwise.
#[test]
fn calls_in_free_text() {
    for (model, tool_format) in [(&*PLAIN, ToolFormat::QwenXml), (&*TAGGED, ToolFormat::HermesJson)]
    {
        let open = model.tok.encode(&crate::text::guard::Guarded::trusted(CALL_OPEN)).unwrap();
        let mut script = model.tok.encode_ordinary("I look < and <tool ").unwrap();
        script.extend(&open);
        let tools = tools(true);
        for parallel in [true, false] {
            let rules =
                AnswerRules { tools: &tools, parallel, tool_format: Some(tool_format), ..NO_RULES };
            assert!(model.grammars.guide(&rules).unwrap().exact_calls);
            for seed in 0..4 {
                let picker = Picker { model, seed, patience: 40, script: &script };
                let tokens = answer(model, &rules, &picker);
                let (names, shown) = check_calls(model, &tokens, &tools);
                assert!(shown.starts_with("I look < and <tool"), "{shown}");
                assert!(if parallel { !names.is_empty() } else { names.len() == 1 }, "{names:?}");
                assert!(parallel || shown == "I look < and <tool", "{shown}");
            }
        }
    }
}

#[test]
fn a_format_and_tools_together() {
    let format = schema_format(
        json!({"type": "object", "properties": {"n": {"type": "integer"}},
        "required": ["n"], "additionalProperties": false}),
        true,
    );
    let tools = tools(false);
    let rules = AnswerRules { tools: &tools, format: &format, ..NO_RULES };
    let (mut documents, mut calls) = (0, 0);
    for seed in 0..12 {
        let tokens = answer(&PLAIN, &rules, &picker(&PLAIN, seed, 30));
        if PLAIN.text(&tokens).starts_with('{') {
            assert!(json_of(&PLAIN, &tokens)["n"].is_i64());
            documents += 1;
        } else {
            assert_eq!(check_calls(&PLAIN, &tokens, &tools).1, "");
            calls += 1;
        }
    }
    assert!(documents > 0 && calls > 0, "{documents} documents, {calls} calls");
}

/// SO-08: what descriptions say has no effect.
#[test]
fn descriptions_change_nothing() {
    let texts = samples(
        50,
        proptest::string::string_regex("[\"'\\\\{}\\[\\]()<>\n\t/%@&~a-c漢🦀 ]{0,40}").unwrap(),
    );
    let mut first = None;
    for text in texts {
        let mut tools = tools(true);
        tools[0].description = Some(text.clone());
        tools[0].parameters["description"] = text.clone().into();
        tools[0].parameters["properties"]["tags"]["description"] = text.clone().into();
        tools[0].parameters["properties"]["city"]["title"] = text.into();
        let rules = AnswerRules { tools: &tools, choice: &ToolChoice::Required, ..NO_RULES };
        let mut guide = PLAIN.grammars.guide(&rules).unwrap().constraint.unwrap();
        let (tokens, ended) =
            run(guide.as_mut(), &picker(&PLAIN, 7, 40), &Proposals::None, 300).unwrap();
        assert!(ended);
        assert_eq!(*first.get_or_insert(tokens.clone()), tokens);
    }
}
