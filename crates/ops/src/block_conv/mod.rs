//! DFlash 2's dynamic grouped convolution over the rows of one block (no state across rounds).
//!
//! `out_t[c] = Σ_o (base[o, c] + dyn[t, side, o, c / group]) · x_{t−o}[c]`, with `x_{<0} = 0`, where t
//! counts the rows of a lane. Source: spec D.3, `grouped_conv` of the numpy reference.
//!
//! Numerics: f32; taps in ascending order, each added by a fused multiply-add.

mod cuda;
mod host;

use crate::geometry::{holds, is};
use crate::kernel::{Card, Plan};
use crate::{Act, Bindings, Buf, Cost, Cpu, Lanes, Mem, Op, Unsupported};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct BlockConv {
    /// `[rows, width]`; the f32 part is read.
    pub x: Act,
    /// `[rows, 2, taps, width / group]` f32.
    pub dynamic: Buf,
    /// Which of the two kernels of `dynamic`.
    pub side: usize,
    /// `[taps, width]` f32: this side's.
    pub base: Buf,
    /// `[rows, width]`: the input of a linear layer, or the residual stream to add to.
    pub out: BlockConvOut,
    /// Rows and their lanes.
    pub lanes: Lanes,
    /// Taps.
    pub taps: usize,
    /// Channels.
    pub width: usize,
    /// Channels that share a dynamic tap. A multiple of 16.
    pub group: usize,
}

/// Where [`BlockConv`] writes.
#[derive(Clone, Copy, Debug)]
pub enum BlockConvOut {
    /// As the input of a linear layer.
    Act(Act),
    /// Added to `[rows, width]` f32.
    Add(Buf),
}

impl Op for BlockConv {
    fn name(&self) -> &'static str {
        "block_conv"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("x", self.x.buf);
        b.read("dynamic", self.dynamic);
        b.read("base", self.base);
        b.read("step", self.lanes.step);
        match self.out {
            BlockConvOut::Act(act) => b.write("out", act.buf),
            BlockConvOut::Add(buf) => b.update("out", buf),
        }
    }

    fn check(&self) -> Result<(), Unsupported> {
        let (op, rows, width) = (self.name(), self.lanes.rows, self.width);
        self.lanes.check(op)?;
        let (group, taps, side) = (self.group, self.taps, self.side);
        let lanes = group.is_multiple_of(16) && group > 0;
        Unsupported::unless(lanes, op, || format!("group {group}"), "multiples of 16")?;
        let groups = width.is_multiple_of(group) && width > 0;
        Unsupported::unless(groups, op, || format!("width {width}"), "multiples of the group")?;
        Unsupported::unless(taps > 0, op, || format!("{taps} taps"), "at least one")?;
        Unsupported::unless(side < 2, op, || format!("side {side}"), "0 and 1")?;
        let out = match self.out {
            BlockConvOut::Act(act) => {
                act.check(op, rows)?;
                act.width == width
            }
            BlockConvOut::Add(buf) => holds(buf, &[rows, width]),
        };
        let sizes = out
            && self.x.width == width
            && self.x.rows() >= rows
            && holds(self.dynamic, &[rows, 2, taps, width / group])
            && is(self.base, &[taps, width]);
        Unsupported::unless(sizes, op, || format!("{self:?}"), "matching buffer sizes")
    }

    fn cost(&self) -> Cost {
        let (rows, width, taps) = (self.lanes.rows, self.width, self.taps);
        let out = match self.out {
            BlockConvOut::Act(act) => act.row_bytes(),
            BlockConvOut::Add(_) => 8 * width,
        };
        Cost {
            weight_bytes: (4 * taps * width) as u64,
            other_bytes: (rows * (4 * width + 4 * taps * (width / self.group) + out)) as u64,
            flops: (3 * rows * taps * width) as u64,
        }
    }

    fn reference(&self, mem: &Mem) {
        let (width, taps, groups) = (self.width, self.taps, self.width / self.group);
        let base = mem.get::<f32>(self.base);
        let dynamic = mem.get::<f32>(self.dynamic);
        for step in self.lanes.steps(mem) {
            for t in 0..step.rows as usize {
                let row = step.row0 as usize + t;
                let kernel = |o: usize, c: usize| {
                    let tap = (row * 2 + self.side) * taps + o;
                    base[o * width + c] + dynamic[tap * groups + c / self.group]
                };
                let conv = |c: usize| {
                    (0..taps.min(t + 1)).fold(0.0f32, |sum, o| {
                        kernel(o, c).mul_add(self.x.row(mem, row - o).x[c], sum)
                    })
                };
                match self.out {
                    BlockConvOut::Act(act) => {
                        let out = act.row_mut(mem, row);
                        (0..width).for_each(|c| out.x[c] = conv(c));
                        out.quantize();
                    }
                    BlockConvOut::Add(buf) => {
                        let out = mem.get_mut::<f32>(buf.rows(row, 1, 4 * width));
                        (0..width).for_each(|c| out[c] += conv(c));
                    }
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
