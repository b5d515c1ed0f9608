//! Copies rows into columns of a wider buffer: a tap of the residual stream into the features that
//! the draft's `fc` reads.

mod cuda;
mod host;

use crate::geometry::holds;
use crate::kernel::{Card, Plan};
use crate::{Act, Bindings, Buf, Cost, Cpu, Elements, Mem, Op, Pass, Unsupported};

/// `to[r, column .. column + width] = from[r]`; with `finish`, then quantises each whole row of `to`.
#[derive(Clone, Copy, Debug)]
pub struct CopyRows {
    /// `[rows, width]` f32.
    pub from: Buf,
    /// Columns of one row of `from`.
    pub width: usize,
    /// `[rows, to.width]`.
    pub to: Act,
    /// First column written.
    pub column: usize,
    /// Whether this copy completes the rows, so that their quantised parts can be made.
    pub finish: bool,
    /// Rows.
    pub rows: usize,
    /// A round's rows join chains on CUDA.
    pub pass: Pass,
}

impl Op for CopyRows {
    fn name(&self) -> &'static str {
        "copy_rows"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("from", self.from);
        b.update_as("to", self.to.buf, Elements::Act(self.to));
    }

    fn check(&self) -> Result<(), Unsupported> {
        let (to, op) = (self.to.width, self.name());
        Unsupported::unless(to > 0, op, || format!("width {to}"), "at least one column")?;
        self.to.check(op, self.rows)?;
        let end = self.column.checked_add(self.width);
        let inside = self.width > 0 && end.is_some_and(|end| end <= to);
        let what = || format!("columns {}+{} of {to}", self.column, self.width);
        Unsupported::unless(inside, op, what, "columns of `to`")?;
        let sizes = holds(self.from, &[self.rows, self.width]);
        Unsupported::unless(sizes, op, || format!("{self:?}"), "matching buffer sizes")
    }

    fn cost(&self) -> Cost {
        let finish = if self.finish { 4 * self.to.width + self.to.row_bytes() } else { 0 };
        Cost {
            weight_bytes: 0,
            other_bytes: (self.rows * (8 * self.width + finish)) as u64,
            flops: 0,
        }
    }

    fn reference(&self, mem: &Mem) {
        let from = mem.get::<f32>(self.from);
        for row in 0..self.rows {
            let to = self.to.row_mut(mem, row);
            to.x[self.column..][..self.width]
                .copy_from_slice(&from[row * self.width..][..self.width]);
            if self.finish {
                to.quantize();
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
