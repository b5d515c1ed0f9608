//! Who computes what.
//!
//! A tile is a few rows of one lane and the query heads of one key/value head. With enough tiles
//! for the threads, each runs through all its splits on its own. With few (decode, verify), splits
//! run side by side, [`SPLITS_AT_ONCE`] at most, leave partial results in scratch, and a second
//! step merges them in order. Both make the same calls for a row, so its bits don't tell which ran.

use super::block::{
    Block, HEADER, MAX_QUERIES, Seen, Total, Weights, clear, finish, merge, take_block,
};
use super::{Attention, SPLIT_PAGES};
use crate::simd::{Kernel, Simd};
use crate::{Buf, Cpu, LaneStep, Mem, PAGE_TOKENS};

/// Splits of a row whose partial results scratch has room for.
pub(super) const SPLITS_AT_ONCE: usize = 32;
/// Scratch for a query's running total.
pub(super) const TOTAL_BYTES: usize = 64;
const SPLIT_TOKENS: usize = SPLIT_PAGES * PAGE_TOKENS;
/// Runs of splits per thread: enough for the last ones to end at about the same time.
const RUNS_PER_THREAD: usize = 8;
/// Work items per thread below which splits run in parallel.
const ITEMS_PER_THREAD: usize = 4;

/// Scratch for a query's partial result of one split.
pub(super) fn partial_bytes(head_dim: usize) -> usize {
    4 * (HEADER + head_dim)
}

pub(super) fn run(op: &Attention, mem: &Mem, cpu: &Cpu) {
    let tiles = Tiles { op, mem, steps: op.lanes.steps(mem) };
    let items = tiles.count() * op.kv.kv_heads;
    let threads = cpu.pool.threads();
    if threads > 1 && items < ITEMS_PER_THREAD * threads {
        let splits = (0..tiles.count()).filter_map(|i| tiles.get(i, 0)).map(|t| t.splits().len());
        let width = tiles.partials().min(splits.clone().max().unwrap_or(0));
        if width > 1 {
            return side_by_side(&tiles, splits.max().unwrap_or(0), width, cpu);
        }
    }
    // The last rows see the most keys, so they go first.
    cpu.pool.run(items, &|chunk| {
        if let Some(tile) = tiles.item(items - 1 - chunk) {
            let length = tile.queries() * tile.stride();
            with_zeros(length, |partials| cpu.isa.dispatch(Alone { tile, partials }));
        }
    });
}

/// Waves of `width` splits of every tile, each followed by a merge into the rows' totals.
fn side_by_side(tiles: &Tiles, splits: usize, width: usize, cpu: &Cpu) {
    let items = tiles.count() * tiles.op.kv.kv_heads;
    // Neighbouring splits go to the same thread, which reads ahead from one into the next.
    let run = (items * width / (RUNS_PER_THREAD * cpu.pool.threads())).clamp(1, width);
    let runs = width.div_ceil(run);
    for wave in (0..splits).step_by(width) {
        cpu.pool.run(items * runs, &|chunk| {
            let Some(tile) = tiles.item(chunk / runs) else { return };
            let first = chunk % runs * run;
            for nth in first..(first + run).min(width) {
                let split = tile.splits().start + wave + nth;
                if split < tile.splits().end {
                    let partials = tile.mem.get_mut(tiles.partial(&tile, nth));
                    cpu.isa.dispatch(Split { tile, split, partials });
                }
            }
        });
        cpu.pool.run(items, &|chunk| {
            if let Some(tile) = tiles.item(chunk) {
                cpu.isa.dispatch(Merge { tiles, tile, wave, width });
            }
        });
    }
}

/// Calls `f` with a zeroed slice on the stack, small where that will do.
fn with_zeros(length: usize, f: impl FnOnce(&mut [f32])) {
    const SMALL: usize = 1 << 11;
    if length <= SMALL {
        f(&mut [0.0; SMALL][..length]);
    } else {
        f(&mut [0.0; MAX_QUERIES * (HEADER + 256)][..length]);
    }
}

/// The tiles of a pass.
struct Tiles<'a> {
    op: &'a Attention,
    mem: &'a Mem,
    steps: &'a [LaneStep],
}

impl<'a> Tiles<'a> {
    fn group(&self) -> usize {
        self.op.heads / self.op.kv.kv_heads
    }

    fn tile_rows(&self) -> usize {
        MAX_QUERIES / self.group()
    }

    fn count(&self) -> usize {
        self.steps.iter().map(|step| (step.rows as usize).div_ceil(self.tile_rows())).sum()
    }

