//! First every row on its own, a cluster of blocks for each; then every lane.

use super::{Accept, LogitRows, host};
use crate::Unsupported;
use crate::geometry::aligned;
use crate::kernel::{Arg, Card, Launch, Plan, Source};
use crate::top_k::Split;

const ROWS: Source = Source {
    name: "accept/rows.cu",
    text: concat!(
        include_str!("../cluster.cuh"),
        include_str!("../sampling.cuh"),
        include_str!("row.cuh"),
        include_str!("search.cuh"),
        include_str!("rows.cu")
    ),
};
const LANES: Source = Source {
    name: "accept/lanes.cu",
    text: concat!(
        include_str!("../sampling.cuh"),
        include_str!("row.cuh"),
        include_str!("lanes.cu")
    ),
};
/// Threads of a row's blocks.
const THREADS: usize = 512;
const LANE_THREADS: u32 = 256;
/// Shared memory of a row's block beside its part of the row.
const FIXED: usize = 8 * 1024;
/// Tokens of a part in shared memory: their sums of 16-bit halves must fit 32 bits.
const NEAR: usize = 1 << 16;

pub(super) fn plan(op: &Accept, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    if op.lanes.count == 0 {
        return Ok(());
    }
    let scratch = aligned(&[op.scratch]);
    Unsupported::unless(scratch, "accept", || format!("{:?}", op.scratch), "16-byte alignment")?;
    let warps = THREADS / 32;
    let Split { parts, span } = Split::of(card, op.valid, warps);
    let part = warps * span;
    let near = part < NEAR && FIXED + 4 * part <= card.shared as usize;
    let defines = [("NEAR", i64::from(near))];
    let number = |n: usize| Arg::U32(n as u32);
    let (last, per_lane) = match op.logit_rows {
        LogitRows::All => (0, op.lanes.max_rows),
        LogitRows::Last => (1, 1),
    };
    let row_bytes = number(host::row_bytes(op.valid));
    let rows = [
        op.logits.into(),
        op.ids.into(),
        op.params.into(),
        op.counts.into(),
        op.biases.into(),
        op.masks.into(),
        op.lanes.step.into(),
        op.scratch.into(),
        row_bytes,
        number(op.stride),
        number(op.valid),
        number(op.bias_capacity),
        number(op.lanes.max_rows),
        number(last),
        number(span),
    ];
    let grid = [parts as u32, (op.lanes.count * per_lane) as u32, 1];
    let launch = Launch::new(ROWS, "accept_rows", &defines, grid, THREADS as u32, &rows);
    let shared = if near { 4 * part as u32 } else { 0 };
    plan.push(launch.shared(shared).cluster(parts as u32));
    let lanes = [
        op.logits.into(),
        op.ids.into(),
        op.draft_ids.into(),
        op.proposals.map(|p| p.buf).into(),
        op.params.into(),
        op.counts.into(),
        op.lanes.step.into(),
        op.results.into(),
        op.scratch.into(),
        row_bytes,
        number(op.stride),
        number(op.valid),
        number(op.lanes.max_rows),
        number(op.proposals.map_or(0, |p| p.k)),
        number(last),
        number(span),
    ];
    let grid = [op.lanes.count as u32, 1, 1];
    plan.push(Launch::new(LANES, "accept_lanes", &[], grid, LANE_THREADS, &lanes));
    Ok(())
}
