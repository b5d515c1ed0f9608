//! One thread for four neighbours, or for one where rows aren't aligned; a round's rows as a stage of a chain.

use super::CopyRows;
use crate::chain::{self, Kind};
use crate::geometry::aligned;
use crate::kernel::{Arg, Card, Launch, Plan, Source};
use crate::{ActDtype, Unsupported};

const KERNEL: Source = Source { name: "copy_rows/kernel.cu", text: include_str!("kernel.cu") };
const THREADS: usize = 256;

pub(super) fn plan(op: &CopyRows, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    let whole = op.width.is_multiple_of(4) && op.column.is_multiple_of(4);
    let vec = if whole && aligned(&[op.from, op.to.buf]) { 4 } else { 1 };
    let joins = vec == 4 && chain::joins(op.pass, op.rows) && op.to.dtype == ActDtype::Bf16;
    if joins && chain::supported(card) {
        let [width, column, stride, rows] =
            [op.width, op.column, op.to.row_bytes(), op.rows].map(|v| Arg::U32(v as u32));
        let words = [op.from.into(), op.to.buf.into(), width, column, stride, rows];
        plan.push(chain::stage(card, Kind::CopyRows, &[], 0, &words));
        return Ok(());
    }
    let defines = [
        op.to.define("copy_rows")?,
        ("VEC", vec as i64),
        ("WIDTH", op.width as i64),
        ("COLUMN", op.column as i64),
        ("STRIDE", op.to.row_bytes() as i64),
    ];
    let grid = [op.rows as u32, op.width.div_ceil(vec * THREADS) as u32, 1];
    let args = [op.from.into(), op.to.buf.into()];
    plan.push(Launch::new(KERNEL, "copy_rows", &defines, grid, THREADS as u32, &args));
    Ok(())
}
