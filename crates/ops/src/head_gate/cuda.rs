//! One thread for four neighbours.

use super::HeadGate;
use crate::Unsupported;
use crate::geometry::must_align;
use crate::kernel::{Card, Launch, Plan, Source};

const KERNEL: Source = Source { name: "head_gate/kernel.cu", text: include_str!("kernel.cu") };
const THREADS: usize = 256;

pub(super) fn plan(op: &HeadGate, _card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    must_align("head_gate", &[op.x, op.out.buf, op.q_gate.unwrap_or(op.x)])?;
    let width = op.out.width;
    let defines = [
        op.out.define("head_gate")?,
        ("WIDTH", width as i64),
        ("STRIDE", op.out.row_bytes() as i64),
        ("DIM", op.dim as i64),
        ("GATED", i64::from(op.q_gate.is_some())),
    ];
    let grid = [op.rows as u32, width.div_ceil(4 * THREADS) as u32, 1];
    let args = [op.x.into(), op.q_gate.into(), op.out.buf.into()];
    plan.push(Launch::new(KERNEL, "head_gate", &defines, grid, THREADS as u32, &args));
    Ok(())
}
