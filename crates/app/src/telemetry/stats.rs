//! What many requests have in common: percentiles, rates, shares.
//!
//! Percentiles are exact (nearest rank) over requests that ended well; rates are ratios of sums, so
//! a short answer weighs little.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::record::ErrorClass;

/// Groups told apart by model, and by client; the rest are added up in [`OTHERS`].
const MAX_GROUPS: usize = 50;
/// Stands for groups beyond the limit.
pub const OTHERS: &str = "(others)";
/// The most intervals of a series.
pub const MAX_INTERVALS: usize = 500;

/// What statistics need of one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// When it began, in microseconds since 1970.
    pub started_us: u64,
    /// How long it took.
    pub duration_us: u64,
    /// When its first token came, from its start.
    pub first_token_us: Option<u64>,
    /// Who asked.
    pub client: String,
    /// Who answered.
    pub model: String,
    /// Why it failed.
    pub error: Option<ErrorClass>,
    /// Tokens of the prompt.
    pub prompt: u64,
    /// Of these, not computed.
    pub cached: u64,
    /// Tokens of the answer.
    pub output: u64,
    /// Of these, reasoning.
    pub reasoning: u64,
    /// Time of prefill.
    pub prefill_us: u64,
    /// Time of rounds.
    pub decode_us: u64,
    /// Rounds.
    pub rounds: u64,
    /// Proposals verified.
    pub proposed: u64,
    /// Proposals accepted.
    pub accepted: u64,
    /// Whether it looks like a retry.
    pub retry: bool,
}

/// Statistics of requests, in all and by model and client, and their course.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// All of them.
    pub total: Summary,
    /// By model.
    pub models: BTreeMap<String, Summary>,
    /// By client.
    pub clients: BTreeMap<String, Summary>,
    /// By time, if asked for: intervals without a gap, oldest first.
    pub series: Vec<Interval>,
}

/// Statistics of some requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Requests.
    pub requests: u64,
    /// Those that failed, by class; those that a client left among them.
    pub errors: BTreeMap<String, u64>,
    /// Share that failed, those that a client left not among them.
    pub error_rate: f64,
    /// Those that look like retries.
    pub retries: u64,
    /// Time to the first token, in milliseconds.
    pub first_token_ms: Percentiles,
    /// Time to the last byte, in milliseconds.
    pub duration_ms: Percentiles,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Of these, not computed.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub output_tokens: u64,
    /// Of these, reasoning.
    pub reasoning_tokens: u64,
    /// Tokens a second of one answer: output tokens over the time of rounds.
    pub tokens_per_second: Option<f64>,
    /// Prompt tokens computed a second, over the time of prefill.
    pub prefill_tokens_per_second: Option<f64>,
    /// Share of prompt tokens that were not computed.
    pub cache_hit_share: Option<f64>,
    /// Output tokens over rounds.
    pub tokens_per_round: Option<f64>,
    /// Share of proposals that were accepted.
    pub acceptance: Option<f64>,
}

/// Percentiles of a time, in milliseconds; `None` of nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Half are no longer.
    pub p50: Option<f64>,
    /// 95 % are no longer.
    pub p95: Option<f64>,
    /// 99 % are no longer.
    pub p99: Option<f64>,
    /// The longest.
    pub max: Option<f64>,
}

/// What happened in one interval of a series.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Its start, in microseconds since 1970.
    pub start_us: u64,
    /// Requests begun in it.
    pub requests: u64,
    /// Of these, those that failed; those that a client left not among them.
    pub errors: u64,
    /// Their output tokens, over its length in seconds: what the server gave, of all lanes.
    pub output_tokens_per_second: f64,
    /// Their prompt tokens, over its length in seconds.
    pub prompt_tokens_per_second: f64,
    /// Their time to the first token.
    pub first_token_ms: Percentiles,
    /// Their time to the last byte.
    pub duration_ms: Percentiles,
}

/// Cuts a span of time into intervals of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Course {
    /// Its start, in microseconds since 1970.
    pub since_us: u64,
    /// Length of an interval, at least 1.
    pub interval_us: u64,
    /// Intervals.
    pub intervals: usize,
}

impl Course {
    /// A span of time in so many intervals.
    pub fn new(since_us: u64, until_us: u64, intervals: usize) -> Course {
        let intervals = intervals.min(MAX_INTERVALS);
        let length = until_us.saturating_sub(since_us).div_ceil(intervals.max(1) as u64);
        Course { since_us, interval_us: length.max(1), intervals }
    }

    fn index(&self, at_us: u64) -> Option<usize> {
        let index = at_us.checked_sub(self.since_us)? / self.interval_us;
        usize::try_from(index).ok().filter(|&index| index < self.intervals)
    }
}

/// Adds requests up.
#[derive(Debug, Default)]
pub struct Collector {
    total: Group,
    models: BTreeMap<String, Group>,
    clients: BTreeMap<String, Group>,
    course: Option<Course>,
    series: Vec<Group>,
}

