//! Blocks of columns of one row, so that a single row is shared by the threads too.

use super::SiluMul;
use crate::geometry::grain;
use crate::simd::math::silu;
use crate::simd::{Kernel, LANES, Simd};
use crate::{Cpu, Mem};

/// Columns of one item: whole groups of a quantised row.
const BLOCK: usize = 512;
/// Columns of one chunk of work, a few microseconds.
const CHUNK: usize = 4096;

pub(super) fn run(op: &SiluMul, mem: &Mem, cpu: &Cpu) {
    let blocks = op.out.width.div_ceil(BLOCK);
    cpu.pool.ranges(op.rows * blocks, grain(CHUNK, BLOCK), &|start, end| {
        cpu.isa.dispatch(Blocks { op, mem, start, end });
    });
}

struct Blocks<'a> {
    op: &'a SiluMul,
    mem: &'a Mem,
    start: usize,
    end: usize,
}

impl Kernel for Blocks<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.op.out.width;
        let blocks = width.div_ceil(BLOCK);
        let (gate, up) = (self.mem.get::<f32>(self.op.gate), self.mem.get::<f32>(self.op.up));
        for item in self.start..self.end {
            let (row, column) = (item / blocks, item % blocks * BLOCK);
            let len = BLOCK.min(width - column);
            let at = row * width + column;
            let out = self.op.out.columns_mut(self.mem, row, column, len);
            let inputs = gate[at..][..len].as_chunks::<LANES>().0.iter();
            let inputs = inputs.zip(up[at..][..len].as_chunks::<LANES>().0);
            for ((g, u), y) in inputs.zip(out.x.as_chunks_mut::<LANES>().0) {
                s.store(s.mul(silu(s, s.load(g)), s.load(u)), y);
            }
            out.quantize_simd(s);
        }
    }
}
