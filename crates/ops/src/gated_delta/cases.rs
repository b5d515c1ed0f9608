//! Cases every device must pass.

use super::{GatedDelta, TILE};
use crate::gdn_prepare::cases::{Lane, TINY, geometry, steps};
use crate::gdn_prepare::{Commit, GdnGeometry, HeadMap};
use crate::simd::Isa;
use crate::testing::{Builder, Tolerance, conformance, on_each_device, row_invariance};
use crate::{ActDtype, Buf, Device, DeviceError, Host, HostMode, LaneStep, Lanes, Op, Unsupported};

crate::testing::cases!(
    agrees_with_the_definition,
    agrees_with_the_definition_at_the_largest_shape,
    chunks_agree_with_the_definition,
    chunks_of_extreme_rows,
    rounding_does_not_grow_over_a_long_prefill,
    one_row_by_hand,
    a_row_does_not_depend_on_its_neighbours,
    prefill_may_be_cut_on_the_grid,
    lanes_of_a_prefill_do_not_meet,
);

pub(crate) const BLOCK: usize = 8;

/// Rows of heads of length `length`.
fn heads(b: &mut Builder, count: usize, dim: usize, length: f32) -> Vec<f32> {
    let mut values = b.normal_values(count * dim, 1.0);
    for head in values.chunks_exact_mut(dim) {
        let norm = head.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-6);
        head.iter_mut().for_each(|x| *x *= length / norm);
    }
    values
}

/// Log decays of rows: even heads remember for hundreds of rows, odd heads forget within a few.
fn log_decays(b: &mut Builder, rows: usize, heads: usize) -> Vec<f32> {
    let decay =
        |i: usize, u: f32| if (i % heads).is_multiple_of(2) { -0.02 * u } else { -8.0 * u * u * u };
    (0..rows * heads).map(|i| decay(i, b.uniform())).collect()
}

/// Pending rows of all slots and halves, all of them plausible.
pub(crate) fn pending(b: &mut Builder, g: &GdnGeometry, slots: usize) -> Vec<f32> {
    let mut values = Vec::new();
    for _ in 0..2 * slots {
        values.extend(heads(b, BLOCK * g.key_heads, g.key_dim, 1.0));
        values.extend(b.normal_values(BLOCK * g.values(), 0.7));
        values.extend(log_decays(b, BLOCK, g.value_heads));
    }
    values
}

/// Devices that go through a prefill in chunks multiply pairs of brain floats, to 2^-17, and a
/// chunk's errors pass through a triangular solve. See docs/numerics.md.
fn tolerance(commit: Commit) -> Tolerance {
    let row_by_row = Tolerance::relative(5e-6);
    if commit == Commit::Immediate { row_by_row.elsewhere(CHUNKED) } else { row_by_row }
}

pub(crate) const CHUNKED: f32 = 1.5e-4;

fn build(
    b: &mut Builder,
    geometry: GdnGeometry,
    list: &[Lane],
    commit: Commit,
    compare_state: bool,
) -> GatedDelta {
    build_at(b, geometry, &steps(list), commit, compare_state)
}

/// One lane in slot 1, from position `pos` on.
fn prefill(rows: u32, pos: u32) -> [LaneStep; 1] {
    [LaneStep { rows, pos, slot: 1, pending: 3, parity: 1, ..LaneStep::default() }]
}

