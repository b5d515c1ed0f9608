//! NVIDIA cards as devices: the driver, the run-time compiler, memory and launches. Names no op.
//!
//! An op's [`Op::cuda`] gives its launches as data; this crate compiles their sources for the card
//! found, turns buffers into addresses and puts the launches on one stream. Nothing is needed at
//! build time; without a driver or a compiler [`Cuda::open`] says so.

mod bandwidth;
mod chain;
mod cubins;
mod gpu;
mod graphs;
mod kernels;
mod mailbox;
mod memory;
mod nvrtc;
mod space;
mod staging;
mod stamps;

pub use gpu::OpenError;
pub use nvrtc::Nvrtc;

use std::ffi::c_void;
use std::path::PathBuf;

use ops::kernel::{Arg, Card, LIKE_ALONE, Launch, Plan, WORK_BYTES};
use ops::{
    ActDtype, Bindings, Buf, Counters, Device, DeviceError, DeviceInfo, Fill, Op, PUBLISHED_BYTES,
    TileOrder,
};

use crate::chain::Chain;
use crate::cubins::Cubins;
use crate::gpu::{Gpu, Stream, explain};
use crate::graphs::{Graphs, Recording};
use crate::kernels::{Kernels, pointers};
use crate::mailbox::Mailbox;
use crate::memory::Memory;
use crate::staging::Staging;
use crate::stamps::Stamps;

/// Where working memory of ops begins, behind the word where blocks of chains meet.
const WORK_AT: usize = 1024;

/// How a card is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Which card, in the driver's order.
    pub ordinal: usize,
    /// Folders to look for the compiler in, before the usual ones.
    pub nvrtc: Vec<PathBuf>,
    /// Where compiled kernels are kept; nowhere if absent.
    pub cache: Option<PathBuf>,
    /// Host threads that prepare uploads; 0 for one on each core.
    pub threads: usize,
    /// Wait after each op, so that an error names the op that caused it. Slow.
    pub check_each: bool,
}

/// What happens to a launch.
#[derive(Debug)]
enum Mode {
    /// It goes onto the stream.
    Run,
    /// It is only noted, so that its kernel can be compiled before a recording.
    Note(Vec<Launch>),
    /// It goes onto the stream, which records.
    Record(Recording),
}

/// One card.
#[derive(Debug)]
pub struct Cuda {
    // Fields drop in this order: whatever needs the context goes before `gpu`.
    graphs: Graphs,
    stamps: Stamps,
    staging: Staging,
    kernels: Kernels,
    mailbox: Option<Mailbox>,
    memory: Memory,
    stream: Stream,
    gpu: Gpu,
    plan: Plan,
    mode: Mode,
    /// Stages of a recording that may be joined by more.
    chain: Option<Chain>,
    /// What all ops share: the word where blocks of chains meet, and behind it working memory.
    shared: Option<Buf>,
    counters: Counters,
    check_each: bool,
    failed: Option<DeviceError>,
    /// The last op enqueued since the last `sync`, and how many there were.
    last: Option<(&'static str, usize)>,
    /// Reused by measurements.
    scratch: Option<Buf>,
}

impl Cuda {
    /// Opens a card.
    ///
    /// # Errors
    /// No driver, no such card, or no compiler: one line that says which.
    pub fn open(options: &Options) -> Result<Cuda, OpenError> {
        let gpu = Gpu::open(options.ordinal)?;
        let nvrtc = Nvrtc::find(&options.nvrtc).map_err(OpenError::NoCompiler)?;
        let kernels = Kernels::new(nvrtc, Cubins::new(options.cache.clone()));
        let failed = |why| OpenError::Driver { what: "make a stream", why: explain(why) };
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        Ok(Cuda {
            graphs: Graphs::default(),
            stamps: Stamps::default(),
            staging: Staging::new(threads).map_err(failed)?,
            kernels,
            mailbox: None,
            memory: Memory::default(),
            stream: Stream::new().map_err(failed)?,
            gpu,
            plan: Plan::default(),
            mode: Mode::Run,
            chain: None,
            shared: None,
            counters: Counters::default(),
            check_each: options.check_each,
            failed: None,
            last: None,
            scratch: None,
        })
    }

    /// What plans depend on.
    pub fn card(&self) -> &Card {
        &self.gpu.card
    }

