use super::*;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use sha1::{Digest as _, Sha1};
use sha2::Sha256;

use super::fetch::Fetch;
use super::name::Repo;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const NEXT: &str = "fedcba9876543210fedcba9876543210fedcba98";

/// A folder that is gone afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let dir = std::env::temp_dir().join(format!("th-engine-hub-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        Scratch(dir.canonicalize().unwrap())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What the site does with a request for a file.
#[derive(Clone, Default)]
struct Site {
    /// Files by path; those of over 100 bytes are large ones.
    files: BTreeMap<String, Vec<u8>>,
    commit: String,
    /// Statuses for the whole site.
    status: Option<u16>,
    /// Closes the connection after so many bytes of a file, so many times.
    cut: Option<(usize, usize)>,
    /// Pays no heed to ranges.
    no_ranges: bool,
    /// Sends other bytes than it should, so many times.
    damaged: usize,
    /// Redirects files to this place first.
    redirect: Option<String>,
}

/// A site on this machine, and the requests that it got.
struct Server {
    url: String,
    site: Arc<Mutex<Site>>,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn new(site: Site) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (site, seen) = (Arc::new(Mutex::new(site)), Arc::default());
        let (ours, log): (_, Arc<Mutex<Vec<String>>>) = (Arc::clone(&site), Arc::clone(&seen));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                // One at a time: what happens is the same every time.
                let _ = answer(stream, &ours, &log);
            }
        });
        Server { url, site, seen }
    }

    fn options(&self, cache: &Path) -> HubOptions {
        HubOptions {
            cache: Some(cache.to_owned()),
            endpoint: Some(self.url.clone()),
            ..HubOptions::default()
        }
    }

    fn seen(&self) -> Vec<String> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }
}

fn answer(
    mut stream: TcpStream,
    site: &Mutex<Site>,
    seen: &Mutex<Vec<String>>,
) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap_or(Ok(String::new()))?;
    let target = request.split(' ').nth(1).unwrap_or_default();
    let path = match target.starts_with("/api/") {
        true => target.to_owned(),
        false => target.split('?').next().unwrap_or_default().to_owned(),
    };
    let (mut from, mut token) = (0, "");
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(range) = line.strip_prefix("range: bytes=") {
            from = range.trim_end_matches('-').parse().unwrap();
        }
        if line.starts_with("authorization: bearer ") {
            token = " with token";
        }
    }
    seen.lock().unwrap().push(format!("{path} from {from}{token}"));
    let mut site = site.lock().unwrap();
    let head = |status: u16, more: &str, length: usize| {
        format!(
            "HTTP/1.1 {status} X\r\nConnection: close\r\n{more}Content-Length: {length}\r\n\r\n"
        )
    };
    if let Some(status) = site.status {
        return stream.write_all(head(status, "", 0).as_bytes());
    }
    if path.starts_with("/api/models/a/b/revision/") {
        let body = listing(&site).to_string();
        return stream.write_all((head(200, "", body.len()) + &body).as_bytes());
    }
    let file = path.split(&format!("/a/b/resolve/{}/", site.commit)).nth(1).map(str::to_owned);
    let Some(mut bytes) = file.and_then(|file| site.files.get(&file).cloned()) else {
        return stream.write_all(head(404, "", 0).as_bytes());
    };
    if let Some(target) = site.redirect.clone().filter(|_| !path.contains("cdn")) {
        let to = format!("Location: {target}{path}?key=secret\r\n");
        return stream.write_all(head(302, &to, 0).as_bytes());
    }
    if site.damaged > 0 && from == 0 {
        site.damaged -= 1;
        bytes[0] ^= 1;
    }
    let total = bytes.len();
    let (status, more) = match from {
        from if site.no_ranges || from == 0 => (200, String::new()),
        from if from >= total => return stream.write_all(head(416, "", 0).as_bytes()),
        from => {
            bytes.drain(..from);
            (206, format!("Content-Range: bytes {from}-{}/{total}\r\n", total - 1))
        }
    };
    stream.write_all(head(status, &more, bytes.len()).as_bytes())?;
    match &mut site.cut {
        Some((after, times)) if *times > 0 && bytes.len() > *after => {
            *times -= 1;
            stream.write_all(&bytes[..*after])
        }
        _ => stream.write_all(&bytes),
    }
}

