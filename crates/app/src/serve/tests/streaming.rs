//! Streams on every endpoint: text that arrives as soon as it can, whole characters, stop texts that
//! never show, ends that are what they say, and clients that leave.

use std::time::Duration;

use http_body_util::BodyExt;
use serde_json::{Value, json};

use super::rig::{Reply, Rig, chat, eventually, ids, post, says_in};
use super::scripted::{Act, Scripted};
use crate::serve::security::Security;
use crate::serve::state::Options;

/// Every endpoint that streams text: its path, a body that asks for this stop text, and the text of its
/// reply.
struct Endpoint {
    path: &'static str,
    body: fn(Option<&str>, bool) -> Value,
    whole: fn(&Value) -> String,
    piece: fn(&Value) -> String,
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

const ENDPOINTS: [Endpoint; 5] = [
    Endpoint {
        path: "/v1/chat/completions",
        body: |stop, stream| {
            chat(&json!({"stop": stop, "stream": stream, "enable_thinking": false}))
        },
        whole: |reply| text(&reply["choices"][0]["message"]["content"]),
        piece: |event| text(&event["choices"][0]["delta"]["content"]),
    },
    Endpoint {
        path: "/v1/completions",
        body: |stop, stream| json!({"prompt": "Hi", "stop": stop, "stream": stream}),
        whole: |reply| text(&reply["choices"][0]["text"]),
        piece: |event| text(&event["choices"][0]["text"]),
    },
    Endpoint {
        path: "/v1/messages",
        body: |stop, stream| {
            let stops: Vec<&str> = stop.into_iter().collect();
            chat(&json!({"stop_sequences": stops, "stream": stream}))
        },
        whole: |reply| text(&reply["content"][0]["text"]),
        piece: |event| text(&event["delta"]["text"]),
    },
    Endpoint {
        path: "/api/chat",
        body: |stop, stream| {
            chat(&json!({"options": {"stop": stop}, "stream": stream, "think": false}))
        },
        whole: |reply| text(&reply["message"]["content"]),
        piece: |event| text(&event["message"]["content"]),
    },
    Endpoint {
        path: "/api/generate",
        body: |stop, stream| json!({"prompt": "Hi", "options": {"stop": stop}, "stream": stream, "think": false}),
        whole: |reply| text(&reply["response"]),
        piece: |event| text(&event["response"]),
    },
];

impl Endpoint {
    /// Pieces of a streamed reply, empty ones left out.
    fn pieces(&self, reply: &Reply) -> Vec<String> {
        let events: Vec<Value> = match self.path.starts_with("/api") {
            true => reply.text.lines().map(|line| serde_json::from_str(line).unwrap()).collect(),
            false => reply.events(),
        };
        events.iter().map(self.piece).filter(|piece| !piece.is_empty()).collect()
    }
}

const EMOJI: &str = "ok 👩‍👩‍👧‍👦 🇯🇵 漢字 é 𝄞 done";

#[tokio::test]
async fn characters_arrive_whole_whatever_the_tokens() {
    for size in [1, 2, 3, 100] {
        let rig = Rig::acting(move |_| says_in(EMOJI, size));
        for endpoint in &ENDPOINTS {
            let whole = rig.post(endpoint.path, &(endpoint.body)(None, false)).await;
            assert_eq!((endpoint.whole)(&whole.json()), EMOJI, "{}", endpoint.path);
            let streamed = rig.post(endpoint.path, &(endpoint.body)(None, true)).await;
            let pieces = endpoint.pieces(&streamed);
            assert_eq!(pieces.concat(), EMOJI, "{}", endpoint.path);
            assert!(!streamed.text.contains('\u{FFFD}'));
        }
    }
}

#[tokio::test]
async fn valid_text_does_not_wait_for_what_follows() {
    // The engine hangs in the middle of an emoji: what came before it must have left.
    let all = ids("hi 🚀");
    let rig = Rig::acting(move |_| vec![Act::Round(all[..all.len() - 1].to_vec()), Act::Hang]);
    for endpoint in &ENDPOINTS {
        let response = rig.send(post(endpoint.path, &(endpoint.body)(None, true))).await;
        let mut body = response.into_body();
        let mut seen = String::new();
        while !seen.contains("hi ") {
            let frame = tokio::time::timeout(Duration::from_secs(5), body.frame()).await;
            let frame = frame.expect("text that was held back").unwrap().unwrap();
            seen += std::str::from_utf8(&frame.into_data().unwrap()).unwrap();
        }
    }
}

#[tokio::test]
async fn stop_texts_never_show() {
    let said = "The quick brown fox jumps over the lazy dog, which does not mind it at all.";
    let long = "fox jumps over the lazy dog, which does not";
    let cases = [
        ("own fox", "The quick br"),
        (long, "The quick brown "),
        (" ", "The"),
        // Only its beginning occurs: nothing is cut, and nothing stays behind.
        ("all. The end", said),
        ("owl", said),
    ];
    for size in [1, 2, 5, 100] {
        let rig = Rig::acting(move |_| says_in(said, size));
        for (stop, expected) in cases {
            for endpoint in &ENDPOINTS {
                let whole = rig.post(endpoint.path, &(endpoint.body)(Some(stop), false)).await;
                assert_eq!((endpoint.whole)(&whole.json()), expected, "{} {stop}", endpoint.path);
                let streamed = rig.post(endpoint.path, &(endpoint.body)(Some(stop), true)).await;
                assert_eq!(
                    endpoint.pieces(&streamed).concat(),
                    expected,
                    "{} {stop}",
                    endpoint.path
                );
            }
        }
        let seen = rig.engine.seen();
        // The engine is told how many tokens count: those up to the one that completed the stop text.
        let needed = |stop: &str| {
            let met = |n: &usize| {
                crate::text::detokenize::decode(&**super::rig::TOK, &ids(said)[..*n], false)
                    .contains(stop)
            };
            (1..=ids(said).len()).find(met).unwrap()
        };
        let counts: Vec<usize> = seen.finished.iter().map(|(_, tokens)| *tokens).collect();
        let expected: Vec<usize> = ["own fox", long, " "]
            .iter()
            .flat_map(|stop| vec![needed(stop); 2 * ENDPOINTS.len()])
            .collect();
        assert_eq!(counts, expected);
    }
}

#[tokio::test]
async fn a_stop_text_counts_before_the_limit() {
    let said = "The quick brown fox jumps over the lazy dog.";
    for limit in 1..12 {
        for size in [1, 4] {
            let rig = Rig::acting(move |_| says_in(said, size));
            let fields = json!({"stop": "own fox", "max_tokens": limit, "enable_thinking": false});
            let reply = rig.chat(&fields).await.json();
            let shown = crate::text::detokenize::decode(
                &**super::rig::TOK,
                &ids(said)[..limit.min(ids(said).len())],
                false,
            );
            let choice = &reply["choices"][0];
            let (text, finish) = match shown.find("own fox") {
                Some(at) => (&shown[..at], "stop"),
                None => (shown.as_str(), "length"),
            };
            assert_eq!(choice["message"]["content"], text, "{limit}");
            assert_eq!(choice["finish_reason"], finish, "{limit}");
        }
    }
}

#[tokio::test]
async fn usage_comes_if_asked_for_and_only_then() {
    let rig = Rig::saying("</think>ok");
    for (options, asked) in [
        (Value::Null, false),
        (json!({}), false),
        (json!({"include_usage": false}), false),
        (json!({"include_usage": true}), true),
    ] {
        let fields = json!({"stream": true, "stream_options": options});
        for reply in [
            rig.chat(&fields).await,
            rig.post(
                "/v1/completions",
                &json!({"prompt": "Hi", "stream": true, "stream_options": options}),
            )
            .await,
        ] {
            let events = reply.events();
            let with: Vec<&Value> =
                events.iter().filter(|event| event["usage"].is_object()).collect();
            assert_eq!(with.len(), usize::from(asked), "{options}");
            if asked {
                let last = events.last().unwrap();
                assert_eq!((&last["choices"], with[0]), (&json!([]), last));
                let usage = &last["usage"];
                assert!(usage["completion_tokens"].as_u64().unwrap() > 0);
                assert_eq!(
                    usage["prompt_tokens_details"]["cached_tokens"],
                    usage["prompt_tokens"].as_u64().unwrap().min(3)
                );
            }
            assert!(reply.text.ends_with("data: [DONE]\n\n"));
        }
    }
}

#[tokio::test]
async fn a_failure_in_the_middle_is_no_success() {
    let rig = Rig::acting(|_| vec![Act::Round(ids("one two three four five")), Act::Fail]);
    for endpoint in &ENDPOINTS {
        let streamed = rig.post(endpoint.path, &(endpoint.body)(None, true)).await;
        let text = &streamed.text;
        assert!(text.contains("the device failed: it is on fire"), "{text}");
        for success in
            ["[DONE]", "message_stop", "\"finish_reason\":\"", "\"done\":true", "end_turn"]
        {
            assert!(!text.contains(success), "{} {success}", endpoint.path);
        }
        assert!(endpoint.pieces(&streamed).concat().starts_with("one two"));
        let whole = rig.post(endpoint.path, &(endpoint.body)(None, false)).await;
        assert_eq!(whole.status.as_u16(), 500);
    }
    let last = rig.post("/v1/messages", &(ENDPOINTS[2].body)(None, true)).await;
    assert!(
        last.text
            .contains("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\"")
    );
}

#[tokio::test]
async fn what_is_cut_short_by_a_stop_says_so() {
    let bodies = || {
        let all = ENDPOINTS.iter().map(|e| (e.path, (e.body)(None, true), (e.body)(None, false)));
        let responses = |stream| json!({"input": "Hi", "stream": stream});
        all.chain([("/v1/responses", responses(true), responses(false))])
    };
    for (path, streamed, whole) in bodies() {
        let rig = Rig::acting(|_| vec![Act::Round(ids("one")), Act::Hang]);
        let stop = async {
            eventually(|| rig.engine.seen().requests.len() == 2).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
            rig.app.lifecycle.drain();
            rig.app.lifecycle.cut();
        };
        let (streamed, whole, ()) =
            tokio::join!(rig.post(path, &streamed), rig.post(path, &whole), stop);
        assert_eq!((whole.status.as_u16(), whole.header("retry-after")), (503, "10"), "{path}");
        assert!(whole.text.contains("server_stopped"), "{path} {}", whole.text);
        let form = match path {
            "/v1/messages" => "event: error\ndata: {\"type\":\"error\"",
            "/v1/responses" => "event: response.failed\n",
            "/api/chat" | "/api/generate" => "\n{\"error\":",
            _ => "data: {\"error\":",
        };
        let text = streamed.text;
        assert!(text.contains(form) && text.contains("server_stopped"), "{path} {text}");
        for success in ["[DONE]", "message_stop", "response.completed", "\"done\":true"] {
            assert!(!text.contains(success), "{path} {success}");
        }
        eventually(|| rig.engine.seen().cancelled.len() == 2).await;
    }
    // A request that has not even arrived is told so too.
    let rig = Rig::saying("ok");
    let never = futures_util::stream::pending::<Result<String, std::io::Error>>();
    let body = axum::body::Body::from_stream(never);
    let upload = super::rig::request(axum::http::Method::POST, "/v1/messages", body);
    let (reply, ()) = tokio::join!(rig.read(upload), async {
        tokio::time::sleep(Duration::from_millis(5)).await;
        rig.app.lifecycle.cut();
    });
    assert_eq!((reply.status.as_u16(), reply.json()["type"].clone()), (503, json!("error")));
}

#[tokio::test]
async fn the_last_piece_has_the_times() {
    let rig = Rig::saying("</think>ok");
    let mut streams: Vec<(&str, Value)> =
        ENDPOINTS.iter().map(|endpoint| (endpoint.path, (endpoint.body)(None, true))).collect();
    streams.push(("/v1/responses", json!({"input": "Hi", "stream": true})));
    for (path, body) in &streams[..2] {
        let mut with_usage = body.clone();
        with_usage["stream_options"] = json!({"include_usage": true});
        let events = rig.post(path, &with_usage).await.events();
        // The chunk that ends the choice has them, and the one with the usage, which is the last.
        for event in &events[events.len() - 2..] {
            assert!(event["timings"]["predicted_per_second"].is_number(), "{path} {event}");
        }
    }
    for (path, body) in streams {
        let reply = rig.post(path, &body).await;
        let last: Value = match path.starts_with("/api") {
            true => serde_json::from_str(reply.text.lines().last().unwrap()).unwrap(),
            false => {
                let mut events = reply.events();
                events.retain(|event| event["type"] != "message_stop");
                events.pop().unwrap()
            }
        };
        let timings = [&last["timings"], &last["response"]["timings"]];
        assert!(
            timings.iter().any(|t| t["predicted_n"].is_u64() && t["queue_ms"].is_f64()),
            "{path} {last}"
        );
    }
}

#[tokio::test]
async fn a_silent_engine_keeps_the_connection() {
    let acts = |_| {
        vec![
            Act::Wait(Duration::from_millis(400)),
            Act::Round(ids("ok")),
            Act::End(engine::service::Finish::Stop),
        ]
    };
    let options = Options { keep_alive: Duration::from_millis(20), ..Options::default() };
    let rig = Rig::with(Scripted::new(move |n, _| Ok(acts(n))), options, Security::default());
    for endpoint in &ENDPOINTS {
        let reply = rig.post(endpoint.path, &(endpoint.body)(None, true)).await;
        let signs = match endpoint.path {
            "/v1/messages" => reply.text.matches("event: ping\n").count(),
            path if path.starts_with("/api") => reply.text.lines().count() - 2,
            _ => reply.text.matches(": keep-alive\n\n").count(),
        };
        assert!(signs >= 2, "{} {signs}: {}", endpoint.path, reply.text);
        assert_eq!(endpoint.pieces(&reply).concat(), "ok");
    }
}

#[tokio::test]
async fn progress_is_told_if_asked_for() {
    let rig = Rig::acting(|_| {
        vec![
            Act::Prefill(4),
            Act::Prefill(9),
            Act::Round(ids("ok")),
            Act::End(engine::service::Finish::Stop),
        ]
    });
    let reply = rig.chat(&json!({"stream": true, "return_progress": true})).await;
    let events = reply.events();
    let told: Vec<&Value> =
        events.iter().map(|event| &event["prompt_progress"]).filter(|p| p.is_object()).collect();
    assert_eq!(told.iter().map(|p| p["processed"].as_u64().unwrap()).collect::<Vec<_>>(), [4, 9]);
    assert!(told.iter().all(|p| p["cache"] == 3));
    let silent = rig.chat(&json!({"stream": true})).await;
    assert!(!silent.text.contains("prompt_progress"));
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    let rig = Rig::acting(|n| match n {
        0 => vec![
            Act::Round(ids("one")),
            Act::Wait(Duration::from_millis(60)),
            Act::Round(ids(" two")),
            Act::End(engine::service::Finish::Stop),
        ],
        _ => vec![Act::Round(ids("one")), Act::Hang],
    });
    // Someone else's request runs on.
    let other = rig.send(post("/v1/completions", &json!({"prompt": "x", "stream": true}))).await;
    for (count, endpoint) in ENDPOINTS.iter().enumerate() {
        let response = rig.send(post(endpoint.path, &(endpoint.body)(None, true))).await;
        let mut body = response.into_body();
        body.frame().await.unwrap().unwrap();
        drop(body);
        eventually(|| rig.engine.seen().cancelled.len() == count + 1).await;
    }
    let text = other.into_body().collect().await.unwrap().to_bytes();
    assert!(String::from_utf8_lossy(&text).contains("[DONE]"));
    // So does one that waits for a whole reply.
    let before = rig.engine.seen().cancelled.len();
    let waiting = rig.send(post("/v1/completions", &json!({"prompt": "x", "n": 3})));
    assert!(tokio::time::timeout(Duration::from_millis(500), waiting).await.is_err());
    eventually(|| rig.engine.seen().cancelled.len() == before + 3).await;
}

#[tokio::test]
async fn one_choice_that_is_refused_cancels_the_others() {
    use engine::service::Refusal;
    let engine = Scripted::new(|n, _| match n {
        2 => Err(Refusal::Busy { waiting: 16, retry_after: Duration::from_millis(1500) }),
        _ => Ok(vec![Act::Hang]),
    });
    let rig = Rig::new(engine);
    let reply = rig.chat(&json!({"n": 4})).await;
    assert_eq!((reply.status.as_u16(), reply.header("retry-after")), (429, "2"));
    eventually(|| rig.engine.seen().cancelled.len() == 2).await;
}