    /// Compiles the kernels of these launches, on all cores, unless the cache has them.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn prepare(&mut self, launches: &[Launch]) -> Result<(), DeviceError> {
        let failed = |why| DeviceError::Op { op: "compile", why };
        self.gpu.enter().map_err(|e| failed(explain(e)))?;
        self.kernels.prepare(&self.gpu.card, launches).map_err(failed)
    }

    /// Bytes of device memory that nobody holds; `None` if the driver doesn't say.
    pub fn free_memory(&self) -> Option<u64> {
        self.gpu.enter().ok()?;
        Some(cudarc::driver::result::mem_get_info().ok()?.0 as u64)
    }

    /// Bytes of device memory that somebody holds, other processes included; `None` if the driver doesn't say.
    pub fn used_memory(&self) -> Option<u64> {
        self.gpu.enter().ok()?;
        let (free, all) = cudarc::driver::result::mem_get_info().ok()?;
        Some((all - free) as u64)
    }

    /// Bytes of device memory held.
    pub fn memory_bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Kernels compiled, not taken from the cache.
    pub fn compiled(&self) -> usize {
        self.kernels.compiled
    }

    /// Frees all buffers and forgets errors; compiled kernels stay.
    ///
    /// # Errors
    /// The card is lost: nothing but a new process helps.
    pub fn reset(&mut self) -> Result<(), DeviceError> {
        (self.failed, self.last, self.scratch) = (None, None, None);
        let lost = |why| DeviceError::Op { op: "reset", why };
        self.stream.synchronize().map_err(|e| lost(explain(e)))?;
        self.graphs.clear();
        self.stamps.forget();
        (self.mailbox, self.chain, self.shared) = (None, None, None);
        self.memory.clear(&self.stream).map_err(lost)
    }

    fn fail(&mut self, error: DeviceError) {
        self.failed.get_or_insert(error);
    }

