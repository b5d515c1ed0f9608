use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};

use axum::body::Body;
use axum::http::Request;
use tower::ServiceExt;

use super::*;

/// What Node says of a script: nothing if it ran to its end, else why not. `None` where there is no
/// Node; the test in a browser has to do there.
fn node(script: &str) -> Option<Result<(), String>> {
    let child = Command::new("node")
        .args(["--input-type=commonjs", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut child) = child else {
        eprintln!("skipped: no node on this machine");
        return None;
    };
    child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    Some(if output.status.success() { Ok(()) } else { Err(told) })
}

#[tokio::test]
async fn the_policy_allows_the_page_and_nothing_else() {
    let request = Request::get("/").body(Body::empty()).unwrap();
    let response = routes::<()>().oneshot(request).await.unwrap();
    let policy = response.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap().to_owned();
    let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    let document = std::str::from_utf8(&body).unwrap();
    for (open, close, directive) in
        [("<script>", "</script>", "script-src"), ("<style>", "</style>", "style-src")]
    {
        let parts: Vec<&str> = document.split(open).collect();
        assert_eq!(parts.len(), 2, "one {open}");
        let text = parts[1].split(close).next().unwrap();
        assert!(policy.contains(&format!("{directive} '{}'", source(text))), "{directive}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
}

#[test]
fn nothing_comes_from_elsewhere_and_no_text_becomes_html() {
    let document = &PAGE.document;
    assert!(!document.contains("{{"), "a part is missing");
    // The only address in it names what SVG is.
    let addresses: Vec<&str> = document.split("://").skip(1).collect();
    assert!(addresses.iter().all(|address| address.starts_with("www.w3.org/2000/svg")));
    for bad in [
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "src=",
        "url(",
        "@import",
        "import(",
        " style=",
        "onclick",
        "srcdoc",
    ] {
        assert!(!document.contains(bad), "{bad}");
    }
}

/// Routes that the script asks, as it spells them.
fn asked() -> BTreeSet<String> {
    let script = script();
    let calls = script.split("ask(").chain(script.split("askJson(")).skip(1);
    let path = |call: &str| {
        let quote = call.chars().next().filter(|c| "\"`".contains(*c))?;
        let path = call[1..].split(quote).next()?;
        path.starts_with('/').then(|| path.split('?').next().unwrap_or_default().to_owned())
    };
    calls.filter_map(path).collect()
}

#[test]
fn every_route_that_the_page_asks_exists() {
    let asked = asked();
    let expected = [
        "/status",
        "/traces",
        "/traces/stats",
        "/traces/${id}",
        "/v1/chat/completions",
        "/v1/models",
    ];
    assert_eq!(asked, expected.map(String::from).into());
}

#[test]
fn every_element_that_the_script_names_exists() {
    let script = script();
    let mut named = 0;
    for call in script.split("$(\"").skip(1) {
        let id = call.split('"').next().unwrap();
        assert!(DOCUMENT.contains(&format!("id=\"{id}\"")), "{id}");
        named += 1;
    }
    assert!(named > 30, "{named}");
}

#[test]
fn the_script_parses() {
    let parse = |script: &str| {
        let text = serde_json::to_string(script).unwrap();
        node(&format!("new (require('node:vm').Script)({text});"))
    };
    let Some(parsed) = parse(&script()) else { return };
    assert_eq!(parsed, Ok(()));
    // A script that does not parse is seen.
    assert!(parse(&script().replacen("{", "", 1)).unwrap().is_err());
}

#[test]
fn markdown_is_safe_and_right() {
    let cases = r##"
const assert = require("node:assert");
const flat = (parts) => parts.map((p) => typeof p === "string" ? p.replace(/</g, "&lt;") :
  `<${p.tag}${Object.entries(p.attributes).map(([k, v]) => ` ${k}="${v}"`).join("")}>${flat(p.children)}</${p.tag}>`).join("");
const html = (text) => flat(parseMarkdown(text)).replaceAll(' target="_blank" rel="noopener noreferrer nofollow"', "");
for (const [text, expected] of [
  ["a *b* **c** `d` ~~e~~", "<p>a <em>b</em> <strong>c</strong> <code>d</code> <del>e</del></p>"],
  ["# A\n\nb\nc", "<h1>A</h1><p>b<br></br>c</p>"],
  ["```rust\nlet a = \"<b>\";\n```\nafter", '<pre data-language="rust"><code>let a = "&lt;b>";</code></pre><p>after</p>'],
  ["```\nnot closed yet", "<pre><code>not closed yet</code></pre>"],
  ["- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"],
  ["3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'],
  ["> a\n> b", "<blockquote><p>a<br></br>b</p></blockquote>"],
  ["| a | b |\n|---|:-:|\n| 1 | 2 |", "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>"],
  ["---", "<hr></hr>"],
  ["[x](https://e.org/a)", '<p><a href="https://e.org/a">x</a></p>'],
  ["see https://e.org/a.", '<p>see <a href="https://e.org/a">https://e.org/a</a>.</p>'],
  ["snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"],
  ["\\*not\\*", "<p>*not*</p>"],
  ["**bold *and* both**", "<p><strong>bold <em>and</em> both</strong></p>"],
  // What a model could try.
  ["<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)></p>"],
  ["<script>alert(1)</script>", "<p>&lt;script>alert(1)&lt;/script></p>"],
  ["[x](javascript:alert(1))", "<p><span>x</span>)</p>"],
  ["[x]( JaVaScRiPt:alert`1`)", "<p><span>x</span></p>"],
  ["[x](data:text/html;base64,AAAA)", "<p><span>x</span></p>"],
  ["[x](//e.org)", "<p><span>x</span></p>"],
  ["![p](https://e.org/p.png)", '<p><a href="https://e.org/p.png">p</a></p>'],
  ["```\"><img src=x>\nx\n```", '<pre data-language=""><img"><code>x</code></pre>'],
]) assert.strictEqual(html(text), expected, text);
const tags = new Set("p h1 h2 h3 h4 h5 h6 pre code ul ol li blockquote table thead tbody tr th td hr br a span strong em del".split(" "));
const attributes = new Set(["href", "target", "rel", "start", "data-language"]);
const check = (parts) => parts.forEach((p) => {
  if (typeof p === "string") return;
  assert(tags.has(p.tag), p.tag);
  for (const name of Object.keys(p.attributes)) assert(attributes.has(name), name);
  if (p.attributes.href) assert(/^(https?:\/\/|mailto:)/i.test(p.attributes.href));
  check(p.children);
});
let seed = 1;
const below = (n) => (seed = (seed * 1103515245 + 12345) % 2147483648) % n;
const pieces = ["<", ">", "*", "**", "_", "`", "```", "[", "](", ")", "!", "\n", "\n\n", "- ", "1. ", "> ", "|", "-|-", "#", " ", "a", "é", "https://", "javascript:", "\\", "~~", "\""];
for (let round = 0; round < 3000; round++) check(parseMarkdown(Array.from({ length: below(40) }, () => pieces[below(pieces.length)]).join("")));
// Long and hostile: in time that grows with the length.
for (const piece of ["[", "*", "**a", "`", "`a``", "> ", "- ", "|", "_a ", "![", "[a](", "~~", "\\", "```\n", "1. \n", "*a _b "]) {
  const begun = performance.now();
  check(parseMarkdown(piece.repeat(100000 / piece.length)));
  const took = performance.now() - begun;
  assert(took < 3000, `${JSON.stringify(piece)}: ${took} ms`);
}
"##;
    if let Some(ran) = node(&format!("{}\n{cases}", include_str!("markdown.js"))) {
        assert_eq!(ran, Ok(()));
    }
}
