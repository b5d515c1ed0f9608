//! A block for every lane.

use super::Propose;
use crate::geometry::aligned;
use crate::kernel::{Arg, Card, Launch, Plan, Source};
use crate::{Buf, Unsupported};

const KERNEL: Source = Source {
    name: "propose/kernel.cu",
    text: concat!(
        include_str!("../cluster.cuh"),
        include_str!("../sampling.cuh"),
        include_str!("kernel.cu")
    ),
};
const THREADS: u32 = 256;
/// Proposals whose candidates' codebook rows are staged at a time.
const AHEAD: usize = 32;
/// Between staged rows, in elements.
const PADDING: usize = 16;
/// Shared memory beside staged rows and the selector's rank.
const FIXED: usize = 16 * 1024;

pub(super) fn plan(op: &Propose, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    if op.lanes.count == 0 {
        return Ok(());
    }
    if let Some(s) = &op.selector {
        let whole = aligned(&[s.predecessor, s.successor, s.query]);
        Unsupported::unless(whole, "propose", || format!("{s:?}"), "16-byte alignment")?;
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
    let staged = op.selector.map_or(0, |s| {
        let proposals = (op.lanes.max_rows - 1).min(AHEAD);
        proposals * op.k() * 2 * 2 * (s.rank + PADDING)
    });
    let fits = FIXED + 4 * op.selector.map_or(0, |s| s.rank) + staged <= card.shared as usize;
    let defines = [("RANK", op.selector.map_or(0, |s| s.rank as i64)), ("STAGED", i64::from(fits))];
    let grid = [op.lanes.count as u32, 1, 1];
    let launch = Launch::new(KERNEL, "propose", &defines, grid, THREADS, &args);
    plan.push(launch.shared(if fits { staged as u32 } else { 0 }));
    Ok(())
}
