//! Random damage to small valid files, and random bytes: every outcome is a value, nothing that is
//! accepted breaks later, and no file makes us allocate more than its size justifies.
//!
//! A short run by default; `TH_FUZZ_SECONDS=60 cargo test -p model fuzz` runs each target that long.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};
use serde_json::{Value, json};

use crate::files::{Bytes, Checkpoint, gguf, safetensors};
use crate::spec::Spec;
use crate::testing::{
    Flavour, draft_config, draft_gguf, draft_tensors, target_config, target_file, target_gguf,
};
use crate::{DraftSource, LoadError, TargetSource, synth};

// ---------------------------------------------------------------------------------------------
// Running

const DEFAULT_CASES: u32 = 300;

fn run<S: Strategy>(strategy: S, check: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    #[expect(clippy::disallowed_methods, reason = "tests only: how long to fuzz")]
    let seconds = std::env::var("TH_FUZZ_SECONDS").ok().and_then(|s| s.parse().ok());
    // Other cases every time, whatever the environment says.
    let rng_seed = RngSeed::Random;
    let config = |cases| Config { cases, failure_persistence: None, rng_seed, ..Config::default() };
    let fail = |error: TestError<S::Value>| panic!("{error}");
    let Some(seconds) = seconds else {
        // The same cases every time, so that a failure stays one.
        let rng = proptest::test_runner::TestRng::deterministic_rng(
            proptest::test_runner::RngAlgorithm::ChaCha,
        );
        let mut runner = TestRunner::new_with_rng(config(DEFAULT_CASES), rng);
        return runner.run(&strategy, &check).unwrap_or_else(fail);
    };
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        TestRunner::new(config(DEFAULT_CASES)).run(&strategy, &check).unwrap_or_else(fail);
    }
}

// ---------------------------------------------------------------------------------------------
// Counting allocations

struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    LIVE.set(LIVE.get() + change);
    PEAK.set(PEAK.get().max(LIVE.get()));
}

// SAFETY: every call goes to the system's allocator unchanged; counting neither allocates nor fails.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are those of this function.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that `f` held at once on this thread.
fn peak<R>(f: impl FnOnce() -> R) -> (R, isize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = f();
    (result, PEAK.get() - before)
}

/// Headers take more room parsed than stored, but only by a factor.
fn justified(file_bytes: usize) -> isize {
    32 * file_bytes as isize + 64 * 1024
}

#[test]
fn allocations_are_counted() {
    let ((), bytes) = peak(|| drop(std::hint::black_box(vec![0u8; 1 << 20])));
    assert!((1 << 20..1 << 21).contains(&bytes), "{bytes}");
}

// ---------------------------------------------------------------------------------------------
// Damage

#[derive(Clone, Debug)]
enum Damage {
    Byte(u8),
    Word(u64),
    Half(u32),
    Remove(usize),
    Insert(Vec<u8>),
    Repeat(usize),
    Truncate,
}

fn damage() -> impl Strategy<Value = Damage> {
    let edges = prop_oneof![
        Just(0),
        Just(1),
        Just(u64::MAX),
        Just(1 << 63),
        Just(i64::MAX as u64),
        Just(1 << 32),
        0..100u64,
        any::<u64>(),
    ];
    prop_oneof![
        4 => any::<u8>().prop_map(Damage::Byte),
        4 => edges.prop_map(Damage::Word),
        2 => prop_oneof![0..64u32, any::<u32>()].prop_map(Damage::Half),
        1 => (1..64usize).prop_map(Damage::Remove),
        1 => vec(any::<u8>(), 1..16).prop_map(Damage::Insert),
        1 => (1..64usize).prop_map(Damage::Repeat),
        1 => Just(Damage::Truncate),
    ]
}

/// `base` with one to four damages, at places drawn from its first `header` bytes.
fn damaged(base: Vec<u8>, header: usize) -> impl Strategy<Value = Vec<u8>> {
    vec((0..header, damage()), 1..5).prop_map(move |damages| {
        let mut out = base.clone();
        for (at, damage) in damages {
            let at = at.min(out.len());
            let overwrite = |out: &mut Vec<u8>, bytes: &[u8]| {
                let end = (at + bytes.len()).min(out.len());
                out[at..end].copy_from_slice(&bytes[..end - at]);
            };
            let part = |out: &Vec<u8>, n: usize| at..(at + n).min(out.len());
            match damage {
                Damage::Byte(b) => overwrite(&mut out, &[b]),
                Damage::Word(w) => overwrite(&mut out, &w.to_le_bytes()),
                Damage::Half(w) => overwrite(&mut out, &w.to_le_bytes()),
                Damage::Remove(n) => drop(out.drain(part(&out, n))),
                Damage::Insert(bytes) => drop(out.splice(at..at, bytes)),
                Damage::Repeat(n) => {
                    let copy = out[part(&out, n)].to_vec();
                    out.splice(at..at, copy);
                }
                Damage::Truncate => out.truncate(at),
            }
        }
        out
    })
}

