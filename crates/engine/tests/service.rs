//! The engine as a service: many requests at once, each as if it were alone.

mod common;

use std::time::{Duration, Instant};

use common::served::{Asked, PATIENCE, ask, endless, service, submit};
use common::{With, answer, engine, engine_on, engine_with, greedy, prompts, request, sampler};
use engine::plan::{Footprint, Room, TooLarge, Wishes, plan};
use engine::service::{CachePolicy, Constraint, Event, Finish, Health, Refusal, Request, Service};
use engine::{EngineOptions, SamplingOptions, ServiceOptions, Session, serve};
use ops::{ActDtype, DryRun};

fn lanes(slots: usize) -> EngineOptions {
    EngineOptions { context: 1024, slots, snapshots: 8, ..EngineOptions::default() }
}

fn seeded(seed: u64) -> engine::Sampler {
    sampler(SamplingOptions {
        temperature: Some(0.8),
        top_k: Some(40),
        repetition_penalty: Some(1.1),
        seed: Some(seed),
        ..SamplingOptions::default()
    })
}

#[test]
fn an_engine_takes_what_was_planned() {
    let measure = |options: &EngineOptions| {
        let dev = DryRun::new(ActDtype::I8);
        Ok(Footprint::of(&engine_on(dev, With::DFlash, *options).expect("an engine")))
    };
    let room =
        Room { free: 8 << 30, longest_context: 8192, default_context: 2048, default_lanes: 4 };
    for cache in [None, Some(0), Some(300 << 20)] {
        let wishes = Wishes { cache, ..Wishes::default() };
        let plan = plan::<TooLarge>(lanes(1), &wishes, &room, &mut { measure }).expect("room");
        assert_eq!(plan.options.snapshots > 0, cache != Some(0));
        assert_eq!(measure(&plan.options), Ok(plan.footprint), "{plan:?}");
    }
}

#[test]
fn each_answer_is_what_it_would_be_alone() {
    let prompts = prompts(6);
    let mut alone = engine(With::None);
    let samplers = |i: usize| if i.is_multiple_of(2) { greedy() } else { seeded(i as u64) };
    let want: Vec<Vec<u32>> = prompts
        .iter()
        .enumerate()
        .map(|(i, p)| answer(&mut alone, &mut Session::new(0), request(p, 14, samplers(i))).0)
        .collect();
    for ahead in [false, true] {
        let options = EngineOptions { ahead, ..lanes(4) };
        let service = service(true, options, ServiceOptions::default());
        let asked: Vec<Asked> = prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| {
                let mut request = ask(prompt, 14, samplers(i));
                // Lanes that draft and lanes that don't in one batch.
                request.draft = i != 1;
                submit(&*service, request)
            })
            .collect();
        for (i, asked) in asked.into_iter().enumerate() {
            let got = asked.wait();
            assert_eq!(got.ids(), want[i], "prompt {i}, ahead {ahead}");
            let done = got.done();
            assert_eq!((done.prompt_tokens, done.output_tokens), (prompts[i].len(), want[i].len()));
            assert!(i != 1 || done.proposed == 0);
        }
        assert_eq!(service.health(), Health::Serving);
        service.drain(Duration::ZERO);
        let stats = service.stats();
        assert_eq!((stats.accepted, stats.completed, stats.failed), (6, 6, 0));
        let emitted: usize = want.iter().map(Vec::len).sum();
        assert_eq!(stats.output_tokens, emitted as u64);
        assert!(matches!(service.health(), Health::Failed(_)));
        let refused = service.submit(ask(&prompts[0], 1, greedy()), Box::new(|_| ()));
        assert!(matches!(refused, Err(Refusal::Unavailable(_))), "{refused:?}");
    }
}

