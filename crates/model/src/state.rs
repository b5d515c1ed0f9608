//! What a lane remembers: pages of keys and values, and recurrent cells.

use ops::gdn_prepare::CONV_TAPS;
use ops::{Buf, Device, DeviceError, GatedDelta, GdnGeometry, KvPool, LaneStep, PAGE_TOKENS};

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
    /// Lanes.
    pub slots: usize,
    /// The most rows of a verify pass.
    pub block: usize,
    /// Pages of one lane.
    pub max_pages: usize,
}

impl StateShape {
    /// For `slots` lanes of a target.
    pub fn of(target: &Target, slots: usize, block: usize, max_pages: usize) -> StateShape {
        let (attention_layers, gdn_layers) = target.layer_counts();
        StateShape {
            attention_layers,
            kv_heads: target.attention.kv_heads,
            head_dim: target.attention.head_dim,
            gdn_layers,
            gdn: target.gdn,
            slots,
            block,
            max_pages,
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
}

/// The page table that the pools of a model and its draft share: `[slots][max_pages]` u32. Each
/// slot owns the pages `slot · max_pages ..`.
pub fn page_table(
    dev: &mut dyn Device,
    slots: usize,
    max_pages: usize,
) -> Result<Buf, DeviceError> {
    let pages: Vec<u32> = (0..(slots * max_pages) as u32).collect();
    let table = dev.alloc(4 * pages.len(), "page table")?;
    dev.write(table, bytemuck::cast_slice(&pages));
    Ok(table)
}

/// Pools for `layers` attention layers.
pub(crate) fn kv_pools(
    dev: &mut dyn Device,
    layers: usize,
    table: Buf,
    (kv_heads, head_dim): (usize, usize),
    (slots, max_pages): (usize, usize),
) -> Result<Vec<KvPool>, DeviceError> {
    let bytes = 2 * slots * max_pages * kv_heads * PAGE_TOKENS * head_dim;
    (0..layers)
        .map(|_| {
            let keys = dev.alloc(bytes, "keys")?;
            let values = dev.alloc(bytes, "values")?;
            Ok(KvPool { keys, values, table, max_pages, kv_heads, head_dim })
        })
        .collect()
}

impl State {
    /// Empty lanes.
    pub fn new(dev: &mut dyn Device, s: &StateShape, table: Buf) -> Result<State, DeviceError> {
        let heads = (s.kv_heads, s.head_dim);
        let kv = kv_pools(dev, s.attention_layers, table, heads, (s.slots, s.max_pages))?;
        let mut cells = Vec::with_capacity(s.gdn_layers);
        if let Some(g) = &s.gdn {
            let history = s.slots * 2 * (CONV_TAPS - 1 + s.block) * g.channels() * 4;
            for _ in 0..s.gdn_layers {
                cells.push(Cell {
                    history: dev.alloc(history, "convolution history")?,
                    state: dev.alloc(s.slots * GatedDelta::state_bytes(g), "recurrent state")?,
                    pending: dev
                        .alloc(s.slots * GatedDelta::pending_bytes(g, s.block), "pending rows")?,
                    block: s.block,
                });
            }
        }
        Ok(State { kv, cells })
    }

    /// Empties a slot: its recurrent state and history become zero. Pages need no clearing, since
    /// no position is read before it is written.
    pub fn clear(&self, dev: &mut dyn Device, slot: usize, slots: usize) {
        for cell in &self.cells {
            for buf in [cell.history, cell.state] {
                let bytes = buf.bytes / slots;
                dev.zero(buf.slice(slot * bytes, bytes));
            }
        }
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
