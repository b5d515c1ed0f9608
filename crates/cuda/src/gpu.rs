//! The card: its context, what it is, and what the driver says.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use ops::kernel::Card;

/// Why no card can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// There is no driver library.
    #[error("no NVIDIA driver on this machine (libcuda.so.1 can't be loaded)")]
    NoDriver,
    /// The driver has no such card.
    #[error("the NVIDIA driver has no device {ordinal} ({count} found)")]
    NoDevice {
        /// Asked for.
        ordinal: usize,
        /// There are.
        count: usize,
    },
    /// Kernels can't be compiled.
    #[error("{0}")]
    NoCompiler(String),
    /// The driver refused.
    #[error("the NVIDIA driver failed to {what}: {why}")]
    Driver {
        /// What it was asked to do.
        what: &'static str,
        /// What it said.
        why: String,
    },
}

/// The driver's error by name and in words.
pub(crate) fn explain(error: DriverError) -> String {
    let name = error.error_name().map(|s| s.to_string_lossy().into_owned());
    let words = error.error_string().map(|s| s.to_string_lossy().into_owned());
    match (name, words) {
        (Ok(name), Ok(words)) => format!("{name}: {words}"),
        _ => format!("error {}", error.0 as u32),
    }
}

/// Of a thread's calls: kernels here are inlined whole.
const STACK_BYTES: usize = 128;

/// A retained primary context.
#[derive(Debug)]
pub(crate) struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    pub(crate) name: String,
    pub(crate) card: Card,
}

// SAFETY: a context may be used from any thread once it is current there (`Gpu::enter`).
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Gpu {}

impl Gpu {
    pub(crate) fn open(ordinal: usize) -> Result<Gpu, OpenError> {
        // SAFETY: only tries to load the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(OpenError::NoDriver);
        }
        let failed = |what| move |e| OpenError::Driver { what, why: explain(e) };
        match result::init() {
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => {
                return Err(OpenError::NoDevice { ordinal, count: 0 });
            }
            started => started.map_err(failed("start"))?,
        }
        let count = result::device::get_count().map_err(failed("count its devices"))?;
        let count = usize::try_from(count).unwrap_or(0);
        let index = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
        let index = index.ok_or(OpenError::NoDevice { ordinal, count })?;
        let device = result::device::get(index).map_err(failed("open the device"))?;
        let name = result::device::get_name(device).map_err(failed("name the device"))?;
        use sys::CUdevice_attribute as A;
        let attribute = |what: A| -> Result<u32, OpenError> {
            // SAFETY: a device that the driver returned.
            let value = unsafe { result::device::get_attribute(device, what) };
            Ok(value.map_err(failed("describe the device"))? as u32)
        };
        let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let card = Card {
            arch: 10 * major + minor,
            sms: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        };
        // SAFETY: as above; released when dropped.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = context.map_err(failed("make a context"))?;
        let gpu = Gpu { device, context, name, card };
        gpu.enter().map_err(failed("make a context"))?;
        // By default each thread that fits the card has a stack of 1 KiB, which is hundreds of MB; what a kernel
        // spills is provided for when it is loaded.
        let _ = result::ctx::set_limit(sys::CUlimit::CU_LIMIT_STACK_SIZE, STACK_BYTES);
        Ok(gpu)
    }

    /// The card's number.
    pub(crate) fn ordinal(&self) -> i32 {
        self.device
    }

    /// Makes the context current on this thread.
    pub(crate) fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: retained until drop.
        unsafe { result::ctx::set_current(self.context) }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`. A context that failed can't be released; nothing to do then.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Page-locked host memory. The CPU reads it at full speed (it isn't write-combined).
#[derive(Debug)]
pub(crate) struct Pinned {
    ptr: *mut u8,
    bytes: usize,
}

// SAFETY: owned memory.
unsafe impl Send for Pinned {}
// SAFETY: shared access is through `slice`'s caller, who holds to its contract.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(bytes: usize) -> Result<Pinned, DriverError> {
        let mut ptr = MaybeUninit::<*mut c_void>::uninit();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: `ptr` is written on success; freed once, when dropped.
        let ptr = unsafe {
            sys::cuMemHostAlloc(ptr.as_mut_ptr(), bytes.max(1), flags).result()?;
            ptr.assume_init().cast::<u8>()
        };
        // SAFETY: fresh memory of that size.
        unsafe { ptr.write_bytes(0, bytes) };
        Ok(Pinned { ptr, bytes })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first byte's address, the same on host and card.
    pub(crate) fn address(&self) -> u64 {
        self.ptr.addr() as u64
    }

    /// A word that the card may be writing.
    ///
    /// # Safety
    /// `offset` is a multiple of 4 inside the memory.
    pub(crate) unsafe fn read_u32(&self, offset: usize) -> u32 {
        // SAFETY: by contract.
        unsafe { self.ptr.add(offset).cast::<u32>().read_volatile() }
    }

    /// The memory.
    ///
    /// # Safety
    /// Neither a copy in flight nor another thread touches it while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "see Safety")]
    pub(crate) unsafe fn slice(&self) -> &mut [u8] {
        // SAFETY: owned, of that size; exclusive by contract.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`. Fails only where the context is lost, and the memory with it.
        let _ = unsafe { result::free_host(self.ptr.cast()) };
    }
}

/// A stream of its own.
#[derive(Debug)]
pub(crate) struct Stream(pub(crate) sys::CUstream);

// SAFETY: a handle; the driver locks.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new() -> Result<Stream, DriverError> {
        Ok(Stream(result::stream::create(result::stream::StreamKind::NonBlocking)?))
    }

    pub(crate) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: alive until drop.
        unsafe { result::stream::synchronize(self.0) }
    }

    /// Whether all work is done.
    pub(crate) fn idle(&self) -> Result<bool, DriverError> {
        // SAFETY: alive.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => other.result().map(|()| true),
        }
    }

    /// Later work of this stream waits for the event.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), DriverError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both alive.
        unsafe { result::stream::wait_event(self.0, event.0, flags) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created in `new`.
        let _ = unsafe { result::stream::destroy(self.0) };
    }
}

/// An event.
#[derive(Debug)]
pub(crate) struct Event(sys::CUevent);

// SAFETY: a handle; the driver locks.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// One that only orders.
    pub(crate) fn new() -> Result<Event, DriverError> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        Ok(Event(result::event::create(flags)?))
    }

    /// One that also tells the time.
    pub(crate) fn timed() -> Result<Event, DriverError> {
        Ok(Event(result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?))
    }

    pub(crate) fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: both alive.
        unsafe { result::event::record(self.0, stream.0) }
    }

    /// Records inside a graph, so that each launch of the graph records again.
    pub(crate) fn record_in_graph(&self, stream: &Stream) -> Result<(), DriverError> {
        let flags = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: both alive; the graph's owner keeps the event as long as the graph.
        unsafe { sys::cuEventRecordWithFlags(self.0, stream.0, flags) }.result()
    }

    /// Waits for what was recorded last; returns at once if nothing was.
    pub(crate) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: alive.
        unsafe { result::event::synchronize(self.0) }
    }

    /// Seconds from `start` to this event, both complete.
    pub(crate) fn seconds_since(&self, start: &Event) -> Result<f64, DriverError> {
        // SAFETY: both alive.
        Ok(f64::from(unsafe { result::event::elapsed(start.0, self.0) }?) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `new` or `timed`.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
