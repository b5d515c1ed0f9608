//! The page in a real browser. Opt in with `TH_BROWSER_TESTS=1`; needs a Chromium among the
//! machine's programs. Pictures are left in the target folder, in `tmp/page`.

mod browser;
mod server;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use browser::Browser;
use server::{KEY, Script};

/// What the log shows.
const LOG: &str = "document.getElementById('log').innerText";

#[test]
#[expect(clippy::disallowed_methods, reason = "an opt-in for a test that needs a browser")]
fn the_page_in_a_browser() {
    if std::env::var_os("TH_BROWSER_TESTS").is_none() {
        eprintln!("skipped: set TH_BROWSER_TESTS=1 to run it");
        return;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let script = Arc::new(Script::default());
    let address = server::start(&folder, script.clone());
    let mut browser = Browser::start(&folder.join("profile"));
    let url = format!("http://{address}/");
    browser.window(1100, 900, "light");
    browser.open(&url);
    chat_by_keyboard(&mut browser, &script, &folder);
    tools(&mut browser);
    observability_by_keyboard(&mut browser, &folder);
    narrow(&mut browser, &folder);
    key(&mut browser, &script, &url);
    assert_eq!(browser.complaints, Vec::<String>::new());
}

fn say(browser: &mut Browser, text: &str) {
    browser.tab_to("input");
    browser.type_text(text);
    browser.press("Enter", false);
}

fn idle(browser: &mut Browser) {
    browser.wait(
        "document.getElementById('stop').disabled && !document.getElementById('send').disabled",
    );
    // Drawing comes with the next frame.
    browser.eval("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))");
}

fn chat_by_keyboard(browser: &mut Browser, script: &Script, folder: &Path) {
    browser.wait("document.getElementById('server').innerText.includes('th-tiny')");
    say(browser, "hello <b>you</b>");
    browser.wait(&format!("{LOG}.includes('You said')"));
    idle(browser);
    // What the model wrote is shown, and nothing of it ran or was loaded.
    for part in [
        "<img src=x onerror",
        "<script>window.hacked=3</script>",
        "漢字 👩‍👩‍👧‍👦",
        "hello <b>you</b>",
        "Thoughts",
    ] {
        let shown = browser.eval(&format!("{LOG}.includes({})", serde_json::json!(part)));
        assert_eq!(shown, true, "{part}: {}", browser.eval(LOG));
    }
    assert_eq!(browser.eval("window.hacked === undefined"), true);
    assert_eq!(
        browser.eval("document.querySelectorAll('#log img, #log script, #log a').length"),
        0
    );
    assert_eq!(browser.eval("document.querySelectorAll('#log table td strong').length"), 1);
    assert_eq!(browser.eval("document.querySelector('#log details').open"), false);
    let figures = browser.eval("document.querySelector('#log .figures').innerText");
    let figures = figures.as_str().unwrap();
    assert!(figures.contains("90.0 tok/s") && figures.contains("3.00 tokens/round"), "{figures}");
    browser.picture(&folder.join("chat-light.png"));
    // Regenerate: the same question, a new answer.
    browser.tab_to("again");
    browser.press(" ", false);
    browser.wait("!document.getElementById('stop').disabled");
    idle(browser);
    assert_eq!(script.chats.load(Ordering::Relaxed), 2);
    assert_eq!(browser.eval("document.querySelectorAll('#log article').length"), 2);
    // Stop: the stream ends at once, and what came stays.
    say(browser, "slow please");
    browser.wait(&format!("{LOG}.includes('word10')"));
    browser.wait("/[1-9][0-9.]* tok.s · 3.0/.test(document.getElementById('live').innerText)");
    browser.press("Escape", false);
    idle(browser);
    assert_eq!(browser.eval(&format!("{LOG}.includes('ended: stopped')")), true);
    assert_eq!(browser.eval(&format!("{LOG}.includes('word1999')")), false);
    for _ in 0..100 {
        if script.left.load(Ordering::Relaxed) == 1 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(script.left.load(Ordering::Relaxed), 1, "the server was not told");
    // An error is told, as text.
    say(browser, "fail now");
    idle(browser);
    assert_eq!(browser.eval(&format!("{LOG}.includes('the script says so <i>')")), true);
    // A reload keeps the conversation of this tab.
    browser.reload();
    browser.wait(&format!("{LOG}.includes('word10')"));
    browser.tab_to("fresh");
    browser.press("Enter", false);
    browser.wait("document.querySelectorAll('#log article').length === 0");
}

fn tools(browser: &mut Browser) {
    browser.eval("document.getElementById('options').open = true");
    browser.tab_to("tools");
    browser.type_text(
        "[{\"type\":\"function\",\"function\":{\"name\":\"weather\",\"parameters\":{}}}]",
    );
    browser.eval("document.getElementById('input').focus()");
    say(browser, "how is the weather?");
    browser.wait(&format!("{LOG}.includes('calls weather')"));
    idle(browser);
    assert_eq!(browser.eval(&format!("{LOG}.includes('\"city\": \"Bern\"')")), true);
    browser.eval("document.querySelector('#log form textarea').focus()");
    browser.type_text("rain");
    browser.press("Tab", false);
    browser.press("Enter", false);
    browser.wait(&format!("{LOG}.includes('You said')"));
    idle(browser);
    assert_eq!(browser.eval(&format!("{LOG}.includes('Tool result')")), true);
}

fn observability_by_keyboard(browser: &mut Browser, folder: &Path) {
    browser.eval("document.body.focus(); document.activeElement.blur(); scrollTo(0, 0)");
    browser.tab_to("tab-chat");
    browser.press("ArrowRight", false);
    browser.wait("document.querySelectorAll('#requests tbody tr button').length === 50");
    assert_eq!(browser.eval("document.activeElement.id"), "tab-watch");
    browser.wait("document.querySelectorAll('#charts svg').length === 4");
    assert_eq!(browser.eval("document.querySelectorAll('#charts .bar').length > 30"), true);
    assert_eq!(browser.eval("document.querySelectorAll('#charts .line').length >= 4"), true);
    browser.wait("document.querySelectorAll('#lanes .busy').length === 1");
    assert_eq!(browser.eval("document.querySelectorAll('#watch script').length"), 0);
    let label = browser.eval("document.querySelector('#charts svg').getAttribute('aria-label')");
    assert!(label.as_str().unwrap().contains("up to"), "{label}");
    // The first request, by the keyboard alone.
    for _ in 0..60 {
        if browser.eval("document.activeElement.closest('#requests tbody') !== null") == true {
            break;
        }
        browser.press("Tab", false);
    }
    browser.press("Enter", false);
    browser.wait("document.activeElement.id === 'trace'");
    assert_eq!(browser.eval("document.querySelectorAll('#trace .span').length"), 19);
    let bars = browser.eval(
        "[...document.querySelectorAll('#trace .track')].every((track) => {
            const [outer, inner] = [track.getBoundingClientRect(), track.firstChild.getBoundingClientRect()];
            return inner.left >= outer.left - 3 && inner.right <= outer.right + 3 && inner.width >= 2;
        })",
    );
    assert_eq!(bars, true, "a bar leaves its track");
    browser.picture(&folder.join("observe-light.png"));
    browser.press("Escape", false);
    browser.wait("document.getElementById('trace').hidden");
    assert_eq!(browser.eval("document.activeElement.closest('#requests tbody') !== null"), true);
    browser.tab_to("older");
    browser.press("Enter", false);
    browser.wait("!document.getElementById('newest').disabled");
    browser.tab_to("tab-watch");
    browser.eval("{ const o = document.getElementById('outcome'); o.value = 'error'; o.dispatchEvent(new Event('change')); }");
    browser.wait(
        "[...document.querySelectorAll('#requests tbody tr')].every((row) => row.innerText.includes('overloaded'))",
    );
    browser.eval("{ const o = document.getElementById('outcome'); o.value = ''; o.dispatchEvent(new Event('change')); }");
    browser.window(1100, 900, "dark");
    browser.wait("document.querySelectorAll('#requests tbody tr button').length === 50");
    browser.picture(&folder.join("observe-dark.png"));
}