/// Reads all of a target that was accepted.
fn read_target(result: Result<TargetSource, LoadError>) {
    let Ok(source) = result else { return };
    let spec = source.spec();
    for weight in spec.weights() {
        if spec.matrix_shape(weight).is_some() {
            let matrix = source.matrix(weight).expect("verified when opened");
            let mut scratch = Vec::new();
            matrix.rows(matrix.n - 1..matrix.n, &mut scratch);
        } else if let Ok(values) = source.vector(weight) {
            assert_eq!(Some(values.len()), spec.vector_len(weight));
        }
    }
}

fn read_draft(result: Result<DraftSource, LoadError>) {
    let Ok(source) = result else { return };
    for weight in source.spec().weights() {
        if source.spec().matrix_shape(weight).is_some() {
            source.matrix(weight).expect("verified when opened");
        } else {
            let _ = source.vector(weight);
        }
    }
}

fn tiny() -> Spec {
    synth::target("tiny").unwrap()
}

// ---------------------------------------------------------------------------------------------
// GGUF

fn check_gguf(file: Vec<u8>) -> Result<(), TestCaseError> {
    let len = file.len();
    let bytes = Bytes::from(file.clone());
    let (parsed, held) = peak(|| gguf::parse(Path::new("m.gguf"), &bytes));
    prop_assert!(held <= justified(len), "{held} bytes for a file of {len}");
    if let Ok(parsed) = &parsed {
        let mut ranges: Vec<_> = parsed.tensors.iter().map(|t| t.range.clone()).collect();
        ranges.sort_by_key(|r| r.start);
        prop_assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start));
        prop_assert!(ranges.iter().all(|r| r.start < r.end && r.end <= len));
        for key in parsed.metadata.keys() {
            let _ = (parsed.metadata.strings(key), parsed.metadata.integers(key));
            let _ = (parsed.metadata.str(key), parsed.metadata.float(key));
        }
    }
    let (result, held) = peak(|| {
        Checkpoint::from_gguf_bytes(Path::new("m.gguf"), file.clone())
            .and_then(TargetSource::from_checkpoint)
    });
    prop_assert!(held <= justified(len), "{held} bytes for a file of {len}");
    read_target(result);
    let checkpoint = Checkpoint::from_gguf_bytes(Path::new("d.gguf"), file);
    read_draft(checkpoint.and_then(|c| DraftSource::from_checkpoint(c, &tiny())));
    Ok(())
}

/// Bytes before the data of a GGUF file.
fn header_of(file: &[u8]) -> usize {
    let parsed = gguf::parse(Path::new("m"), &Bytes::from(file.to_vec())).unwrap();
    parsed.tensors[0].range.start
}

#[test]
fn fuzz_gguf_target() {
    let file = target_gguf(&tiny()).bytes();
    let header = header_of(&file);
    run(damaged(file, header), check_gguf);
}

#[test]
fn fuzz_gguf_draft() {
    let file = draft_gguf(&synth::draft("tiny-dflash2").unwrap()).bytes();
    let header = header_of(&file);
    run(damaged(file, header), check_gguf);
}

#[test]
fn fuzz_gguf_bytes() {
    let headed = vec(any::<u8>(), 0..400)
        .prop_map(|tail| [b"GGUF\x03\0\0\0".as_slice(), &[1, 0, 0, 0, 0, 0, 0, 0], &tail].concat());
    run(prop_oneof![headed, vec(any::<u8>(), 0..100)], check_gguf);
}

// ---------------------------------------------------------------------------------------------
// Safetensors

fn check_safetensors(file: Vec<u8>) -> Result<(), TestCaseError> {
    let len = file.len();
    let (ours, held) = peak(|| safetensors::parse(Path::new("m"), &file));
    prop_assert!(held <= justified(len), "{held} bytes for a file of {len}");
    // The reference parser may panic where sums overflow; that is a refusal too.
    let theirs = std::panic::catch_unwind(|| ::safetensors::SafeTensors::read_metadata(&file).ok());
    if let (Ok(ours), Ok(Some((header, theirs)))) = (&ours, theirs) {
        prop_assert_eq!(ours.len(), theirs.tensors().len());
        for t in ours {
            let info = theirs.info(&t.name).expect("a tensor that both know");
            let (from, to) = info.data_offsets;
            prop_assert_eq!(&t.shape, &info.shape);
            prop_assert_eq!(t.dtype.name(), info.dtype.to_string());
            prop_assert_eq!(t.range.clone(), from + 8 + header..to + 8 + header);
        }
    } else if let Ok(ours) = &ours {
        // What only we accept has metadata of another kind than texts.
        let text = String::from_utf8_lossy(&file);
        prop_assert!(text.contains("__metadata__"), "we alone accept {:?}", ours);
    }
    let config = target_config(&tiny(), Flavour::Mlx);
    let checkpoint = Checkpoint::from_safetensors_bytes(Path::new("m"), config, file);
    read_target(checkpoint.and_then(TargetSource::from_checkpoint));
    Ok(())
}

#[test]
fn fuzz_safetensors() {
    let file = target_file(&tiny(), Flavour::Mlx);
    let header = 8 + u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    run(damaged(file, header), check_safetensors);
}

