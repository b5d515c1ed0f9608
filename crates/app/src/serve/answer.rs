//! One answer in the making: from a [`Generation`] to a stream of [`Output`]s.
//!
//! [`begin`] submits a request, once for each choice. The engine's events come through a queue;
//! [`Answer::next`] turns them into text. Dropping an [`Answer`] cancels what still runs, so that a
//! client that leaves costs at most one round.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use engine::service::{Event, RequestId, Service};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::choice::Choice;
use super::errors::ApiError;
use super::exchange::Exchange;
use super::generation::{Delta, End, Generation, Output, Whole};
use super::model::Served;
use super::prepare::{self, Prepared};

/// Submits a request.
///
/// # Errors
/// If it makes no sense or can't be taken; then nothing runs.
pub fn begin(
    model: &Arc<Served>,
    generation: &Generation,
    exchange: &Exchange,
    cut: Cut,
) -> Result<Answer, ApiError> {
    let sampler = prepare::sampler(model, generation)?;
    exchange.seeded(sampler.seed);
    let room = Some(model.info.context);
    let prompt = |input| {
        let prepared = prepare::prompt(model, input, room, exchange)?;
        if prepared.ids.is_empty() {
            let what = "the prompt is empty: give at least one token";
            return Err(ApiError::invalid("prompt", what));
        }
        Ok(prepared)
    };
    let prompts = generation.inputs().map(prompt).collect::<Result<Vec<_>, _>>()?;
    let (events, queue) = unbounded_channel();
    let mut answer = Answer {
        model: Arc::clone(model),
        queue,
        choices: Vec::new(),
        running: Running { service: Arc::clone(&model.service), ids: Vec::new() },
        ready: VecDeque::new(),
        exchange: exchange.clone(),
        started: false,
        cached: 0,
        over: false,
        cut,
        seed: sampler.seed,
        without_effect: sampler.without_effect.clone(),
        prompts,
    };
    for index in 0..generation.choices * answer.prompts.len() {
        let (prompt, choice) = (index / generation.choices, index % generation.choices);
        let guided = prepare::guide(model, generation, &answer.prompts[prompt], exchange)?;
        if index == 0 {
            answer.prompts[0].notes.extend(guided.notes);
        }
        // A prompt among others is answered as it would be alone.
        let sampler = sampler.choice(choice as u32);
        let (prepared, constraint) = (&answer.prompts[prompt], guided.constraint);
        let request = prepare::request(model, generation, prepared, sampler, constraint, exchange);
        let choice = Choice::new(model, generation, prepared, guided.exact_calls);
        let events = events.clone();
        let sink = Box::new(move |event| {
            // Nobody listens any more: the answer was dropped, and its requests are cancelled.
            let _ = events.send((index, event));
        });
        let id = model.service.submit(request, sink)?;
        answer.running.ids.push(Some(id));
        answer.choices.push(choice);
    }
    Ok(answer)
}

/// Comes when the answer is cut short, with the reason.
pub type Cut = Pin<Box<dyn Future<Output = ApiError> + Send>>;

/// An answer in the making.
pub struct Answer {
    model: Arc<Served>,
    queue: UnboundedReceiver<(usize, Event)>,
    choices: Vec<Choice>,
    running: Running,
    ready: VecDeque<Output>,
    exchange: Exchange,
    started: bool,
    /// Prompt tokens of the first choice that need not be computed.
    cached: usize,
    over: bool,
    cut: Cut,
    /// The seed that was used, the request's or a fresh one.
    pub seed: u64,
    /// Sampling options that change nothing here.
    pub without_effect: Vec<&'static str>,
    /// One, or several that are answered together; never empty.
    prompts: Vec<Prepared>,
}

impl Answer {
    /// The model that answers.
    pub fn model(&self) -> &Arc<Served> {
        &self.model
    }

    /// The prompt; of several, the first.
    pub fn prompt(&self) -> &Prepared {
        &self.prompts[0]
    }

