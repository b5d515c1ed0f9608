//! `th-engine chat`: a conversation in the terminal.

use std::io::{BufRead, IsTerminal, Write};

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::answer::answer;
use crate::cli::ChatArgs;
use crate::generate::{GenerateOptions, LoadRequest, Loader};
use crate::run::template_options;
use crate::session::Session;
use crate::summary::Figures;
use crate::terminal::{TextSink, error, note};
use crate::text::chat::{ChatText, Message, Role, TemplateOptions};
use crate::text::stream::StreamOptions;
use crate::{Failure, interrupt};

const HELP: &str = "\
/help           this list
/reset          forget the conversation, keep the system message
/system [TEXT]  show the system message, or set it and begin a new conversation
/stats          figures of all answers so far
/quit           leave (also Ctrl-D, or Ctrl-C twice)
Ctrl-C stops an answer. A message that begins with / is sent when the / is doubled.";

/// Runs the command.
pub fn run(loader: &dyn Loader, request: &LoadRequest, args: &ChatArgs) -> Result<(), Failure> {
    let mut session = Session::load(loader, request).map_err(Failure::Load)?;
    let text = session.take_text().map_err(Failure::Run)?;
    let mut lines = Lines::open().map_err(Failure::Run)?;
    let mut chat = Chat {
        options: template_options(&text, args.answer.no_think),
        generate: args.answer.generate_options(),
        stops: args.answer.stops.clone(),
        system: args.system.clone(),
        turns: Vec::new(),
        total: Figures::default(),
        session,
        text,
    };
    if lines.interactive() {
        let draft = chat.session.draft.as_deref().unwrap_or("none");
        note(&format!(
            "{} on {}, draft {draft}; /help lists the commands",
            chat.session.model, chat.session.device
        ));
    }
    while let Some(line) = lines.next().map_err(Failure::Run)? {
        match Input::parse(&line) {
            Input::Nothing => {}
            Input::Message(message) => match chat.turn(message) {
                // Someone at a terminal can go on; a script should learn that it failed.
                Err(Failure::Run(what)) if lines.interactive() => error(&format!("{what:#}")),
                other => other?,
            },
            Input::Command(command, argument) => match chat.command(command, argument) {
                Some(reply) => writeln!(std::io::stdout(), "{reply}").map_err(Failure::write)?,
                None => break,
            },
        }
    }
    Ok(())
}

/// A line that was typed.
#[derive(Debug, PartialEq, Eq)]
enum Input<'a> {
    Nothing,
    Message(&'a str),
    Command(&'a str, &'a str),
}

impl<'a> Input<'a> {
    fn parse(line: &'a str) -> Input<'a> {
        let text = line.trim();
        match text.strip_prefix('/') {
            _ if text.is_empty() => Input::Nothing,
            None => Input::Message(text),
            Some(rest) if rest.starts_with('/') => Input::Message(rest),
            Some(rest) => {
                let (command, argument) =
                    rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
                Input::Command(command, argument.trim())
            }
        }
    }
}

/// The conversation so far.
struct Chat {
    session: Session,
    text: ChatText,
    options: TemplateOptions,
    generate: GenerateOptions,
    stops: Vec<String>,
    system: Option<String>,
    turns: Vec<Message>,
    total: Figures,
}

impl Chat {
    /// Sends a message and streams the answer. A message that fails leaves the conversation as it
    /// was.
    fn turn(&mut self, message: &str) -> Result<(), Failure> {
        self.turns.push(Message::new(Role::User, message));
        let result = self.answer();
        if result.is_err() {
            self.turns.pop();
        }
        result
    }

