//! Requests to the site, redirections included.
//!
//! Large files are redirected to other hosts. Those get no token, and none of them may lie in a
//! private network unless the site itself does: a listing must not make this machine talk to its
//! neighbours.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::time::Duration;

use ureq::config::Config;
use ureq::http::{Response, Uri, header};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Body};

use super::{HubError, Token};

/// The site unless told otherwise.
const SITE: &str = "https://huggingface.co";
const MAX_REDIRECTS: usize = 6;
/// The largest listing.
const MAX_LISTING: u64 = 32 << 20;
const CONNECT: Duration = Duration::from_secs(20);
/// How long a peer may say nothing.
const SILENCE: Duration = Duration::from_secs(60);

/// Asks the site.
pub struct Client {
    agent: Agent,
    site: String,
    origin: Uri,
    token: Option<Token>,
}

impl Client {
    /// A client of `site`, or of the usual one.
    ///
    /// # Errors
    /// A site that is no address.
    pub fn new(site: Option<&str>, token: Option<Token>) -> Result<Client, HubError> {
        let site = site.unwrap_or(SITE).trim_end_matches('/');
        let wrong = || {
            HubError::Redirect(format!(
                "HF_ENDPOINT is {site:?}; it has to begin with https:// or http://"
            ))
        };
        let origin: Uri = site.parse().map_err(|_| wrong())?;
        if !matches!(origin.scheme_str(), Some("http" | "https")) {
            return Err(wrong());
        }
        let private = is_private_host(&origin);
        Ok(Client::with_guard(site, origin, token, !private))
    }

    /// A client that refuses private networks if `guarded`.
    pub(super) fn with_guard(
        site: &str,
        origin: Uri,
        token: Option<Token>,
        guarded: bool,
    ) -> Client {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("th-engine/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .build();
        let resolver = Guard { inner: DefaultResolver::default(), guarded };
        let agent = Agent::with_parts(config, DefaultConnector::default(), resolver);
        Client { agent, site: site.to_owned(), origin, token }
    }

    /// The site's address.
    pub fn site(&self) -> &str {
        &self.site
    }

    /// Asks for a short answer.
    ///
    /// # Errors
    /// None came, or one that says no.
    pub fn get(&self, name: &str, path: &str) -> Result<Vec<u8>, HubError> {
        let mut response = self.request(name, path, 0)?;
        self.check(name, response.status().as_u16())?;
        let mut bytes = Vec::new();
        let mut body = response.body_mut().as_reader().take(MAX_LISTING + 1);
        body.read_to_end(&mut bytes).map_err(|error| network(name, &error))?;
        if bytes.len() as u64 > MAX_LISTING {
            let what = "it is larger than any listing".to_owned();
            return Err(HubError::Listing { name: name.to_owned(), what });
        }
        Ok(bytes)
    }

    /// Asks for a file from byte `from` on. Gives the byte at which the answer begins, and it.
    ///
    /// # Errors
    /// None came, or one that says no.
    pub fn file(
        &self,
        name: &str,
        path: &str,
        from: u64,
    ) -> Result<(u64, Response<Body>), HubError> {
        let response = self.request(name, path, from)?;
        match response.status().as_u16() {
            206 => {
                let range = response.headers().get(header::CONTENT_RANGE);
                let range = range.and_then(|range| range.to_str().ok()).unwrap_or_default();
                let start = range.strip_prefix("bytes ").and_then(|range| range.split('-').next());
                match start.and_then(|start| start.trim().parse::<u64>().ok()) {
                    Some(start) if start == from => Ok((from, response)),
                    _ => Err(network(
                        name,
                        &format!("the answer holds {range:?}, not bytes from {from} on"),
                    )),
                }
            }
            // Nothing after what is there: begin again.
            416 if from > 0 => self.file(name, path, 0),
            status => {
                self.check(name, status)?;
                Ok((0, response))
            }
        }
    }

    fn check(&self, name: &str, status: u16) -> Result<(), HubError> {
        let (name, site, token) = (name.to_owned(), self.site.clone(), self.token.is_some());
        match status {
            200..=299 => Ok(()),
            // The site answers 401 for what does not exist, so as not to tell.
            401 | 403 => Err(HubError::Refused { name, site, status, token }),
            404 => Err(HubError::NotFound { name, site, token }),
            _ => Err(HubError::Status { name, site, status }),
        }
    }

    fn request(&self, name: &str, path: &str, from: u64) -> Result<Response<Body>, HubError> {
        let mut url = format!("{}{path}", self.site);
        for _ in 0..MAX_REDIRECTS {
            let uri: Uri = url.parse().map_err(|_| redirect(name, &url, "which is no address"))?;
            let own =
                uri.authority() == self.origin.authority() && uri.scheme() == self.origin.scheme();
            if !own {
                self.check_target(name, &uri)?;
            }
            // Lengths and ranges are those of the file itself.
            let mut request = self.agent.get(&url).header(header::ACCEPT_ENCODING, "identity");
            if let Some(token) = self.token.as_ref().filter(|_| own) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {}", token.0));
            }
            if from > 0 {
                request = request.header(header::RANGE, format!("bytes={from}-"));
            }
            let response = request.call().map_err(|error| match refused(&error) {
                Some(address) => {
                    redirect(name, &url, &format!("which is {address}, in a private network"))
                }
                None => network(name, &error),
            })?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(response);
            }
            let target = response.headers().get(header::LOCATION).and_then(|to| to.to_str().ok());
            let target =
                target.ok_or_else(|| redirect(name, &url, "which says not where to go"))?;
            url = join(&uri, target);
        }
        Err(network(name, &"it was redirected without end"))
    }

    fn check_target(&self, name: &str, uri: &Uri) -> Result<(), HubError> {
        let encrypted = self.origin.scheme_str() == Some("https");
        match uri.scheme_str() {
            Some("https") => Ok(()),
            Some("http") if !encrypted => Ok(()),
            _ => Err(redirect(name, &uri.to_string(), "which is not encrypted")),
        }
    }
}

