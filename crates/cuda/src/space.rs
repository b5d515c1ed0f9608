//! A range of device addresses, into which memory is mapped as it is needed.

use std::mem::MaybeUninit;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use crate::gpu::{Gpu, Stream};

/// Addresses for all the memory of a card; memory behind the first `mapped` bytes, of which `used` are taken.
#[derive(Debug)]
pub(crate) struct Space {
    address: u64,
    reserved: usize,
    granularity: usize,
    location: sys::CUmemLocation,
    parts: Vec<Part>,
    mapped: usize,
    used: usize,
}

#[derive(Debug)]
struct Part {
    handle: sys::CUmemGenericAllocationHandle,
    bytes: usize,
}

impl Space {
    /// Reserves `bytes` of addresses. Not every driver can.
    pub(crate) fn reserve(gpu: &Gpu, bytes: usize) -> Result<Space, DriverError> {
        let able =
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
        // SAFETY: a device that is open.
        if unsafe { result::device::get_attribute(gpu.ordinal(), able)? } == 0 {
            return Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED));
        }
        let kind = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let location = sys::CUmemLocation { type_: kind, id: gpu.ordinal() };
        let mut granularity = 0;
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut address = 0;
        let reserved;
        // SAFETY: the driver writes a number each; nothing is mapped yet.
        unsafe {
            let made =
                sys::cuMemGetAllocationGranularity(&mut granularity, &properties(location), least);
            made.result()?;
            reserved = bytes.next_multiple_of(granularity.max(1));
            sys::cuMemAddressReserve(&mut address, reserved, 0, 0, 0).result()?;
        }
        let parts = Vec::new();
        Ok(Space { address, reserved, granularity, location, parts, mapped: 0, used: 0 })
    }

    /// The next `bytes`, zeroed in order with the stream.
    pub(crate) fn take(&mut self, stream: &Stream, bytes: usize) -> Result<u64, DriverError> {
        let missing = bytes.saturating_sub(self.mapped - self.used);
        if missing > 0 {
            self.grow(stream, missing)?;
        }
        let address = self.address + self.used as u64;
        self.used += bytes;
        Ok(address)
    }

    /// Bytes that there is memory for.
    pub(crate) fn mapped(&self) -> usize {
        self.mapped
    }

    /// Times that memory was asked for.
    pub(crate) fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Gives memory and addresses back.
    ///
    /// # Safety
    /// Nothing uses them any more.
    pub(crate) unsafe fn free(self) -> Result<(), DriverError> {
        let mut at = self.address;
        // SAFETY: mapped by `grow`, reserved by `reserve`; the caller's promise.
        unsafe {
            for Part { handle, bytes } in self.parts {
                sys::cuMemUnmap(at, bytes).result()?;
                sys::cuMemRelease(handle).result()?;
                at += bytes as u64;
            }
            sys::cuMemAddressFree(self.address, self.reserved).result()
        }
    }

    /// Maps at least `bytes` more.
    fn grow(&mut self, stream: &Stream, bytes: usize) -> Result<(), DriverError> {
        let out_of_memory = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let bytes = bytes.checked_next_multiple_of(self.granularity).ok_or(out_of_memory)?;
        if bytes > self.reserved - self.mapped {
            return Err(out_of_memory);
        }
        let at = self.address + self.mapped as u64;
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: self.location, flags };
        let mut handle = 0;
        // SAFETY: fresh memory into addresses that are reserved and free; undone if that fails half way.
        unsafe {
            sys::cuMemCreate(&mut handle, bytes, &properties(self.location), 0).result()?;
            if let Err(error) = sys::cuMemMap(at, bytes, 0, handle, 0).result() {
                let _ = sys::cuMemRelease(handle);
                return Err(error);
            }
            if let Err(error) = sys::cuMemSetAccess(at, bytes, &access, 1).result() {
                let _ = (sys::cuMemUnmap(at, bytes), sys::cuMemRelease(handle));
                return Err(error);
            }
        }
        self.parts.push(Part { handle, bytes });
        self.mapped += bytes;
        // SAFETY: just mapped, and kept until `free`.
        unsafe { result::memset_d8_async(at, 0, bytes, stream.0) }
    }
}

/// Memory of the card that stays where it is.
fn properties(location: sys::CUmemLocation) -> sys::CUmemAllocationProp {
    let none = MaybeUninit::<sys::CUmemAllocationProp>::zeroed();
    // SAFETY: numbers, a null pointer, and enums that have a zero.
    let none = unsafe { none.assume_init() };
    let kind = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    sys::CUmemAllocationProp { type_: kind, location, ..none }
}
