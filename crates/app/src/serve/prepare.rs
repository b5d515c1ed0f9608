//! From a [`Generation`] to the requests that the engine gets.

use std::time::{Duration, Instant};

use engine::Sampler;
use engine::service::{Constraint, Request};

use super::errors::ApiError;
use super::exchange::Exchange;
use super::generation::{Chat, Generation, Input};
use super::model::Facts;
use crate::telemetry::timeline::Stage;
use crate::text::chat::{ChatError, ChatText, Prompt, TemplateOptions};
use crate::text::grammar::{AnswerRules, Guided, ResponseFormat};
use crate::text::reasoning::Start;
use crate::text::template::TemplateError;
use crate::text::tokenizer::Tok;
use crate::text::tools::{Tool, ToolChoice, ToolFormat};

/// The most answers of one request.
pub const MAX_CHOICES: usize = 128;
/// The most stop texts, and the longest.
pub const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 4096;
/// The most alternatives of a token.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// A prompt that is ready for the engine.
#[derive(Debug)]
pub struct Prepared {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Where another prompt may go on differently.
    pub boundaries: Vec<usize>,
    /// How the output begins.
    pub start: Start,
    /// What was changed in the request, one sentence each.
    pub notes: Vec<String>,
}

/// Renders and tokenises what a request asks to be answered. If it is to fit into `room` tokens, what is
/// far longer is refused before it is tokenised.
///
/// # Errors
/// If it can't be rendered or tokenised, or certainly does not fit.
pub fn prompt(
    model: &Facts,
    input: &Input,
    room: Option<usize>,
    exchange: &Exchange,
) -> Result<Prepared, ApiError> {
    match input {
        Input::Chat(chat) => chat_prompt(model.text()?, chat, room, exchange),
        Input::Text(text) => {
            fits(model.text()?, text, room)?;
            let begun = Instant::now();
            let ids = model.text()?.raw_ids(text).map_err(|e| tokenizer_error(&e))?;
            exchange.stage(Stage::Tokenise, begun);
            Ok(raw(ids))
        }
        Input::Tokens(ids) => Ok(raw(ids.clone())),
    }
}

fn raw(ids: Vec<u32>) -> Prepared {
    Prepared { ids, boundaries: Vec::new(), start: Start::Answer, notes: Vec::new() }
}

/// Looks whether a text may fit; in doubt it may.
fn fits(text: &ChatText, prompt: &str, room: Option<usize>) -> Result<(), ApiError> {
    let Some(room) = room else { return Ok(()) };
    match text.tok().at_least(prompt) {
        tokens if tokens > room => Err(ApiError::far_too_long(tokens, room)),
        _ => Ok(()),
    }
}

fn chat_prompt(
    text: &ChatText,
    chat: &Chat,
    room: Option<usize>,
    exchange: &Exchange,
) -> Result<Prepared, ApiError> {
    let begun = Instant::now();
    let Prompt { text: rendered, start, mut notes } = render(text, chat)?;
    exchange.stage(Stage::Template, begun);
    fits(text, &rendered.text(), room)?;
    let begun = Instant::now();
    let ids = text.tok().encode(&rendered).map_err(|e| tokenizer_error(&e))?;
    exchange.stage(Stage::Tokenise, begun);
    let boundaries = boundaries(text.tok(), &ids);
    notes.extend(without_effect(text, chat, start));
    Ok(Prepared { ids, boundaries, start, notes })
}

/// What a request asks of a chat template that knows nothing of it.
fn without_effect(text: &ChatText, chat: &Chat, start: Start) -> Vec<String> {
    let Some(template) = text.templates().choose(!chat.tools.is_empty()) else { return Vec::new() };
    let mut notes = Vec::new();
    let reasoning = &chat.reasoning;
    if reasoning.enabled.is_some() && !template.mentions("enable_thinking") {
        let unwanted = reasoning.enabled == Some(false) && start == Start::Reasoning;
        if unwanted || reasoning.enabled == Some(true) {
            notes.push("thinking: the chat template has no switch for it".into());
        }
    }
    if let Some(effort) = &reasoning.effort
        && !template.mentions("reasoning_effort")
    {
        notes.push(format!("reasoning effort {effort}: the chat template knows no levels"));
    }
    if !chat.tools.is_empty() && !template.mentions("tools") {
        notes.push("tools: the chat template knows none, so the model does not see them".into());
    }
    for name in chat.template.keys().filter(|name| !template.mentions(name)) {
        notes.push(format!("chat_template_kwargs.{name}: the chat template does not use it"));
    }
    notes
}

/// The rendered template of a conversation.
pub fn render(text: &ChatText, chat: &Chat) -> Result<Prompt, ApiError> {
    let options = TemplateOptions {
        enable_thinking: chat.reasoning.enabled,
        preserve_thinking: None,
        reasoning_effort: chat.reasoning.effort.clone(),
        extra: chat.template.clone(),
    };
    // Tools stay in the prompt when none may be called: leaving them out would lose the cache.
    let tools: Vec<_> = chat.tools.iter().map(Tool::definition).collect();
    text.prompt(&chat.messages, &tools, &options).map_err(chat_error)
}

fn chat_error(error: ChatError) -> ApiError {
    match error {
        ChatError::NoTemplate => ApiError::bad_request(
            "no_chat_template",
            "the model has no chat template: it continues texts (/v1/completions), and can't chat",
        ),
        ChatError::Empty => ApiError::invalid("messages", "the conversation has no messages"),
        ChatError::NoStandIn(error) => ApiError::invalid("messages", error.to_string()),
        ChatError::Template(TemplateError::Refused(what)) => {
            let what = format!("the model's chat template refused the conversation: {what}");
            ApiError::bad_request("template_refused", what)
        }
        // Names of files stay in the log.
        ChatError::Template(TemplateError::Broken { what, .. }) => {
            let what = format!("the model's chat template failed on this conversation: {what}");
            ApiError::bad_request("template_failed", what)
        }
        ChatError::Tokenizer(error) => tokenizer_error(&error),
    }
}

