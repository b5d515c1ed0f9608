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
        // A changed phase may come with or without a known size.
        if self.bar.message() != progress.phase || known != self.bar.length().is_some() {
            self.bar.set_style(style(known));
            self.bar.set_message(progress.phase.to_owned());
        }
        match known {
            true => self.bar.set_length(progress.total_bytes),
            false => self.bar.unset_length(),
        }
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
