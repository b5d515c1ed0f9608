use super::*;
use serde_json::json;

/// The moment that `make_renders.py` uses.
fn fixed_clock() -> Zoned {
    jiff::civil::date(2026, 11, 5).at(14, 3, 9, 0).to_zoned(jiff::tz::TimeZone::UTC).unwrap()
}

fn parse(source: &str) -> Result<Template, TemplateError> {
    Template::parse("here", source, fixed_clock)
}

fn render(source: &str, context: Json) -> Result<String, TemplateError> {
    parse(source)?.render(&context)
}

#[test]
fn renders_as_jinja2_does() {
    let template = parse(include_str!("../../tests/data/qwen_like.jinja")).unwrap();
    let cases: Vec<Json> =
        serde_json::from_str(include_str!("../../tests/data/renders.json")).unwrap();
    assert!(cases.len() >= 13);
    for case in cases {
        let mut context = json!({"tools": null, "documents": null, "add_generation_prompt": true});
        let given = case.as_object().unwrap().clone();
        context.as_object_mut().unwrap().extend(given);
        match template.render(&context) {
            Ok(text) => assert_eq!(Some(text.as_str()), case["expected"].as_str(), "{case}"),
            Err(TemplateError::Refused(why)) => {
                assert_eq!(Some(why.as_str()), case["refused"].as_str(), "{case}");
            }
            Err(other) => panic!("{}: {other}", case["name"]),
        }
    }
}

#[test]
fn the_bundled_template() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/th-tiny");
    let templates = Templates::open(&folder, fixed_clock).unwrap();
    let context = json!({
        "messages": [{"role": "user", "content": "Hi  "}],
        "add_generation_prompt": true,
    });
    assert_eq!(
        templates.choose(true).unwrap().render(&context).unwrap(),
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging \
         Face<|im_end|>\n<|im_start|>user\nHi  <|im_end|>\n<|im_start|>assistant\n"
    );
}

#[test]
fn a_source_loses_one_final_line_break() {
    assert_eq!(render("a\n\n", json!({})).unwrap(), "a\n");
}

#[test]
fn generation_tags_are_transparent() {
    for (source, expected) in [
        ("a {% generation %}\nb{% endgeneration %} c", "a b c"),
        ("a {%- generation -%}\n b {%- endgeneration +%}\n c", "ab\n c"),
        ("{{ '{% generation %}' }}", "{% if true %}"),
        ("{% set x = '%}' %}{{ x }}{%generation%}{%endgeneration%}", "%}"),
    ] {
        assert_eq!(render(source, json!({})).unwrap(), expected, "{source}");
    }
}

#[test]
fn times_and_python_methods() {
    let source = "{{ strftime_now('%d %b %Y, %H:%M') }}|{{ ' a b '.strip().split(' ')|join('+') }}|\
                  {{ {'k': 1}.get('x', 'none') }}|{% for k, v in {'a': [1]}.items() %}{{ k }}{{ v }}{% endfor %}";
    assert_eq!(render(source, json!({})).unwrap(), "05 Nov 2026, 14:03|a+b|none|a[1]");
}

#[test]
fn a_refusal_keeps_its_words() {
    let error = render("{{ raise_exception('No\nsystem  message.') }}", json!({})).unwrap_err();
    assert!(matches!(&error, TemplateError::Refused(why) if why == "No\nsystem  message."));
    // Also from inside a macro and a filter block.
    let source = "{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m()|trim }}";
    let error = render(source, json!({})).unwrap_err();
    assert!(matches!(&error, TemplateError::Refused(why) if why == "deep"), "{error}");
}

#[test]
fn failures_name_file_and_line_on_one_line() {
    for source in [
        "a\n{% if %}",
        "a\n{{ x.y.z }}",
        "a\n{{ x|nofilter }}",
        "a\n{% for x in 3 %}{% endfor %}",
        "a\n{{ strftime_now('%!') }}",
        "a\n{% include 'other' %}",
    ] {
        let error = render(source, json!({})).unwrap_err().to_string();
        assert!(error.starts_with("here: ") && error.contains(":2)"), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn hostile_templates_run_out_of_fuel() {
    // Without the limit none of these would end.
    for source in [
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}",
        "{% set ns = namespace(s='aaaaaaaaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s|tojson }}",
    ] {
        let error = render(source, json!({})).map(|text| text.len()).unwrap_err();
        assert!(matches!(error, TemplateError::Broken { .. }), "{error}");
    }
}

#[test]
fn a_loop_may_nest_a_value_for_as_long_as_fuel_lasts() {
    let nested = |loops: usize, more: &str, then: &str| {
        let source = format!(
            "{{% set ns = namespace(s=1, t=1) %}}{{% for i in range({loops}) %}}{{% for m in range(1000) %}}\
             {{% set ns.s = [ns.s] %}}{more}{{% endfor %}}{{% endfor %}}{then}"
        );
        parse(&source).unwrap().render(&json!({})).map_err(|error| error.to_string())
    };
    // Dropped, printed, compared and ordered.
    assert_eq!(nested(850, "", ""), Ok(String::new()));
    assert_eq!(nested(850, "", "{{ ns.s }}").unwrap().len(), 2 * 850_000 + 1);
    let both = "{% set ns.t = [ns.t] %}";
    assert_eq!(
        nested(500, both, "{{ ns.s == ns.t }} {{ [ns.s, ns.t]|sort|length }}").unwrap(),
        "True 2"
    );
    for dear in ["{{ messages|pprint }}", "{{ debug() }}"] {
        assert!(parse(dear).and_then(|template| template.render(&json!({}))).is_err(), "{dear}");
    }
}

#[test]
fn a_long_conversation_has_fuel_enough() {
    let template = parse(include_str!("../../tests/data/qwen_like.jinja")).unwrap();
    let turn = |i: usize| {
        let role = if i.is_multiple_of(2) { "user" } else { "assistant" };
        json!({"role": role, "content": "word ".repeat(60)})
    };
    let messages: Vec<Json> = (0..10_000).map(turn).collect();
    let text = template.render(&json!({"messages": messages})).unwrap();
    assert!(text.len() > 3_000_000);
}

#[test]
fn templates_by_name() {
    let choose = |field: Json, tools: bool| {
        let sources = sources(&field).unwrap();
        let templates = Templates::parse("here", &sources, fixed_clock).unwrap();
        templates.choose(tools).map(|t| t.source().to_owned())
    };
    let list = json!([
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T"},
    ]);
    assert_eq!(choose(list.clone(), false).as_deref(), Some("D"));
    assert_eq!(choose(list, true).as_deref(), Some("T"));
    assert_eq!(choose(json!("S"), true).as_deref(), Some("S"));
    assert_eq!(choose(json!([{"name": "rag", "template": "R"}]), false).as_deref(), Some("R"));
    assert_eq!(choose(Json::Null, false), None);
    assert!(sources(&json!([{"name": "x"}])).unwrap_err().contains("chat_template[0]"));
    assert!(sources(&json!(3)).is_err());
}
