//! A response as it is told.

use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::request::ResponseRequest;
use crate::serve::errors::ApiError;
use crate::serve::generation::{End, FinishReason};
use crate::serve::ids;
use crate::serve::openai::reply::{Timings, Usage};
use engine::service::ServiceInfo;

/// A response.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ResponseReply {
    /// Its name.
    pub id: String,
    /// `response`.
    object: &'static str,
    /// Seconds since 1970.
    created_at: u64,
    /// The same of its end.
    completed_at: Option<u64>,
    /// `in_progress`, `completed`, `incomplete` or `failed`.
    status: &'static str,
    /// Why it failed.
    error: Option<ResponseFault>,
    /// Why it is incomplete.
    incomplete_details: Option<Incomplete>,
    /// As asked for.
    instructions: Option<String>,
    /// As asked for.
    max_output_tokens: Option<i64>,
    /// As sent.
    #[schema(value_type = Object)]
    metadata: Value,
    /// The model that answered.
    model: String,
    /// Reasoning, messages and calls, in their order.
    #[schema(value_type = Vec<Object>)]
    output: Vec<Value>,
    /// As asked for.
    parallel_tool_calls: bool,
    /// The response that this one goes on from.
    previous_response_id: Option<String>,
    /// As asked for.
    reasoning: ReplyReasoning,
    /// Whether it is kept.
    store: bool,
    /// As asked for.
    temperature: Option<f32>,
    /// As asked for.
    text: ReplyText,
    /// As asked for.
    tool_choice: Value,
    /// As sent.
    tools: Vec<Value>,
    /// As asked for.
    top_p: Option<f32>,
    /// `disabled`.
    truncation: &'static str,
    /// Tokens.
    usage: Option<ResponseUsage>,
    /// As asked for.
    user: Option<String>,
    /// Times.
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Timings>,
}

/// Why a response failed.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct ResponseFault {
    /// A stable name.
    code: &'static str,
    /// What happened and what to do about it.
    message: String,
}

/// Why a response is incomplete.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct Incomplete {
    /// `max_output_tokens`.
    reason: &'static str,
}

/// How a response reasons.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct ReplyReasoning {
    effort: Option<String>,
    summary: Option<String>,
}

/// The form of a response's text.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct ReplyText {
    format: ReplyFormat,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
struct ReplyFormat {
    #[serde(rename = "type")]
    kind: String,
}

/// Tokens of a response.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct ResponseUsage {
    /// Tokens of the prompt, cached ones included.
    input_tokens: usize,
    /// More about them.
    input_tokens_details: InputDetails,
    /// Tokens of the answer, reasoning included.
    output_tokens: usize,
    /// More about them.
    output_tokens_details: OutputDetails,
    /// The sum.
    total_tokens: usize,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
struct InputDetails {
    /// Tokens that were not computed.
    cached_tokens: usize,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
struct OutputDetails {
    /// Tokens of reasoning.
    reasoning_tokens: usize,
}

impl ResponseReply {
    /// The reply before there is any output: what the request determines.
    pub fn begin(request: &ResponseRequest, model: String) -> ResponseReply {
        let format = request.text.as_ref().and_then(|text| text.format.as_ref());
        let format = format.map_or("text", |format| format.kind.as_str());
        let reasoning = request.reasoning.as_ref();
        ResponseReply {
            id: ids::fresh("resp_"),
            object: "response",
            created_at: ids::unix_time(),
            completed_at: None,
            status: "in_progress",
            error: None,
            incomplete_details: None,
            instructions: request.instructions.clone(),
            max_output_tokens: request.max_output_tokens,
            metadata: request.metadata.clone().unwrap_or_else(|| json!({})),
            model,
            output: Vec::new(),
            parallel_tool_calls: request.parallel_tool_calls.unwrap_or(true),
            previous_response_id: request.previous_response_id.clone(),
            reasoning: ReplyReasoning {
                effort: reasoning.and_then(|reasoning| reasoning.effort.clone()),
                summary: None,
            },
            store: request.store.unwrap_or(true),
            temperature: request.temperature,
            text: ReplyText { format: ReplyFormat { kind: format.to_owned() } },
            tool_choice: request.tool_choice.clone().unwrap_or_else(|| json!("auto")),
            tools: request.tools.clone().unwrap_or_default(),
            top_p: request.top_p,
            truncation: "disabled",
            usage: None,
            user: request.user.clone(),
            timings: None,
        }
    }

    /// The whole reply.
    pub fn complete(&self, output: Vec<Value>, end: &End, info: &ServiceInfo) -> ResponseReply {
        let usage = Usage::of([end], 1);
        let status = status(end);
        let incomplete = status == "incomplete";
        ResponseReply {
            status,
            completed_at: Some(ids::unix_time()),
            incomplete_details: incomplete.then_some(Incomplete { reason: "max_output_tokens" }),
            output,
            usage: Some(ResponseUsage {
                input_tokens: usage.prompt_tokens,
                input_tokens_details: InputDetails {
                    cached_tokens: usage.prompt_tokens_details.cached_tokens,
                },
                output_tokens: usage.completion_tokens,
                output_tokens_details: OutputDetails {
                    reasoning_tokens: usage.completion_tokens_details.reasoning_tokens,
                },
                total_tokens: usage.total_tokens,
            }),
            timings: Some(Timings::of(&end.done, info)),
            ..self.clone()
        }
    }

    /// The reply of a request that failed.
    pub fn failed(&self, error: &ApiError) -> ResponseReply {
        let fault = ResponseFault { code: error.code, message: error.message.clone() };
        ResponseReply { status: "failed", error: Some(fault), ..self.clone() }
    }
}

/// The status of an answer that ended like this.
pub fn status(end: &End) -> &'static str {
    match end.finish {
        FinishReason::Length | FinishReason::Context => "incomplete",
        FinishReason::Stop | FinishReason::ToolCalls => "completed",
    }
}
