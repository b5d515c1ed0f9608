//! What a running server says of itself, asked over HTTP.

use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::telemetry::stats::Stats;

/// The most time that the server may take to answer.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Asks a server.
pub struct Client {
    agent: ureq::Agent,
    url: String,
    key: Option<String>,
}

impl Client {
    /// Asks the server at this address, with this key.
    pub fn new(url: &str, key: Option<String>) -> Client {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(TIMEOUT))
            .max_redirects(0)
            .build();
        Client { agent: config.into(), url: url.trim_end_matches('/').to_owned(), key }
    }

    /// How the server is now, and was lately.
    ///
    /// # Errors
    /// It does not answer, or not so, in words.
    pub fn look(&self) -> Result<Look, String> {
        let status = self.get("/status")?;
        // A server without a store still has a status.
        let recent = self.get::<Recent>("/traces/stats?since=15m");
        Ok(Look { at: Instant::now(), status, stats: recent.ok().map(|recent| recent.stats) })
    }

    fn get<T: serde::de::DeserializeOwned>(&self, path: &str) -> Result<T, String> {
        let url = format!("{}{path}", self.url);
        let mut request = self.agent.get(&url);
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut response = request.call().map_err(|error| format!("{}: {error}", self.url))?;
        match response.status().as_u16() {
            200 => {}
            401 => {
                return Err("the server wants an API key: set TH_API_KEY or give --api-key".into());
            }
            status => return Err(format!("{url} answered {status}; is it a th-engine server?")),
        }
        let body = response.body_mut().read_json();
        body.map_err(|error| format!("{url} answered something else: {error}"))
    }
}

#[derive(Deserialize)]
struct Recent {
    stats: Stats,
}

/// What one look at a server gave.
#[derive(Clone, Debug)]
pub struct Look {
    /// When.
    pub at: Instant,
    /// How it is.
    pub status: Status,
    /// Its last quarter of an hour; `None` if it keeps no traces.
    pub stats: Option<Stats>,
}

/// The parts of `/status` that are shown. While the model is not in memory most are absent.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Status {
    /// `ok`, `loading`, …
    pub status: String,
    /// Why it is not ok.
    pub reason: Option<String>,
    /// Version and commit.
    pub build: String,
    /// Since the server began.
    pub uptime_seconds: f64,
    /// The model.
    pub model: Model,
    /// The device.
    pub device: Device,
    /// Memory of the model.
    pub memory: Memory,
    /// Running sequences.
    pub lanes: Lanes,
    /// Waiting requests.
    pub queue: Queue,
    /// Tokens since the model was loaded.
    pub tokens: Tokens,
    /// Rounds since then.
    pub rounds: Rounds,
    /// The prefix cache.
    pub cache: Cache,
    /// The store of traces.
    pub traces: Traces,
}

/// The model of a [`Status`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Model {
    /// Its name.
    pub name: String,
    /// Its draft's name.
    pub draft: Option<String>,
    /// Tokens that a lane holds.
    pub context: u64,
}

/// The device of a [`Status`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Device {
    /// In words.
    pub name: String,
    /// Bytes that a round of one lane must move.
    pub round_bytes: f64,
    /// Bytes a second; 0 if unknown.
    pub read_bandwidth: f64,
}

/// The memory of a [`Status`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Bytes in all.
    pub total_bytes: u64,
}

/// The lanes of a [`Status`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Lanes {
    /// In all.
    pub total: u64,
    /// That compute.
    pub running: u64,
}

/// The queue of a [`Status`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Queue {
    /// Requests that may wait.
    pub limit: u64,
    /// That wait.
    pub waiting: u64,
}

/// The tokens of a [`Status`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Tokens {
    /// Of prompts.
    pub prompt: u64,
    /// Of these, not computed.
    pub cached: u64,
    /// Of answers.
    pub output: u64,
}

/// The rounds of a [`Status`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Rounds {
    /// How many.
    pub count: u64,
    /// Time that they took.
    pub seconds: f64,
}

/// The cache of a [`Status`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Cache {
    /// Pages.
    pub pages: u64,
    /// That hold something.
    pub pages_used: u64,
    /// Checkpoints in memory.
    pub checkpoints: u64,
    /// Share of prompt tokens that were not computed.
    pub hit_share: Option<f64>,
}

/// The store of traces of a [`Status`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Traces {
    /// `off`, `ok`, `failing`.
    pub state: String,
    /// Why it fails.
    pub error: Option<String>,
    /// Traces lost.
    pub lost: u64,
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, StatusCode};
    use axum::routing::get;
    use axum::{Json, Router};
    use serde_json::json;

    use super::*;

    /// Where a server with these routes is.
    fn server(router: Router) -> String {
        let (sender, address) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                sender.send(listener.local_addr().unwrap()).unwrap();
                axum::serve(listener, router).await.unwrap();
            });
        });
        format!("http://{}", address.recv().unwrap())
    }

    #[test]
    fn a_server_is_asked_with_its_key() {
        let status = |headers: HeaderMap| async move {
            match headers.get("authorization").and_then(|key| key.to_str().ok()) {
                Some("Bearer right") => Ok(Json(json!({"status": "ok", "lanes": {"total": 3}}))),
                _ => Err(StatusCode::UNAUTHORIZED),
            }
        };
        let url = server(Router::new().route("/status", get(status)));
        let look = Client::new(&format!("{url}/"), Some("right".into())).look().unwrap();
        assert_eq!((look.status.lanes.total, look.stats.is_none()), (3, true));
        for key in [None, Some("wrong".to_owned())] {
            let error = Client::new(&url, key).look().unwrap_err();
            assert!(error.contains("TH_API_KEY"), "{error}");
        }
    }

    #[test]
    fn what_is_no_server_is_told() {
        let other = server(Router::new());
        let error = Client::new(&other, None).look().unwrap_err();
        assert!(error.contains("answered 404"), "{error}");
        let text = server(Router::new().route("/status", get(|| async { "hello" })));
        let error = Client::new(&text, None).look().unwrap_err();
        assert!(error.contains("something else"), "{error}");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let nobody = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        assert!(Client::new(&nobody, None).look().unwrap_err().contains(&nobody));
    }
}