fn build_at(
    b: &mut Builder,
    geometry: GdnGeometry,
    steps: &[LaneStep],
    commit: Commit,
    compare_state: bool,
) -> GatedDelta {
    let slots = 4;
    let g = &geometry;
    let state = b.normal(slots * GatedDelta::state_bytes(g) / 4, 0.5);
    let pending = pending(b, g, slots);
    let pending = b.f32(&pending);
    if compare_state {
        b.updated_f32("state", state);
        b.updated_f32("pending", pending);
    }
    let lanes = b.lanes(steps.iter().copied());
    let rows = lanes.rows;
    let scratch = match commit {
        Commit::Immediate => GatedDelta::scratch_bytes(rows, lanes.count, g),
        Commit::Deferred => 0,
    };
    let scratch = b.bytes(&vec![0xFF; scratch]);
    b.reseed(1);
    let q = heads(b, rows * g.key_heads, g.key_dim, 0.125);
    b.reseed(2);
    let k = heads(b, rows * g.key_heads, g.key_dim, 1.0);
    b.reseed(3);
    let v = b.normal(rows * g.values(), 1.0);
    b.reseed(4);
    let decays = log_decays(b, rows, g.value_heads);
    b.reseed(5);
    let beta: Vec<f32> = (0..rows * g.value_heads).map(|_| b.uniform()).collect();
    GatedDelta {
        q: b.f32(&q),
        k: b.f32(&k),
        v,
        g: b.f32(&decays),
        beta: b.f32(&beta),
        state,
        pending,
        out: b.out_f32("out", rows * g.values()),
        scratch,
        lanes,
        geometry,
        block: BLOCK,
        commit,
    }
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    let geometries = [
        geometry((1, 1), (16, 16)),
        GdnGeometry { head_map: HeadMap::Tiled, ..geometry((2, 6), (32, 48)) },
        geometry((3, 3), (256, 16)),
        geometry((1, 2), (16, 256)),
        GdnGeometry { head_map: HeadMap::Tiled, ..geometry((2, 4), (128, 128)) },
        TINY,
    ];
    let verify: [&[Lane]; 4] = [
        &[(1, 0, 0, 0)],
        &[(8, 2, 8, 1)],
        &[(3, 1, 2, 0), (0, 3, 5, 1), (8, 0, 0, 1), (1, 2, 8, 0)],
        &[(0, 0, 3, 0), (0, 1, 0, 0)],
    ];
    let prefill: [&[Lane]; 4] = [
        &[(1, 0, 0, 0)],
        &[(2, 2, 8, 1)],
        &[(70, 1, 3, 0), (0, 3, 5, 1), (3, 0, 0, 1), (64, 2, 7, 0)],
        &[(0, 0, 3, 0), (0, 1, 0, 0)],
    ];
    for geometry in geometries {
        for (commit, sets) in [(Commit::Deferred, verify), (Commit::Immediate, prefill)] {
            for list in sets {
                let name = format!("gated_delta {geometry:?} {list:?} {commit:?}");
                conformance(&name, tolerance(commit), |b| build(b, geometry, list, commit, true));
            }
        }
    }
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition_at_the_largest_shape() {
    conformance("gated_delta 27B", Tolerance::relative(5e-6), |b| {
        let lanes = [(2, 0, 1, 0), (5, 3, 0, 1)];
        build(b, geometry((16, 48), (128, 128)), &lanes, Commit::Deferred, true)
    });
}

/// Lengths and places on the grid, and heads that share keys by one, two and three.
#[cfg_attr(test, test)]
fn chunks_agree_with_the_definition() {
    let check = |geometry: GdnGeometry, rows: u32, pos: u32| {
        let name = format!("gated_delta {geometry:?} {rows} rows at {pos}");
        conformance(&name, tolerance(Commit::Immediate), |b| {
            build_at(b, geometry, &prefill(rows, pos), Commit::Immediate, true)
        });
    };
    for rows in [1, 15, 16, 17, 63, 64, 65, 129] {
        for pos in [0, 1, 40, 63] {
            check(geometry((1, 2), (32, 16)), rows, pos);
        }
    }
    for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
        for heads in [(2, 2), (2, 4), (2, 6)] {
            check(GdnGeometry { head_map, ..geometry(heads, (64, 32)) }, 100, 30);
        }
    }
    check(geometry((1, 3), (128, 128)), 150, 5);
}

