//! Launches on an NVIDIA card.

use super::Attention;
use crate::geometry::must_align;
use crate::kernel::{Arg, Card, Launch, Plan, Source};
use crate::{Op, PAGE_TOKENS, Pass, Unsupported};

const SPLIT: Source = Source {
    name: "attention/split.cu",
    text: concat!(
        include_str!("items.cuh"),
        "\n#line 1 \"attention/split.cu\"\n",
        include_str!("split.cu"),
    ),
};
const FLASH: Source = Source {
    name: "attention/flash.cu",
    text: concat!(include_str!("../wgmma.cuh"), include_str!("flash.cu")),
};

/// Columns of the matrix products of one item of work: at most so many tiles of 8.
const MAX_TILES: usize = 8;
/// Warps of a block that compute.
const WARPS: u32 = 8;

pub(super) fn plan(op: &Attention, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    op.check()?;
    op.kv.must_be_bf16(op.name())?;
    let shared = flash_bytes(op.kv.head_dim);
    let wide = op.kv.head_dim.is_multiple_of(128) && shared <= card.shared as usize;
    if op.pass == Pass::Prompt && wide && card.arch == 90 {
        flash(op, shared, plan);
    } else {
        must_align(op.name(), &[op.q, op.out, op.scratch, op.lanes.step])?;
        let split = Split::new(op, card)?;
        split.push(op, card, plan);
    }
    Ok(())
}

