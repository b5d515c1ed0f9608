//! Speculation never changes a token.

mod common;

use common::{How, Scripted, With, answer, engine, engine_with, greedy, prompts, request, sampler};
use engine::ngram::Ngram;
use engine::{Engine, EngineOptions, Request, Rule, SamplingOptions, Session};
use ops::{DryRun, Host, KvDtype};

/// Tokens of each answer: 256 in the full run, fewer by default to keep the suite short.
fn sizes() -> (usize, usize) {
    #[expect(clippy::disallowed_methods, reason = "an opt-in for a longer test")]
    match std::env::var("TH_SLOW_TESTS") {
        Ok(_) => (20, 256),
        Err(_) => (6, 64),
    }
}

fn fresh(engine: &mut Engine<Host>, request: Request) -> (Vec<u32>, usize) {
    answer(engine, &mut Session::new(0), request)
}

/// All answers of a plain engine, then of every drafter, under `make`'s sampling.
fn same_with_any_drafter(make: &dyn Fn(usize) -> engine::Sampler) {
    let (count, tokens) = sizes();
    let prompts = prompts(count);
    let mut plain = engine(With::None);
    let want: Vec<Vec<u32>> = prompts
        .iter()
        .enumerate()
        .map(|(i, p)| fresh(&mut plain, request(p, tokens, make(i))).0)
        .collect();
    assert!(
        want.iter().any(|text| text.len() > tokens / 2),
        "answers long enough to mean anything"
    );

    let mut drafted = engine(With::DFlash);
    let (mut rounds, mut emitted) = (0, 0);
    for (i, prompt) in prompts.iter().enumerate() {
        let (got, n) = fresh(&mut drafted, request(prompt, tokens, make(i)));
        assert_eq!(got, want[i], "DFlash on prompt {i}");
        (rounds, emitted) = (rounds + n, emitted + got.len());
    }
    println!("DFlash: {:.2} tokens a round", emitted as f64 / rounds as f64);
    assert!(emitted > rounds, "the draft was never right, so nothing was tested");

    let mut looked_up = engine(With::Host(Box::new(Ngram::with_capacity(2048))));
    for (i, prompt) in prompts.iter().enumerate() {
        let (got, _) = fresh(&mut looked_up, request(prompt, tokens, make(i)));
        assert_eq!(got, want[i], "n-gram on prompt {i}");
    }
    for how in [How::AlwaysRight, How::AlwaysWrong, How::Random, How::Ragged] {
        for (i, prompt) in prompts.iter().enumerate().take(2) {
            let text = [prompt.as_slice(), &want[i]].concat();
            let drafter = Scripted { text, seen: 0, how };
            let mut scripted = engine(With::Host(Box::new(drafter)));
            let (got, n) = fresh(&mut scripted, request(prompt, tokens, make(i)));
            assert_eq!(got, want[i], "{how:?} on prompt {i}");
            match how {
                How::AlwaysRight => assert!(n <= want[i].len().div_ceil(8) + 1, "{n} rounds"),
                How::AlwaysWrong => assert_eq!(n, want[i].len()),
                How::Random | How::Ragged => {}
            }
        }
    }
}

#[test]
fn greedy_text_is_the_same_with_any_drafter() {
    same_with_any_drafter(&|_| greedy());
}

#[test]
fn seeded_text_is_the_same_with_any_drafter() {
    same_with_any_drafter(&|i| {
        let s = sampler(SamplingOptions {
            temperature: Some(0.7),
            top_k: Some(40),
            top_p: Some(0.95),
            repetition_penalty: Some(1.1),
            seed: Some(1000 + i as u64),
            ..SamplingOptions::default()
        });
        assert_eq!(s.rule, Rule::Invariant);
        s
    });
}

#[test]
fn penalties_count_along_the_block() {
    same_with_any_drafter(&|_| {
        sampler(SamplingOptions {
            temperature: Some(0.0),
            presence_penalty: Some(0.7),
            frequency_penalty: Some(0.4),
            repetition_penalty: Some(1.2),
            ..SamplingOptions::default()
        })
    });
}

