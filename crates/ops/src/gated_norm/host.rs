//! Blocks of whole heads of one row, so that a single row is shared by the threads too.

use super::GatedNorm;
use crate::geometry::grain;
use crate::simd::math::silu;
use crate::simd::{Kernel, LANES, Simd};
use crate::{ACT_GROUP, Cpu, Mem};

/// Columns of one item, at least.
const BLOCK: usize = 256;
/// Columns of one chunk of work, a few microseconds.
const CHUNK: usize = 4096;

pub(super) fn run(op: &GatedNorm, mem: &Mem, cpu: &Cpu) {
    // A block is whole heads and whole quantised groups; two heads of 16·odd elements fill a group.
    let unit = if op.dim.is_multiple_of(ACT_GROUP) { op.dim } else { 2 * op.dim };
    let block = BLOCK.next_multiple_of(unit);
    let items = op.rows * op.out.width.div_ceil(block);
    cpu.pool.ranges(items, grain(CHUNK, block), &|start, end| {
        cpu.isa.dispatch(Blocks { op, mem, block, start, end });
    });
}

struct Blocks<'a> {
    op: &'a GatedNorm,
    mem: &'a Mem,
    block: usize,
    start: usize,
    end: usize,
}

impl Kernel for Blocks<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (width, dim) = (self.op.out.width, self.op.dim);
        let (x, gate) = (self.mem.get::<f32>(self.op.x), self.mem.get::<f32>(self.op.gate));
        let weight = self.mem.get::<f32>(self.op.weight);
        let blocks = width.div_ceil(self.block);
        for item in self.start..self.end {
            let (row, column) = (item / blocks, item % blocks * self.block);
            let len = self.block.min(width - column);
            let out = self.op.out.columns_mut(self.mem, row, column, len);
            for head in (0..len).step_by(dim) {
                let at = row * width + column + head;
                let (x, gate) = (&x[at..][..dim], &gate[at..][..dim]);
                normalize(s, x, gate, weight, self.op.eps, &mut out.x[head..][..dim]);
            }
            out.quantize_simd(s);
        }
    }
}

/// One head.
#[inline(always)]
fn normalize<S: Simd>(s: S, x: &[f32], gate: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mut squares = s.splat(0.0);
    for v in x.as_chunks::<LANES>().0 {
        let v = s.load(v);
        squares = s.fma(v, v, squares);
    }
    let mean = s.sum(squares) / x.len() as f32;
    let scale = s.splat(1.0 / (mean + eps).sqrt());
    let inputs = x.as_chunks::<LANES>().0.iter().zip(gate.as_chunks::<LANES>().0);
    let inputs = inputs.zip(weight.as_chunks::<LANES>().0);
    for (((x, z), w), y) in inputs.zip(out.as_chunks_mut::<LANES>().0) {
        let normed = s.mul(s.mul(s.load(x), scale), s.load(w));
        s.store(s.mul(normed, silu(s, s.load(z))), y);
    }
}
