//! The engine as a service: many requests at once, each as if it were alone.

mod common;

use std::time::{Duration, Instant};

use common::served::{Asked, PATIENCE, ask, service, submit};
use common::{With, answer, engine, greedy, prompts, request, sampler};
use engine::service::{Event, Finish, Health, Refusal, Service};
use engine::{EngineOptions, SamplingOptions, ServiceOptions, Session};

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
fn each_answer_is_what_it_would_be_alone() {
    let prompts = prompts(6);
    let mut alone = engine(With::None);
    let samplers = |i: usize| if i % 2 == 0 { greedy() } else { seeded(i as u64) };
    let want: Vec<Vec<u32>> = prompts
        .iter()
        .enumerate()
        .map(|(i, p)| answer(&mut alone, &mut Session::new(0), request(p, 24, samplers(i))).0)
        .collect();
    for ahead in [false, true] {
        let options = EngineOptions { ahead, ..lanes(4) };
        let service = service(true, options, ServiceOptions::default());
        let asked: Vec<Asked> = prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| {
                let mut request = ask(prompt, 24, samplers(i));
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
    let running = submit(&*service, ask(&prompt, 900, greedy()));
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
    let next = submit(&*service, ask(&prompt, 4, greedy())).wait();
    assert_eq!(next.done().finish, Finish::Length);
    for (bad, why) in [(vec![], "empty"), (vec![1; 2000], "2000"), (vec![1, 49_152], "49152")] {
        let refused = service.submit(ask(&bad, 4, greedy()), Box::new(|_| ()));
        let why_not = refused.expect_err("refused").to_string();
        assert!(why_not.contains(why), "{why_not}");
    }
    assert_eq!(service.stats().refused, 4);
}
