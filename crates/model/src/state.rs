//! What a lane remembers: pages of keys and values, and recurrent cells.

use ops::gdn_prepare::CONV_TAPS;
use ops::{Buf, Device, DeviceError, GatedDelta, GdnGeometry, KvDtype, KvPool, LaneStep};

use crate::target::Target;

/// Sizes of a [`State`].
#[derive(Clone, Copy, Debug)]
pub struct StateShape {
    /// Attention layers.
    pub attention_layers: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// GatedDeltaNet layers.
    pub gdn_layers: usize,
    /// Their heads.
    pub gdn: Option<GdnGeometry>,
    /// The most rows of a verify pass.
    pub block: usize,
    /// Lanes and pages.
    pub pages: PageShape,
    /// States that can be kept beside those of the lanes, see [`State::save`].
    pub snapshots: usize,
}

/// The pages that the lanes of a model and its draft share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShape {
    /// Lanes.
    pub slots: usize,
    /// The most pages of one lane.
    pub max_pages: usize,
    /// Pages that exist.
    pub pages: usize,
    /// How keys and values are stored, the draft's too: a page is a page.
    pub kv: KvDtype,
}

impl PageShape {
    /// As many pages as the lanes can fill, in bf16.
    pub fn full(slots: usize, max_pages: usize) -> PageShape {
        PageShape { slots, max_pages, pages: slots * max_pages, kv: KvDtype::Bf16 }
    }
}

impl StateShape {
    /// For the lanes of a target.
    pub fn of(target: &Target, block: usize, pages: PageShape, snapshots: usize) -> StateShape {
        let (attention_layers, gdn_layers) = target.layer_counts();
        StateShape {
            attention_layers,
            kv_heads: target.attention.kv_heads,
            head_dim: target.attention.head_dim,
            gdn_layers,
            gdn: target.gdn,
            block,
            pages,
            snapshots,
        }
    }
}

/// The recurrent state of one GatedDeltaNet layer, for all lanes.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    /// See [`ops::GdnPrepare::history`].
    pub history: Buf,
    /// See [`GatedDelta::state`].
    pub state: Buf,
    /// See [`GatedDelta::pending`].
    pub pending: Buf,
    /// The most rows of a verify pass.
    pub block: usize,
}

/// The memory of all lanes of one model.
#[derive(Debug)]
pub struct State {
    /// One pool for each attention layer.
    pub kv: Vec<KvPool>,
    /// One for each GatedDeltaNet layer.
    pub cells: Vec<Cell>,
    /// `[snapshots]`, each with one slot's `state` and the `[3][channels]` f32 rows of history before its
    /// lane's next, cell after cell: one range of memory, so that taking a snapshot touches few pages.
    pub saved: Buf,
    slots: usize,
    snapshots: usize,
    snapshot_bytes: usize,
}

/// The page table that the pools of a model and its draft share: `[slots][max_pages]` u32. At first
/// each slot has the pages `slot · max_pages ..`, as far as they exist.
pub fn page_table(dev: &mut dyn Device, shape: &PageShape) -> Result<Buf, DeviceError> {
    let existing = |page: usize| if page < shape.pages { page as u32 } else { 0 };
    let pages: Vec<u32> = (0..shape.slots * shape.max_pages).map(existing).collect();
    let table = dev.alloc(4 * pages.len(), "page table")?;
    dev.write(table, bytemuck::cast_slice(&pages));
    Ok(table)
}

/// Copies page `from` of each pool onto its page `to`.
pub fn copy_page<'a>(
    dev: &mut dyn Device,
    pools: impl Iterator<Item = &'a KvPool>,
    from: u32,
    to: u32,
) {
    for (pool, bytes) in pools.map(|pool| (pool, pool.page_bytes())) {
        for buf in [pool.keys, pool.values] {
            dev.copy(buf.rows(from as usize, 1, bytes), buf.rows(to as usize, 1, bytes));
        }
    }
}

/// Pools for `layers` attention layers.
pub(crate) fn kv_pools(
    dev: &mut dyn Device,
    layers: usize,
    table: Buf,
    (kv_heads, head_dim): (usize, usize),
    shape: &PageShape,
) -> Result<Vec<KvPool>, DeviceError> {
    let (dtype, max_pages) = (shape.kv, shape.max_pages);
    let bytes = shape.pages * kv_heads * dtype.block_bytes(head_dim);
    (0..layers)
        .map(|_| {
            let keys = dev.alloc(bytes, "keys")?;
            let values = dev.alloc(bytes, "values")?;
            Ok(KvPool { keys, values, table, max_pages, kv_heads, head_dim, dtype })
        })
        .collect()
}

