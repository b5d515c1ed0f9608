//! Sampling options of a request: defaults, validation, and the parameter block on the device.

use std::hash::{BuildHasher, Hasher, RandomState};

use ops::{LogitBias, MAX_STOPS, SamplerParams};

pub use ops::Rule;

/// The most logit biases of a request: what a slot's buffer on the device holds.
pub const MAX_LOGIT_BIASES: usize = 1024;

/// Temperatures below this count as 0.
pub const MIN_TEMPERATURE: f32 = 1e-5;

/// What the model recommends: the sampling fields of its generation config.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// `Some(false)`: greedy unless a request asks for a temperature.
    pub do_sample: Option<bool>,
    /// Default 1.
    pub temperature: Option<f32>,
    /// Default 0: off.
    pub top_k: Option<u32>,
    /// Default 1: off.
    pub top_p: Option<f32>,
    /// Default 0: off.
    pub min_p: Option<f32>,
    /// Default 0.
    pub presence_penalty: Option<f32>,
    /// Default 0.
    pub frequency_penalty: Option<f32>,
    /// Default 1: off.
    pub repetition_penalty: Option<f32>,
}

/// What a request asks for. `None` takes the model's default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingOptions {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Keeps this many likeliest tokens; 0 keeps all, and so does anything from the vocabulary's
    /// size on.
    pub top_k: Option<u32>,
    /// Keeps the likeliest tokens until they hold this share, of what the other cuts left.
    pub top_p: Option<f32>,
    /// Keeps tokens at least this likely, relative to the likeliest.
    pub min_p: Option<f32>,
    /// Subtracted from the logits of tokens in the output.
    pub presence_penalty: Option<f32>,
    /// Subtracted once per occurrence in the output.
    pub frequency_penalty: Option<f32>,
    /// Divides (multiplies, if negative) the logits of tokens in prompt and output.
    pub repetition_penalty: Option<f32>,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Makes the output repeatable.
    pub seed: Option<u64>,
    /// How proposals are accepted. Default: greedy at temperature 0, else
    /// [`Rule::Invariant`] with a seed, so that the text does not depend on the drafter, and
    /// [`Rule::Block`] without.
    pub rule: Option<Rule>,
}

/// An option out of range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{option} is {value}; it must be {expected}")]
pub struct SamplingError {
    /// The option's name, as in requests.
    pub option: &'static str,
    /// What was given.
    pub value: String,
    /// What would do.
    pub expected: String,
}

/// Options with every default filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampler {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// 0 is off.
    pub presence_penalty: f32,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// By ascending token, each once.
    pub logit_bias: Vec<LogitBias>,
    /// The request's, or a fresh one. Reported, so that any answer can be repeated.
    pub seed: u64,
    /// Whether the request chose the seed, to get the same text again.
    pub seeded: bool,
    /// How proposals are accepted.
    pub rule: Rule,
    /// Options of the request that change nothing here, to be named in the answer.
    pub without_effect: Vec<&'static str>,
}

/// What the scheduler adds to a sampler's parameter block.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bounds<'a> {
    /// Ids that end the lane. The device knows the first [`MAX_STOPS`]; the host cuts at any others.
    pub stops: &'a [u32],
    /// No token at this absolute position or beyond.
    pub end: u32,
    /// Whether to report log-probabilities.
    pub logprobs: bool,
    /// Whether a grammar masks the rows.
    pub masked: bool,
}

/// A seed that nobody chose.
pub fn fresh_seed() -> u64 {
    // The standard library's source of randomness for hash maps, keyed by the operating system. 53 bits, which
    // every client's numbers hold: whoever is told the seed can send it again.
    RandomState::new().build_hasher().finish() >> 11
}