/// States that never fade or are gone at once, rows that write all or nothing, and the same key in
/// every row, which is as far from independent as keys can be.
#[cfg_attr(test, test)]
fn chunks_of_extreme_rows() {
    const ROWS: usize = 150;
    let heads = geometry((1, 2), (32, 32));
    // The rounding of one decay adds up over its rows.
    let tolerance = Tolerance::relative(2e-5).elsewhere(CHUNKED);
    for decay in [0.0f32, -1e-7, -0.7, -20.0, -1e4] {
        for strength in [0.0f32, 1e-3, 1.0] {
            for same_key in [false, true] {
                let name = format!("gated_delta g {decay}, beta {strength}, one key: {same_key}");
                conformance(&name, tolerance, |b| {
                    let pass = prefill(ROWS as u32, 50);
                    let mut op = build_at(b, heads, &pass, Commit::Immediate, true);
                    op.g = b.f32(&[decay; 2 * ROWS]);
                    op.beta = b.f32(&[strength; 2 * ROWS]);
                    if same_key {
                        op.k = b.f32(&[32f32.powf(-0.5); 32 * ROWS]);
                    }
                    op
                });
            }
        }
    }
}

#[cfg_attr(test, test)]
fn rounding_does_not_grow_over_a_long_prefill() {
    conformance("gated_delta 1000 rows", tolerance(Commit::Immediate), |b| {
        build(b, geometry((1, 2), (32, 32)), &[(1000, 1, 3, 1)], Commit::Immediate, true)
    });
}

#[cfg_attr(test, test)]
fn one_row_by_hand() {
    // Key e₀ and query e₀ + e₁, decay ½: rows 0 and 1 of the state hold 2 and 4 in every column.
    // m = ½·2 = 1, d = ½·(7 − 1) = 3, row 0 becomes ½·2 + 3 = 4, row 1 becomes 2; out = 6.
    for commit in [Commit::Deferred, Commit::Immediate] {
        let by_hand = Tolerance::relative(1e-6).elsewhere(CHUNKED);
        conformance("gated_delta by hand", by_hand, |b| {
            let lane = [(1, 0, 0, 0)];
            let mut op = build(b, geometry((1, 1), (16, 16)), &lane, commit, false);
            let unit = |n: usize| -> Vec<f32> { (0..16).map(|i| f32::from(i < n)).collect() };
            let mut state = vec![0.0; 4 * 16 * TILE];
            state[..TILE].fill(2.0);
            state[TILE..2 * TILE].fill(4.0);
            (op.k, op.q, op.v) = (b.f32(&unit(1)), b.f32(&unit(2)), b.f32(&[7.0; 16]));
            (op.g, op.beta) = (b.f32(&[0.5f32.ln()]), b.f32(&[0.5]));
            op.state = b.f32(&state);
            b.updated_f32("state", op.state);
            if commit == Commit::Immediate {
                state[..TILE].fill(4.0);
                state[TILE..2 * TILE].fill(2.0);
            }
            b.expect("state", &state);
            b.expect("out", &[6.0; 16]);
            op
        });
    }
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    for commit in [Commit::Deferred, Commit::Immediate] {
        row_invariance("gated_delta", 8, |b, rows| {
            build(b, TINY, &[(rows as u32, 1, 3, 1)], commit, false)
        });
    }
}

/// Runs the passes `(first row, rows)` of a lane whose row 0 stands at `pos`; the bits of the output
/// and of all states.
fn passes(
    dev: &mut dyn Device,
    pos: usize,
    rows: usize,
    list: &[(usize, usize)],
) -> Result<(Vec<u8>, Vec<u8>), Unsupported> {
    let heads = geometry((1, 2), (64, 32));
    let all = prefill(rows as u32, pos as u32);
    let op = build_at(&mut Builder::new(dev), heads, &all, Commit::Immediate, false);
    for (i, &(first, rows)) in list.iter().enumerate() {
        let part = |buf: Buf, width: usize| buf.rows(first, rows, 4 * width);
        let (count, pos) = (rows as u32, (pos + first) as u32);
        let pending = if i == 0 { all[0].pending } else { 0 };
        let step = LaneStep { rows: count, pos, pending, ..all[0] };
        dev.write(op.lanes.step, bytemuck::bytes_of(&step));
        dev.run(&GatedDelta {
            q: part(op.q, heads.keys()),
            k: part(op.k, heads.keys()),
            v: part(op.v, heads.values()),
            g: part(op.g, heads.value_heads),
            beta: part(op.beta, heads.value_heads),
            out: part(op.out, heads.values()),
            lanes: Lanes { rows, max_rows: rows, ..op.lanes },
            ..op
        });
        match dev.sync() {
            Err(DeviceError::Unsupported(why)) => return Err(why),
            other => other.expect("the pass"),
        }
    }
    let (mut out, mut state) = (vec![0; op.out.bytes], vec![0; op.state.bytes]);
    dev.read(op.out, &mut out);
    dev.read(op.state, &mut state);
    Ok((out, state))
}

