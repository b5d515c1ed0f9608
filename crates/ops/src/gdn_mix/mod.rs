//! What mixes tokens in a GatedDeltaNet layer, as one op: [`GdnPrepare`], [`GatedDelta`], [`GatedNorm`].
//!
//! The definition is that of the parts, one after the other; so are the host's implementation and a
//! prefill on CUDA. It exists for passes of few rows ([`Commit::Deferred`](crate::Commit::Deferred)), where three launches
//! that wait for one another take longer than their work: on CUDA they are one kernel, and what the
//! previous pass left enters the state while the launch before still computes.
//!
//! The buffers between the parts (`q`, `k`, `v`, `g`, `beta`, the rule's `out`) are working memory: a
//! device may leave anything there.
//!
//! Numerics: as the parts. The fused kernel takes k · q before both are normed.

mod cuda;
mod host;

use crate::kernel::{Card, Plan};
use crate::{
    Bindings, Buf, Cost, Cpu, Elements, GatedDelta, GatedNorm, GdnPrepare, Mem, Op, Unsupported,
};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct GdnMix {
    /// Convolution and gates.
    pub prepare: GdnPrepare,
    /// The rule, on what `prepare` leaves.
    pub delta: GatedDelta,
    /// The norm of what `delta` leaves.
    pub norm: GatedNorm,
}

impl GdnMix {
    /// Buffers that one part leaves to the next, as both name them.
    fn between(&self) -> [(&'static str, Buf, Buf); 6] {
        let GdnMix { prepare, delta, norm } = self;
        [
            ("q", prepare.q, delta.q),
            ("k", prepare.k, delta.k),
            ("v", prepare.v, delta.v),
            ("g", prepare.g, delta.g),
            ("beta", prepare.beta, delta.beta),
            ("mixed", delta.out, norm.x),
        ]
    }
}

impl Op for GdnMix {
    fn name(&self) -> &'static str {
        "gdn_mix"
    }

    fn bind(&self, b: &mut Bindings) {
        let GdnMix { prepare, delta, norm } = self;
        b.read("qkv", prepare.qkv);
        b.read("a", prepare.a);
        b.read("b", prepare.b);
        b.read("conv", prepare.conv);
        b.read("decay", prepare.decay);
        b.read("dt_bias", prepare.dt_bias);
        b.read("gate", norm.gate);
        b.read("weight", norm.weight);
        b.read("step", prepare.lanes.step);
        b.update("history", prepare.history);
        b.update("state", delta.state);
        b.update("pending", delta.pending);
        for (name, buf, _) in self.between() {
            b.write_as(name, buf, Elements::Scratch);
        }
        b.write_act("out", norm.out);
    }

    fn check(&self) -> Result<(), Unsupported> {
        let (op, GdnMix { prepare, delta, norm }) = (self.name(), self);
        prepare.check()?;
        delta.check()?;
        norm.check()?;
        let joined = self.between().iter().all(|(_, left, taken)| left == taken)
            && (prepare.lanes, prepare.geometry) == (delta.lanes, delta.geometry)
            && (prepare.block, prepare.commit) == (delta.block, delta.commit)
            && (norm.rows, norm.dim) == (prepare.lanes.rows, prepare.geometry.value_dim)
            && norm.out.width == prepare.geometry.values();
        Unsupported::unless(joined, op, || format!("{self:?}"), "parts of one layer")
    }

    /// Without what lies between the parts.
    fn cost(&self) -> Cost {
        let (g, rows) = (&self.prepare.geometry, self.prepare.lanes.rows);
        let mut cost = self.prepare.cost();
        cost += self.delta.cost();
        cost += self.norm.cost();
        let between = 4 * rows * (2 * g.keys() + 2 * g.values() + 2 * g.value_heads);
        cost.other_bytes -= 2 * between as u64;
        cost
    }

    fn reference(&self, mem: &Mem) {
        self.prepare.reference(mem);
        self.delta.reference(mem);
        self.norm.reference(mem);
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
