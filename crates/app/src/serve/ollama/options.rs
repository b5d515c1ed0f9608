//! Options that chat and generate requests share.

use engine::SamplingOptions;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::serve::errors::ApiError;
use crate::serve::generation::{Generation, Input, Limits, Reasoning};
use crate::serve::openai::options::{Sampling, Stop};
use crate::text::grammar::ResponseFormat;
use engine::service::{CachePolicy, Priority};

/// Sampling options and limits.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct Options {
    /// Randomness.
    pub temperature: Option<f32>,
    /// Keeps this many most likely tokens.
    pub top_k: Option<i64>,
    /// Keeps the most likely tokens that make up this much of the probability.
    pub top_p: Option<f32>,
    /// Keeps tokens at least this fraction as likely as the best.
    pub min_p: Option<f32>,
    /// Penalty on tokens that prompt or answer contain, as a factor.
    pub repeat_penalty: Option<f32>,
    /// Penalty on tokens that the answer contains.
    pub presence_penalty: Option<f32>,
    /// Penalty on tokens for each time the answer contains them.
    pub frequency_penalty: Option<f32>,
    /// Makes the answer repeatable.
    pub seed: Option<i64>,
    /// Texts that end the answer.
    pub stop: Option<Stop>,
    /// The most tokens; negative is no limit.
    pub num_predict: Option<i64>,
    /// Refused unless 0.
    pub mirostat: Option<f32>,
    /// Refused unless 1.
    pub typical_p: Option<f32>,
    /// Refused unless 1.
    pub tfs_z: Option<f32>,
}

impl Options {
    /// A generation with these options.
    ///
    /// # Errors
    /// If one can't be honoured.
    pub fn generation(&self, input: Input, format: ResponseFormat) -> Result<Generation, ApiError> {
        let refused = [
            ("options.mirostat", self.mirostat, 0.0),
            ("options.typical_p", self.typical_p, 1.0),
            ("options.tfs_z", self.tfs_z, 1.0),
        ];
        for (name, value, neutral) in refused {
            if value.is_some_and(|value| value != neutral) {
                return Err(ApiError::unsupported(
                    name,
                    format!("{name} is not supported; leave it out"),
                ));
            }
        }
        let max_tokens = match self.num_predict {
            Some(limit) if limit >= 0 => Some(usize::try_from(limit).unwrap_or(usize::MAX)),
            _ => None,
        };
        Ok(Generation {
            input,
            further: Vec::new(),
            choices: 1,
            sampling: self.sampling()?,
            stop: self.stop.as_ref().map(|stop| stop.0.clone()).unwrap_or_default(),
            limits: Limits { max_tokens, timeout: None },
            logprobs: None,
            response_format: format,
            cache: CachePolicy::Shared,
            priority: Priority::Normal,
            draft: true,
            keep_special: false,
        })
    }

    fn sampling(&self) -> Result<SamplingOptions, ApiError> {
        Sampling {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repeat_penalty,
            seed: self.seed,
            logit_bias: None,
        }
        .options()
    }
}

/// `"json"`, or a JSON schema.
///
/// # Errors
/// If it is neither.
pub fn format(format: Option<&Value>) -> Result<ResponseFormat, ApiError> {
    match format {
        None | Some(Value::Null) => Ok(ResponseFormat::Text),
        Some(Value::String(word)) if word.is_empty() => Ok(ResponseFormat::Text),
        Some(Value::String(word)) if word == "json" => Ok(ResponseFormat::JsonObject),
        Some(schema @ Value::Object(_)) => Ok(ResponseFormat::JsonSchema {
            name: "response".into(),
            schema: schema.clone(),
            strict: false,
        }),
        Some(other) => {
            let what = format!("format is {other}; use \"json\" or a JSON schema");
            Err(ApiError::invalid("format", what))
        }
    }
}

/// Whether to think: true, false, or a level.
///
/// # Errors
/// If it is none of them.
pub fn reasoning(think: Option<&Value>) -> Result<Reasoning, ApiError> {
    let reasoning = |enabled, effort| Reasoning { enabled, effort, budget: None };
    match think {
        None | Some(Value::Null) => Ok(Reasoning::default()),
        Some(Value::Bool(on)) => Ok(reasoning(Some(*on), None)),
        Some(Value::String(level)) => Ok(reasoning(Some(true), Some(level.clone()))),
        Some(other) => {
            Err(ApiError::invalid("think", format!("think is {other}; use true, false or a level")))
        }
    }
}
