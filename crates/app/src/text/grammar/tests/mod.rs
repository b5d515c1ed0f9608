//! A scripted engine that obeys constraints, and models that take what is allowed.

use super::*;
use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use proptest::prelude::Strategy;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::vocabulary::allows;
use crate::text::detokenize::decode;
use crate::text::stream::{OutputStream, StreamOptions};
use crate::text::tokenizer::Tokenizer;
use crate::text::tools::{ToolDelta, ToolParser};

mod calls;
mod formats;
mod hostile;

const END: u32 = 2;
const WORDS: usize = 49_280 / 32;

/// The bundled tokenizer, as it is and with tokens for all tags, and its grammars.
struct Model {
    tok: Arc<Tokenizer>,
    grammars: Grammars,
}

static PLAIN: LazyLock<Model> = LazyLock::new(|| Model::new(&[]));
static TAGGED: LazyLock<Model> =
    LazyLock::new(|| Model::new(&[OPEN, CLOSE, CALL_OPEN, CALL_CLOSE]));

impl Model {
    fn new(tags: &[&str]) -> Model {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/th-tiny/tokenizer.json");
        let mut json: Value =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        for (id, content) in (49_152..).zip(tags) {
            let token = json!({"id": id, "content": content, "special": false});
            json["added_tokens"].as_array_mut().unwrap().push(token);
        }
        let tok = Arc::new(Tokenizer::from_json("t", json, None).unwrap());
        let grammars = Grammars::new(tok.clone(), &[END, 0]).unwrap();
        Model { tok, grammars }
    }

    fn text(&self, tokens: &[u32]) -> String {
        decode(self.tok.as_ref(), tokens, false)
    }
}

const NO_RULES: AnswerRules<'static> = AnswerRules {
    start: Start::Answer,
    reasoning_budget: None,
    format: &ResponseFormat::Text,
    tools: &[],
    choice: &ToolChoice::Auto,
    parallel: true,
    tool_format: Some(ToolFormat::QwenXml),
};

fn schema_format(schema: Value, strict: bool) -> ResponseFormat {
    ResponseFormat::JsonSchema { name: "s".into(), schema, strict }
}

// ---------------------------------------------------------------------------------------------
// A scripted engine

/// SplitMix64 of a few numbers.
fn hash(parts: &[u64]) -> u64 {
    parts.iter().fold(0x9E37_79B9_7F4A_7C15, |state, part| {
        let mut z = state.wrapping_add(*part).wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    })
}

/// A model that takes any allowed token, and after a while one that leads to an end.
struct Picker<'a> {
    model: &'a Model,
    seed: u64,
    /// The position from which it looks for an end.
    patience: usize,
    /// Tokens that it takes at their positions if allowed.
    script: &'a [u32],
}

impl Picker<'_> {
    fn pick(&self, mask: &[u32], before: &[u32]) -> u32 {
        let position = before.len();
        if let Some(&wanted) = self.script.get(position)
            && allows(mask, wanted)
        {
            return wanted;
        }
        let allowed: Vec<u32> =
            (0..32 * mask.len() as u32).filter(|&id| allows(mask, id)).collect();
        let random = allowed[hash(&[self.seed, position as u64]) as usize % allowed.len()];
        let late = position >= self.patience;
        match late.then(|| self.closing(&allowed, before)).flatten() {
            Some(token) => token,
            None => random,
        }
    }

    /// An allowed token that leads to an end: of the answer, of something in JSON or, by turns, of a
    /// parameter in XML.
    fn closing(&self, allowed: &[u32], before: &[u32]) -> Option<u32> {
        let tok = self.model.tok.as_ref();
        let is =
            |text: &str| allowed.iter().copied().find(|&id| tok.token_bytes(id) == text.as_bytes());
        let tag = "</parameter>";
        let next = || {
            let text = self.model.text(&before[before.len().saturating_sub(12)..]);
            let begun = (0..tag.len()).rev().find(|&len| text.ends_with(&tag[..len]))?;
            let piece = |id: &u32| {
                let bytes = tok.token_bytes(*id);
                !bytes.is_empty() && tag.as_bytes()[begun..].starts_with(bytes)
            };
            allowed.iter().copied().filter(piece).max_by_key(|&id| tok.token_bytes(id).len())
        };
        let end = allowed.contains(&END).then_some(END);
        match before.len() / 8 % 2 {
            0 => end.or_else(|| is("\"")).or_else(|| is("}")).or_else(|| is("]")),
            _ => end.or_else(next),
        }
    }
}

