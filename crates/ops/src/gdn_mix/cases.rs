//! Cases every device must pass.

use super::GdnMix;
use crate::gated_delta::cases::{BLOCK, CHUNKED, pending};
use crate::gdn_prepare::cases::{Lane, TINY, geometry, steps};
use crate::gdn_prepare::{CONV_TAPS, Commit, GdnGeometry, HeadMap};
use crate::testing::{Builder, Tolerance, conformance, on_each_device, row_invariance};
use crate::{
    ActDtype, Buf, Device, DeviceError, GatedDelta, GatedNorm, GdnPrepare, LaneStep, Lanes, Op,
    Unsupported,
};

crate::testing::cases!(
    agrees_with_the_definition,
    agrees_with_the_definition_at_the_largest_shape,
    blocks_may_be_longer_than_a_stage,
    more_heads_than_a_card_has_places,
    heads_of_every_map,
    a_row_does_not_depend_on_its_neighbours,
    keeping_n_rows_is_n_passes_of_one_row,
    lanes_are_passes_of_their_own,
);

const SLOTS: usize = 4;

fn build(
    b: &mut Builder,
    geometry: GdnGeometry,
    list: &[Lane],
    (block, commit): (usize, Commit),
    compare_state: bool,
) -> GdnMix {
    let (g, heads) = (&geometry, geometry.value_heads);
    let conv = b.normal(CONV_TAPS * g.channels(), 0.5);
    let decay: Vec<f32> = (0..heads).map(|_| -4.0 * b.uniform()).collect();
    let (decay, dt_bias) = (b.f32(&decay), b.normal(heads, 2.0));
    let weight = b.normal(g.value_dim, 1.0);
    let history = b.normal(SLOTS * GdnPrepare::history_bytes(g, block) / 4, 1.0);
    let state = b.normal(SLOTS * GatedDelta::state_bytes(g) / 4, 0.5);
    let rows_left = match block {
        BLOCK => pending(b, g, SLOTS),
        _ => vec![-0.01; SLOTS * GatedDelta::pending_bytes(g, block) / 4],
    };
    let pending = b.f32(&rows_left);
    if compare_state {
        b.updated_f32("history", history);
        b.updated_f32("state", state);
        b.updated_f32("pending", pending);
    }
    let lanes = b.lanes(steps(list));
    let rows = lanes.rows;
    // Working memory, poisoned: whoever reads it has to have written it.
    let mut between = |width: usize| b.f32(&vec![f32::NAN; rows * width]);
    let (q, k, v) = (between(g.keys()), between(g.keys()), between(g.values()));
    let (log_decay, beta) = (between(heads), between(heads));
    let mixed = between(g.values());
    let scratch = match commit {
        Commit::Immediate => GatedDelta::scratch_bytes(rows, lanes.count, g),
        Commit::Deferred => 0,
    };
    let scratch = b.bytes(&vec![0xFF; scratch]);
    b.reseed(1);
    let qkv = b.normal(rows * g.channels(), 1.0);
    b.reseed(2);
    let a = b.normal(rows * heads, 4.0);
    b.reseed(3);
    let beta_in = b.normal(rows * heads, 4.0);
    b.reseed(4);
    let gate = b.normal(rows * g.values(), 2.0);
    let dtype = if g.values().is_multiple_of(64) { ActDtype::I8 } else { ActDtype::F32 };
    let out = b.out_act("out", rows, g.values(), dtype);
    GdnMix {
        prepare: GdnPrepare {
            qkv,
            a,
            b: beta_in,
            conv,
            decay,
            dt_bias,
            history,
            q,
            k,
            v,
            g: log_decay,
            beta,
            lanes,
            geometry,
            block,
            commit,
        },
        delta: GatedDelta {
            q,
            k,
            v,
            g: log_decay,
            beta,
            state,
            pending,
            out: mixed,
            scratch,
            lanes,
            geometry,
            block,
            commit,
        },
        norm: GatedNorm { x: mixed, gate, weight, out, rows, dim: geometry.value_dim, eps: 1e-6 },
    }
}

