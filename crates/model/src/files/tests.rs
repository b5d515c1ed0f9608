use std::path::Path;

use serde_json::json;

use super::testing::{GgufWriter, TempDir, bundled, safetensors, with_header};
use super::*;

fn st_error(bytes: &[u8]) -> String {
    safetensors::parse(Path::new("m.safetensors"), bytes).unwrap_err().to_string()
}

fn gguf_error(bytes: Vec<u8>) -> String {
    gguf::parse(Path::new("m.gguf"), &Bytes::from(bytes)).unwrap_err().to_string()
}

/// Fails unless the error names all of these.
#[track_caller]
fn says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

// ---------------------------------------------------------------------------------------------
// Safetensors headers

#[test]
fn a_small_safetensors_file() {
    let f32s: Vec<u8> = [1.0f32, -2.5].iter().flat_map(|f| f.to_le_bytes()).collect();
    let bf16: Vec<u8> = [0x3F80u16, 0xC000].iter().flat_map(|f| f.to_le_bytes()).collect();
    let f16: Vec<u8> = [0x3C00u16].iter().flat_map(|f| f.to_le_bytes()).collect();
    let file = safetensors(&[
        ("a".to_owned(), "F32", vec![1, 2], f32s),
        ("b".to_owned(), "BF16", vec![2], bf16),
        ("c".to_owned(), "F16", vec![], f16),
        ("d".to_owned(), "I64", vec![1], vec![0; 8]),
        ("e".to_owned(), "U32", vec![0, 7], vec![]),
    ]);
    let c = Checkpoint::from_safetensors_bytes(Path::new("m"), json!({}), file).unwrap();
    assert_eq!(c.names(), ["a", "b", "c", "d", "e"]);
    assert_eq!(c.tensor("a").unwrap().to_f32().unwrap(), [1.0, -2.5]);
    assert_eq!(c.tensor("b").unwrap().to_f32().unwrap(), [1.0, -2.0]);
    assert_eq!(c.tensor("c").unwrap().to_f32().unwrap(), [1.0]);
    assert_eq!(c.tensor("c").unwrap().shape, [0usize; 0]);
    assert_eq!(c.tensor("d").unwrap().storage, Storage::Other("I64", &[0; 8]));
    assert_eq!(c.tensor("d").unwrap().to_f32(), None);
    assert_eq!(c.tensor("e").unwrap().elements(), 0);
    assert!(c.tensor("f").is_none());
    assert_eq!(c.require("a", &[1, 2]).unwrap().elements(), 2);
    says(&c.require("a", &[2, 1]).unwrap_err().to_string(), &["tensor a", "[2, 1]", "[1, 2]"]);
    says(&c.require("f", &[2]).unwrap_err().to_string(), &["tensor f", "none of this name"]);
}

