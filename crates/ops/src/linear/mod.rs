//! Matrix product with up to four weights that share their input: `out_p = x · W_pᵀ (+ out_p)`.
//!
//! | | shape | dtype |
//! |---|---|---|
//! | x | `[rows, k]` | activations, see [`Act`] |
//! | weight | `[n, k]` | any [`Format`]; bytes in `layout.rs` or, for GPUs, `fragments.rs`, made by [`Source::pack_piece`] |
//! | out | `[rows, n]` | f32; added to where `add` is set |
//!
//! # Numerics
//!
//! **Quantised weight, int8 activations.** Every implementation gives the same bits. With `q` the
//! int8 activations, `g` the [`ActGroup`](crate::ActGroup)s of the row in ascending order, and `u`
//! in ascending order the *units* of a group: its parts that share a weight scale (all of it, two
//! halves or four quarters),
//!
//! ```text
//! d_u   = Σ_k∈u code_k · q_k                                   exact
//! t_g   = Σ_u scale_u · d_u + bias_u · Σ_k∈u q_k               fma, term by term from the left
//! t_g   = Σ_u scale_u · (d_u − zero · Σ_k∈u q_k)               symmetric: the bracket is exact
//! out   = Σ_g fma(xscale_g, t_g, ·)                            from 0
//! ```
//!
//! The first product of a `t_g` is rounded, every later one fused. A product with integers first and
//! one float at the end costs one conversion for each 64 inputs and output.
//!
//! **Quantised weight, f32 activations.** `out = Σ_k fma(x_k, w_k, ·)` in ascending order, with
//! `w = scale · code + bias` rounded twice. **Dense weight.** f32 activations: 16 sums, of the inputs
//! with equal `k % 16`, each in ascending order with fma; then the tree of
//! [`Simd::sum`](crate::simd::Simd::sum). For these two the reference sums in f64.
//!
//! **Quantised weight, bf16 activations**, for cards only: the definition of f32 activations. Kernels on tensor cores round `w` to bf16
//! before they multiply it; products are exact, sums f32 in an order of the kernel's own.
//!
//! In all cases `out + product` for `add`, and a row's bits don't depend on other rows.

pub(crate) mod cuda;
mod dense;
mod exact;
mod fragments;
mod ggml;
mod host;
pub(crate) mod layout;
mod pack;

pub use ggml::GgmlType;
pub use layout::TILE;
pub(crate) use pack::dense_row;
pub use pack::{DenseDtype, PackError, Source};

use crate::kernel::{Card, Plan};
use crate::{
    ACT_GROUP, Act, ActDtype, ActGroup, Bindings, Buf, Cost, Cpu, Format, Mem, Op, Pass,
    Unsupported, Weight,
};
use layout::Layout;

/// One weight of a [`Linear`].
#[derive(Clone, Copy, Debug)]
pub struct LinearPart {
    /// `[n, k]`.
    pub weight: Weight,
    /// `[rows, n]` f32.
    pub out: Buf,
    /// Adds to `out` instead of overwriting it: the residual stream.
    pub add: bool,
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// `[rows, k]`.
    pub x: Act,
    /// The weights; the first `count` are used.
    parts: [LinearPart; Linear::MAX_PARTS],
    count: usize,
    /// Rows.
    pub rows: usize,
    /// Decides the order of sums on devices with a kernel for prompts.
    pub pass: Pass,
}

impl Linear {
    /// Weights that one op may hold.
    pub const MAX_PARTS: usize = 4;

    /// A product of the `rows` rows of a pass with each of 1 to 4 weights.
    ///
    /// # Panics
    /// If there are no parts or too many.
    pub fn new(x: Act, rows: usize, pass: Pass, parts: &[LinearPart]) -> Linear {
        assert!((1..=Self::MAX_PARTS).contains(&parts.len()), "{} parts", parts.len());
        let mut list = [parts[0]; Self::MAX_PARTS];
        list[..parts.len()].copy_from_slice(parts);
        Linear { x, parts: list, count: parts.len(), rows, pass }
    }

    /// The weights in use.
    pub fn parts(&self) -> &[LinearPart] {
        &self.parts[..self.count]
    }
}