#[test]
fn fuzz_safetensors_small() {
    // Few and short tensors, so that damages hit each other.
    let tensors = [("a", "F32", 4), ("b", "BF16", 2), ("c", "U8", 1)];
    let tensors = tensors.map(|(n, d, b)| (n.to_owned(), d, vec![2, 1], vec![7; 2 * b]));
    let file = crate::files::testing::safetensors(&tensors);
    let header = file.len() - 14;
    run(damaged(file, header), check_safetensors);
}

#[test]
fn fuzz_safetensors_header_text() {
    let number = prop_oneof![Just(u64::MAX), Just(1 << 61), 0..20u64, any::<u64>()];
    let dtype = prop_oneof![Just("F32"), Just("U8"), Just("F4"), Just("X"), Just("C64")];
    let name = prop_oneof![Just("a"), Just("b"), Just("c"), Just("__metadata__")];
    let entry = (name, dtype, vec(number.clone(), 0..4), vec(number, 1..4));
    let files = (vec(entry, 0..5), vec(any::<u8>(), 0..64)).prop_map(|(entries, data)| {
        let entry = |(name, dtype, shape, offsets)| {
            let body = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
            format!("\"{name}\":{body}")
        };
        let header = entries.into_iter().map(entry).collect::<Vec<_>>().join(",");
        crate::files::testing::with_header(&format!("{{{header}}}"), &data)
    });
    run(files, check_safetensors);
}

// ---------------------------------------------------------------------------------------------
// Configs

/// A value that a field shouldn't have, or another size.
fn odd_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        Just(json!(true)),
        Just(json!(-1)),
        Just(json!(0)),
        Just(json!(u64::MAX)),
        Just(json!(1u64 << 20)),
        Just(json!(1u64 << 31)),
        Just(json!(1e308)),
        Just(json!(1e-320)),
        Just(json!("full_attention")),
        Just(json!([])),
        Just(json!([1, "a", null])),
        Just(json!({})),
        (0..300u64).prop_map(|n| json!(n)),
        any::<f64>().prop_map(|f| json!(f)),
        vec(0..4000u64, 0..10).prop_map(|v| json!(v)),
    ]
}

/// `base` with some of its values, of any depth, replaced.
fn odd_config(base: Value) -> impl Strategy<Value = Value> {
    fn nodes(value: &Value, at: String, out: &mut Vec<String>) {
        if let Some(map) = value.as_object() {
            for (key, inner) in map {
                let at = format!("{at}/{key}");
                nodes(inner, at.clone(), out);
                out.push(at);
            }
        }
    }
    let mut paths = Vec::new();
    nodes(&base, String::new(), &mut paths);
    vec((0..paths.len(), odd_value()), 1..4).prop_map(move |edits| {
        let mut out = base.clone();
        for (i, value) in edits {
            if let Some(node) = out.pointer_mut(&paths[i]) {
                *node = value;
            }
        }
        out
    })
}

/// Sizes that were accepted can be multiplied without overflow.
fn check_sizes(sizes: impl Iterator<Item = Option<[usize; 2]>>) -> Result<(), TestCaseError> {
    for [n, k] in sizes.flatten() {
        prop_assert!(n > 0 && k > 0 && n.checked_mul(k).is_some(), "[{n}, {k}]");
    }
    Ok(())
}

#[test]
fn fuzz_config() {
    let files = [Flavour::Hf, Flavour::Mlx].map(|flavour| target_file(&tiny(), flavour));
    let bases = [Flavour::Hf, Flavour::Mlx].map(|flavour| target_config(&tiny(), flavour));
    let [hf, mlx] = bases.map(odd_config);
    run(prop_oneof![hf, mlx], |config| {
        if let Ok(spec) = Spec::from_config(Path::new("config.json"), &config) {
            check_sizes(spec.weights().into_iter().map(|w| spec.matrix_shape(w)))?;
            prop_assert!(spec.attention.rope.inv_freq().len() == spec.attention.rope.dims / 2);
        }
        for file in &files {
            let path = Path::new("m");
            let opened = Checkpoint::from_safetensors_bytes(path, config.clone(), file.clone());
            read_target(opened.and_then(TargetSource::from_checkpoint));
        }
        Ok(())
    });
}

#[test]
fn fuzz_draft_config() {
    let drafts = ["tiny", "tiny-dflash2"].map(|name| synth::draft(name).unwrap());
    let files = drafts
        .each_ref()
        .map(|spec| crate::files::testing::safetensors(&draft_tensors(spec, Flavour::Mlx)));
    let [one, two] = drafts.each_ref().map(|spec| odd_config(draft_config(spec)));
    run(prop_oneof![one, two], |config| {
        let parsed = crate::draft_spec::DraftSpec::from_config(Path::new("config.json"), &config);
        if let Ok(spec) = parsed {
            check_sizes(spec.weights().into_iter().map(|w| spec.matrix_shape(w)))?;
        }
        for file in &files {
            let path = Path::new("d");
            let opened = Checkpoint::from_safetensors_bytes(path, config.clone(), file.clone());
            read_draft(opened.and_then(|c| DraftSource::from_checkpoint(c, &tiny())));
        }
        Ok(())
    });
}
