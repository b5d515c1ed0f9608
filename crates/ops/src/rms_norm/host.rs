//! One row at a time; rows in parallel once there are many.

use super::RmsNorm;
use crate::simd::{Kernel, LANES, Simd};
use crate::{Cpu, Mem};

pub(super) fn run(op: &RmsNorm, mem: &Mem, cpu: &Cpu) {
    cpu.pool.ranges(op.rows, 16, &|start, end| {
        cpu.isa.dispatch(Rows { op, mem, start, end });
    });
}

struct Rows<'a> {
    op: &'a RmsNorm,
    mem: &'a Mem,
    start: usize,
    end: usize,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.op.out.width;
        let weight = self.mem.get::<f32>(self.op.weight);
        for row in self.start..self.end {
            let x = self.mem.get::<f32>(self.op.x.rows(row, 1, 4 * width));
            let out = self.op.out.row_mut(self.mem, row);
            let mut squares = s.splat(0.0);
            for i in (0..width).step_by(LANES) {
                let v = s.load(&x[i..]);
                squares = s.fma(v, v, squares);
            }
            let mean = s.sum(squares) / width as f32;
            let scale = s.splat(1.0 / (mean + self.op.eps).sqrt());
            for i in (0..width).step_by(LANES) {
                let v = s.mul(s.mul(s.load(&x[i..]), scale), s.load(&weight[i..]));
                s.store(v, &mut out.x[i..]);
            }
            out.quantize_simd(s);
        }
    }
}