    /// Tile `index` of the pass for one key/value head.
    fn get(&self, mut index: usize, kv_head: usize) -> Option<Tile<'a>> {
        for step in self.steps {
            let (rows, height) = (step.rows as usize, self.tile_rows());
            if index < rows.div_ceil(height) {
                let first = index * height;
                let rows = height.min(rows - first);
                return Some(Tile { op: self.op, mem: self.mem, step, first, rows, kv_head });
            }
            index -= rows.div_ceil(height);
        }
        None
    }

    /// Work item `index`: the key/value heads of a tile are neighbours.
    fn item(&self, index: usize) -> Option<Tile<'a>> {
        self.get(index / self.op.kv.kv_heads, index % self.op.kv.kv_heads)
    }

    /// Partial results per query that fit the scratch.
    fn partials(&self) -> usize {
        let queries = (self.op.lanes.rows * self.op.heads).max(1);
        let bytes = (self.op.scratch.bytes / queries).saturating_sub(TOTAL_BYTES);
        (bytes / partial_bytes(self.op.kv.head_dim)).min(SPLITS_AT_ONCE)
    }

    /// Where the tile's `nth` partial results of a wave go.
    fn partial(&self, tile: &Tile, nth: usize) -> Buf {
        let op = self.op;
        let (queries, bytes) = (op.lanes.rows * op.heads, partial_bytes(op.kv.head_dim));
        let row = tile.step.row0 as usize + tile.first;
        let slot = (nth * op.kv.kv_heads + tile.kv_head) * op.lanes.rows + row;
        let at = queries * TOTAL_BYTES + slot * self.group() * bytes;
        op.scratch.slice(at, tile.queries() * bytes)
    }

    /// Where a query's running total goes.
    fn total(&self, row: usize, head: usize) -> Buf {
        self.op.scratch.rows(row * self.op.heads + head, 1, TOTAL_BYTES)
    }
}

/// Rows `first .. first + rows` of a lane, with the query heads of one key/value head.
#[derive(Clone, Copy)]
struct Tile<'a> {
    op: &'a Attention,
    mem: &'a Mem,
    step: &'a LaneStep,
    first: usize,
    rows: usize,
    kv_head: usize,
}

impl<'a> Tile<'a> {
    fn group(&self) -> usize {
        self.op.heads / self.op.kv.kv_heads
    }

    fn queries(&self) -> usize {
        self.rows * self.group()
    }

    /// f32 of one query's partial result.
    fn stride(&self) -> usize {
        HEADER + self.op.kv.head_dim
    }

    /// Visible keys of the tile's row `r`.
    fn visible(&self, r: usize) -> (usize, usize) {
        self.op.visible(self.step, self.first + r)
    }

    /// Splits that row `r` sees any key of.
    fn row_splits(&self, r: usize) -> std::ops::Range<usize> {
        let (start, end) = self.visible(r);
        start / SPLIT_TOKENS..end.div_ceil(SPLIT_TOKENS)
    }

    /// Splits that any row sees a key of: later rows neither start nor end earlier.
    fn splits(&self) -> std::ops::Range<usize> {
        self.row_splits(0).start..self.row_splits(self.rows - 1).end
    }

    /// Row in the pass and head of query `i`.
    fn place(&self, i: usize) -> (usize, usize) {
        let (r, head) = (i / self.group(), i % self.group());
        (self.step.row0 as usize + self.first + r, self.kv_head * self.group() + head)
    }