#[test]
fn malformed_safetensors_headers_are_named() {
    let one = |entry: &str| with_header(&format!("{{\"a\":{entry}}}"), &[0; 8]);
    says(&st_error(b"GGUF"), &["at least 8 bytes", "found 4 bytes"]);
    says(&st_error(&u64::MAX.to_le_bytes()), &["header length", "18446744073709551615"]);
    says(&st_error(&with_header("{", &[])), &["header", "EOF"]);
    says(&st_error(&with_header("{} {}", &[])), &["header", "trailing"]);
    says(&st_error(&with_header("[]", &[])), &["header", "an object"]);
    says(&st_error(&with_header("\u{feff}{}", &[])), &["header"]);
    says(&st_error(&one(r#"{"dtype":"F128","shape":[1],"data_offsets":[0,8]}"#)), &["`a`", "F128"]);
    says(&st_error(&one(r#"{"dtype":"F64","shape":[1]}"#)), &["`a`", "missing"]);
    says(&st_error(&one(r#"{"dtype":"F64","shape":[1],"data_offsets":[0]}"#)), &["`a`", "two"]);
    let three = r#"{"dtype":"F64","shape":[1],"data_offsets":[0,8,8]}"#;
    says(&st_error(&one(three)), &["at most 2"]);
    let dims = r#"{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,8]}"#;
    says(&st_error(&one(dims)), &["at most 8"]);
    let wrapping = r#"{"dtype":"F64","shape":[4294967296,4294967297],"data_offsets":[0,8]}"#;
    says(&st_error(&one(wrapping)), &["a:", "within 2^63"]);
    let bits = r#"{"dtype":"F4","shape":[3],"data_offsets":[0,1]}"#;
    says(&st_error(&one(bits)), &["whole bytes", "F4"]);
    let negative = r#"{"dtype":"F64","shape":[-1],"data_offsets":[0,8]}"#;
    says(&st_error(&one(negative)), &["header"]);
    let size = r#"{"dtype":"F64","shape":[2],"data_offsets":[0,8]}"#;
    says(&st_error(&one(size)), &["a.data_offsets", "16 bytes", "found 8 bytes"]);
    let gap = r#"{"dtype":"F64","shape":[0],"data_offsets":[4,4]}"#;
    says(&st_error(&one(gap)), &["a.data_offsets", "byte 0", "[4, 4]"]);
    let backwards = r#"{"dtype":"F64","shape":[0],"data_offsets":[0,-1]}"#;
    says(&st_error(&one(backwards)), &["header"]);
    let twice = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
                    "a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    says(&st_error(&with_header(twice, &[0; 4])), &["`a` occurs twice"]);
    let overlap = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
                      "b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
    says(&st_error(&with_header(overlap, &[0; 6])), &["b.data_offsets", "byte 4"]);
    // Sizes that only overflow when added up.
    let huge = |i: u64| {
        let (from, to) = (i << 61, (i + 1) << 61);
        format!(r#""{i}":{{"dtype":"U8","shape":[{}],"data_offsets":[{from},{to}]}}"#, 1u64 << 61)
    };
    let header = format!("{{{}}}", (0..7).map(huge).collect::<Vec<_>>().join(","));
    says(&st_error(&with_header(&header, &[0; 8])), &["a shape", "2^63"]);
    let deep = format!("{{\"__metadata__\":{}}}", "[".repeat(100_000));
    says(&st_error(&with_header(&deep, &[])), &["header"]);
}

#[test]
fn short_and_long_safetensors_files_are_refused_with_both_sizes() {
    let file = safetensors(&[("a".to_owned(), "U8", vec![100], vec![7; 100])]);
    let full = file.len();
    assert_eq!(safetensors::parse(Path::new("m"), &file).unwrap().len(), 1);
    for len in [full - 1, full - 100] {
        let error = st_error(&file[..len]);
        says(&error, &["file size", &format!("{full} bytes"), &format!("{len} bytes")]);
    }
    let longer = [file.as_slice(), &[0; 3]].concat();
    says(&st_error(&longer), &["file size", &format!("{} bytes", full + 3)]);
}

// ---------------------------------------------------------------------------------------------
// GGUF

fn small_gguf() -> GgufWriter {
    let mut w = GgufWriter::default();
    w.str("general.architecture", "x").u32("n", 7).f32("f", 0.5).bool("b", true);
    w.strs("tokenizer.ggml.tokens", &["a", "é", ""]).i32s("types", &[1, 3, 5]);
    let f32s: Vec<u8> =
        [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0].iter().flat_map(|f| f.to_le_bytes()).collect();
    w.tensor("m", 0, &[2, 3], &f32s);
    w.tensor("q", 2, &[2, 64], &[9; 72]);
    w
}

fn of_version(version: u32) -> Vec<u8> {
    let mut w = small_gguf();
    w.version = version;
    w.bytes()
}

#[test]
fn a_small_gguf_file() {
    let c = Checkpoint::from_gguf_bytes(Path::new("m.gguf"), small_gguf().bytes()).unwrap();
    let m = c.metadata().unwrap();
    assert_eq!(m.str("general.architecture").unwrap(), Some("x"));
    assert_eq!(m.unsigned("n").unwrap(), Some(7));
    assert_eq!(m.unsigned("absent").unwrap(), None);
    assert_eq!(m.float("f").unwrap(), Some(0.5));
    assert_eq!(m.float("n").unwrap(), Some(7.0));
    assert_eq!(m.bool("b").unwrap(), Some(true));
    assert_eq!(m.strings("tokenizer.ggml.tokens").unwrap().unwrap(), ["a", "é", ""]);
    assert_eq!(m.integers("types").unwrap().unwrap(), [1, 3, 5]);
    assert_eq!(m.integers("n").unwrap().unwrap(), [7]);
    says(&m.unsigned("f").unwrap_err().to_string(), &["m.gguf: f:", "whole number", "0.5"]);
    says(&m.str("types").unwrap_err().to_string(), &["a text", "array of 3 values"]);
    assert!(matches!(c.tokenizer(), TokenizerSource::Gguf(t) if t.tokens().unwrap().len() == 3));

    let t = c.tensor("m").unwrap();
    assert_eq!(t.shape, [2, 3]);
    assert_eq!(t.to_f32().unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let q = c.tensor("q").unwrap();
    assert_eq!(q.shape, [2, 64]);
    let Storage::Ggml(ty, bytes) = q.storage else { panic!("{q:?}") };
    assert_eq!((ty.name(), ty.id(), bytes), ("Q4_0", 2, [9u8; 72].as_slice()));
}

#[test]
fn every_scalar_type_of_gguf() {
    let mut w = GgufWriter::default();
    w.raw("u8", 0, &[200]).raw("i8", 1, &[200]).raw("u16", 2, &[1, 2]).raw("i16", 3, &[0, 255]);
    w.raw("i32", 5, &(-7i32).to_le_bytes()).raw("u64", 10, &u64::MAX.to_le_bytes());
    w.raw("i64", 11, &(-1i64).to_le_bytes()).raw("f64", 12, &1e300f64.to_le_bytes());
    w.raw("nan", 6, &f32::NAN.to_le_bytes());
    let c = Checkpoint::from_gguf_bytes(Path::new("m.gguf"), w.bytes()).unwrap();
    let m = c.metadata().unwrap();
    assert_eq!(m.unsigned("u8").unwrap(), Some(200));
    assert_eq!(m.float("i8").unwrap(), Some(-56.0));
    assert_eq!(m.unsigned("u16").unwrap(), Some(513));
    assert_eq!(m.float("i16").unwrap(), Some(-256.0));
    assert_eq!(m.float("i32").unwrap(), Some(-7.0));
    assert_eq!(m.unsigned("u64").unwrap(), Some(u64::MAX));
    assert!(m.unsigned("i64").is_err());
    assert_eq!(m.float("f64").unwrap(), Some(1e300));
    says(&m.float("nan").unwrap_err().to_string(), &["finite", "NaN"]);
}

#[test]
fn malformed_gguf_headers_are_named() {
    says(&gguf_error(b"GGU".to_vec()), &["header", "4 more bytes", "3 (a truncated"]);
    says(&gguf_error(b"GGML\0\0\0\0".to_vec()), &["starts with `GGUF`", "GGML"]);
    for version in [0, 1, 4, 99] {
        let bytes = of_version(version);
        says(&gguf_error(bytes), &["version", &format!("found {version}")]);
    }
    let swapped = of_version(3u32.swap_bytes());
    says(&gguf_error(swapped), &["big-endian file of version 3"]);
    let v2 = of_version(2);
    assert!(gguf::parse(Path::new("m"), &Bytes::from(v2)).is_ok());

    let mut counts = small_gguf().bytes();
    counts[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    says(&gguf_error(counts.clone()), &["tensor count", "18446744073709551615"]);
    counts[16..24].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
    says(&gguf_error(counts), &["metadata count"]);

    let bad = |edit: fn(&mut GgufWriter) -> &mut GgufWriter| {
        let mut w = small_gguf();
        gguf_error(edit(&mut w).bytes())
    };
    says(&bad(|w| w.u32("n", 7)), &["n: expected each key once"]);
    says(&bad(|w| w.u32("", 7)), &["1 to 65535 bytes", "0 bytes"]);
    says(&bad(|w| w.raw("k", 13, &[0])), &["k:", "value type", "found 13"]);
    says(&bad(|w| w.raw("k", 8, &u64::MAX.to_le_bytes())), &["k:", "18446744073709551615"]);
    says(&bad(|w| w.raw("k", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xFF])), &["k:", "UTF-8"]);
    let nested = [9u32.to_le_bytes().as_slice(), &[0; 8]].concat();
    says(&gguf_error(small_gguf().raw("k", 9, &nested).bytes()), &["k:", "nested arrays"]);
    let long = [4u32.to_le_bytes().as_slice(), &(u64::MAX / 2).to_le_bytes()].concat();
    says(&gguf_error(small_gguf().raw("k", 9, &long).bytes()), &["k:", "at most"]);
    let strings = [8u32.to_le_bytes().as_slice(), &9u64.to_le_bytes()].concat();
    says(&gguf_error(small_gguf().raw("k", 9, &strings).bytes()), &["k:"]);
    says(&bad(|w| w.u32("general.alignment", 0)), &["general.alignment", "power of two"]);
    says(&bad(|w| w.u32("general.alignment", 48)), &["general.alignment", "found 48"]);
}

#[test]
fn malformed_gguf_tensors_are_named() {
    let bad = |ne: &[u64], ty: u32, offset: u64| {
        let mut w = small_gguf();
        w.entry("bad", ne, ty, offset);
        gguf_error(w.bytes())
    };
    says(&bad(&[], 0, 128), &["tensor bad", "1 to 4 dimensions", "found 0"]);
    says(&bad(&[1, 1, 1, 1, 1], 0, 128), &["tensor bad", "found 5"]);
    says(&bad(&[0, 4], 0, 128), &["tensor bad", "positive sizes", "[0, 4]"]);
    says(&bad(&[u64::MAX, 2], 0, 128), &["tensor bad", "within 2^63"]);
    says(&bad(&[1 << 62, 1], 0, 128), &["tensor bad", "within 2^63"]);
    says(&bad(&[31], 2, 128), &["tensor bad", "divided by 32", "Q4_0"]);
    says(&bad(&[4], 77, 128), &["tensor bad", "type id 77"]);
    says(&bad(&[4], 4, 128), &["tensor bad", "type id 4"]);
    says(&bad(&[4], 0, 4), &["tensor bad", "an offset that 32 divides"]);
    says(&bad(&[4], 0, 1 << 20), &["tensor bad", "a file of at least", "incomplete"]);
    says(&bad(&[4], 0, u64::MAX - 31), &["tensor bad", "a file of at least"]);
    says(&bad(&[4], 0, 64), &["tensor bad", "bytes shared with q"]);
    let mut twice = small_gguf();
    twice.tensor("m", 0, &[1], &[0; 4]);
    says(&gguf_error(twice.bytes()), &["tensor m", "each name once"]);

    let bytes = small_gguf().bytes();
    says(&gguf_error(bytes[..bytes.len() - 40].to_vec()), &["tensor q", "incomplete"]);
    says(&gguf_error([bytes.as_slice(), &[0; 32]].concat()), &["file size", "and padding"]);
    // Padding after the last tensor may be missing.
    let mut w = GgufWriter::default();
    w.tensor("t", 0, &[1], &[0; 4]);
    let bytes = w.bytes();
    assert!(gguf::parse(Path::new("m"), &Bytes::from(bytes[..bytes.len() - 28].to_vec())).is_ok());
}

#[test]
fn every_truncation_of_a_gguf_file_is_an_error() {
    let bytes = small_gguf().bytes();
    // 24 bytes of padding follow the last tensor.
    for len in 0..bytes.len() - 24 {
        gguf_error(bytes[..len].to_vec());
    }
}

#[test]
fn ggml_types_have_the_published_sizes() {
    let sizes = [("Q4_0", 18), ("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210), ("IQ4_XS", 136)];
    for (name, bytes) in sizes {
        let ty = (0..64).filter_map(GgmlType::from_id).find(|t| t.name() == name).unwrap();
        assert_eq!(ty.block().1, bytes);
        assert_eq!(format!("{ty:?}"), name);
    }
    assert_eq!((0..1000).filter_map(GgmlType::from_id).count(), 33);
}

// ---------------------------------------------------------------------------------------------
// Folders and split files

#[test]
fn sharded_folders() {
    let dir = TempDir::new("shards");
    let tensor = |name: &str| (name.to_owned(), "U8", vec![4], vec![1; 4]);
    dir.write("config.json", "{}");
    says(&open(dir.path()).unwrap_err().to_string(), &["folder", "model.safetensors", "neither"]);
    dir.write("m-1.safetensors", safetensors(&[tensor("a")]));
    dir.write("m-2.safetensors", safetensors(&[tensor("b"), tensor("c")]));
    says(&open(dir.path()).unwrap_err().to_string(), &["without an index"]);

    let index = |map: serde_json::Value| {
        dir.write("model.safetensors.index.json", json!({"weight_map": map}).to_string());
        open(dir.path()).map(|c| c.names().join(" ")).map_err(|e| e.to_string())
    };
    let (one, two) = ("m-1.safetensors", "m-2.safetensors");
    assert_eq!(index(json!({"a": one, "b": two, "c": two})).unwrap(), "a b c");
    says(&index(json!({"a": one, "x": two})).unwrap_err(), &["index.json: x", "no such tensor"]);
    says(&index(json!({"a": one, "b": one, "c": two})).unwrap_err(), &["b", two]);
    says(&index(json!({"a": "m-3.safetensors"})).unwrap_err(), &["m-3.safetensors", "readable"]);
    for name in ["../m", "/etc/passwd", "", ".hidden", "a/b"] {
        says(&index(json!({"a": name})).unwrap_err(), &["weight_map.a", "same folder"]);
    }
    says(&index(json!({"a": 3})).unwrap_err(), &["weight_map.a"]);
    says(&index(json!({})).unwrap_err(), &["at least one tensor"]);
    says(&index(json!([])).unwrap_err(), &["weight_map", "an object"]);
    dir.write("m-2.safetensors", safetensors(&[tensor("b"), tensor("a")]));
    says(&index(json!({"a": one, "b": two})).unwrap_err(), &["tensor a", "m-1.safetensors"]);

    dir.write("config.json", "{\"a\":");
    says(&open(dir.path()).unwrap_err().to_string(), &["config.json", "valid JSON"]);
    let none = dir.path().join("absent");
    says(&open(&none).unwrap_err().to_string(), &["absent", "readable file"]);
    let file = dir.write("x.bin", "hello");
    says(&open(&file).unwrap_err().to_string(), &["x.bin", "a .gguf file"]);
}

fn part(no: u16, count: u16, tensors: &[&str]) -> Vec<u8> {
    let mut w = GgufWriter::default();
    w.raw("split.no", 2, &no.to_le_bytes()).raw("split.count", 2, &count.to_le_bytes());
    w.raw("split.tensors.count", 5, &3i32.to_le_bytes());
    w.str("general.architecture", "qwen35");
    for name in tensors {
        w.tensor(name, 0, &[1], &[0; 4]);
    }
    w.bytes()
}

#[test]
fn split_gguf_files() {
    let dir = TempDir::new("split");
    let first = dir.write("m-00001-of-00002.gguf", part(0, 2, &["a"]));
    says(&open(&first).unwrap_err().to_string(), &["m-00002-of-00002.gguf", "readable"]);
    let second = dir.write("m-00002-of-00002.gguf", part(1, 2, &["b", "c"]));
    assert_eq!(open(&first).unwrap().names(), ["a", "b", "c"]);
    assert_eq!(open(dir.path()).unwrap().names(), ["a", "b", "c"]);
    says(&open(&second).unwrap_err().to_string(), &["split.no", "expected 0, found 1"]);
    dir.write("m-00002-of-00002.gguf", part(1, 2, &["b"]));
    says(&open(&first).unwrap_err().to_string(), &["split.tensors.count", "expected 3, found 2"]);
    dir.write("m-00002-of-00002.gguf", part(1, 2, &["b", "a"]));
    says(&open(&first).unwrap_err().to_string(), &["tensor a", "each name once"]);
    dir.write("m-00002-of-00002.gguf", part(0, 2, &["b", "c"]));
    says(&open(&first).unwrap_err().to_string(), &["m-00002-of-00002.gguf: split.no"]);
    let renamed = dir.write("model.gguf", part(0, 2, &["a"]));
    says(&open(&renamed).unwrap_err().to_string(), &["file name", "-00001-of-00002.gguf"]);
}

#[test]
fn a_folder_of_gguf_files_needs_one_model() {
    let dir = TempDir::new("choice");
    let gguf = |arch: &str, kind: &str| {
        GgufWriter::default().str("general.architecture", arch).str("general.type", kind).bytes()
    };
    dir.write("model-q4.gguf", gguf("qwen35", "model"));
    dir.write("mmproj-model.gguf", gguf("clip", "mmproj"));
    dir.write("draft.gguf", gguf("dflash", "model"));
    dir.write("imatrix.gguf", gguf("", "imatrix"));
    dir.write("README.md", "");
    assert_eq!(open(dir.path()).unwrap().path(), dir.path().join("model-q4.gguf"));
    dir.write("model-q8.gguf", gguf("qwen35", "model"));
    let error = open(dir.path()).unwrap_err().to_string();
    says(&error, &["name the .gguf file", "model-q4.gguf, model-q8.gguf"]);
}

#[test]
fn the_bundled_model_opens() {
    let c = open(&bundled("th-tiny")).unwrap();
    assert_eq!(c.kind(), Kind::Safetensors);
    assert_eq!(c.names().len(), 777);
    assert!(c.generation_config().is_some());
    let TokenizerSource::Folder { tokenizer, config: Some(_), template: None } = c.tokenizer()
    else {
        panic!("{:?}", c.tokenizer())
    };
    assert!(tokenizer.ends_with("tokenizer.json"));
    c.advise_sequential();
    let t = c.require("language_model.model.norm.weight", &[576]).unwrap();
    assert!(t.to_f32().unwrap().iter().all(|w| w.is_finite()));
}
