//! Lanes in parallel; within a lane each proposal waits for the one before.

use super::{Propose, Selector, codebook_row};
use crate::simd::{Kernel, LANES, Simd};
use crate::{Cpu, Mem};

pub(super) fn run(op: &Propose, mem: &Mem, cpu: &Cpu) {
    cpu.pool.run(op.lanes.count, &|lane| cpu.isa.dispatch(Lane { op, mem, lane }));
}

struct Lane<'a> {
    op: &'a Propose,
    mem: &'a Mem,
    lane: usize,
}

impl Kernel for Lane<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mem = self.mem;
        self.op.lane(mem, self.lane, |selector, row, prev, ids, scores| {
            let rank = selector.rank;
            let query = mem.get::<f32>(selector.query.rows(row, 1, 4 * rank));
            let before = codebook_row(mem, selector, selector.predecessor, prev);
            let mut products = [0.0; Selector::MAX_RANK];
            for r in (0..rank).step_by(LANES) {
                s.store(s.mul(s.load_bf16(&before[r..]), s.load(&query[r..])), &mut products[r..]);
            }
            for (score, &id) in scores.iter_mut().zip(ids) {
                let after = codebook_row(mem, selector, selector.successor, id);
                let mut sum = s.splat(0.0);
                for r in (0..rank).step_by(LANES) {
                    sum = s.fma(s.load(&products[r..]), s.load_bf16(&after[r..]), sum);
                }
                *score += s.sum(sum);
            }
        });
    }
}
