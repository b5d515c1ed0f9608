//! Attention's output gate: `out = x · sigmoid(gate)`, or `out = x` for models without one.
//!
//! `x` is `[rows, heads · dim]` f32. `q_gate`, if any, is the query projection
//! `[rows, heads, 2 · dim]` f32, whose second half of each head is the gate.
//!
//! Numerics: the reference takes the sigmoid in f64; SIMD uses [`crate::simd::math::sigmoid`].
//! Source: `Qwen3_5Attention` in transformers (`attn_output_gate`).

mod cuda;
mod host;

use crate::geometry::elements_fit;
use crate::kernel::{Card, Plan};
use crate::{Act, Bindings, Buf, Cost, Cpu, Mem, Op, Rounded, Unsupported};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct HeadGate {
    /// `[rows, heads · dim]` f32.
    pub x: Buf,
    /// `[rows, heads, 2 · dim]` f32.
    pub q_gate: Option<Buf>,
    /// `[rows, heads · dim]`.
    pub out: Act,
    /// Rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Elements of one head. A multiple of 16.
    pub dim: usize,
}

impl HeadGate {
    fn x_row<'m>(&self, mem: &'m Mem, row: usize) -> &'m [f32] {
        mem.get(self.x.rows(row, 1, 4 * self.out.width))
    }

    /// What an element of a row is divided by.
    fn divisor(&self, mem: &Mem, row: usize, at: usize) -> f64 {
        self.gate_row(mem, row).map_or(1.0, |gates| {
            let (head, i) = (at / self.dim, at % self.dim);
            1.0 + f64::from(-gates[(2 * head + 1) * self.dim + i]).exp()
        })
    }

    /// What comes of a row that is known as far as this.
    pub(crate) fn rounded(&self, mem: &Mem, row: usize, x: &mut [Rounded]) {
        // What a card's sigmoid may lose.
        const SIGMOID: f64 = 1.0 / 1_048_576.0;
        for (at, x) in x.iter_mut().enumerate() {
            let (want, within) = (f64::from(x.want), f64::from(x.within));
            let divisor = self.divisor(mem, row, at);
            x.want = (want / divisor) as f32;
            x.within = ((within + SIGMOID * want.abs()) / divisor) as f32;
        }
    }

    /// Queries and gates of a row, `[heads, 2 · dim]`.
    fn gate_row<'m>(&self, mem: &'m Mem, row: usize) -> Option<&'m [f32]> {
        self.q_gate.map(|gate| mem.get(gate.rows(row, 1, 8 * self.out.width)))
    }
}

impl Op for HeadGate {
    fn name(&self) -> &'static str {
        "head_gate"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("x", self.x);
        if let Some(gate) = self.q_gate {
            b.read("q_gate", gate);
        }
        b.write_act("out", self.out);
    }

    fn check(&self) -> Result<(), Unsupported> {
        self.out.check(self.name(), self.rows)?;
        let dims = self.dim.is_multiple_of(16) && self.dim > 0;
        Unsupported::unless(dims, self.name(), || format!("dim {}", self.dim), "multiples of 16")?;
        let shape = [self.rows, self.heads, self.dim];
        let sizes = self.heads.checked_mul(self.dim) == Some(self.out.width)
            && elements_fit(self.x, &shape, 4)
            && self.q_gate.is_none_or(|gate| elements_fit(gate, &shape, 8));
        Unsupported::unless(sizes, self.name(), || format!("{self:?}"), "matching buffer sizes")
    }

    fn cost(&self) -> Cost {
        let elements = (self.rows * self.out.width) as u64;
        let reads = if self.q_gate.is_some() { 8 } else { 4 };
        Cost {
            weight_bytes: 0,
            other_bytes: reads * elements + (self.rows * self.out.row_bytes()) as u64,
            flops: if self.q_gate.is_some() { 4 * elements } else { 0 },
        }
    }

    fn reference(&self, mem: &Mem) {
        for row in 0..self.rows {
            let x = self.x_row(mem, row);
            let out = self.out.row_mut(mem, row);
            for (at, (out, &x)) in out.x.iter_mut().zip(x).enumerate() {
                *out = (f64::from(x) / self.divisor(mem, row, at)) as f32;
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
