//! Softmax attention of each row over the pages of its lane.
//!
//! The row at position p of a lane whose pass ends at position e (exclusive) sees the keys
//! `max(0, p + 1 − window) ..= p` when causal, and `max(0, p + 1 − window) ..= e − 1` otherwise.
//! Query head h reads key/value head `h / (heads / kv_heads)`.
//!
//! Order of computation, the same for every number of rows, lanes and threads: keys in blocks of
//! [`crate::PAGE_TOKENS`] positions on the absolute grid, online softmax through the blocks of a
//! split ([`SPLIT_PAGES`] blocks on the absolute grid), splits merged in ascending order. How rows,
//! heads and splits are shared out among threads is a matter of speed alone. A card makes splits longer the
//! further on a row stands (`split.cu`), and may take prompts ([`Pass::Prompt`]) in steps of a page, without splits: there a
//! row's bits follow from its position as well, passes of prompts agree bit for bit with one another, and with rounds up to
//! rounding.
//!
//! Numerics: the reference works in f64. SIMD multiplies f32 queries with bf16 keys and values and
//! adds in f32, one product after the other along `head_dim` and along the keys. Of int8 it multiplies the codes;
//! a key's scale comes in once its sum is complete, a value's scale with its weight.
//! Elements of pages outside a row's visible range don't enter its result, whatever they hold.
//! Source: arXiv 2205.14135 (online softmax), 2311.01282 (split along the keys).

mod block;
pub(crate) mod cuda;
mod host;
pub(crate) mod rounded;
mod stored;

use crate::geometry::elements_fit;
use crate::kernel::{Card, Plan};
use crate::kv::Part;
use crate::{
    Bindings, Buf, Cost, Cpu, Elements, KvPool, LaneStep, Lanes, Mem, Op, PAGE_TOKENS, Pass,
    Rounded, Unsupported,
};

/// Pages of one split of the definition: the part of a row's keys that is summed on its own and then merged.
pub const SPLIT_PAGES: usize = 4;

/// Most query heads that share a key/value head.
const MAX_GROUP: usize = 48;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// `[rows, heads · head_dim]` f32, normed and rotated.
    pub q: Buf,
    /// Keys and values.
    pub kv: KvPool,
    /// `[rows, heads · head_dim]` f32.
    pub out: Buf,
    /// Partial results of splits, [`Attention::scratch_bytes`] long.
    pub scratch: Buf,
    /// Rows and their positions.
    pub lanes: Lanes,
    /// Query heads.
    pub heads: usize,
    /// Multiplies q · k. Positive.
    pub scale: f32,
    /// Whether a row sees only itself and what came before.
    pub causal: bool,
    /// Keys this far back or further are not seen.
    pub window: Option<usize>,
    /// Decides the order of sums on devices with a kernel for prompts.
    pub pass: Pass,
}

impl Attention {
    /// Scratch for passes of up to `rows` rows that shall run in parallel along their keys: the rows
    /// of a verify block times the lanes that run together. `heads` query heads of `head_dim`
    /// elements on `kv_heads`. Enough for any number of keys. More rows, or no scratch at all, also work:
    /// they run with less of this parallelism, and give the same bits.
    pub fn scratch_bytes(rows: usize, (heads, kv_heads): (usize, usize), head_dim: usize) -> usize {
        let host = host::TOTAL_BYTES + host::SPLITS_AT_ONCE * host::partial_bytes(head_dim);
        rows * heads * host.max(cuda::partial_bytes(kv_heads, head_dim))
    }

    /// Bytes and flops of one run whose lanes end at position `end` each, which the op itself can't
    /// know. Keys and values count once per lane.
    pub fn cost_at(&self, end: usize) -> Cost {
        let seen = |rows: usize| match self.window {
            Some(window) => end.min(window.saturating_add(rows)),
            None => end,
        };
        let (rows, dim) = (self.lanes.rows, self.kv.head_dim);
        let keys = self.lanes.count * seen(self.lanes.max_rows);
        Cost {
            weight_bytes: 0,
            other_bytes: (8 * rows * self.heads * dim + keys * self.kv.token_bytes()) as u64,
            flops: 4 * (rows * self.heads * dim) as u64 * seen(1) as u64,
        }
    }

