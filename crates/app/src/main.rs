//! The `th-engine` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    app::main_with(std::env::args_os(), &app::local::Local)
}