#[cfg_attr(test, test)]
fn prefill_may_be_cut_on_the_grid() {
    on_each_device("gated_delta cut on the grid", |label, dev| {
        let cut = |dev: &mut dyn Device, pos: usize, cuts: &[usize]| {
            let ends = cuts.iter().scan(0, |end, rows| {
                *end += rows;
                Some((*end - rows, *rows))
            });
            passes(dev, pos, cuts.iter().sum(), &ends.collect::<Vec<_>>())
        };
        for (pos, cuts) in [
            (0, &[64, 146][..]),
            (0, &[128, 82]),
            (0, &[64, 64, 64, 18]),
            (40, &[24, 186]),
            (40, &[88, 64, 58]),
        ] {
            let whole = cut(dev, pos, &[210])?;
            assert!(cut(dev, pos, cuts)? == whole, "{label}: {cuts:?} at {pos}");
            // A row lost at a cut must show.
            let lost = passes(dev, pos, 210, &[(0, cuts[0] - 1), (cuts[0], 210 - cuts[0])])?;
            assert!(lost.1 != whole.1, "{label}: {cuts:?} at {pos} with a row lost");
        }
        Ok(())
    });
}

#[cfg_attr(test, test)]
fn lanes_of_a_prefill_do_not_meet() {
    let lane = |rows, pos, slot| LaneStep { rows, pos, slot, ..LaneStep::default() };
    let list = [lane(70, 30, 2), lane(0, 5, 0), lane(64, 0, 1), lane(9, 63, 3)];
    let heads = geometry((2, 4), (32, 32));
    on_each_device("gated_delta of several lanes", |label, dev| {
        let together = build_at(&mut Builder::new(dev), heads, &list, Commit::Immediate, false);
        let alone = build_at(&mut Builder::new(dev), heads, &list, Commit::Immediate, false);
        dev.run(&together);
        let mut row0 = 0;
        for step in list {
            let rows = step.rows as usize;
            let part = |buf: Buf, width: usize| buf.rows(row0, rows, 4 * width);
            dev.write(alone.lanes.step, bytemuck::bytes_of(&step));
            dev.run(&GatedDelta {
                q: part(alone.q, heads.keys()),
                k: part(alone.k, heads.keys()),
                v: part(alone.v, heads.values()),
                g: part(alone.g, heads.value_heads),
                beta: part(alone.beta, heads.value_heads),
                out: part(alone.out, heads.values()),
                lanes: Lanes { rows, max_rows: rows, count: 1, ..alone.lanes },
                ..alone
            });
            row0 += rows;
        }
        match dev.sync() {
            Err(DeviceError::Unsupported(why)) => return Err(why),
            other => other.expect("the passes"),
        }
        for (what, a, b) in
            [("rows", together.out, alone.out), ("states", together.state, alone.state)]
        {
            let (mut x, mut y) = (vec![0u8; a.bytes], vec![0u8; b.bytes]);
            dev.read(a, &mut x);
            dev.read(b, &mut y);
            assert!(x == y, "{label}: {what}");
        }
        Ok(())
    });
}

/// One lane's stream of rows, run pass by pass.
struct Stream {
    host: Host,
    op: GatedDelta,
    inputs: Vec<(Buf, Vec<f32>)>,
    step: LaneStep,
    at: usize,
}

impl Stream {
    fn new(mode: HostMode, isa: Isa, geometry: GdnGeometry, rows: usize) -> Stream {
        let mut host = Host::with(mode, isa, 2, ActDtype::F32);
        let mut b = Builder::new(&mut host);
        let op = build(&mut b, geometry, &[(rows as u32, 2, 0, 0)], Commit::Immediate, false);
        let read = |buf: Buf| {
            let mut values = vec![0.0; buf.bytes / 4];
            host.read(buf, bytemuck::cast_slice_mut(&mut values));
            (buf, values)
        };
        let inputs = [op.q, op.k, op.v, op.g, op.beta].map(read).to_vec();
        Stream { host, op, inputs, step: LaneStep { slot: 2, ..LaneStep::default() }, at: 0 }
    }