    /// Notes a driver error under the name of what was done; `None` if anything failed before.
    fn tried<T>(
        &mut self,
        what: &'static str,
        outcome: Result<T, cudarc::driver::DriverError>,
    ) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(error) => {
                self.fail(DeviceError::Op { op: what, why: explain(error) });
                None
            }
        }
    }

    fn enter(&mut self) -> bool {
        if self.failed.is_some() {
            return false;
        }
        let entered = self.gpu.enter();
        self.tried("make the context current", entered).is_some()
    }

    /// A buffer for measurements, kept.
    fn scratch(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError> {
        match self.scratch {
            Some(buf) if buf.bytes >= bytes => Ok(buf.slice(0, bytes)),
            _ => {
                let buf = self.alloc(bytes, what)?;
                self.scratch = Some(buf);
                Ok(buf)
            }
        }
    }

    fn write_bytes(&mut self, buf: Buf, bytes: &[u8]) -> Result<(), DeviceError> {
        self.write(buf, bytes);
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Puts one launch on the stream, or notes it. A stage of a recording waits for others to join.
    fn launch(&mut self, launch: &Launch) -> Result<(), String> {
        let mut args = [0u64; 32];
        let list = launch.args.as_slice();
        for (bits, arg) in args.iter_mut().zip(list) {
            *bits = match *arg {
                Arg::Buf(buf) => self.memory.address(buf),
                Arg::Null => 0,
                Arg::U32(value) => u64::from(value),
                Arg::F32(value) => u64::from(value.to_bits()),
                Arg::Work => self.shared()? + WORK_AT as u64,
            };
        }
        let args = &mut args[..list.len()];
        let Some(kind) = launch.stage else {
            self.end_chain()?;
            return self.put(launch, &mut pointers(args)[..args.len()]);
        };
        if self.chain.as_mut().is_some_and(|chain| chain.join(launch, kind, args)) {
            return Ok(());
        }
        self.end_chain()?;
        let meetings = self.shared()?;
        self.chain = Some(Chain::new(launch, kind, args, meetings));
        if matches!(self.mode, Mode::Run) { self.end_chain() } else { Ok(()) }
    }

    /// Puts the chain that was begun, if any, on the stream, or notes it. Whatever is to come after its
    /// stages has to call this first.
    fn end_chain(&mut self) -> Result<(), String> {
        let Some(mut chain) = self.chain.take() else { return Ok(()) };
        let program = std::ptr::from_mut(chain.program.as_mut()).cast();
        self.put(&chain.launch, &mut [program])
    }

    /// [`Cuda::end_chain`], whose failure is this device's.
    fn flush(&mut self) {
        if let Err(why) = self.end_chain() {
            self.fail(DeviceError::Op { op: "chain", why });
        }
    }

    /// The address of what all ops share.
    fn shared(&mut self) -> Result<u64, String> {
        if self.shared.is_none() {
            let bytes = WORK_AT + WORK_BYTES;
            let all = self.memory.alloc(&self.gpu, &self.stream, bytes, "working memory of ops");
            self.shared = Some(all.map_err(|e| e.to_string())?);
        }
        Ok(self.shared.map_or(0, |all| self.memory.address(all)))
    }

    /// Puts one launch with these pointers to its arguments on the stream, or notes it.
    fn put(&mut self, launch: &Launch, args: &mut [*mut c_void]) -> Result<(), String> {
        if let Mode::Note(launches) = &mut self.mode {
            launches.push(*launch);
            return Ok(());
        }
        let function = self.kernels.get(&self.gpu.card, launch)?;
        match &mut self.mode {
            Mode::Record(holds) => holds.launches += 1,
            _ => {
                self.counters.launches += 1;
                self.counters.submissions += 1;
            }
        }
        // SAFETY: the op's contract: its kernels take these arguments and stay inside its buffers.
        unsafe { function.launch(&self.gpu.card, launch, args, &self.stream) }
            .map_err(|why| {
                let Launch { entry, grid, block, shared, cluster, .. } = launch;
                format!("kernel `{entry}`, grid {grid:?} of {block} threads, {shared} bytes of shared memory, clusters of {cluster}: {why}")
            })
    }

    fn noting(&self) -> bool {
        matches!(self.mode, Mode::Note(_))
    }

    /// Refuses what a recording can't hold.
    fn unrecorded(&mut self, what: &'static str) -> bool {
        let recording = !matches!(self.mode, Mode::Run);
        if recording {
            let why = "inside a recorded sequence".to_owned();
            self.fail(DeviceError::Op { op: what, why });
        }
        !recording
    }

    /// Submits a recording.
    fn submit(&mut self, key: u64) {
        let holds = self.graphs.get(key);
        let (published, launches) = holds.map_or((0, 0), |h| (h.published, h.launches));
        let stamped = holds.is_some_and(|h| !h.stamps.is_empty());
        let room = self.mailbox.as_ref().map_or(Ok(()), |mailbox| mailbox.room(published));
        if let Err(why) = room {
            return self.fail(DeviceError::Op { op: "publish", why });
        }
        let launched = self.graphs.launch(&self.stream, key);
        if self.tried("submit", launched).is_some() {
            self.last = Some(("a recorded sequence", self.last.map_or(0, |(_, n)| n) + 1));
            if let Some(mailbox) = &mut self.mailbox {
                mailbox.sent(published);
            }
            self.counters.launches += launches;
            self.counters.submissions += 1;
            if stamped {
                self.stamps.replayed(key);
            }
        }
    }

    fn publish_copy(&mut self, buf: Buf) -> Result<(), DeviceError> {
        let failed = |why| DeviceError::Op { op: "publish", why };
        if buf.bytes > PUBLISHED_BYTES || !buf.bytes.is_multiple_of(4) {
            return Err(failed(format!("{} bytes", buf.bytes)));
        }
        if self.mailbox.is_none() {
            let count = self.memory.alloc(&self.gpu, &self.stream, 4, "published copies")?;
            let mailbox = Mailbox::new(count).map_err(|e| failed(explain(e)))?;
            self.mailbox = Some(mailbox);
        }
        let Some(mailbox) = &self.mailbox else { return Ok(()) };
        if matches!(self.mode, Mode::Run) {
            mailbox.room(1).map_err(failed)?;
        }
        let (from, count) = (self.memory.address(buf), self.memory.address(mailbox.count));
        let mut args = mailbox.args(from, buf.bytes / 4, count);
        self.end_chain().map_err(failed)?;
        self.put(&Mailbox::launch(), &mut pointers(&mut args)[..args.len()]).map_err(failed)?;
        match (&mut self.mode, &mut self.mailbox) {
            (Mode::Record(holds), _) => holds.published += 1,
            (Mode::Run, Some(mailbox)) => mailbox.sent(1),
            _ => {}
        }
        Ok(())
    }

    fn record(&mut self, key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        if let Err(why) = self.shared() {
            return self.fail(DeviceError::Op { op: "record", why });
        }
        self.mode = Mode::Note(Vec::new());
        body(self);
        self.flush();
        if let Mode::Note(launches) = std::mem::replace(&mut self.mode, Mode::Run)
            && self.failed.is_none()
            && let Err(why) = self.kernels.prepare(&self.gpu.card, &launches)
        {
            self.fail(DeviceError::Op { op: "compile", why });
        }
        if self.failed.is_some() {
            return;
        }
        let begun = self.graphs.begin(&self.stream);
        if self.tried("record", begun).is_none() {
            return;
        }
        self.mode = Mode::Record(Recording::default());
        body(self);
        self.flush();
        let mode = std::mem::replace(&mut self.mode, Mode::Run);
        if self.failed.is_some() {
            return self.graphs.abandon(&self.stream);
        }
        let holds = if let Mode::Record(holds) = mode { holds } else { Recording::default() };
        let ended = self.graphs.end(&self.stream, key, holds);
        self.tried("record", ended);
    }

    fn enqueue(&mut self, op: &dyn Op) -> Result<(), DeviceError> {
        let name = op.name();
        let failed = |why| DeviceError::Op { op: name, why };
        let mut bindings = Bindings::default();
        op.bind(&mut bindings);
        if let Some((a, b)) = bindings.conflict() {
            return Err(failed(format!("`{}` overlaps `{}`", a.name, b.name)));
        }
        op.check()?;
        let mut plan = std::mem::take(&mut self.plan);
        plan.clear();
        let mut outcome = op.cuda(&self.gpu.card, &mut plan).map_err(DeviceError::from);
        for launch in plan.launches() {
            if outcome.is_ok() {
                let launched = self.launch(launch);
                outcome = launched.map_err(|why| failed(format!("{why}; in {op:?}")));
            }
        }
        self.plan = plan;
        if self.check_each && matches!(self.mode, Mode::Run) && outcome.is_ok() {
            let done = self.stream.synchronize();
            outcome = done.map_err(|e| failed(format!("{}; in {op:?}", explain(e))));
        }
        outcome
    }
}

impl Device for Cuda {
    fn info(&self) -> DeviceInfo {
        let Card { arch, sms, .. } = self.gpu.card;
        let name = format!("cuda ({}, sm_{arch}, {sms} multiprocessors)", self.gpu.name);
        DeviceInfo {
            name,
            act: ActDtype::Bf16,
            tiles: TileOrder::Fragments,
            int8_pages: false,
            like_alone: LIKE_ALONE,
        }
    }

    fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError> {
        if !self.enter() {
            let why = "the device failed before".to_owned();
            let failed = self.failed.clone();
            return Err(failed.unwrap_or(DeviceError::Op { op: "alloc", why }));
        }
        self.memory.alloc(&self.gpu, &self.stream, bytes, what)
    }

    fn upload(&mut self, buf: Buf, piece: usize, fill: &Fill<'_>) {
        if buf.bytes == 0 || !self.enter() || !self.unrecorded("upload") {
            return;
        }
        let range = (self.memory.address(buf), buf.bytes);
        let fill = |offset: usize, bytes: &mut [u8]| fill(TileOrder::Fragments, offset, bytes);
        // SAFETY: the buffer lies inside its allocation.
        let done = unsafe { self.staging.upload(&self.gpu, &self.stream, range, piece, &fill) };
        self.tried("upload", done);
    }

    fn write(&mut self, buf: Buf, bytes: &[u8]) {
        if bytes.is_empty() || !self.enter() || !self.unrecorded("write") {
            return;
        }
        let address = self.memory.address(buf.slice(0, bytes.len()));
        // SAFETY: as above.
        let done = unsafe { self.staging.write(&self.stream, address, bytes) };
        self.counters.submissions += 1;
        self.tried("write", done);
    }

    fn read(&mut self, buf: Buf, out: &mut [u8]) {
        if out.is_empty() || !self.enter() || !self.unrecorded("read") {
            return out.fill(0);
        }
        let address = self.memory.address(buf.slice(0, out.len()));
        // SAFETY: as above.
        let done = unsafe { self.staging.read(&self.stream, address, out) };
        self.counters.waits += 1;
        self.counters.submissions += 1;
        if self.tried("read", done).is_none() {
            out.fill(0);
        }
    }

    fn zero(&mut self, buf: Buf) {
        if buf.bytes == 0 || !self.enter() {
            return;
        }
        self.flush();
        if self.noting() {
            return;
        }
        let address = self.memory.address(buf);
        // SAFETY: as above.
        let done = unsafe {
            cudarc::driver::result::memset_d8_async(address, 0, buf.bytes, self.stream.0)
        };
        self.tried("zero", done);
    }

    fn copy(&mut self, from: Buf, to: Buf) {
        assert!(!from.overlaps(&to) && from.bytes == to.bytes, "copy of {from:?} onto {to:?}");
        if from.bytes == 0 || !self.enter() {
            return;
        }
        self.flush();
        if self.noting() {
            return;
        }
        let (source, target) = (self.memory.address(from), self.memory.address(to));
        // SAFETY: as above; the ranges don't overlap.
        let done = unsafe {
            cudarc::driver::result::memcpy_dtod_async(target, source, from.bytes, self.stream.0)
        };
        self.tried("copy", done);
    }

    fn run(&mut self, op: &dyn Op) {
        if !self.enter() {
            return;
        }
        // Loading is over.
        let ended = self.staging.end_uploads();
        if self.tried("end the uploads", ended).is_none() {
            return;
        }
        match self.enqueue(op) {
            Ok(()) => self.last = Some((op.name(), self.last.map_or(0, |(_, count)| count) + 1)),
            Err(error) => self.fail(error),
        }
    }

    fn publish(&mut self, buf: Buf) {
        if !self.enter() {
            return;
        }
        if let Err(error) = self.publish_copy(buf) {
            self.fail(error);
        }
    }

    fn receive(&mut self, out: &mut [u8]) -> Result<(), DeviceError> {
        if self.enter() {
            let received = match &mut self.mailbox {
                Some(mailbox) => {
                    self.counters.waits += u64::from(mailbox.is_last());
                    mailbox.receive(&self.stream, out)
                }
                None => Err("nothing was published".to_owned()),
            };
            match received {
                Ok(()) => return Ok(()),
                Err(why) => self.fail(DeviceError::Op { op: "receive", why }),
            }
        }
        // Whatever went wrong, nothing enqueued before may arrive later.
        let _ = self.stream.synchronize();
        if let Some(mailbox) = &mut self.mailbox {
            mailbox.forget();
        }
        self.sync()
    }

    fn replay(&mut self, key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        if !self.enter() {
            return;
        }
        if self.check_each || !matches!(self.mode, Mode::Run) {
            return body(self);
        }
        if self.graphs.get(key).is_none() {
            self.record(key, body);
        }
        if self.failed.is_none() {
            self.submit(key);
        }
    }

    fn stamp(&mut self) {
        if !self.enter() {
            return;
        }
        self.flush();
        let stamped = match &mut self.mode {
            Mode::Note(_) => return,
            Mode::Run => self.stamps.stamp(&self.stream),
            Mode::Record(holds) => Stamps::record(&mut holds.stamps, &self.stream),
        };
        self.tried("stamp", stamped);
    }

    fn stamps(&mut self) -> Vec<f64> {
        if !self.enter() {
            self.stamps.forget();
            return Vec::new();
        }
        let times = self.stream.synchronize().and_then(|()| self.stamps.take(&self.graphs));
        self.tried("read the stamps", times).unwrap_or_default()
    }

    fn counters(&self) -> Counters {
        Counters { allocations: self.memory.allocations(), ..self.counters }
    }

    fn read_bandwidth(&mut self, of: &[Buf]) -> f64 {
        if !self.enter() {
            return 0.0;
        }
        bandwidth::read_bandwidth(self, of).unwrap_or_else(|error| {
            self.fail(error);
            0.0
        })
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        let last = self.last.take();
        self.counters.waits += 1;
        if self.failed.is_none() {
            let done = self.gpu.enter().and_then(|()| self.stream.synchronize());
            if let Err(error) = done {
                let (op, count) = last.unwrap_or(("a copy", 1));
                let why =
                    format!("{} (in one of {count} ops, of which it was the last)", explain(error));
                self.fail(DeviceError::Op { op, why });
            }
        }
        self.failed.take().map_or(Ok(()), Err)
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let _ = self.gpu.enter();
        let _ = self.memory.clear(&self.stream);
    }
}