/// What the rounds propose.
enum Proposals<'a> {
    None,
    /// What will be emitted.
    Right(&'a [u32]),
    /// Mostly that.
    Mixed(&'a [u32]),
    Random,
}

const BLOCK: usize = 7;

impl Proposals<'_> {
    fn at(&self, seed: u64, position: usize) -> Vec<u32> {
        let random = |i: usize| (hash(&[seed, 77, (position + i) as u64]) % 49_160) as u32;
        let known = |tokens: &[u32]| tokens.iter().skip(position).take(BLOCK).copied().collect();
        match self {
            Proposals::None => Vec::new(),
            Proposals::Right(tokens) => known(tokens),
            Proposals::Random => (0..BLOCK).map(random).collect(),
            Proposals::Mixed(tokens) => {
                let mut proposals: Vec<u32> = known(tokens);
                if let Some(wrong) = proposals.get_mut(position % BLOCK) {
                    *wrong = random(0);
                }
                proposals
            }
        }
    }
}

/// Runs an answer as the engine does: proposals, masks, what is accepted, what is emitted.
fn run(
    constraint: &mut dyn Constraint,
    picker: &Picker<'_>,
    proposals: &Proposals<'_>,
    most: usize,
) -> Result<(Vec<u32>, bool), String> {
    let mut tokens = Vec::new();
    while tokens.len() < most {
        let proposed = proposals.at(picker.seed, tokens.len());
        let mut masks = vec![u32::MAX; (proposed.len() + 1) * WORDS];
        let count = constraint.masks(&proposed, &mut masks)?;
        assert!((1..=proposed.len() + 1).contains(&count));
        for (row, &token) in proposed.iter().enumerate().take(count) {
            let allowed = allows(&masks[row * WORDS..][..WORDS], token);
            assert_eq!(allowed, row + 1 < count, "row {row} of {count}");
        }
        let begun = tokens.len();
        for row in 0..count {
            let token = picker.pick(&masks[row * WORDS..][..WORDS], &tokens);
            tokens.push(token);
            if token == END || token == 0 || proposed.get(row) != Some(&token) {
                break;
            }
        }
        let complete = constraint.advance(&tokens[begun..])?;
        if complete || matches!(tokens.last(), Some(&(END | 0))) {
            return Ok((tokens, true));
        }
    }
    Ok((tokens, false))
}

/// The tokens of an answer, which must be the same text whatever is proposed.
fn answer(model: &Model, rules: &AnswerRules<'_>, picker: &Picker<'_>) -> Vec<u32> {
    let guide = || model.grammars.guide(rules).unwrap().constraint.unwrap();
    let most = picker.patience + 300;
    let (tokens, ended) = run(guide().as_mut(), picker, &Proposals::None, most).unwrap();
    assert!(ended, "no end: {:?}", model.text(&tokens));
    for proposals in [Proposals::Right(&tokens), Proposals::Mixed(&tokens), Proposals::Random] {
        let (again, ended) = run(guide().as_mut(), picker, &proposals, most).unwrap();
        assert!(ended);
        assert_eq!(model.text(&again), model.text(&tokens));
    }
    tokens
}

fn json_of(model: &Model, tokens: &[u32]) -> Value {
    let text = model.text(tokens);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"))
}

fn picker(model: &Model, seed: u64, patience: usize) -> Picker<'_> {
    Picker { model, seed, patience, script: &[] }
}

fn validator(schema: &Value) -> jsonschema::Validator {
    jsonschema::options().should_validate_formats(true).build(schema).unwrap()
}

fn refused(model: &Model, rules: &AnswerRules<'_>) -> String {
    model.grammars.guide(rules).err().expect("refused").to_string()
}

fn samples<S: Strategy>(count: usize, strategy: S) -> Vec<S::Value> {
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    (0..count).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect()
}
