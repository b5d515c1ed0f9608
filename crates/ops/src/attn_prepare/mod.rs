//! Before attention: per-head norm and rotary embedding of queries and keys; keys and values go
//! into the pages of their lane at their absolute positions, as the pool stores them: rounded to bf16 (to nearest even),
//! or in int8 with a scale for each.
//!
//! Row r of a lane stands at position `pos + r`. `rsqrt` norm as in `rms_norm`, over each head's
//! `head_dim`, before the rotation. The rotation turns the pairs of the first `rope.dims` elements
//! by `position · inv_freq[i]`, computed in f32 as in transformers; the rest passes through:
//! `(a, b) → (a cos − b sin, b cos + a sin)`.
//!
//! Numerics: sine and cosine of the f32 angle are taken in f64 and rounded to f32. The reference
//! sums squares in f64; SIMD sums 16 lanes in f32, then a fixed tree.
//! Precondition: a lane's pages up to its last row are in its row of the page table, and no page
//! that is written belongs to two lanes.

pub(crate) mod cuda;
mod host;

use crate::geometry::elements_fit;
use crate::kernel::{Card, Plan};
use crate::kv::Part;
use crate::{Bindings, Buf, Cost, Cpu, Elements, KvPool, Lanes, Mem, Op, PAGE_TOKENS, Unsupported};

/// Which elements of a head form rotary pair i of n = dims / 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairing {
    /// (i, i + n): Qwen, HF's rotate-half.
    Halves,
    /// (2i, 2i + 1): llama in GGUF.
    Adjacent,
}

/// Rotary embedding.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// `[dims / 2]` f32.
    pub inv_freq: Buf,
    /// Elements of a head that turn.
    pub dims: usize,
    /// Which elements turn together.
    pub pairing: RopePairing,
}

/// The query side of [`AttnPrepare`].
#[derive(Clone, Copy, Debug)]
pub struct Queries {
    /// `[rows, heads · stride]` f32; a head's query is the first `head_dim` of its `stride`.
    pub q: Buf,
    /// `head_dim`, or `2 · head_dim` where a gate follows each head's query.
    pub stride: usize,
    /// `[head_dim]` f32.
    pub norm: Option<Buf>,
    /// Query heads.
    pub heads: usize,
    /// `[rows, heads · head_dim]` f32.
    pub out: Buf,
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct AttnPrepare {
    /// Absent when only the cache is filled (a draft's context rows).
    pub queries: Option<Queries>,
    /// `[rows, kv_heads · head_dim]` f32.
    pub k: Buf,
    /// `[rows, kv_heads · head_dim]` f32.
    pub v: Buf,
    /// `[head_dim]` f32.
    pub k_norm: Option<Buf>,
    /// Rotary embedding of queries and keys.
    pub rope: Rope,
    /// Where keys and values go.
    pub kv: KvPool,
    /// Rows and their positions.
    pub lanes: Lanes,
    /// Of the norms.
    pub eps: f32,
}

/// Most elements of a head.
const MAX_DIM: usize = 256;

/// Cosines and sines of one position, for each rotary pair.
struct Turn {
    cos: [f32; MAX_DIM / 2],
    sin: [f32; MAX_DIM / 2],
}

impl Turn {
    fn new() -> Turn {
        Turn { cos: [1.0; MAX_DIM / 2], sin: [0.0; MAX_DIM / 2] }
    }

    /// `sin_cos` gives both of an angle.
    #[inline(always)]
    fn set(&mut self, pos: usize, inv_freq: &[f32], sin_cos: impl Fn(f32) -> (f32, f32)) {
        for ((inv_freq, sin), cos) in inv_freq.iter().zip(&mut self.sin).zip(&mut self.cos) {
            (*sin, *cos) = sin_cos(pos as f32 * inv_freq);
        }
    }

    /// Turns the pairs of `x`, the first `rope.dims` elements of a head.
    #[inline(always)]
    fn apply(&self, x: &mut [f32], pairing: RopePairing) {
        let n = x.len() / 2;
        let (cos, sin) = (&self.cos[..n], &self.sin[..n]);
        match pairing {
            RopePairing::Halves => {
                let (a, b) = x.split_at_mut(n);
                for i in 0..n {
                    (a[i], b[i]) = (a[i] * cos[i] - b[i] * sin[i], b[i] * cos[i] + a[i] * sin[i]);
                }
            }
            RopePairing::Adjacent => {
                for (i, pair) in x.chunks_exact_mut(2).enumerate() {
                    let (a, b) = (pair[0], pair[1]);
                    pair[0] = a * cos[i] - b * sin[i];
                    pair[1] = b * cos[i] + a * sin[i];
                }
            }
        }
    }
}

impl AttnPrepare {
    /// The pairs' frequencies.
    fn inv_freq<'m>(&self, mem: &'m Mem) -> &'m [f32] {
        &mem.get::<f32>(self.rope.inv_freq)[..self.rope.dims / 2]
    }

    /// A row of `[rows, kv_heads · head_dim]`.
    fn kv_row<'m>(&self, mem: &'m Mem, buf: Buf, row: usize) -> &'m [f32] {
        mem.get(buf.rows(row, 1, 4 * self.kv.kv_heads * self.kv.head_dim))
    }

    /// The definition of norm and rotation of one head.
    fn head_reference(&self, mem: &Mem, x: &[f32], norm: Option<Buf>, turn: &Turn) -> Vec<f32> {
        let mut out = x.to_vec();
        if let Some(norm) = norm {
            let squares: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
            let scale = 1.0 / (squares / x.len() as f64 + f64::from(self.eps)).sqrt();
            for (out, weight) in out.iter_mut().zip(mem.get::<f32>(norm)) {
                *out = (f64::from(*out) * scale * f64::from(*weight)) as f32;
            }
        }
        turn.apply(&mut out[..self.rope.dims], self.rope.pairing);
        out
    }
}