fn listing(site: &Site) -> Value {
    let sibling = |(path, bytes): (&String, &Vec<u8>)| {
        let git = hex(&Sha1::new_with_prefix(format!("blob {}\0", bytes.len()))
            .chain_update(bytes)
            .finalize());
        let mut entry = json!({"rfilename": path, "size": bytes.len(), "blobId": git});
        if bytes.len() > 100 {
            entry["lfs"] = json!({"sha256": hex(&Sha256::digest(bytes)), "size": bytes.len()});
        }
        entry
    };
    json!({"sha": site.commit, "siblings": site.files.iter().map(sibling).collect::<Vec<_>>()})
}

fn weights() -> Vec<u8> {
    (0..300_000u32).map(|i| (i * 7 % 251) as u8).collect()
}

fn site() -> Site {
    let files = [
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", b"{\"a\":1}".to_vec()),
        ("model.safetensors", weights()),
        ("README.md", b"hello".to_vec()),
    ];
    Site {
        files: files.into_iter().map(|(path, bytes)| (path.to_owned(), bytes)).collect(),
        commit: COMMIT.into(),
        ..Site::default()
    }
}

fn name() -> ModelName {
    ModelName::parse("a/b").unwrap()
}

fn pull(options: &HubOptions) -> Result<PathBuf, HubError> {
    let client = Client::new(options.endpoint.as_deref(), options.token.clone())?;
    let cache = Cache::new(options.cache.clone().unwrap());
    let (cancel, mut progress) = (AtomicBool::new(false), |_: Progress<'_>| ());
    let mut fetch = Fetch::new(&client, &cache, &mut progress, &cancel);
    fetch.patience = Duration::ZERO;
    fetch.model(&name(), &Revision::parse(options.revision.as_deref().unwrap_or("main"))?)
}

#[test]
fn a_model_arrives_once() {
    let (dir, server) = (Scratch::new("once"), Server::new(site()));
    let options = HubOptions { token: Some(Token("t".into())), ..server.options(&dir.0) };
    let hub = Hub::new(&options).unwrap();
    assert_eq!(hub.find(&name()).unwrap(), None);
    let (mut last, mut total) = (0, 0);
    let mut progress = |progress: Progress<'_>| {
        assert!(progress.done_bytes >= last && progress.phase == "fetching a/b");
        (last, total) = (progress.done_bytes, progress.total_bytes);
    };
    let path = hub.get(&name(), &mut progress, &AtomicBool::new(false)).unwrap();
    assert_eq!((last, total), (300_009, 300_009));
    assert_eq!(path, dir.0.join("models--a--b/snapshots").join(COMMIT));
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights());
    assert_eq!(fs::read(path.join("tokenizer.json")).unwrap(), b"{\"a\":1}");
    assert!(!path.join("README.md").exists());
    // Laid out as others expect it.
    let blob = dir.0.join("models--a--b/blobs").join(hex(&Sha256::digest(weights())));
    assert_eq!(fs::read(&blob).unwrap(), weights());
    assert_eq!(path.join("model.safetensors").canonicalize().unwrap(), blob);
    assert_eq!(fs::read_to_string(dir.0.join("models--a--b/refs/main")).unwrap(), COMMIT);
    assert!(server.seen().iter().all(|request| request.ends_with("with token")));
    // It is found, by commit as well, and nothing is asked for again.
    assert_eq!(hub.find(&name()).unwrap(), Some(path.clone()));
    let by_commit =
        Hub::new(&HubOptions { revision: Some(COMMIT.into()), ..options.clone() }).unwrap();
    assert_eq!(by_commit.get(&name(), &mut |_| (), &AtomicBool::new(false)).unwrap(), path);
    assert_eq!(server.seen(), Vec::<String>::new());
    assert_eq!(pull(&options).unwrap(), path);
    assert_eq!(server.seen().len(), 1);
    assert_eq!(cache::repo_of(&path), Some(Repo::parse("a/b").unwrap()));
    // A new state: only what changed is fetched, and a commit stays what it was.
    {
        let mut site = server.site.lock().unwrap();
        site.commit = NEXT.into();
        site.files.insert("config.json".into(), b"{\"b\":2}".to_vec());
    }
    let next = pull(&options).unwrap();
    assert!(next.ends_with(NEXT));
    assert_eq!(server.seen().iter().filter(|r| r.contains("/resolve/")).count(), 1);
    assert_eq!(fs::read(path.join("config.json")).unwrap(), b"{}");
    // Listed and removed.
    let listed = hub.cache().list().unwrap();
    assert!(
        matches!(&listed[..], [one] if one.whole && one.repo == name().repo && one.revisions == ["main"])
    );
    assert!((300_000..400_000).contains(&listed[0].bytes), "{}", listed[0].bytes);
    assert!(hub.cache().remove(&name().repo).unwrap().is_some_and(|bytes| bytes > 300_000));
    assert_eq!(hub.cache().remove(&name().repo).unwrap(), None);
    assert_eq!((hub.find(&name()).unwrap(), hub.cache().list().unwrap()), (None, vec![]));
}

