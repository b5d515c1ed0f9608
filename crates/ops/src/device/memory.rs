//! Host memory in 2 MiB pages.

use crate::Buf;
use crate::device::DeviceError;

const HUGE_PAGE: usize = 2 << 20;
const REGION_BYTES: usize = 16 << 20;

/// The allocations of a host device.
///
/// Accessors hand out slices from a shared reference, so that the threads of one op can write
/// disjoint parts of a buffer. They are crate-private: a device checks before each op that a
/// written binding overlaps no other ([`crate::Bindings::conflict`]), an op touches its bindings
/// only, and its threads split what they write.
#[derive(Debug, Default)]
pub struct Mem {
    regions: Vec<Region>,
    /// The region that small buffers are cut from, and how much of it is taken.
    open: Option<(u32, usize)>,
}

#[derive(Debug)]
struct Region {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: a region is owned memory that outlives every use; see `Mem` on who may touch it.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Mem {
    /// A zeroed buffer, 64-byte aligned. Large ones get their own region; small ones are cut one
    /// after another from a shared region, so that they too lie in huge pages.
    pub(crate) fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError> {
        let len = bytes.max(1).checked_next_multiple_of(64);
        let out_of_memory = || DeviceError::OutOfMemory { bytes, what: what.to_owned() };
        let len = len.ok_or_else(out_of_memory)?;
        if len >= REGION_BYTES / 2 {
            let alloc = self.map(len).ok_or_else(out_of_memory)?;
            return Ok(Buf { alloc, offset: 0, bytes });
        }
        let (alloc, offset) = match self.open {
            Some((alloc, used)) if used + len <= REGION_BYTES => (alloc, used),
            _ => (self.map(REGION_BYTES).ok_or_else(out_of_memory)?, 0),
        };
        self.open = Some((alloc, offset + len));
        Ok(Buf { alloc, offset, bytes })
    }

    fn map(&mut self, len: usize) -> Option<u32> {
        let index = u32::try_from(self.regions.len()).ok()?;
        self.regions.push(Region { ptr: map_zeroed(len)?, len });
        Some(index)
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.regions.iter().map(|r| r.len).sum()
    }

    fn ptr<T: bytemuck::Pod>(&self, buf: Buf) -> (*mut T, usize) {
        let region = &self.regions[buf.alloc as usize];
        assert!(buf.offset + buf.bytes <= region.len, "buffer past its allocation");
        assert!(
            buf.bytes.is_multiple_of(size_of::<T>()),
            "{} bytes of {}",
            buf.bytes,
            size_of::<T>()
        );
        // SAFETY: the offset lies inside the region, checked above.
        let ptr = unsafe { region.ptr.add(buf.offset) };
        assert!(ptr.addr().is_multiple_of(align_of::<T>()), "misaligned buffer");
        (ptr.cast(), buf.bytes / size_of::<T>())
    }

    /// A buffer's contents.
    pub(crate) fn get<T: bytemuck::Pod>(&self, buf: Buf) -> &[T] {
        let (ptr, len) = self.ptr(buf);
        // SAFETY: in bounds and aligned; any bytes are a valid `T`; not written meanwhile (`Mem`).
        unsafe { std::slice::from_raw_parts(ptr, len) }
    }

    /// A buffer's contents, to be written.
    #[expect(clippy::mut_from_ref, reason = "threads of one op write disjoint parts, see `Mem`")]
    pub(crate) fn get_mut<T: bytemuck::Pod>(&self, buf: Buf) -> &mut [T] {
        let (ptr, len) = self.ptr(buf);
        // SAFETY: in bounds and aligned; any bytes are a valid `T`; nobody else touches this part
        // while the slice lives (`Mem`).
        unsafe { std::slice::from_raw_parts_mut(ptr, len) }
    }
}

impl Drop for Mem {
    fn drop(&mut self) {
        for region in self.regions.drain(..) {
            // SAFETY: allocated by `map_zeroed` with this length, and dropped once.
            unsafe { unmap(region.ptr, region.len) };
        }
    }
}

fn layout(len: usize) -> Option<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(len.checked_next_multiple_of(HUGE_PAGE)?, HUGE_PAGE).ok()
}

fn map_zeroed(len: usize) -> Option<*mut u8> {
    let layout = layout(len)?;
    #[cfg(target_os = "linux")]
    return map_huge(layout.size());
    #[cfg(not(target_os = "linux"))]
    {
        // SAFETY: the layout has a non-zero size.
        let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
        (!ptr.is_null()).then_some(ptr)
    }
}

/// An anonymous mapping whose start is 2 MiB aligned, advised to use huge pages. Twice the read
/// bandwidth of 4 KiB pages on the machines measured (docs/benchmarks.md).
#[cfg(target_os = "linux")]
fn map_huge(size: usize) -> Option<*mut u8> {
    let total = size.checked_add(HUGE_PAGE)?;
    // SAFETY: a fresh anonymous mapping; the trimmed ends are not used again.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let raw = libc::mmap(std::ptr::null_mut(), total, prot, flags, -1, 0);
        if raw == libc::MAP_FAILED {
            return None;
        }
        let head = raw.addr().next_multiple_of(HUGE_PAGE) - raw.addr();
        let start = raw.cast::<u8>().add(head);
        if head > 0 {
            libc::munmap(raw, head);
        }
        if HUGE_PAGE > head {
            libc::munmap(start.add(size).cast(), HUGE_PAGE - head);
        }
        // A kernel without huge pages refuses the advice; the memory works all the same.
        libc::madvise(start.cast(), size, libc::MADV_HUGEPAGE);
        Some(start)
    }
}

/// # Safety
/// `ptr` came from `map_zeroed(len)` and is not used again.
unsafe fn unmap(ptr: *mut u8, len: usize) {
    let Some(layout) = layout(len) else { return };
    // SAFETY: the whole mapping made by `map_huge`, or an allocation with this layout.
    unsafe {
        #[cfg(target_os = "linux")]
        libc::munmap(ptr.cast(), layout.size());
        #[cfg(not(target_os = "linux"))]
        std::alloc::dealloc(ptr, layout);
    }
}
