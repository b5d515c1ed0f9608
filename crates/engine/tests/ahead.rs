//! Submitting a round before the one before it was read changes no token.

mod common;

use common::faulty::{Faulty, Wrong};
use common::{With, answer, engine, engine_on, engine_with, greedy, prompts, request, sampler};
use engine::{Drafter, Engine, EngineOptions, FinishReason, SamplingOptions, Session};
use ops::Host;
use ops::simd::Isa;

fn ahead(with: With, context: usize, slots: usize) -> Engine<Host> {
    engine_with(with, EngineOptions { context, slots, ahead: true, ..EngineOptions::default() })
}

fn with(draft: bool) -> With {
    if draft { With::DFlash } else { With::None }
}

fn seeded() -> engine::Sampler {
    sampler(SamplingOptions {
        temperature: Some(0.8),
        frequency_penalty: Some(0.3),
        seed: Some(5),
        ..SamplingOptions::default()
    })
}

#[test]
fn texts_are_the_same() {
    for draft in [false, true] {
        let (mut a, mut b) = (engine(with(draft)), ahead(with(draft), 2048, 1));
        // One session for all: each answer finds the rounds that the one before left in flight.
        let mut session = Session::new(0);
        for prompt in &prompts(3) {
            for make in [greedy, seeded] {
                let (want, rounds) =
                    answer(&mut a, &mut Session::new(0), request(prompt, 24, make()));
                let (got, more) = answer(&mut b, &mut session, request(prompt, 24, make()));
                assert_eq!((got, more), (want, rounds), "draft {draft}");
            }
        }
    }
}

#[test]
fn limits_hold_to_the_token() {
    let prompt = &prompts(2)[1];
    let mut e = ahead(With::DFlash, 2048, 1);
    let mut session = Session::new(0);
    let (whole, _) = answer(&mut e, &mut session, request(prompt, 24, greedy()));
    for max in 1..=24 {
        let (tokens, _) = answer(&mut e, &mut session, request(prompt, max, greedy()));
        assert_eq!(tokens, whole[..max.min(whole.len())], "max_tokens {max}");
        assert!(e.in_flight(0) <= 1);
    }
}

#[test]
fn an_answer_ends_where_the_context_does() {
    let prompt = &prompts(2)[1];
    let (whole, _) =
        answer(&mut engine(With::None), &mut Session::new(0), request(prompt, 80, greedy()));
    for room in [1, 7, 30] {
        for (draft, run_ahead) in [(false, false), (true, false), (false, true), (true, true)] {
            let options = EngineOptions {
                context: prompt.len() + room,
                ahead: run_ahead,
                ..EngineOptions::default()
            };
            let mut e = engine_with(with(draft), options);
            let mut session = Session::new(0);
            session.begin(&mut e, request(prompt, 1000, greedy()), &|| false).expect("a prompt");
            let mut tokens = Vec::new();
            let why = loop {
                let (new, ended) = session.next(&mut e).expect("a round");
                tokens.extend_from_slice(new);
                if let Some(why) = ended {
                    break why;
                }
            };
            assert_eq!((why, tokens.len()), (FinishReason::Context, room));
            assert_eq!(tokens, whole[..room]);
        }
    }
}

#[test]
fn turns_continue_from_the_cache() {
    let prompt = prompts(2)[1].clone();
    for draft in [false, true] {
        let mut e = ahead(with(draft), 2048, 1);
        let mut session = Session::new(0);
        let (first, _) = answer(&mut e, &mut session, request(&prompt, 40, greedy()));
        let cached = session.cached().len();
        let longer = [prompt.as_slice(), &first, &[198, 28, 1604]].concat();
        let (second, _) = answer(&mut e, &mut session, request(&longer, 40, greedy()));
        assert_eq!(session.stats().cached_tokens, cached, "the cache was used");
        assert!(cached > prompt.len(), "and held generated tokens");
        let mut cold = engine(with(draft));
        let (want, _) = answer(&mut cold, &mut Session::new(0), request(&longer, 40, greedy()));
        assert_eq!(second, want);
    }
}

#[test]
fn an_answer_cut_anywhere_harms_nothing() {
    let prompt = prompts(3)[2].clone();
    let mut e = ahead(With::DFlash, 2048, 1);
    let (whole, _) = answer(&mut e, &mut Session::new(0), request(&prompt, 40, greedy()));
    for cut in 1..12 {
        let mut session = Session::new(0);
        session.begin(&mut e, request(&prompt, 40, greedy()), &|| false).expect("a prompt");
        let mut tokens = Vec::new();
        while tokens.len() < cut {
            let (new, _) = session.next(&mut e).expect("a round");
            tokens.extend_from_slice(new);
        }
        session.truncate(&e, cut - (tokens.len() - session.last_tokens().len()));
        tokens.truncate(cut);
        let next = [prompt.as_slice(), &tokens, &whole[cut..cut + 2]].concat();
        let (rest, _) = answer(&mut e, &mut session, request(&next, 20, greedy()));
        assert_eq!(rest, &whole[cut + 2..cut + 22], "cut at {cut}");
    }
}

#[test]
fn two_sessions_may_take_turns() {
    let prompts = prompts(2);
    let mut alone = engine(With::DFlash);
    let mut e = ahead(With::DFlash, 1024, 2);
    let mut sessions = [Session::new(0), Session::new(1)];
    let mut texts = [Vec::new(), Vec::new()];
    for (session, prompt) in sessions.iter_mut().zip(&prompts) {
        session.begin(&mut e, request(prompt, 30, seeded()), &|| false).expect("a prompt");
    }
    let mut running = [true, true];
    while running.contains(&true) {
        for i in 0..2 {
            if running[i] {
                let (new, ended) = sessions[i].next(&mut e).expect("a round");
                texts[i].extend_from_slice(new);
                running[i] = ended.is_none();
            }
        }
    }
    for (text, prompt) in texts.iter().zip(&prompts) {
        let (want, _) = answer(&mut alone, &mut Session::new(0), request(prompt, 30, seeded()));
        assert_eq!(*text, want);
    }
}

/// A plain round of an engine that drafts takes its draft along, one of an engine that doesn't has none.
#[test]
fn recordings_tell_sequences_apart() {
    let dev = Faulty::new(Host::new(Isa::detect(), 2), Wrong::nothing());
    let options =
        EngineOptions { context: 1024, ahead: true, adapt: true, ..EngineOptions::default() };
    let mut e = engine_on(dev, With::DFlash, options).expect("memory");
    for drafter in [Drafter::DFlash, Drafter::None] {
        e.set_drafter(drafter);
        let mut session = Session::new(0);
        session.begin(&mut e, request(&prompts(2)[1], 40, greedy()), &|| false).expect("a prompt");
        // The first rounds try both kinds.
        while session.next(&mut e).expect("a round").1.is_none() {}
    }
}