/// UX-07: a download goes on where it stopped, and is no model before.
#[test]
fn downloads_go_on() {
    let (dir, server) =
        (Scratch::new("resume"), Server::new(Site { cut: Some((100_000, usize::MAX)), ..site() }));
    let options = server.options(&dir.0);
    // Each connection brings something, so it goes on.
    let path = pull(&options).unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights());
    let ranges: Vec<String> =
        server.seen().into_iter().filter(|r| r.contains("model.safetensors")).collect();
    assert!(
        ranges.len() == 3
            && ranges[1].ends_with("from 100000")
            && ranges[2].ends_with("from 200000"),
        "{ranges:?}"
    );
    // None brings anything: given up, with what there is kept; then it goes on.
    let dir = Scratch::new("resume2");
    let options = server.options(&dir.0);
    server.site.lock().unwrap().cut = Some((100_000, 1));
    let hub = Hub::new(&options).unwrap();
    let cancel = AtomicBool::new(false);
    let mut stop = |progress: Progress<'_>| {
        if progress.done_bytes > 50_000 {
            cancel.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    };
    let error = hub.pull(&name(), &mut stop, &cancel).unwrap_err();
    assert!(matches!(error, HubError::Interrupted));
    let partial =
        dir.0.join("models--a--b/blobs").join(hex(&Sha256::digest(weights())) + ".incomplete");
    let kept = fs::metadata(&partial).unwrap().len();
    assert!(kept > 0 && hub.find(&name()).unwrap().is_none());
    assert!(!hub.cache().list().unwrap()[0].whole);
    server.site.lock().unwrap().cut = None;
    server.seen();
    let path = pull(&options).unwrap();
    assert!(server.seen().iter().any(|r| r.ends_with(&format!("model.safetensors from {kept}"))));
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights());
    assert!(!partial.exists());
}

#[test]
fn ranges_that_are_not_kept_to() {
    let (dir, server) = (
        Scratch::new("ranges"),
        Server::new(Site { no_ranges: true, cut: Some((100_000, 2)), ..site() }),
    );
    let path = pull(&server.options(&dir.0)).unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights());
    // A rest that is longer than the file is of something else.
    let dir = Scratch::new("ranges2");
    let partial =
        dir.0.join("models--a--b/blobs").join(hex(&Sha256::digest(weights())) + ".incomplete");
    fs::create_dir_all(partial.parent().unwrap()).unwrap();
    fs::write(&partial, vec![0; 400_000]).unwrap();
    let path = pull(&server.options(&dir.0)).unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights());
}

#[test]
fn damage_is_noticed() {
    // Once: fetched again. Also a part that was there is not trusted.
    let (dir, server) = (Scratch::new("damage"), Server::new(Site { damaged: 1, ..site() }));
    let partial =
        dir.0.join("models--a--b/blobs").join(hex(&Sha256::digest(weights())) + ".incomplete");
    fs::create_dir_all(partial.parent().unwrap()).unwrap();
    fs::write(&partial, vec![9; 1000]).unwrap();
    let path = pull(&server.options(&dir.0)).unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights());
    assert_eq!(fs::read(path.join("config.json")).unwrap(), b"{}");
    // Always: an error, and nothing of it is kept.
    let (dir, server) =
        (Scratch::new("damage2"), Server::new(Site { damaged: usize::MAX, ..site() }));
    let error = pull(&server.options(&dir.0)).unwrap_err().to_string();
    assert!(error.contains("a/b: config.json arrived damaged twice"), "{error}");
    assert_eq!(fs::read_dir(dir.0.join("models--a--b/blobs")).unwrap().count(), 0);
    assert_eq!(Hub::new(&server.options(&dir.0)).unwrap().find(&name()).unwrap(), None);
}

