//! Launches on an NVIDIA card.

use super::{GatedDelta, TILE};
use crate::gdn_prepare::{Commit, HeadMap};
use crate::kernel::{Launch, Plan, Source};
use crate::{Op, Unsupported};

const SCAN: Source = Source { name: "gated_delta/scan.cu", text: include_str!("scan.cu") };

pub(super) fn plan(op: &GatedDelta, plan: &mut Plan) -> Result<(), Unsupported> {
    op.check()?;
    scan(op, plan);
    Ok(())
}

fn scan(op: &GatedDelta, plan: &mut Plan) {
    let (g, lanes) = (&op.geometry, op.lanes);
    let defines = [
        ("KEY_HEADS", g.key_heads as i64),
        ("VALUE_HEADS", g.value_heads as i64),
        ("KEY_DIM", g.key_dim as i64),
        ("VALUE_DIM", g.value_dim as i64),
        ("TILED", i64::from(g.head_map == HeadMap::Tiled)),
        ("BLOCK", op.block as i64),
        ("DEFERRED", i64::from(op.commit == Commit::Deferred)),
    ];
    let grid = [(g.value_dim / TILE) as u32, g.value_heads as u32, lanes.count as u32];
    let args = [
        op.q.into(),
        op.k.into(),
        op.v.into(),
        op.g.into(),
        op.beta.into(),
        op.state.into(),
        op.pending.into(),
        op.out.into(),
        lanes.step.into(),
    ];
    plan.push(Launch::new(SCAN, "scan", &defines, grid, 64, &args));
}
