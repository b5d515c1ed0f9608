//! A block for every lane.

use super::Propose;
use crate::kernel::{Arg, Card, Launch, Plan, Source};
use crate::{Buf, Unsupported};

const KERNEL: Source = Source {
    name: "propose/kernel.cu",
    text: concat!(include_str!("../sampling.cuh"), include_str!("kernel.cu")),
};
const THREADS: u32 = 512;

pub(super) fn plan(op: &Propose, _card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    if op.lanes.count == 0 {
        return Ok(());
    }
    let number = |n: usize| Arg::U32(n as u32);
    let selector = |of: fn(&super::Selector) -> Buf| op.selector.as_ref().map(of).into();
    let args = [
        op.candidates.into(),
        op.values.into(),
        selector(|s| s.predecessor),
        selector(|s| s.successor),
        selector(|s| s.query),
        op.params.into(),
        op.lanes.step.into(),
        op.ids.into(),
        op.proposals.buf.into(),
        number(op.selector.map_or(1, |s| s.vocab)),
        number(op.lanes.max_rows),
        number(op.k()),
        number(op.draft_stride),
        number(op.draft_first),
    ];
    let defines = [("RANK", op.selector.map_or(0, |s| s.rank as i64))];
    let grid = [op.lanes.count as u32, 1, 1];
    plan.push(Launch::new(KERNEL, "propose", &defines, grid, THREADS, &args));
    Ok(())
}
