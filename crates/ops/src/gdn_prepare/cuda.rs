//! Launches on an NVIDIA card.

use super::{Commit, GdnPrepare};
use crate::kernel::{Launch, Plan, Source};
use crate::{Op, Unsupported};

const SOURCE: Source = Source { name: "gdn_prepare/kernel.cu", text: include_str!("kernel.cu") };
const WARPS: usize = 4;

pub(super) fn plan(op: &GdnPrepare, plan: &mut Plan) -> Result<(), Unsupported> {
    op.check()?;
    let (g, lanes) = (&op.geometry, op.lanes);
    // A row reads the three before it: more rows to a warp read less, fewer rows are done sooner. A row's bits are the
    // same: all that a warp computes is of one row.
    let rows = if lanes.max_rows <= 64 { 1 } else { 16 };
    let defines = [
        ("KEY_HEADS", g.key_heads as i64),
        ("VALUE_HEADS", g.value_heads as i64),
        ("KEY_DIM", g.key_dim as i64),
        ("VALUE_DIM", g.value_dim as i64),
        ("BLOCK", op.block as i64),
        ("DEFERRED", i64::from(op.commit == Commit::Deferred)),
        ("ROWS", rows as i64),
    ];
    let heads = 2 * g.key_heads + g.value_heads;
    // The warp after the last head does the gates.
    let grid = [
        (heads + 1).div_ceil(WARPS) as u32,
        lanes.max_rows.div_ceil(rows).max(1) as u32,
        lanes.count as u32,
    ];
    let args = [
        op.qkv.into(),
        op.a.into(),
        op.b.into(),
        op.conv.into(),
        op.decay.into(),
        op.dt_bias.into(),
        op.history.into(),
        op.q.into(),
        op.k.into(),
        op.v.into(),
        op.g.into(),
        op.beta.into(),
        lanes.step.into(),
    ];
    plan.push(Launch::new(SOURCE, "gdn_prepare", &defines, grid, 32 * WARPS as u32, &args));
    Ok(())
}
