//! Public drafts that match public models: the table `drafts.json`.
//!
//! A model is known by the beginning of its name, so that quantised copies and other owners count:
//! `mlx-community/Qwen3.5-4B-4bit`. A draft of a model that was trained further still works, if less
//! well: what it proposes never changes the text.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::name::{ModelName, Repo};

static TABLE: LazyLock<BTreeMap<String, Repo>> = LazyLock::new(|| {
    let table: BTreeMap<String, String> =
        serde_json::from_str(include_str!("drafts.json")).unwrap_or_default();
    table
        .into_iter()
        .filter_map(|(model, draft)| Some((model, Repo::parse(&draft).ok()?)))
        .collect()
});

/// The draft of a model, if one is public.
pub fn draft_of(model: &Repo) -> Option<ModelName> {
    let name = model.name();
    let matches = |stem: &str| {
        name.strip_prefix(stem)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '_', '.']))
    };
    let found = TABLE.iter().filter(|(stem, _)| matches(stem)).max_by_key(|(stem, _)| stem.len());
    let (_, draft) = found.filter(|_| !name.contains("DFlash"))?;
    Some(ModelName { repo: draft.clone(), file: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sound() {
        let lines = include_str!("drafts.json").matches("\": \"").count();
        assert!(lines > 0 && TABLE.len() == lines);
        for (model, draft) in TABLE.iter() {
            assert!(draft.name().starts_with(model.as_str()), "{model}: {draft}");
        }
    }

    #[test]
    fn copies_of_a_model_have_its_draft() {
        let draft = |name: &str| draft_of(&Repo::parse(name).unwrap()).map(|d| d.to_string());
        let expected = Some("z-lab/Qwen3.5-4B-DFlash".to_owned());
        for name in ["Qwen/Qwen3.5-4B", "mlx-community/Qwen3.5-4B-4bit", "unsloth/Qwen3.5-4B-GGUF"]
        {
            assert_eq!(draft(name), expected, "{name}");
        }
        for name in
            ["Qwen/Qwen3.5-40B", "Qwen/Qwen3-4B", "z-lab/Qwen3.5-4B-DFlash", "a/My-Qwen3.5-4B"]
        {
            assert_eq!(draft(name), None, "{name}");
        }
    }
}
