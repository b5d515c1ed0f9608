//! One kernel for every format; the format's numbers are compiled in.

use super::Embed;
use crate::Unsupported;
use crate::geometry::must_align;
use crate::kernel::{Card, Launch, Plan, Source};
use crate::linear::cuda::{format_define, weight_defines};
use crate::linear::layout::Layout;

const KERNEL: Source = Source {
    name: "embed/kernel.cu",
    text: concat!(include_str!("../linear/weight.cuh"), include_str!("kernel.cu")),
};
const THREADS: usize = 256;

pub(super) fn plan(op: &Embed, _card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    let table = op.table;
    must_align("embed", &[table.buf, op.out])?;
    let [a, b, c, d] = weight_defines(Layout::of(table.format));
    let defines = [a, b, c, d, format_define(table.format)];
    let grid = [op.rows as u32, table.k.div_ceil(4 * THREADS) as u32, 1];
    let [n, k] = [table.n as u32, table.k as u32].map(Into::into);
    let args = [op.ids.into(), table.buf.into(), op.out.into(), n, k];
    plan.push(Launch::new(KERNEL, "embed", &defines, grid, THREADS as u32, &args));
    Ok(())
}
