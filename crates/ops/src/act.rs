//! Activation rows: the inputs of linear layers.

use crate::simd::{LANES, Simd};
use crate::{Buf, Mem, Unsupported};

/// Elements that share one scale in quantised activations.
pub const ACT_GROUP: usize = 32;

/// How the rows that feed linear layers are stored. Chosen once, at load, for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActDtype {
    /// f32 only: the exact path, used by tests and by models with dense weights.
    F32,
    /// f32, and beside it int8 with one f32 scale for each [`ACT_GROUP`] elements.
    I8,
}

/// Rows of activations, each row stored as
/// `f32[width]`, then for [`ActDtype::I8`] `i8[width]`, `f32 scale[width / ACT_GROUP]` and
/// `f32 sum[width / ACT_GROUP]`, where `sum` = scale · Σ of the group's int8 values.
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
        let bytes = match dtype {
            ActDtype::F32 => 4 * width,
            ActDtype::I8 => 5 * width + 8 * (width / ACT_GROUP),
        };
        bytes.next_multiple_of(64)
    }

    /// Byte offset of the int8 values inside a row.
    pub fn quants_offset(&self) -> usize {
        4 * self.width
    }

    /// Byte offset of the group scales inside a row.
    pub fn scales_offset(&self) -> usize {
        5 * self.width
    }

    /// Byte offset of the group sums inside a row.
    pub fn sums_offset(&self) -> usize {
        5 * self.width + 4 * (self.width / ACT_GROUP)
    }

    /// Bytes from one row of this buffer to the next.
    pub fn row_bytes(&self) -> usize {
        Self::stride(self.width, self.dtype)
    }

    /// Rows that fit the buffer.
    pub fn rows(&self) -> usize {
        self.buf.bytes / self.row_bytes()
    }
}

/// One row of an [`Act`], split into its parts. The last three are empty for [`ActDtype::F32`].
pub(crate) struct ActRow<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) quants: &'a [i8],
    pub(crate) scales: &'a [f32],
    pub(crate) sums: &'a [f32],
}

/// One row of an [`Act`], to be written.
pub(crate) struct ActRowMut<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) quants: &'a mut [i8],
    pub(crate) scales: &'a mut [f32],
    pub(crate) sums: &'a mut [f32],
}

impl Act {
    fn parts(&self, row: usize) -> [Buf; 4] {
        let row = self.buf.rows(row, 1, self.row_bytes());
        let (w, groups) = match self.dtype {
            ActDtype::F32 => (0, 0),
            ActDtype::I8 => (self.width, self.width / ACT_GROUP),
        };
        let x = row.slice(0, 4 * self.width);
        if w == 0 {
            let none = row.slice(0, 0);
            return [x, none, none, none];
        }
        [
            x,
            row.slice(self.quants_offset(), w),
            row.slice(self.scales_offset(), 4 * groups),
            row.slice(self.sums_offset(), 4 * groups),
        ]
    }

    pub(crate) fn row<'m>(&self, mem: &'m Mem, row: usize) -> ActRow<'m> {
        let [x, quants, scales, sums] = self.parts(row);
        ActRow {
            x: mem.get(x),
            quants: mem.get(quants),
            scales: mem.get(scales),
            sums: mem.get(sums),
        }
    }

    pub(crate) fn row_mut<'m>(&self, mem: &'m Mem, row: usize) -> ActRowMut<'m> {
        let [x, quants, scales, sums] = self.parts(row);
        ActRowMut {
            x: mem.get_mut(x),
            quants: mem.get_mut(quants),
            scales: mem.get_mut(scales),
            sums: mem.get_mut(sums),
        }
    }

    /// Columns `[start, start + len)` of a row; multiples of [`ACT_GROUP`] when quantised.
    pub(crate) fn columns_mut<'m>(
        &self,
        mem: &'m Mem,
        row: usize,
        start: usize,
        len: usize,
    ) -> ActRowMut<'m> {
        let [x, quants, scales, sums] = self.parts(row);
        let groups = |buf: Buf| match self.dtype {
            ActDtype::F32 => buf,
            ActDtype::I8 => buf.slice(4 * (start / ACT_GROUP), 4 * (len / ACT_GROUP)),
        };
        let quants = match self.dtype {
            ActDtype::F32 => quants,
            ActDtype::I8 => quants.slice(start, len),
        };
        ActRowMut {
            x: mem.get_mut(x.slice(4 * start, 4 * len)),
            quants: mem.get_mut(quants),
            scales: mem.get_mut(groups(scales)),
            sums: mem.get_mut(groups(sums)),
        }
    }

    /// The geometry that every op with an activation output shares.
    pub(crate) fn check(&self, op: &'static str, rows: usize) -> Result<(), Unsupported> {
        let groups = self.dtype == ActDtype::F32 || self.width.is_multiple_of(ACT_GROUP);
        Unsupported::unless(groups, op, || format!("width {}", self.width), "multiples of 32")?;
        let fits = rows <= self.rows();
        Unsupported::unless(fits, op, || format!("{rows} rows"), "the activation buffer's rows")
    }
}

impl ActRowMut<'_> {
    /// Fills the quantised parts from the f32 part. The definition.
    pub(crate) fn quantize(self) {
        for (g, x) in self.x.chunks_exact(ACT_GROUP).enumerate().take(self.scales.len()) {
            let max = x.iter().fold(0.0f32, |m, v| if v.abs() > m { v.abs() } else { m });
            let inverse = if max > 0.0 { 127.0 / max } else { 0.0 };
            let mut sum = 0;
            for (q, v) in self.quants[g * ACT_GROUP..].iter_mut().zip(x) {
                *q = (v * inverse).round_ties_even() as i8;
                sum += i32::from(*q);
            }
            self.scales[g] = max / 127.0;
            self.sums[g] = self.scales[g] * sum as f32;
        }
    }

    /// [`ActRowMut::quantize`], vectorised.
    #[inline(always)]
    pub(crate) fn quantize_simd<S: Simd>(self, s: S) {
        const { assert!(ACT_GROUP == 2 * LANES) };
        for g in 0..self.scales.len() {
            let x = &self.x[g * ACT_GROUP..][..ACT_GROUP];
            let q = &mut self.quants[g * ACT_GROUP..][..ACT_GROUP];
            let (a, b) = (s.load(x), s.load(&x[LANES..]));
            let zero = s.splat(0.0);
            let abs = |v| s.max(v, s.sub(zero, v));
            let max = s.reduce_max(s.max(abs(a), abs(b)));
            let inverse = s.splat(if max > 0.0 { 127.0 / max } else { 0.0 });
            s.store_i8(s.mul(a, inverse), q);
            s.store_i8(s.mul(b, inverse), &mut q[LANES..]);
            let sum: i32 = q.iter().map(|&q| i32::from(q)).sum();
            self.scales[g] = max / 127.0;
            self.sums[g] = self.scales[g] * sum as f32;
        }
    }
}