impl SamplingOptions {
    /// Checks the options and fills in the defaults, for a vocabulary of `vocab` real ids.
    pub fn resolve(
        &self,
        defaults: &SamplingDefaults,
        vocab: usize,
    ) -> Result<Sampler, SamplingError> {
        let greedy_default = defaults.do_sample == Some(false);
        let temperature =
            self.temperature.or(if greedy_default { Some(0.0) } else { defaults.temperature });
        let temperature = ranged("temperature", temperature.unwrap_or(1.0), 0.0, 100.0)?;
        let temperature = if temperature < MIN_TEMPERATURE { 0.0 } else { temperature };
        let number = |option, asked: Option<f32>, default: Option<f32>, neutral, low, high| {
            ranged(option, asked.or(default).unwrap_or(neutral), low, high)
        };
        let top_k = self.top_k.or(defaults.top_k).unwrap_or(0);
        let rule = self.rule_at(temperature)?;
        Ok(Sampler {
            temperature,
            top_k: if top_k as usize >= vocab { 0 } else { top_k },
            top_p: number("top_p", self.top_p, defaults.top_p, 1.0, 0.0, 1.0)?,
            min_p: number("min_p", self.min_p, defaults.min_p, 0.0, 0.0, 1.0)?,
            presence_penalty: number(
                "presence_penalty",
                self.presence_penalty,
                defaults.presence_penalty,
                0.0,
                -100.0,
                100.0,
            )?,
            frequency_penalty: number(
                "frequency_penalty",
                self.frequency_penalty,
                defaults.frequency_penalty,
                0.0,
                -100.0,
                100.0,
            )?,
            repetition_penalty: number(
                "repetition_penalty",
                self.repetition_penalty,
                defaults.repetition_penalty,
                1.0,
                0.01,
                100.0,
            )?,
            logit_bias: biases(&self.logit_bias, vocab)?,
            seed: self.seed.unwrap_or_else(fresh_seed),
            seeded: self.seed.is_some(),
            rule,
            without_effect: self.without_effect(rule),
        })
    }

    fn rule_at(&self, temperature: f32) -> Result<Rule, SamplingError> {
        match self.rule {
            _ if temperature == 0.0 => Ok(Rule::Greedy),
            Some(Rule::Greedy) => Err(SamplingError {
                option: "temperature",
                value: temperature.to_string(),
                expected: "0 with the acceptance rule `greedy`".to_owned(),
            }),
            Some(rule) => Ok(rule),
            None if self.seed.is_some() => Ok(Rule::Invariant),
            None => Ok(Rule::Block),
        }
    }

    /// Options that were given although greedy decoding has no use for them.
    fn without_effect(&self, rule: Rule) -> Vec<&'static str> {
        let given = [
            ("top_k", self.top_k.is_some_and(|k| k != 0)),
            ("top_p", self.top_p.is_some_and(|p| p != 1.0)),
            ("min_p", self.min_p.is_some_and(|p| p != 0.0)),
            ("seed", self.seed.is_some()),
            ("rule", self.rule.is_some_and(|rule| rule != Rule::Greedy)),
        ];
        let greedy = rule == Rule::Greedy;
        given.into_iter().filter(|&(_, given)| given && greedy).map(|(name, _)| name).collect()
    }
}

impl Sampler {
    /// Whether the engine may decide from round to round, by the clock, what is proposed: not where
    /// that would change a text that the request asked to get again.
    pub(crate) fn may_adapt(&self) -> bool {
        !self.seeded || matches!(self.rule, Rule::Greedy | Rule::Invariant)
    }

    /// The sampler of choice `n` of a request for several: the first is the request's own, the
    /// others have seeds of their own that follow from it.
    #[must_use]
    pub fn choice(&self, n: u32) -> Sampler {
        let [low, high] = SamplerParams::seed_words(self.seed);
        let words = ops::random::philox([n, 0, 0, 1], [low, high]);
        let derived = u64::from(words[0]) | u64::from(words[1]) << 32;
        Sampler { seed: if n == 0 { self.seed } else { derived }, ..self.clone() }
    }

    /// The parameter block on the device. [`Sampler::logit_bias`] goes to the slot's biases.
    pub fn params(&self, bounds: &Bounds) -> SamplerParams {
        let mut stop = [0; MAX_STOPS];
        let stops = bounds.stops.len().min(MAX_STOPS);
        stop[..stops].copy_from_slice(&bounds.stops[..stops]);
        let flag = |set, flag| if set { flag } else { 0 };
        let greedy = self.rule == Rule::Greedy;
        SamplerParams {
            seed: SamplerParams::seed_words(self.seed),
            rule: self.rule as u32,
            flags: flag(bounds.logprobs, SamplerParams::LOGPROBS)
                | flag(bounds.masked, SamplerParams::MASKED),
            inv_temperature: if greedy { 1.0 } else { 1.0 / self.temperature },
            min_logit: SamplerParams::min_logit_of(
                self.min_p,
                self.temperature.max(MIN_TEMPERATURE),
            ),
            top_k: self.top_k,
            top_p: SamplerParams::top_p_of(self.top_p),
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
            repetition: self.repetition_penalty,
            biases: self.logit_bias.len() as u32,
            end: bounds.end,
            stops: stops as u32,
            stop,
            ..SamplerParams::default()
        }
    }
}

