//! `th-engine top`: a running server, live in the terminal.

use std::collections::VecDeque;
use std::io::IsTerminal;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Gauge, Paragraph, Row, Sparkline, Table};
use ratatui::{DefaultTerminal, Frame};

use super::live::{Client, Look, Status};
use super::text::duration;
use crate::Failure;
use crate::config::Surroundings;
use crate::telemetry::stats::{Stats, Summary};

/// Looks that the course of the rate goes back to.
const HISTORY: usize = 400;

/// Options of `top`.
#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    /// Where the server is
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// The server's API key [default: TH_API_KEY]
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Time between two looks, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(100..=60_000))]
    pub interval: u64,
}

/// Runs the command.
///
/// # Errors
/// There is no terminal, or it fails.
pub fn run(args: &TopArgs, surroundings: &Surroundings) -> Result<(), Failure> {
    let interval = Duration::from_millis(args.interval);
    let key =
        args.api_key.clone().or_else(|| surroundings.api_key.as_ref().map(|key| key.0.clone()));
    let client = Client::new(&args.url, key);
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        let what =
            format!("top needs a terminal; programs ask {}/status and /traces/stats", args.url);
        return Err(Failure::Usage(anyhow::anyhow!(what)));
    }
    // The first look says what is wrong before the screen is taken.
    let first = client.look().map_err(|error| Failure::Run(anyhow::anyhow!(error)))?;
    let looks = follow(client, interval);
    let mut view = View::new(&args.url);
    view.look(first);
    let result = ratatui::try_init().and_then(|mut terminal| {
        let result = show(&mut terminal, &mut view, &looks);
        ratatui::restore();
        result
    });
    result.map_err(Failure::write)
}

/// Looks at the server on a thread of its own, so that a slow one does not freeze the screen.
fn follow(client: Client, interval: Duration) -> Receiver<Result<Look, String>> {
    let (sender, looks) = mpsc::channel();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(interval);
            if sender.send(client.look()).is_err() {
                return;
            }
        }
    });
    looks
}

fn show(
    terminal: &mut DefaultTerminal,
    view: &mut View,
    looks: &Receiver<Result<Look, String>>,
) -> std::io::Result<()> {
    loop {
        terminal.draw(|frame| view.draw(frame))?;
        if event::poll(Duration::from_millis(100))? && leaves(&event::read()?) {
            return Ok(());
        }
        loop {
            match looks.try_recv() {
                Ok(Ok(look)) => view.look(look),
                Ok(Err(error)) => view.error = Some(error),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
            }
        }
    }
}

fn leaves(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let control_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press
        && (control_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}

/// What is on the screen.
struct View {
    url: String,
    last: Option<Look>,
    /// Between the last two looks.
    rates: Rates,
    /// Output tokens a second at each look, the newest first.
    history: VecDeque<u64>,
    error: Option<String>,
}

/// What happened between two looks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Rates {
    output: f64,
    prompt: f64,
    /// Tokens of a round, of however many lanes.
    tokens_per_round: Option<f64>,
    round_ms: Option<f64>,
}

impl Rates {
    /// Counters of a model that was loaded again begin again: nothing is known of that interval.
    fn between(old: (Instant, &Status), new: (Instant, &Status)) -> Rates {
        let seconds = new.0.saturating_duration_since(old.0).as_secs_f64();
        let count = |get: fn(&Status) -> u64| get(new.1).checked_sub(get(old.1));
        let (output, prompt, rounds) =
            (count(|s| s.tokens.output), count(|s| s.tokens.prompt), count(|s| s.rounds.count));
        let (Some(output), Some(prompt), Some(rounds)) = (output, prompt, rounds) else {
            return Rates::default();
        };
        if seconds <= 0.0 {
            return Rates::default();
        }
        let per_round = |x: f64| (rounds > 0).then(|| x / rounds as f64);
        Rates {
            output: output as f64 / seconds,
            prompt: prompt as f64 / seconds,
            tokens_per_round: per_round(output as f64),
            round_ms: per_round((new.1.rounds.seconds - old.1.rounds.seconds) * 1e3),
        }
    }
}

impl View {
    fn new(url: &str) -> View {
        let (rates, history) = (Rates::default(), VecDeque::new());
        View { url: url.to_owned(), last: None, rates, history, error: None }
    }

    fn look(&mut self, look: Look) {
        if let Some(last) = &self.last {
            self.rates = Rates::between((last.at, &last.status), (look.at, &look.status));
            self.history.push_front(self.rates.output.round() as u64);
            self.history.truncate(HISTORY);
        }
        self.last = Some(look);
        self.error = None;
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let areas = Layout::vertical([
            Constraint::Length(3),
            Constraint::Length(3),
            Constraint::Min(4),
            Constraint::Min(6),
            Constraint::Length(1),
        ]);
        let [head, gauges, course, table, foot] = areas.areas(frame.area());
        let Some(look) = &self.last else {
            frame.render_widget(Paragraph::new("asking the server"), frame.area());
            return;
        };
        frame.render_widget(Paragraph::new(self.head(&look.status)), head);
        draw_gauges(frame, gauges, &look.status);
        self.draw_course(frame, course);
        draw_table(frame, table, look.stats.as_ref());
        let foot_line = match &self.error {
            Some(error) => Line::from(error.as_str()).style(Style::new().fg(Color::Red)),
            None => Line::from("q leaves").style(Style::new().add_modifier(Modifier::DIM)),
        };
        frame.render_widget(foot_line, foot);
    }

