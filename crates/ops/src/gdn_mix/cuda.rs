//! Few rows in one launch; everything else as the parts.

use super::GdnMix;
use crate::gdn_prepare::{CONV_TAPS, Commit, GdnGeometry, HeadMap};
use crate::geometry::must_align;
use crate::kernel::{Card, Launch, Plan, Source};
use crate::{Op, Unsupported};

const KERNEL: Source = Source { name: "gdn_mix/kernel.cu", text: include_str!("kernel.cu") };
/// Rows that a block has in shared memory.
const STAGE: usize = 8;
/// Shared memory that a block has without asking.
const STATIC_SHARED: usize = 48 << 10;

pub(super) fn plan(op: &GdnMix, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    op.check()?;
    let GdnMix { prepare, delta, norm } = op;
    let g = &prepare.geometry;
    // Clusters came with Hopper. A half of the pending rows starts at a multiple of 16 bytes.
    let few = prepare.commit == Commit::Deferred && card.arch >= 90;
    let aligned = (g.value_heads * delta.block).is_multiple_of(4);
    if few && aligned && shared_bytes(g) <= STATIC_SHARED {
        return fused(op, plan);
    }
    prepare.cuda(card, plan)?;
    delta.cuda(card, plan)?;
    if norm.rows == 0 { Ok(()) } else { norm.cuda(card, plan) }
}

fn fused(op: &GdnMix, plan: &mut Plan) -> Result<(), Unsupported> {
    let GdnMix { prepare, delta, norm } = op;
    let (g, lanes) = (&prepare.geometry, prepare.lanes);
    let (rows, lane) = ([prepare.qkv, norm.gate, norm.out.buf], [prepare.history, delta.state]);
    let (weights, pending) = ([prepare.conv, norm.weight], [delta.pending, lanes.step]);
    for bufs in [&rows[..], &lane, &weights, &pending] {
        must_align(op.name(), bufs)?;
    }
    let defines = [
        norm.out.define(op.name())?,
        ("STRIDE", norm.out.row_bytes() as i64),
        ("KEY_HEADS", g.key_heads as i64),
        ("VALUE_HEADS", g.value_heads as i64),
        ("KEY_DIM", g.key_dim as i64),
        ("VALUE_DIM", g.value_dim as i64),
        ("TILED", i64::from(g.head_map == HeadMap::Tiled)),
        ("BLOCK", delta.block as i64),
    ];
    let args = [
        prepare.qkv.into(),
        prepare.a.into(),
        prepare.b.into(),
        norm.gate.into(),
        prepare.conv.into(),
        prepare.decay.into(),
        prepare.dt_bias.into(),
        norm.weight.into(),
        prepare.history.into(),
        delta.state.into(),
        delta.pending.into(),
        norm.out.buf.into(),
        lanes.step.into(),
        norm.eps.into(),
    ];
    let grid = [2, g.value_heads as u32, lanes.count as u32];
    let threads = 32 * g.value_dim / 16;
    plan.push(Launch::new(KERNEL, "gdn_mix", &defines, grid, threads as u32, &args).cluster(2));
    Ok(())
}

/// `Shared` in `kernel.cu`.
fn shared_bytes(g: &GdnGeometry) -> usize {
    let columns = g.value_dim / 2;
    let width = 2 * g.key_dim + columns;
    let stream = (2 * CONV_TAPS - 1 + STAGE) * width;
    4 * (stream + STAGE * (2 * g.key_dim + 3 * columns) + columns + 7 * STAGE)
}
