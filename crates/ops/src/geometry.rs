//! What several ops' `check` and kernels share: buffer sizes without overflow, the lanes of a
//! pass, and the grain of parallel work.

use crate::{Buf, LaneStep, Lanes, Mem, Unsupported};

/// Bytes of an f32 array of these dimensions, unless that overflows.
pub(crate) fn f32_bytes(dims: &[usize]) -> Option<usize> {
    dims.iter().try_fold(4usize, |bytes, &dim| bytes.checked_mul(dim))
}

/// Whether `buf` holds that many elements of `element_bytes`, without overflow on the way.
pub(crate) fn elements_fit(buf: Buf, shape: &[usize], element_bytes: usize) -> bool {
    let bytes = shape.iter().try_fold(element_bytes, |bytes, &n| bytes.checked_mul(n));
    bytes.is_some_and(|bytes| bytes <= buf.bytes)
}

/// Whether the buffer has room for an f32 array of these dimensions.
pub(crate) fn holds(buf: Buf, dims: &[usize]) -> bool {
    elements_fit(buf, dims, 4)
}

/// Whether the buffer is exactly an f32 array of these dimensions.
pub(crate) fn is(buf: Buf, dims: &[usize]) -> bool {
    f32_bytes(dims) == Some(buf.bytes)
}

/// How many records of this many bytes the buffer holds, if it is a whole number of them.
pub(crate) fn records(buf: Buf, record: Option<usize>) -> Option<usize> {
    record.filter(|&r| r > 0 && buf.bytes.is_multiple_of(r)).map(|r| buf.bytes / r)
}

impl Lanes {
    /// The sizes that every op over lanes relies on.
    pub(crate) fn check(&self, op: &'static str) -> Result<(), Unsupported> {
        let step = elements_fit(self.step, &[self.count], size_of::<LaneStep>());
        let rows = self.max_rows <= self.rows;
        let what = || format!("{self:?}");
        Unsupported::unless(step && rows, op, what, "[count] of LaneStep, max_rows <= rows")
    }

    /// The lanes' shares of this pass.
    ///
    /// # Panics
    /// If a lane's rows lie outside the pass.
    pub(crate) fn steps<'m>(&self, mem: &'m Mem) -> &'m [LaneStep] {
        let steps = mem.get::<LaneStep>(self.step.slice(0, self.count * size_of::<LaneStep>()));
        for step in steps {
            let end = step.row0 as usize + step.rows as usize;
            let fits = end <= self.rows && step.rows as usize <= self.max_rows;
            assert!(fits, "{step:?} outside a pass of {self:?}");
        }
        steps
    }
}

/// Items for one chunk of parallel work, so that a chunk holds about `chunk` units of work when an
/// item holds `item`. Never changes a result.
pub(crate) fn grain(chunk: usize, item: usize) -> usize {
    (chunk / item.max(1)).max(1)
}

/// Whether kernels may read and write these buffers 16 bytes at a time from their start: allocations
/// of a card are aligned far beyond that.
pub(crate) fn aligned(bufs: &[Buf]) -> bool {
    bufs.iter().all(|buf| buf.offset.is_multiple_of(16))
}

/// Refuses buffers that aren't [`aligned`].
pub(crate) fn must_align(op: &'static str, bufs: &[Buf]) -> Result<(), Unsupported> {
    let what = || format!("offsets {:?}", bufs.iter().map(|b| b.offset).collect::<Vec<_>>());
    Unsupported::unless(aligned(bufs), op, what, "multiples of 16 bytes on CUDA")
}
