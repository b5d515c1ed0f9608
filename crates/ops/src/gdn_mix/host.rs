//! The parts, one after the other.

use super::GdnMix;
use crate::{Cpu, Mem, Op};

pub(super) fn run(op: &GdnMix, mem: &Mem, cpu: &Cpu) {
    op.prepare.host(mem, cpu);
    op.delta.host(mem, cpu);
    op.norm.host(mem, cpu);
}