#[test]
fn seeds_decide_and_nothing_else() {
    let prompt = &prompts(2)[1];
    let mut e = engine(With::DFlash);
    for rule in [Rule::Token, Rule::Block, Rule::Invariant] {
        let mut run = |seed| {
            let options = SamplingOptions {
                temperature: Some(1.0),
                seed: Some(seed),
                rule: Some(rule),
                ..SamplingOptions::default()
            };
            fresh(&mut e, request(prompt, 48, sampler(options))).0
        };
        let (first, other, again) = (run(1), run(2), run(1));
        assert_eq!(first, again, "{rule:?}");
        assert_ne!(first, other, "{rule:?}");
    }
}

#[test]
fn a_second_turn_continues_from_the_cache() {
    let prompt = prompts(2)[1].clone();
    for with in [With::None, With::DFlash] {
        let mut e = engine(with);
        let mut session = Session::new(0);
        let (first, _) = answer(&mut e, &mut session, request(&prompt, 40, greedy()));
        let longer = [prompt.as_slice(), &first, &[198, 28, 1604]].concat();
        let cached = session.cached().len();
        let (second, _) = answer(&mut e, &mut session, request(&longer, 40, greedy()));
        assert_eq!(session.stats().cached_tokens, cached, "the cache was used");
        assert!(cached > prompt.len(), "and held generated tokens");
        let (cold, _) = fresh(&mut e, request(&longer, 40, greedy()));
        assert_eq!(second, cold);
        // A prompt that doesn't continue it starts over.
        let (again, _) = answer(&mut e, &mut session, request(&prompt, 40, greedy()));
        assert_eq!(again, first);
        assert_eq!(session.stats().cached_tokens, 0);
    }
}

#[test]
fn an_answer_cut_anywhere_leaves_a_usable_cache() {
    let prompt = prompts(3)[2].clone();
    let mut e = engine(With::DFlash);
    let (whole, _) = fresh(&mut e, request(&prompt, 40, greedy()));
    for cut in 0..12 {
        let mut session = Session::new(0);
        session.begin(&mut e, request(&prompt, 40, greedy()), &|| false).expect("a prompt");
        let mut tokens = Vec::new();
        while tokens.len() < cut.max(1) {
            let (new, _) = session.next(&mut e).expect("a round");
            tokens.extend_from_slice(new);
        }
        let before = tokens.len() - session.last_tokens().len();
        session.truncate(&e, cut - before);
        tokens.truncate(cut);
        let next = [prompt.as_slice(), &tokens, &whole[cut..cut + 2]].concat();
        let (rest, _) = answer(&mut e, &mut session, request(&next, 20, greedy()));
        assert!(session.stats().cached_tokens >= prompt.len() - 1, "cut at {cut}");
        assert_eq!(rest, &whole[cut + 2..cut + 22], "cut at {cut}");
    }
}

#[test]
fn bad_prompts_are_refused_and_harm_nothing() {
    let mut e = engine(With::DFlash);
    let mut session = Session::new(0);
    for (prompt, word) in
        [(vec![], "empty"), (vec![1; 5000], "5000 tokens"), (vec![1, 49_152], "49152")]
    {
        let error = session.begin(&mut e, request(&prompt, 4, greedy()), &|| false);
        let text = error.expect_err("refused").to_string();
        assert!(text.contains(word), "{text}");
    }
    let (tokens, _) = answer(&mut e, &mut session, request(&prompts(1)[0], 8, greedy()));
    assert!(!tokens.is_empty());
}

#[test]
fn limits_hold_to_the_token() {
    let prompt = &prompts(2)[1];
    let mut e = engine(With::DFlash);
    let (whole, _) = fresh(&mut e, request(prompt, 24, greedy()));
    for max in 1..=24 {
        let (tokens, _) = fresh(&mut e, request(prompt, max, greedy()));
        assert_eq!(tokens, whole[..max.min(whole.len())], "max_tokens {max}");
    }
}

