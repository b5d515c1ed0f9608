//! Which kernel multiplies: one for prompts and one for rounds, both for quantised weights and bf16
//! activations, and one for everything else.
//!
//! Within each, a row takes the same sums in the same order, whatever the rows beside it. Which it is follows from the
//! kind of pass, from formats, shapes and the card; but a round of more than [`chain::LIKE_ALONE`] rows is multiplied as a prompt.

use super::layout::Layout;
use super::{Linear, LinearPart};
use crate::chain::{self, Kind};
use crate::geometry::aligned;
use crate::kernel::{Arg, Card, Launch, Plan, Source, WORK_BYTES};
use crate::{ActDtype, Buf, Codes, Format, Pass, ScaleDtype, Unsupported};

const MANY: Source = Source {
    name: "linear/many.cu",
    text: concat!(
        include_str!("weight.cuh"),
        include_str!("fragments.cuh"),
        include_str!("../wgmma.cuh"),
        include_str!("rounded.cuh"),
        include_str!("many.cu")
    ),
};
const SHORT: Source = Source {
    name: "linear/short.cu",
    text: concat!(
        include_str!("weight.cuh"),
        include_str!("fragments.cuh"),
        include_str!("../wgmma.cuh"),
        include_str!("rounded.cuh"),
        include_str!("short.cu")
    ),
};
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
            many(op, &group, card, plan);
        } else {
            few(op, &group, card, plan)?;
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

/// How a prompt's products are shared out: tiles of so many rows and outputs. No row's bits depend on it.
#[derive(Clone, Copy, Debug)]
enum Many {
    /// `many.cu`.
    Large,
    /// `short.cu`: 64 for each warpgroup that computes.
    Short { rows: usize, groups: usize, stages: usize },
}

impl Many {
    /// The tiles whose waves take least time, where `tiles` counts those of so many outputs.
    fn new(rows: usize, layout: Layout, tiles: &dyn Fn(usize) -> usize, card: &Card) -> Many {
        let short = [(16, 3), (32, 3), (48, 3), (64, 4), (96, 2)];
        let short = short.into_iter().flat_map(|(rows, most)| (1..=most).map(move |g| (rows, g)));
        let short = short.filter_map(|(rows, groups)| Many::short(rows, groups, layout, card));
        let waves = |m: &Many| {
            let (of, outputs) = m.tile();
            (rows.div_ceil(of) * tiles(outputs)).div_ceil(card.sms as usize)
        };
        short.fold(Many::Large, |best, m| {
            if waves(&m) * m.wave() < waves(&best) * best.wave() { m } else { best }
        })
    }

    /// With as long a ring as there is room for.
    fn short(rows: usize, groups: usize, layout: Layout, card: &Card) -> Option<Many> {
        let stage = Many::stage(rows, groups, layout)?;
        let stages = ((card.shared as usize).saturating_sub(1024) / stage).min(8);
        (stages >= 3).then_some(Many::Short { rows, groups, stages })
    }

    /// Bytes of a stage of `short.cu`: 256 inputs and two barriers.
    fn stage(rows: usize, groups: usize, layout: Layout) -> Option<usize> {
        Some(512 * rows + 2 * groups * layout.tile_bytes(256)? + 16)
    }

    /// Rows and outputs.
    fn tile(&self) -> (usize, usize) {
        match *self {
            Many::Large => (160, 256),
            Many::Short { rows, groups, .. } => (rows, 64 * groups),
        }
    }

    /// A wave's time for 64 inputs, in twentieths of a cycle of an H200: fits of what was measured, to 5 %.
    fn wave(&self) -> usize {
        match *self {
            Many::Large => 34_650,
            Many::Short { rows, groups, .. } => 1400 + 2260 * groups + (28 + 13 * groups) * rows,
        }
    }
}

fn many(op: &Linear, group: &Group<'_>, card: &Card, plan: &mut Plan) {
    let tiles = |of: usize| group.weights().map(|p| p.weight.n.div_ceil(of)).sum();
    let how = Many::new(op.rows, group.layout, &tiles, card);
    let [a, b, c, d] = weight_defines(Some(group.layout));
    let define = |name, value: usize| (name, value as i64);
    let args = group.args(op, 0, op.rows);
    let (rows, outputs) = how.tile();
    let (rows, outputs) = (op.rows.div_ceil(rows) as u32, tiles(outputs) as u32);
    let (launch, shared) = match how {
        Many::Large => {
            const STAGES: usize = 6;
            let (defines, grid) = ([a, b, c, d], [rows, outputs, 1]);
            let launch = Launch::new(MANY, "linear_many", &defines, grid, 384, &args);
            (launch, STAGES * (128 * 160 + 16) + 1024)
        }
        Many::Short { rows: of, groups, stages } => {
            let (of_rows, stages_of) = (define("ROWS", of), define("STAGES", stages));
            let defines = [a, b, c, d, of_rows, define("GROUPS", groups), stages_of];
            let (grid, threads) =
                ([(rows * outputs).min(card.sms), 1, 1], 128 * (1 + groups) as u32);
            let launch = Launch::new(SHORT, "linear_short", &defines, grid, threads, &args);
            let stage = Many::stage(of, groups, group.layout).unwrap_or_default();
            (launch, stages * stage + 1024)
        }
    };
    plan.push(launch.shared(shared as u32));
}

/// Each of a block's warps takes 64 inputs of a chunk.
const CHUNK: usize = 64 * chain::WARPS;
/// Chunks whose activations a warp holds.
const X_AHEAD: usize = 3;
/// Half tiles of a pass that `product.cuh` has code for, each with the define that asks for it.
const PASSES: [(usize, &str); 6] =
    [(2, "T_2"), (3, "T_3"), (4, "T_4"), (5, "T_5"), (8, "T_8"), (9, "T_9")];
const SPLIT_PASSES: [(usize, &str); 2] = [(3, "T_3_2"), (5, "T_5_2")];

/// How a chain goes about a product: `product.cuh`, or `wide.cuh`.
#[derive(Clone, Copy, Debug)]
struct Few {
    /// Of eight rows.
    blocks: usize,
    ring: usize,
    shared: usize,
    tiles: usize,
    split: usize,
    /// The define that asks for this number of half tiles of a pass, in `product.cuh`.
    pass: Option<&'static str>,
}

impl Few {
    /// For up to `8 · blocks` rows. Which blocks share k does not depend on the rows: it decides the
    /// order of sums.
    fn new(group: &Group<'_>, card: &Card, blocks: usize) -> Option<Few> {
        let (split, run) = split(group.half_tiles(), group.k, card);
        if chain::wide(card, 8 * blocks) {
            Few::wide(group, card, blocks, (split, run))
        } else {
            Few::narrow(group, card, blocks, (split, run))
        }
    }

    fn narrow(
        group: &Group<'_>,
        card: &Card,
        blocks: usize,
        (split, run): (usize, usize),
    ) -> Option<Few> {
        // Accumulators are in registers.
        let most = if blocks > 2 { 5 } else { 9 };
        let known: &[(usize, &str)] = if split > 1 { &SPLIT_PASSES } else { &PASSES };
        let pass = run.div_ceil(run.div_ceil(most));
        let &(tiles, pass) = known.iter().find(|(tiles, _)| (pass..=most).contains(tiles))?;
        let layout = group.layout;
        // As in product.cuh: as many half tiles of a chunk as registers hold.
        let slot_tiles = match (blocks, layout.codes) {
            (1, Codes::U8) => 2,
            (1, _) => 3,
            _ => 1,
        };
        let slot = slot_tiles * CHUNK / layout.span() * layout.span_bytes() / 2;
        let (round, barriers) = (8 / blocks, 512);
        let sums = chain::WARPS * (X_AHEAD * blocks * 1024 + round * blocks * 512);
        let rest = sums + 2 * 3 * blocks * 512 + barriers;
        let ring = (chain::SHARED.min(card.shared as usize).checked_sub(rest)? / slot).min(24);
        let few = Few { blocks, ring, shared: rest + ring * slot, tiles, split, pass: Some(pass) };
        (ring >= 2).then_some(few)
    }

    /// As in wide.cuh.
    fn wide(
        group: &Group<'_>,
        card: &Card,
        blocks: usize,
        (split, run): (usize, usize),
    ) -> Option<Few> {
        let rows = 8 * blocks;
        let (most, panels) = if rows == 64 { (18, 3) } else { (24, 4) };
        if panel_bytes(group, rows) > WORK_BYTES {
            return None;
        }
        let slot = 24 * group.layout.cell_bytes();
        let rest = 1024 + 3 * panels * unit_panel_bytes(group, rows) + most * rows * 64 + 512;
        let free = (card.shared as usize).checked_sub(rest + chain::STATIC_SHARED)?;
        let (ring, tiles) = ((free / slot).min(8), run.div_ceil(run.div_ceil(most)));
        let few = Few { blocks, ring, shared: rest + ring * slot, tiles, split, pass: None };
        (ring >= 2).then_some(few)
    }
}

/// What panels.cuh makes of 64 inputs of some rows: bf16, and f32 sums of the parts that share a scale.
fn unit_panel_bytes(group: &Group<'_>, rows: usize) -> usize {
    128 * rows + 4 * rows * (64 / group.layout.group.min(64))
}

/// What panels.cuh makes of all inputs.
fn panel_bytes(group: &Group<'_>, rows: usize) -> usize {
    group.k / 64 * unit_panel_bytes(group, rows)
}

/// Blocks that share k, and the most half tiles of a run.
fn split(tiles: usize, k: usize, card: &Card) -> (usize, usize) {
    let sms = chain::blocks(card);
    let run = |split: usize| tiles.div_ceil(sms / split);
    let chunks = k.div_ceil(CHUNK);
    // One pass only, in which the blocks of a cluster exchange what they have.
    let two = run(2) <= 5 && chunks >= 2;
    let cost = |split: usize| run(split) * chunks.div_ceil(split);
    let split = if two && 20 * cost(2) < 19 * cost(1) { 2 } else { 1 };
    (split, run(split))
}

fn few(op: &Linear, group: &Group<'_>, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    let sizes: &[usize] = if card.arch == 90 { &[1, 2, 4, 8] } else { &[1, 2, 4] };
    let mut first = 0;
    while first < op.rows {
        let left = op.rows - first;
        let fit = sizes.iter().filter_map(|&blocks| Few::new(group, card, blocks));
        // The fewest that hold all rows, or else as many as can be.
        let Some(few) = fit.reduce(|best, next| if 8 * best.blocks < left { next } else { best })
        else {
            let what = format!("{} bytes of shared memory", card.shared);
            return Err(Unsupported { op: "linear", what, limit: "a few stages".to_owned() });
        };
        let rows = left.min(8 * few.blocks);
        let [a, b, c, d] = weight_defines(Some(group.layout));
        let define = |name, value: usize| (name, value as i64);
        let (blocks, ring) = (define("BLOCKS", few.blocks), define("RING", few.ring));
        let defines = [a, b, c, d, blocks, ring];
        let defines = defines.into_iter().chain(few.pass.map(|pass| (pass, 1))).collect::<Vec<_>>();
        let args = group.args(op, first, rows);
        let mut words = [Arg::Null; 19];
        words[..5].copy_from_slice(&args[..5]);
        if chain::wide(card, 8 * few.blocks) {
            let panels = [&args[..4], &[Arg::Work]].concat();
            plan.push(chain::stage(card, Kind::Panels, &defines, few.shared, &panels));
            words[0] = Arg::Work;
        }
        words[5..7].copy_from_slice(&[few.tiles, few.split].map(|v| Arg::U32(v as u32)));
        words[7..].copy_from_slice(&args[5..]);
        plan.push(chain::stage(card, Kind::Product, &defines, few.shared, &words));
        first += rows;
    }
    Ok(())
}
