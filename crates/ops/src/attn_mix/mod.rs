//! What mixes tokens in an attention layer, as one op: [`AttnPrepare`], [`Attention`], [`HeadGate`].
//!
//! The definition is that of the parts, one after the other; so are the host's implementation and a
//! pass of many rows on CUDA. It exists for rounds, where launches that wait for one another take
//! longer than their work: on CUDA they are two, and pages of earlier positions are on their way
//! while the launch before still computes. A row has the bits that the parts give it.
//!
//! The buffers between the parts (rotated queries, attention's `out`) are working memory: a device may
//! leave anything there.

mod cuda;
mod host;

use crate::attention::rounded::rounded;
use crate::kernel::{Card, Plan};
use crate::{
    Attention, AttnPrepare, Bindings, Cost, Cpu, Elements, HeadGate, Mem, Op, Pass, Queries,
    Rounded, Unsupported,
};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct AttnMix {
    /// Norm and rotary embedding. It has queries.
    pub prepare: AttnPrepare,
    /// Attention of what `prepare` leaves.
    pub attention: Attention,
    /// The gate of what `attention` leaves.
    pub gate: HeadGate,
}

impl AttnMix {
    fn queries(&self) -> Result<Queries, Unsupported> {
        let what = || "no queries".to_owned();
        let missing = || Unsupported { op: self.name(), what: what(), limit: "queries".to_owned() };
        self.prepare.queries.ok_or_else(missing)
    }
}

impl Op for AttnMix {
    fn name(&self) -> &'static str {
        "attn_mix"
    }

    fn bind(&self, b: &mut Bindings) {
        let AttnMix { prepare, attention, gate } = self;
        if let Some(queries) = &prepare.queries {
            b.read("q", queries.q);
            if let Some(norm) = queries.norm {
                b.read("q_norm", norm);
            }
        }
        b.read("k", prepare.k);
        b.read("v", prepare.v);
        if let Some(norm) = prepare.k_norm {
            b.read("k_norm", norm);
        }
        b.read("inv_freq", prepare.rope.inv_freq);
        b.read("step", prepare.lanes.step);
        b.read("table", prepare.kv.table);
        let pages = Elements::pages(&prepare.kv);
        b.update_as("keys", prepare.kv.keys, pages);
        b.update_as("values", prepare.kv.values, pages);
        b.write_as("rotated", attention.q, Elements::Scratch);
        b.write_as("mixed", attention.out, Elements::Scratch);
        b.write_as("scratch", attention.scratch, Elements::Scratch);
        b.write_act("out", gate.out);
    }

    fn check(&self) -> Result<(), Unsupported> {
        let (op, AttnMix { prepare, attention, gate }) = (self.name(), self);
        prepare.check()?;
        attention.check()?;
        gate.check()?;
        let queries = self.queries()?;
        let (dim, rows) = (prepare.kv.head_dim, prepare.lanes.rows);
        let gated = match gate.q_gate {
            Some(gate) => (gate, 2 * dim) == (queries.q, queries.stride),
            None => queries.stride == dim,
        };
        let joined = (queries.out, queries.heads) == (attention.q, attention.heads)
            && (prepare.kv, prepare.lanes) == (attention.kv, attention.lanes)
            && (attention.out, attention.heads) == (gate.x, gate.heads)
            && (gate.rows, gate.dim) == (rows, dim)
            && attention.pass == Pass::Round
            && gated;
        Unsupported::unless(joined, op, || format!("{self:?}"), "parts of one layer in a round")
    }

    /// Without what lies between the parts; a lower bound, as attention's.
    fn cost(&self) -> Cost {
        let mut cost = self.prepare.cost();
        cost += self.attention.cost();
        cost += self.gate.cost();
        let between = 4 * self.gate.rows * self.gate.heads * self.gate.dim;
        cost.other_bytes -= 2 * 2 * between as u64;
        cost
    }

    fn reference(&self, mem: &Mem) {
        self.prepare.reference(mem);
        self.attention.reference(mem);
        self.gate.reference(mem);
    }

    /// Queries and keys are computed here: an element of them may tip.
    fn rounded(&self, mem: &Mem) -> Option<Vec<Rounded>> {
        let mut all = rounded(&self.attention, mem, true);
        let width = self.gate.heads * self.gate.dim;
        for (row, out) in all.chunks_exact_mut(width).enumerate() {
            self.gate.rounded(mem, row, out);
        }
        Some(all)
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
