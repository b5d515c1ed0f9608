//! The k largest logits of each row, largest first; ties go to the lowest id.
//!
//! | | shape | dtype |
//! |---|---|---|
//! | logits | `[rows, stride]` | f32; ids from `valid` on are padding and never taken |
//! | ids | `[rows, k]` | u32 |
//! | values | `[rows, k]` | f32: the logits of `ids` |
//!
//! NaN counts as −∞, and comes out as such. Exact, so nothing depends on the order of work.

mod cuda;
mod host;

use crate::kernel::{Card, Plan};
use crate::{Bindings, Buf, Cost, Cpu, Elements, Mem, Op, Unsupported};

pub(crate) use cuda::Split;
pub(crate) use host::select;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct TopK {
    /// `[rows, stride]` f32.
    pub logits: Buf,
    /// `[rows, k]` u32.
    pub ids: Buf,
    /// `[rows, k]` f32.
    pub values: Buf,
    /// [`TopK::scratch_bytes`] long.
    pub scratch: Buf,
    /// Rows.
    pub rows: usize,
    /// Elements from one row of `logits` to the next.
    pub stride: usize,
    /// Ids that may be taken.
    pub valid: usize,
    /// How many to take, at most [`TopK::MAX_K`].
    pub k: usize,
}

impl TopK {
    /// The largest k.
    pub const MAX_K: usize = 32;
    /// Logits that one thread searches at a time. Long rows are shared between threads.
    const SEGMENT: usize = 16 * 1024;

    /// Bytes of scratch.
    pub fn scratch_bytes(rows: usize, valid: usize, k: usize) -> usize {
        8 * rows * Self::segments(valid) * k
    }

    fn segments(valid: usize) -> usize {
        valid.div_ceil(Self::SEGMENT).max(1)
    }
}

impl Op for TopK {
    fn name(&self) -> &'static str {
        "top_k"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("logits", self.logits);
        b.write_as("ids", self.ids, Elements::U32);
        b.write("values", self.values);
        b.write_as("scratch", self.scratch, Elements::Scratch);
    }

    fn check(&self) -> Result<(), Unsupported> {
        let TopK { rows, stride, valid, k, .. } = *self;
        let unless = |ok, what: &dyn Fn() -> String, limit: &str| {
            Unsupported::unless(ok, "top_k", what, limit)
        };
        unless((1..=Self::MAX_K).contains(&k), &|| format!("k = {k}"), "1 to 32")?;
        unless(valid >= k, &|| format!("{valid} ids for k = {k}"), "at least k ids")?;
        unless(valid <= stride, &|| format!("{valid} ids in rows of {stride}"), "valid ≤ stride")?;
        unless(stride <= MAX_VOCAB, &|| format!("rows of {stride}"), "2^20 logits")?;
        let fits = self.logits.holds(rows, 4 * stride)
            && self.ids.holds(rows, 4 * k)
            && self.values.holds(rows, 4 * k)
            && self.scratch.holds(rows, Self::scratch_bytes(1, valid, k));
        unless(fits, &|| format!("{self:?}"), "matching buffer sizes")
    }

    fn cost(&self) -> Cost {
        let bytes = 4 * self.rows * self.valid + 8 * self.rows * self.k;
        Cost { weight_bytes: 0, other_bytes: bytes as u64, flops: (self.rows * self.valid) as u64 }
    }

    fn reference(&self, mem: &Mem) {
        let (ids, values) = (mem.get_mut::<u32>(self.ids), mem.get_mut::<f32>(self.values));
        for row in 0..self.rows {
            let logits = mem.get::<f32>(self.logits.rows(row, 1, 4 * self.stride));
            let key = |id: usize| if logits[id].is_nan() { f32::NEG_INFINITY } else { logits[id] };
            let mut order: Vec<usize> = (0..self.valid).collect();
            // Stable, so that equal logits stay in the order of their ids.
            order
                .sort_by(|&a, &b| key(b).partial_cmp(&key(a)).unwrap_or(std::cmp::Ordering::Equal));
            for (i, &id) in order[..self.k].iter().enumerate() {
                ids[row * self.k + i] = id as u32;
                values[row * self.k + i] = key(id);
            }
        }
    }

    fn host(&self, mem: &Mem, cpu: &Cpu) {
        host::run(self, mem, cpu);
    }

    fn cuda(&self, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
        cuda::plan(self, card, plan)
    }
}

/// The most logits of a row: weights of so many tokens sum up within the acceptance rules' range.
pub(crate) const MAX_VOCAB: usize = 1 << 20;

#[cfg(any(test, feature = "cases"))]
pub(crate) mod cases;
