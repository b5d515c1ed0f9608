//! A prompt's rows: `many.cu` and, for fewer rows, `short.cu`. A row's bits don't depend on which.

use super::{Group, weight_defines};
use crate::kernel::{Card, Launch, Plan, Source};
use crate::linear::Linear;
use crate::linear::layout::Layout;

const MANY: Source = Source {
    name: "linear/many.cu",
    text: concat!(
        include_str!("../weight.cuh"),
        include_str!("../fragments.cuh"),
        include_str!("../../wgmma.cuh"),
        include_str!("../rounded.cuh"),
        include_str!("../many.cu")
    ),
};
const SHORT: Source = Source {
    name: "linear/short.cu",
    text: concat!(
        include_str!("../weight.cuh"),
        include_str!("../fragments.cuh"),
        include_str!("../../wgmma.cuh"),
        include_str!("../rounded.cuh"),
        include_str!("../short.cu")
    ),
};

pub(super) fn plan(op: &Linear, group: &Group<'_>, card: &Card, plan: &mut Plan) {
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