fn ranged(option: &'static str, value: f32, low: f32, high: f32) -> Result<f32, SamplingError> {
    if (low..=high).contains(&value) {
        return Ok(value);
    }
    let expected = format!("between {low} and {high}");
    Err(SamplingError { option, value: value.to_string(), expected })
}

fn biases(given: &[(u32, f32)], vocab: usize) -> Result<Vec<LogitBias>, SamplingError> {
    let wrong = |value: String, expected: String| {
        Err(SamplingError { option: "logit_bias", value, expected })
    };
    if given.len() > MAX_LOGIT_BIASES {
        return wrong(format!("{} tokens", given.len()), format!("at most {MAX_LOGIT_BIASES}"));
    }
    let mut biases = Vec::with_capacity(given.len());
    for &(token, bias) in given {
        if token as usize >= vocab {
            return wrong(format!("for token {token}"), format!("for ids below {vocab}"));
        }
        biases.push(LogitBias { token, bias: ranged("logit_bias", bias, -100.0, 100.0)? });
    }
    biases.sort_unstable_by_key(|bias| bias.token);
    match biases.windows(2).find(|pair| pair[0].token == pair[1].token) {
        Some(pair) => {
            wrong(format!("given twice for token {}", pair[0].token), "given once".to_owned())
        }
        None => Ok(biases),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> SamplingDefaults {
        SamplingDefaults {
            do_sample: Some(true),
            temperature: Some(0.5),
            top_k: Some(40),
            top_p: Some(0.9),
            repetition_penalty: Some(1.1),
            ..SamplingDefaults::default()
        }
    }

    fn resolved(options: SamplingOptions) -> Sampler {
        options.resolve(&model(), 1000).expect("valid options")
    }

    #[test]
    fn the_model_s_defaults_apply_unless_the_request_says_otherwise() {
        let sampler = resolved(SamplingOptions::default());
        assert_eq!((sampler.temperature, sampler.top_k, sampler.top_p), (0.5, 40, 0.9));
        assert_eq!((sampler.min_p, sampler.repetition_penalty), (0.0, 1.1));
        let own = SamplingOptions {
            temperature: Some(1.2),
            top_k: Some(0),
            repetition_penalty: Some(1.0),
            ..SamplingOptions::default()
        };
        let sampler = resolved(own);
        assert_eq!((sampler.temperature, sampler.top_k, sampler.top_p), (1.2, 0, 0.9));
        assert_eq!(sampler.repetition_penalty, 1.0);
        let none = SamplingOptions::default().resolve(&SamplingDefaults::default(), 10);
        let none = none.expect("neutral options");
        assert_eq!((none.temperature, none.top_k, none.top_p), (1.0, 0, 1.0));
    }

    #[test]
    fn a_model_that_does_not_sample_is_greedy_unless_asked() {
        let model = SamplingDefaults { do_sample: Some(false), ..model() };
        let greedy = SamplingOptions::default().resolve(&model, 1000).expect("valid");
        assert_eq!((greedy.temperature, greedy.rule), (0.0, Rule::Greedy));
        let asked = SamplingOptions { temperature: Some(0.7), ..SamplingOptions::default() };
        assert_eq!(asked.resolve(&model, 1000).expect("valid").rule, Rule::Block);
    }

    #[test]
    fn the_rule_follows_from_temperature_and_seed() {
        let of = |temperature, seed, rule| {
            let temperature = Some(temperature);
            SamplingOptions { temperature, seed, rule, ..SamplingOptions::default() }
        };
        assert_eq!(resolved(of(0.0, Some(1), None)).rule, Rule::Greedy);
        assert_eq!(resolved(of(1e-6, None, Some(Rule::Block))).rule, Rule::Greedy);
        assert_eq!(resolved(of(1.0, Some(1), None)).rule, Rule::Invariant);
        assert_eq!(resolved(of(1.0, None, None)).rule, Rule::Block);
        assert_eq!(resolved(of(1.0, Some(1), Some(Rule::Token))).rule, Rule::Token);
        let refused = of(1.0, None, Some(Rule::Greedy)).resolve(&model(), 1000);
        let message = refused.expect_err("a contradiction").to_string();
        assert_eq!(message, "temperature is 1; it must be 0 with the acceptance rule `greedy`");
    }

    #[test]
    fn seeds_are_kept_or_fresh() {
        let seeded = SamplingOptions { seed: Some(42), ..SamplingOptions::default() };
        let sampler = resolved(seeded);
        assert_eq!(sampler.seed, 42);
        assert_eq!(sampler.params(&Bounds::default()).seed, [42, 0]);
        assert_ne!(
            resolved(SamplingOptions::default()).seed,
            resolved(SamplingOptions::default()).seed
        );
        assert_eq!(sampler.choice(0), sampler);
        assert_eq!(sampler.choice(3), sampler.choice(3));
        assert_ne!(sampler.choice(1).seed, sampler.choice(2).seed);
        assert_ne!(sampler.choice(1).seed, 42);
    }

    #[test]
    fn greedy_names_what_it_cannot_use() {
        let options = SamplingOptions {
            temperature: Some(0.0),
            top_k: Some(5),
            top_p: Some(1.0),
            seed: Some(1),
            rule: Some(Rule::Token),
            ..SamplingOptions::default()
        };
        assert_eq!(resolved(options.clone()).without_effect, ["top_k", "seed", "rule"]);
        let sampled = SamplingOptions { temperature: Some(1.0), ..options };
        assert!(resolved(sampled).without_effect.is_empty());
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        let base = SamplingOptions::default;
        let nan = f32::NAN;
        for (options, option) in [
            (SamplingOptions { temperature: Some(-0.1), ..base() }, "temperature"),
            (SamplingOptions { temperature: Some(nan), ..base() }, "temperature"),
            (SamplingOptions { temperature: Some(f32::INFINITY), ..base() }, "temperature"),
            (SamplingOptions { top_p: Some(1.01), ..base() }, "top_p"),
            (SamplingOptions { top_p: Some(nan), ..base() }, "top_p"),
            (SamplingOptions { min_p: Some(-0.01), ..base() }, "min_p"),
            (SamplingOptions { presence_penalty: Some(101.0), ..base() }, "presence_penalty"),
            (SamplingOptions { frequency_penalty: Some(nan), ..base() }, "frequency_penalty"),
            (SamplingOptions { repetition_penalty: Some(0.0), ..base() }, "repetition_penalty"),
            (SamplingOptions { logit_bias: vec![(1000, 1.0)], ..base() }, "logit_bias"),
            (SamplingOptions { logit_bias: vec![(1, nan)], ..base() }, "logit_bias"),
            (SamplingOptions { logit_bias: vec![(1, 1.0), (1, 2.0)], ..base() }, "logit_bias"),
            (
                SamplingOptions { logit_bias: (0..2000).map(|t| (t, 1.0)).collect(), ..base() },
                "logit_bias",
            ),
        ] {
            let error = options.resolve(&model(), 1000).expect_err(option);
            assert_eq!(error.option, option);
        }
    }

    #[test]
    fn the_parameter_block_says_what_the_options_say() {
        let options = SamplingOptions {
            temperature: Some(0.5),
            top_k: Some(1000),
            top_p: Some(0.25),
            min_p: Some(0.5),
            presence_penalty: Some(1.5),
            logit_bias: vec![(9, 1.0), (2, -1.0)],
            ..SamplingOptions::default()
        };
        let sampler = resolved(options);
        assert_eq!(sampler.logit_bias[0], LogitBias { token: 2, bias: -1.0 });
        let stops: Vec<u32> = (10..20).collect();
        let bounds = Bounds { stops: &stops, end: 77, logprobs: true, masked: false };
        let params = sampler.params(&bounds);
        assert_eq!((params.top_k, params.top_p, params.biases), (0, 1 << 28, 2));
        assert_eq!((params.inv_temperature, params.presence, params.end), (2.0, 1.5, 77));
        assert!((params.min_logit + 0.346_573_6).abs() < 1e-6);
        assert_eq!((params.stops, params.stop), (8, [10, 11, 12, 13, 14, 15, 16, 17]));
        assert_eq!(params.flags, SamplerParams::LOGPROBS);
    }
}
