//! Device memory: allocated while loading, never afterwards.
//!
//! Buffers lie one after another in one [`Space`]. An allocation each would take up to 2 MiB more than a buffer has, some
//! hundred MB for a large model. Where the driver can't map memory into reserved addresses, large buffers have
//! allocations of their own and small ones are cut from regions.

use cudarc::driver::result::{self, DriverError};
use ops::{Buf, DeviceError};

use crate::gpu::{Gpu, Stream, explain};
use crate::space::Space;

const ALIGN: usize = 256;
/// What small buffers are cut from.
const REGION_BYTES: usize = 32 << 20;

/// Where buffers are.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// By their number.
    buffers: Vec<Range>,
    source: Option<Source>,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    address: u64,
    bytes: usize,
}

/// Where memory comes from.
#[derive(Debug)]
enum Source {
    Space(Space),
    Regions {
        regions: Vec<Range>,
        /// What is left of the region that small buffers are cut from.
        open: Range,
    },
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
        let alloc = u32::try_from(self.buffers.len()).map_err(|_| out_of_memory())?;
        let source = self.source.get_or_insert_with(|| Source::of(gpu));
        let address = source.take(stream, len).map_err(|_| out_of_memory())?;
        self.buffers.push(Range { address, bytes: len });
        Ok(Buf { alloc, offset: 0, bytes })
    }

    /// Times that the driver was asked for memory.
    pub(crate) fn allocations(&self) -> u64 {
        match &self.source {
            Some(Source::Space(space)) => space.parts() as u64,
            Some(Source::Regions { regions, .. }) => regions.len() as u64,
            None => 0,
        }
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        match &self.source {
            Some(Source::Space(space)) => space.mapped(),
            Some(Source::Regions { regions, .. }) => regions.iter().map(|r| r.bytes).sum(),
            None => 0,
        }
    }

    /// A buffer's first byte.
    ///
    /// # Panics
    /// If the buffer lies outside its allocation.
    pub(crate) fn address(&self, buf: Buf) -> u64 {
        let Range { address, bytes } = self.buffers[buf.alloc as usize];
        assert!(
            buf.offset.checked_add(buf.bytes).is_some_and(|end| end <= bytes),
            "{buf:?} past its allocation of {bytes} bytes"
        );
        address + buf.offset as u64
    }

    /// Frees everything, once the stream is done with it.
    pub(crate) fn clear(&mut self, stream: &Stream) -> Result<(), String> {
        stream.synchronize().map_err(explain)?;
        self.buffers.clear();
        match self.source.take() {
            // SAFETY: buffers have just lost their meaning, and the stream is done with them.
            Some(Source::Space(space)) => unsafe { space.free() }.map_err(explain),
            Some(Source::Regions { regions, .. }) => {
                // SAFETY: as above; `region` allocated it.
                let free = |region: Range| unsafe { result::free_sync(region.address) };
                regions.into_iter().try_for_each(free).map_err(explain)
            }
            None => Ok(()),
        }
    }
}

impl Source {
    /// A space if the driver has one, of as many addresses as the card has memory.
    fn of(gpu: &Gpu) -> Source {
        let space = result::mem_get_info().and_then(|(_, all)| Space::reserve(gpu, all));
        match space {
            Ok(space) => Source::Space(space),
            Err(_) => Source::Regions { regions: Vec::new(), open: Range { address: 0, bytes: 0 } },
        }
    }

    /// `len` zeroed bytes.
    fn take(&mut self, stream: &Stream, len: usize) -> Result<u64, DriverError> {
        match self {
            Source::Space(space) => space.take(stream, len),
            Source::Regions { regions, .. } if len >= REGION_BYTES / 2 => {
                region(regions, stream, len)
            }
            Source::Regions { regions, open } => {
                if open.bytes < len {
                    let address = region(regions, stream, REGION_BYTES)?;
                    *open = Range { address, bytes: REGION_BYTES };
                }
                let address = open.address;
                *open = Range { address: address + len as u64, bytes: open.bytes - len };
                Ok(address)
            }
        }
    }
}

/// An allocation of its own, zeroed.
fn region(regions: &mut Vec<Range>, stream: &Stream, bytes: usize) -> Result<u64, DriverError> {
    // SAFETY: fresh memory of that size, kept until `clear`, which waits.
    unsafe {
        let address = result::malloc_sync(bytes)?;
        regions.push(Range { address, bytes });
        result::memset_d8_async(address, 0, bytes, stream.0)?;
        Ok(address)
    }
}
