//! Token embedding: `out[r] = table[ids[r]]`, dequantised on the way.
//!
//! | | shape | dtype |
//! |---|---|---|
//! | ids | `[rows]` | u32; an id ≥ n reads row n − 1 |
//! | table | `[n, k]` | any [`crate::Format`]; with tied heads the same matrix that `linear` reads |
//! | out | `[rows, k]` | f32 |
//!
//! Numerics: `scale · code + bias` with the product and the sum rounded apart, or
//! `scale · (code − zero)`; bit-exact everywhere.

mod cuda;
mod host;

use crate::kernel::{Card, Plan};
use crate::linear::dense_row;
use crate::linear::layout::Layout;
use crate::{Bindings, Buf, Cost, Cpu, Mem, Op, Unsupported, Weight};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    /// `[rows]` u32.
    pub ids: Buf,
    /// `[vocab, hidden]`.
    pub table: Weight,
    /// `[rows, hidden]` f32.
    pub out: Buf,
    /// Rows.
    pub rows: usize,
}

impl Embed {
    /// The piece of the table (a tile, or a row) that holds row `id`, and which of its rows it is.
    fn piece<'m>(&self, mem: &'m Mem, id: u32) -> (&'m [u8], usize) {
        let Weight { buf, format, n, k } = self.table;
        let id = (id as usize).min(n - 1);
        let bytes = format.piece_bytes(k).unwrap_or_default();
        let piece = buf.slice(id / format.piece_rows() * bytes, bytes);
        (mem.get(piece), id % format.piece_rows())
    }
}

impl Op for Embed {
    fn name(&self) -> &'static str {
        "embed"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("ids", self.ids);
        b.read("table", self.table.buf);
        b.write("out", self.out);
    }

    fn check(&self) -> Result<(), Unsupported> {
        let Weight { format, n, k, buf } = self.table;
        let refuse = |ok, what: &dyn Fn() -> String, limit: &str| {
            Unsupported::unless(ok, self.name(), what, limit)
        };
        refuse(
            self.table.fits(),
            &|| format!("[{n}, {k}] {format:?} in {buf:?}"),
            "a packed matrix",
        )?;
        let ids = self.rows.checked_mul(4).is_some_and(|size| self.ids.bytes >= size);
        refuse(ids, &|| format!("ids {:?}", self.ids), "rows u32")?;
        let size = self.rows.checked_mul(k).and_then(|size| size.checked_mul(4));
        let out = size.is_some_and(|size| self.out.bytes >= size);
        refuse(out, &|| format!("out {:?}", self.out), "rows x k floats")
    }

    fn cost(&self) -> Cost {
        let row = self.table.format.piece_bytes(self.table.k).unwrap_or_default();
        let row = row / self.table.format.piece_rows();
        Cost {
            weight_bytes: (self.rows * row) as u64,
            other_bytes: (self.rows * (4 + 4 * self.table.k)) as u64,
            flops: 2 * (self.rows * self.table.k) as u64,
        }
    }

    fn reference(&self, mem: &Mem) {
        let k = self.table.k;
        let ids = mem.get::<u32>(self.ids);
        for row in 0..self.rows {
            let (piece, o) = self.piece(mem, ids[row]);
            let out = mem.get_mut::<f32>(self.out.rows(row, 1, 4 * k));
            match Layout::of(self.table.format) {
                None => out.copy_from_slice(&dense_row(self.table.format, piece)),
                Some(layout) => {
                    for (i, out) in out.iter_mut().enumerate() {
                        *out = layout.weight(piece, o, i);
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
