//! The seam: buffers, bindings, and the [`Op`] trait.

use std::fmt::Debug;

pub use crate::device::Mem;
use crate::kernel::{Card, Plan};
use crate::{Act, Cpu, KvDtype, KvPool};

/// A range of one device allocation. Copied freely; owns nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buf {
    /// Which allocation of the device.
    pub alloc: u32,
    /// First byte.
    pub offset: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl Buf {
    /// The part of this buffer that starts at `offset` and is `bytes` long.
    ///
    /// # Panics
    /// If the part does not lie inside the buffer.
    #[must_use]
    pub fn slice(self, offset: usize, bytes: usize) -> Buf {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "slice {offset}+{bytes} of a buffer of {} bytes",
            self.bytes
        );
        Buf { alloc: self.alloc, offset: self.offset + offset, bytes }
    }

    /// Rows `[row, row + rows)` of a row-major buffer whose rows are `row_bytes` long.
    #[must_use]
    pub fn rows(self, row: usize, rows: usize, row_bytes: usize) -> Buf {
        self.slice(row * row_bytes, rows * row_bytes)
    }

    /// Whether `count` elements of `bytes` bytes each fit.
    pub fn holds(&self, count: usize, bytes: usize) -> bool {
        count.checked_mul(bytes).is_some_and(|all| all <= self.bytes)
    }

    /// Whether two buffers share a byte.
    pub fn overlaps(&self, other: &Buf) -> bool {
        self.alloc == other.alloc
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }
}

/// How an op uses a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read.
    Read,
    /// Every element that the op defines is written; none is read.
    Write,
    /// Read and written in place.
    Update,
}

/// What a buffer holds, for whoever compares what an op wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// `f32`.
    F32,
    /// `bf16`.
    Bf16,
    /// Blocks of `codes` int8 values, each followed by an f32 scale for each of [`PAGE_TOKENS`](crate::PAGE_TOKENS) positions.
    Int8Pages {
        /// Values of a block.
        codes: usize,
    },
    /// Whole numbers, and records of 32-bit words that have only one right value.
    U32,
    /// Activation rows.
    Act(Act),
    /// Working memory: what an op leaves there is its own business.
    Scratch,
}

impl Elements {
    /// Those of a pool's keys, and of its values.
    pub fn pages(kv: &KvPool) -> Elements {
        match kv.dtype {
            KvDtype::Bf16 => Elements::Bf16,
            KvDtype::Int8 => Elements::Int8Pages { codes: kv.block() },
        }
    }
}

/// One buffer of an op.
#[derive(Clone, Copy, Debug)]
pub struct Binding {
    /// Name used in reports.
    pub name: &'static str,
    /// The buffer.
    pub buf: Buf,
    /// How the op uses it.
    pub access: Access,
    /// What it holds; for a buffer that is only read this says nothing.
    pub elements: Elements,
}

/// The buffers of one op, in kernel order. Fixed capacity: binding must not allocate.
#[derive(Debug, Default)]
pub struct Bindings {
    list: [Option<Binding>; Self::MAX],
    len: usize,
}

impl Bindings {
    /// The most buffers one op may bind.
    pub const MAX: usize = 24;

    fn push(&mut self, name: &'static str, buf: Buf, access: Access, elements: Elements) {
        assert!(self.len < Self::MAX, "an op binds more than {} buffers", Self::MAX);
        self.list[self.len] = Some(Binding { name, buf, access, elements });
        self.len += 1;
    }

    /// A buffer that is only read.
    pub fn read(&mut self, name: &'static str, buf: Buf) {
        self.push(name, buf, Access::Read, Elements::F32);
    }

    /// A buffer of f32 that is only written.
    pub fn write(&mut self, name: &'static str, buf: Buf) {
        self.write_as(name, buf, Elements::F32);
    }

    /// A buffer that is only written.
    pub fn write_as(&mut self, name: &'static str, buf: Buf, elements: Elements) {
        self.push(name, buf, Access::Write, elements);
    }

    /// Activation rows that are only written.
    pub fn write_act(&mut self, name: &'static str, act: Act) {
        self.write_as(name, act.buf, Elements::Act(act));
    }

    /// A buffer of f32 that is read and written.
    pub fn update(&mut self, name: &'static str, buf: Buf) {
        self.update_as(name, buf, Elements::F32);
    }

