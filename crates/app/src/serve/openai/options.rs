//! Options that chat and completion requests share, and how they are read.

use std::collections::BTreeMap;

use engine::SamplingOptions;
use serde::{Deserialize, Deserializer};
use utoipa::ToSchema;

use crate::serve::errors::ApiError;

/// Declares a request with the options that all generating requests of this API share.
macro_rules! generating_request {
    ($(#[$meta:meta])* pub struct $name:ident { $($own:tt)* }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, serde::Deserialize, utoipa::ToSchema)]
        pub struct $name {
            $($own)*
            /// Randomness; 0 always takes the most likely token. Default: the model's.
            pub temperature: Option<f32>,
            /// Keeps the most likely tokens that make up this much of the probability.
            pub top_p: Option<f32>,
            /// Keeps this many most likely tokens; 0 keeps all.
            pub top_k: Option<i64>,
            /// Keeps tokens at least this fraction as likely as the best.
            pub min_p: Option<f32>,
            /// Penalty on tokens that the answer contains.
            pub presence_penalty: Option<f32>,
            /// Penalty on tokens for each time the answer contains them.
            pub frequency_penalty: Option<f32>,
            /// Penalty on tokens that prompt or answer contain, as a factor.
            #[serde(alias = "repeat_penalty")]
            pub repetition_penalty: Option<f32>,
            /// Makes the answer repeatable; -1 is no seed.
            pub seed: Option<i64>,
            /// Added to the logits of tokens, by id.
            pub logit_bias: Option<$crate::serve::openai::options::LogitBias>,
            /// Texts that end the answer and are left out of it.
            pub stop: Option<$crate::serve::openai::options::Stop>,
            /// How many answers; each streams under its own index.
            pub n: Option<u32>,
            /// Whether the answer comes piece by piece.
            pub stream: Option<bool>,
            /// How it streams.
            pub stream_options: Option<$crate::serve::openai::options::StreamOptions>,
            /// Events that say how far the prompt has come.
            pub return_progress: Option<bool>,
            /// Whether state of earlier requests may be reused.
            pub cache_prompt: Option<bool>,
            /// Who asks. Requests of one user are traced together.
            pub user: Option<String>,
            /// What the requests of one conversation have in common.
            pub prompt_cache_key: Option<String>,
            /// The most seconds that the request may take.
            pub timeout: Option<f64>,
        }

        impl $name {
            /// Sampling options in the engine's terms.
            fn sampling(&self) -> Result<engine::SamplingOptions, $crate::serve::errors::ApiError> {
                $crate::serve::openai::options::Sampling {
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    repetition_penalty: self.repetition_penalty,
                    seed: self.seed,
                    logit_bias: self.logit_bias.as_ref(),
                }
                .options()
            }
        }
    };
}
pub(super) use generating_request;

/// Sampling options as they are sent.
#[derive(Clone, Copy, Debug)]
pub struct Sampling<'a> {
    /// As sent.
    pub temperature: Option<f32>,
    /// As sent.
    pub top_p: Option<f32>,
    /// As sent; negative is off.
    pub top_k: Option<i64>,
    /// As sent.
    pub min_p: Option<f32>,
    /// As sent.
    pub presence_penalty: Option<f32>,
    /// As sent.
    pub frequency_penalty: Option<f32>,
    /// As sent.
    pub repetition_penalty: Option<f32>,
    /// As sent; -1 is none.
    pub seed: Option<i64>,
    /// As sent.
    pub logit_bias: Option<&'a LogitBias>,
}

impl Sampling<'_> {
    /// The same in the engine's terms.
    ///
    /// # Errors
    /// If a bias is for no token.
    pub fn options(self) -> Result<SamplingOptions, ApiError> {
        let biases = self.logit_bias.iter().flat_map(|biases| &biases.0);
        let bias = |(token, bias): (&String, &f32)| match token.parse::<u32>() {
            Ok(token) => Ok((token, *bias)),
            Err(_) => {
                let what = format!("logit_bias: {token:?} is not a token id");
                Err(ApiError::invalid("logit_bias", what))
            }
        };
        Ok(SamplingOptions {
            temperature: self.temperature,
            // What is more than fits is more than any vocabulary, and keeps all.
            top_k: self.top_k.map(|k| u32::try_from(k.max(0)).unwrap_or(0)),
            top_p: self.top_p,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            logit_bias: biases.map(bias).collect::<Result<_, _>>()?,
            seed: seed(self.seed),
            rule: None,
        })
    }
}

/// The seed that was sent: −1 is none, as programs that know llama.cpp mean it.
pub fn seed(seed: Option<i64>) -> Option<u64> {
    seed.filter(|&seed| seed != -1).map(i64::cast_unsigned)
}

/// What is added to the logits of tokens, by id.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct LogitBias(pub BTreeMap<String, f32>);

/// How an answer streams.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct StreamOptions {
    /// Whether a last chunk tells the usage.
    pub include_usage: Option<bool>,
    /// Accepted; nothing is obfuscated on one's own machine.
    pub include_obfuscation: Option<bool>,
}

/// One stop text or several.
#[derive(Clone, Debug, ToSchema)]
#[schema(value_type = OneOrMany)]
pub struct Stop(pub Vec<String>);

/// A text or a list of texts.
#[derive(ToSchema, Deserialize)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes the form for the OpenAPI document")]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Stop, D::Error> {
        deserializer.deserialize_any(StringOrList).map(Stop)
    }
}

/// Reads a text or a list of texts; unlike an untagged enum it says what is wrong.
struct StringOrList;

impl<'de> serde::de::Visitor<'de> for StringOrList {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a string or a list of strings")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Vec<String>, E> {
        Ok(vec![text.to_owned()])
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<String>, A::Error> {
        let mut texts = Vec::new();
        while let Some(text) = seq.next_element()? {
            texts.push(text);
        }
        Ok(texts)
    }
}

/// A limit of tokens as sent: −1 is none.
///
/// # Errors
/// If it is 0 or another negative number.
pub fn token_limit(name: &'static str, limit: Option<i64>) -> Result<Option<usize>, ApiError> {
    match limit {
        None | Some(-1) => Ok(None),
        Some(limit) if limit > 0 => Ok(Some(usize::try_from(limit).unwrap_or(usize::MAX))),
        Some(limit) => Err(ApiError::invalid(name, format!("{name} is {limit}; use 1 or more"))),
    }
}

/// A time limit as sent, in seconds.
///
/// # Errors
/// If it is no positive number.
pub fn time_limit(timeout: Option<f64>) -> Result<Option<std::time::Duration>, ApiError> {
    let Some(seconds) = timeout else { return Ok(None) };
    match std::time::Duration::try_from_secs_f64(seconds) {
        Ok(limit) if !limit.is_zero() => Ok(Some(limit)),
        _ => {
            Err(ApiError::invalid("timeout", format!("timeout is {seconds}; use seconds above 0")))
        }
    }
}
