//! Devices: what runs ops.

mod bandwidth;
mod diff;
mod dry_run;
mod host;
mod memory;
mod trace;

pub use diff::{Diff, Difference};
pub use dry_run::{Counted, DryRun};
pub use host::{Host, HostMode};
pub use memory::Mem;
pub use trace::{OpCount, Trace};

use delegate::delegate;

use crate::{ActDtype, Buf, Op, TileOrder, Unsupported};

/// What a device is and prefers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// For people: kind, instruction set or card, threads.
    pub name: String,
    /// How linear layers of quantised weights want their inputs.
    pub act: ActDtype,
    /// How quantised weights are to be packed.
    pub tiles: TileOrder,
    /// Whether it can keep keys and values in [`KvDtype::Int8`](crate::KvDtype::Int8).
    pub int8_pages: bool,
    /// Rows of a round up to which the bits of each are those that it has alone.
    pub like_alone: usize,
}

/// A device that failed. Nothing it computed since the last successful `sync` may be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No memory for a buffer.
    #[error("out of memory: {bytes} bytes for {what}")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// The buffer's purpose.
        what: String,
    },
    /// An op that this device can't run, or not with this geometry.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// An op did not complete.
    #[error("{op} failed: {why}")]
    Op {
        /// The op's name.
        op: &'static str,
        /// What happened.
        why: String,
    },
}

/// What it took to keep a device busy. All zero for the CPU, which is its own host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Kernels launched, those of recordings included.
    pub launches: u64,
    /// Calls that gave the device work: launches outside of recordings, whole recordings, copies.
    pub submissions: u64,
    /// Times that the host waited for the device while the device had nothing further to do.
    pub waits: u64,
    /// Allocations of device memory.
    pub allocations: u64,
}

impl std::ops::Sub for Counters {
    type Output = Counters;

    /// What happened since `before`.
    fn sub(self, before: Counters) -> Counters {
        Counters {
            launches: self.launches - before.launches,
            submissions: self.submissions - before.submissions,
            waits: self.waits - before.waits,
            allocations: self.allocations - before.allocations,
        }
    }
}

/// What makes a piece of an upload: told how the device has quantised weights packed and where the
/// piece begins, it fills the bytes.
pub type Fill<'a> = dyn Fn(TileOrder, usize, &mut [u8]) + Sync + 'a;

/// Published copies that may wait to be received.
pub const PUBLISHED: usize = 8;
/// Bytes of one published copy.
pub const PUBLISHED_BYTES: usize = 64 << 10;

/// Runs ops on its own memory. `run` returns nothing: errors are sticky and surface at `sync`.
pub trait Device {
    /// What this device is.
    fn info(&self) -> DeviceInfo;

    /// A zeroed buffer of at least `bytes` bytes, 64-byte aligned. Only while loading. Buffers of 64 MiB and more
    /// have numbers of their own, in ascending order: [`Diff`] has the same ones on two devices.
    fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError>;

    /// Fills a buffer in pieces of `piece` bytes (the last may be shorter), which may be produced in
    /// parallel.
    fn upload(&mut self, buf: Buf, piece: usize, fill: &Fill<'_>);

    /// Copies bytes into the start of a buffer.
    fn write(&mut self, buf: Buf, bytes: &[u8]);

    /// Copies the start of a buffer out, after all ops so far.
    fn read(&mut self, buf: Buf, out: &mut [u8]);

    /// Fills a buffer with zero bytes, in order with the ops.
    fn zero(&mut self, buf: Buf);

    /// Copies a buffer onto another of the same length, in order with the ops.
    fn copy(&mut self, from: Buf, to: Buf);

    /// Enqueues an op.
    fn run(&mut self, op: &dyn Op);

    /// Enqueues a copy of a small buffer to the host, in order with the ops; [`Device::receive`] hands
    /// it over. At most [`PUBLISHED`] copies may wait, of at most [`PUBLISHED_BYTES`] bytes each.
    fn publish(&mut self, buf: Buf);

    /// Waits for the oldest published copy that was not received yet, for it alone, and copies its
    /// start out. An error says what `sync` would say, and then nothing published waits any more.
    fn receive(&mut self, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Enqueues everything that `body` enqueues. `body` may only run ops, zero, copy and publish, and must do the
    /// same for the same `key`: a device may record it at the first call, for which it may run `body`
    /// more than once, and submit the recording as a whole from then on.
    fn replay(&mut self, key: u64, body: &mut dyn FnMut(&mut dyn Device));

    /// Enqueues a time stamp, in order with the ops; also inside a replayed sequence, each of whose
    /// replays stamps again.
    fn stamp(&mut self);

    /// Waits, and gives the times of all stamps since the last call, in seconds after the first.
    fn stamps(&mut self) -> Vec<f64>;

    /// What the device did since it was opened.
    fn counters(&self) -> Counters;

    /// Bytes per second at which this device reads these buffers, measured now. 0 if unknown.
    fn read_bandwidth(&mut self, of: &[Buf]) -> f64;

    /// Waits, and says whether everything since the last call succeeded.
    fn sync(&mut self) -> Result<(), DeviceError>;
}

/// Of whatever kind: chosen when the program starts.
impl Device for Box<dyn Device> {
    delegate! {
        to (**self) {
            fn info(&self) -> DeviceInfo;
            fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError>;
            fn upload(&mut self, buf: Buf, piece: usize, fill: &Fill<'_>);
            fn write(&mut self, buf: Buf, bytes: &[u8]);
            fn read(&mut self, buf: Buf, out: &mut [u8]);
            fn zero(&mut self, buf: Buf);
            fn copy(&mut self, from: Buf, to: Buf);
            fn run(&mut self, op: &dyn Op);
            fn publish(&mut self, buf: Buf);
            fn receive(&mut self, out: &mut [u8]) -> Result<(), DeviceError>;
            fn replay(&mut self, key: u64, body: &mut dyn FnMut(&mut dyn Device));
            fn stamp(&mut self);
            fn stamps(&mut self) -> Vec<f64>;
            fn counters(&self) -> Counters;
            fn read_bandwidth(&mut self, of: &[Buf]) -> f64;
            fn sync(&mut self) -> Result<(), DeviceError>;
        }
    }
}