fn narrow(browser: &mut Browser, folder: &Path) {
    for (scheme, tab) in [("dark", "watch"), ("light", "chat")] {
        browser.window(400, 800, scheme);
        browser.eval(&format!("document.getElementById('tab-{tab}').click()"));
        let width = browser.eval("document.documentElement.scrollWidth");
        assert!(width.as_u64().unwrap() <= 400, "{tab} is {width} wide");
        let outside = browser.eval(
            "[...document.querySelectorAll('button, input, select, textarea')].filter((node) => {
                const box = node.getBoundingClientRect();
                return box.width > 0 && !node.closest('.scroll') && (box.left < 0 || box.right > 400);
            }).map((node) => node.outerHTML)",
        );
        assert_eq!(outside, serde_json::json!([]));
        browser.picture(&folder.join(format!("{tab}-400-{scheme}.png")));
    }
}

fn key(browser: &mut Browser, script: &Script, url: &str) {
    script.wants_key.store(true, Ordering::Relaxed);
    browser.open(url);
    browser.wait("!document.getElementById('key-form').hidden");
    browser.tab_to("key");
    browser.type_text(KEY);
    browser.press("Enter", false);
    browser.wait("document.getElementById('server').innerText.includes('th-tiny')");
    assert_eq!(browser.eval("document.getElementById('key-form').hidden"), true);
}
