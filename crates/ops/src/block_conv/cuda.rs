//! One thread for four neighbours.

use super::{BlockConv, BlockConvOut};
use crate::geometry::must_align;
use crate::kernel::{Card, Launch, Plan, Source};
use crate::{ActDtype, Unsupported};

const KERNEL: Source = Source { name: "block_conv/kernel.cu", text: include_str!("kernel.cu") };
const THREADS: usize = 256;

pub(super) fn plan(op: &BlockConv, _card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    let name = "block_conv";
    op.x.define(name)?;
    let (out, act, stride, add) = match op.out {
        BlockConvOut::Act(act) => (act.buf, act.define(name)?, act.row_bytes(), 0),
        BlockConvOut::Add(buf) => (buf, ("ACT_BF16", 0), 4 * op.width, 1),
    };
    must_align(name, &[op.x.buf, op.base, out])?;
    let defines = [
        act,
        ("STRIDE", stride as i64),
        ("ADD", add),
        ("X_BF16", i64::from(op.x.dtype == ActDtype::Bf16)),
        ("X_STRIDE", op.x.row_bytes() as i64),
        ("WIDTH", op.width as i64),
        ("GROUP", op.group as i64),
        ("TAPS", op.taps as i64),
        ("SIDE", op.side as i64),
    ];
    let grid = [op.lanes.rows as u32, op.width.div_ceil(4 * THREADS) as u32, 1];
    let count = (op.lanes.count as u32).into();
    let args = [
        op.x.buf.into(),
        op.dynamic.into(),
        op.base.into(),
        op.lanes.step.into(),
        count,
        out.into(),
    ];
    plan.push(Launch::new(KERNEL, name, &defines, grid, THREADS as u32, &args));
    Ok(())
}
