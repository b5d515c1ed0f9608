//! Few rows of each lane in two launches; everything else as the parts.

use super::AttnMix;
use crate::attention::cuda::{Split, scale};
use crate::attn_prepare::cuda::rope;
use crate::geometry::must_align;
use crate::kernel::{Arg, Card, Launch, Plan, Source};
use crate::{Op, Unsupported};

const KERNEL: Source = Source {
    name: "attn_mix/kernel.cu",
    text: concat!(
        include_str!("../attention/items.cuh"),
        include_str!("../attention/split.cu"),
        include_str!("../attn_prepare/head.cuh"),
        "\n#line 1 \"attn_mix/kernel.cu\"\n",
        include_str!("kernel.cu"),
    ),
};

pub(super) fn plan(op: &AttnMix, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    op.check()?;
    op.prepare.kv.must_be_bf16(op.name())?;
    // The rows of a lane are one item of work, and pages come by the copy engine.
    if card.arch >= 90 {
        let beside = beside_bytes(op);
        let left = Card { shared: card.shared.saturating_sub(beside), ..*card };
        let split = Split::new(&op.attention, &left)?;
        if split.rows >= op.prepare.lanes.max_rows {
            return fused(op, &split, beside, card, plan);
        }
    }
    op.prepare.cuda(card, plan)?;
    op.attention.cuda(card, plan)?;
    op.gate.cuda(card, plan)
}

fn fused(
    op: &AttnMix,
    split: &Split,
    beside: u32,
    card: &Card,
    plan: &mut Plan,
) -> Result<(), Unsupported> {
    let AttnMix { prepare, attention, gate } = op;
    let (queries, kv, lanes) = (op.queries()?, prepare.kv, prepare.lanes);
    must_align(op.name(), &[queries.q, prepare.k, prepare.v, gate.out.buf, attention.out])?;
    must_align(op.name(), &[kv.keys, kv.values, attention.scratch, lanes.step])?;
    let shared = split.shared + beside;
    let [heads, kv_heads, dim, causal, window, chunks, group, tiles, units, _] =
        split.defines(attention);
    let [pairs, adjacent] = rope(prepare);
    let defines = [
        heads,
        kv_heads,
        dim,
        causal,
        window,
        chunks,
        group,
        tiles,
        units,
        ("SHARED", i64::from(shared)),
        pairs,
        adjacent,
        ("GATED", i64::from(gate.q_gate.is_some())),
        ("STRIDE", gate.out.row_bytes() as i64),
        gate.out.define(op.name())?,
    ];
    let (count, rows) = (Arg::U32(lanes.count as u32), Arg::U32(lanes.rows as u32));
    let in_parts = Split::in_parts(attention);
    let args = [
        queries.q.into(),
        queries.norm.into(),
        prepare.k.into(),
        prepare.v.into(),
        prepare.k_norm.into(),
        prepare.rope.inv_freq.into(),
        kv.keys.into(),
        kv.values.into(),
        kv.table.into(),
        lanes.step.into(),
        attention.out.into(),
        attention.scratch.into(),
        count,
        Arg::U32(kv.max_pages as u32),
        rows,
        in_parts,
        prepare.eps.into(),
        scale(attention),
    ];
    let launch =
        Launch::new(KERNEL, "attend", &defines, [card.sms, 1, 1], Split::threads(card), &args);
    plan.push(launch.shared(shared));
    let grid = [lanes.rows as u32, attention.heads as u32, 1];
    let args = [
        queries.q.into(),
        lanes.step.into(),
        attention.out.into(),
        attention.scratch.into(),
        gate.out.buf.into(),
        count,
        rows,
        in_parts,
    ];
    plan.push(Launch::new(KERNEL, "finish", &defines, grid, 64, &args));
    Ok(())
}

/// `Beside` in `kernel.cu`, for all rows of a lane.
fn beside_bytes(op: &AttnMix) -> u32 {
    let rows = op.prepare.lanes.max_rows.clamp(1, 64);
    (8 + 8 * rows * (op.prepare.rope.dims / 2 + 1)).next_multiple_of(128) as u32
}
