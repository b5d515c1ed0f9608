//! The GatedDeltaNet output norm: per head `out = x · rsqrt(mean(x²) + eps) · weight · silu(gate)`.
//!
//! `x` and `gate` are `[rows, heads · dim]` f32, `weight` is `[dim]` f32 shared by all heads, `out`
//! is `[rows, heads · dim]` activations. Norm first, gate after (`Qwen3_5RMSNormGated`).
//!
//! Numerics: as [`crate::RmsNorm`], head by head. A quantised group may span two heads.

mod cuda;
mod host;

use crate::geometry::{holds, is};
use crate::kernel::{Card, Plan};
use crate::{Act, Bindings, Buf, Cost, Cpu, Mem, Op, Unsupported};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct GatedNorm {
    /// `[rows, heads · dim]` f32.
    pub x: Buf,
    /// `[rows, heads · dim]` f32.
    pub gate: Buf,
    /// `[dim]` f32.
    pub weight: Buf,
    /// `[rows, heads · dim]`.
    pub out: Act,
    /// Rows.
    pub rows: usize,
    /// Elements of one head. A multiple of 16.
    pub dim: usize,
    /// Added to the mean square.
    pub eps: f32,
}

impl Op for GatedNorm {
    fn name(&self) -> &'static str {
        "gated_norm"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("x", self.x);
        b.read("gate", self.gate);
        b.read("weight", self.weight);
        b.write("out", self.out.buf);
    }

    fn check(&self) -> Result<(), Unsupported> {
        let (dim, width) = (self.dim, self.out.width);
        let lanes = dim.is_multiple_of(16) && dim > 0;
        Unsupported::unless(lanes, self.name(), || format!("dim {dim}"), "multiples of 16")?;
        let heads = width.is_multiple_of(dim) && width > 0;
        Unsupported::unless(heads, self.name(), || format!("width {width}"), "multiples of dim")?;
        self.out.check(self.name(), self.rows)?;
        let sizes = holds(self.x, &[self.rows, width])
            && holds(self.gate, &[self.rows, width])
            && is(self.weight, &[dim]);
        Unsupported::unless(sizes, self.name(), || format!("{self:?}"), "matching buffer sizes")
    }

    fn cost(&self) -> Cost {
        let width = self.out.width;
        Cost {
            weight_bytes: 4 * self.dim as u64,
            other_bytes: (self.rows * (8 * width + self.out.row_bytes())) as u64,
            flops: 8 * (self.rows * width) as u64,
        }
    }

    fn reference(&self, mem: &Mem) {
        let width = self.out.width;
        let (x, gate) = (mem.get::<f32>(self.x), mem.get::<f32>(self.gate));
        let weight = mem.get::<f32>(self.weight);
        for row in 0..self.rows {
            let out = self.out.row_mut(mem, row);
            for head in (0..width).step_by(self.dim) {
                let x = &x[row * width + head..][..self.dim];
                let gate = &gate[row * width + head..][..self.dim];
                let squares: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
                let scale = 1.0 / (squares / self.dim as f64 + f64::from(self.eps)).sqrt();
                for i in 0..self.dim {
                    let z = f64::from(gate[i]);
                    let silu = z / (1.0 + (-z).exp());
                    out.x[head + i] =
                        (f64::from(x[i]) * scale * f64::from(weight[i]) * silu) as f32;
                }
            }
            out.quantize();
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
