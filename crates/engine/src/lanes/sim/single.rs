//! Single scenes on the simulation's machine.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::fake::{Fake, Faults, Time, VOCAB, round_time};
use super::{Sim, World};
use crate::lanes::{Core, Job, Limits, Rules};
use crate::sampler::{SamplingDefaults, SamplingOptions};
use crate::service::{CachePolicy, Event, Priority, Request, RequestId};

/// A job nobody listens to.
fn quiet(id: u64, prompt: &[u32], boundaries: Vec<usize>) -> Job {
    let greedy = SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() };
    let request = Request {
        prompt: prompt.to_vec(),
        boundaries,
        max_tokens: 1,
        stop_tokens: Vec::new(),
        sampler: greedy.resolve(&SamplingDefaults::default(), VOCAB).expect("valid options"),
        logprobs: None,
        constraint: None,
        draft: false,
        priority: Priority::Normal,
        deadline: None,
        cache: CachePolicy::Shared,
    };
    Job {
        id: RequestId(id),
        remaining: request.prompt.len(),
        request,
        events: Box::new(|_| ()),
        submitted: Duration::ZERO,
        deadline: None,
        overtaken: 0,
        deaf: false,
        loading: None,
    }
}

/// A High job that waits for what a Low lane computes doesn't wait for the Normal ones that would come before that lane.
#[test]
fn nobody_waits_for_less_important_ones_behind_others() {
    let clock = Time::default();
    let shared: Vec<u32> = (0..400).map(|i| i * i % VOCAB as u32).collect();
    let sim = Sim::new(1, World::default());
    let limits = Limits { snapshots: 8, slots: 4, pages: 80, depth: 1, ..sim.limits };
    let rules = Rules { grid: 2048, exact: false, ..sim.rules };
    let mut core = Core::new(Fake::new(limits, 1, clock.clone(), Faults::default()), rules, None);
    let heard: Arc<Mutex<Vec<u64>>> = Arc::default();
    let submit = |core: &mut Core<Fake>, id: u64, priority: Priority, prompt: &[u32]| {
        let mut job = quiet(id, prompt, Vec::new());
        job.request.priority = priority;
        let heard = Arc::clone(&heard);
        job.events = Box::new(move |event| {
            if let Event::Done(_) = event {
                heard.lock().expect("no panics").push(id);
            }
        });
        core.submit(job);
    };
    let step = |core: &mut Core<Fake>| core.step(&|| clock.now()).expect("no faults");
    submit(&mut core, 1, Priority::Low, &shared);
    // It has its lane and a first slice.
    while core.stats().prefill_passes == 0 {
        step(&mut core);
    }
    // Two Normal ones, each with more to do than anyone waits for.
    for id in [2, 3] {
        let other: Vec<u32> = (0..500).map(|i| (i * 7 + id as u32) % VOCAB as u32).collect();
        submit(&mut core, id, Priority::Normal, &other);
    }
    submit(&mut core, 4, Priority::High, &[&shared[..380], &[5; 10]].concat());
    while !core.is_idle() {
        step(&mut core);
    }
    assert_eq!(heard.lock().expect("no panics").first(), Some(&4), "{heard:?}");
    assert!(core.stats().cached_tokens >= 320, "and it did wait for the Low one's work");
}

/// What goes on from a checkpoint inside a page is computed in other pieces than a prompt that found
/// nothing, so it is not exact.
#[test]
fn only_whole_pages_stay_exact() {
    let clock = Time::default();
    let prompt: Vec<u32> = (0..300).map(|i| i * i % VOCAB as u32).collect();
    // What the first prompt's passes computed ends inside a page, or with one. The second prompt parts
    // there: its next token is another.
    for (first, exact) in [(101, 0), (129, 192)] {
        let mut second = prompt[..250].to_vec();
        second[first - 1] = (second[first - 1] + 1) % VOCAB as u32;
        let sim = Sim::new(1, World::default());
        let limits = Limits { snapshots: 8, slots: 1, pages: 40, ..sim.limits };
        let fake = Fake::new(limits, 1, clock.clone(), Faults::default());
        let rules = Rules { grid: 2048, exact: false, ..sim.rules };
        let mut core = Core::new(fake, rules, None);
        for job in [quiet(1, &prompt[..first], Vec::new()), quiet(2, &second, vec![192])] {
            core.submit(job);
            while !core.is_idle() {
                core.step(&|| clock.now()).expect("no faults");
            }
        }
        let found = |policy| core.cache.find(&second[..200], policy).tokens();
        assert_eq!(found(CachePolicy::Shared), 192);
        assert_eq!(found(CachePolicy::Exact), exact, "after {first}");
    }
}

/// A device that runs ahead computes a round while the host does other things; that round took as long nevertheless.
#[test]
fn what_a_round_took_does_not_depend_on_when_the_host_comes_back() {
    for away in [0, 2_000] {
        let clock = Time::default();
        let sim = Sim::new(1, World::default());
        let sizes = Limits { slots: 1, pages: 40, block: 4, ..sim.limits };
        let limits = Limits { depth: 2, adapts: true, like_alone: usize::MAX, ..sizes };
        let fake = Fake::new(limits, 1, clock.clone(), Faults::default());
        let mut core = Core::new(fake, sim.rules, None);
        let mut job = quiet(1, &[1, 2, 3], Vec::new());
        (job.request.max_tokens, job.request.draft) = (200, true);
        core.submit(job);
        while !core.is_idle() {
            core.step(&|| clock.now()).expect("no faults");
            clock.pass(away);
        }
        for drafted in [false, true] {
            let (took, want) = (core.paces[0].seconds(drafted), round_time(1).as_secs_f64());
            assert!((took / want - 1.0).abs() < 0.05, "{took} s, {away} us away, {drafted}");
        }
    }
}
