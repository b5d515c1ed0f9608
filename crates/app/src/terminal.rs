//! Output for people: colours only on a terminal, reasoning dimmed, every piece flushed at once.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use anstyle::{AnsiColor, Style};

use crate::answer::Sink;
use crate::text::stream::Delta;

const REASONING: Style = Style::new().dimmed();
const ERROR: Style = AnsiColor::Red.on_default().bold();
const NOTE: Style = Style::new().dimmed();

/// Prints an error of one line to standard error.
pub fn error(message: &dyn std::fmt::Display) {
    anstream::eprintln!("{ERROR}error:{ERROR:#} {}", one_line(message));
}

/// Prints a remark of one line to standard error.
pub fn note(message: &dyn std::fmt::Display) {
    anstream::eprintln!("{NOTE}{}{NOTE:#}", one_line(message));
}

fn one_line(message: &dyn std::fmt::Display) -> String {
    message.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Streams an answer as text.
pub struct TextSink {
    out: Box<dyn Write>,
    /// Where reasoning goes if not into the answer's own stream.
    aside: Option<Box<dyn Write>>,
    /// Print token ids: there is no tokenizer.
    ids: bool,
    /// Show control characters instead of sending them to a terminal.
    visible: bool,
    in_reasoning: bool,
    ends_with_line_break: bool,
}

impl TextSink {
    /// Answers to standard output; reasoning beside them on a terminal, else to standard error.
    /// `ids`: print token ids instead of text.
    pub fn stdout(ids: bool) -> TextSink {
        let terminal = io::stdout().is_terminal();
        // A pipe gets the answer byte for byte; anstream would take escape sequences out of it.
        let out: Box<dyn Write> =
            if terminal { Box::new(anstream::stdout()) } else { Box::new(io::stdout()) };
        let aside = (!terminal).then(|| Box::new(anstream::stderr()) as Box<dyn Write>);
        TextSink {
            out,
            aside,
            ids,
            visible: terminal,
            in_reasoning: false,
            ends_with_line_break: true,
        }
    }

    /// Ends the answer with a line break unless it has one.
    pub fn finish(&mut self) -> io::Result<()> {
        if self.in_reasoning {
            self.leave_reasoning()?;
        }
        if !self.ends_with_line_break {
            self.out.write_all(b"\n")?;
            self.ends_with_line_break = true;
        }
        self.out.flush()
    }

    fn leave_reasoning(&mut self) -> io::Result<()> {
        self.in_reasoning = false;
        match &mut self.aside {
            Some(aside) => aside.write_all(b"\n")?,
            None => self.out.write_all(b"\n\n")?,
        }
        Ok(())
    }

    fn reasoning(&mut self, text: &str) -> io::Result<()> {
        self.in_reasoning = true;
        let out = self.aside.as_mut().unwrap_or(&mut self.out);
        write!(out, "{REASONING}{}{REASONING:#}", visible(text))?;
        out.flush()
    }
}

impl Sink for TextSink {
    fn write(&mut self, delta: &Delta, ids: &[u32]) -> io::Result<()> {
        if self.ids {
            for id in ids {
                let gap = if self.ends_with_line_break { "" } else { " " };
                write!(self.out, "{gap}{id}")?;
                self.ends_with_line_break = false;
            }
        }
        if !delta.reasoning.is_empty() {
            self.reasoning(&delta.reasoning)?;
        }
        if !delta.answer.is_empty() {
            if self.in_reasoning {
                self.leave_reasoning()?;
            }
            let text = &delta.answer;
            let text = if self.visible { visible(text) } else { Cow::Borrowed(text.as_str()) };
            self.out.write_all(text.as_bytes())?;
            self.ends_with_line_break = delta.answer.ends_with('\n');
        }
        self.out.flush()
    }
}

/// Text for a terminal: control characters that a model writes are shown, not obeyed.
fn visible(text: &str) -> Cow<'_, str> {
    let hidden = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(hidden) {
        return Cow::Borrowed(text);
    }
    let show = |c: char| match c as u32 {
        _ if !hidden(c) => c,
        code @ 0..0x20 => char::from_u32(0x2400 + code).unwrap_or('\u{FFFD}'),
        _ => '\u{FFFD}',
    };
    Cow::Owned(text.chars().map(show).collect())
}

/// Streams nothing: for output that is printed at the end.
pub struct Silent;

impl Sink for Silent {
    fn write(&mut self, _delta: &Delta, _ids: &[u32]) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown() {
        assert_eq!(visible("a\tb\n\u{1b}[31mc\u{9b}\r"), "a\tb\n\u{241b}[31mc\u{FFFD}\u{240d}");
        assert_eq!(visible("plain é"), "plain é");
    }
}
