//! Who computes what.
//!
//! A tile is a few rows of one lane and the query heads of one key/value head. With enough tiles
//! for the threads, each runs through all its splits on its own. With few (decode, verify), splits
//! run side by side, [`SPLITS_AT_ONCE`] at most, leave partial results in scratch, and a second
//! step merges them in order. Both make the same calls for a row, so its bits don't tell which ran.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::block::{
    Block, HEADER, MAX_QUERIES, Seen, Total, Weights, clear, finish, merge, take_block,
};
use super::stored::{Bf16, Int8, Stored};
use super::{Attention, SPLIT_PAGES};
use crate::simd::{Kernel, Simd};
use crate::{Buf, Cpu, KvDtype, LaneStep, Mem, PAGE_TOKENS};

/// Splits of a row whose partial results scratch has room for.
pub(super) const SPLITS_AT_ONCE: usize = 32;
/// Scratch for a query's running total.
pub(super) const TOTAL_BYTES: usize = 64;
/// Most elements of a head.
const MAX_DIM: usize = 256;
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
    match op.kv.dtype {
        KvDtype::Bf16 => run_stored::<Bf16>(op, mem, cpu),
        KvDtype::Int8 => run_stored::<Int8>(op, mem, cpu),
    }
}

fn run_stored<K: Stored>(op: &Attention, mem: &Mem, cpu: &Cpu) {
    let threads = cpu.pool.threads();
    let height = MAX_QUERIES / (op.heads / op.kv.kv_heads);
    let mut tiles = Tiles { op, mem, steps: op.lanes.steps(mem), height };
    if threads > 1 && tiles.items() < ITEMS_PER_THREAD * threads {
        let splits = (0..tiles.count()).filter_map(|i| tiles.get(i, 0)).map(|t| t.splits().len());
        let splits = splits.max().unwrap_or(0);
        let width = tiles.partials().min(splits);
        if width > 1 {
            return side_by_side::<K>(&tiles, splits, width, cpu);
        }
        // A single split to share: make the tiles lower.
        let cuts = (2 * threads).div_ceil(tiles.items().max(1));
        tiles.height = height.min(op.lanes.max_rows).div_ceil(cuts).max(1);
    }
    // The last rows see the most keys, so they go first.
    let items = tiles.items();
    cpu.pool.run(items, &|chunk| {
        if let Some(tile) = tiles.item(items - 1 - chunk) {
            tile.prefetch_first::<K>(tile.splits().start);
            let (splits, alone) = (tile.splits(), true);
            with_zeros(tile.queries() * tile.stride(), |partials| {
                let stored = PhantomData::<K>;
                cpu.isa.dispatch(Work { tile, splits, alone, partials, stored });
            });
        }
    });
}

/// Waves of `width` splits of every tile, each followed by a merge into the rows' totals.
fn side_by_side<K: Stored>(tiles: &Tiles, splits: usize, width: usize, cpu: &Cpu) {
    let items = tiles.items();
    // Neighbouring splits go to the same thread, which reads ahead from one into the next.
    let run = (items * width / (RUNS_PER_THREAD * cpu.pool.threads())).clamp(1, width);
    let runs = width.div_ceil(run);
    for wave in (0..splits).step_by(width) {
        cpu.pool.run(items * runs, &|chunk| {
            let Some(tile) = tiles.item(chunk / runs) else { return };
            let first = chunk % runs * run;
            let base = tile.splits().start + wave;
            tile.prefetch_first::<K>(base + first);
            for nth in first..(first + run).min(width) {
                let (splits, alone) = (base + nth..base + nth + 1, false);
                if splits.end <= tile.splits().end {
                    let partials = tile.mem.get_mut(tiles.partial(&tile, nth));
                    let stored = PhantomData::<K>;
                    cpu.isa.dispatch(Work { tile, splits, alone, partials, stored });
                }
            }
        });
        cpu.pool.run(items, &|chunk| {
            if let Some(tile) = tiles.item(chunk) {
                cpu.isa.dispatch(Merge::<K> { tiles, tile, wave, width, stored: PhantomData });
            }
        });
    }
}

/// Calls `f` with a zeroed slice on the stack. Only what is used gets zeroed.
fn with_zeros(length: usize, f: impl FnOnce(&mut [f32])) {
    let mut array = [const { MaybeUninit::<f32>::uninit() }; MAX_QUERIES * (HEADER + MAX_DIM)];
    let slice = &mut array[..length];
    for x in &mut *slice {
        x.write(0.0);
    }
    // SAFETY: every element of the slice was just written; the layouts are the same.
    f(unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), length) });
}

