//! Sockets: where requests come in, and how connections end.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
#[cfg(unix)]
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
#[cfg(unix)]
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Connections at one time; more wait to be accepted.
const MAX_CONNECTIONS: usize = 4096;
/// The longest head of a request.
const MAX_HEAD: usize = 64 << 10;
/// How long replies that are cut short may take to say so.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A socket that listens.
#[derive(Debug)]
pub enum Listener {
    /// On a network.
    Tcp(TcpListener),
    /// In the file system.
    #[cfg(unix)]
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Listens on a network.
    ///
    /// # Errors
    /// If the port is taken, with the option that changes it.
    pub async fn tcp(address: SocketAddr) -> anyhow::Result<Listener> {
        match TcpListener::bind(address).await {
            Ok(listener) => Ok(Listener::Tcp(listener)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => anyhow::bail!(
                "port {} is in use by another program, perhaps another th-engine serve; stop that \
                 one or choose another with --port",
                address.port()
            ),
            Err(error) => Err(error)
                .with_context(|| format!("can't listen on {address}; see --host and --port")),
        }
    }

    /// Listens in the file system. What a server that is gone left there is removed.
    ///
    /// # Errors
    /// If something else is there, or listens there.
    #[cfg(unix)]
    pub fn unix(path: &Path) -> anyhow::Result<Listener> {
        use std::os::unix::fs::{FileTypeExt, PermissionsExt};
        let shown = path.display();
        match std::fs::symlink_metadata(path) {
            Ok(found) if found.file_type().is_socket() => {
                if std::os::unix::net::UnixStream::connect(path).is_ok() {
                    anyhow::bail!(
                        "{shown} is in use by another program; choose another --unix-socket"
                    );
                }
                std::fs::remove_file(path)
                    .with_context(|| format!("can't remove the old {shown}"))?;
            }
            Ok(_) => {
                anyhow::bail!("{shown} exists and is not a socket; choose another --unix-socket")
            }
            Err(_) => {}
        }
        let listener =
            UnixListener::bind(path).with_context(|| format!("can't listen on {shown}"))?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Listener::Unix(listener, path.to_owned()))
    }

    /// Not on this system.
    ///
    /// # Errors
    /// Always.
    #[cfg(not(unix))]
    pub fn unix(_path: &Path) -> anyhow::Result<Listener> {
        anyhow::bail!("this system has no UNIX sockets; leave --unix-socket out")
    }

    /// Where it listens, for people.
    pub fn shown(&self) -> String {
        match self {
            Listener::Tcp(listener) => listener.local_addr().map_or_else(
                |_| "an unknown address".into(),
                |address| format!("http://{address}"),
            ),
            #[cfg(unix)]
            Listener::Unix(_, path) => format!("unix:{}", path.display()),
        }
    }

    async fn accept(&self) -> io::Result<Box<dyn Stream>> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                // Pieces of a stream leave at once.
                stream.set_nodelay(true)?;
                Ok(Box::new(stream))
            }
            #[cfg(unix)]
            Listener::Unix(listener, _) => Ok(Box::new(listener.accept().await?.0)),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        #[cfg(unix)]
        if let Listener::Unix(_, path) = self {
            // It is in nobody's way but the next server's, which removes it too.
            let _ = std::fs::remove_file(path);
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Serves until `leave`; then takes no more connections, and gives requests `drain` to end. After that
/// `cut` tells those that are left to say that they are over.
pub async fn serve(
    listener: Listener,
    router: Router,
    header_timeout: Duration,
    leave: impl Future<Output = ()>,
    drain: Duration,
    cut: impl FnOnce(),
) {
    let mut builder = Builder::new(TokioExecutor::new());
    let mut http1 = builder.http1();
    http1.timer(TokioTimer::new()).header_read_timeout(header_timeout).max_buf_size(MAX_HEAD);
    builder.http2().timer(TokioTimer::new()).max_header_list_size(MAX_HEAD as u32);
    let builder = Arc::new(builder);
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let (graceful, mut connections) = (GracefulShutdown::new(), JoinSet::new());
    tokio::pin!(leave);
    loop {
        let accepted = async {
            let permit = Arc::clone(&room).acquire_owned().await;
            (listener.accept().await, permit)
        };
        let (stream, permit) = tokio::select! {
            // Whoever is answered may at once tell the server to leave: it listens for that first.
            biased;
            () = &mut leave => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = accepted => accepted,
        };
        let Ok(stream) = stream else {
            // Out of file descriptors, say: others may end soon.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let service = TowerToHyperService::new(router.clone());
        let connection = builder.serve_connection(TokioIo::new(stream), service).into_owned();
        let connection = graceful.watch(connection);
        connections.spawn(async move {
            // A connection that broke is its client's affair.
            let _ = connection.await;
            drop(permit);
        });
    }
    drop(listener);
    let ended = graceful.shutdown();
    tokio::pin!(ended);
    if tokio::time::timeout(drain, &mut ended).await.is_ok() {
        return;
    }
    cut();
    if tokio::time::timeout(LAST_WORDS, ended).await.is_err() {
        // Their clients don't listen. Dropping what is left cancels its requests.
        connections.shutdown().await;
    }
}
