//! One row of a lane at a time; rows in parallel once there are enough of them.

use super::{BlockConv, BlockConvOut};
use crate::geometry::grain;
use crate::simd::{Kernel, LANES, Simd};
use crate::{Cpu, LaneStep, Mem};

/// Taps times columns of one chunk of work, a few microseconds.
const CHUNK: usize = 32_768;

pub(super) fn run(op: &BlockConv, mem: &Mem, cpu: &Cpu) {
    let steps = op.lanes.steps(mem);
    let items = op.lanes.count * op.lanes.max_rows;
    cpu.pool.ranges(items, grain(CHUNK, op.taps * op.width), &|start, end| {
        cpu.isa.dispatch(Rows { op, mem, steps, start, end });
    });
}

struct Rows<'a> {
    op: &'a BlockConv,
    mem: &'a Mem,
    steps: &'a [LaneStep],
    start: usize,
    end: usize,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let op = self.op;
        for item in self.start..self.end {
            let (step, t) = (self.steps[item / op.lanes.max_rows], item % op.lanes.max_rows);
            if t >= step.rows as usize {
                continue;
            }
            let row = step.row0 as usize + t;
            match op.out {
                BlockConvOut::Act(act) => {
                    let out = act.row_mut(self.mem, row);
                    self.convolve::<S, false>(s, row, t, out.x);
                    out.quantize_simd(s);
                }
                BlockConvOut::Add(buf) => {
                    let out = self.mem.get_mut(buf.rows(row, 1, 4 * op.width));
                    self.convolve::<S, true>(s, row, t, out);
                }
            }
        }
    }
}

impl Rows<'_> {
    /// Row `row` of the pass, the lane's row `t`.
    #[inline(always)]
    fn convolve<S: Simd, const ADD: bool>(&self, s: S, row: usize, t: usize, out: &mut [f32]) {
        let BlockConv { width, taps, group, side, .. } = *self.op;
        let groups = width / group;
        let base = self.mem.get::<f32>(self.op.base);
        let dynamic = &self.mem.get::<f32>(self.op.dynamic)[(row * 2 + side) * taps * groups..];
        for g in 0..groups {
            for c in (g * group..(g + 1) * group).step_by(LANES) {
                let mut sum = s.splat(0.0);
                for o in 0..taps.min(t + 1) {
                    let kernel =
                        s.add(s.load(&base[o * width + c..]), s.splat(dynamic[o * groups + g]));
                    let x = self.op.x.row(self.mem, row - o).x;
                    sum = s.fma(kernel, s.load(&x[c..]), sum);
                }
                let out = &mut out[c..];
                let sum = if ADD { s.add(s.load(out), sum) } else { sum };
                s.store(sum, out);
            }
        }
    }
}
