//! Which kernel multiplies: one for prompts and one for rounds, both for quantised weights and bf16
//! activations, and one for everything else.
//!
//! Within each, a row takes the same sums in the same order, whatever the rows beside it. Which it is follows from the
//! kind of pass, from formats, shapes and the card; but a round of more than [`chain::LIKE_ALONE`] rows is multiplied as a prompt.

mod prompt;
mod round;

use super::layout::Layout;
use super::{Linear, LinearPart};
use crate::chain;
use crate::geometry::aligned;
use crate::kernel::{Arg, Card, Launch, Plan, Source};
use crate::{ActDtype, Buf, Codes, Format, Pass, ScaleDtype, Unsupported};

const ANY: Source = Source {
    name: "linear/any.cu",
    text: concat!(include_str!("weight.cuh"), include_str!("any.cu")),
};

pub(super) fn plan(op: &Linear, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    let act = op.x.define("linear")?;
    if op.rows == 0 {
        return Ok(());
    }
    let parts = op.parts();
    let mut done = [false; Linear::MAX_PARTS];
    for first in 0..parts.len() {
        if done[first] {
            continue;
        }
        let format = parts[first].weight.format;
        let Some(layout) = tensor_cores(op, card, format) else {
            any(op, &parts[first], act, plan);
            continue;
        };
        // All parts of this format in one launch.
        let mut group = Group { parts: [None; Linear::MAX_PARTS], k: op.x.width, layout };
        let same = parts.iter().enumerate().filter(|(_, p)| p.weight.format == format);
        for (slot, (i, part)) in group.parts.iter_mut().zip(same) {
            (done[i], *slot) = (true, Some(part));
        }
        if card.arch == 90 && (op.pass == Pass::Prompt || op.rows > chain::LIKE_ALONE) {
            prompt::plan(op, &group, card, plan);
        } else {
            round::plan(op, &group, card, plan)?;
        }
    }
    Ok(())
}

/// The layout, if the kernels on tensor cores can do it.
fn tensor_cores(op: &Linear, card: &Card, format: Format) -> Option<Layout> {
    let same = |p: &&LinearPart| p.weight.format == format;
    let fits = op.x.dtype == ActDtype::Bf16
        && chain::supported(card)
        && op.x.width.is_multiple_of(64)
        && aligned(&[op.x.buf])
        && op.parts().iter().filter(same).all(|p| aligned(&[p.weight.buf]));
    Layout::of(format).filter(|_| fits)
}

/// Parts of one format.
struct Group<'a> {
    parts: [Option<&'a LinearPart>; Linear::MAX_PARTS],
    k: usize,
    layout: Layout,
}

impl Group<'_> {
    fn weights(&self) -> impl Iterator<Item = &LinearPart> {
        self.parts.iter().copied().flatten()
    }

    /// Half tiles of 16 outputs.
    fn half_tiles(&self) -> usize {
        self.weights().map(|p| p.weight.n.div_ceil(16)).sum()
    }

    /// Arguments of a launch for some of the rows.
    fn args(&self, op: &Linear, first: usize, rows: usize) -> [Arg; 17] {
        let stride = op.x.row_bytes();
        let adds = self.weights().enumerate().map(|(i, p)| u32::from(p.add) << i).sum::<u32>();
        let x = op.x.buf.slice(first * stride, rows * stride);
        let mut args = [Arg::Null; 17];
        let head = [stride, rows, self.k].map(|v| Arg::U32(v as u32));
        args[0] = x.into();
        args[1..4].copy_from_slice(&head);
        args[4] = adds.into();
        for (args, part) in args[5..].chunks_exact_mut(3).zip(self.parts) {
            let n = part.map_or(0, |p| p.weight.n);
            let rows_of = |out: Buf| out.slice(4 * first * n, 4 * rows * n);
            args[0] = part.map(|p| p.weight.buf).into();
            args[1] = part.map(|p| rows_of(p.out)).into();
            args[2] = (n as u32).into();
        }
        args
    }
}

/// What `weight.cuh` wants to know; anything, for dense formats.
pub(crate) fn weight_defines(layout: Option<Layout>) -> [(&'static str, i64); 4] {
    let filler = Layout { codes: Codes::U4, symmetric: false, group: 64, scale: ScaleDtype::Bf16 };
    let layout = layout.unwrap_or(filler);
    let codes = match layout.codes {
        Codes::U4 => 0,
        Codes::U8 => 1,
        Codes::Iq4 => 2,
    };
    let scale = match layout.scale {
        ScaleDtype::F16 => 0,
        ScaleDtype::Bf16 => 1,
        ScaleDtype::F32 => 2,
        ScaleDtype::TwoLevel => 3,
    };
    let symmetric = i64::from(layout.symmetric);
    [("CODES", codes), ("SYMMETRIC", symmetric), ("GROUP", layout.group as i64), ("SCALE", scale)]
}

/// What the general kernels call a format.
pub(crate) fn format_define(format: Format) -> (&'static str, i64) {
    let number = match format {
        Format::Affine { .. } | Format::Symmetric { .. } => 0,
        Format::F32 => 1,
        Format::F16 => 2,
        Format::Bf16 => 3,
    };
    ("FORMAT", number)
}

fn any(op: &Linear, part: &LinearPart, act: (&'static str, i64), plan: &mut Plan) {
    let (weight, k) = (part.weight, op.x.width);
    let vector = k.is_multiple_of(8) && aligned(&[op.x.buf, weight.buf]);
    let [a, b, c, d] = weight_defines(Layout::of(weight.format));
    let vector = ("VECTOR", if vector { 8 } else { 1 });
    let defines = [a, b, c, d, format_define(weight.format), act, vector];
    let [stride, rows, n, k, add] =
        [op.x.row_bytes(), op.rows, weight.n, k, usize::from(part.add)].map(|v| Arg::U32(v as u32));
    let args = [op.x.buf.into(), stride, rows, n, k, add, weight.buf.into(), part.out.into()];
    let grid = [weight.n.div_ceil(8) as u32, op.rows.div_ceil(8) as u32, 1];
    plan.push(Launch::new(ANY, "linear_any", &defines, grid, 256, &args));
}