/// SE-08: redirections.
#[test]
fn redirections_are_watched() {
    let (dir, cdn) = (Scratch::new("redirect"), Server::new(site()));
    let server = Server::new(Site { redirect: Some(format!("{}/cdn", cdn.url)), ..site() });
    let options = HubOptions { token: Some(Token("secret".into())), ..server.options(&dir.0) };
    let path = pull(&options).unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights());
    // The token stays with the site.
    assert!(server.seen().iter().all(|r| r.ends_with("with token")));
    let seen = cdn.seen();
    assert!(seen.len() == 3 && seen.iter().all(|r| !r.contains("with token")), "{seen:?}");
    // A public site does not lead into a private network, nor out of encryption.
    let cancel = AtomicBool::new(false);
    let refused = |site: &str, guarded: bool| {
        let client = Client::with_guard(site, site.parse().unwrap(), None, guarded);
        client.get("a/b", "/a/b/resolve/x").unwrap_err().to_string()
    };
    let error = refused(&server.url, true);
    assert!(error.contains("127.0.0.1, in a private network"), "{error}");
    let endless = Server::new(Site { redirect: Some("/x".into()), ..site() });
    endless.site.lock().unwrap().redirect = Some(String::new());
    let dir = Scratch::new("redirect2");
    let cache = Cache::new(dir.0.clone());
    let client = Client::new(Some(&endless.url), None).unwrap();
    let mut progress = |_: Progress<'_>| ();
    let mut fetch = Fetch::new(&client, &cache, &mut progress, &cancel);
    fetch.patience = Duration::ZERO;
    let error = fetch.model(&name(), &Revision::parse("main").unwrap()).unwrap_err().to_string();
    assert!(error.contains("redirected without end") && !error.contains("key=secret"), "{error}");
}

