//! One warp for each head of queries, keys and values.

use super::{AttnPrepare, RopePairing};
use crate::Unsupported;
use crate::kernel::{Arg, Card, Launch, Plan, Source};

const KERNEL: Source = Source { name: "attn_prepare/kernel.cu", text: include_str!("kernel.cu") };
const WARPS: usize = 4;

pub(super) fn plan(op: &AttnPrepare, _card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    let (kv, queries) = (op.kv, op.queries);
    let heads = queries.map_or(0, |q| q.heads);
    let defines = [
        ("HEADS", heads as i64),
        ("Q_STRIDE", queries.map_or(0, |q| q.stride) as i64),
        ("KV_HEADS", kv.kv_heads as i64),
        ("DIM", kv.head_dim as i64),
        ("ROPE_DIMS", op.rope.dims as i64),
        ("ADJACENT", i64::from(op.rope.pairing == RopePairing::Adjacent)),
        ("MAX_PAGES", kv.max_pages as i64),
    ];
    let args = [
        queries.map(|q| q.q).into(),
        queries.and_then(|q| q.norm).into(),
        queries.map(|q| q.out).into(),
        op.k.into(),
        op.v.into(),
        op.k_norm.into(),
        op.rope.inv_freq.into(),
        op.lanes.step.into(),
        Arg::U32(op.lanes.count as u32),
        kv.table.into(),
        kv.keys.into(),
        kv.values.into(),
        op.eps.into(),
    ];
    let grid = [op.lanes.rows as u32, (heads + 2 * kv.kv_heads).div_ceil(WARPS) as u32, 1];
    plan.push(Launch::new(KERNEL, "attn_prepare", &defines, grid, 32 * WARPS as u32, &args));
    Ok(())
}