#[test]
fn which_rounds_draft_changes_no_token() {
    let mut plain = engine(With::None);
    let seeded = sampler(SamplingOptions {
        temperature: Some(0.7),
        seed: Some(3),
        ..SamplingOptions::default()
    });
    for prompt in &prompts(3)[1..] {
        for make in [&greedy(), &seeded] {
            let request = request(prompt, 64, make.clone());
            let (want, _) = fresh(&mut plain, request.clone());
            for ahead in [false, true] {
                let options =
                    EngineOptions { context: 2048, adapt: true, ahead, ..EngineOptions::default() };
                let mut adapting = engine_with(With::DFlash, options);
                let mut session = Session::new(0);
                let (got, rounds) = answer(&mut adapting, &mut session, request.clone());
                assert_eq!(got, want, "ahead {ahead}");
                // The first rounds try both kinds, so neither can have been left out.
                let proposed = session.stats().proposed;
                assert!(rounds < 13 || (proposed > 0 && proposed < 7 * rounds), "{proposed}");
            }
        }
    }
}

/// A key's code depends on its row alone, so the text is the same with a draft here too; and everything
/// that says how large pages are says that they are smaller.
#[test]
fn int8_pages_keep_text_the_same_with_a_draft() {
    let with = |with, kv| {
        let options = EngineOptions { context: 2048, kv, ..EngineOptions::default() };
        engine_with(with, options)
    };
    let (count, tokens) = sizes();
    let (mut plain, mut drafted) =
        (with(With::None, KvDtype::Int8), with(With::DFlash, KvDtype::Int8));
    let mut in_bf16 = with(With::DFlash, KvDtype::Bf16);
    let (mut emitted, mut rounds, mut rounds_in_bf16) = (0, 0, 0);
    for (i, prompt) in prompts(count).iter().enumerate() {
        let (want, _) = fresh(&mut plain, request(prompt, tokens, greedy()));
        let (got, n) = fresh(&mut drafted, request(prompt, tokens, greedy()));
        assert_eq!(got, want, "prompt {i}");
        (emitted, rounds) = (emitted + got.len(), rounds + n);
        rounds_in_bf16 += fresh(&mut in_bf16, request(prompt, tokens, greedy())).1;
    }
    println!("{emitted} tokens in {rounds} rounds; {rounds_in_bf16} rounds with pages in bf16");
    assert!(emitted > rounds, "the draft was never right, so nothing was tested");

    // Heads of 64 elements: 68 bytes in place of 128.
    let smaller = |large: u64, small: u64| assert_eq!(small * 128, large * 68);
    smaller(in_bf16.memory().kv, drafted.memory().kv);
    smaller(in_bf16.round_bytes(1000).kv, drafted.round_bytes(1000).kv);
    smaller(in_bf16.page_bytes() as u64, drafted.page_bytes() as u64);
    let pages = drafted.memory().kv / drafted.page_bytes() as u64;
    assert_eq!(pages, 2056u64.div_ceil(64), "all pages and nothing else");
}

#[test]
fn a_device_without_kernels_for_int8_pages_refuses_them() {
    let card = ops::kernel::Card { arch: 90, sms: 132, shared: 227 << 10 };
    for (dev, kv, able) in [
        (DryRun::on_card(card), KvDtype::Int8, false),
        (DryRun::on_card(card), KvDtype::Bf16, true),
        (DryRun::new(ops::ActDtype::I8), KvDtype::Int8, true),
    ] {
        let options = EngineOptions { kv, ..EngineOptions::default() };
        let built = common::engine_on(dev, With::None, options);
        match built {
            Ok(_) => assert!(able),
            Err(why) => {
                assert!(!able && why.contains("int8") && why.contains("--kv bf16"), "{why}")
            }
        }
    }
}
