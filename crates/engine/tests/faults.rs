//! Faults hit the lanes that they hit, and nobody else.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::faulty::{Faulty, Wrong};
use common::served::{Answer, PATIENCE, ask, endless, submit};
use common::{With, answer, engine, engine_on, greedy, prompts, request};
use engine::service::{
    CachePolicy, Constraint, Event, Finish, Health, Refusal, RequestError, Service,
};
use engine::{EngineOptions, EngineService, ServiceOptions, Session, serve};
use ops::Host;
use ops::simd::Isa;

fn service(wrong: &Arc<Wrong>, slots: usize) -> Arc<EngineService> {
    let options = EngineOptions { context: 1024, slots, snapshots: 6, ..EngineOptions::default() };
    let wrong = Arc::clone(wrong);
    let build = move || {
        let dev = Faulty::new(Host::new(Isa::detect(), 2), Arc::clone(&wrong));
        engine_on(dev, With::None, options)
    };
    serve(build, ServiceOptions::default()).expect("an engine")
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn device_error(answer: &Answer, word: &str) {
    match &answer.end {
        Err(RequestError::Device(why)) => assert!(why.contains(word), "{why}"),
        other => panic!("{other:?}"),
    }
}

/// What an answer is on a machine without faults.
fn want(prompt: &[u32], tokens: usize) -> Vec<u32> {
    answer(&mut engine(With::None), &mut Session::new(0), request(prompt, tokens, greedy())).0
}

#[test]
fn a_failed_pass_fails_its_lane_and_no_other() {
    let wrong = Wrong::nothing();
    let service = service(&wrong, 2);
    let prompts = prompts(3);
    let kept = submit(&*service, ask(&prompts[2], 8, greedy())).wait();
    // A pass fails while one lane answers and the other may still be at its prompt.
    let running = submit(&*service, endless(&prompts[0]));
    wait_for("tokens", || matches!(running.events.recv(), Ok(Event::Tokens { .. })));
    let mut other = ask(&prompts[1], 8, greedy());
    other.cache = CachePolicy::Off;
    let hit = submit(&*service, other);
    wait_for("a lane", || matches!(hit.events.recv(), Ok(Event::Started { .. })));
    wrong.after(0);
    let hit = hit.wait();
    service.cancel(running.id);
    let ended = [hit, running.wait()];
    let failed: Vec<&Answer> = ended.iter().filter(|answer| answer.end.is_err()).collect();
    assert!(!failed.is_empty(), "{ended:?}");
    failed.into_iter().for_each(|answer| device_error(answer, "as asked for"));
    assert_eq!(service.health(), Health::Serving);
    assert_eq!(service.stats().restarts, 0, "the device still worked");
    // What was kept before is still good, and so is everything else.
    let again = submit(&*service, ask(&prompts[2], 8, greedy())).wait();
    assert_eq!((again.ids(), again.done().cached_tokens), (kept.ids(), prompts[2].len() - 1));
    let fresh = submit(&*service, ask(&prompts[1], 8, greedy())).wait();
    assert_eq!(fresh.ids(), want(&prompts[1], 8));
}

#[test]
fn a_lost_device_or_a_panic_is_replaced() {
    let wrong = Wrong::nothing();
    let service = service(&wrong, 1);
    let prompt = &prompts(3)[2];
    let want = want(prompt, 8);
    for panics in [false, true] {
        let running = submit(&*service, endless(prompt));
        wait_for("tokens", || matches!(running.events.recv(), Ok(Event::Tokens { .. })));
        // This one waits meanwhile, and is answered in the end.
        let waiting = submit(&*service, ask(prompt, 8, greedy()));
        wrong.panics.store(panics, Ordering::SeqCst);
        wrong.lost.store(!panics, Ordering::SeqCst);
        wrong.after(0);
        let failed = running.wait();
        device_error(&failed, if panics { "a panic as asked for" } else { "lost" });
        assert_eq!(waiting.wait().ids(), want);
        wait_for("health", || service.health() == Health::Serving);
    }
    wait_for("the count", || service.stats().completed == 2);
    let stats = service.stats();
    assert_eq!((stats.restarts, stats.failed), (2, 2));
}

#[test]
fn a_crash_loop_stops_and_says_why() {
    let wrong = Wrong::nothing();
    let service = service(&wrong, 1);
    let prompt = &prompts(3)[2];
    let running = submit(&*service, endless(prompt));
    wait_for("tokens", || matches!(running.events.recv(), Ok(Event::Tokens { .. })));
    let waiting = submit(&*service, ask(prompt, 8, greedy()));
    wrong.out_of_memory.store(true, Ordering::SeqCst);
    wrong.lost.store(true, Ordering::SeqCst);
    device_error(&running.wait(), "lost");
    let sees = || !matches!(service.health(), Health::Serving);
    let begun = Instant::now();
    wait_for("bad health", sees);
    assert!(begun.elapsed() < Duration::from_secs(2));
    match waiting.wait().end {
        Err(RequestError::Stopped(why)) => assert!(why.contains("out of memory"), "{why}"),
        other => panic!("{other:?}"),
    }
    wait_for("the end", || matches!(service.health(), Health::Failed(_)));
    let refused = service.submit(ask(prompt, 8, greedy()), Box::new(|_| ()));
    assert!(matches!(refused, Err(Refusal::Unavailable(_))), "{refused:?}");
    let stats = service.stats();
    assert_eq!((stats.accepted, stats.failed, stats.running, stats.waiting), (2, 2, 0, 0));
}

/// A constraint that does something it must not.
struct Bad(&'static str);

impl Constraint for Bad {
    fn masks(&mut self, _: &[u32], masks: &mut [u32]) -> Result<usize, String> {
        masks.fill(u32::MAX);
        match self.0 {
            "error" => Err("a dead end".to_owned()),
            "panic" => panic!("a bad day"),
            "none" => Ok(0),
            _ => Ok(1),
        }
    }

    fn advance(&mut self, _: &[u32]) -> Result<bool, String> {
        if self.0 == "advance" { Err("not in the grammar".to_owned()) } else { Ok(false) }
    }
}

#[test]
fn a_bad_request_fails_alone() {
    let service = service(&Wrong::nothing(), 4);
    let prompts = prompts(3);
    let good = submit(&*service, ask(&prompts[0], 30, greedy()));
    for (how, word) in [
        ("error", "a dead end"),
        ("panic", "a bad day"),
        ("none", "0 of 1 masks"),
        ("advance", "not in the grammar"),
    ] {
        let mut request = ask(&prompts[1], 8, greedy());
        request.constraint = Some(Box::new(Bad(how)));
        match submit(&*service, request).wait().end {
            Err(RequestError::Request(why)) => assert!(why.contains(word), "{how}: {why}"),
            other => panic!("{how}: {other:?}"),
        }
    }
    // Whoever listens and panics is not told again; the lane is free for others.
    let listener = Box::new(|_| panic!("nobody home"));
    service.submit(ask(&prompts[2], 500, greedy()), listener).expect("taken");
    assert_eq!(good.wait().ids(), want(&prompts[0], 30));
    wait_for("the end of it", || service.stats().cancelled == 1);
    let mut late = endless(&prompts[2]);
    late.deadline = Some(Instant::now() + Duration::from_millis(300));
    assert_eq!(submit(&*service, late).wait().done().finish, Finish::Deadline);
    assert_eq!((service.health(), service.stats().failed), (Health::Serving, 4));
}

/// A conversation of its own asks the device whether it still works, as lanes do: what the host took the device to
/// hold before the failure is forgotten. Here that is a step that the failed round has moved.
#[test]
fn a_session_goes_on_after_a_failed_round() {
    let (first, tokens) = (prompts(1)[0][0], 12);
    let second = want(&[first], 1)[0];
    let right = want(&[second], tokens);
    for ahead in [false, true] {
        let wrong = Wrong::nothing();
        let dev = Faulty::new(Host::new(Isa::detect(), 2), Arc::clone(&wrong));
        let options = EngineOptions { context: 1024, ahead, ..EngineOptions::default() };
        let mut engine = engine_on(dev, With::None, options).expect("memory");
        let mut session = Session::new(0);
        let mut run = |prompt: u32, tokens: usize| {
            session.begin(&mut engine, request(&[prompt], tokens, greedy()), &|| false)?;
            let mut all = Vec::new();
            loop {
                let (new, ended) = session.next(&mut engine)?;
                all.extend_from_slice(new);
                if ended.is_some() {
                    return Ok::<_, engine::EngineError>(all);
                }
            }
        };
        assert_eq!(run(first, 1).expect("no faults"), [second]);
        wrong.after(5);
        let error = run(second, tokens).expect_err("a fault").to_string();
        assert!(error.contains("as asked for"), "{error}");
        assert_eq!(run(second, tokens).expect("no faults"), right, "ahead {ahead}");
        wrong.lost.store(true, Ordering::SeqCst);
        assert!(run(first, 1).expect_err("lost").to_string().contains("the device is lost"));
    }
}
