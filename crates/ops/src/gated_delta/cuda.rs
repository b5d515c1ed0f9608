//! Launches on an NVIDIA card: row by row, or in chunks on matrix units.

use super::{GatedDelta, TILE};
use crate::gdn_prepare::{Commit, HeadMap};
use crate::kernel::{Arg, Card, Launch, Plan, Source};
use crate::{Op, PAGE_TOKENS, Unsupported};

const SCAN: Source = Source { name: "gated_delta/scan.cu", text: include_str!("scan.cu") };
const CHUNK: Source = Source {
    name: "gated_delta/chunk.cu",
    text: concat!(include_str!("../wgmma.cuh"), include_str!("chunk.cu")),
};

pub(super) fn plan(op: &GatedDelta, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    op.check()?;
    match Chunks::new(op, card) {
        Some(chunks) if op.commit == Commit::Immediate => chunks.push(op, plan),
        _ => scan(op, plan),
    }
    Ok(())
}

fn defines(op: &GatedDelta) -> [(&'static str, i64); 6] {
    let g = &op.geometry;
    [
        ("KEY_HEADS", g.key_heads as i64),
        ("VALUE_HEADS", g.value_heads as i64),
        ("KEY_DIM", g.key_dim as i64),
        ("VALUE_DIM", g.value_dim as i64),
        ("TILED", i64::from(g.head_map == HeadMap::Tiled)),
        ("BLOCK", op.block as i64),
    ]
}

fn scan(op: &GatedDelta, plan: &mut Plan) {
    let (g, lanes) = (&op.geometry, op.lanes);
    let [a, b, c, d, e, f] = defines(op);
    let deferred = ("DEFERRED", i64::from(op.commit == Commit::Deferred));
    let grid = [(g.value_dim / TILE) as u32, g.value_heads as u32, lanes.count as u32];
    let args = [
        op.q.into(),
        op.k.into(),
        op.v.into(),
        op.g.into(),
        op.beta.into(),
        op.state.into(),
        op.pending.into(),
        op.out.into(),
        lanes.step.into(),
    ];
    plan.push(Launch::new(SCAN, "scan", &[a, b, c, d, e, f, deferred], grid, 64, &args));
}

/// How a pass goes in chunks: see `chunk.cu`. Depends on the geometry and the card alone, never on the
/// pass, so that all passes of a model have the same sums.
struct Chunks {
    /// Tiles of a block, one to a warp.
    warps: usize,
    /// Chunks in shared memory.
    stages: usize,
}

impl Chunks {
    /// `None` if registers or shared memory don't reach.
    fn new(op: &GatedDelta, card: &Card) -> Option<Chunks> {
        let g = &op.geometry;
        let tiles = g.value_dim / TILE;
        let warps = (1..=4).rev().find(|&warps| tiles.is_multiple_of(warps))?;
        let room = (card.shared as usize).checked_sub(PANEL_ALIGN)?;
        let stages = (1..=2).rev().find(|stages| stages * stage_bytes(g.key_dim) <= room)?;
        let fits = g.key_dim <= 128 && prepare_bytes(g.key_dim) <= card.shared as usize;
        fits.then_some(Chunks { warps, stages })
    }

    fn push(&self, op: &GatedDelta, plan: &mut Plan) {
        let (g, lanes) = (&op.geometry, op.lanes);
        let [a, b, c, d, e, f] = defines(op);
        let warps = ("WARPS", self.warps as i64);
        let defines = [a, b, c, d, e, f, warps, ("STAGES", self.stages as i64)];
        let grid = [most_chunks(lanes.rows, lanes.count) as u32, g.key_heads as u32, 1];
        let args = [
            op.q.into(),
            op.k.into(),
            op.g.into(),
            op.beta.into(),
            op.scratch.into(),
            lanes.step.into(),
            Arg::U32(lanes.count as u32),
        ];
        if lanes.rows > 0 {
            let launch = Launch::new(CHUNK, "prepare", &defines, grid, 256, &args);
            plan.push(launch.shared(prepare_bytes(g.key_dim) as u32));
        }
        let blocks = g.value_dim / TILE / self.warps;
        let grid = [blocks as u32, g.value_heads as u32, lanes.count as u32];
        let args = [
            op.v.into(),
            op.state.into(),
            op.pending.into(),
            op.scratch.into(),
            op.out.into(),
            lanes.step.into(),
        ];
        let launch = Launch::new(CHUNK, "advance", &defines, grid, 32 * self.warps as u32, &args);
        plan.push(launch.shared((self.stages * stage_bytes(g.key_dim) + PANEL_ALIGN) as u32));
    }
}

/// The most chunks that the lanes of a pass can touch: one that starts or ends inside a chunk touches
/// up to 126 / 64 more than its rows fill.
pub(super) fn most_chunks(rows: usize, lanes: usize) -> usize {
    (rows + 126 * lanes.min(rows)) / PAGE_TOKENS
}

/// Keys and queries of a chunk and key head, in two parts.
pub(super) fn key_bytes(key_dim: usize) -> usize {
    4 * 2 * PAGE_TOKENS * key_dim
}

/// Two squares of a chunk and value head, in two parts, and two factors of each row.
pub(super) const VALUE_BYTES: usize = 4 * 2 * PAGE_TOKENS * PAGE_TOKENS + 2 * 4 * PAGE_TOKENS;

/// Of a chunk and value head, where panels start.
fn stage_bytes(key_dim: usize) -> usize {
    (key_bytes(key_dim) + VALUE_BYTES).next_multiple_of(PANEL_ALIGN)
}

/// Panels of matrices start at multiples of this.
const PANEL_ALIGN: usize = 1024;

/// `Prepared` in `chunk.cu`.
fn prepare_bytes(key_dim: usize) -> usize {
    let squares = 4 * (PAGE_TOKENS * PAGE_TOKENS + PAGE_TOKENS * (PAGE_TOKENS + 4) + 32 * 36);
    let columns = if key_dim.is_multiple_of(64) { 64 } else { key_dim };
    key_bytes(columns).max(squares) + 12 * PAGE_TOKENS
}
