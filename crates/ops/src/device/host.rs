//! The CPU as a device.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::device::{
    Counters, Device, DeviceError, DeviceInfo, Fill, Mem, PUBLISHED, PUBLISHED_BYTES,
};
use crate::simd::Isa;
use crate::{ActDtype, Bindings, Buf, Cpu, Op, Pool, TileOrder};

/// Which implementation a host device runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostMode {
    /// [`Op::reference`]: the scalar definitions.
    Reference,
    /// [`Op::host`]: SIMD and threads.
    Simd,
}

/// Runs ops on the CPU, at once.
#[derive(Debug)]
pub struct Host {
    mem: Mem,
    cpu: Cpu,
    mode: HostMode,
    act: ActDtype,
    failed: Option<DeviceError>,
    /// Copies not received yet, and memory of those that were.
    published: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
    stamps: Vec<Instant>,
}

impl Host {
    /// The SIMD device with `threads` threads and int8 activations.
    pub fn new(isa: Isa, threads: usize) -> Host {
        Host::with(HostMode::Simd, isa, threads, ActDtype::I8)
    }

    /// A device with every choice spelled out.
    pub fn with(mode: HostMode, isa: Isa, threads: usize, act: ActDtype) -> Host {
        let cpu = Cpu { isa, pool: Pool::new(threads) };
        let (published, spare) = (VecDeque::new(), Vec::new());
        let (mem, stamps) = (Mem::default(), Vec::new());
        Host { mem, cpu, mode, act, failed: None, published, spare, stamps }
    }

    /// The device's memory.
    pub fn mem(&self) -> &Mem {
        &self.mem
    }

    /// The instruction set and threads in use.
    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    fn fail(&mut self, op: &'static str, why: String) {
        self.failed.get_or_insert(DeviceError::Op { op, why });
    }
}

impl Device for Host {
    fn info(&self) -> DeviceInfo {
        let mode = match self.mode {
            HostMode::Reference => "reference",
            HostMode::Simd => self.cpu.isa.name(),
        };
        let threads = self.cpu.pool.threads();
        let plural = if threads == 1 { "" } else { "s" };
        let name = format!("cpu ({mode}, {threads} thread{plural})");
        DeviceInfo {
            name,
            act: self.act,
            tiles: TileOrder::Vectors,
            int8_pages: true,
            like_alone: usize::MAX,
        }
    }

    fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError> {
        self.mem.alloc(bytes, what)
    }

    fn upload(&mut self, buf: Buf, piece: usize, fill: &Fill<'_>) {
        let mem = &self.mem;
        self.cpu.pool.ranges(buf.bytes, piece, &|start, end| {
            fill(TileOrder::Vectors, start, mem.get_mut(buf.slice(start, end - start)));
        });
    }

    fn write(&mut self, buf: Buf, bytes: &[u8]) {
        self.mem.get_mut(buf.slice(0, bytes.len())).copy_from_slice(bytes);
    }

    fn read(&mut self, buf: Buf, out: &mut [u8]) {
        out.copy_from_slice(self.mem.get(buf.slice(0, out.len())));
    }

    fn zero(&mut self, buf: Buf) {
        self.mem.get_mut::<u8>(buf).fill(0);
    }

    fn copy(&mut self, from: Buf, to: Buf) {
        assert!(!from.overlaps(&to) && from.bytes == to.bytes, "copy of {from:?} onto {to:?}");
        self.mem.get_mut::<u8>(to).copy_from_slice(self.mem.get(from));
    }

    fn run(&mut self, op: &dyn Op) {
        if self.failed.is_some() {
            return;
        }
        let mut bindings = Bindings::default();
        op.bind(&mut bindings);
        if let Some((a, b)) = bindings.conflict() {
            return self.fail(op.name(), format!("`{}` overlaps `{}`", a.name, b.name));
        }
        if cfg!(debug_assertions)
            && let Err(unsupported) = op.check()
        {
            return self.fail(op.name(), unsupported.to_string());
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| match self.mode {
            HostMode::Reference => op.reference(&self.mem),
            HostMode::Simd => op.host(&self.mem, &self.cpu),
        }));
        if let Err(panic) = outcome {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("panic");
            self.fail(op.name(), format!("{text} in {op:?}"));
        }
    }

    fn publish(&mut self, buf: Buf) {
        if self.failed.is_some() {
            return;
        }
        if self.published.len() == PUBLISHED || buf.bytes > PUBLISHED_BYTES {
            let why = format!("{} bytes, {} copies wait", buf.bytes, self.published.len());
            return self.fail("publish", why);
        }
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.clear();
        copy.extend_from_slice(self.mem.get(buf));
        self.published.push_back(copy);
    }

    fn receive(&mut self, out: &mut [u8]) -> Result<(), DeviceError> {
        if let Some(failed) = self.failed.take() {
            self.published.clear();
            return Err(failed);
        }
        let failed = |why: &str| DeviceError::Op { op: "receive", why: why.to_owned() };
        let copy = self.published.pop_front().ok_or_else(|| failed("nothing was published"))?;
        let part = copy.get(..out.len()).ok_or_else(|| failed("more than was published"))?;
        out.copy_from_slice(part);
        self.spare.push(copy);
        Ok(())
    }

    fn replay(&mut self, _key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        body(self);
    }

    fn stamp(&mut self) {
        self.stamps.push(Instant::now());
    }

    fn stamps(&mut self) -> Vec<f64> {
        let first = self.stamps.first().copied();
        let since = |stamp: Instant| first.map_or(0.0, |first| (stamp - first).as_secs_f64());
        self.stamps.drain(..).map(since).collect()
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }

    fn read_bandwidth(&mut self, of: &[Buf]) -> f64 {
        super::bandwidth::read_bandwidth(&self.mem, &self.cpu, of)
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        self.failed.take().map_or(Ok(()), Err)
    }
}