impl Op for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("x", self.x.buf);
        for part in self.parts() {
            b.read("weight", part.weight.buf);
            if part.add {
                b.update("out", part.out);
            } else {
                b.write("out", part.out);
            }
        }
    }

    fn check(&self) -> Result<(), Unsupported> {
        self.x.check(self.name(), self.rows)?;
        let refuse = |what, limit: &str| Unsupported::unless(false, self.name(), || what, limit);
        for (i, part) in self.parts().iter().enumerate() {
            let Weight { format, n, k, .. } = part.weight;
            if k != self.x.width {
                refuse(format!("weight {i} takes {k} inputs"), "the width of x")?;
            }
            if Layout::of(format).is_some_and(|layout| !layout.supported()) {
                refuse(format!("{format:?}"), "the formats that `Source::format` returns")?;
            }
            if !part.weight.fits() {
                let what = format!("weight {i}: [{n}, {k}] {format:?} in {:?}", part.weight.buf);
                refuse(what, "k in whole groups and the packed size")?;
            }
            let size = self.rows.checked_mul(n).and_then(|size| size.checked_mul(4));
            if size.is_none_or(|size| part.out.bytes < size) {
                refuse(format!("out {i}: {:?}", part.out), "rows x n floats")?;
            }
        }
        Ok(())
    }

    fn cost(&self) -> Cost {
        let mut cost = Cost::default();
        for LinearPart { weight, add, .. } in self.parts() {
            cost.weight_bytes += weight.buf.bytes as u64;
            cost.other_bytes += (if *add { 8 } else { 4 } * self.rows * weight.n) as u64;
            cost.flops += 2 * self.rows as u64 * weight.n as u64 * weight.k as u64;
        }
        cost.other_bytes += (self.rows * self.x.row_bytes()) as u64;
        cost
    }

    fn reference(&self, mem: &Mem) {
        for part in self.parts() {
            let Weight { buf, format, n, .. } = part.weight;
            let weight = mem.get::<u8>(buf);
            for row in 0..self.rows {
                let out = mem.get_mut::<f32>(part.out.rows(row, 1, 4 * n));
                for (o, out) in out.iter_mut().enumerate() {
                    let product = match Layout::of(format) {
                        None => self.dense_product(mem, format, weight, row, o),
                        Some(layout) => {
                            let tile = layout.tile_bytes(self.x.width).unwrap_or_default();
                            let tile = &weight[o / TILE * tile..][..tile];
                            match self.x.dtype {
                                ActDtype::F32 | ActDtype::Bf16 => {
                                    self.f32_product(mem, &layout, tile, row, o % TILE)
                                }
                                ActDtype::I8 => self.i8_product(mem, &layout, tile, row, o % TILE),
                            }
                        }
                    };
                    *out = if part.add { *out + product } else { product };
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

/// The definitions of one output of one row.
impl Linear {
    fn dense_product(&self, mem: &Mem, format: Format, weight: &[u8], row: usize, o: usize) -> f32 {
        let bytes = format.piece_bytes(self.x.width).unwrap_or_default();
        let weight = dense_row(format, &weight[o * bytes..][..bytes]);
        let x = self.x.row(mem, row).x;
        x.iter().zip(weight).map(|(&x, w)| f64::from(x) * f64::from(w)).sum::<f64>() as f32
    }

    fn f32_product(&self, mem: &Mem, layout: &Layout, tile: &[u8], row: usize, o: usize) -> f32 {
        let x = self.x.row(mem, row).x.iter().enumerate();
        x.map(|(k, &x)| f64::from(x) * f64::from(layout.weight(tile, o, k))).sum::<f64>() as f32
    }

    fn i8_product(&self, mem: &Mem, layout: &Layout, tile: &[u8], row: usize, o: usize) -> f32 {
        let x = self.x.row(mem, row);
        let unit = layout.group.min(ACT_GROUP);
        let mut sum = 0.0f32;
        for (g, group) in x.groups.iter().enumerate() {
            let mut t = 0.0f32;
            for u in 0..ACT_GROUP / unit {
                let inputs = g * ACT_GROUP + u * unit..g * ACT_GROUP + (u + 1) * unit;
                let (scale, bias) = layout.params(tile, o, inputs.start / layout.group);
                let code = |k| i32::from(layout.code(tile, o, k));
                let dot: i32 = inputs.map(|k| code(k) * i32::from(x.quants[k])).sum();
                let ones = group.sums[ActGroup::sum_index(ACT_GROUP / unit, u)];
                if layout.symmetric {
                    t = scale.mul_add((dot - layout.zero() * ones as i32) as f32, t);
                } else {
                    t = bias.mul_add(ones, scale.mul_add(dot as f32, t));
                }
            }
            sum = group.scale.mul_add(t, sum);
        }
        sum
    }
}

#[cfg(any(test, feature = "cases"))]
pub(crate) mod cases;
#[cfg(test)]
mod golden;
#[cfg(any(test, feature = "cases"))]
pub(crate) mod samples;