    fn output(&self, i: usize) -> &'a mut [f32] {
        let (row, head) = self.place(i);
        self.op.output(self.mem, row, head)
    }

    /// The tile's queries, row by row.
    fn gather(&self) -> [&'a [f32]; MAX_QUERIES] {
        let mut queries: [&[f32]; MAX_QUERIES] = [&[]; MAX_QUERIES];
        for (i, query) in queries.iter_mut().enumerate().take(self.queries()) {
            let (row, head) = self.place(i);
            *query = self.op.query(self.mem, row, head);
        }
        queries
    }

    /// The keys that each query sees of the page at `base`, and which queries see any: a range.
    fn look(&self, base: usize, seen: &mut [Seen; MAX_QUERIES]) -> std::ops::Range<usize> {
        let group = self.group();
        let (mut first, mut last) = (self.queries(), 0);
        for r in 0..self.rows {
            let (start, end) = self.visible(r);
            if start < base + PAGE_TOKENS && end > base {
                let end = (end - base).min(PAGE_TOKENS);
                seen[r * group..][..group].fill(Seen { start: start.saturating_sub(base), end });
                first = first.min(r * group);
                last = (r + 1) * group;
            }
        }
        first..last
    }

    /// The keys and values of one page of the lane.
    fn block(&self, page: u32) -> Block<'a> {
        let (kv, page) = (&self.op.kv, page as usize);
        Block {
            keys: self.mem.get(kv.key_block(page, self.kv_head)),
            values: self.mem.get(kv.value_block(page, self.kv_head)),
        }
    }

    fn prefetch_first(&self) {
        let table = self.op.kv.pages(self.mem, self.step.slot);
        self.block(table[self.pages().start]).prefetch_keys();
    }

    /// The pages of the lane that the tile's rows see.
    fn pages(&self) -> std::ops::Range<usize> {
        self.visible(0).0 / PAGE_TOKENS..self.visible(self.rows - 1).1.div_ceil(PAGE_TOKENS)
    }

    /// The tile's partial results of one split.
    #[inline(always)]
    fn take_split<S: Simd>(
        &self,
        s: S,
        queries: &[&[f32]; MAX_QUERIES],
        split: usize,
        weights: &mut Weights,
        partials: &mut [f32],
    ) {
        let stride = self.stride();
        let table = self.op.kv.pages(self.mem, self.step.slot);
        let pages = self.pages();
        let mut seen = [Seen::default(); MAX_QUERIES];
        clear(partials, stride);
        let own = split * SPLIT_PAGES..(split + 1) * SPLIT_PAGES;
        for page in own.start.max(pages.start)..own.end.min(pages.end) {
            let active = self.look(page * PAGE_TOKENS, &mut seen);
            if active.is_empty() {
                continue;
            }
            take_block(
                s,
                &queries[active.clone()],
                &seen[active.clone()],
                self.block(table[page]),
                self.block(table[(page + 1).min(pages.end - 1)]),
                self.op.scale * std::f32::consts::LOG2_E,
                &mut weights[active.clone()],
                &mut partials[active.start * stride..active.end * stride],
                stride,
            );
        }
    }

    /// Merges the partial results of one split into each row that saw it, and finishes those rows
    /// whose last split it was.
    #[inline(always)]
    fn merge_split<S: Simd>(
        &self,
        s: S,
        split: usize,
        partials: &[f32],
        totals: &mut [Total; MAX_QUERIES],
    ) {
        for (i, partial) in partials.chunks_exact(self.stride()).enumerate() {
            let splits = self.row_splits(i / self.group());
            if splits.contains(&split) {
                let out = self.output(i);
                merge(s, &mut totals[i], out, partial, split == splits.start);
                if split + 1 == splits.end {
                    finish(s, totals[i], out);
                }
            }
        }
    }
}

/// A tile through all its splits.
struct Alone<'a, 'p> {
    tile: Tile<'a>,
    partials: &'p mut [f32],
}

impl Kernel for Alone<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let queries = self.tile.gather();
        self.tile.prefetch_first();
        let mut weights = [[0.0; PAGE_TOKENS]; MAX_QUERIES];
        let mut totals = [Total::default(); MAX_QUERIES];
        for split in self.tile.splits() {
            self.tile.take_split(s, &queries, split, &mut weights, self.partials);
            self.tile.merge_split(s, split, self.partials, &mut totals);
        }
    }
}

/// A tile through one split.
struct Split<'a, 'p> {
    tile: Tile<'a>,
    split: usize,
    partials: &'p mut [f32],
}

impl Kernel for Split<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut weights = [[0.0; PAGE_TOKENS]; MAX_QUERIES];
        self.tile.take_split(s, &self.tile.gather(), self.split, &mut weights, self.partials);
    }
}

/// The merge of a tile's splits of one wave, `width` from the tile's first plus `wave` on.
struct Merge<'a, 't> {
    tiles: &'t Tiles<'a>,
    tile: Tile<'a>,
    wave: usize,
    width: usize,
}

impl Kernel for Merge<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Merge { tiles, tile, wave, width } = self;
        let mut totals = [Total::default(); MAX_QUERIES];
        let kept = |i| {
            let (row, head) = tile.place(i);
            tile.mem.get_mut::<f32>(tiles.total(row, head))
        };
        for (i, total) in totals.iter_mut().enumerate().take(tile.queries()) {
            let kept = kept(i);
            *total = Total { max: kept[0], sum: kept[1] };
        }
        for nth in 0..width {
            let split = tile.splits().start + wave + nth;
            if split < tile.splits().end {
                let partials = tile.mem.get(tiles.partial(&tile, nth));
                tile.merge_split(s, split, partials, &mut totals);
            }
        }
        for (i, total) in totals.iter().enumerate().take(tile.queries()) {
            kept(i)[..2].copy_from_slice(&[total.max, total.sum]);
        }
    }
}
