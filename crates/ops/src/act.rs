//! Activation rows: the inputs of linear layers.

use crate::simd::{LANES, Simd};
use crate::{Buf, Mem, Unsupported};

/// Elements that share one scale in quantised activations.
pub const ACT_GROUP: usize = 64;

/// How the rows that feed linear layers are stored. Chosen once, at load, for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActDtype {
    /// f32 only: the exact path, used by tests and by models with dense weights.
    F32,
    /// f32, and beside it int8 with one [`ActGroup`] for each [`ACT_GROUP`] elements.
    I8,
    /// bf16 only, rounded to nearest even: what tensor cores read. No CPU kernel reads or writes it.
    Bf16,
}

/// What a kernel needs to know of [`ACT_GROUP`] consecutive int8 values `q`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct ActGroup {
    /// x = scale · q.
    pub scale: f32,
    /// Σ q, as integers: over the group, over its two halves, over its four quarters.
    pub sums: [f32; 7],
}

impl ActGroup {
    /// Where [`ActGroup::sums`] holds the sum over part `part` of `parts` (1, 2 or 4) equal parts.
    #[inline(always)]
    pub const fn sum_index(parts: usize, part: usize) -> usize {
        parts - 1 + part
    }
}

/// Rows of activations, each row stored as
/// `f32[width]`, then for [`ActDtype::I8`] `i8[width]` and `ActGroup[width / ACT_GROUP]`;
/// for [`ActDtype::Bf16`] as `bf16[width]`.
///
/// Quantisation of a group: `scale = max|x| / 127` (0 for an all-zero group), `q = round half to
/// even (x / scale)`, computed as `x · (127 / max|x|)` in f32. A row is padded to a multiple of 64 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Act {
    /// The rows.
    pub buf: Buf,
    /// Elements of one row. A multiple of [`ACT_GROUP`] when quantised.
    pub width: usize,
    /// Storage.
    pub dtype: ActDtype,
}

impl Act {
    /// Bytes from one row to the next.
    pub fn stride(width: usize, dtype: ActDtype) -> usize {
        Self::used(width, dtype).next_multiple_of(64)
    }

    /// Bytes of a row without its padding.
    pub(crate) fn used(width: usize, dtype: ActDtype) -> usize {
        match dtype {
            ActDtype::F32 => 4 * width,
            ActDtype::I8 => 5 * width + size_of::<ActGroup>() * (width / ACT_GROUP),
            ActDtype::Bf16 => 2 * width,
        }
    }

    /// Byte offset of the int8 values inside a row.
    pub fn quants_offset(&self) -> usize {
        4 * self.width
    }

    /// Byte offset of the groups inside a row.
    pub fn groups_offset(&self) -> usize {
        5 * self.width
    }

    /// Bytes from one row of this buffer to the next.
    pub fn row_bytes(&self) -> usize {
        Self::stride(self.width, self.dtype)
    }

    /// Rows that fit the buffer.
    pub fn rows(&self) -> usize {
        self.buf.bytes / self.row_bytes().max(1)
    }
}

/// One row of an [`Act`] on the CPU, split into its parts. The last two are empty for
/// [`ActDtype::F32`].
#[derive(Clone, Copy)]
pub(crate) struct ActRow<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) quants: &'a [i8],
    pub(crate) groups: &'a [ActGroup],
}

/// One row of an [`Act`], to be written.
pub(crate) struct ActRowMut<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) quants: &'a mut [i8],
    pub(crate) groups: &'a mut [ActGroup],
}

impl Act {
    /// # Panics
    /// For bf16, which the CPU has no kernels for.
    fn parts(&self, row: usize) -> [Buf; 3] {
        assert!(self.dtype != ActDtype::Bf16, "bf16 activation rows are for GPUs, not the CPU");
        let row = self.buf.rows(row, 1, self.row_bytes());
        let x = row.slice(0, 4 * self.width);
        if self.dtype == ActDtype::F32 {
            let none = row.slice(0, 0);
            return [x, none, none];
        }
        let groups = size_of::<ActGroup>() * (self.width / ACT_GROUP);
        [x, row.slice(self.quants_offset(), self.width), row.slice(self.groups_offset(), groups)]
    }