const DEFERRED: (usize, Commit) = (BLOCK, Commit::Deferred);
// Four times that of gated_delta: the norm of a row divides by what may be small, and makes its errors relative to it.
const TOLERANCE: f32 = 2e-5;

fn agrees(geometry: GdnGeometry, list: &[Lane], form: (usize, Commit)) {
    let name = format!("gdn_mix {geometry:?} {list:?} {form:?}");
    let row_by_row = Tolerance::relative(TOLERANCE);
    let tolerance = match form.1 {
        Commit::Deferred => row_by_row,
        Commit::Immediate => row_by_row.elsewhere(4.0 * CHUNKED),
    };
    conformance(&name, tolerance, |b| build(b, geometry, list, form, true));
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    let geometries = [
        geometry((1, 1), (16, 16)),
        GdnGeometry { head_map: HeadMap::Tiled, ..geometry((2, 6), (32, 48)) },
        geometry((3, 3), (256, 16)),
        geometry((1, 2), (16, 256)),
        GdnGeometry { head_map: HeadMap::Tiled, ..geometry((2, 4), (128, 128)) },
        geometry((1, 1), (256, 256)),
        TINY,
    ];
    let lists: [&[Lane]; 4] = [
        &[(1, 0, 0, 0)],
        &[(8, 2, 8, 1)],
        &[(3, 1, 2, 0), (0, 3, 5, 1), (8, 0, 0, 1), (1, 2, 8, 0)],
        &[(0, 0, 3, 0), (0, 1, 0, 0)],
    ];
    for geometry in geometries {
        for list in lists {
            agrees(geometry, list, DEFERRED);
        }
        agrees(geometry, &[(70, 1, 3, 0), (3, 0, 0, 1)], (BLOCK, Commit::Immediate));
    }
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition_at_the_largest_shape() {
    agrees(geometry((16, 48), (128, 128)), &[(2, 0, 1, 0), (5, 3, 0, 1)], DEFERRED);
    agrees(geometry((16, 48), (128, 128)), &[(8, 1, 5, 1)], DEFERRED);
}

#[cfg_attr(test, test)]
fn blocks_may_be_longer_than_a_stage() {
    let list = [(17, 1, 9, 0), (20, 3, 20, 1), (0, 0, 11, 1), (9, 2, 0, 0)];
    agrees(TINY, &list, (20, Commit::Deferred));
    // One lane alone, which may be computed elsewhere; also without rows.
    for lane in list {
        agrees(TINY, &[lane], (20, Commit::Deferred));
    }
}

#[cfg_attr(test, test)]
fn more_heads_than_a_card_has_places() {
    agrees(geometry((35, 140), (16, 16)), &[(3, 1, 2, 0)], DEFERRED);
}

#[cfg_attr(test, test)]
fn heads_of_every_map() {
    for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
        for ratio in 1..=3 {
            let geometry = GdnGeometry { head_map, ..geometry((2, 2 * ratio), (64, 32)) };
            for kept in 0..=BLOCK as u32 {
                agrees(geometry, &[(8 - kept % 3, 1, kept, kept % 2)], DEFERRED);
            }
        }
    }
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    row_invariance("gdn_mix", BLOCK, |b, rows| {
        build(b, TINY, &[(rows as u32, 1, 3, 1)], DEFERRED, false)
    });
}

/// One lane's stream of rows, run pass by pass.
struct Stream<'d> {
    dev: &'d mut dyn Device,
    op: GdnMix,
    inputs: [(Buf, Vec<u8>); 4],
    step: LaneStep,
    at: usize,
}