    fn head<'a>(&'a self, status: &'a Status) -> Vec<Line<'a>> {
        let fine = status.status == "ok";
        let colour = if fine { Color::Green } else { Color::Red };
        let reason = status.reason.as_deref().map_or(String::new(), |reason| format!(": {reason}"));
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let draft = status.model.draft.as_deref().unwrap_or("no draft");
        let mut traces = match status.traces.state.as_str() {
            "failing" => format!(
                " · traces are not written: {}",
                status.traces.error.as_deref().unwrap_or("?")
            ),
            _ => String::new(),
        };
        if status.traces.lost > 0 {
            traces += &format!(" · {} traces lost", status.traces.lost);
        }
        vec![
            Line::from(vec![
                Span::styled("th-engine ", bold),
                Span::raw(format!("{} at {} · ", status.build, self.url)),
                Span::styled(format!("{}{reason}", status.status), Style::new().fg(colour)),
                Span::raw(format!(" · up {}", uptime(status.uptime_seconds))),
            ]),
            Line::from(format!(
                "{} · {draft} · {} · {} tokens of context · {:.1} GB{traces}",
                status.model.name,
                status.device.name,
                status.model.context,
                status.memory.total_bytes as f64 / 1e9
            )),
        ]
    }

    fn draw_course(&self, frame: &mut Frame<'_>, area: Rect) {
        let Rates { output, prompt, tokens_per_round, round_ms } = self.rates;
        let mut title = format!(" {output:.1} tok/s out · {prompt:.0} tok/s in");
        title.extend(tokens_per_round.map(|x| format!(" · {x:.2} tokens/round")));
        title.extend(round_ms.map(|ms| format!(" · round {}", duration(ms))));
        let floor = self.last.as_ref().and_then(|look| floor_ms(&look.status));
        if let (Some(ms), Some(floor)) = (round_ms, floor) {
            title += &format!(" = {:.2}x floor", ms / floor);
        }
        title.push(' ');
        let values: Vec<u64> = self.history.iter().copied().collect();
        let line = Sparkline::default()
            .block(Block::bordered().title(title))
            .data(&values)
            .direction(ratatui::widgets::RenderDirection::RightToLeft);
        frame.render_widget(line, area);
    }
}

/// The least time that a round of one lane takes.
fn floor_ms(status: &Status) -> Option<f64> {
    let (bytes, bandwidth) = (status.device.round_bytes, status.device.read_bandwidth);
    (bytes > 0.0 && bandwidth > 0.0).then(|| bytes / bandwidth * 1e3)
}

fn draw_gauges(frame: &mut Frame<'_>, area: Rect, status: &Status) {
    let areas: [Rect; 4] = Layout::horizontal([Constraint::Fill(1); 4]).areas(area);
    let cache = &status.cache;
    let hits = cache.hit_share.unwrap_or(0.0);
    for (area, (title, used, of)) in areas.into_iter().zip([
        ("lanes", status.lanes.running, status.lanes.total),
        ("waiting", status.queue.waiting, status.queue.limit),
        ("pages", cache.pages_used, cache.pages),
        ("cached", (hits * 1000.0).round() as u64, 1000),
    ]) {
        let share = if of > 0 { (used as f64 / of as f64).clamp(0.0, 1.0) } else { 0.0 };
        let label = match title {
            "cached" => format!("{:.1} % of prompts", share * 100.0),
            _ => format!("{used} of {of}"),
        };
        let gauge = Gauge::default()
            .block(Block::bordered().title(format!(" {title} ")))
            .gauge_style(Style::new().fg(Color::Cyan))
            .ratio(share)
            .label(label);
        frame.render_widget(gauge, area);
    }
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, stats: Option<&Stats>) {
    let block = Block::bordered().title(" last 15 minutes ");
    let Some(stats) = stats else {
        frame.render_widget(Paragraph::new("this server keeps no traces").block(block), area);
        return;
    };
    let titles = [
        "",
        "requests",
        "errors",
        "first p50",
        "p95",
        "p99",
        "total p50",
        "p99",
        "tok/s",
        "cached",
    ];
    let head = Row::new(titles).style(Style::new().add_modifier(Modifier::BOLD));
    let named =
        |kind: &'static str| move |(name, s): (&String, &Summary)| row(&format!("{kind}{name}"), s);
    let rows = std::iter::once(row("all", &stats.total))
        .chain(stats.models.iter().map(named("model ")))
        .chain(stats.clients.iter().map(named("client ")));
    let mut widths = vec![Constraint::Min(12)];
    widths.extend([Constraint::Length(9); 9]);
    frame.render_widget(Table::new(rows, widths).header(head).block(block), area);
}

fn row(name: &str, summary: &Summary) -> Row<'static> {
    let time = |ms: Option<f64>| ms.map_or("-".into(), duration);
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    Row::new([
        name.chars().filter(|c| !c.is_control()).collect(),
        summary.requests.to_string(),
        percent(summary.error_rate),
        time(summary.first_token_ms.p50),
        time(summary.first_token_ms.p95),
        time(summary.first_token_ms.p99),
        time(summary.duration_ms.p50),
        time(summary.duration_ms.p99),
        summary.tokens_per_second.map_or("-".into(), |x| format!("{x:.1}")),
        summary.cache_hit_share.map_or("-".into(), percent),
    ])
}

fn uptime(seconds: f64) -> String {
    let minutes = (seconds / 60.0) as u64;
    match minutes {
        0..60 => format!("{minutes} min"),
        60..1440 => format!("{} h {} min", minutes / 60, minutes % 60),
        _ => format!("{} d {} h", minutes / 1440, minutes / 60 % 24),
    }
}

#[cfg(test)]
#[path = "top_tests.rs"]
mod tests;
