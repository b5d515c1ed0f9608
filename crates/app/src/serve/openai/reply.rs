//! Parts that replies share: usage, timings, log-probabilities.

use std::time::Duration;

use engine::service::{Done, ServiceInfo};
use serde::Serialize;
use utoipa::ToSchema;

use crate::serve::generation::{End, FinishReason, TokenLogprob};

/// Tokens of a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: usize,
    /// Tokens of all choices, reasoning and ends of turn included.
    pub completion_tokens: usize,
    /// The sum.
    pub total_tokens: usize,
    /// More about the prompt.
    pub prompt_tokens_details: PromptDetails,
    /// More about the answer.
    pub completion_tokens_details: CompletionDetails,
}

/// More about the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptDetails {
    /// Tokens that were not computed.
    pub cached_tokens: usize,
}

/// More about the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct CompletionDetails {
    /// Tokens of reasoning.
    pub reasoning_tokens: usize,
    /// Proposals of the draft that were accepted.
    pub accepted_prediction_tokens: usize,
    /// Proposals of the draft that were not.
    pub rejected_prediction_tokens: usize,
}

impl Usage {
    /// The usage of a request by the ends of its choices, in their order, so many for each prompt.
    pub fn of<'a>(ends: impl IntoIterator<Item = &'a End>, choices: usize) -> Usage {
        let mut usage = Usage::default();
        for (index, End { done, reasoning_tokens, .. }) in ends.into_iter().enumerate() {
            // Choices of one prompt count it once; the first one's cache is what the request found.
            if index % choices.max(1) == 0 {
                usage.prompt_tokens += done.prompt_tokens;
                usage.prompt_tokens_details.cached_tokens += done.cached_tokens;
            }
            usage.completion_tokens += done.output_tokens;
            let details = &mut usage.completion_tokens_details;
            details.reasoning_tokens += reasoning_tokens;
            details.accepted_prediction_tokens += done.accepted;
            details.rejected_prediction_tokens += done.proposed.saturating_sub(done.accepted);
        }
        usage.total_tokens = usage.prompt_tokens + usage.completion_tokens;
        usage
    }
}

/// Times of a choice, under llama-server's names, and what a round gave.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
pub struct Timings {
    /// Prompt tokens that were not computed.
    pub cache_n: usize,
    /// Prompt tokens that were.
    pub prompt_n: usize,
    /// Time from the lane to the prompt's last token.
    pub prompt_ms: f64,
    /// Of which per token.
    pub prompt_per_token_ms: Option<f64>,
    /// Prompt tokens per second.
    pub prompt_per_second: Option<f64>,
    /// Tokens of the answer.
    pub predicted_n: usize,
    /// Time from the end of the prompt to the last token.
    pub predicted_ms: f64,
    /// Of which per token.
    pub predicted_per_token_ms: Option<f64>,
    /// Tokens per second.
    pub predicted_per_second: Option<f64>,
    /// Proposals verified.
    pub draft_n: usize,
    /// Proposals accepted.
    pub draft_n_accepted: usize,
    /// Rounds.
    pub rounds: usize,
    /// Tokens that a round gave.
    pub tokens_per_round: Option<f64>,
    /// Time without a lane.
    pub queue_ms: f64,
    /// Time that the rounds' bytes take at the device's read bandwidth, as a share of the time they
    /// took.
    pub floor_share: Option<f64>,
}

impl Timings {
    /// The times of a choice.
    pub fn of(done: &Done, info: &ServiceInfo) -> Timings {
        let (prompt_n, predicted_n) =
            (done.prompt_tokens.saturating_sub(done.cached_tokens), done.output_tokens);
        let floor = done.rounds as f64 * info.round_bytes as f64 / info.read_bandwidth;
        Timings {
            cache_n: done.cached_tokens,
            prompt_n,
            prompt_ms: ms(done.prefill),
            prompt_per_token_ms: ratio(ms(done.prefill), prompt_n as f64),
            prompt_per_second: ratio(prompt_n as f64, done.prefill.as_secs_f64()),
            predicted_n,
            predicted_ms: ms(done.decode),
            predicted_per_token_ms: ratio(ms(done.decode), predicted_n as f64),
            predicted_per_second: ratio(predicted_n as f64, done.decode.as_secs_f64()),
            draft_n: done.proposed,
            draft_n_accepted: done.accepted,
            rounds: done.rounds,
            tokens_per_round: ratio(predicted_n as f64, done.rounds as f64),
            queue_ms: ms(done.queued),
            floor_share: ratio(floor, done.decode.as_secs_f64()),
        }
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// A quotient, where there is one.
fn ratio(numerator: f64, denominator: f64) -> Option<f64> {
    let quotient = numerator / denominator;
    (denominator > 0.0 && quotient.is_finite()).then_some(quotient)
}

impl FinishReason {
    /// The name in OpenAI's replies.
    pub fn openai(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length | FinishReason::Context => "length",
            FinishReason::ToolCalls => "tool_calls",
        }
    }
}

/// Log-probabilities of a chat answer.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct ChatLogprobs {
    /// Tokens of the answer.
    pub content: Vec<ChatToken>,
    /// Always null.
    pub refusal: Option<Vec<ChatToken>>,
}

/// A token with the likeliest ones in its place.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct ChatToken {
    /// The token.
    #[serde(flatten)]
    pub token: OneToken,
    /// The likeliest tokens in its place.
    pub top_logprobs: Vec<OneToken>,
}

/// A token.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct OneToken {
    /// Its text; bytes that are no text show as U+FFFD.
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The bytes it stands for.
    pub bytes: Vec<u8>,
}

impl OneToken {
    fn new(bytes: Vec<u8>, logprob: f32) -> OneToken {
        OneToken { token: String::from_utf8_lossy(&bytes).into_owned(), logprob, bytes }
    }
}

impl ChatLogprobs {
    /// Log-probabilities in OpenAI's form.
    pub fn of(tokens: Vec<TokenLogprob>) -> ChatLogprobs {
        let content =
            tokens.into_iter().map(|TokenLogprob { bytes, logprob, top, .. }| ChatToken {
                token: OneToken::new(bytes, logprob),
                top_logprobs: top
                    .into_iter()
                    .map(|(_, bytes, p)| OneToken::new(bytes, p))
                    .collect(),
            });
        ChatLogprobs { content: content.collect(), refusal: None }
    }
}
