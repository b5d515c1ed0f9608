//! One warp for each head of queries, keys and values.

use super::{AttnPrepare, RopePairing};
use crate::kernel::{Arg, Card, Launch, Plan, Source};
use crate::{Op, Unsupported};

const KERNEL: Source = Source {
    name: "attn_prepare/kernel.cu",
    text: concat!(include_str!("head.cuh"), include_str!("kernel.cu")),
};
const WARPS: usize = 4;

pub(super) fn plan(op: &AttnPrepare, _card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    op.kv.must_be_bf16(op.name())?;
    let (kv, queries) = (op.kv, op.queries);
    let heads = queries.map_or(0, |q| q.heads);
    let number = |n: usize| Arg::U32(n as u32);
    let args = [
        queries.map(|q| q.q).into(),
        queries.and_then(|q| q.norm).into(),
        queries.map(|q| q.out).into(),
        op.k.into(),
        op.v.into(),
        op.k_norm.into(),
        op.rope.inv_freq.into(),
        op.lanes.step.into(),
        number(op.lanes.count),
        kv.table.into(),
        number(kv.max_pages),
        kv.keys.into(),
        kv.values.into(),
        number(heads),
        number(queries.map_or(0, |q| q.stride)),
        number(kv.kv_heads),
        op.eps.into(),
    ];
    let [pairs, adjacent] = rope(op);
    let defines = [("DIM", kv.head_dim as i64), pairs, adjacent];
    let grid = [op.lanes.rows as u32, (heads + 2 * kv.kv_heads).div_ceil(WARPS) as u32, 1];
    plan.push(Launch::new(KERNEL, "attn_prepare", &defines, grid, 32 * WARPS as u32, &args));
    Ok(())
}

/// The defines of `head.cuh`.
pub(crate) fn rope(op: &AttnPrepare) -> [(&'static str, i64); 2] {
    let adjacent = op.rope.pairing == RopePairing::Adjacent;
    [("PAIRS", (op.rope.dims / 2) as i64), ("ADJACENT", i64::from(adjacent))]
}
