//! Devices: what runs ops.

mod bandwidth;
mod dry_run;
mod host;
mod memory;
mod trace;

pub use dry_run::{Counted, DryRun};
pub use host::{Host, HostMode};
pub use memory::Mem;
pub use trace::{OpCount, Trace};

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

/// Runs ops on its own memory. `run` returns nothing: errors are sticky and surface at `sync`.
pub trait Device {
    /// What this device is.
    fn info(&self) -> DeviceInfo;

    /// A zeroed buffer of at least `bytes` bytes, 64-byte aligned. Only while loading.
    fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError>;

    /// Fills a buffer in pieces of `piece` bytes (the last may be shorter): `fill(offset, bytes)`.
    /// Pieces may be produced in parallel.
    fn upload(&mut self, buf: Buf, piece: usize, fill: &(dyn Fn(usize, &mut [u8]) + Sync));

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

    /// Enqueues everything that `body` enqueues. `body` may only run ops, zero and copy, and must do the
    /// same for the same `key`: a device may record it at the first call, for which it may run `body`
    /// more than once, and submit the recording as a whole from then on.
    fn replay(&mut self, key: u64, body: &mut dyn FnMut(&mut dyn Device));

    /// Bytes per second at which this device reads these buffers, measured now. 0 if unknown.
    fn read_bandwidth(&mut self, of: &[Buf]) -> f64;

    /// Waits, and says whether everything since the last call succeeded.
    fn sync(&mut self) -> Result<(), DeviceError>;
}
