//! A cluster of blocks for every row.

use super::TopK;
use crate::Unsupported;
use crate::kernel::{Card, Launch, Plan, Source};

const KERNEL: Source = Source {
    name: "top_k/kernel.cu",
    text: concat!(include_str!("../cluster.cuh"), include_str!("kernel.cu")),
};
const THREADS: usize = 512;

/// How a long row is shared: every warp of every block of a cluster has a span of neighbours.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Split {
    /// Blocks: a power of 2.
    pub(crate) parts: usize,
    /// Elements of a warp: a multiple of 128, so that a span begins with a word of any bit mask.
    pub(crate) span: usize,
}

impl Split {
    /// The most blocks of a row.
    pub(crate) const MAX_PARTS: usize = 16;

    /// Of a row of `valid` elements between blocks of `warps` warps.
    pub(crate) fn of(card: &Card, valid: usize, warps: usize) -> Split {
        // Data centre parts allow clusters of 16, others of 8.
        let most = match card.arch {
            ..90 => 1,
            90 | 100 | 103 => Self::MAX_PARTS,
            _ => 8,
        };
        let parts = (valid / 4096).next_power_of_two().min(most);
        Split { parts, span: valid.div_ceil(parts * warps).next_multiple_of(128) }
    }
}

pub(super) fn plan(op: &TopK, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    if op.rows == 0 {
        return Ok(());
    }
    let Split { parts, span } = Split::of(card, op.valid, THREADS / 32);
    let number = |n: usize| (n as u32).into();
    let args = [
        op.logits.into(),
        op.ids.into(),
        op.values.into(),
        number(op.stride),
        number(op.valid),
        number(op.k),
        number(span),
    ];
    let grid = [parts as u32, op.rows as u32, 1];
    let launch = Launch::new(KERNEL, "top_k", &[], grid, THREADS as u32, &args);
    plan.push(launch.cluster(parts as u32));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cover_every_row() {
        for arch in [80, 90, 120] {
            let card = Card { arch, sms: 100, shared: 99 * 1024 };
            for valid in [1, 31, 4096, 8191, 49_152, 151_936, 248_320, 1 << 20] {
                let Split { parts, span } = Split::of(&card, valid, 16);
                assert!(parts.is_power_of_two() && parts <= Split::MAX_PARTS);
                assert!(parts == 1 || arch >= 90);
                assert!(span.is_multiple_of(128) && parts * 16 * span >= valid);
            }
        }
        let card = Card { arch: 90, sms: 132, shared: 227 * 1024 };
        let Split { parts, span } = Split::of(&card, 248_320, 16);
        assert_eq!((parts, span), (16, 1024));
    }
}
