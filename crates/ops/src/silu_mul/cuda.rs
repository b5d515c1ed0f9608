//! One thread for four neighbours; a round's rows as a stage of a chain.

use super::SiluMul;
use crate::chain::{self, Kind};
use crate::geometry::must_align;
use crate::kernel::{Arg, Card, Launch, Plan, Source};
use crate::{ActDtype, Unsupported};

const KERNEL: Source = Source { name: "silu_mul/kernel.cu", text: include_str!("kernel.cu") };
const THREADS: usize = 256;

pub(super) fn plan(op: &SiluMul, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    must_align("silu_mul", &[op.gate, op.up, op.out.buf])?;
    let width = op.out.width;
    if chain::joins(op.pass, op.rows) && op.out.dtype == ActDtype::Bf16 && chain::supported(card) {
        let [width, stride, rows] =
            [width, op.out.row_bytes(), op.rows].map(|v| Arg::U32(v as u32));
        let words = [op.gate.into(), op.up.into(), op.out.buf.into(), width, stride, rows];
        plan.push(chain::stage(card, Kind::SiluMul, &[], 0, &words));
        return Ok(());
    }
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
