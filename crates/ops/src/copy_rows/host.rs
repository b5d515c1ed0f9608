//! Rows in parallel once there are enough of them.

use super::CopyRows;
use crate::geometry::grain;
use crate::simd::{Kernel, Simd};
use crate::{Cpu, Mem};

/// Columns of one chunk of work, a few microseconds.
const CHUNK: usize = 16_384;

pub(super) fn run(op: &CopyRows, mem: &Mem, cpu: &Cpu) {
    let columns = if op.finish { op.to.width } else { op.width };
    cpu.pool.ranges(op.rows, grain(CHUNK, columns), &|start, end| {
        cpu.isa.dispatch(Rows { op, mem, start, end });
    });
}

struct Rows<'a> {
    op: &'a CopyRows,
    mem: &'a Mem,
    start: usize,
    end: usize,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (from, width) = (self.mem.get::<f32>(self.op.from), self.op.width);
        for row in self.start..self.end {
            let to = self.op.to.row_mut(self.mem, row);
            to.x[self.op.column..][..width].copy_from_slice(&from[row * width..][..width]);
            if self.op.finish {
                to.quantize_simd(s);
            }
        }
    }
}