    /// Runs the next `rows` rows, of which `kept` stay; returns the output of the kept.
    fn pass(&mut self, rows: usize, kept: usize, commit: Commit) -> Vec<u8> {
        let total = self.op.lanes.rows;
        for (buf, values) in &self.inputs {
            let width = values.len() / total;
            let part = &values[self.at * width..][..rows * width];
            self.host.write(*buf, bytemuck::cast_slice(part));
        }
        (self.step.rows, self.step.pos) = (rows as u32, self.at as u32);
        self.host.write(self.op.lanes.step, bytemuck::bytes_of(&self.step));
        let lanes = Lanes { rows, max_rows: rows, ..self.op.lanes };
        self.host.run(&GatedDelta { commit, lanes, ..self.op });
        self.host.sync().expect("the pass");
        self.step.parity ^= 1;
        self.step.pending = if commit == Commit::Deferred { kept as u32 } else { 0 };
        self.at += kept;
        let mut out = vec![0; kept * self.op.out.bytes / total];
        self.host.read(self.op.out, &mut out);
        out
    }

    /// All slots' states, after taking up what is pending.
    fn state(&mut self) -> Vec<u8> {
        self.pass(0, 0, Commit::Deferred);
        let mut state = vec![0; self.op.state.bytes];
        self.host.read(self.op.state, &mut state);
        state
    }
}

/// The reference, and SIMD on every instruction set.
fn arms() -> Vec<(HostMode, Isa)> {
    let simd = Isa::available().into_iter().map(|isa| (HostMode::Simd, isa));
    simd.chain([(HostMode::Reference, Isa::Portable)]).collect()
}

#[test]
fn keeping_n_rows_is_a_scan_of_n_rows() {
    let geometry = geometry((2, 4), (32, 32));
    for (mode, isa) in arms() {
        let stream = || Stream::new(mode, isa, geometry, 2 * BLOCK);
        let scan = |n: usize| {
            let mut one = stream();
            (0..n).for_each(|_| drop(one.pass(1, 1, Commit::Deferred)));
            one.state()
        };
        for n in 0..=BLOCK {
            let label = format!("{mode:?} {} {n}", isa.name());
            let want = scan(n);
            let mut verify = stream();
            verify.pass(BLOCK, n, Commit::Deferred);
            assert!(verify.state() == want, "{label}");
            let mut prefill = stream();
            prefill.pass(n, n, Commit::Immediate);
            assert!(prefill.state() == want, "{label}: prefill");
            let mut into_prefill = stream();
            into_prefill.pass(BLOCK, n, Commit::Deferred);
            into_prefill.pass(3, 3, Commit::Immediate);
            assert!(into_prefill.state() == scan(n + 3), "{label}: then a prefill");

            // What must show: one row too many, one too few, the wrong half.
            for wrong in [n.wrapping_sub(1), n + 1] {
                if wrong <= BLOCK {
                    let mut verify = stream();
                    verify.pass(BLOCK, wrong, Commit::Deferred);
                    assert!(verify.state() != want, "{label} took up {wrong} rows");
                }
            }
            if n > 0 {
                let mut verify = stream();
                verify.pass(BLOCK, n, Commit::Deferred);
                verify.step.parity ^= 1;
                assert!(verify.state() != want, "{label} took up the wrong half");
            }
        }
    }
}

#[test]
fn passes_of_any_size_make_the_same_rows() {
    const ROWS: usize = 60;
    for (mode, isa) in arms() {
        let mut whole = Stream::new(mode, isa, TINY, ROWS);
        let want = whole.pass(ROWS, ROWS, Commit::Immediate);
        let mut cut = Stream::new(mode, isa, TINY, ROWS);
        let (mut got, mut seed) = (Vec::new(), 12_345u64);
        while cut.at < ROWS {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
            let rows = ((seed >> 40) as usize % (BLOCK + 1)).min(ROWS - cut.at);
            let kept = (seed >> 50) as usize % (rows + 1);
            if seed >> 63 == 0 {
                got.extend(cut.pass(rows, kept, Commit::Deferred));
            } else {
                got.extend(cut.pass(rows, rows, Commit::Immediate));
            }
        }
        assert!(got == want, "{mode:?} {}: rows", isa.name());
        assert!(cut.state() == whole.state(), "{mode:?} {}: state", isa.name());
    }
}