#[test]
fn what_was_computed_is_not_computed_again() {
    let service = service(true, lanes(2), ServiceOptions::default());
    let prompt = prompts(3)[2].clone();
    let first = submit(&*service, ask(&prompt, 30, greedy())).wait();
    assert_eq!(first.done().cached_tokens, 0);
    let again = submit(&*service, ask(&prompt, 30, greedy())).wait();
    assert_eq!((again.done().cached_tokens, again.done().cache.miss), (prompt.len() - 1, ""));
    assert_eq!(again.ids(), first.ids());
    // The next turn goes on from the end of the answer.
    let turn = [&prompt[..], &first.ids(), &[198, 28, 1604]].concat();
    let next = submit(&*service, ask(&turn, 30, greedy())).wait();
    assert_eq!(next.done().cached_tokens, prompt.len() + first.ids().len() - 1);
    let mut cold = engine(With::None);
    let (want, _) = answer(&mut cold, &mut Session::new(0), request(&turn, 30, greedy()));
    assert_eq!(next.ids(), want);
    // Another question after the same beginning finds the state where the two part, once it is known.
    let other = [&prompt[..150], &[11, 12, 13, 14]].concat();
    let parted = submit(&*service, ask(&other, 4, greedy())).wait();
    assert_eq!(parted.done().cached_tokens, 0);
    assert!(parted.done().cache.miss.contains("no state is kept"), "{}", parted.done().cache.miss);
    let third = [&prompt[..150], &[21, 22, 23, 24]].concat();
    let third = submit(&*service, ask(&third, 4, greedy())).wait();
    assert_eq!(third.done().cached_tokens, 128);
}

