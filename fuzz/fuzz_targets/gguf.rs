//! Any bytes as a GGUF file, opened as a target and as a draft.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use model::files::Checkpoint;
use model::{DraftSource, TargetSource, synth};

fuzz_target!(|bytes: &[u8]| {
    let open = || Checkpoint::from_gguf_bytes(Path::new("m.gguf"), bytes.to_vec());
    if let Ok(checkpoint) = open() {
        if let Ok(source) = TargetSource::from_checkpoint(checkpoint) {
            for weight in source.spec().weights() {
                let _ = (source.matrix(weight), source.vector(weight));
            }
        }
    }
    if let (Ok(checkpoint), Some(target)) = (open(), synth::target("tiny")) {
        let _ = DraftSource::from_checkpoint(checkpoint, &target);
    }
});
