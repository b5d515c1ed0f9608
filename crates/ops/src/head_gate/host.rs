//! One row at a time; rows in parallel once there are many.

use super::HeadGate;
use crate::simd::{Kernel, LANES, Simd, math};
use crate::{Cpu, Mem};

pub(super) fn run(op: &HeadGate, mem: &Mem, cpu: &Cpu) {
    cpu.pool.ranges(op.rows, 16, &|start, end| {
        cpu.isa.dispatch(Rows { op, mem, start, end });
    });
}

struct Rows<'a> {
    op: &'a HeadGate,
    mem: &'a Mem,
    start: usize,
    end: usize,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let dim = self.op.dim;
        for row in self.start..self.end {
            let x = self.op.x_row(self.mem, row);
            let out = self.op.out.row_mut(self.mem, row);
            if let Some(gates) = self.op.gate_row(self.mem, row) {
                let heads = x.chunks_exact(dim).zip(gates.chunks_exact(2 * dim));
                for ((x, gates), out) in heads.zip(out.x.chunks_exact_mut(dim)) {
                    for i in (0..dim).step_by(LANES) {
                        let gate = math::sigmoid(s, s.load(&gates[dim + i..]));
                        s.store(s.mul(s.load(&x[i..]), gate), &mut out[i..]);
                    }
                }
            } else {
                out.x.copy_from_slice(x);
            }
            out.quantize_simd(s);
        }
    }
}
