//! A round's rows as a stage of a chain; otherwise one block for each row. Both add in the same order.

use super::RmsNorm;
use crate::chain::{self, Kind};
use crate::geometry::must_align;
use crate::kernel::{Arg, Card, Launch, Plan, Source};
use crate::{ActDtype, Unsupported};

const KERNEL: Source = Source {
    name: "rms_norm/kernel.cu",
    text: concat!(include_str!("row.cuh"), include_str!("kernel.cu")),
};
/// Threads for a row of usual width, in whose registers it lies.
const THREADS: usize = 32 * chain::WARPS;

pub(super) fn plan(op: &RmsNorm, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    must_align("rms_norm", &[op.x, op.weight, op.out.buf])?;
    let (width, stride) = (op.out.width, op.out.row_bytes());
    // Registers hold a row.
    let what = || format!("width {width} on CUDA");
    Unsupported::unless(width <= 65536, "rms_norm", what, "widths up to 65536")?;
    let act = op.out.define("rms_norm")?;
    let usual = width <= 64 * THREADS;
    let joins = usual && chain::joins(op.pass, op.rows) && op.out.dtype == ActDtype::Bf16;
    if joins && chain::supported(card) {
        let numbers = [op.eps.into(), (stride as u32).into(), (op.rows as u32).into()];
        let [eps, stride, rows]: [Arg; 3] = numbers;
        let words = [op.x.into(), op.weight.into(), op.out.buf.into(), eps, stride, rows];
        let defines = [("NORM_WIDTH", width as i64)];
        plan.push(chain::stage(card, Kind::RmsNorm, &defines, 0, &words));
        return Ok(());
    }
    let threads = if usual { THREADS } else { 1024 };
    let number = |name, value: usize| (name, value as i64);
    let defines =
        [act, number("WIDTH", width), number("STRIDE", stride), number("THREADS", threads)];
    let args = [op.x.into(), op.weight.into(), op.out.buf.into(), op.eps.into()];
    let grid = [op.rows as u32, 1, 1];
    plan.push(Launch::new(KERNEL, "rms_norm", &defines, grid, threads as u32, &args));
    Ok(())
}