#[test]
fn prefill_may_be_cut_anywhere() {
    const ROWS: usize = 150;
    for (mode, isa) in arms() {
        let run = |cuts: &[usize]| {
            let mut stream = Stream::new(mode, isa, geometry((1, 2), (32, 32)), ROWS);
            let mut out = Vec::new();
            for &rows in cuts {
                out.extend(stream.pass(rows, rows, Commit::Immediate));
            }
            (out, stream.state())
        };
        let whole = run(&[150]);
        for cuts in [&[64, 64, 22][..], &[128, 22], &[70, 80], &[1, 149]] {
            assert!(run(cuts) == whole, "{mode:?} {} cut into {cuts:?}", isa.name());
        }

        // A row lost at a cut must show.
        let mut stream = Stream::new(mode, isa, geometry((1, 2), (32, 32)), ROWS);
        stream.pass(64, 64, Commit::Immediate);
        stream.at += 1;
        stream.pass(85, 85, Commit::Immediate);
        assert!(stream.state() != whole.1, "{mode:?} {}", isa.name());
    }
}

#[test]
fn other_slots_are_untouched() {
    let mut stream = Stream::new(HostMode::Simd, Isa::detect(), TINY, 16);
    let before = stream.state();
    stream.pass(8, 8, Commit::Deferred);
    let after = stream.state();
    let slot = before.len() / 4;
    assert!(before[..2 * slot] == after[..2 * slot] && before[3 * slot..] == after[3 * slot..]);
    assert!(before[2 * slot..3 * slot] != after[2 * slot..3 * slot]);
}

#[test]
fn a_step_past_its_buffers_fails() {
    for wrong in [
        LaneStep { slot: 4, rows: 1, ..LaneStep::default() },
        LaneStep { pending: BLOCK as u32 + 1, rows: 1, ..LaneStep::default() },
        LaneStep { parity: 2, rows: 1, ..LaneStep::default() },
        LaneStep { row0: 8, rows: 1, ..LaneStep::default() },
    ] {
        let mut stream = Stream::new(HostMode::Simd, Isa::detect(), TINY, 8);
        stream.host.write(stream.op.lanes.step, bytemuck::bytes_of(&wrong));
        stream.host.run(&stream.op);
        assert!(stream.host.sync().is_err(), "{wrong:?}");
    }
}

#[test]
fn refuses_what_it_cannot_compute() {
    let mut host = Host::new(Isa::Portable, 1);
    let mut b = Builder::new(&mut host);
    let good = build(&mut b, TINY, &[(3, 0, 0, 0), (8, 1, 0, 0)], Commit::Deferred, false);
    good.check().expect("the geometry of the other cases");
    let cases: [&dyn Fn(&mut GatedDelta); 13] = [
        &|op| op.geometry.key_dim = 60,
        &|op| op.geometry.value_dim = 272,
        &|op| op.geometry.key_heads = 5,
        &|op| op.block = 7,
        &|op| op.block = 0,
        &|op| op.block = usize::MAX,
        &|op| op.lanes.rows = 12,
        &|op| op.lanes.max_rows = 9,
        &|op| op.state = op.state.slice(0, op.state.bytes / 2),
        &|op| op.pending = op.pending.slice(0, op.pending.bytes - 4),
        &|op| op.beta = op.beta.slice(0, 4),
        &|op| op.out = op.out.slice(0, op.out.bytes - 4),
        // That needs scratch.
        &|op| op.commit = Commit::Immediate,
    ];
    for (i, change) in cases.iter().enumerate() {
        let mut op = good;
        change(&mut op);
        assert!(op.check().is_err(), "change {i}");
    }
}