impl Stream<'_> {
    fn new(dev: &mut dyn Device, geometry: GdnGeometry, rows: usize) -> Stream<'_> {
        let list = [(rows as u32, 2, 0, 0)];
        let mut op = build(&mut Builder::new(dev), geometry, &list, DEFERRED, false);
        // Passes are short: only the stream is long.
        let norm = GatedNorm { rows: BLOCK, ..op.norm };
        let lanes = Lanes { rows: BLOCK, max_rows: BLOCK, ..op.prepare.lanes };
        let inputs = [op.prepare.qkv, op.prepare.a, op.prepare.b, op.norm.gate].map(|buf| {
            let mut bytes = vec![0; buf.bytes];
            dev.read(buf, &mut bytes);
            (buf, bytes)
        });
        op = GdnMix {
            prepare: GdnPrepare { lanes, ..op.prepare },
            delta: GatedDelta { lanes, ..op.delta },
            norm,
        };
        Stream { dev, op, inputs, step: LaneStep { slot: 2, ..LaneStep::default() }, at: 0 }
    }

    /// Runs the next `rows` rows, of which `kept` stay; returns the outputs of the kept.
    fn pass(&mut self, rows: usize, kept: usize, total: usize) -> Result<Vec<u8>, Unsupported> {
        for (buf, bytes) in &self.inputs {
            let width = bytes.len() / total;
            self.dev.write(*buf, &bytes[self.at * width..][..rows * width]);
        }
        (self.step.rows, self.step.pos) = (rows as u32, self.at as u32);
        self.dev.write(self.op.prepare.lanes.step, bytemuck::bytes_of(&self.step));
        self.dev.run(&self.op);
        match self.dev.sync() {
            Err(DeviceError::Unsupported(why)) => return Err(why),
            done => done.expect("the pass"),
        }
        self.step.parity ^= 1;
        self.step.pending = kept as u32;
        self.at += kept;
        let mut out = vec![0; kept * self.op.norm.out.row_bytes()];
        self.dev.read(self.op.norm.out.buf, &mut out);
        Ok(out)
    }

    /// All slots' states and histories, after taking up what is pending.
    fn state(&mut self, total: usize) -> Result<Vec<u8>, Unsupported> {
        self.pass(0, 0, total)?;
        let GdnMix { prepare, delta, .. } = self.op;
        let mut state = vec![0; delta.state.bytes];
        self.dev.read(delta.state, &mut state);
        // The three rows that the next pass sees before its own.
        let slot = prepare.history.bytes / SLOTS;
        let half = self.step.slot as usize * slot + self.step.parity as usize * slot / 2;
        let rows = 4 * (CONV_TAPS - 1) * prepare.geometry.channels();
        let mut history = vec![0; rows];
        self.dev.read(prepare.history.slice(half, rows), &mut history);
        state.extend(history);
        Ok(state)
    }
}

#[cfg_attr(test, test)]
fn keeping_n_rows_is_n_passes_of_one_row() {
    const ROWS: usize = 2 * BLOCK;
    for geometry in [geometry((2, 4), (32, 32)), geometry((1, 3), (128, 128))] {
        on_each_device("gdn_mix stream", |label, dev| {
            let mut scans = Vec::new();
            for n in 0..=ROWS {
                let mut one = Stream::new(dev, geometry, ROWS);
                let mut rows = Vec::new();
                for _ in 0..n {
                    rows.extend(one.pass(1, 1, ROWS)?);
                }
                scans.push((rows, one.state(ROWS)?));
            }
            for n in 0..=BLOCK {
                let mut verify = Stream::new(dev, geometry, ROWS);
                let first = verify.pass(BLOCK, n, ROWS)?;
                assert!(first == scans[n].0, "{label}: {n} of {BLOCK} rows");
                assert!(verify.state(ROWS)? == scans[n].1, "{label}: state after {n} rows");

                // The next pass takes them up on its way.
                let mut verify = Stream::new(dev, geometry, ROWS);
                let mut rows = verify.pass(BLOCK, n, ROWS)?;
                rows.extend(verify.pass(BLOCK - 1, 3, ROWS)?);
                assert!(rows == scans[n + 3].0, "{label}: rows after {n} rows");
                assert!(verify.state(ROWS)? == scans[n + 3].1, "{label}: state after {n} + 3");

                // What must show: a row too many, and the wrong half.
                let mut wrong = Stream::new(dev, geometry, ROWS);
                wrong.pass(BLOCK, (n + 1) % (BLOCK + 1), ROWS)?;
                assert!(wrong.state(ROWS)? != scans[n].1, "{label}: took up another number");
                if n > 0 {
                    let mut wrong = Stream::new(dev, geometry, ROWS);
                    wrong.pass(BLOCK, n, ROWS)?;
                    wrong.step.parity ^= 1;
                    assert!(wrong.state(ROWS)? != scans[n].1, "{label}: took up the wrong half");
                }
            }
            Ok(())
        });
    }
}