    /// The visible keys of a lane's row r, `start..end`.
    #[inline(always)]
    fn visible(&self, step: &LaneStep, r: usize) -> (usize, usize) {
        let pos = step.pos as usize + r;
        let end = if self.causal { pos + 1 } else { (step.pos + step.rows) as usize };
        (self.window.map_or(0, |window| (pos + 1).saturating_sub(window)), end)
    }

    fn query<'m>(&self, mem: &'m Mem, row: usize, head: usize) -> &'m [f32] {
        mem.get(self.q.rows(row * self.heads + head, 1, 4 * self.kv.head_dim))
    }

    fn output<'m>(&self, mem: &'m Mem, row: usize, head: usize) -> &'m mut [f32] {
        mem.get_mut(self.out.rows(row * self.heads + head, 1, 4 * self.kv.head_dim))
    }
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("q", self.q);
        b.read("keys", self.kv.keys);
        b.read("values", self.kv.values);
        b.read("table", self.kv.table);
        b.read("step", self.lanes.step);
        b.write_as("scratch", self.scratch, Elements::Scratch);
        b.write("out", self.out);
    }

    fn check(&self) -> Result<(), Unsupported> {
        let (name, heads, kv_heads) = (self.name(), self.heads, self.kv.kv_heads);
        self.lanes.check(name)?;
        self.kv.check(name)?;
        let group =
            heads.checked_rem(kv_heads) == Some(0) && (1..=MAX_GROUP).contains(&(heads / kv_heads));
        let what = || format!("{heads} query heads on {kv_heads} key/value heads");
        Unsupported::unless(group, name, what, "1 to 48 query heads for each key/value head")?;
        let scale = self.scale.is_finite() && self.scale > 0.0;
        Unsupported::unless(scale, name, || format!("scale {}", self.scale), "positive numbers")?;
        let window = self.window != Some(0);
        Unsupported::unless(window, name, || "a window of 0".to_owned(), "a row sees itself")?;
        let shape = [self.lanes.rows, heads, self.kv.head_dim];
        let sizes = elements_fit(self.q, &shape, 4)
            && elements_fit(self.out, &shape, 4)
            && self.scratch.bytes.is_multiple_of(4);
        Unsupported::unless(sizes, name, || format!("{self:?}"), "matching buffer sizes")
    }

    /// A lower bound: the pass's own rows see one another. See [`Attention::cost_at`].
    fn cost(&self) -> Cost {
        self.cost_at(self.lanes.max_rows)
    }

    fn reference(&self, mem: &Mem) {
        let (dim, group) = (self.kv.head_dim, self.heads / self.kv.kv_heads);
        for step in self.lanes.steps(mem) {
            let pages = self.kv.pages(mem, step.slot);
            for r in 0..step.rows as usize {
                let (start, end) = self.visible(step, r);
                for head in 0..self.heads {
                    let q = self.query(mem, step.row0 as usize + r, head);
                    let page = |pos: usize| pages[pos / PAGE_TOKENS] as usize;
                    let score = |pos: usize| {
                        let block = mem.get(self.kv.key_block(page(pos), head / group));
                        let key = |i| self.kv.element(block, Part::Key, pos, i);
                        let dot: f64 = (0..dim).map(|i| f64::from(q[i]) * key(i)).sum();
                        dot * f64::from(self.scale)
                    };
                    let scores: Vec<f64> = (start..end).map(score).collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    let mut sums = vec![0.0; dim];
                    for (pos, weight) in (start..end).zip(weights) {
                        let block = mem.get(self.kv.value_block(page(pos), head / group));
                        for (i, sum) in sums.iter_mut().enumerate() {
                            *sum += weight * self.kv.element(block, Part::Value, pos, i);
                        }
                    }
                    let out = self.output(mem, step.row0 as usize + r, head);
                    for (out, sum) in out.iter_mut().zip(sums) {
                        *out = (sum / total) as f32;
                    }
                }
            }
        }
    }

    fn rounded(&self, mem: &Mem) -> Option<Vec<Rounded>> {
        Some(rounded::rounded(self, mem, false))
    }

    fn host(&self, mem: &Mem, cpu: &Cpu) {
        host::run(self, mem, cpu);
    }

    fn cuda(&self, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
        cuda::plan(self, card, plan)
    }
}

#[cfg(any(test, feature = "cases"))]
pub(crate) mod cases;