    pub(crate) fn row<'m>(&self, mem: &'m Mem, row: usize) -> ActRow<'m> {
        let [x, quants, groups] = self.parts(row);
        ActRow { x: mem.get(x), quants: mem.get(quants), groups: mem.get(groups) }
    }

    pub(crate) fn row_mut<'m>(&self, mem: &'m Mem, row: usize) -> ActRowMut<'m> {
        let [x, quants, groups] = self.parts(row);
        ActRowMut { x: mem.get_mut(x), quants: mem.get_mut(quants), groups: mem.get_mut(groups) }
    }

    /// Columns `[start, start + len)` of a row; multiples of [`ACT_GROUP`] when quantised.
    pub(crate) fn columns_mut<'m>(
        &self,
        mem: &'m Mem,
        row: usize,
        start: usize,
        len: usize,
    ) -> ActRowMut<'m> {
        let [x, quants, groups] = self.parts(row);
        let record = size_of::<ActGroup>();
        let (quants, groups) = match self.dtype {
            ActDtype::F32 | ActDtype::Bf16 => (quants, groups),
            ActDtype::I8 => (
                quants.slice(start, len),
                groups.slice(record * (start / ACT_GROUP), record * (len / ACT_GROUP)),
            ),
        };
        ActRowMut {
            x: mem.get_mut(x.slice(4 * start, 4 * len)),
            quants: mem.get_mut(quants),
            groups: mem.get_mut(groups),
        }
    }

    /// The define `ACT_BF16` of kernels that read or write these rows.
    pub(crate) fn define(&self, op: &'static str) -> Result<(&'static str, i64), Unsupported> {
        let quantised = self.dtype == ActDtype::I8;
        Unsupported::unless(!quantised, op, || "int8 activations on CUDA".into(), "bf16 or f32")?;
        Ok(("ACT_BF16", i64::from(self.dtype == ActDtype::Bf16)))
    }

    /// The geometry that every op with an activation output shares.
    pub(crate) fn check(&self, op: &'static str, rows: usize) -> Result<(), Unsupported> {
        let groups = self.dtype != ActDtype::I8 || self.width.is_multiple_of(ACT_GROUP);
        Unsupported::unless(groups, op, || format!("width {}", self.width), "multiples of 64")?;
        let fits = rows <= self.rows();
        Unsupported::unless(fits, op, || format!("{rows} rows"), "the activation buffer's rows")
    }
}

impl ActRowMut<'_> {
    /// Fills the quantised parts from the f32 part. The definition.
    pub(crate) fn quantize(self) {
        let inputs = self.x.chunks_exact(ACT_GROUP).zip(self.quants.chunks_exact_mut(ACT_GROUP));
        for ((x, q), group) in inputs.zip(self.groups) {
            let max = x.iter().fold(0.0f32, |m, v| if v.abs() > m { v.abs() } else { m });
            let inverse = if max > 0.0 { 127.0 / max } else { 0.0 };
            for (q, v) in q.iter_mut().zip(x) {
                *q = (v * inverse).round_ties_even() as i8;
            }
            group.scale = max / 127.0;
            for parts in [1, 2, 4] {
                for (part, q) in q.chunks_exact(ACT_GROUP / parts).enumerate() {
                    let sum: i32 = q.iter().map(|&q| i32::from(q)).sum();
                    group.sums[ActGroup::sum_index(parts, part)] = sum as f32;
                }
            }
        }
    }

    /// [`ActRowMut::quantize`], vectorised.
    #[inline(always)]
    pub(crate) fn quantize_simd<S: Simd>(self, s: S) {
        const { assert!(ACT_GROUP == 4 * LANES) };
        let inputs = self.x.chunks_exact(ACT_GROUP).zip(self.quants.chunks_exact_mut(ACT_GROUP));
        for ((x, q), group) in inputs.zip(self.groups) {
            let zero = s.splat(0.0);
            let mut v = [zero; 4];
            let mut max = zero;
            for i in 0..4 {
                v[i] = s.load(&x[i * LANES..]);
                max = s.max(s.max(v[i], s.sub(zero, v[i])), max);
            }
            let max = s.reduce_max(max);
            let inverse = s.splat(if max > 0.0 { 127.0 / max } else { 0.0 });
            let mut quarters = [0.0; 4];
            for i in 0..4 {
                let q = &mut q[i * LANES..][..LANES];
                s.store_i8(s.mul(v[i], inverse), q);
                let sum: i32 = q.iter().map(|&q| i32::from(q)).sum();
                quarters[i] = sum as f32;
            }
            // Sums of small integers are exact in f32, in whatever order.
            let [a, b, c, d] = quarters;
            let (ab, cd) = (a + b, c + d);
            *group = ActGroup { scale: max / 127.0, sums: [ab + cd, ab, cd, a, b, c, d] };
        }
    }
}