impl State {
    /// Empty lanes.
    pub fn new(dev: &mut dyn Device, s: &StateShape, table: Buf) -> Result<State, DeviceError> {
        let (heads, slots) = ((s.kv_heads, s.head_dim), s.pages.slots);
        let kv = kv_pools(dev, s.attention_layers, table, heads, &s.pages)?;
        let mut cells = Vec::with_capacity(s.gdn_layers);
        let mut snapshot_bytes = 0;
        if let Some(g) = &s.gdn {
            let row = 4 * g.channels();
            let history = slots * 2 * (CONV_TAPS - 1 + s.block) * row;
            let state = GatedDelta::state_bytes(g);
            snapshot_bytes = s.gdn_layers * (state + (CONV_TAPS - 1) * row);
            for _ in 0..s.gdn_layers {
                cells.push(Cell {
                    history: dev.alloc(history, "convolution history")?,
                    state: dev.alloc(slots * state, "recurrent state")?,
                    pending: dev
                        .alloc(slots * GatedDelta::pending_bytes(g, s.block), "pending rows")?,
                    block: s.block,
                });
            }
        }
        let saved = dev.alloc(s.snapshots * snapshot_bytes, "snapshots")?;
        Ok(State { kv, cells, saved, slots, snapshots: s.snapshots, snapshot_bytes })
    }

    /// Empties a slot: its recurrent state and history become zero. Pages need no clearing, since
    /// no position is read before it is written.
    pub fn clear(&self, dev: &mut dyn Device, slot: usize) {
        for cell in &self.cells {
            for buf in [cell.history, cell.state] {
                let bytes = buf.bytes / self.slots;
                dev.zero(buf.slice(slot * bytes, bytes));
            }
        }
    }

    /// Keeps what a lane remembers besides its pages as snapshot number `to`.
    ///
    /// # Panics
    /// If rows are pending: they have to be taken up first.
    pub fn save(&self, dev: &mut dyn Device, lane: &Lane, to: usize) {
        assert_eq!(lane.pending, 0, "a snapshot of {lane:?}");
        for (from, to) in self.snapshot(lane.slot as usize, lane.parity as usize, to) {
            dev.copy(from, to);
        }
    }

    /// Makes a slot remember what [`State::save`] kept, and returns its lane at position `pos`.
    pub fn restore(&self, dev: &mut dyn Device, from: usize, slot: u32, pos: u32) -> Lane {
        for (to, from) in self.snapshot(slot as usize, 0, from) {
            dev.copy(from, to);
        }
        Lane { pos, ..Lane::new(slot) }
    }

    /// Bytes of one snapshot, whether there are any or not.
    pub fn snapshot_bytes(&self) -> usize {
        self.snapshot_bytes
    }

    /// The memory of snapshot number `index`.
    pub fn snapshot_buffer(&self, index: usize) -> Buf {
        assert!(index < self.snapshots, "snapshot {index} of {}", self.snapshots);
        self.saved.rows(index, 1, self.snapshot_bytes)
    }

    /// Each part of a slot's memory, with half `half` of its history, and the snapshot's part for it.
    fn snapshot(
        &self,
        slot: usize,
        half: usize,
        snapshot: usize,
    ) -> impl Iterator<Item = (Buf, Buf)> + '_ {
        let saved = self.snapshot_buffer(snapshot);
        let each = saved.bytes / self.cells.len().max(1);
        self.cells.iter().enumerate().flat_map(move |(i, cell)| {
            let state = cell.state.bytes / self.slots;
            let half_bytes = cell.history.bytes / (2 * self.slots);
            let halves = cell.history.rows(2 * slot + half, 1, half_bytes);
            let saved = saved.rows(i, 1, each);
            [
                (cell.state.rows(slot, 1, state), saved.slice(0, state)),
                (halves.slice(0, each - state), saved.slice(state, each - state)),
            ]
        })
    }
}

/// The host's account of one lane, and the verbs that move it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Its slot.
    pub slot: u32,
    /// Tokens in the cache: the position of the anchor.
    pub pos: u32,
    /// Rows of the last pass that the recurrent state has yet to take up.
    pub pending: u32,
    /// Which half holds them.
    pub parity: u32,
}

impl Lane {
    /// An empty lane.
    pub fn new(slot: u32) -> Lane {
        Lane { slot, pos: 0, pending: 0, parity: 0 }
    }

    /// The lane's share of a pass of `rows` rows starting at `row0`.
    pub fn step(&self, row0: u32, rows: u32) -> LaneStep {
        let Lane { slot, pos, pending, parity } = *self;
        LaneStep { row0, rows, pos, slot, pending, parity, reserved: [0; 2] }
    }

    /// After a prefill pass: all its rows are in the state.
    pub fn advance(&mut self, rows: u32) {
        self.pos += rows;
        self.pending = 0;
        self.parity ^= 1;
    }

    /// After a pass without rows of its own: what was pending is in the state.
    pub fn take_up(&mut self) {
        self.advance(0);
    }

    /// After a verify pass: `kept` of its rows will enter the state in the next pass.
    pub fn commit(&mut self, kept: u32) {
        self.pos += kept;
        self.pending = kept;
        self.parity ^= 1;
    }

    /// After [`Lane::commit`] and before the next pass: keeps `drop` fewer rows of it.
    ///
    /// # Panics
    /// If that many rows are not pending.
    pub fn uncommit(&mut self, drop: u32) {
        assert!(drop <= self.pending, "{drop} of {} pending rows", self.pending);
        self.pos -= drop;
        self.pending -= drop;
    }
}
