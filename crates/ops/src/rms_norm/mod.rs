//! Root-mean-square norm: `out = x · rsqrt(mean(x²) + eps) · weight`, row by row.
//!
//! | | shape | dtype |
//! |---|---|---|
//! | x | `[rows, width]` | f32 |
//! | weight | `[width]` | f32, the multiplier itself: zero-centred checkpoints get their 1 added at load |
//! | out | `[rows, width]` | activations, see [`Act`] |
//!
//! Source: arXiv 1910.07467. The multiplication happens in f32 (`Qwen3_5RMSNorm` in transformers).
//! Numerics: the reference sums squares in f64; SIMD sums 16 lanes in f32, then a fixed tree.

mod cuda;
mod host;

use crate::kernel::{Card, Plan};
use crate::{Act, Bindings, Buf, Cost, Cpu, Mem, Op, Pass, Unsupported};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// `[rows, width]` f32.
    pub x: Buf,
    /// `[width]` f32.
    pub weight: Buf,
    /// `[rows, width]`.
    pub out: Act,
    /// Rows.
    pub rows: usize,
    /// A round's rows join chains on CUDA.
    pub pass: Pass,
    /// Added to the mean square.
    pub eps: f32,
}

impl Op for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("x", self.x);
        b.read("weight", self.weight);
        b.write_act("out", self.out);
    }

    fn check(&self) -> Result<(), Unsupported> {
        self.out.check(self.name(), self.rows)?;
        let width = self.out.width;
        let lanes = width.is_multiple_of(16) && width > 0;
        Unsupported::unless(lanes, self.name(), || format!("width {width}"), "multiples of 16")?;
        let sizes = self.x.bytes >= 4 * self.rows * width && self.weight.bytes == 4 * width;
        Unsupported::unless(sizes, self.name(), || format!("{self:?}"), "matching buffer sizes")
    }

    fn cost(&self) -> Cost {
        let width = self.out.width;
        Cost {
            weight_bytes: 4 * width as u64,
            other_bytes: (self.rows * (4 * width + self.out.row_bytes())) as u64,
            flops: 4 * (self.rows * width) as u64,
        }
    }

    fn reference(&self, mem: &Mem) {
        let width = self.out.width;
        let (x, weight) = (mem.get::<f32>(self.x), mem.get::<f32>(self.weight));
        for row in 0..self.rows {
            let x = &x[row * width..][..width];
            let squares: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
            let scale = 1.0 / (squares / width as f64 + f64::from(self.eps)).sqrt();
            let out = self.out.row_mut(mem, row);
            for i in 0..width {
                out.x[i] = (f64::from(x[i]) * scale * f64::from(weight[i])) as f32;
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
