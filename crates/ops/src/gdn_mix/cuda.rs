//! Few rows of one lane as a stage of a chain, and those of several lanes where products are wide; else of several lanes as one
//! launch of the same code; everything else as the parts.

use super::GdnMix;
use crate::chain::{self, Kind};
use crate::gdn_prepare::{CONV_TAPS, Commit, GdnGeometry, HeadMap};
use crate::geometry::must_align;
use crate::kernel::{Arg, Card, Launch, Plan, Source};
use crate::{Op, Pass, Unsupported};

const KERNEL: Source = Source {
    name: "gdn_mix/kernel.cu",
    text: concat!(
        "#define TEAM_WARPS (GDN_VALUE_DIM / 16)\n#define TEAMS 1\n",
        include_str!("stage.cuh"),
        include_str!("kernel.cu")
    ),
};
/// Rows that a block has in shared memory.
const TURN: usize = 8;
/// Shared memory that a block has without asking.
const STATIC_SHARED: usize = 48 << 10;

pub(super) fn plan(op: &GdnMix, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    op.check()?;
    let GdnMix { prepare, delta, norm } = op;
    let g = &prepare.geometry;
    let few = prepare.commit == Commit::Deferred && chain::supported(card);
    // A half of the pending rows starts at a multiple of 16 bytes; a warp of a chain has eight of a block's columns.
    let aligned = (g.value_heads * delta.block).is_multiple_of(4);
    if few && aligned && g.value_dim <= 16 * chain::WARPS && shared_bytes(g) <= STATIC_SHARED {
        return few_rows(op, card, plan);
    }
    prepare.cuda(card, plan)?;
    delta.cuda(card, plan)?;
    if norm.rows == 0 { Ok(()) } else { norm.cuda(card, plan) }
}

fn few_rows(op: &GdnMix, card: &Card, plan: &mut Plan) -> Result<(), Unsupported> {
    let GdnMix { prepare, delta, norm } = op;
    let (g, lanes) = (&prepare.geometry, prepare.lanes);
    let (rows, lane) = ([prepare.qkv, norm.gate, norm.out.buf], [prepare.history, delta.state]);
    let (weights, pending) = ([prepare.conv, norm.weight], [delta.pending, lanes.step]);
    for bufs in [&rows[..], &lane, &weights, &pending] {
        must_align(op.name(), bufs)?;
    }
    let defines = [
        ("GDN_BF16", norm.out.define(op.name())?.1),
        ("GDN_STRIDE", norm.out.row_bytes() as i64),
        ("GDN_KEY_HEADS", g.key_heads as i64),
        ("GDN_VALUE_HEADS", g.value_heads as i64),
        ("GDN_KEY_DIM", g.key_dim as i64),
        ("GDN_VALUE_DIM", g.value_dim as i64),
        ("GDN_TILED", i64::from(g.head_map == HeadMap::Tiled)),
        ("GDN_BLOCK", delta.block as i64),
    ];
    let words: [Arg; 15] = [
        prepare.qkv.into(),
        prepare.a.into(),
        prepare.b.into(),
        norm.gate.into(),
        prepare.conv.into(),
        prepare.decay.into(),
        prepare.dt_bias.into(),
        norm.weight.into(),
        prepare.history.into(),
        delta.state.into(),
        delta.pending.into(),
        norm.out.buf.into(),
        lanes.step.into(),
        norm.eps.into(),
        (lanes.count as u32).into(),
    ];
    let joins = chain::joins(Pass::Round, lanes.rows)
        && if chain::wide(card, lanes.rows) {
            teams_fit(g, lanes.count * g.value_heads, card)
        } else {
            lanes.count <= 1 && fits(g, card)
        };
    plan.push(if joins {
        chain::stage(card, Kind::GdnMix, &defines, 0, &words)
    } else {
        let grid = [2, g.value_heads as u32, lanes.count as u32];
        let threads = 32 * g.value_dim / 16;
        Launch::new(KERNEL, "gdn_mix", &defines, grid, threads as u32, &words).cluster(2)
    });
    Ok(())
}

/// Whether a head's memory fits beside the stream of weights. With more heads than clusters (several lanes), they would take turns.
fn fits(g: &GdnGeometry, card: &Card) -> bool {
    chain::SHARED + shared_bytes(g) + (2 << 10) <= card.shared as usize
}

/// Whether each head has a team, and each team memory and warps for its columns, where products are wide. Heads that take turns are
/// slower than blocks of their own, which they do in a chain without a wide product, too (dense weights): a plan can't see that.
fn teams_fit(g: &GdnGeometry, heads: usize, card: &Card) -> bool {
    let (teams, warps) = chain::TEAMS;
    let (columns, places) = (g.value_dim / 2, teams * chain::blocks(card) / 2);
    let sets = columns.div_ceil(8 * warps);
    heads <= places
        && sets <= 2
        && columns.is_multiple_of(8 * sets)
        && teams * shared_bytes(g) <= chain::MIXING
}

/// `Shared` in `stage.cuh`, and a little more.
fn shared_bytes(g: &GdnGeometry) -> usize {
    let columns = g.value_dim / 2;
    let width = 2 * g.key_dim + columns;
    let stream = (2 * CONV_TAPS - 1 + TURN) * width;
    4 * (stream + TURN * (2 * g.key_dim + 3 * columns) + columns + 7 * TURN)
}

#[cfg(test)]
mod tests {
    use super::super::cases::entry_of_plan;
    use crate::kernel::Card;

    #[test]
    fn a_stage_only_where_weights_stream_beside_it() {
        let entry = |shared| entry_of_plan(&Card { arch: 120, sms: 170, shared }, 1, 1, 48);
        assert_eq!(entry(227 << 10), "chain");
        assert_eq!(entry(99 << 10), "gdn_mix");
    }

    #[test]
    fn lanes_are_a_stage_where_products_are_wide_and_each_head_has_a_team() {
        let card = Card { arch: 90, sms: 132, shared: 227 << 10 };
        for (lanes, rows, heads, entry) in [
            (2, 8, 80, "chain"),
            (4, 8, 48, "chain"),
            (8, 8, 16, "chain"),
            (3, 8, 80, "gdn_mix"), // more heads than teams
            (4, 1, 48, "gdn_mix"), // few rows
            (9, 8, 16, "gdn_mix"), // more rows than a chain has
        ] {
            assert_eq!(
                entry_of_plan(&card, lanes, rows, heads),
                entry,
                "{lanes} x {rows}, {heads}"
            );
        }
    }
}
