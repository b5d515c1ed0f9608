//! NVIDIA cards as devices: the driver, the run-time compiler, memory and launches. Names no op.
//!
//! An op's [`Op::cuda`] gives its launches as data; this crate compiles their sources for the card
//! found, turns buffers into addresses and puts the launches on one stream. Nothing is needed at
//! build time; without a driver or a compiler [`Cuda::open`] says so.

mod bandwidth;
mod cubins;
mod gpu;
mod graphs;
mod kernels;
mod memory;
mod nvrtc;
mod staging;

pub use gpu::OpenError;
pub use nvrtc::Nvrtc;

use std::path::PathBuf;

use ops::kernel::{Arg, Card, Launch, Plan};
use ops::{ActDtype, Bindings, Buf, Device, DeviceError, DeviceInfo, Op, TileOrder};

use crate::cubins::Cubins;
use crate::gpu::{Gpu, Stream, explain};
use crate::graphs::Graphs;
use crate::kernels::Kernels;
use crate::memory::Memory;
use crate::staging::Staging;

/// How a card is opened.
#[derive(Clone, Debug, Default)]
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
#[derive(Clone, Debug, PartialEq)]
enum Mode {
    /// It goes onto the stream.
    Run,
    /// It is only noted, so that its kernel can be compiled before a recording.
    Note(Vec<Launch>),
    /// It goes onto the stream, which records.
    Record,
}

/// One card.
#[derive(Debug)]
pub struct Cuda {
    // Fields drop in this order: whatever needs the context goes before `gpu`.
    graphs: Graphs,
    staging: Staging,
    kernels: Kernels,
    memory: Memory,
    stream: Stream,
    gpu: Gpu,
    plan: Plan,
    mode: Mode,
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
            staging: Staging::new(threads).map_err(failed)?,
            kernels,
            memory: Memory::default(),
            stream: Stream::new().map_err(failed)?,
            gpu,
            plan: Plan::default(),
            mode: Mode::Run,
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

    /// Puts one launch on the stream, or notes it.
    fn launch(&mut self, launch: &Launch) -> Result<(), String> {
        if let Mode::Note(launches) = &mut self.mode {
            launches.push(*launch);
            return Ok(());
        }
        let function = self.kernels.get(&self.gpu.card, launch)?;
        let mut args = [0u64; 32];
        let list = launch.args.as_slice();
        for (bits, arg) in args.iter_mut().zip(list) {
            *bits = match *arg {
                Arg::Buf(buf) => self.memory.address(buf),
                Arg::Null => 0,
                Arg::U32(value) => u64::from(value),
                Arg::F32(value) => u64::from(value.to_bits()),
            };
        }
        // SAFETY: the op's contract: its kernels take these arguments and stay inside its buffers.
        unsafe { function.launch(&self.gpu.card, launch, &args[..list.len()], &self.stream) }
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
        let recording = self.mode != Mode::Run;
        if recording {
            let why = "inside a recorded sequence".to_owned();
            self.fail(DeviceError::Op { op: what, why });
        }
        !recording
    }

    fn record(&mut self, key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        self.mode = Mode::Note(Vec::new());
        body(self);
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
        self.mode = Mode::Record;
        body(self);
        self.mode = Mode::Run;
        if self.failed.is_some() {
            return self.graphs.abandon(&self.stream);
        }
        let ended = self.graphs.end(&self.stream, key);
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
        if self.check_each && self.mode == Mode::Run && outcome.is_ok() {
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
        DeviceInfo { name, act: ActDtype::Bf16, tiles: TileOrder::Fragments }
    }

    fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError> {
        if !self.enter() {
            let why = "the device failed before".to_owned();
            let failed = self.failed.clone();
            return Err(failed.unwrap_or(DeviceError::Op { op: "alloc", why }));
        }
        self.memory.alloc(&self.stream, bytes, what)
    }

    fn upload(&mut self, buf: Buf, piece: usize, fill: &(dyn Fn(usize, &mut [u8]) + Sync)) {
        if buf.bytes == 0 || !self.enter() || !self.unrecorded("upload") {
            return;
        }
        let range = (self.memory.address(buf), buf.bytes);
        // SAFETY: the buffer lies inside its allocation.
        let done = unsafe { self.staging.upload(&self.gpu, &self.stream, range, piece, fill) };
        self.tried("upload", done);
    }

    fn write(&mut self, buf: Buf, bytes: &[u8]) {
        if bytes.is_empty() || !self.enter() || !self.unrecorded("write") {
            return;
        }
        let address = self.memory.address(buf.slice(0, bytes.len()));
        // SAFETY: as above.
        let done = unsafe { self.staging.write(&self.stream, address, bytes) };
        self.tried("write", done);
    }

    fn read(&mut self, buf: Buf, out: &mut [u8]) {
        if out.is_empty() || !self.enter() || !self.unrecorded("read") {
            return out.fill(0);
        }
        let address = self.memory.address(buf.slice(0, out.len()));
        // SAFETY: as above.
        let done = unsafe { self.staging.read(&self.stream, address, out) };
        if self.tried("read", done).is_none() {
            out.fill(0);
        }
    }

    fn zero(&mut self, buf: Buf) {
        if buf.bytes == 0 || !self.enter() || self.noting() {
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
        if from.bytes == 0 || !self.enter() || self.noting() {
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

    fn replay(&mut self, key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        if !self.enter() {
            return;
        }
        if self.check_each || self.mode != Mode::Run {
            return body(self);
        }
        if !self.graphs.has(key) {
            self.record(key, body);
        }
        if self.failed.is_none() {
            let launched = self.graphs.launch(&self.stream, key);
            self.tried("submit", launched);
            self.last = Some(("a recorded sequence", self.last.map_or(0, |(_, n)| n) + 1));
        }
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
