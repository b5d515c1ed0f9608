use engine::service::{Finish, Token};

use super::*;
use crate::telemetry::record::TokenCounts;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn tokens(count: usize, proposed: usize) -> Event {
    let token = Token { id: 1, logprob: None, alternatives: Vec::new() };
    Event::Tokens { tokens: vec![token; count], proposed }
}

fn started(queued: Duration, tokens: usize) -> Event {
    let source = if tokens > 0 { CacheSource::Memory } else { CacheSource::None };
    Event::Started { queued, cache: CacheUse { tokens, source, miss: "cold" } }
}

fn done(output: usize, rounds: usize) -> Done {
    Done {
        finish: Finish::Stop,
        prompt_tokens: 100,
        cached_tokens: 64,
        output_tokens: output,
        rounds,
        proposed: 7 * rounds,
        accepted: output - rounds,
        queued: ms(10),
        prefill: ms(50),
        decode: ms(200),
        cache: CacheUse { tokens: 64, source: CacheSource::Memory, miss: "" },
    }
}

/// Every span lies in its parent, and brothers that are parts of one course follow each other.
fn check_nesting(spans: &[Span], from: u64, to: u64) {
    for span in spans {
        let end = span.start_us + span.duration_us;
        assert!(from <= span.start_us && end <= to, "{} {from} {to} {span:?}", span.name);
        check_nesting(&span.children, span.start_us, end);
        for pair in span.children.windows(2) {
            assert!(pair[0].start_us + pair[0].duration_us <= pair[1].start_us, "{}", span.name);
        }
    }
}

fn named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no {name} in {spans:?}"))
}

#[test]
fn a_request_is_told_from_end_to_end() {
    let origin = Instant::now();
    let at = |t| origin + ms(t);
    let mut timeline = Timeline::begin(origin);
    timeline.stage(Stage::Template, at(1), at(3));
    timeline.stage(Stage::Tokenise, at(3), at(5));
    timeline.observe(0, &started(ms(10), 64), at(20));
    timeline.observe(0, &Event::Prefill { done: 80, total: 100 }, at(40));
    timeline.observe(0, &Event::Prefill { done: 100, total: 100 }, at(70));
    timeline.observe(0, &tokens(3, 7), at(110));
    timeline.detokenised(0, ms(1), at(111));
    timeline.observe(0, &tokens(5, 7), at(150));
    timeline.detokenised(0, ms(2), at(152));
    timeline.observe(0, &Event::Done(done(8, 2)), at(155));
    let mut record = Record::default();
    timeline.finish(&mut record, at(160));
    assert_eq!(record.duration_us, 160_000);
    assert_eq!(record.first_token_us, Some(110_000));
    let counts = TokenCounts { prompt: 100, cached: 64, output: 8, reasoning: 0 };
    assert_eq!(record.tokens, counts);
    assert_eq!((record.queue_us, record.prefill_us, record.decode_us), (10_000, 50_000, 200_000));
    assert_eq!((record.draft.rounds, record.draft.proposed, record.draft.accepted), (2, 14, 6));
    assert_eq!(record.cache.source, "memory");
    let names: Vec<&str> = record.spans.iter().map(|span| span.name.as_str()).collect();
    let expected =
        ["template", "tokenise", "queue", "cache lookup", "prefill", "decode", "detokenise"];
    assert_eq!(names, expected);
    check_nesting(&record.spans, 0, record.duration_us);
    let queue = named(&record.spans, "queue");
    assert_eq!((queue.start_us, queue.duration_us), (10_000, 10_000));
    let prefill = named(&record.spans, "prefill");
    assert_eq!((prefill.start_us, prefill.duration_us), (20_000, 50_000));
    let chunks: Vec<u64> =
        prefill.children.iter().map(|c| c.attributes["tokens"].as_u64().unwrap()).collect();
    assert_eq!(chunks, [16, 20], "what the cache had was not computed");
    let decode = named(&record.spans, "decode");
    assert_eq!((decode.start_us, decode.duration_us), (70_000, 80_000));
    assert_eq!(named(&record.spans, "detokenise").duration_us, 3_000);
}

