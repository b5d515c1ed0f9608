//! The `th-engine` binary.

use std::process::ExitCode;

use app::generate::{LoadRequest, Loaded, Loader, Progress, Section, TextSource};

/// The engine of this build.
struct Engine;

impl Loader for Engine {
    fn load(
        &self,
        request: &LoadRequest,
        _progress: &mut dyn FnMut(Progress<'_>),
    ) -> anyhow::Result<Loaded> {
        anyhow::bail!("this build has no engine to load {:?}", request.model)
    }

    fn inspect(&self, request: &LoadRequest) -> anyhow::Result<(Vec<Section>, TextSource)> {
        anyhow::bail!("this build has no engine to inspect {:?}", request.model)
    }
}

fn main() -> ExitCode {
    app::main_with(std::env::args_os(), &Engine)
}
