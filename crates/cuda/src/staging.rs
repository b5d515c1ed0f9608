//! Copies between the host and the card, through page-locked memory.
//!
//! A weight is uploaded in slots: host threads claim the next stretch of it, write its pieces straight
//! into a slot of page-locked memory, and start its copy, while other slots are on their way. So
//! a model passes through a few hundred MiB of host memory, however large it is.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::result::{self, DriverError};

use crate::gpu::{Event, Gpu, Pinned, Stream};

/// Bytes of an upload slot, unless one piece is larger.
const SLOT_BYTES: usize = 8 << 20;
/// Slots of each host thread: one is written while the other is copied.
const SLOTS: usize = 2;
/// Uploads smaller than this aren't worth a second thread.
const ALONE_BYTES: usize = 1 << 20;

const WRITE_BYTES: usize = 64 << 10;
const WRITE_SLOTS: usize = 32;
const READ_BYTES: usize = 1 << 20;

#[derive(Debug)]
struct Slot {
    memory: Pinned,
    copied: Event,
}

impl Slot {
    fn new(bytes: usize) -> Result<Slot, DriverError> {
        Ok(Slot { memory: Pinned::new(bytes)?, copied: Event::new()? })
    }

    /// Copies the first `bytes` bytes to the card, and marks when that is done.
    ///
    /// # Safety
    /// `address` is valid for `bytes` bytes of device memory.
    unsafe fn send(&self, address: u64, bytes: usize, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: page-locked until the slot is dropped, which waits for the copy; not written before
        // `copied` is waited for.
        unsafe {
            let source = &self.memory.slice()[..bytes];
            result::memcpy_htod_async(address, source, stream.0)?;
        }
        self.copied.record(stream)
    }
}

/// Page-locked memory for all directions.
#[derive(Debug)]
pub(crate) struct Staging {
    threads: usize,
    /// Copies of uploads run beside the ops' stream.
    stream: Stream,
    ordered: Event,
    uploads: Vec<Slot>,
    writes: Vec<Slot>,
    next_write: usize,
    read: Option<Pinned>,
}

impl Staging {
    pub(crate) fn new(threads: usize) -> Result<Staging, DriverError> {
        let (uploads, writes) = (Vec::new(), Vec::new());
        let (stream, ordered) = (Stream::new()?, Event::new()?);
        let threads = threads.max(1);
        Ok(Staging { threads, stream, ordered, uploads, writes, next_write: 0, read: None })
    }

    /// Fills device memory in pieces made by `fill(offset, bytes)`; in order with `stream`.
    ///
    /// # Safety
    /// `address` is valid for `bytes` bytes of device memory.
    pub(crate) unsafe fn upload(
        &mut self,
        gpu: &Gpu,
        stream: &Stream,
        (address, bytes): (u64, usize),
        piece: usize,
        fill: &(dyn Fn(usize, &mut [u8]) + Sync),
    ) -> Result<(), DriverError> {
        let piece = piece.clamp(1, bytes.max(1));
        let stretch = (SLOT_BYTES / piece).max(1) * piece;
        let stretches = bytes.div_ceil(stretch);
        let threads = if bytes < ALONE_BYTES { 1 } else { self.threads.min(stretches).max(1) };
        self.make_slots(threads, stretch)?;
        self.ordered.record(stream)?;
        self.stream.wait(&self.ordered)?;

        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let copies = &self.stream;
        let work = |slots: &[Slot]| -> Result<(), DriverError> {
            gpu.enter()?;
            for slot in slots.iter().cycle() {
                let start = next.fetch_add(1, Ordering::Relaxed) * stretch;
                if start >= bytes {
                    break;
                }
                slot.copied.synchronize()?;
                let end = (start + stretch).min(bytes);
                // SAFETY: the slot's last copy is done, and only this thread uses the slot.
                let memory = unsafe { &mut slot.memory.slice()[..end - start] };
                for (i, part) in memory.chunks_mut(piece).enumerate() {
                    fill(start + i * piece, part);
                }
                // SAFETY: inside the range given.
                unsafe { slot.send(address + start as u64, end - start, copies) }?;
            }
            Ok(())
        };
        let keep = |outcome: Result<(), DriverError>| {
            if let (Err(error), Ok(mut failed)) = (outcome, failed.lock()) {
                *failed = Some(error);
            }
        };
        let mut shares = self.uploads.chunks(SLOTS).take(threads);
        let own = shares.next().unwrap_or(&[]);
        std::thread::scope(|scope| {
            for slots in shares {
                scope.spawn(|| keep(work(slots)));
            }
            keep(work(own));
        });
        if let Some(error) = failed.into_inner().unwrap_or(None) {
            return Err(error);
        }
        self.ordered.record(&self.stream)?;
        stream.wait(&self.ordered)
    }

    fn make_slots(&mut self, threads: usize, bytes: usize) -> Result<(), DriverError> {
        if self.uploads.first().is_some_and(|slot| slot.memory.bytes() < bytes) {
            self.stream.synchronize()?;
            self.uploads.clear();
        }
        while self.uploads.len() < SLOTS * threads {
            self.uploads.push(Slot::new(bytes.max(SLOT_BYTES))?);
        }
        Ok(())
    }

    /// Gives the memory of uploads back, once loading is done.
    pub(crate) fn end_uploads(&mut self) -> Result<(), DriverError> {
        if !self.uploads.is_empty() {
            self.stream.synchronize()?;
            self.uploads.clear();
        }
        Ok(())
    }

    /// Copies bytes to the card, in order with `stream`; the bytes are free at return.
    ///
    /// # Safety
    /// `address` is valid for as many bytes of device memory.
    pub(crate) unsafe fn write(
        &mut self,
        stream: &Stream,
        address: u64,
        bytes: &[u8],
    ) -> Result<(), DriverError> {
        for (i, part) in bytes.chunks(WRITE_BYTES).enumerate() {
            if self.writes.len() < WRITE_SLOTS {
                self.writes.push(Slot::new(WRITE_BYTES)?);
            }
            let slot = &self.writes[self.next_write];
            self.next_write = (self.next_write + 1) % WRITE_SLOTS;
            slot.copied.synchronize()?;
            // SAFETY: the slot's last copy is done; `self` is borrowed exclusively; in range.
            unsafe {
                slot.memory.slice()[..part.len()].copy_from_slice(part);
                slot.send(address + (i * WRITE_BYTES) as u64, part.len(), stream)?;
            }
        }
        Ok(())
    }

    /// Copies bytes from the card, after all work of `stream` so far.
    ///
    /// # Safety
    /// `address` is valid for as many bytes of device memory.
    pub(crate) unsafe fn read(
        &mut self,
        stream: &Stream,
        address: u64,
        out: &mut [u8],
    ) -> Result<(), DriverError> {
        let memory = match self.read.take() {
            Some(memory) => memory,
            None => Pinned::new(READ_BYTES)?,
        };
        let memory = self.read.insert(memory);
        for (i, part) in out.chunks_mut(READ_BYTES).enumerate() {
            // SAFETY: in range by contract; the copy is waited for before its bytes are used.
            unsafe {
                let to = &mut memory.slice()[..part.len()];
                result::memcpy_dtoh_async(to, address + (i * READ_BYTES) as u64, stream.0)?;
                stream.synchronize()?;
                part.copy_from_slice(&memory.slice()[..part.len()]);
            }
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
        for slot in &self.writes {
            let _ = slot.copied.synchronize();
        }
    }
}
