//! Any bytes as a safetensors file.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(tensors) = model::files::safetensors::parse(Path::new("m.safetensors"), bytes) {
        assert!(tensors.iter().all(|t| bytes.get(t.range.clone()).is_some()));
    }
});
