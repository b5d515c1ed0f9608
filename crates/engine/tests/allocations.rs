//! After load nothing allocates in a steady round (ARCHITECTURE.md, invariant 7).
//!
//! A test binary of its own: the allocator counts what every thread of the process asks for, so
//! nothing else may run beside the one test.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{How, Scripted, With, engine, greedy, prompts, request, sampler};
use engine::ngram::Ngram;
use engine::{Drafter, Engine, Rule, Sampler, SamplingOptions, Session};
use ops::Host;

/// The system's allocator, with a count of the memory asked for.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Rounds before those that count: an answer's first ones may touch what load did not.
const WARM_UP: usize = 3;
/// Rounds that count.
const ROUNDS: usize = 16;
/// Tokens of the prompt: even a token a round leads past position 128, where a page begins.
const PROMPT: usize = 120;

/// Allocations of all threads while `body` runs.
fn allocations(body: &mut dyn FnMut()) -> usize {
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    body();
    ALLOCATIONS.load(Ordering::SeqCst) - before
}

/// Allocations of the steady rounds of one answer; `each` runs after every round.
fn of_rounds(engine: &mut Engine<Host>, sampler: Sampler, each: &mut dyn FnMut()) -> usize {
    let mut session = Session::new(0);
    let mut asked = request(&prompts(3)[2][..PROMPT], 2000, sampler);
    asked.stop_tokens.clear();
    session.begin(engine, asked, &|| false).expect("a prompt");
    let mut round = |engine: &mut Engine<Host>| {
        let (tokens, ended) = session.next(engine).expect("a round");
        assert!(!tokens.is_empty() && ended.is_none(), "the answer ended early: {ended:?}");
        each();
    };
    (0..WARM_UP).for_each(|_| round(engine));
    allocations(&mut || (0..ROUNDS).for_each(|_| round(engine)))
}

fn samplers() -> [(&'static str, Sampler); 4] {
    let sampled = |rule| {
        sampler(SamplingOptions {
            temperature: Some(0.8),
            top_k: Some(50),
            top_p: Some(0.9),
            min_p: Some(0.01),
            presence_penalty: Some(0.2),
            frequency_penalty: Some(0.1),
            repetition_penalty: Some(1.1),
            logit_bias: vec![(11, -1.0), (260, 0.5)],
            seed: Some(7),
            rule: Some(rule),
        })
    };
    [
        ("greedy", greedy()),
        ("token rule", sampled(Rule::Token)),
        ("block rule", sampled(Rule::Block)),
        ("invariant rule", sampled(Rule::Invariant)),
    ]
}

#[test]
fn a_steady_round_allocates_nothing() {
    let mut e = engine(With::DFlash);
    let scripted = Scripted { text: Vec::new(), seen: 0, how: How::Ragged };
    let drafters = [
        Drafter::DFlash,
        Drafter::None,
        Drafter::host(Box::new(Ngram::with_capacity(e.context()))),
        Drafter::host(Box::new(scripted)),
    ];
    for drafter in drafters {
        e.set_drafter(drafter);
        for (name, sampler) in samplers() {
            let device = e.dev.mem().bytes();
            let count = of_rounds(&mut e, sampler, &mut || ());
            let drafter = e.drafter().name();
            assert_eq!(count, 0, "{drafter}, {name}: allocations in {ROUNDS} rounds");
            assert_eq!(e.dev.mem().bytes(), device, "{drafter}, {name}: the device's memory grew");
        }
    }

    // The arm that must fail: one byte, once a round, is seen, and so is one from another thread.
    let mut spoilt = || drop(std::hint::black_box(Box::new(1u8)));
    assert_eq!(of_rounds(&mut e, greedy(), &mut spoilt), ROUNDS);
    let pool = ops::Pool::new(2);
    let elsewhere = allocations(&mut || {
        pool.run(8, &|_| drop(std::hint::black_box(Vec::<u8>::with_capacity(9))));
    });
    assert_eq!(elsewhere, 8);
}
