//! The store of finished requests on this machine: one SQLite file, written by one thread and read
//! by anyone, `th-engine traces` among them.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, Row, named_params, params};
use serde::{Deserialize, Serialize};

use super::record::{Bodies, ErrorClass, Record};
use super::stats::Sample;
use super::timeline::micros;
use super::trace_context::{SpanId, TraceId};

/// Version of the tables. A store with another one is not touched.
const SCHEMA_VERSION: i64 = 1;
/// How soon after a failure an equal request is its retry.
const RETRY_WITHIN: Duration = Duration::from_secs(600);
/// How long another process's lock is waited for.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);
/// Rows deleted at once while the store is too big.
const DELETE_ROWS: u32 = 32;

/// Rows lie in the order in which they were written, so that deleting the oldest frees whole pages.
const SCHEMA: &str = "
    CREATE TABLE requests (
        id INTEGER PRIMARY KEY,
        span_id TEXT NOT NULL UNIQUE,
        trace_id TEXT NOT NULL,
        started_us INTEGER NOT NULL,
        duration_us INTEGER NOT NULL,
        first_token_us INTEGER,
        client TEXT NOT NULL,
        session TEXT,
        endpoint TEXT NOT NULL,
        model TEXT NOT NULL,
        outcome TEXT NOT NULL,
        prompt INTEGER NOT NULL,
        cached INTEGER NOT NULL,
        output INTEGER NOT NULL,
        reasoning INTEGER NOT NULL,
        prefill_us INTEGER NOT NULL,
        decode_us INTEGER NOT NULL,
        rounds INTEGER NOT NULL,
        proposed INTEGER NOT NULL,
        accepted INTEGER NOT NULL,
        request_hash TEXT,
        retry_of TEXT,
        record TEXT NOT NULL,
        bodies TEXT
    );
    CREATE INDEX by_start ON requests (started_us);
    CREATE INDEX by_trace ON requests (trace_id);
    CREATE INDEX by_hash ON requests (request_hash, started_us) WHERE request_hash IS NOT NULL;
";

/// Where records are kept, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreOptions {
    /// The file.
    pub path: PathBuf,
    /// Records older than this are deleted.
    pub keep: Duration,
    /// The oldest records are deleted while the file is bigger than this.
    pub max_bytes: u64,
}

impl StoreOptions {
    /// A month, and no more than half a gigabyte.
    pub fn at(path: PathBuf) -> StoreOptions {
        StoreOptions { path, keep: Duration::from_secs(30 * 24 * 3600), max_bytes: 512 << 20 }
    }
}

/// Why the store could not be written or read. The words name no folder: they are shown to clients.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is none.
    #[error("this server keeps no traces; start it without --no-traces")]
    Off,
    /// It does not exist.
    #[error("there is no store of traces yet; the server makes it when it starts")]
    Missing,
    /// It was written by another version of this program.
    #[error(
        "the store of traces has format {0} and this build reads {SCHEMA_VERSION}; move the file \
         away or use the build that wrote it"
    )]
    Version(i64),
    /// A record in it makes no sense.
    #[error("a record in the store of traces makes no sense: {0}")]
    Record(#[from] serde_json::Error),
    /// The file system refused.
    #[error("the store of traces: {}", .0.kind())]
    Io(#[from] std::io::Error),
    /// SQLite failed.
    #[error("the store of traces {}", told(.0))]
    Sqlite(#[from] rusqlite::Error),
}

impl StoreError {
    /// Whether the file is no store any more.
    pub fn is_damage(&self) -> bool {
        matches!(self.code(), Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase))
    }

    /// Whether the next try may succeed on the same connection.
    pub fn is_passing(&self) -> bool {
        matches!(self.code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
    }

    fn code(&self) -> Option<ErrorCode> {
        match self {
            StoreError::Sqlite(error) => error.sqlite_error_code(),
            _ => None,
        }
    }
}

/// What SQLite's error means here, without the path that its own message may have.
fn told(error: &rusqlite::Error) -> String {
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            "is locked by another process".into()
        }
        Some(ErrorCode::DiskFull) => "can't grow: the disk is full".into(),
        Some(ErrorCode::ReadOnly) => "can't be written: it is read-only".into(),
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => "is damaged".into(),
        Some(ErrorCode::CannotOpen | ErrorCode::PermissionDenied) => {
            "can't be opened: check that its folder exists and may be written".into()
        }
        Some(code) => format!("failed: {code:?}"),
        None => "failed: it does not have the expected columns".into(),
    }
}