#[test]
fn many_rounds_are_merged_and_none_is_lost() {
    for rounds in [1u64, 2, 63, 64, 65, 128, 129, 1000, 4097] {
        let origin = Instant::now();
        let mut timeline = Timeline::begin(origin);
        timeline.observe(0, &started(ms(0), 0), origin);
        for round in 1..=rounds {
            timeline.observe(0, &tokens(1 + (round % 3) as usize, 7), origin + ms(round * 10));
        }
        let mut record = Record::default();
        timeline.finish(&mut record, origin + ms(rounds * 10));
        let decode = named(&record.spans, "decode");
        assert!(decode.children.len() <= MAX_STEPS, "{rounds}: {}", decode.children.len());
        assert!(decode.children.len() as u64 >= rounds.min(MAX_STEPS as u64 / 2), "{rounds}");
        let sum = |name: &str| -> u64 {
            decode.children.iter().map(|c| c.attributes[name].as_u64().unwrap()).sum()
        };
        let emitted: u64 = (1..=rounds).map(|round| 1 + round % 3).sum();
        assert_eq!((sum("count"), sum("tokens"), sum("proposed")), (rounds, emitted, 7 * rounds));
        assert_eq!(record.tokens.output, emitted);
        assert_eq!(decode.duration_us, rounds * 10_000);
        check_nesting(&record.spans, 0, record.duration_us);
    }
}

#[test]
fn a_request_that_is_left_counts_what_was_seen() {
    let origin = Instant::now();
    let at = |t| origin + ms(t);
    let mut timeline = Timeline::begin(origin);
    timeline.observe(0, &started(ms(5), 64), at(10));
    timeline.observe(0, &Event::Prefill { done: 100, total: 100 }, at(30));
    timeline.observe(0, &tokens(4, 7), at(50));
    let mut record = Record::default();
    timeline.finish(&mut record, at(55));
    assert_eq!(record.tokens, TokenCounts { prompt: 100, cached: 64, output: 4, reasoning: 0 });
    assert_eq!((record.queue_us, record.prefill_us, record.decode_us), (5_000, 20_000, 20_000));
    assert_eq!((record.draft.rounds, record.draft.accepted), (1, 3));
}

#[test]
fn choices_share_a_prompt_and_add_up_what_they_emit() {
    let origin = Instant::now();
    let at = |t| origin + ms(t);
    let mut timeline = Timeline::begin(origin);
    // The second choice begins, and ends, before the first.
    for (choice, shift) in [(1, 0), (0, 7)] {
        timeline.observe(choice, &started(ms(2), 64), at(10 + shift));
        timeline.observe(choice, &Event::Prefill { done: 100, total: 100 }, at(20 + shift));
        timeline.observe(choice, &tokens(8, 7), at(30 + shift));
        timeline.observe(choice, &Event::Done(done(8, 1)), at(31 + shift));
    }
    let mut record = Record::default();
    timeline.finish(&mut record, at(50));
    assert_eq!(record.tokens, TokenCounts { prompt: 100, cached: 64, output: 16, reasoning: 0 });
    assert_eq!(record.first_token_us, Some(30_000));
    assert_eq!(record.decode_us, 400_000);
    assert_eq!(record.spans.iter().filter(|span| span.name == "choice").count(), 2);
    check_nesting(&record.spans, 0, record.duration_us);
}

#[test]
fn a_wait_longer_than_the_request_stays_inside_it() {
    let origin = Instant::now() + ms(1000);
    let mut timeline = Timeline::begin(origin);
    timeline.observe(0, &started(ms(500), 0), origin + ms(10));
    timeline.observe(0, &tokens(1, 0), origin + ms(20));
    let mut record = Record::default();
    timeline.finish(&mut record, origin + ms(20));
    check_nesting(&record.spans, 0, record.duration_us);
    assert_eq!(named(&record.spans, "queue").duration_us, 10_000);
}

#[test]
fn a_request_that_never_got_a_lane_only_waited() {
    let origin = Instant::now();
    let mut timeline = Timeline::begin(origin);
    let failure = engine::service::RequestError::Stopped("x".into());
    timeline.observe(0, &Event::Failed(failure), origin + ms(8));
    let mut record = Record::default();
    timeline.finish(&mut record, origin + ms(9));
    assert_eq!(record.first_token_us, None);
    assert_eq!(record.spans.len(), 1);
    assert_eq!(record.spans[0].name, "queue");
    let mut idle = Record::default();
    Timeline::begin(origin).finish(&mut idle, origin);
    assert_eq!(idle, Record::default());
}
