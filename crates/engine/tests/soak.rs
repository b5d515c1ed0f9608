//! Eight clients that cancel, overflow and disconnect at random: nobody is forgotten, nothing fails that
//! was not made to, and memory stays where it is.
//!
//! A few seconds by default; TH_SOAK_SECONDS=1800 for the long one.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::served::{PATIENCE, ask, service, submit};
use common::{greedy, prompts, sampler};
use engine::service::{Event, Finish, Health, Priority, Refusal, Service};
use engine::{EngineOptions, SamplingOptions, ServiceOptions};

fn seconds() -> u64 {
    #[expect(clippy::disallowed_methods, reason = "an opt-in for a longer test")]
    let asked = std::env::var("TH_SOAK_SECONDS").ok();
    asked.map_or(4, |text| text.parse().expect("TH_SOAK_SECONDS is a number of seconds"))
}

/// Memory that this process has of its own, in kB; `None` where the system doesn't say.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    Some(field("RssAnon:")? + field("VmSwap:").unwrap_or(0))
}

#[derive(Default)]
struct Count {
    taken: AtomicU64,
    refused: AtomicU64,
    done: AtomicU64,
    cancelled: AtomicU64,
    disconnected: AtomicU64,
}

/// One client; returns when the time is over and all its requests have ended.
fn client(service: &dyn Service, seed: u64, until: Instant, count: &Count) {
    let prompts = prompts(12);
    let mut state = seed;
    let mut below = |bound: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % bound
    };
    while Instant::now() < until {
        let mut prompt = prompts[below(12) as usize].clone();
        prompt.extend((0..below(30)).map(|_| below(49_000) as u32));
        if below(20) == 0 {
            prompt = vec![7; 5000];
        }
        let options = SamplingOptions { seed: Some(below(9)), ..SamplingOptions::default() };
        let sampler = if below(2) == 0 { greedy() } else { sampler(options) };
        let mut request = ask(&prompt, below(60) as usize, sampler);
        request.priority = [Priority::Low, Priority::Normal, Priority::High][below(3) as usize];
        if below(10) == 0 {
            request.deadline = Some(Instant::now() + Duration::from_millis(below(300)));
        }
        if below(15) == 0 {
            // Gone before the first token.
            let (gone, taken) = std::sync::mpsc::channel::<()>();
            drop(taken);
            let listener = Box::new(move |_| gone.send(()).expect("a client that has gone"));
            let taken = service.submit(request, listener).is_ok();
            let which = if taken { &count.taken } else { &count.refused };
            which.fetch_add(1, Ordering::Relaxed);
            count.disconnected.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        let (sender, events) = std::sync::mpsc::channel();
        let sink = Box::new(move |event| drop(sender.send(event)));
        let id = match service.submit(request, sink) {
            Ok(id) => id,
            Err(Refusal::Busy { .. } | Refusal::TooLong { .. }) => {
                count.refused.fetch_add(1, Ordering::Relaxed);
                // Clients that only knock would keep the processors from those that were let in.
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        count.taken.fetch_add(1, Ordering::Relaxed);
        let cancel_after = (below(4) == 0).then(|| below(6));
        let mut heard = 0;
        loop {
            if cancel_after == Some(heard) {
                service.cancel(id);
            }
            heard += 1;
            match events.recv_timeout(PATIENCE).expect("no request is forgotten") {
                Event::Done(done) => {
                    let cancelled = matches!(done.finish, Finish::Cancelled | Finish::Deadline);
                    let which = if cancelled { &count.cancelled } else { &count.done };
                    which.fetch_add(1, Ordering::Relaxed);
                    break;
                }
                Event::Failed(error) => panic!("an error that nobody caused: {error}"),
                _ => {}
            }
        }
    }
}

#[test]
fn clients_come_and_go() {
    let options =
        EngineOptions { context: 1024, slots: 4, snapshots: 12, ..EngineOptions::default() };
    let how = ServiceOptions { queue: 3, ..ServiceOptions::default() };
    let service = service(true, options, how);
    // Listeners that are gone panic on purpose; their words are not for the test's output.
    std::panic::set_hook(Box::new(|info| {
        if !info.to_string().contains("a client that has gone") {
            eprintln!("{info}");
        }
    }));
    let count = Arc::new(Count::default());
    let all = Duration::from_secs(seconds());
    let begun = Instant::now();
    let mut after_warm_up = None;
    std::thread::scope(|scope| {
        for seed in 0..8 {
            let (service, count) = (&*service, &*count);
            scope.spawn(move || client(service, seed, begun + all, count));
        }
        std::thread::sleep(all / 2);
        after_warm_up = resident();
    });
    let begun = Instant::now();
    while service.stats().running + service.stats().waiting > 0 {
        assert!(begun.elapsed() < PATIENCE, "{:?}", service.stats());
        std::thread::sleep(Duration::from_millis(5));
    }
    // One more, so that what was counted last is shown.
    let last = submit(&*service, ask(&prompts(1)[0], 1, greedy())).wait();
    assert_eq!(last.done().finish, Finish::Length);
    assert_eq!(service.health(), Health::Serving);
    service.drain(Duration::from_secs(10));
    let (stats, of) = (service.stats(), |c: &AtomicU64| c.load(Ordering::Relaxed));
    println!("{} taken, {} refused: {stats:?}", of(&count.taken), of(&count.refused));
    assert_eq!((stats.accepted, stats.refused), (of(&count.taken) + 1, of(&count.refused)));
    assert_eq!((stats.failed, stats.restarts), (0, 0));
    assert_eq!(stats.completed + stats.cancelled, stats.accepted);
    assert!(of(&count.done) > 0 && of(&count.cancelled) + of(&count.disconnected) > 0);
    if let (Some(before), Some(after)) = (after_warm_up, resident()) {
        // What the pages of the cache had not touched by half time they may touch later.
        let room = if all >= Duration::from_secs(60) { 32 << 10 } else { 256 << 10 };
        assert!(after < before + room, "{before} kB grew to {after} kB");
    }
}
