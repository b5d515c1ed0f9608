//! Any JSON as the config.json of a target and of a draft.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use model::draft_spec::DraftSpec;
use model::spec::Spec;

fuzz_target!(|text: &str| {
    let Ok(config) = serde_json::from_str(text) else { return };
    let file = Path::new("config.json");
    if let Ok(spec) = Spec::from_config(file, &config) {
        for weight in spec.weights() {
            let _ = (spec.matrix_shape(weight), spec.vector_len(weight));
        }
    }
    let _ = DraftSpec::from_config(file, &config);
});
