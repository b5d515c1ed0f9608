//! The exactness contract as a matrix: whatever else runs, wherever the prefix came from, however the
//! prompt was cut up and whoever drafts, a request gets the same tokens.
//!
//! The full matrix runs with TH_SLOW_TESTS; by default a few of its cells that between them have every
//! value of every dimension.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::served::{Answer, ask, service, submit};
use common::{With, answer, engine, greedy, prompts, request, sampler};
use engine::service::{CachePolicy, CacheSource, Event, Service};
use engine::{
    DiskOptions, EngineOptions, EngineService, Sampler, SamplingOptions, ServiceOptions, Session,
};

/// One way to run.
#[derive(Clone, Copy, Debug)]
struct Cell {
    lanes: usize,
    chunk: usize,
    draft: bool,
    ahead: bool,
}

fn slow() -> bool {
    #[expect(clippy::disallowed_methods, reason = "an opt-in for a longer test")]
    std::env::var("TH_SLOW_TESTS").is_ok()
}

fn cells() -> Vec<Cell> {
    if !slow() {
        return vec![
            Cell { lanes: 1, chunk: 512, draft: false, ahead: true },
            Cell { lanes: 2, chunk: 64, draft: true, ahead: true },
            Cell { lanes: 4, chunk: 128, draft: true, ahead: false },
            Cell { lanes: 8, chunk: 512, draft: false, ahead: false },
        ];
    }
    let mut all = Vec::new();
    for lanes in [1, 2, 4, 8] {
        for chunk in [64, 128, 512] {
            for (draft, ahead) in [(false, false), (true, false), (true, true)] {
                all.push(Cell { lanes, chunk, draft, ahead });
            }
        }
    }
    all
}

/// A prompt, how it is sampled, and what it gets when it is alone and nothing drafts.
struct Case {
    prompt: Vec<u32>,
    sampler: Sampler,
    want: Vec<u32>,
}

/// Golden prompts and pieces of text, and second turns of some of them.
fn cases(count: usize, tokens: usize) -> Vec<Case> {
    let mut alone = engine(With::None);
    let mut cases: Vec<Case> = Vec::new();
    for (i, prompt) in prompts(count - count / 4).into_iter().enumerate() {
        cases.push(case(&mut alone, prompt, i, tokens));
    }
    for i in 0..count / 4 {
        let first = &cases[i];
        let turn = [&first.prompt[..], &first.want, &[198, 28, 1604 + i as u32]].concat();
        cases.push(case(&mut alone, turn, count + i, tokens));
    }
    cases
}

fn case(alone: &mut engine::Engine<ops::Host>, prompt: Vec<u32>, i: usize, tokens: usize) -> Case {
    let seeded = SamplingOptions {
        temperature: Some(0.8),
        top_p: Some(0.95),
        frequency_penalty: Some(0.2),
        seed: Some(i as u64),
        ..SamplingOptions::default()
    };
    let sampler = if i.is_multiple_of(2) { greedy() } else { sampler(seeded) };
    let asked = request(&prompt, tokens, sampler.clone());
    let (want, _) = answer(alone, &mut Session::new(0), asked);
    Case { prompt, sampler, want }
}

/// All cases at once. Returns what each was told.
fn run(service: &Arc<EngineService>, cases: &[Case], tokens: usize, what: &str) -> Vec<Answer> {
    let asked: Vec<_> = cases
        .iter()
        .map(|case| {
            let mut request = ask(&case.prompt, tokens, case.sampler.clone());
            request.boundaries = vec![case.prompt.len() / 2];
            submit(&**service, request)
        })
        .collect();
    let answers: Vec<Answer> = asked.into_iter().map(common::served::Asked::wait).collect();
    for (i, (answer, case)) in answers.iter().zip(cases).enumerate() {
        assert_eq!(answer.ids(), case.want, "{what}: prompt {i}: {:?}", answer.end);
    }
    answers
}

/// How many tokens each round emitted and proposed.
fn rounds(answer: &Answer) -> Vec<(usize, usize)> {
    let of = |event: &Event| match event {
        Event::Tokens { tokens, proposed } => Some((tokens.len(), *proposed)),
        _ => None,
    };
    answer.events.iter().filter_map(of).collect()
}

#[test]
fn nothing_else_decides_what_a_request_gets() {
    let (count, tokens) = if slow() { (50, 48) } else { (10, 10) };
    let cases = cases(count, tokens);
    let dir = std::env::temp_dir().join(format!("th-engine-matrix-{}", std::process::id()));
    for (n, cell) in cells().into_iter().enumerate() {
        let Cell { lanes, chunk, draft, ahead } = cell;
        let options = EngineOptions {
            context: 1024,
            slots: lanes,
            chunk,
            ahead,
            snapshots: 8 * count,
            pages: Some((lanes + count) * 17),
            ..EngineOptions::default()
        };
        let disk = DiskOptions {
            dir: dir.join(n.to_string()),
            quota: 4 << 30,
            write_rate: 1 << 40,
            fingerprint: format!("{cell:?}"),
        };
        let how = ServiceOptions { disk: Some(disk), queue: count, ..ServiceOptions::default() };
        let first = service(draft, options, how.clone());
        let cold = run(&first, &cases, tokens, &format!("{cell:?} cold"));
        let warm = run(&first, &cases, tokens, &format!("{cell:?} cached"));
        for (i, ((cold, warm), case)) in cold.iter().zip(&warm).zip(&cases).enumerate() {
            assert_eq!(warm.done().cached_tokens, case.prompt.len() - 1, "prompt {i}");
            assert_eq!(rounds(cold), rounds(warm), "{cell:?}: rounds of prompt {i}");
            assert!(draft == (warm.done().proposed > 0));
        }
        assert_eq!(first.disk_error(), None);
        first.drain(Duration::from_secs(120));
        drop(first);
        let second = service(draft, options, how);
        let restarted = run(&second, &cases, tokens, &format!("{cell:?} restarted"));
        for (i, (cold, again)) in cold.iter().zip(&restarted).enumerate() {
            let cache = &again.done().cache;
            // Less than a page is not worth a look at the disk.
            let known = cases[i].prompt.len() - 1;
            if known >= ops::PAGE_TOKENS {
                let expected = (known, CacheSource::Disk);
                assert_eq!((cache.tokens, cache.source), expected, "prompt {i}: {}", cache.miss);
            }
            assert_eq!(rounds(cold), rounds(again), "{cell:?}: rounds of prompt {i}");
        }
    }
    // Nothing is reused or kept where that is asked for, and nothing changes.
    let options =
        EngineOptions { context: 1024, slots: 2, snapshots: 8, ..EngineOptions::default() };
    let plain = service(true, options, ServiceOptions::default());
    for policy in [CachePolicy::Off, CachePolicy::Exact, CachePolicy::Exact] {
        let case = &cases[3];
        let mut request = ask(&case.prompt, tokens, case.sampler.clone());
        request.cache = policy;
        assert_eq!(submit(&*plain, request).wait().ids(), case.want);
    }
    assert_eq!(plain.stats().cached_tokens, cases[3].prompt.len() as u64 - 1);
    let _ = std::fs::remove_dir_all(&dir);
}
