//! Ops of a round as stages of one launch: between two launches a card idles for longer than it takes
//! to read the weights of a small matrix.
//!
//! A launch that [`joins`](crate::kernel::Launch::stage) is a chain of one stage. In a recorded sequence a
//! runtime makes one launch of neighbours that join: their words one after the other, their defines
//! together, and the most threads and shared memory.
//!
//! Blocks of joined stages wait for one another, so all of them have to be on the card at the same time: a chain has it
//! to itself. Launches of one stream do (a launch's blocks begin when all those of the one before have begun); chains of
//! two streams, or of two processes that share multiprocessors, could wait for ever.

use crate::Pass;
use crate::kernel::{Arg, Card, Launch, MOST_WORDS, Source};

const SOURCE: Source = Source {
    name: "chain.cu",
    text: concat!(
        include_str!("program.cuh"),
        "\n#define WARPS 8\n#define COPIERS 4\n#if defined(BLOCKS) && BLOCKS > 1 && __CUDA_ARCH__ == 900\n#define COMPUTERS 12\n#define TEAM_WARPS 4\n#else\n#define COMPUTERS WARPS\n#define TEAM_WARPS WARPS\n#endif\n#define TEAMS (COMPUTERS / TEAM_WARPS)\n#ifdef BLOCKS\n",
        include_str!("linear/weight.cuh"),
        include_str!("linear/fragments.cuh"),
        include_str!("linear/rounded.cuh"),
        include_str!("linear/share.cuh"),
        "#if WIDE\n",
        include_str!("wgmma.cuh"),
        include_str!("linear/panels.cuh"),
        include_str!("linear/wide.cuh"),
        "#else\n",
        include_str!("linear/product.cuh"),
        "#endif\n#endif\n#ifdef NORM_WIDTH\n",
        include_str!("rms_norm/row.cuh"),
        include_str!("rms_norm/stage.cuh"),
        "\n#endif\n",
        include_str!("silu_mul/stage.cuh"),
        include_str!("copy_rows/stage.cuh"),
        "\n#ifdef GDN_BLOCK\n",
        include_str!("gdn_mix/stage.cuh"),
        "\n#endif\n",
        include_str!("chain.cu"),
    ),
};

/// Dynamic shared memory of a block, but for wide products: enough for the stream of weights, and the rest is for what stages have of
/// their own and for the small kernels between.
pub(crate) const SHARED: usize = 175_000;
/// Static shared memory of a chain without a mixer, at most.
pub(crate) const STATIC_SHARED: usize = 1024;
/// Warps that compute and take part in each stage.
pub(crate) const WARPS: usize = 8;
/// Warps that compute where products are wide: teams of a mixer.
const WIDE_COMPUTERS: usize = 12;
/// Teams of warps, and warps of each, where products are wide.
pub(crate) const TEAMS: (usize, usize) = (3, WIDE_COMPUTERS / 3);
/// Bytes of a block's memory that mixers may have where products are wide, together.
pub(crate) const MIXING: usize = 102 << 10;
/// Warps that copy.
const COPIERS: usize = 4;
/// Rows of a round up to which products on sm_90 are not wide (product.cuh, beyond them wide.cuh).
const NARROW: usize = 8;
/// The most rows of a round that one product takes. More are multiplied as a prompt on sm_90, whose sums have another order:
/// reading weights again for every 64 would cost more.
pub(crate) const LIKE_ALONE: usize = 64;

/// Whether the rows of a pass are a stage of a chain: a round's, as long as they don't keep the card busy by themselves.
pub(crate) fn joins(pass: Pass, rows: usize) -> bool {
    pass == Pass::Round && rows <= LIKE_ALONE
}

/// Whether products of so many rows of a round are wide.
pub(crate) fn wide(card: &Card, rows: usize) -> bool {
    card.arch == 90 && rows > NARROW
}

/// What a stage does; chain.cu knows the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Product = 0,
    RmsNorm = 1,
    SiluMul = 2,
    CopyRows = 3,
    GdnMix = 4,
    Panels = 5,
}

/// Whether this card runs chains: clusters and copies by the copy engine.
pub(crate) fn supported(card: &Card) -> bool {
    card.arch >= 90 && card.sms >= 2
}

/// Blocks of a chain.
pub(crate) fn blocks(card: &Card) -> usize {
    card.sms as usize / 2 * 2
}

/// A stage of wide products, which have more warps.
pub(crate) fn widened(stage: Launch) -> Launch {
    Launch { block: 32 * (WIDE_COMPUTERS + COPIERS) as u32, ..stage }
}

/// A chain of one stage.
pub(crate) fn stage(
    card: &Card,
    kind: Kind,
    defines: &[(&'static str, i64)],
    shared: usize,
    words: &[Arg],
) -> Launch {
    assert!(words.len() <= MOST_WORDS, "{} words of a stage", words.len());
    let (grid, threads) = ([blocks(card) as u32, 1, 1], 32 * (WARPS + COPIERS) as u32);
    let launch = Launch::new(SOURCE, "chain", defines, grid, threads, words);
    launch.shared(shared as u32).cluster(2).stage(kind as u32)
}
