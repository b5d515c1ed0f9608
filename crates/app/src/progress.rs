//! The progress bar while a model loads: on standard error, and only if that is a terminal.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

use crate::generate::Progress;

/// Shows how far loading has come.
pub struct LoadingBar {
    bar: ProgressBar,
}

impl LoadingBar {
    /// A bar that appears with the first [`LoadingBar::update`].
    pub fn new() -> LoadingBar {
        let terminal = std::io::stderr().is_terminal();
        LoadingBar { bar: if terminal { ProgressBar::no_length() } else { ProgressBar::hidden() } }
    }

    /// Shows a state.
    pub fn update(&self, progress: Progress<'_>) {
        let known = progress.total_bytes > 0;
        if self.bar.length().is_some() != known || self.bar.position() == 0 {
            self.bar.set_style(style(known));
        }
        if known {
            self.bar.set_length(progress.total_bytes);
        }
        self.bar.set_message(progress.phase.to_owned());
        self.bar.set_position(progress.done_bytes);
    }
}

impl Default for LoadingBar {
    fn default() -> LoadingBar {
        LoadingBar::new()
    }
}

impl Drop for LoadingBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn style(known: bool) -> ProgressStyle {
    let template = if known {
        "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}"
    } else {
        "{msg} {bytes} {bytes_per_sec}"
    };
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}