impl Collector {
    /// One that also follows the course of time.
    pub fn new(course: Option<Course>) -> Collector {
        let series = course.map_or(Vec::new(), |course| {
            std::iter::repeat_with(Group::default).take(course.intervals).collect()
        });
        Collector { course, series, ..Collector::default() }
    }

    /// Adds a request.
    pub fn add(&mut self, sample: &Sample) {
        self.total.add(sample);
        group(&mut self.models, &sample.model).add(sample);
        group(&mut self.clients, &sample.client).add(sample);
        if let Some(index) = self.course.and_then(|course| course.index(sample.started_us)) {
            self.series[index].add(sample);
        }
    }

    /// The statistics.
    pub fn finish(self) -> Stats {
        let summaries = |groups: BTreeMap<String, Group>| {
            groups.into_iter().map(|(name, group)| (name, group.summary())).collect()
        };
        let series = self.course.map_or(Vec::new(), |course| {
            let starts = (0..).map(|i| course.since_us.saturating_add(i * course.interval_us));
            let seconds = course.interval_us as f64 / 1e6;
            starts.zip(self.series).map(|(start, group)| group.interval(start, seconds)).collect()
        });
        Stats {
            total: self.total.summary(),
            models: summaries(self.models),
            clients: summaries(self.clients),
            series,
        }
    }
}

fn group<'a>(groups: &'a mut BTreeMap<String, Group>, name: &str) -> &'a mut Group {
    let known = groups.contains_key(name) || groups.len() < MAX_GROUPS;
    groups.entry(if known { name } else { OTHERS }.to_owned()).or_default()
}

#[derive(Debug, Default)]
struct Group {
    requests: u64,
    errors: BTreeMap<&'static str, u64>,
    retries: u64,
    first_token_us: Vec<u64>,
    duration_us: Vec<u64>,
    prompt: u64,
    cached: u64,
    output: u64,
    reasoning: u64,
    prefill_us: u64,
    decode_us: u64,
    rounds: u64,
    proposed: u64,
    accepted: u64,
}

impl Group {
    fn add(&mut self, sample: &Sample) {
        self.requests += 1;
        self.retries += u64::from(sample.retry);
        match sample.error {
            Some(class) => *self.errors.entry(class.name()).or_default() += 1,
            None => {
                self.duration_us.push(sample.duration_us);
                self.first_token_us.extend(sample.first_token_us);
            }
        }
        self.prompt += sample.prompt;
        self.cached += sample.cached;
        self.output += sample.output;
        self.reasoning += sample.reasoning;
        self.prefill_us += sample.prefill_us;
        self.decode_us += sample.decode_us;
        self.rounds += sample.rounds;
        self.proposed += sample.proposed;
        self.accepted += sample.accepted;
    }

    fn failed(&self) -> u64 {
        let cancelled = self.errors.get(ErrorClass::Cancelled.name()).copied().unwrap_or(0);
        self.errors.values().sum::<u64>() - cancelled
    }

    fn summary(self) -> Summary {
        let computed = self.prompt.saturating_sub(self.cached);
        Summary {
            requests: self.requests,
            error_rate: ratio(self.failed(), self.requests).unwrap_or(0.0),
            errors: self.errors.iter().map(|(&name, &n)| (name.to_owned(), n)).collect(),
            retries: self.retries,
            first_token_ms: Percentiles::of(self.first_token_us),
            duration_ms: Percentiles::of(self.duration_us),
            prompt_tokens: self.prompt,
            cached_tokens: self.cached,
            output_tokens: self.output,
            reasoning_tokens: self.reasoning,
            tokens_per_second: ratio(self.output, self.decode_us).map(|x| x * 1e6),
            prefill_tokens_per_second: ratio(computed, self.prefill_us).map(|x| x * 1e6),
            cache_hit_share: ratio(self.cached, self.prompt),
            tokens_per_round: ratio(self.output, self.rounds),
            acceptance: ratio(self.accepted, self.proposed),
        }
    }

    fn interval(self, start_us: u64, seconds: f64) -> Interval {
        Interval {
            start_us,
            requests: self.requests,
            errors: self.failed(),
            output_tokens_per_second: self.output as f64 / seconds,
            prompt_tokens_per_second: self.prompt as f64 / seconds,
            first_token_ms: Percentiles::of(self.first_token_us),
            duration_ms: Percentiles::of(self.duration_us),
        }
    }
}

impl Percentiles {
    /// Of times in microseconds.
    pub fn of(mut times_us: Vec<u64>) -> Percentiles {
        times_us.sort_unstable();
        // The smallest time that at least this share of all are no longer than.
        let rank = |percent: usize| {
            let rank = (times_us.len() * percent).div_ceil(100);
            rank.checked_sub(1).map(|index| times_us[index] as f64 / 1e3)
        };
        Percentiles { p50: rank(50), p95: rank(95), p99: rank(99), max: rank(100) }
    }
}

fn ratio(a: u64, b: u64) -> Option<f64> {
    (b > 0).then(|| a as f64 / b as f64)
}

#[cfg(test)]
#[path = "stats_tests.rs"]
mod tests;