#[cfg_attr(test, test)]
fn lanes_are_passes_of_their_own() {
    let list: [Lane; 4] = [(3, 1, 2, 0), (8, 3, 5, 1), (8, 0, 0, 1), (1, 2, 8, 0)];
    on_each_device("gdn_mix lanes", |label, dev| {
        let run = |dev: &mut dyn Device, op: &GdnMix| -> Result<Vec<u8>, Unsupported> {
            dev.run(op);
            match dev.sync() {
                Err(DeviceError::Unsupported(why)) => return Err(why),
                done => done.expect("the pass"),
            }
            let act = op.norm.out;
            let mut all = vec![0; op.norm.rows * act.row_bytes() + op.delta.state.bytes];
            let (out, state) = all.split_at_mut(op.norm.rows * act.row_bytes());
            dev.read(act.buf, out);
            dev.read(op.delta.state, state);
            Ok(all)
        };
        let together = build(&mut Builder::new(dev), TINY, &list, DEFERRED, false);
        let want = run(dev, &together)?;
        let apart = build(&mut Builder::new(dev), TINY, &list, DEFERRED, false);
        let mut got = Vec::new();
        for lane in 0..list.len() {
            let step = apart.prepare.lanes.step.rows(lane, 1, size_of::<LaneStep>());
            let lanes = Lanes { step, count: 1, ..apart.prepare.lanes };
            let one = GdnMix {
                prepare: GdnPrepare { lanes, ..apart.prepare },
                delta: GatedDelta { lanes, ..apart.delta },
                ..apart
            };
            got = run(dev, &one)?;
        }
        assert!(got == want, "{label}");
        Ok(())
    });
}

#[test]
fn refuses_parts_that_do_not_fit_together() {
    let mut host = crate::Host::new(crate::simd::Isa::Portable, 1);
    let list = [(3, 0, 0, 0), (8, 1, 0, 0)];
    let good = build(&mut Builder::new(&mut host), TINY, &list, DEFERRED, false);
    good.check().expect("the geometry of the other cases");
    let cases: [&dyn Fn(&mut GdnMix); 8] = [
        &|op| op.delta.q = op.prepare.k,
        &|op| op.delta.v = op.norm.x,
        &|op| op.norm.x = op.prepare.v,
        &|op| op.delta.commit = Commit::Immediate,
        &|op| op.delta.geometry.head_map = HeadMap::Tiled,
        &|op| op.norm.rows = 10,
        &|op| op.delta.lanes.count = 1,
        &|op| op.prepare.block = 7,
    ];
    for (i, change) in cases.iter().enumerate() {
        let mut op = good;
        change(&mut op);
        assert!(op.check().is_err(), "change {i}");
    }
}

/// The kernel that one lane of the largest shape has on a card.
#[cfg(test)]
pub(super) fn entry_of_plan(
    card: &crate::kernel::Card,
    lanes: usize,
    rows: u32,
    value_heads: usize,
) -> &'static str {
    let mut host = crate::Host::new(crate::simd::Isa::Portable, 1);
    let shape = geometry((16, value_heads), (128, 128));
    let list = vec![(rows, 1, 0, 0); lanes];
    let mut op = build(&mut Builder::new(&mut host), shape, &list, DEFERRED, false);
    op.norm.out.dtype = ActDtype::Bf16;
    let mut plan = crate::kernel::Plan::default();
    op.cuda(card, &mut plan).expect("a shipped shape");
    plan.launches()[0].entry
}
