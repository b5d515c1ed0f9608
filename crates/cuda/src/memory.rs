//! Device memory: allocated while loading, never afterwards.

use cudarc::driver::result;
use ops::{Buf, DeviceError};

use crate::gpu::{Stream, explain};

/// Small buffers are cut one after another from regions of this size.
const REGION_BYTES: usize = 32 << 20;
const ALIGN: usize = 256;

/// The allocations.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    regions: Vec<Region>,
    /// The region that small buffers are cut from, and how much of it is taken.
    open: Option<(u32, usize)>,
}

#[derive(Debug)]
struct Region {
    address: u64,
    bytes: usize,
}

impl Memory {
    /// A zeroed buffer; zeroed in order with the stream.
    pub(crate) fn alloc(
        &mut self,
        stream: &Stream,
        bytes: usize,
        what: &str,
    ) -> Result<Buf, DeviceError> {
        let out_of_memory = || DeviceError::OutOfMemory { bytes, what: what.to_owned() };
        let len = bytes.max(1).checked_next_multiple_of(ALIGN).ok_or_else(out_of_memory)?;
        if len >= REGION_BYTES / 2 {
            let alloc = self.region(stream, len).ok_or_else(out_of_memory)?;
            return Ok(Buf { alloc, offset: 0, bytes });
        }
        let (alloc, offset) = match self.open {
            Some((alloc, used)) if used + len <= REGION_BYTES => (alloc, used),
            _ => (self.region(stream, REGION_BYTES).ok_or_else(out_of_memory)?, 0),
        };
        self.open = Some((alloc, offset + len));
        Ok(Buf { alloc, offset, bytes })
    }

    fn region(&mut self, stream: &Stream, bytes: usize) -> Option<u32> {
        let index = u32::try_from(self.regions.len()).ok()?;
        // SAFETY: fresh memory of that size; the region is kept until `clear`, which waits.
        unsafe {
            let address = result::malloc_sync(bytes).ok()?;
            self.regions.push(Region { address, bytes });
            result::memset_d8_async(address, 0, bytes, stream.0).ok()?;
        }
        Some(index)
    }

    /// Allocations made.
    pub(crate) fn allocations(&self) -> u64 {
        self.regions.len() as u64
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.regions.iter().map(|r| r.bytes).sum()
    }

    /// A buffer's first byte.
    ///
    /// # Panics
    /// If the buffer lies outside its allocation.
    pub(crate) fn address(&self, buf: Buf) -> u64 {
        let region = &self.regions[buf.alloc as usize];
        assert!(
            buf.offset.checked_add(buf.bytes).is_some_and(|end| end <= region.bytes),
            "{buf:?} past its allocation of {} bytes",
            region.bytes
        );
        region.address + buf.offset as u64
    }

    /// Frees everything, once the stream is done with it.
    pub(crate) fn clear(&mut self, stream: &Stream) -> Result<(), String> {
        stream.synchronize().map_err(explain)?;
        self.open = None;
        for region in self.regions.drain(..) {
            // SAFETY: allocated above; nothing uses it any more.
            unsafe { result::free_sync(region.address) }.map_err(explain)?;
        }
        Ok(())
    }
}
