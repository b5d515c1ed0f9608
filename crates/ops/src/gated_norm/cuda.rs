//! One warp for each head.

use super::GatedNorm;
use crate::Unsupported;
use crate::geometry::must_align;
use crate::kernel::{Card, Launch, Plan, Source};

const KERNEL: Source = Source { name: "gated_norm/kernel.cu", text: include_str!("kernel.cu") };
const WARPS: usize = 4;

pub(super) fn plan(op: &GatedNorm, _card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    must_align("gated_norm", &[op.x, op.gate, op.weight, op.out.buf])?;
    let width = op.out.width;
    let vecs = op.dim.div_ceil(128);
    let what = || format!("dim {} on CUDA", op.dim);
    Unsupported::unless(vecs <= 8, "gated_norm", what, "heads of up to 1024")?;
    let defines = [
        op.out.define("gated_norm")?,
        ("WIDTH", width as i64),
        ("STRIDE", op.out.row_bytes() as i64),
        ("DIM", op.dim as i64),
        ("VECS", vecs as i64),
    ];
    let grid = [op.rows as u32, (width / op.dim).div_ceil(WARPS) as u32, 1];
    let args = [op.x.into(), op.gate.into(), op.weight.into(), op.out.buf.into(), op.eps.into()];
    plan.push(Launch::new(KERNEL, "gated_norm", &defines, grid, 32 * WARPS as u32, &args));
    Ok(())
}