/// The tiles of a pass.
struct Tiles<'a> {
    op: &'a Attention,
    mem: &'a Mem,
    steps: &'a [LaneStep],
    /// Most rows of a tile.
    height: usize,
}

impl<'a> Tiles<'a> {
    fn group(&self) -> usize {
        self.op.heads / self.op.kv.kv_heads
    }

    fn count(&self) -> usize {
        self.steps.iter().map(|step| (step.rows as usize).div_ceil(self.height)).sum()
    }

    /// A tile for each key/value head.
    fn items(&self) -> usize {
        self.count() * self.op.kv.kv_heads
    }

    /// Tile `index` of the pass for one key/value head.
    fn get(&self, mut index: usize, kv_head: usize) -> Option<Tile<'a>> {
        for step in self.steps {
            let (rows, height) = (step.rows as usize, self.height);
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
    fn row_splits(&self, r: usize) -> Range<usize> {
        let (start, end) = self.visible(r);
        start / SPLIT_TOKENS..end.div_ceil(SPLIT_TOKENS)
    }

    /// Splits that any row sees a key of: later rows neither start nor end earlier.
    fn splits(&self) -> Range<usize> {
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
    fn look(&self, base: usize, seen: &mut [Seen; MAX_QUERIES]) -> Range<usize> {
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
    fn block<K: Stored>(&self, page: u32) -> Block<'a, K> {
        let (kv, page) = (&self.op.kv, page as usize);
        let parts = |buf: Buf| {
            let elements = kv.block() * size_of::<K::Word>();
            let scales = buf.slice(elements, buf.bytes - elements);
            (self.mem.get(buf.slice(0, elements)), self.mem.get(scales))
        };
        let (keys, key_scales) = parts(kv.key_block(page, self.kv_head));
        let (values, value_scales) = parts(kv.value_block(page, self.kv_head));
        Block { keys, values, key_scales, value_scales }
    }

    /// Asks for the first keys that the tile needs of a split, which nobody asks for ahead of time.
    fn prefetch_first<K: Stored>(&self, split: usize) {
        let page = self.pages().start.max(split * SPLIT_PAGES);
        if page < self.pages().end {
            self.block::<K>(self.op.kv.pages(self.mem, self.step.slot)[page]).prefetch_keys();
        }
    }

    /// The pages of the lane that the tile's rows see.
    fn pages(&self) -> Range<usize> {
        self.visible(0).0 / PAGE_TOKENS..self.visible(self.rows - 1).1.div_ceil(PAGE_TOKENS)
    }

    /// The tile's partial results of one split.
    #[inline(always)]
    fn take_split<S: Simd, K: Stored>(
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
                self.block::<K>(table[page]),
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
    fn merge_split<S: Simd, K: Stored>(
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
                    finish::<S, K>(s, totals[i], out);
                }
            }
        }
    }
}

/// A tile through a range of splits. Alone, it merges them as it goes; otherwise the range is one
/// split, whose partial results stay for [`Merge`].
struct Work<'a, 'p, K> {
    tile: Tile<'a>,
    splits: Range<usize>,
    alone: bool,
    partials: &'p mut [f32],
    stored: PhantomData<K>,
}

impl<K: Stored> Kernel for Work<'_, '_, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let queries = self.tile.gather();
        let mut weights = [[0.0; PAGE_TOKENS]; MAX_QUERIES];
        let mut totals = [Total::default(); MAX_QUERIES];
        for split in self.splits {
            self.tile.take_split::<S, K>(s, &queries, split, &mut weights, self.partials);
            if self.alone {
                self.tile.merge_split::<S, K>(s, split, self.partials, &mut totals);
            }
        }
    }
}

/// The merge of a tile's splits of one wave, `width` from the tile's first plus `wave` on.
struct Merge<'a, 't, K> {
    tiles: &'t Tiles<'a>,
    tile: Tile<'a>,
    wave: usize,
    width: usize,
    stored: PhantomData<K>,
}

impl<K: Stored> Kernel for Merge<'_, '_, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Merge { tiles, tile, wave, width, .. } = self;
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
                tile.merge_split::<S, K>(s, split, partials, &mut totals);
            }
        }
        for (i, total) in totals.iter().enumerate().take(tile.queries()) {
            kept(i)[..2].copy_from_slice(&[total.max, total.sum]);
        }
    }
}