    /// A buffer that is read and written.
    pub fn update_as(&mut self, name: &'static str, buf: Buf, elements: Elements) {
        self.push(name, buf, Access::Update, elements);
    }

    /// The bindings, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Binding> {
        self.list[..self.len].iter().flatten()
    }

    /// The first pair of bindings of which one is written and the other shares bytes with it.
    pub fn conflict(&self) -> Option<(&Binding, &Binding)> {
        for (i, a) in self.iter().enumerate() {
            for b in self.iter().skip(i + 1) {
                if (a.access != Access::Read || b.access != Access::Read) && a.buf.overlaps(&b.buf)
                {
                    return Some((a, b));
                }
            }
        }
        None
    }
}

/// What one run of an op moves and computes, at least.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Bytes of weights read.
    pub weight_bytes: u64,
    /// Bytes of state, cache and activations read and written.
    pub other_bytes: u64,
    /// Multiplies and adds, counted apart.
    pub flops: u64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.weight_bytes += other.weight_bytes;
        self.other_bytes += other.other_bytes;
        self.flops += other.flops;
    }
}

/// An element of an output as a card may have it: see [`Op::rounded`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rounded {
    /// With every rounding that can be repeated.
    pub want: f32,
    /// How far from it the others may lead.
    pub within: f32,
}

impl Rounded {
    /// Whether a card may have this. A bound without an end bounds nothing.
    pub(crate) fn allows(self, got: f32) -> bool {
        let Rounded { want, within } = self;
        (within.is_finite() && (want - got).abs() <= within) || (want.is_nan() && got.is_nan())
    }
}

/// A geometry that an op can't compute, found before anything runs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {what} (supported: {limit})")]
pub struct Unsupported {
    /// The op's name.
    pub op: &'static str,
    /// The offending quantity with its value.
    pub what: String,
    /// What would be supported.
    pub limit: String,
}

impl Unsupported {
    /// An error unless `ok`.
    pub fn unless(
        ok: bool,
        op: &'static str,
        what: impl FnOnce() -> String,
        limit: &str,
    ) -> Result<(), Unsupported> {
        if ok { Ok(()) } else { Err(Unsupported { op, what: what(), limit: limit.to_owned() }) }
    }
}

/// One fused operation on device buffers. Plain data: no device type, no lifetime.
pub trait Op: Debug {
    /// The folder's name, also used in reports.
    fn name(&self) -> &'static str;

    /// The op's buffers. A written buffer may not overlap any other; devices rely on it.
    fn bind(&self, bindings: &mut Bindings);

    /// The geometry that every implementation may rely on, buffer sizes included.
    fn check(&self) -> Result<(), Unsupported>;

    /// Bytes and flops of one run.
    fn cost(&self) -> Cost;

    /// The definition: scalar and plain.
    fn reference(&self, mem: &Mem);

    /// For ops whose operands cards round to bf16 on the way to their matrix units: what `out` is with these roundings, and
    /// how far from it a card may be for those that can't be repeated; element by element. Called after the definition ran.
    fn rounded(&self, _mem: &Mem) -> Option<Vec<Rounded>> {
        None
    }

    /// The SIMD implementation.
    fn host(&self, mem: &Mem, cpu: &Cpu);

    /// The launches that compute the op on an NVIDIA card.
    ///
    /// # Errors
    /// Geometry that the kernels can't do, or an op without kernels.
    fn cuda(&self, _card: &Card, _plan: &mut Plan) -> Result<(), Unsupported> {
        let (what, limit) = ("CUDA".to_owned(), "the CPU".to_owned());
        Err(Unsupported { op: self.name(), what, limit })
    }

    /// The implementation that `host` picks on this machine, for reports.
    fn route(&self, cpu: &Cpu) -> &'static str {
        cpu.isa.name()
    }
}

#[cfg(test)]
mod tests {
    use super::Rounded;

    #[test]
    fn a_bound_must_bound() {
        let allows = |want, within, got| Rounded { want, within }.allows(got);
        assert!(allows(1.0, 0.5, 1.5) && allows(f32::NAN, f32::NAN, f32::NAN));
        assert!(!allows(1.0, 0.5, 1.75) && !allows(1.0, 0.5, f32::NAN));
        assert!(!allows(f32::NAN, 0.5, 1.0) && !allows(1.0, f32::NAN, 1.5));
        assert!(!allows(1.0, f32::INFINITY, 1.5), "scores so large that weights may be anything");
    }
}
