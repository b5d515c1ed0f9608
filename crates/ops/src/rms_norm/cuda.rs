//! One block for each row, about two vectors for each thread.

use super::RmsNorm;
use crate::Unsupported;
use crate::geometry::must_align;
use crate::kernel::{Card, Launch, Plan, Source};

const KERNEL: Source = Source { name: "rms_norm/kernel.cu", text: include_str!("kernel.cu") };

pub(super) fn plan(op: &RmsNorm, _card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    must_align("rms_norm", &[op.x, op.weight, op.out.buf])?;
    let width = op.out.width;
    let threads = width.div_ceil(8).next_multiple_of(32).min(1024);
    let vecs = (width / 4).div_ceil(threads);
    // Registers hold a row.
    let what = || format!("width {width} on CUDA");
    Unsupported::unless(vecs <= 16, "rms_norm", what, "widths up to 65536")?;
    let defines = [
        op.out.define("rms_norm")?,
        ("WIDTH", width as i64),
        ("STRIDE", op.out.row_bytes() as i64),
        ("THREADS", threads as i64),
        ("VECS", vecs as i64),
    ];
    let args = [op.x.into(), op.weight.into(), op.out.buf.into(), op.eps.into()];
    let grid = [op.rows as u32, 1, 1];
    plan.push(Launch::new(KERNEL, "rms_norm", &defines, grid, threads as u32, &args));
    Ok(())
}
