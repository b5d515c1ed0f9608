//! What changes from pass to pass, in device buffers.

use crate::{Buf, Mem, Unsupported};

/// Tokens of one page of a key/value pool, of one key block in attention, and of one chunk of the
/// chunked recurrence: one absolute grid for all three.
pub const PAGE_TOKENS: usize = 64;

/// One lane's share of a pass. `step` buffers hold `[lanes]` of these.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct LaneStep {
    /// First row of the lane in the pass's row buffers.
    pub row0: u32,
    /// Rows of the lane in this pass.
    pub rows: u32,
    /// Absolute position of the lane's first row.
    pub pos: u32,
    /// Which recurrent cell and which row of the page table the lane owns.
    pub slot: u32,
    /// Rows of the lane's previous pass that the recurrent state still has to take up.
    pub pending: u32,
    /// Which half of the pending buffers holds those rows; this pass writes the other half.
    pub parity: u32,
    /// Keeps the struct at 32 bytes.
    pub reserved: [u32; 2],
}

/// The lanes of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lanes {
    /// `[count]` of [`LaneStep`].
    pub step: Buf,
    /// Lanes in the pass.
    pub count: usize,
    /// Rows of all lanes together: the height of every row buffer of the pass.
    pub rows: usize,
    /// The most rows that any one lane has.
    pub max_rows: usize,
}

/// Keys and values of one layer, in pages of [`PAGE_TOKENS`] positions, bf16.
///
/// `values` is `[pages][kv_heads][PAGE_TOKENS][head_dim]`. `keys` is
/// `[pages][kv_heads][head_dim / 2][PAGE_TOKENS][2]`: a 32-bit word holds two neighbouring elements
/// of one key, and the words of a page's keys lie side by side. So 16 keys fill a vector without a
/// shuffle, scores need no sum across lanes, and a word is what one thread of a tensor-core
/// multiply holds.
///
/// `table` is `[slots][max_pages]` u32: the pool page that holds positions
/// `[PAGE_TOKENS·i, PAGE_TOKENS·(i+1))` of a slot's lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPool {
    /// Keys, after norm and rotary embedding.
    pub keys: Buf,
    /// Values.
    pub values: Buf,
    /// Page table, shared by all layers.
    pub table: Buf,
    /// Pages a lane may own: the row length of `table`.
    pub max_pages: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
}

impl KvPool {
    /// Elements of a head's keys (or values) in one page.
    pub fn block(&self) -> usize {
        PAGE_TOKENS * self.head_dim
    }

    /// Element offset of a head's block of one page, in `keys` and in `values`.
    pub fn page_offset(&self, page: usize, kv_head: usize) -> usize {
        (page * self.kv_heads + kv_head) * self.block()
    }

    /// Element offset, inside a block of `keys`, of element `i` of the key at `pos`.
    pub fn key_offset(pos: usize, i: usize) -> usize {
        (i / 2 * PAGE_TOKENS + pos % PAGE_TOKENS) * 2 + i % 2
    }

    /// A head's keys of one page.
    pub(crate) fn key_block(&self, page: usize, kv_head: usize) -> Buf {
        self.keys.slice(2 * self.page_offset(page, kv_head), 2 * self.block())
    }

    /// A head's values of one page.
    pub(crate) fn value_block(&self, page: usize, kv_head: usize) -> Buf {
        self.values.slice(2 * self.page_offset(page, kv_head), 2 * self.block())
    }

    /// The pages of a slot's lane, in order of position.
    pub(crate) fn pages<'m>(&self, mem: &'m Mem, slot: u32) -> &'m [u32] {
        mem.get(self.table.rows(slot as usize, 1, 4 * self.max_pages))
    }

    /// The geometry that every op on pages shares.
    pub(crate) fn check(&self, op: &'static str) -> Result<(), Unsupported> {
        let dim = self.head_dim;
        let dims = dim.is_multiple_of(16) && (16..=256).contains(&dim);
        let limit = "multiples of 16 up to 256";
        Unsupported::unless(dims, op, || format!("head_dim {dim}"), limit)?;
        let shape = [self.kv_heads, PAGE_TOKENS, dim];
        let page = shape.iter().try_fold(2usize, |bytes, &n| bytes.checked_mul(n)).unwrap_or(0);
        let pages = page > 0
            && self.keys.bytes.is_multiple_of(page)
            && self.keys.bytes == self.values.bytes
            && self.max_pages > 0
            && self.table.bytes.checked_rem(4 * self.max_pages) == Some(0);
        Unsupported::unless(pages, op, || format!("{self:?}"), "whole pages and table rows")
    }
}
