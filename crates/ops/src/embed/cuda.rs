//! One kernel for every format; the format's numbers are compiled in.

use super::Embed;
use crate::geometry::must_align;
use crate::kernel::{Card, Launch, Plan, Source};
use crate::linear::layout::Layout;
use crate::{Codes, Format, ScaleDtype, Unsupported};

const KERNEL: Source = Source { name: "embed/kernel.cu", text: include_str!("kernel.cu") };
const THREADS: usize = 256;

pub(super) fn plan(op: &Embed, _card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    let table = op.table;
    must_align("embed", &[table.buf, op.out])?;
    let piece = table.format.piece_bytes(table.k).unwrap_or_default();
    let common = [("K", table.k as i64), ("PIECE_BYTES", piece as i64)];
    let grid = [op.rows as u32, table.k.div_ceil(4 * THREADS) as u32, 1];
    let args = [op.ids.into(), table.buf.into(), op.out.into(), (table.n as u32).into()];
    let mut push = |defines: &[(&'static str, i64)]| {
        plan.push(Launch::new(KERNEL, "embed", defines, grid, THREADS as u32, &args));
    };
    let Some(layout) = Layout::of(table.format) else {
        let dtype = match table.format {
            Format::F16 => 1,
            Format::Bf16 => 2,
            _ => 0,
        };
        push(&[common[0], common[1], ("QUANTISED", 0), ("SCALE", dtype)]);
        return Ok(());
    };
    let scale = match layout.scale {
        ScaleDtype::F32 => 0,
        ScaleDtype::F16 => 1,
        ScaleDtype::Bf16 => 2,
        ScaleDtype::TwoLevel => 3,
    };
    let codes = match layout.codes {
        Codes::U4 => 0,
        Codes::U8 => 1,
        Codes::Iq4 => 2,
    };
    push(&[
        common[0],
        common[1],
        ("QUANTISED", 1),
        ("SCALE", scale),
        ("CODES", codes),
        ("SYMMETRIC", i64::from(layout.symmetric)),
        ("GROUP", layout.group as i64),
        ("SPAN", layout.span() as i64),
        ("SPAN_BYTES", layout.span_bytes() as i64),
        ("HEADER_BYTES", layout.header_bytes() as i64),
        ("SCALE_BYTES", layout.scale_bytes() as i64),
        ("SUB_SCALES", layout.sub_scales() as i64),
        ("ZERO", i64::from(layout.zero())),
    ]);
    Ok(())
}
