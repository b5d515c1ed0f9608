//! What the program takes from its surroundings: environment variables and places on disk.
//!
//! This is the only module that reads the environment.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::generate::{DraftRef, Isa, ModelRef};
use crate::hub::{HubOptions, Token};

/// The model used when none is named.
pub const DEFAULT_MODEL: &str = "th-tiny";
/// What follows a model's name in the name of its draft model.
const DRAFT_SUFFIX: &str = "-dflash";
/// Where the checkout that this binary was built from keeps its models.
const CHECKOUT_MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models");

/// The surroundings, read once.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// `TH_ENGINE_MODELS`: folders of models, separated as in `PATH`.
    pub models: Option<OsString>,
    /// `TH_ISA`: the instruction set if `--isa` is not given.
    pub isa: Option<String>,
    /// `TH_NVRTC`: a folder with NVIDIA's run-time compiler.
    pub nvrtc: Option<PathBuf>,
    /// `CUDA_HOME` or `CUDA_PATH`: a CUDA toolkit.
    pub cuda_home: Option<PathBuf>,
    /// `TH_API_KEY`: the key that a server asks for and a client shows.
    pub api_key: Option<Secret>,
    /// The user's cache folder.
    pub cache_dir: Option<PathBuf>,
    /// The folder of the running binary.
    pub exe_dir: Option<PathBuf>,
    /// The user's data folder (`$XDG_DATA_HOME` or what the system has instead).
    pub data_dir: Option<PathBuf>,
    /// Where models by public names come from and are kept: `HF_HUB_CACHE`, `HF_HOME`, `HF_TOKEN`,
    /// `HF_ENDPOINT`, `HF_HUB_OFFLINE`, as other programs read them.
    pub hub: HubOptions,
}

/// A text that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl Surroundings {
    /// Reads the environment.
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
    pub fn read() -> Surroundings {
        use etcetera::BaseStrategy;
        let exe = std::env::current_exe().and_then(|exe| exe.canonicalize()).ok();
        let dirs = etcetera::choose_base_strategy().ok();
        let folder = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let text = |name| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        // The same place on every system.
        let home = etcetera::home_dir().ok().map(|home| home.join(".cache"));
        let caches = folder("XDG_CACHE_HOME").or(home);
        let hub_home = folder("HF_HOME").or_else(|| Some(caches?.join("huggingface")));
        Surroundings {
            models: std::env::var_os("TH_ENGINE_MODELS").filter(|value| !value.is_empty()),
            isa: std::env::var("TH_ISA").ok().filter(|value| !value.is_empty()),
            nvrtc: folder("TH_NVRTC"),
            cuda_home: folder("CUDA_HOME").or_else(|| folder("CUDA_PATH")),
            api_key: std::env::var("TH_API_KEY").ok().filter(|key| !key.is_empty()).map(Secret),
            cache_dir: dirs.as_ref().map(|dirs| dirs.cache_dir()),
            exe_dir: exe.and_then(|exe| exe.parent().map(Path::to_owned)),
            data_dir: dirs.map(|dirs| dirs.data_dir()),
            hub: HubOptions {
                token: text("HF_TOKEN").or_else(|| saved_token(hub_home.as_deref()?)).map(Token),
                cache: folder("HF_HUB_CACHE").or_else(|| Some(hub_home?.join("hub"))),
                endpoint: text("HF_ENDPOINT"),
                offline: text("HF_HUB_OFFLINE").is_some_and(|value| is_yes(&value)),
                revision: None,
            },
        }
    }

    /// Folders that may hold models, best first.
    pub fn model_folders(&self) -> Vec<PathBuf> {
        let mut folders: Vec<PathBuf> =
            self.models.iter().flat_map(|value| std::env::split_paths(value)).collect();
        if let Some(exe) = &self.exe_dir {
            folders.push(exe.join("models"));
            folders.push(exe.join("../share/th-engine/models"));
        }
        folders.extend(self.data_dir.iter().map(|data| data.join("th-engine/models")));
        folders.push(PathBuf::from(CHECKOUT_MODELS));
        folders.iter().map(|folder| without_dots(folder)).collect()
    }

    /// Finds a model: `synth:NAME`, a path that exists, or a name in one of the model folders.
    pub fn find_model(&self, named: Option<&str>) -> Result<ModelRef, NotFound> {
        let name = named.unwrap_or(DEFAULT_MODEL);
        if let Some(shape) = name.strip_prefix("synth:") {
            return Ok(ModelRef::Synthetic(shape.to_owned()));
        }
        let mut looked = Vec::new();
        if named.is_some() {
            let path = PathBuf::from(name);
            if path.exists() {
                return Ok(ModelRef::Path(path));
            }
            looked.push(path);
        }
        if is_bare(name) {
            for folder in self.model_folders() {
                let path = folder.join(name);
                if path.exists() {
                    return Ok(ModelRef::Path(path));
                }
                looked.push(path);
            }
        }
        Err(NotFound { what: "model", name: name.to_owned(), looked })
    }

    /// Finds the draft that `--draft` asks for: `auto`, `none`, `ngram`, `synth`, or a place as for
    /// a model.
    pub fn find_draft(&self, asked: &str, model: &ModelRef) -> Result<DraftRef, NotFound> {
        match asked {
            "none" => return Ok(DraftRef::None),
            "ngram" => return Ok(DraftRef::Ngram),
            "synth" => return Ok(DraftRef::Synthetic),
            "auto" => {
                let sibling = match model {
                    ModelRef::Path(path) => sibling_draft(path),
                    ModelRef::Synthetic(_) => None,
                };
                return Ok(sibling.map_or(DraftRef::None, DraftRef::Path));
            }
            _ => {}
        }
        match self.find_model(Some(asked)) {
            Ok(ModelRef::Path(path)) => Ok(DraftRef::Path(path)),
            // The command line refuses this spelling: the shape of a made-up draft follows the
            // model.
            Ok(ModelRef::Synthetic(_)) => Ok(DraftRef::Synthetic),
            Err(error) => Err(NotFound { what: "draft", ..error }),
        }
    }

    /// How a card is opened: its compiler is looked for where the environment says, then beside the
    /// binary; compiled kernels are kept in the user's cache folder.
    pub fn cuda(&self, threads: usize) -> cuda::Options {
        let home = self.cuda_home.iter().map(|home| home.join("lib64"));
        let nvrtc = self.nvrtc.iter().cloned().chain(self.exe_dir.iter().cloned()).chain(home);
        let cache = self.cache_dir.as_ref().map(|dir| dir.join("th-engine/kernels"));
        cuda::Options { nvrtc: nvrtc.collect(), cache, threads, ..cuda::Options::default() }
    }

    /// Where a server keeps its traces unless told otherwise.
    pub fn traces(&self) -> Option<PathBuf> {
        self.data_dir.as_ref().map(|dir| dir.join("th-engine/traces.db"))
    }

    /// The instruction set: the option, else `TH_ISA`, else the best there is.
    pub fn isa(&self, option: Option<Isa>) -> Result<Isa, String> {
        use clap::ValueEnum;
        match (option, &self.isa) {
            (Some(isa), _) => Ok(isa),
            (None, Some(name)) => Isa::from_str(name, true)
                .map_err(|_| format!("TH_ISA is {name:?}; use auto, avx512, avx2 or portable")),
            (None, None) => Ok(Isa::Auto),
        }
    }
}