/// What decides which keys a row sees.
fn defines(op: &Attention) -> [(&'static str, i64); 5] {
    [
        ("HEADS", op.heads as i64),
        ("KV_HEADS", op.kv.kv_heads as i64),
        ("DIM", op.kv.head_dim as i64),
        ("CAUSAL", i64::from(op.causal)),
        ("WINDOW", op.window.map_or(0, |w| w.min(u32::MAX as usize) as i64)),
    ]
}

/// What scores are multiplied by: for powers of two.
pub(crate) fn scale(op: &Attention) -> Arg {
    Arg::F32(op.scale * std::f32::consts::LOG2_E)
}

/// A prompt's rows: see `flash.cu`.
fn flash(op: &Attention, shared: usize, plan: &mut Plan) {
    const ROWS: usize = 128;
    let (kv, lanes) = (op.kv, op.lanes);
    let [a, b, c, d, e] = defines(op);
    let defines = [a, b, c, d, e, ("SHARED", shared as i64)];
    // Each lane may have a tile that is not full.
    let tiles = lanes.rows * (op.heads / kv.kv_heads) / ROWS + lanes.count;
    let grid = [kv.kv_heads as u32, tiles as u32, 1];
    let args = [
        op.q.into(),
        kv.keys.into(),
        kv.values.into(),
        kv.table.into(),
        lanes.step.into(),
        op.out.into(),
        Arg::U32(lanes.count as u32),
        Arg::U32(kv.max_pages as u32),
        scale(op),
    ];
    plan.push(Launch::new(FLASH, "flash", &defines, grid, 384, &args).shared(shared as u32));
}

/// `Shared` in `flash.cu`: queries of two warpgroups, two pages of keys and two of values; barriers, and
/// what it takes to start at a multiple of 1024.
fn flash_bytes(dim: usize) -> usize {
    6 * 2 * PAGE_TOKENS * dim + 2048
}

/// How a round's rows are split along their keys: see `split.cu`.
pub(crate) struct Split {
    /// Rows of a lane that one item of work has.
    pub(crate) rows: usize,
    tiles: usize,
    units: usize,
    /// Bytes of shared memory.
    pub(crate) shared: u32,
}

impl Split {
    pub(crate) fn new(op: &Attention, card: &Card) -> Result<Split, Unsupported> {
        let (group, dim) = (op.heads / op.kv.kv_heads, op.kv.head_dim);
        let shape = |max_tiles: usize| {
            let rows = op.lanes.max_rows.max(1);
            let most = (8 * max_tiles / group).max(1);
            // As many rows to each item.
            let rows = rows.div_ceil(rows.div_ceil(most));
            let tiles = (rows * group).div_ceil(8);
            let units = (card.shared as usize).saturating_sub(fixed_bytes(dim, tiles) + 128)
                / (unit_bytes(dim) + 16);
            (rows, tiles, units.min(8))
        };
        let (rows, tiles, units) = (1..=MAX_TILES)
            .rev()
            .map(shape)
            .find(|&(_, tiles, units)| tiles <= MAX_TILES && units >= 2)
            .ok_or_else(|| Unsupported {
                op: op.name(),
                what: format!("head_dim {dim} in {} bytes of shared memory", card.shared),
                limit: "two pages".to_owned(),
            })?;
        let units = if card.arch >= 90 { units } else { 2 };
        let shared = (fixed_bytes(dim, tiles) + 16 * units).next_multiple_of(128)
            + units * unit_bytes(dim).next_multiple_of(128);
        Ok(Split { rows, tiles, units, shared: shared as u32 })
    }

    pub(crate) fn defines(&self, op: &Attention) -> [(&'static str, i64); 10] {
        let [a, b, c, d, e] = defines(op);
        [
            a,
            b,
            c,
            d,
            e,
            ("CHUNKS", most_chunks(op.kv.kv_heads) as i64),
            ("ROWS", self.rows as i64),
            ("TILES", self.tiles as i64),
            ("UNITS", self.units as i64),
            ("SHARED", i64::from(self.shared)),
        ]
    }

    /// Whether scratch holds all rows' chunks, so that they are shared out among blocks.
    pub(crate) fn in_parts(op: &Attention) -> Arg {
        let bytes = op.lanes.rows * op.heads * partial_bytes(op.kv.kv_heads, op.kv.head_dim);
        Arg::U32(u32::from(op.scratch.bytes >= bytes))
    }

    /// One more warp keeps the ring full where there is a copy engine.
    pub(crate) fn threads(card: &Card) -> u32 {
        32 * (WARPS + u32::from(card.arch >= 90))
    }

    fn push(&self, op: &Attention, card: &Card, plan: &mut Plan) {
        let (kv, lanes) = (op.kv, op.lanes);
        let defines = self.defines(op);
        let (count, rows) = (Arg::U32(lanes.count as u32), Arg::U32(lanes.rows as u32));
        let in_parts = Split::in_parts(op);
        let args = [
            op.q.into(),
            kv.keys.into(),
            kv.values.into(),
            kv.table.into(),
            lanes.step.into(),
            op.out.into(),
            op.scratch.into(),
            count,
            Arg::U32(kv.max_pages as u32),
            rows,
            in_parts,
            scale(op),
        ];
        let blocks = [card.sms, 1, 1];
        let launch = Launch::new(SPLIT, "split", &defines, blocks, Split::threads(card), &args);
        plan.push(launch.shared(self.shared));
        let grid = [lanes.rows as u32, op.heads as u32, 1];
        let args = [lanes.step.into(), op.out.into(), op.scratch.into(), count, rows, in_parts];
        plan.push(Launch::new(SPLIT, "combine", &defines, grid, 64, &args));
    }
}

/// Shared memory beside the ring: `Shared` in `split.cu`.
fn fixed_bytes(dim: usize, tiles: usize) -> usize {
    let quarter = dim / 8 + (24 - dim / 8 % 16) % 16;
    let columns = 8 * tiles;
    let queries = 4 * (4 * quarter + 2);
    let weights = 2 * PAGE_TOKENS * 2 + 16;
    let totals = 4 * WARPS as usize;
    let (maxima, whole, factors, places) = (3 * 4, 8, 8, 4);
    columns * (queries + weights + totals + maxima + whole + factors + places)
}

/// The most chunks that a row's keys are split into, unless its window begins inside one: about one item for each block of a
/// large card. Not of the card at hand: a row's bits depend on it.
fn most_chunks(kv_heads: usize) -> usize {
    (132 / kv_heads).clamp(16, 66)
}

/// Scratch for one row and head: `Scratch` in `split.cu`.
pub(super) fn partial_bytes(kv_heads: usize, head_dim: usize) -> usize {
    let places = (most_chunks(kv_heads) + 1).next_multiple_of(2);
    4 * places * (head_dim + 2)
}

/// Shared memory of one page of keys or values.
fn unit_bytes(dim: usize) -> usize {
    2 * PAGE_TOKENS * dim + 128
}