/// Looks addresses up, and refuses private ones.
#[derive(Debug)]
struct Guard {
    inner: DefaultResolver,
    guarded: bool,
}

/// What [`Guard`] refused.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Private(IpAddr);

impl Resolver for Guard {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let found = self.inner.resolve(uri, config, timeout)?;
        // Behind a proxy it is the proxy that is looked up, and the proxy that decides.
        let guarded = self.guarded && config.proxy().is_none();
        match found.iter().map(|address| address.ip()).find(|ip| is_private(*ip)) {
            Some(ip) if guarded => Err(ureq::Error::Io(io::Error::other(Private(ip)))),
            _ => Ok(found),
        }
    }
}

fn refused(error: &ureq::Error) -> Option<String> {
    match error {
        ureq::Error::Io(error) => {
            error.get_ref()?.downcast_ref::<Private>().map(ToString::to_string)
        }
        _ => None,
    }
}

/// Whether an address is not on the public internet.
fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => {
            let shared = ip.octets()[0] == 100 && (64..128).contains(&ip.octets()[1]);
            let wide = ip.is_unspecified() || ip.octets()[0] == 0 || ip.is_broadcast();
            ip.is_private()
                || ip.is_loopback()
                || ip.is_link_local()
                || ip.is_multicast()
                || shared
                || wide
        }
        IpAddr::V6(ip) => {
            let first = ip.segments()[0];
            let local = first & 0xFE00 == 0xFC00 || first & 0xFFC0 == 0xFE80;
            let mapped = ip.to_ipv4_mapped().or_else(|| translated(ip.segments()));
            local
                || ip.is_loopback()
                || ip.is_unspecified()
                || ip.is_multicast()
                || mapped.is_some_and(|ip| is_private(IpAddr::V4(ip)))
        }
    }
}

/// The IPv4 address within one that a gateway translates.
fn translated(segments: [u16; 8]) -> Option<Ipv4Addr> {
    let [a, b, 0, 0, 0, 0, high, low] = segments else { return None };
    ((a, b) == (0x64, 0xFF9B)).then(|| Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)))
}

/// Whether the site that was chosen lies in a private network.
fn is_private_host(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    let found = (host, 443).to_socket_addrs();
    found.is_ok_and(|mut found| found.any(|address| is_private(address.ip())))
}

/// Where a redirection leads.
fn join(from: &Uri, target: &str) -> String {
    match (target.strip_prefix('/'), from.scheme_str(), from.authority()) {
        (Some(path), Some(scheme), _) if path.starts_with('/') => format!("{scheme}:{target}"),
        (Some(_), Some(scheme), Some(authority)) => format!("{scheme}://{authority}{target}"),
        _ => target.to_owned(),
    }
}

fn redirect(name: &str, url: &str, why: &str) -> HubError {
    // What follows the question mark may be a key.
    let url = url.split('?').next().unwrap_or(url);
    HubError::Redirect(format!("{name} was redirected to {url}, {why}: refused"))
}

pub(super) fn network(name: &str, what: &dyn std::fmt::Display) -> HubError {
    HubError::Network { name: name.to_owned(), what: what.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses() {
        for ip in [
            "127.0.0.1",
            "10.1.2.3",
            "192.168.0.1",
            "172.16.0.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "255.255.255.255",
            "224.0.0.1",
            "::1",
            "::",
            "fe80::1",
            "fd00::1",
            "::ffff:127.0.0.1",
            "64:ff9b::a9fe:a9fe",
        ] {
            assert!(is_private(ip.parse().unwrap()), "{ip}");
        }
        for ip in ["1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1", "::ffff:1.1.1.1"] {
            assert!(!is_private(ip.parse().unwrap()), "{ip}");
        }
    }

    #[test]
    fn redirections() {
        let from: Uri = "https://a.b/c/d?e".parse().unwrap();
        assert_eq!(join(&from, "/x?y"), "https://a.b/x?y");
        assert_eq!(join(&from, "//c.d/x"), "https://c.d/x");
        assert_eq!(join(&from, "http://c.d/x"), "http://c.d/x");
        assert!(Client::new(Some("ftp://x"), None).is_err());
        assert!(Client::new(Some("huggingface"), None).is_err());
    }
}