/// The store, for its one writer.
#[derive(Debug)]
pub struct Store {
    connection: Connection,
    options: StoreOptions,
}

impl Store {
    /// Opens the store, or makes it. Only this user may read it.
    ///
    /// # Errors
    /// It can't be opened, is no store, or is another version's.
    pub fn open(options: &StoreOptions) -> Result<Store, StoreError> {
        if let Some(folder) = options.path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        private_file(&options.path)?;
        let connection = Connection::open(&options.path)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        // Otherwise a statement is planned anew whenever other values are bound to it.
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
        // Before there are tables: a file can't become incremental later without being rewritten.
        connection.pragma_update(None, "auto_vacuum", "INCREMENTAL")?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        connection.pragma_update(None, "journal_size_limit", 4 << 20)?;
        match version(&connection)? {
            0 => connection.execute_batch(&format!(
                "BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            ))?,
            SCHEMA_VERSION => {}
            other => return Err(StoreError::Version(other)),
        }
        Ok(Store { connection, options: options.clone() })
    }

    /// Moves a damaged store out of the way, so that a new one can begin.
    ///
    /// # Errors
    /// The file can't be moved.
    pub fn set_aside(path: &Path) -> Result<(), StoreError> {
        let beside = |suffix: &str| {
            let mut name = path.as_os_str().to_owned();
            name.push(suffix);
            PathBuf::from(name)
        };
        // The write-ahead log belongs to the damaged file; a new one must not find it.
        for suffix in ["-wal", "-shm"] {
            let _ = std::fs::remove_file(beside(suffix));
        }
        std::fs::rename(path, beside(".damaged"))?;
        Ok(())
    }

    /// Writes records, all or none, and finds which are retries.
    ///
    /// # Errors
    /// Nothing was written.
    pub fn insert<'a>(
        &mut self,
        records: impl IntoIterator<Item = &'a mut Record>,
    ) -> Result<(), StoreError> {
        let transaction = self.connection.transaction()?;
        for record in records {
            record.retry_of = retried(&transaction, record)?;
            insert(&transaction, record)?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// Deletes what is too old, and the oldest while the file is too big.
    ///
    /// # Errors
    /// SQLite failed; what was deleted by then is.
    pub fn retain(&mut self) -> Result<(), StoreError> {
        let oldest = now_us().saturating_sub(micros(self.options.keep));
        self.connection.execute("DELETE FROM requests WHERE started_us < ?1", [signed(oldest)])?;
        while self.used_bytes()? > self.options.max_bytes {
            let deleted = self.connection.execute(
                "DELETE FROM requests WHERE id IN
                    (SELECT id FROM requests ORDER BY id LIMIT ?1)",
                [DELETE_ROWS],
            )?;
            if deleted == 0 {
                break;
            }
        }
        // The pragma yields a row for each page that it gives back.
        let mut vacuum = self.connection.prepare("PRAGMA incremental_vacuum")?;
        let mut rows = vacuum.query([])?;
        while rows.next()?.is_some() {}
        drop(rows);
        drop(vacuum);
        self.connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?;
        Ok(())
    }

    /// Bytes of the file and its log.
    ///
    /// # Errors
    /// SQLite failed.
    pub fn bytes(&self) -> Result<u64, StoreError> {
        Ok(self.pragma("page_count")? * self.pragma("page_size")?)
    }

    #[cfg(test)]
    pub(super) fn limit_pages(&self, pages: u32) {
        self.connection.pragma_update(None, "max_page_count", pages).unwrap();
    }

    fn used_bytes(&self) -> Result<u64, StoreError> {
        let pages = self.pragma("page_count")?.saturating_sub(self.pragma("freelist_count")?);
        Ok(pages * self.pragma("page_size")?)
    }

    fn pragma(&self, name: &str) -> Result<u64, StoreError> {
        Ok(self.connection.pragma_query_value(None, name, |row| row.get(0).map(unsigned))?)
    }
}

const EQUAL_REQUEST: &str = "
    SELECT span_id, outcome FROM requests
    WHERE request_hash = ?1 AND client = ?2 AND started_us BETWEEN ?3 AND ?4
      AND started_us + duration_us <= ?4 AND span_id <> ?5
    ORDER BY started_us DESC LIMIT 1
";

/// The newest equal request of this client that ended badly before this one began.
fn retried(connection: &Connection, record: &Record) -> Result<Option<SpanId>, StoreError> {
    let Some(hash) = &record.request_hash else { return Ok(None) };
    let mut query = connection.prepare_cached(EQUAL_REQUEST)?;
    let began = record.started_us;
    let since = began.saturating_sub(micros(RETRY_WITHIN));
    let own = record.span_id.to_string();
    let before = query
        .query_row(params![hash, record.client, signed(since), signed(began), own], |row| {
            Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?))
        })
        .optional()?;
    let failed = before
        .filter(|(_, outcome)| ErrorClass::named(outcome).is_some_and(ErrorClass::invites_retry));
    Ok(failed.and_then(|(span_id, _)| span_id.parse().ok()))
}

fn insert(connection: &Connection, record: &Record) -> Result<(), StoreError> {
    let bodies = record.bodies.as_ref().map(serde_json::to_string).transpose()?;
    let text = serde_json::to_string(&Record { bodies: None, ..record.clone() })?;
    let tokens = &record.tokens;
    let mut statement = connection.prepare_cached(
        "INSERT OR REPLACE INTO requests VALUES (
            NULL, :span_id, :trace_id, :started_us, :duration_us, :first_token_us, :client, :session,
            :endpoint, :model, :outcome, :prompt, :cached, :output, :reasoning, :prefill_us,
            :decode_us, :rounds, :proposed, :accepted, :request_hash, :retry_of, :record, :bodies)",
    )?;
    statement.execute(named_params! {
        ":span_id": record.span_id.to_string(),
        ":trace_id": record.trace_id.to_string(),
        ":started_us": signed(record.started_us),
        ":duration_us": signed(record.duration_us),
        ":first_token_us": record.first_token_us.map(signed),
        ":client": record.client,
        ":session": record.session,
        ":endpoint": record.endpoint,
        ":model": record.model,
        ":outcome": record.outcome(),
        ":prompt": signed(tokens.prompt),
        ":cached": signed(tokens.cached),
        ":output": signed(tokens.output),
        ":reasoning": signed(tokens.reasoning),
        ":prefill_us": signed(record.prefill_us),
        ":decode_us": signed(record.decode_us),
        ":rounds": signed(record.draft.rounds),
        ":proposed": signed(record.draft.proposed),
        ":accepted": signed(record.draft.accepted),
        ":request_hash": record.request_hash,
        ":retry_of": record.retry_of.map(|id| id.to_string()),
        ":record": text,
        ":bodies": bodies,
    })?;
    Ok(())
}