    /// How many choices there are.
    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// What happens next; `None` after the last choice ended or the request failed.
    pub async fn next(&mut self) -> Option<Output> {
        loop {
            if let Some(output) = self.ready.pop_front() {
                return Some(output);
            }
            if self.over {
                return None;
            }
            tokio::select! {
                // What the engine has told already counts.
                biased;
                event = self.queue.recv() => match event {
                    Some((index, event)) => self.take(index, event),
                    None => self.fail(ApiError::server("engine_stopped", "the engine stopped")),
                },
                why = &mut self.cut => self.fail(why),
            }
        }
    }

    /// What has happened already and was not yet taken.
    pub fn try_next(&mut self) -> Option<Output> {
        while self.ready.is_empty() && !self.over {
            let (index, event) = self.queue.try_recv().ok()?;
            self.take(index, event);
        }
        self.ready.pop_front()
    }

    /// Waits for all of it.
    ///
    /// # Errors
    /// If the request fails.
    pub async fn whole(mut self) -> Result<Vec<Whole>, ApiError> {
        let mut parts: Vec<(Delta, Option<End>)> =
            self.choices.iter().map(|_| Default::default()).collect();
        while let Some(output) = self.next().await {
            match output {
                Output::Started { .. } | Output::Prefill { .. } => {}
                Output::Delta { choice, delta } => parts[choice].0.extend(delta),
                Output::End { choice, end } => parts[choice].1 = Some(end),
                Output::Failed(error) => return Err(error),
            }
        }
        let whole = |(delta, end): (Delta, Option<End>)| Some(Whole { delta, end: end? });
        let all: Option<Vec<Whole>> = parts.into_iter().map(whole).collect();
        all.ok_or_else(|| ApiError::server("engine_stopped", "the answer has no end"))
    }

    fn take(&mut self, index: usize, event: Event) {
        self.exchange.observe(index, &event);
        match event {
            Event::Started { cache, .. } => {
                // Most requests have one prompt; what the first choice to begin found is what they
                // saved.
                if !std::mem::replace(&mut self.started, true) {
                    self.cached = cache.tokens;
                    self.ready.push_back(Output::Started { cached: cache.tokens });
                }
            }
            // The first choice speaks for all.
            Event::Prefill { done, total } if index == 0 => {
                self.ready.push_back(Output::Prefill { done, total, cached: self.cached });
            }
            Event::Prefill { .. } => {}
            Event::Tokens { tokens, .. } => {
                let begun = Instant::now();
                let (delta, met) = self.choices[index].tokens(&tokens);
                self.exchange.detokenised(index, begun.elapsed(), &delta.text());
                if let (Some(keep), Some(id)) = (met, self.running.ids[index]) {
                    self.running.service.finish(id, keep);
                }
                self.give(index, delta);
            }
            Event::Done(done) => {
                self.running.ids[index] = None;
                match self.choices[index].end(done) {
                    Ok((delta, end)) => {
                        let tools = self.choices[index].called();
                        self.exchange.ended(end.finish.openai(), end.reasoning_tokens, tools);
                        self.give(index, delta);
                        self.ready.push_back(Output::End { choice: index, end });
                        self.over = self.running.ids.iter().all(Option::is_none);
                    }
                    Err(error) => self.fail(error),
                }
            }
            Event::Failed(error) => {
                self.running.ids[index] = None;
                self.fail(error.into());
            }
        }
    }

    fn give(&mut self, choice: usize, delta: Delta) {
        if !delta.is_empty() {
            self.ready.push_back(Output::Delta { choice, delta });
        }
    }

    fn fail(&mut self, error: ApiError) {
        self.over = true;
        self.running.cancel();
        self.exchange.failed(&error);
        self.ready.push_back(Output::Failed(error));
    }
}

/// The engine's requests of an answer that have not ended; cancelled when dropped.
struct Running {
    service: Arc<dyn Service>,
    ids: Vec<Option<RequestId>>,
}

impl Running {
    fn cancel(&mut self) {
        for id in self.ids.iter_mut().filter_map(Option::take) {
            self.service.cancel(id);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.cancel();
    }
}