fn tokenizer_error(error: &crate::text::tokenizer::TokenizerError) -> ApiError {
    ApiError::bad_request("tokenizer_failed", error.what.clone())
}

/// Where turns begin that another prompt may replace: the one after the system turn, and the last
/// one before the answer. Turns are found by the control token that the prompt begins with.
fn boundaries(tok: &dyn Tok, ids: &[u32]) -> Vec<usize> {
    let Some(&opener) = ids.first().filter(|&&id| tok.is_special(id)) else { return Vec::new() };
    let mut turns: Vec<usize> = (1..ids.len()).filter(|&at| ids[at] == opener).collect();
    // The last one opens the answer itself.
    turns.pop();
    let mut found: Vec<usize> = turns.first().into_iter().chain(turns.last()).copied().collect();
    found.dedup();
    found
}

/// Checks what no single field can, and fills in the sampling defaults.
pub fn sampler(model: &Facts, generation: &Generation) -> Result<Sampler, ApiError> {
    let Generation { choices, stop, logprobs, .. } = generation;
    if !(1..=MAX_CHOICES).contains(choices) {
        return Err(ApiError::invalid("n", format!("n is {choices}; use 1 to {MAX_CHOICES}")));
    }
    let prompts = 1 + generation.further.len();
    if choices * prompts > MAX_CHOICES {
        let what = format!(
            "{prompts} prompts with {choices} answers each are more than {MAX_CHOICES} answers; send \
             them in several requests"
        );
        return Err(ApiError::invalid("prompt", what));
    }
    if stop.len() > MAX_STOPS {
        let what = format!("{} stop texts were given; at most {MAX_STOPS} work", stop.len());
        return Err(ApiError::invalid("stop", what));
    }
    if stop.iter().any(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
        let what = format!("a stop text must have 1 to {MAX_STOP_BYTES} bytes");
        return Err(ApiError::invalid("stop", what));
    }
    if model.text.is_none() && !stop.is_empty() {
        return Err(ApiError::unsupported("stop", "this model has no tokenizer to find text with"));
    }
    if logprobs.is_some_and(|top| top > MAX_TOP_LOGPROBS) {
        let what = format!("at most {MAX_TOP_LOGPROBS} alternatives of a token are given");
        return Err(ApiError::invalid("top_logprobs", what));
    }
    if generation.limits.max_tokens == Some(0) {
        return Err(ApiError::invalid("max_tokens", "max_tokens is 0; use 1 or more"));
    }
    let resolved = generation.sampling.resolve(&model.defaults, model.info.vocab);
    resolved.map_err(|error| ApiError::invalid(error.option, error.to_string()))
}

/// What the answers of a request have to obey, compiled for one choice; the same again for the next
/// one costs nothing.
///
/// # Errors
/// If it can't be enforced.
pub fn guide(
    model: &Facts,
    generation: &Generation,
    prepared: &Prepared,
    exchange: &Exchange,
) -> Result<Guided, ApiError> {
    let plain = Chat { parallel_tool_calls: true, ..Chat::default() };
    let chat = match &generation.input {
        Input::Chat(chat) => chat,
        Input::Text(_) | Input::Tokens(_) => &plain,
    };
    let Some(grammars) = &model.grammars else {
        return match generation.response_format {
            ResponseFormat::Text => Ok(Guided::default()),
            _ => model.text().map(|_| Guided::default()),
        };
    };
    let template = model.text()?.templates().choose(!chat.tools.is_empty());
    let rules = AnswerRules {
        start: prepared.start,
        reasoning_budget: chat.reasoning.budget,
        format: &generation.response_format,
        tools: &chat.tools,
        choice: &chat.tool_choice,
        parallel: chat.parallel_tool_calls,
        tool_format: template.and_then(|template| ToolFormat::of_template(template.source())),
    };
    let begun = Instant::now();
    let guided = grammars.guide(&rules);
    exchange.stage(Stage::Constraint, begun);
    guided.map_err(|error| {
        if error.busy {
            let wait = Duration::from_secs(1);
            return ApiError::unavailable("grammars_busy", error.to_string(), wait);
        }
        let forced = matches!(chat.tool_choice, ToolChoice::Required | ToolChoice::Named(_));
        let (code, param) = match forced {
            true => ("invalid_tool_choice", "tool_choice"),
            false => ("invalid_response_format", "response_format"),
        };
        let refusal = ApiError::bad_request(code, error.to_string());
        ApiError { param: Some(param.into()), ..refusal }
    })
}

/// What the engine is asked for one choice.
pub fn request(
    model: &Facts,
    generation: &Generation,
    prepared: &Prepared,
    sampler: Sampler,
    constraint: Option<Box<dyn Constraint>>,
    exchange: &Exchange,
) -> Request {
    let limits = generation.limits;
    Request {
        prompt: prepared.ids.clone(),
        boundaries: prepared.boundaries.clone(),
        max_tokens: limits.max_tokens.unwrap_or(usize::MAX).min(model.info.context),
        stop_tokens: model.stop_tokens.clone(),
        sampler,
        logprobs: generation.logprobs,
        constraint,
        draft: generation.draft,
        priority: generation.priority,
        deadline: limits.timeout.and_then(|timeout| exchange.arrived().checked_add(timeout)),
        cache: generation.cache,
    }
}
