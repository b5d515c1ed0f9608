//! A round's rows, as stages of a chain: `product.cuh` and, on sm_90 for more than 8 rows, `wide.cuh`. A row's bits don't depend on which.

use super::{Group, weight_defines};
use crate::chain::{self, Kind};
use crate::kernel::{Arg, Card, Plan, WORK_BYTES};
use crate::linear::Linear;
use crate::{Codes, Unsupported};

pub(super) fn plan(
    op: &Linear,
    group: &Group<'_>,
    card: &Card,
    plan: &mut Plan,
) -> Result<(), Unsupported> {
    let sizes: &[usize] = if card.arch == 90 { &[1, 2, 4, 8] } else { &[1, 2, 4] };
    let mut first = 0;
    while first < op.rows {
        let left = op.rows - first;
        let fit = sizes.iter().filter_map(|&blocks| Few::new(group, card, blocks));
        // The fewest that hold all rows, or else as many as can be.
        let Some(few) = fit.reduce(|best, next| if 8 * best.blocks < left { next } else { best })
        else {
            let what = format!("{} bytes of shared memory", card.shared);
            return Err(Unsupported { op: "linear", what, limit: "a few stages".to_owned() });
        };
        let rows = left.min(8 * few.blocks);
        let [a, b, c, d] = weight_defines(Some(group.layout));
        let define = |name, value: usize| (name, value as i64);
        let (blocks, ring) = (define("BLOCKS", few.blocks), define("RING", few.ring));
        let kind = few.pass.map_or(define("MIXING", chain::MIXING), |pass| (pass, 1));
        let defines = [a, b, c, d, blocks, ring, kind];
        let args = group.args(op, first, rows);
        let mut words = [Arg::Null; 19];
        words[..5].copy_from_slice(&args[..5]);
        let wide = chain::wide(card, 8 * few.blocks);
        let stage = |kind, words: &[Arg]| {
            let stage = chain::stage(card, kind, &defines, few.shared, words);
            if wide { chain::widened(stage) } else { stage }
        };
        if wide {
            plan.push(stage(Kind::Panels, &[&args[..4], &[Arg::Work]].concat()));
            words[0] = Arg::Work;
        }
        words[5..7].copy_from_slice(&[few.tiles, few.split].map(|v| Arg::U32(v as u32)));
        words[7..].copy_from_slice(&args[5..]);
        plan.push(stage(Kind::Product, &words));
        first += rows;
    }
    Ok(())
}

/// Each of a block's warps takes 64 inputs of a chunk.
const CHUNK: usize = 64 * chain::WARPS;
/// Chunks whose activations a warp holds.
const X_AHEAD: usize = 3;
/// Half tiles of a pass that `product.cuh` has code for, each with the define that asks for it.
const PASSES: [(usize, &str); 6] =
    [(2, "T_2"), (3, "T_3"), (4, "T_4"), (5, "T_5"), (8, "T_8"), (9, "T_9")];
const SPLIT_PASSES: [(usize, &str); 2] = [(3, "T_3_2"), (5, "T_5_2")];

/// How a chain goes about a product: `product.cuh`, or `wide.cuh`.
#[derive(Clone, Copy, Debug)]
struct Few {
    /// Of eight rows.
    blocks: usize,
    ring: usize,
    shared: usize,
    tiles: usize,
    split: usize,
    /// The define that asks for this number of half tiles of a pass, in `product.cuh`.
    pass: Option<&'static str>,
}

impl Few {
    /// For up to `8 · blocks` rows. Which blocks share k does not depend on the rows: it decides the
    /// order of sums.
    fn new(group: &Group<'_>, card: &Card, blocks: usize) -> Option<Few> {
        let (split, run) = split(group.half_tiles(), group.k, card);
        if chain::wide(card, 8 * blocks) {
            Few::wide(group, card, blocks, (split, run))
        } else {
            Few::narrow(group, card, blocks, (split, run))
        }
    }

    fn narrow(
        group: &Group<'_>,
        card: &Card,
        blocks: usize,
        (split, run): (usize, usize),
    ) -> Option<Few> {
        // Accumulators are in registers.
        let most = if blocks > 2 { 5 } else { 9 };
        let known: &[(usize, &str)] = if split > 1 { &SPLIT_PASSES } else { &PASSES };
        let pass = run.div_ceil(run.div_ceil(most));
        let &(tiles, pass) = known.iter().find(|(tiles, _)| (pass..=most).contains(tiles))?;
        let layout = group.layout;
        // As in product.cuh: as many half tiles of a chunk as registers hold.
        let slot_tiles = match (blocks, layout.codes) {
            (1, Codes::U8) => 2,
            (1, _) => 3,
            _ => 1,
        };
        let slot = slot_tiles * CHUNK / layout.span() * layout.span_bytes() / 2;
        let (round, barriers) = (8 / blocks, 512);
        let sums = chain::WARPS * (X_AHEAD * blocks * 1024 + round * blocks * 512);
        let rest = sums + 2 * 3 * blocks * 512 + barriers;
        let ring = (chain::SHARED.min(card.shared as usize).checked_sub(rest)? / slot).min(24);
        let few = Few { blocks, ring, shared: rest + ring * slot, tiles, split, pass: Some(pass) };
        (ring >= 2).then_some(few)
    }

    /// As in wide.cuh.
    fn wide(
        group: &Group<'_>,
        card: &Card,
        blocks: usize,
        (split, run): (usize, usize),
    ) -> Option<Few> {
        let rows = 8 * blocks;
        let (most, panels) = if rows == 64 { (18, 3) } else { (24, 4) };
        if panel_bytes(group.k, rows) > WORK_BYTES {
            return None;
        }
        let slot = 24 * group.layout.cell_bytes();
        let inputs_and_sums = 3 * panels * panel_bytes(64, rows) + most * rows * 64;
        let rest = 1024 + inputs_and_sums.max(chain::MIXING) + 512;
        let free = (card.shared as usize).checked_sub(rest + chain::STATIC_SHARED)?;
        let (ring, tiles) = ((free / slot).min(8), run.div_ceil(run.div_ceil(most)));
        let few = Few { blocks, ring, shared: rest + ring * slot, tiles, split, pass: None };
        (ring >= 2).then_some(few)
    }
}

/// What panels.cuh makes of 64 inputs of some rows, and of all inputs.
const fn panel_bytes(inputs: usize, rows: usize) -> usize {
    2 * inputs * rows
}

/// Blocks that share k, and the most half tiles of a run.
fn split(tiles: usize, k: usize, card: &Card) -> (usize, usize) {
    let sms = chain::blocks(card);
    let run = |split: usize| tiles.div_ceil(sms / split);
    let chunks = k.div_ceil(CHUNK);
    // One pass only, in which the blocks of a cluster exchange what they have.
    let two = run(2) <= 5 && chunks >= 2;
    let cost = |split: usize| run(split) * chunks.div_ceil(split);
    let split = if two && 20 * cost(2) < 19 * cost(1) { 2 } else { 1 };
    (split, run(split))
}