/// Which records are asked for. Absent means any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Filter {
    /// Begun at this time or later, in microseconds since 1970.
    pub since_us: Option<u64>,
    /// Begun before this time.
    pub before_us: Option<u64>,
    /// Of this client.
    pub client: Option<String>,
    /// Of this conversation.
    pub session: Option<String>,
    /// On this route.
    pub endpoint: Option<String>,
    /// Answered by this model.
    pub model: Option<String>,
    /// `ok`, a class of errors, or `error` for any of them.
    pub outcome: Option<String>,
}

const WHERE: &str = "
    WHERE started_us >= :since AND started_us < :before
      AND (:client IS NULL OR client = :client)
      AND (:session IS NULL OR session = :session)
      AND (:endpoint IS NULL OR endpoint = :endpoint)
      AND (:model IS NULL OR model = :model)
      AND (:outcome IS NULL OR outcome = :outcome OR (:outcome = 'error' AND outcome <> 'ok'))
";

/// Reads the store, whoever writes it meanwhile.
#[derive(Debug)]
pub struct Reader {
    connection: Connection,
}

impl Reader {
    /// Opens a store to read it.
    ///
    /// # Errors
    /// There is none, or it can't be read.
    pub fn open(path: &Path) -> Result<Reader, StoreError> {
        if !path.exists() {
            return Err(StoreError::Missing);
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        match version(&connection)? {
            SCHEMA_VERSION => Ok(Reader { connection }),
            0 => Err(StoreError::Missing),
            other => Err(StoreError::Version(other)),
        }
    }

    /// The newest records that match, newest first, without bodies and spans.
    ///
    /// # Errors
    /// The store can't be read.
    pub fn list(&self, filter: &Filter, limit: usize) -> Result<Vec<Record>, StoreError> {
        let query =
            format!("SELECT record FROM requests {WHERE} ORDER BY started_us DESC LIMIT {limit}");
        let mut records = Vec::new();
        self.each(&query, filter, |row| {
            let mut record: Record = serde_json::from_str(text(row, 0)?)?;
            record.spans = Vec::new();
            records.push(record);
            Ok(())
        })?;
        Ok(records)
    }

    /// The requests of a trace, or the one with this span, in order, with all there is.
    ///
    /// # Errors
    /// The store can't be read.
    pub fn get(&self, id: &str) -> Result<Vec<Record>, StoreError> {
        let column = match (id.parse::<TraceId>(), id.parse::<SpanId>()) {
            (Ok(_), _) => "trace_id",
            (_, Ok(_)) => "span_id",
            _ => return Ok(Vec::new()),
        };
        let mut query = self.connection.prepare(&format!(
            "SELECT record, bodies FROM requests WHERE {column} = ?1 ORDER BY started_us LIMIT 1000"
        ))?;
        let mut rows = query.query([id])?;
        let mut records = Vec::new();
        while let Some(row) = rows.next()? {
            let mut record: Record = serde_json::from_str(&row.get::<_, String>(0)?)?;
            let bodies: Option<String> = row.get(1)?;
            record.bodies = bodies.map(|text| serde_json::from_str::<Bodies>(&text)).transpose()?;
            records.push(record);
        }
        Ok(records)
    }

    /// Calls `each` with what statistics need of every record that matches, oldest first.
    ///
    /// # Errors
    /// The store can't be read.
    pub fn samples(&self, filter: &Filter, mut each: impl FnMut(Sample)) -> Result<(), StoreError> {
        let query = format!(
            "SELECT started_us, duration_us, first_token_us, client, model, outcome, prompt, cached,
                    output, reasoning, prefill_us, decode_us, rounds, proposed, accepted,
                    retry_of IS NOT NULL
             FROM requests {WHERE} ORDER BY started_us"
        );
        self.each(&query, filter, |row| {
            let count = |column: usize| row.get::<_, i64>(column).map(unsigned);
            each(Sample {
                started_us: count(0)?,
                duration_us: count(1)?,
                first_token_us: row.get::<_, Option<i64>>(2)?.map(unsigned),
                client: row.get(3)?,
                model: row.get(4)?,
                error: ErrorClass::named(text(row, 5)?),
                prompt: count(6)?,
                cached: count(7)?,
                output: count(8)?,
                reasoning: count(9)?,
                prefill_us: count(10)?,
                decode_us: count(11)?,
                rounds: count(12)?,
                proposed: count(13)?,
                accepted: count(14)?,
                retry: row.get(15)?,
            });
            Ok(())
        })
    }

    fn each(
        &self,
        query: &str,
        filter: &Filter,
        mut each: impl FnMut(&Row<'_>) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let mut query = self.connection.prepare(query)?;
        let mut rows = query.query(named_params! {
            ":since": filter.since_us.map_or(i64::MIN, signed),
            ":before": filter.before_us.map_or(i64::MAX, signed),
            ":client": filter.client,
            ":session": filter.session,
            ":endpoint": filter.endpoint,
            ":model": filter.model,
            ":outcome": filter.outcome,
        })?;
        while let Some(row) = rows.next()? {
            each(row)?;
        }
        Ok(())
    }
}

fn text<'a>(row: &'a Row<'_>, column: usize) -> Result<&'a str, StoreError> {
    Ok(row.get_ref(column)?.as_str().map_err(rusqlite::Error::from)?)
}

fn version(connection: &Connection) -> Result<i64, StoreError> {
    Ok(connection.pragma_query_value(None, "user_version", |row| row.get(0))?)
}

/// Makes the file, if it isn't there, and makes it this user's alone; SQLite's own files beside it
/// take its mode.
fn private_file(path: &Path) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.append(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(path)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = file.metadata()?.permissions().mode();
        if mode & 0o077 != 0 {
            file.set_permissions(std::fs::Permissions::from_mode(mode & 0o700))?;
        }
    }
    drop(file);
    Ok(())
}

/// Microseconds since 1970.
pub fn now_us() -> u64 {
    micros(SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default())
}

/// SQLite's integers have a sign; counts beyond it are the most there is.
fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn unsigned(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
