//! One thread for four neighbours.

use super::SiluMul;
use crate::Unsupported;
use crate::geometry::must_align;
use crate::kernel::{Card, Launch, Plan, Source};

const KERNEL: Source = Source { name: "silu_mul/kernel.cu", text: include_str!("kernel.cu") };
const THREADS: usize = 256;

pub(super) fn plan(op: &SiluMul, _card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    must_align("silu_mul", &[op.gate, op.up, op.out.buf])?;
    let width = op.out.width;
    let defines = [
        op.out.define("silu_mul")?,
        ("WIDTH", width as i64),
        ("STRIDE", op.out.row_bytes() as i64),
    ];
    let grid = [op.rows as u32, width.div_ceil(4 * THREADS) as u32, 1];
    let args = [op.gate.into(), op.up.into(), op.out.buf.into()];
    plan.push(Launch::new(KERNEL, "silu_mul", &defines, grid, THREADS as u32, &args));
    Ok(())
}