    fn answer(&mut self) -> Result<(), Failure> {
        let system = self.system.iter().map(|text| Message::new(Role::System, text));
        let messages: Vec<Message> = system.chain(self.turns.iter().cloned()).collect();
        let prompt = self.text.prompt(&messages, &[], &self.options);
        let prompt = prompt.map_err(|e| Failure::Run(e.into()))?;
        let ids = self.text.prompt_ids(&prompt).map_err(|e| Failure::Run(e.into()))?;
        prompt.notes.iter().for_each(|what| note(what));
        let stream =
            StreamOptions { stops: self.stops.clone(), start: prompt.start, keep_special: false };
        let mut sink = TextSink::stdout(false);
        let generator = self.session.generator.as_mut();
        let tok = Some(self.text.tok());
        let result = interrupt::answering(|cancel| {
            answer(generator, tok, &ids, &self.generate, &stream, cancel, &mut sink)
        });
        let finished = sink.finish();
        let answer = result.map_err(Failure::from)?;
        finished.map_err(Failure::write)?;
        note(&answer.line(self.session.floor_ms_per_round));
        let mut reply = Message::new(Role::Assistant, answer.text);
        reply.reasoning = Some(answer.reasoning).filter(|text| !text.is_empty());
        self.turns.push(reply);
        self.total.add(&answer.figures);
        Ok(())
    }

    /// Carries out a command; `None` means to leave.
    fn command(&mut self, command: &str, argument: &str) -> Option<String> {
        match (command, argument) {
            ("quit" | "exit", "") => None,
            ("help", "") => Some(HELP.into()),
            ("reset", "") => {
                self.turns.clear();
                Some("new conversation".into())
            }
            ("system", "") => Some(match &self.system {
                Some(text) => format!("system message: {text}"),
                None => "no system message".into(),
            }),
            ("system", text) => {
                self.system = Some(text.into());
                self.turns.clear();
                Some("new conversation with this system message".into())
            }
            ("stats", "") => Some(self.total.line(self.session.floor_ms_per_round)),
            ("quit" | "exit" | "help" | "reset" | "stats", _) => {
                Some(format!("/{command} takes no argument"))
            }
            _ => Some(format!("unknown command /{command}; /help lists the commands")),
        }
    }
}

/// Where lines come from.
enum Lines {
    Editor(Box<DefaultEditor>),
    Plain(std::io::StdinLock<'static>),
}

impl Lines {
    fn open() -> anyhow::Result<Lines> {
        if std::io::stdin().is_terminal() {
            Ok(Lines::Editor(Box::new(DefaultEditor::new()?)))
        } else {
            Ok(Lines::Plain(std::io::stdin().lock()))
        }
    }

    fn interactive(&self) -> bool {
        matches!(self, Lines::Editor(_))
    }

    /// The next line, or `None` at the end of the input.
    fn next(&mut self) -> anyhow::Result<Option<String>> {
        match self {
            Lines::Editor(editor) => edited_line(editor),
            Lines::Plain(stdin) => {
                let mut bytes = Vec::new();
                if stdin.read_until(b'\n', &mut bytes)? == 0 {
                    return Ok(None);
                }
                let text = String::from_utf8(bytes);
                text.map(Some).map_err(|_| anyhow::anyhow!("standard input is not UTF-8 text"))
            }
        }
    }
}

/// Ctrl-C at the prompt clears the line; a second one in a row leaves, as Ctrl-D does.
fn edited_line(editor: &mut DefaultEditor) -> anyhow::Result<Option<String>> {
    let mut interrupted = false;
    loop {
        match editor.readline("> ") {
            Ok(line) => {
                if !line.trim().is_empty() {
                    editor.add_history_entry(&line)?;
                }
                return Ok(Some(line));
            }
            Err(ReadlineError::Interrupted) if !interrupted => {
                interrupted = true;
                note(&"Ctrl-C again, Ctrl-D or /quit to leave");
            }
            Err(ReadlineError::Interrupted | ReadlineError::Eof) => return Ok(None),
            Err(other) => return Err(other.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        assert_eq!(Input::parse("  \n"), Input::Nothing);
        assert_eq!(Input::parse(" hi there\n"), Input::Message("hi there"));
        assert_eq!(Input::parse("//usr/bin"), Input::Message("/usr/bin"));
        assert_eq!(Input::parse("/system  Be brief. \n"), Input::Command("system", "Be brief."));
        assert_eq!(Input::parse("/quit"), Input::Command("quit", ""));
    }
}