#[test]
fn a_queue_has_an_end_and_cancelled_requests_leave_it() {
    let how = ServiceOptions { queue: 1, ..ServiceOptions::default() };
    let service = service(false, lanes(1), how);
    let prompt = prompts(2)[1].clone();
    let running = submit(&*service, endless(&prompt));
    assert!(matches!(running.events.recv_timeout(PATIENCE), Ok(Event::Started { .. })));
    assert!(matches!(running.events.recv_timeout(PATIENCE), Ok(Event::Prefill { .. })));
    let queued = submit(&*service, ask(&prompt, 4, greedy()));
    let refused = service.submit(ask(&prompt, 4, greedy()), Box::new(|_| ()));
    assert!(matches!(refused, Err(Refusal::Busy { waiting: 1, .. })), "{refused:?}");
    service.cancel(queued.id);
    let gone = queued.wait();
    assert_eq!((gone.done().finish, gone.tokens.len()), (Finish::Cancelled, 0));
    // The other one is unharmed.
    loop {
        if let Event::Tokens { .. } = running.events.recv_timeout(PATIENCE).expect("tokens") {
            break;
        }
    }
    let begun = Instant::now();
    service.cancel(running.id);
    let ended = running.wait();
    assert_eq!(ended.done().finish, Finish::Cancelled);
    assert!(begun.elapsed() < Duration::from_secs(20));
    // An end is told a moment before its place counts as free.
    while service.stats().running + service.stats().waiting > 0 {
        assert!(begun.elapsed() < PATIENCE, "{:?}", service.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    let next = submit(&*service, ask(&prompt, 4, greedy())).wait();
    assert_eq!(next.done().finish, Finish::Length);
    for (bad, why) in [(vec![], "empty"), (vec![1; 2000], "2000"), (vec![1, 49_152], "49152")] {
        let refused = service.submit(ask(&bad, 4, greedy()), Box::new(|_| ()));
        let why_not = refused.expect_err("refused").to_string();
        assert!(why_not.contains(why), "{why_not}");
    }
    assert_eq!(service.stats().refused, 4);
}

/// Every second token of the vocabulary, and how often it was asked.
struct Even(Vec<u32>);

impl Constraint for Even {
    fn masks(&mut self, proposals: &[u32], masks: &mut [u32]) -> Result<usize, String> {
        let even = proposals.iter().take_while(|&&id| id.is_multiple_of(2)).count();
        let words = masks.len() / (proposals.len() + 1);
        // Whatever lies behind the masks that are written must not be looked at.
        masks[..(even + 1) * words].fill(0x5555_5555);
        masks[(even + 1) * words..].fill(0);
        Ok(even + 1)
    }

    fn advance(&mut self, tokens: &[u32]) -> Result<bool, String> {
        if let Some(odd) = tokens.iter().find(|&&id| id % 2 == 1) {
            return Err(format!("{odd} is odd"));
        }
        self.0.extend_from_slice(tokens);
        Ok(self.0.len() >= 30)
    }
}

#[test]
fn constrained_lanes_and_others_share_rounds() {
    let prompts = prompts(3);
    let mut texts: Vec<Vec<Vec<u32>>> = Vec::new();
    for (draft, ahead) in [(false, false), (true, false), (true, true)] {
        let options = EngineOptions { ahead, ..lanes(3) };
        let service = service(draft, options, ServiceOptions::default());
        let asked = [(0, false), (1, true), (2, true)].map(|(i, even)| {
            let sampler = if i == 2 { seeded(5) } else { greedy() };
            let mut request = ask(&prompts[i], 40, sampler);
            request.stop_tokens.clear();
            request.constraint = even.then(|| Box::new(Even(Vec::new())) as Box<dyn Constraint>);
            submit(&*service, request)
        });
        let answers = asked.map(Asked::wait);
        for answer in &answers[1..] {
            assert_eq!(answer.done().finish, Finish::Constraint);
            assert!(
                answer.ids().iter().all(|id| id.is_multiple_of(2)) && answer.tokens.len() >= 30
            );
        }
        // With proposals, the last round may reach beyond the thirtieth token.
        texts.push(answers.iter().map(|a| a.ids()[..a.tokens.len().min(30)].to_vec()).collect());
        if draft {
            let accepted: usize = answers[1..].iter().map(|a| a.done().accepted).sum();
            assert!(accepted > 0, "no proposal was ever accepted, so nothing was tested");
        }
    }
    assert!(texts.windows(2).all(|pair| pair[0] == pair[1]));
    let free = submit(&*service(false, lanes(1), ServiceOptions::default()), {
        let mut request = ask(&prompts[1], 30, greedy());
        request.stop_tokens.clear();
        request
    });
    assert_ne!(free.wait().ids(), texts[0][1], "the constraint changed something");
}

#[test]
fn log_probabilities_are_those_of_the_row() {
    let prompt = &prompts(3)[2];
    let mut seen: Vec<Vec<(u32, Option<f32>, Vec<(u32, f32)>)>> = Vec::new();
    for draft in [false, true] {
        let service = service(draft, lanes(2), ServiceOptions::default());
        let mut request = ask(prompt, 20, greedy());
        request.logprobs = Some(5);
        let without = submit(&*service, ask(&prompts(1)[0], 20, greedy()));
        let answer = submit(&*service, request).wait();
        for token in &answer.tokens {
            let alternatives = &token.alternatives;
            assert_eq!((alternatives.len(), alternatives[0].0), (5, token.id), "{token:?}");
            assert_eq!(token.logprob, Some(alternatives[0].1));
            assert!(alternatives.is_sorted_by(|a, b| a.1 >= b.1));
            let sum: f32 = alternatives.iter().map(|(_, logprob)| logprob.exp()).sum();
            assert!(sum > 0.0 && sum < 1.0 + 1e-4, "{sum}");
        }
        let tokens = answer.tokens.into_iter().map(|t| (t.id, t.logprob, t.alternatives));
        seen.push(tokens.collect());
        assert!(without.wait().tokens.iter().all(|t| t.logprob.is_none()));
        let mut many = ask(prompt, 1, greedy());
        many.logprobs = Some(21);
        assert!(matches!(service.submit(many, Box::new(|_| ())), Err(Refusal::Invalid(_))));
    }
    assert_eq!(seen[0], seen[1], "drafts change no digit");
}

#[test]
fn an_answer_ends_where_its_text_does() {
    let prompt = prompts(3)[2].clone();
    for ahead in [false, true] {
        let options = EngineOptions { ahead, ..lanes(2) };
        let service = service(true, options, ServiceOptions::default());
        let whole = submit(&*service, ask(&prompt, 40, greedy())).wait().ids();
        // A stop string was found in the middle of what has come so far.
        let asked = submit(&*service, endless(&prompt));
        let mut tokens = Vec::new();
        while tokens.len() < 9 {
            if let Event::Tokens { tokens: new, .. } =
                asked.events.recv_timeout(PATIENCE).expect("")
            {
                tokens.extend(new.iter().map(|token| token.id));
            }
        }
        service.finish(asked.id, 7);
        let end = asked.wait();
        assert_eq!((end.done().finish, end.done().output_tokens), (Finish::Stop, 7));
        // What goes on from there is what it would be cold.
        let turn = [&prompt[..], &whole[..7], &[198, 28]].concat();
        let next = submit(&*service, ask(&turn, 12, greedy())).wait();
        let mut cold = ask(&turn, 12, greedy());
        cold.cache = CachePolicy::Off;
        let cold = submit(&*service, cold).wait();
        assert_eq!(next.ids(), cold.ids());
        assert!(next.done().cached_tokens >= prompt.len() - 1 && cold.done().cached_tokens == 0);
        // More stop tokens than the device knows of.
        let mut many = ask(&prompt, 40, greedy());
        many.stop_tokens = (40_000..40_012).chain([whole[10]]).collect();
        let stopped = submit(&*service, many).wait();
        let at = whole.iter().position(|&id| id == whole[10]).expect("it is there");
        assert_eq!((stopped.ids(), stopped.done().finish), (whole[..=at].to_vec(), Finish::Stop));
        let none = submit(&*service, ask(&prompt, 0, greedy())).wait();
        assert_eq!((none.done().finish, none.tokens.len()), (Finish::Length, 0));
        let full = submit(&*service, ask(&vec![11; 1020], 40, greedy())).wait();
        assert!(full.done().finish != Finish::Length && full.tokens.len() <= 4);
    }
}

#[test]
fn a_common_beginning_is_computed_once() {
    // Small passes, so that the others come before the first one's prompt is done.
    let options = EngineOptions { chunk: 64, ..lanes(4) };
    let service = service(false, options, ServiceOptions::default());
    let document = prompts(4)[3].clone();
    let ask_one = |i: u32| ask(&[&document[..], &[20 + i, 30, 40]].concat(), 4, greedy());
    let asked: Vec<Asked> = (0..4).map(|i| submit(&*service, ask_one(i))).collect();
    let answers: Vec<_> = asked.into_iter().map(Asked::wait).collect();
    let pages = document.len() / 64 * 64;
    let mut cached: Vec<usize> = answers.iter().map(|a| a.done().cached_tokens).collect();
    cached.sort_unstable();
    assert_eq!(cached, [0, pages, pages, pages]);
}

#[test]
fn drafters_on_the_host_are_one_for_each_lane() {
    let options = lanes(3);
    let build = move || {
        let ngram = engine::ngram::Ngram::with_capacity(options.context);
        Ok::<_, String>(engine_with(With::Host(Box::new(ngram)), options))
    };
    let service = serve(build, ServiceOptions::default()).expect("an engine");
    let prompts = prompts(4);
    let mut alone = engine(With::None);
    let asked: Vec<Asked> =
        prompts.iter().map(|p| submit(&*service, ask(p, 40, greedy()))).collect();
    let mut proposed = 0;
    for (asked, prompt) in asked.into_iter().zip(&prompts) {
        let got = asked.wait();
        let (want, _) = answer(&mut alone, &mut Session::new(0), request(prompt, 40, greedy()));
        assert_eq!(got.ids(), want);
        proposed += got.done().proposed;
    }
    assert!(proposed > 0, "nothing was ever proposed");
}

/// More lanes than one published copy has room for the likeliest tokens of.
#[test]
fn sixty_lanes_get_their_log_probabilities() {
    const LANES: usize = 60;
    let options = EngineOptions { context: 64, slots: LANES, ..EngineOptions::default() };
    let service = service(true, options, ServiceOptions::default());
    let asked = |i: usize| {
        let prompt = [50 + i as u32];
        let logprobs = Some(20);
        Request { logprobs, stop_tokens: Vec::new(), ..ask(&prompt, 4, greedy()) }
    };
    let all: Vec<Asked> = (0..LANES).map(|i| submit(&*service, asked(i))).collect();
    let answers: Vec<_> = all.into_iter().map(Asked::wait).collect();
    // Those that a batch of all had in its last parts, too.
    for i in [0, 1, 30, 50, 52, 58, 59] {
        let alone = submit(&*service, asked(i)).wait();
        assert_eq!(answers[i].tokens, alone.tokens, "lane {i}");
        assert!(alone.tokens.iter().all(|t| t.logprob.is_some() && t.alternatives.len() == 20));
    }
}

/// Before, the service counted who waits only after it had told of an end.
#[test]
fn whoever_is_told_of_an_end_finds_room() {
    let how = ServiceOptions { queue: 0, ..ServiceOptions::default() };
    let service = service(false, lanes(1), how);
    let prompt = prompts(1)[0].clone();
    let (sender, outcome) = std::sync::mpsc::channel();
    let (again, text) = (std::sync::Arc::downgrade(&service), prompt.clone());
    let sink = Box::new(move |event: Event| {
        let Some(service) = again.upgrade().filter(|_| matches!(event, Event::Done(_))) else {
            return;
        };
        let taken = service.submit(ask(&text, 2, greedy()), Box::new(|_| ()));
        // One lane and no queue: of two more, one is one too many.
        let refused = service.submit(ask(&text, 2, greedy()), Box::new(|_| ()));
        let _ = sender.send((taken, refused));
        // Not the last one to hold the service, which can't end on its own thread.
        drop(service);
    });
    service.submit(ask(&prompt, 2, greedy()), sink).expect("an idle service");
    let (taken, refused) = outcome.recv_timeout(PATIENCE).expect("an end");
    assert!(taken.is_ok(), "{taken:?}");
    assert!(matches!(refused, Err(Refusal::Busy { .. })), "{refused:?}");
}
