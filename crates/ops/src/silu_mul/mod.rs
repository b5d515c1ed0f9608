//! SwiGLU's middle: `out = silu(gate) · up`, elementwise. Source: arXiv 2002.05202.
//!
//! Numerics: f32, with [`crate::simd::math::silu`]; the reference computes in f64.

mod cuda;
mod host;

use crate::geometry::holds;
use crate::kernel::{Card, Plan};
use crate::{Act, Bindings, Buf, Cost, Cpu, Mem, Op, Pass, Unsupported};

/// See the module. `gate` and `up` are `[rows, width]` f32; `width` is a multiple of 16.
#[derive(Clone, Copy, Debug)]
pub struct SiluMul {
    /// `[rows, width]` f32.
    pub gate: Buf,
    /// `[rows, width]` f32.
    pub up: Buf,
    /// `[rows, width]`.
    pub out: Act,
    /// Rows.
    pub rows: usize,
    /// A round's rows join chains on CUDA.
    pub pass: Pass,
}

impl Op for SiluMul {
    fn name(&self) -> &'static str {
        "silu_mul"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("gate", self.gate);
        b.read("up", self.up);
        b.write_act("out", self.out);
    }

    fn check(&self) -> Result<(), Unsupported> {
        let width = self.out.width;
        let lanes = width.is_multiple_of(16) && width > 0;
        Unsupported::unless(lanes, self.name(), || format!("width {width}"), "multiples of 16")?;
        self.out.check(self.name(), self.rows)?;
        let sizes = holds(self.gate, &[self.rows, width]) && holds(self.up, &[self.rows, width]);
        Unsupported::unless(sizes, self.name(), || format!("{self:?}"), "matching buffer sizes")
    }

    fn cost(&self) -> Cost {
        let width = self.out.width;
        Cost {
            weight_bytes: 0,
            other_bytes: (self.rows * (8 * width + self.out.row_bytes())) as u64,
            flops: 4 * (self.rows * width) as u64,
        }
    }

    fn reference(&self, mem: &Mem) {
        let width = self.out.width;
        let (gate, up) = (mem.get::<f32>(self.gate), mem.get::<f32>(self.up));
        for row in 0..self.rows {
            let out = self.out.row_mut(mem, row);
            for i in 0..width {
                let (g, u) = (f64::from(gate[row * width + i]), f64::from(up[row * width + i]));
                out.x[i] = (g / (1.0 + (-g).exp()) * u) as f32;
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
