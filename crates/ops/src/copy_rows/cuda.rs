//! One thread for four neighbours, or for one where rows aren't aligned.

use super::CopyRows;
use crate::Unsupported;
use crate::geometry::aligned;
use crate::kernel::{Card, Launch, Plan, Source};

const KERNEL: Source = Source { name: "copy_rows/kernel.cu", text: include_str!("kernel.cu") };
const THREADS: usize = 256;

pub(super) fn plan(op: &CopyRows, _card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    let whole = op.width.is_multiple_of(4) && op.column.is_multiple_of(4);
    let vec = if whole && aligned(&[op.from, op.to.buf]) { 4 } else { 1 };
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