impl Queries {
    /// A row's queries, `heads` times `stride`.
    fn row<'m>(&self, mem: &'m Mem, row: usize) -> &'m [f32] {
        mem.get(self.q.rows(row, 1, 4 * self.heads * self.stride))
    }

    /// Where they go, `heads` times `dim`.
    fn out_row<'m>(&self, mem: &'m Mem, row: usize, dim: usize) -> &'m mut [f32] {
        mem.get_mut(self.out.rows(row, 1, 4 * self.heads * dim))
    }
}

impl Op for AttnPrepare {
    fn name(&self) -> &'static str {
        "attn_prepare"
    }

    fn bind(&self, b: &mut Bindings) {
        if let Some(queries) = &self.queries {
            b.read("q", queries.q);
            if let Some(norm) = queries.norm {
                b.read("q_norm", norm);
            }
            b.write("q_out", queries.out);
        }
        b.read("k", self.k);
        b.read("v", self.v);
        if let Some(norm) = self.k_norm {
            b.read("k_norm", norm);
        }
        b.read("inv_freq", self.rope.inv_freq);
        b.read("step", self.lanes.step);
        b.read("table", self.kv.table);
        b.update_as("keys", self.kv.keys, Elements::pages(&self.kv));
        b.update_as("values", self.kv.values, Elements::pages(&self.kv));
    }

    fn check(&self) -> Result<(), Unsupported> {
        let (name, dim, rows) = (self.name(), self.kv.head_dim, self.lanes.rows);
        self.lanes.check(name)?;
        self.kv.check(name)?;
        let dims = self.rope.dims;
        let turns = dims.is_multiple_of(2) && dims <= dim;
        let limit = "even numbers up to head_dim";
        Unsupported::unless(turns, name, || format!("rope dims {dims}"), limit)?;
        let norm_fits = |norm: Option<Buf>| norm.is_none_or(|n| n.bytes == 4 * dim);
        let kv_shape = [rows, self.kv.kv_heads, dim];
        let sizes = elements_fit(self.k, &kv_shape, 4)
            && elements_fit(self.v, &kv_shape, 4)
            && norm_fits(self.k_norm)
            && self.rope.inv_freq.bytes == 4 * (dims / 2);
        Unsupported::unless(sizes, name, || format!("{self:?}"), "matching buffer sizes")?;
        if let Some(q) = &self.queries {
            let stride = q.stride == dim || q.stride == 2 * dim;
            let limit = "head_dim or twice that";
            Unsupported::unless(stride, name, || format!("query stride {}", q.stride), limit)?;
            let sizes = elements_fit(q.q, &[rows, q.heads, q.stride], 4)
                && elements_fit(q.out, &[rows, q.heads, dim], 4)
                && norm_fits(q.norm);
            Unsupported::unless(sizes, name, || format!("{q:?}"), "matching query buffers")?;
        }
        Ok(())
    }

    fn cost(&self) -> Cost {
        let elements = |heads: usize| (self.lanes.rows * heads * self.kv.head_dim) as u64;
        let q = self.queries.map_or(0, |q| elements(q.heads));
        let kv = elements(self.kv.kv_heads);
        let norms = [self.k_norm, self.queries.and_then(|q| q.norm)];
        Cost {
            weight_bytes: norms.iter().flatten().map(|norm| norm.bytes as u64).sum(),
            // Queries in and out as f32; keys and values in as f32, out as they are stored.
            other_bytes: 8 * q + 2 * 4 * kv + (self.lanes.rows * self.kv.token_bytes()) as u64,
            flops: 7 * (q + kv),
        }
    }

    fn reference(&self, mem: &Mem) {
        let (dim, inv_freq) = (self.kv.head_dim, self.inv_freq(mem));
        let mut turn = Turn::new();
        for step in self.lanes.steps(mem) {
            for r in 0..step.rows as usize {
                let (row, pos) = (step.row0 as usize + r, step.pos as usize + r);
                turn.set(pos, inv_freq, |angle| {
                    let (sin, cos) = f64::from(angle).sin_cos();
                    (sin as f32, cos as f32)
                });
                if let Some(q) = &self.queries {
                    let out = q.out_row(mem, row, dim).chunks_exact_mut(dim);
                    for (x, out) in q.row(mem, row).chunks_exact(q.stride).zip(out) {
                        let x = self.head_reference(mem, &x[..dim], q.norm, &turn);
                        out.copy_from_slice(&x);
                    }
                }
                let page = self.kv.pages(mem, step.slot)[pos / PAGE_TOKENS] as usize;
                for head in 0..self.kv.kv_heads {
                    let k = &self.kv_row(mem, self.k, row)[head * dim..][..dim];
                    let k = self.head_reference(mem, k, self.k_norm, &turn);
                    let v = &self.kv_row(mem, self.v, row)[head * dim..][..dim];
                    let (keys, values) =
                        (self.kv.key_block(page, head), self.kv.value_block(page, head));
                    self.kv.put(mem.get_mut(keys), Part::Key, pos, &k);
                    self.kv.put(mem.get_mut(values), Part::Value, pos, v);
                }
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

#[cfg(any(test, feature = "cases"))]
pub(crate) mod cases;
