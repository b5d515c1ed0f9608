use ratatui::Terminal;
use ratatui::backend::TestBackend;
use serde_json::json;

use super::*;
use crate::telemetry::stats::{Collector, Sample};

fn status(output: u64, rounds: u64, seconds: f64) -> Status {
    let status = json!({
        "status": "ok", "build": "0.1.0 (abc)", "uptime_seconds": 3720.0, "later_field": [1],
        "model": {"name": "th-tiny", "draft": "th-tiny-dflash", "context": 4096},
        "device": {"name": "cpu", "round_bytes": 3000, "read_bandwidth": 1e6},
        "memory": {"total_bytes": 1_500_000_000u64},
        "lanes": {"total": 4, "running": 1},
        "queue": {"limit": 64, "waiting": 0},
        "tokens": {"prompt": 100, "cached": 50, "output": output},
        "rounds": {"count": rounds, "seconds": seconds},
        "cache": {"pages": 10, "pages_used": 5, "hit_share": 0.5},
        "traces": {"state": "ok", "lost": 0},
    });
    serde_json::from_value(status).unwrap()
}

fn stats() -> Stats {
    let mut collector = Collector::default();
    collector.add(&Sample {
        model: "th-tiny".into(),
        client: "curl\u{1b}[31m".into(),
        duration_us: 900_000,
        first_token_us: Some(120_000),
        output: 30,
        decode_us: 600_000,
        ..Sample::default()
    });
    collector.finish()
}

fn screen(view: &View, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view.draw(frame)).unwrap();
    terminal.backend().to_string()
}

#[test]
fn a_server_at_work() {
    let begun = Instant::now();
    let mut view = View::new("http://127.0.0.1:8080");
    view.look(Look { at: begun, status: status(100, 40, 0.1), stats: Some(stats()) });
    let at = begun + Duration::from_secs(2);
    view.look(Look { at, status: status(300, 90, 0.4), stats: Some(stats()) });
    assert_eq!(view.rates.output, 100.0);
    assert_eq!(view.rates.tokens_per_round, Some(4.0));
    let shown = screen(&view, 110, 20);
    for part in [
        "100.0 tok/s out",
        "4.00 tokens/round",
        "6.0 ms = 2.00x floor",
        "1 of 4",
        "5 of 10",
        "50.0 % of prompts",
        "th-tiny-dflash",
        "up 1 h 2 min",
        "model th-tiny",
        "120 ms",
        "q leaves",
    ] {
        assert!(shown.contains(part), "no {part} in\n{shown}");
    }
    assert!(!shown.contains('\u{1b}'));
    view.error = Some("http://127.0.0.1:8080: connection refused".into());
    assert!(screen(&view, 110, 20).contains("connection refused"));
}

#[test]
fn counters_that_begin_again_give_no_rate() {
    let begun = Instant::now();
    let (old, new) = (status(1000, 400, 3.0), status(10, 4, 0.1));
    let later = begun + Duration::from_secs(1);
    assert_eq!(Rates::between((begun, &old), (later, &new)), Rates::default());
    assert_eq!(Rates::between((begun, &old), (begun, &old)), Rates::default());
    let idle = Rates::between((begun, &old), (later, &old));
    assert_eq!((idle.output, idle.tokens_per_round), (0.0, None));
}

#[test]
fn a_server_without_a_model_or_traces_and_small_screens() {
    let mut view = View::new("http://x");
    let loading = json!({"status": "loading", "reason": "reading weights: 1 of 2 MiB"});
    let status = serde_json::from_value(loading).unwrap();
    view.look(Look { at: Instant::now(), status, stats: None });
    let shown = screen(&view, 80, 24);
    assert!(shown.contains("loading: reading weights"), "{shown}");
    assert!(shown.contains("keeps no traces"), "{shown}");
    for (width, height) in [(1, 1), (10, 3), (40, 10), (300, 100)] {
        screen(&view, width, height);
    }
}
