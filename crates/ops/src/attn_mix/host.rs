//! The parts, one after the other.

use super::AttnMix;
use crate::{Cpu, Mem, Op};

pub(super) fn run(op: &AttnMix, mem: &Mem, cpu: &Cpu) {
    op.prepare.host(mem, cpu);
    op.attention.host(mem, cpu);
    op.gate.host(mem, cpu);
}
