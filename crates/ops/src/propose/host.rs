//! Lanes in parallel; within a lane each proposal waits for the one before.

use super::{Arithmetic, Propose, Selector};
use crate::sampling::weights;
use crate::simd::{Kernel, LANES, Simd};
use crate::{Cpu, Mem, TopK};

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
        self.op.lane(self.mem, self.lane, Vectors(s));
    }
}

#[derive(Clone, Copy)]
struct Vectors<S>(S);

impl<S: Simd> Arithmetic for Vectors<S> {
    #[inline(always)]
    fn rescore<'m>(
        self,
        query: &[f32],
        before: &[u16],
        after: impl Fn(u32) -> &'m [u16],
        candidates: &[u32],
        scores: &mut [f32],
    ) {
        let s = self.0;
        let rank = query.len();
        let mut products = [0.0; Selector::MAX_RANK];
        for r in (0..rank).step_by(LANES) {
            s.store(s.mul(s.load_bf16(&before[r..]), s.load(&query[r..])), &mut products[r..]);
        }
        for (score, &id) in scores.iter_mut().zip(candidates) {
            let successor = after(id);
            let mut sum = s.splat(0.0);
            for r in (0..rank).step_by(LANES) {
                sum = s.fma(s.load(&products[r..]), s.load_bf16(&successor[r..]), sum);
            }
            *score += s.sum(sum);
        }
    }

    #[inline(always)]
    fn weigh(self, x: &[f32; TopK::MAX_K]) -> [u32; TopK::MAX_K] {
        let mut out = [0; TopK::MAX_K];
        for i in (0..TopK::MAX_K).step_by(LANES) {
            out[i..i + LANES].copy_from_slice(&weights(self.0, self.0.load(&x[i..])));
        }
        out
    }
}
