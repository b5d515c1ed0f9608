//! Device memory: allocated while loading, never afterwards.
//!
//! Buffers lie one after another in one [`Space`]. An allocation each would take up to 2 MiB more than a buffer has, some
//! hundred MB for a large model. Where the driver can't map memory into reserved addresses, large buffers have
//! allocations of their own and small ones are cut from regions.

use cudarc::driver::result::{self, DriverError};
use ops::{Buf, DeviceError};

use crate::gpu::{Gpu, Stream, explain};
use crate::space::Space;

const REGION_BYTES: usize = 32 << 20;
const ALIGN: usize = 256;

/// The allocations.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// Asked for with the first buffer: none if the driver has none.
    space: Option<Option<Space>>,
    /// Bytes of the space that are taken.
    used: usize,
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
        gpu: &Gpu,
        stream: &Stream,
        bytes: usize,
        what: &str,
    ) -> Result<Buf, DeviceError> {
        let out_of_memory = || DeviceError::OutOfMemory { bytes, what: what.to_owned() };
        let len = bytes.max(1).checked_next_multiple_of(ALIGN).ok_or_else(out_of_memory)?;
        let space = self.space.get_or_insert_with(|| {
            let all = result::mem_get_info().ok()?.1;
            Space::reserve(gpu, all).ok()
        });
        let place = match space {
            Some(space) => take(space, &mut self.used, stream, len).ok().map(|offset| (0, offset)),
            None => self.cut(stream, len),
        };
        let (alloc, offset) = place.ok_or_else(out_of_memory)?;
        Ok(Buf { alloc, offset, bytes })
    }

    /// Without a space: which region, and where in it.
    fn cut(&mut self, stream: &Stream, len: usize) -> Option<(u32, usize)> {
        if len >= REGION_BYTES / 2 {
            return Some((self.region(stream, len)?, 0));
        }
        let (alloc, offset) = match self.open {
            Some((alloc, used)) if used + len <= REGION_BYTES => (alloc, used),
            _ => (self.region(stream, REGION_BYTES)?, 0),
        };
        self.open = Some((alloc, offset + len));
        Some((alloc, offset))
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

    fn space(&self) -> Option<&Space> {
        self.space.as_ref()?.as_ref()
    }

    /// Allocations made.
    pub(crate) fn allocations(&self) -> u64 {
        (self.space().map_or(0, Space::parts) + self.regions.len()) as u64
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        let regions = self.regions.iter().map(|r| r.bytes).sum::<usize>();
        self.space().map_or(0, Space::mapped) + regions
    }

    /// A buffer's first byte.
    ///
    /// # Panics
    /// If the buffer lies outside its allocation.
    pub(crate) fn address(&self, buf: Buf) -> u64 {
        let (address, bytes) = match self.space() {
            Some(space) => (space.address(), self.used),
            None => {
                let region = &self.regions[buf.alloc as usize];
                (region.address, region.bytes)
            }
        };
        assert!(
            buf.offset.checked_add(buf.bytes).is_some_and(|end| end <= bytes),
            "{buf:?} past its allocation of {bytes} bytes"
        );
        address + buf.offset as u64
    }

    /// Frees everything, once the stream is done with it.
    pub(crate) fn clear(&mut self, stream: &Stream) -> Result<(), String> {
        stream.synchronize().map_err(explain)?;
        (self.open, self.used) = (None, 0);
        if let Some(space) = self.space.take().flatten() {
            // SAFETY: buffers lose their meaning with this call.
            unsafe { space.free() }.map_err(explain)?;
        }
        for region in self.regions.drain(..) {
            // SAFETY: allocated above; nothing uses it any more.
            unsafe { result::free_sync(region.address) }.map_err(explain)?;
        }
        Ok(())
    }
}

/// The next `len` bytes of a space, of which `used` are taken; zeroed.
fn take(
    space: &mut Space,
    used: &mut usize,
    stream: &Stream,
    len: usize,
) -> Result<usize, DriverError> {
    let offset = *used;
    let missing = len.saturating_sub(space.mapped() - offset);
    if missing > 0 {
        let at = space.address() + space.mapped() as u64;
        let bytes = space.grow(missing)?;
        // SAFETY: just mapped, and kept until `clear`, which waits.
        unsafe { result::memset_d8_async(at, 0, bytes, stream.0)? };
    }
    *used += len;
    Ok(offset)
}
