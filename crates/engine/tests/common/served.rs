//! An engine as a service, and whoever asks it.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use engine::service::{
    CachePolicy, Done, Event, Priority, Request, RequestError, RequestId, Service,
};
use engine::{EngineOptions, EngineService, Sampler, ServiceOptions, serve};

use super::{With, engine_with};

/// Longer than anything in these tests takes on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// A service of the bundled pair.
pub fn service(draft: bool, options: EngineOptions, how: ServiceOptions) -> Arc<EngineService> {
    let build = move || {
        let with = if draft { With::DFlash } else { With::None };
        Ok::<_, String>(engine_with(with, options))
    };
    serve(build, how).expect("an engine")
}

/// A plain request.
pub fn ask(prompt: &[u32], max_tokens: usize, sampler: Sampler) -> Request {
    Request {
        prompt: prompt.to_vec(),
        boundaries: Vec::new(),
        max_tokens,
        stop_tokens: vec![2, 0],
        sampler,
        logprobs: None,
        constraint: None,
        draft: true,
        priority: Priority::Normal,
        deadline: None,
        cache: CachePolicy::Shared,
    }
}

/// A request whose answer does not end by itself.
pub fn endless(prompt: &[u32]) -> Request {
    Request { stop_tokens: Vec::new(), ..ask(prompt, 900, super::greedy()) }
}

/// A request on its way.
pub struct Asked {
    pub id: RequestId,
    pub events: Receiver<Event>,
}

pub fn submit(service: &dyn Service, request: Request) -> Asked {
    let (sender, events) = channel();
    let sink = Box::new(move |event| drop(sender.send(event)));
    let id = service.submit(request, sink).expect("taken");
    Asked { id, events }
}

/// What became of a request.
#[derive(Debug)]
pub struct Answer {
    pub tokens: Vec<engine::service::Token>,
    pub end: Result<Done, RequestError>,
    pub events: Vec<Event>,
}

impl Answer {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    pub fn done(&self) -> &Done {
        self.end.as_ref().expect("an answer")
    }
}

impl Asked {
    /// Waits for the end.
    pub fn wait(self) -> Answer {
        let (mut tokens, mut events) = (Vec::new(), Vec::new());
        loop {
            let event = self.events.recv_timeout(PATIENCE).expect("a last event");
            events.push(event.clone());
            match event {
                Event::Tokens { tokens: new, .. } => tokens.extend(new),
                Event::Done(done) => {
                    assert!(self.events.try_recv().is_err(), "nothing follows the end");
                    return Answer { tokens, end: Ok(done), events };
                }
                Event::Failed(error) => return Answer { tokens, end: Err(error), events },
                _ => {}
            }
        }
    }
}