/// The token that a login left.
fn saved_token(home: &Path) -> Option<String> {
    let token = std::fs::read_to_string(home.join("token")).ok()?;
    Some(token.trim().to_owned()).filter(|token| !token.is_empty())
}

/// Whether a variable says yes.
fn is_yes(value: &str) -> bool {
    ["1", "true", "yes", "on"].contains(&value.trim().to_ascii_lowercase().as_str())
}

/// A model or draft that is in none of the places looked at.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no {what} {name:?}; give a folder, a .gguf file or a public name as OWNER/NAME, or set TH_ENGINE_MODELS (looked at {})",
    shown(looked)
)]
pub struct NotFound {
    what: &'static str,
    name: String,
    looked: Vec<PathBuf>,
}

fn shown(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Whether a name has no folder in it, so that it may be looked up.
fn is_bare(name: &str) -> bool {
    !name.is_empty() && name != ".." && name != "." && !name.contains(['/', '\\'])
}

/// `<model>-dflash` beside the model: a folder or, for a GGUF file, a GGUF file as well.
fn sibling_draft(model: &Path) -> Option<PathBuf> {
    let model = model.canonicalize().ok()?;
    let name = model.file_name()?.to_str()?;
    let stem = name.strip_suffix(".gguf").unwrap_or(name);
    let names = [format!("{stem}{DRAFT_SUFFIX}"), format!("{stem}{DRAFT_SUFFIX}.gguf")];
    let candidates = names.iter().map(|name| model.with_file_name(name));
    candidates.into_iter().find(|path| path.exists())
}

/// A path without `.` and `..`, for people to read; symbolic links are not looked at.
fn without_dots(path: &Path) -> PathBuf {
    use std::path::Component;
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if out.file_name().is_some() => {
                out.pop();
            }
            part => out.push(part),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of this test, empty at first.
    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("th-engine-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        dir.canonicalize().unwrap()
    }

    #[test]
    fn folders_in_order() {
        let surroundings = Surroundings {
            models: std::env::join_paths(["/one", "/two"]).ok(),
            exe_dir: Some("/opt/bin".into()),
            data_dir: Some("/home/me/.local/share".into()),
            ..Surroundings::default()
        };
        let folders = surroundings.model_folders();
        let expected = [
            "/one",
            "/two",
            "/opt/bin/models",
            "/opt/share/th-engine/models",
            "/home/me/.local/share/th-engine/models",
        ];
        assert_eq!(folders[..5], expected.map(PathBuf::from));
        assert!(folders[5].ends_with("models") && folders[5].join(DEFAULT_MODEL).exists());
    }

    #[test]
    fn the_first_folder_with_the_model_wins() {
        let dir = scratch("find");
        for path in ["a/x", "b/x", "b/y"] {
            std::fs::create_dir_all(dir.join(path)).unwrap();
        }
        let models = std::env::join_paths([dir.join("a"), dir.join("b")]).ok();
        let surroundings = Surroundings { models, ..Surroundings::default() };
        let find = |name: &str| surroundings.find_model(Some(name));
        assert_eq!(find("x"), Ok(ModelRef::Path(dir.join("a/x"))));
        assert_eq!(find("y"), Ok(ModelRef::Path(dir.join("b/y"))));
        let path = dir.join("b/x");
        assert_eq!(find(path.to_str().unwrap()), Ok(ModelRef::Path(path)));
        assert_eq!(find("synth:qwen3.8-27b"), Ok(ModelRef::Synthetic("qwen3.8-27b".into())));
        let error = find("no-such").unwrap_err().to_string();
        for place in ["no-such", "a/no-such", "b/no-such", "TH_ENGINE_MODELS"] {
            assert!(error.contains(place), "{error}");
        }
        // A path that does not exist is not looked up elsewhere.
        let error = find("../x").unwrap_err().to_string();
        assert!(error.contains("(looked at ../x)"), "{error}");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_bundled_model_is_found_without_a_name() {
        let found = Surroundings::default().find_model(None);
        assert!(matches!(found, Ok(ModelRef::Path(path)) if path.ends_with("models/th-tiny")));
    }

    #[test]
    fn drafts() {
        let dir = scratch("draft");
        for path in ["m", "m-dflash", "alone"] {
            std::fs::create_dir_all(dir.join(path)).unwrap();
        }
        for path in ["q.gguf", "q-dflash.gguf"] {
            std::fs::write(dir.join(path), "").unwrap();
        }
        let surroundings = Surroundings::default();
        let auto = |path: &str| surroundings.find_draft("auto", &ModelRef::Path(dir.join(path)));
        assert_eq!(auto("m"), Ok(DraftRef::Path(dir.join("m-dflash"))));
        assert_eq!(auto("m/"), Ok(DraftRef::Path(dir.join("m-dflash"))));
        assert_eq!(auto("q.gguf"), Ok(DraftRef::Path(dir.join("q-dflash.gguf"))));
        assert_eq!(auto("alone"), Ok(DraftRef::None));
        let synthetic = ModelRef::Synthetic("x".into());
        let draft = |asked: &str| surroundings.find_draft(asked, &synthetic);
        assert_eq!(draft("auto"), Ok(DraftRef::None));
        assert_eq!(draft("none"), Ok(DraftRef::None));
        assert_eq!(draft("ngram"), Ok(DraftRef::Ngram));
        assert_eq!(draft("synth"), Ok(DraftRef::Synthetic));
        assert!(draft("no-such").unwrap_err().to_string().starts_with("no draft \"no-such\""));
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_compiler_and_the_cache_of_a_card() {
        let surroundings = Surroundings {
            nvrtc: Some("/n".into()),
            cuda_home: Some("/c".into()),
            cache_dir: Some("/cache".into()),
            exe_dir: Some("/bin".into()),
            ..Surroundings::default()
        };
        let options = surroundings.cuda(3);
        assert_eq!(options.nvrtc, ["/n", "/bin", "/c/lib64"].map(PathBuf::from));
        assert_eq!(options.cache, Some("/cache/th-engine/kernels".into()));
        assert_eq!(options.threads, 3);
    }

    #[test]
    fn instruction_sets() {
        let with = |isa: &str| Surroundings { isa: Some(isa.into()), ..Surroundings::default() };
        assert_eq!(Surroundings::default().isa(None), Ok(Isa::Auto));
        assert_eq!(with("avx2").isa(None), Ok(Isa::Avx2));
        assert_eq!(with("avx2").isa(Some(Isa::Portable)), Ok(Isa::Portable));
        assert!(with("mmx").isa(None).unwrap_err().contains("TH_ISA"));
    }
}