#[test]
fn what_the_site_says_no_to() {
    let (dir, server) = (Scratch::new("status"), Server::new(site()));
    let options = server.options(&dir.0);
    let error = |status: u16, options: &HubOptions| {
        server.site.lock().unwrap().status = Some(status);
        pull(options).unwrap_err().to_string()
    };
    for (status, words) in [
        (401, &["refuses a/b (401)", "accept its terms", "HF_TOKEN"][..]),
        (403, &["(403)", "HF_TOKEN"]),
        (404, &["a/b does not exist", "check its name", "HF_TOKEN"]),
        (429, &["429", "try again later"]),
        (503, &["503", "try again later"]),
    ] {
        let error = error(status, &options);
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    let known = HubOptions {
        token: Some(Token("secret".into())),
        revision: Some("v9".into()),
        ..options.clone()
    };
    let error = error(404, &known);
    assert!(
        error.contains("a/b at revision v9 does not exist") && !error.contains("HF_TOKEN"),
        "{error}"
    );
    assert!(!format!("{known:?}").contains("secret"));
    // Nobody there.
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let away = HubOptions { endpoint: Some(format!("http://{nobody}")), ..options.clone() };
    assert!(matches!(pull(&away), Err(HubError::Network { .. })));
    // Offline, nothing is asked for.
    server.seen();
    let hub = Hub::new(&HubOptions { offline: true, ..options }).unwrap();
    let error = hub.get(&name(), &mut |_| (), &AtomicBool::new(false)).unwrap_err().to_string();
    assert!(error.contains("a/b is not in") && error.contains("--offline"), "{error}");
    assert_eq!(server.seen(), Vec::<String>::new());
    assert!(matches!(Hub::new(&HubOptions::default()), Err(HubError::NoCache)));
}

/// What other programs left: whole models are found, halves are not.
#[test]
fn models_of_other_programs() {
    let dir = Scratch::new("others");
    let folder = dir.0.join("models--a--b");
    let snapshot = folder.join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(folder.join("refs")).unwrap();
    let hub =
        Hub::new(&HubOptions { cache: Some(dir.0.clone()), ..HubOptions::default() }).unwrap();
    let find = |text: &str| hub.find(&ModelName::parse(text).unwrap()).unwrap();
    fs::write(folder.join("refs/main"), format!("{COMMIT}\n")).unwrap();
    let index = json!({"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}});
    fs::write(snapshot.join("model.safetensors.index.json"), index.to_string()).unwrap();
    fs::write(snapshot.join("config.json"), "{}").unwrap();
    fs::write(snapshot.join("model-1.safetensors"), "").unwrap();
    assert_eq!(find("a/b"), None);
    fs::write(snapshot.join("model-2.safetensors"), "").unwrap();
    assert_eq!(find("a/b"), Some(snapshot.clone()));
    fs::remove_file(snapshot.join("config.json")).unwrap();
    assert_eq!(find("a/b"), None);
    for part in ["m-Q8_0-00001-of-00002.gguf", "m-Q4_K_M.gguf"] {
        fs::write(snapshot.join(part), "").unwrap();
    }
    assert_eq!(find("a/b:Q4_K_M"), Some(snapshot.join("m-Q4_K_M.gguf")));
    assert_eq!(find("a/b:Q8_0"), None);
    fs::write(snapshot.join("m-Q8_0-00002-of-00002.gguf"), "").unwrap();
    assert_eq!(find("a/b:Q8_0"), Some(snapshot.join("m-Q8_0-00001-of-00002.gguf")));
    // A reference that leads elsewhere is none.
    fs::create_dir_all(dir.0.join("models--a--b/secret")).unwrap();
    fs::write(folder.join("refs/main"), "../secret").unwrap();
    assert_eq!(find("a/b:Q4_K_M"), None);
}

#[cfg(unix)]
#[test]
fn links_out_of_the_cache() {
    use std::os::unix::fs::symlink;
    let (dir, outside) = (Scratch::new("links"), Scratch::new("links-outside"));
    let commit = outside.0.join("snapshots").join(COMMIT);
    fs::create_dir_all(&commit).unwrap();
    fs::create_dir_all(outside.0.join("refs")).unwrap();
    fs::write(outside.0.join("refs/main"), COMMIT).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::write(commit.join(file), "{}").unwrap();
    }
    let server = Server::new(site());
    let options = server.options(&dir.0);
    let hub = Hub::new(&options).unwrap();
    // A repository that is a link: not read, not written to, not removed.
    let link = dir.0.join("models--a--b");
    symlink(&outside.0, &link).unwrap();
    assert!(matches!(hub.find(&name()), Err(HubError::Outside(_))));
    assert!(matches!(pull(&options), Err(HubError::Outside(_))));
    assert!(matches!(hub.cache().remove(&name().repo), Err(HubError::Outside(_))));
    assert_eq!(hub.cache().list().unwrap(), vec![]);
    assert!(commit.join("config.json").exists() && !outside.0.join("blobs").exists());
    fs::remove_file(&link).unwrap();
    // A file that is a link out.
    let inside = dir.0.join("models--a--b/snapshots").join(COMMIT);
    fs::create_dir_all(&inside).unwrap();
    fs::create_dir_all(dir.0.join("models--a--b/refs")).unwrap();
    fs::write(dir.0.join("models--a--b/refs/main"), COMMIT).unwrap();
    fs::write(inside.join("config.json"), "{}").unwrap();
    symlink(commit.join("model.safetensors"), inside.join("model.safetensors")).unwrap();
    assert!(matches!(hub.find(&name()), Err(HubError::Outside(_))));
    // A cache that is a link itself is where the user wants it.
    let through = outside.0.join("cache");
    symlink(&dir.0, &through).unwrap();
    fs::remove_file(inside.join("model.safetensors")).unwrap();
    fs::write(inside.join("model.safetensors"), "").unwrap();
    let hub = Hub::new(&HubOptions { cache: Some(through), ..options }).unwrap();
    assert!(hub.find(&name()).unwrap().is_some());
}
