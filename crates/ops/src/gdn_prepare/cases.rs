//! Cases every device must pass.

use super::{CONV_TAPS, Commit, GdnGeometry, GdnPrepare, HeadMap};
use crate::simd::Isa;
use crate::testing::{Builder, Tolerance, conformance, on_each_device, row_invariance};
use crate::{Buf, Device, DeviceError, Host, HostMode, LaneStep, Lanes, Op};

crate::testing::cases!(
    agrees_with_the_definition,
    agrees_with_the_definition_at_the_largest_shape,
    each_tap_meets_its_row,
    gates_by_hand,
    a_row_does_not_depend_on_its_neighbours,
    prompts_may_be_cut_anywhere,
);

pub(crate) const fn geometry(
    (key_heads, value_heads): (usize, usize),
    (key_dim, value_dim): (usize, usize),
) -> GdnGeometry {
    GdnGeometry { key_heads, value_heads, key_dim, value_dim, head_map: HeadMap::Grouped }
}

pub(crate) const TINY: GdnGeometry = geometry((6, 12), (64, 64));

/// A lane of a pass: (rows, slot, pending, parity).
pub(crate) type Lane = (u32, u32, u32, u32);

pub(crate) fn steps(list: &[Lane]) -> Vec<LaneStep> {
    let step = |&(rows, slot, pending, parity): &Lane| LaneStep {
        rows,
        slot,
        pending,
        parity,
        ..LaneStep::default()
    };
    list.iter().map(step).collect()
}

fn build(
    b: &mut Builder,
    geometry: GdnGeometry,
    list: &[Lane],
    commit: Commit,
    compare_history: bool,
) -> GdnPrepare {
    let (block, slots) = (8, 4);
    let (channels, heads) = (geometry.channels(), geometry.value_heads);
    let conv = b.normal(CONV_TAPS * channels, 0.5);
    let decay: Vec<f32> = (0..heads).map(|_| -4.0 * b.uniform()).collect();
    let (decay, dt_bias) = (b.f32(&decay), b.normal(heads, 2.0));
    let history = b.normal(slots * GdnPrepare::history_bytes(&geometry, block) / 4, 1.0);
    if compare_history {
        b.updated_f32("history", history);
    }
    let lanes = b.lanes(steps(list));
    let rows = lanes.rows;
    b.reseed(1);
    let qkv = b.normal(rows * channels, 1.0);
    b.reseed(2);
    let a = b.normal(rows * heads, 4.0);
    b.reseed(3);
    let beta_in = b.normal(rows * heads, 4.0);
    GdnPrepare {
        qkv,
        a,
        b: beta_in,
        conv,
        decay,
        dt_bias,
        history,
        q: b.out_f32("q", rows * geometry.keys()),
        k: b.out_f32("k", rows * geometry.keys()),
        v: b.out_f32("v", rows * geometry.values()),
        g: b.out_f32("g", rows * heads),
        beta: b.out_f32("beta", rows * heads),
        lanes,
        geometry,
        block,
        commit,
    }
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    let geometries = [
        geometry((1, 1), (16, 16)),
        GdnGeometry { head_map: HeadMap::Tiled, ..geometry((2, 6), (32, 48)) },
        geometry((3, 3), (256, 16)),
        geometry((1, 17), (16, 256)),
        TINY,
    ];
    let verify: [&[Lane]; 4] = [
        &[(1, 0, 0, 0)],
        &[(8, 2, 8, 1)],
        &[(3, 1, 2, 0), (0, 3, 5, 1), (8, 0, 0, 1), (1, 2, 8, 0)],
        &[(0, 0, 3, 0)],
    ];
    let prefill: [&[Lane]; 4] = [
        &[(1, 0, 0, 0)],
        &[(2, 2, 8, 1)],
        &[(130, 1, 3, 0), (0, 3, 5, 1), (3, 0, 0, 1), (64, 2, 7, 0)],
        &[(0, 0, 3, 0)],
    ];
    for geometry in geometries {
        for (commit, sets) in [(Commit::Deferred, verify), (Commit::Immediate, prefill)] {
            for list in sets {
                let name = format!("gdn_prepare {geometry:?} {list:?} {commit:?}");
                conformance(&name, Tolerance::relative(3e-6), |b| {
                    build(b, geometry, list, commit, true)
                });
            }
        }
    }
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition_at_the_largest_shape() {
    conformance("gdn_prepare 27B", Tolerance::relative(3e-6), |b| {
        let lanes = [(2, 0, 1, 0), (5, 3, 0, 1)];
        build(b, geometry((16, 48), (128, 128)), &lanes, Commit::Deferred, true)
    });
}

#[cfg_attr(test, test)]
fn each_tap_meets_its_row() {
    // Channel 0 of the only value head sees the row three back, channel 1 the row itself.
    conformance("gdn_prepare by hand", Tolerance::relative(1e-6), |b| {
        let geometry = geometry((1, 1), (16, 16));
        let list = [(2, 0, 1, 0)];
        let mut op = build(b, geometry, &list, Commit::Deferred, false);
        let mut conv = vec![0.0; CONV_TAPS * 48];
        (conv[32], conv[3 * 48 + 33]) = (1.0, 1.0);
        // History rows 0..4 of half 0 hold their number; one of them is pending, so the rows before
        // this pass are 1, 2, 3. The pass's own rows hold 10 and 20.
        let history: Vec<f32> =
            (0..4 * 2 * 11 * 48).map(|i| if i < 4 * 48 { (i / 48) as f32 } else { 99.0 }).collect();
        let qkv: Vec<f32> = (0..96).map(|i| if i < 48 { 10.0 } else { 20.0 }).collect();
        (op.conv, op.history, op.qkv) = (b.f32(&conv), b.f32(&history), b.f32(&qkv));
        let silu = |x: f32| x / (1.0 + (-x).exp());
        let mut want = vec![0.0; 32];
        (want[0], want[1], want[16], want[17]) = (silu(1.0), silu(10.0), silu(2.0), silu(20.0));
        b.expect("v", &want);
        b.expect("q", &[0.0; 32]);
        op
    });
}

#[cfg_attr(test, test)]
fn gates_by_hand() {
    conformance("gdn_prepare gates", Tolerance::relative(1e-6), |b| {
        let mut op = build(b, geometry((1, 4), (16, 16)), &[(1, 0, 0, 0)], Commit::Deferred, false);
        op.a = b.f32(&[0.0, 30.0, -30.0, 1.0]);
        op.b = b.f32(&[0.0, 100.0, -100.0, 1.0]);
        op.decay = b.f32(&[-1.0, -2.0, -1.0, 0.0]);
        op.dt_bias = b.f32(&[0.0, -5.0, 0.0, 3.0]);
        b.expect("g", &[-std::f32::consts::LN_2, -50.0, -9.357_623e-14, 0.0]);
        b.expect("beta", &[0.5, 1.0, 0.0, 0.731_058_6]);
        op
    });
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    for commit in [Commit::Deferred, Commit::Immediate] {
        row_invariance("gdn_prepare", 8, |b, rows| {
            build(b, TINY, &[(rows as u32, 1, 3, 1)], commit, false)
        });
    }
}

/// A prompt's rows have the same bits in one pass and in several, of few rows or of many.
#[cfg_attr(test, test)]
fn prompts_may_be_cut_anywhere() {
    const ROWS: usize = 200;
    let lane = [(ROWS as u32, 1, 3, 1)];
    on_each_device("gdn_prepare of a prompt in parts", |label, dev| {
        let mut run = |cuts: &[usize], halves: u32| {
            let heads = geometry((2, 4), (64, 32));
            let op = build(&mut Builder::new(dev), heads, &lane, Commit::Immediate, false);
            let (mut step, mut first) = (steps(&lane)[0], 0);
            for &rows in cuts {
                step.rows = rows as u32;
                dev.write(op.lanes.step, bytemuck::bytes_of(&step));
                let part = |buf: Buf| buf.rows(first, rows, buf.bytes / ROWS);
                dev.run(&GdnPrepare {
                    qkv: part(op.qkv),
                    a: part(op.a),
                    b: part(op.b),
                    q: part(op.q),
                    k: part(op.k),
                    v: part(op.v),
                    g: part(op.g),
                    beta: part(op.beta),
                    lanes: Lanes { rows, max_rows: rows, ..op.lanes },
                    ..op
                });
                first += rows;
                (step.pending, step.parity) = (0, (step.parity + halves) % 2);
            }
            match dev.sync() {
                Err(DeviceError::Unsupported(why)) => return Err(why),
                other => other.expect("the passes"),
            }
            let read = |buf: Buf| {
                let mut bytes = vec![0u8; buf.bytes];
                dev.read(buf, &mut bytes);
                bytes
            };
            Ok([op.q, op.k, op.v, op.g, op.beta].map(read))
        };
        let whole = run(&[ROWS], 1)?;
        for cuts in [&[64, 64, 64, 8][..], &[1, 199], &[70, 130]] {
            assert!(run(cuts, 1)? == whole, "{label}: {cuts:?}");
            // The history of the wrong half must show.
            assert!(run(cuts, 2)? != whole, "{label}: {cuts:?}, wrong half");
        }
        Ok(())
    });
}

/// One lane's stream of rows, run pass by pass.
struct Stream {
    host: Host,
    op: GdnPrepare,
    inputs: [(Buf, Vec<f32>); 3],
    step: LaneStep,
    at: usize,
}

impl Stream {
    fn new(mode: HostMode, rows: usize) -> Stream {
        let mut host = Host::with(mode, Isa::detect(), 2, crate::ActDtype::F32);
        let mut b = Builder::new(&mut host);
        let op = build(&mut b, TINY, &[(rows as u32, 2, 0, 0)], Commit::Immediate, false);
        let inputs = [op.qkv, op.a, op.b].map(|buf| {
            let mut values = vec![0.0; buf.bytes / 4];
            host.read(buf, bytemuck::cast_slice_mut(&mut values));
            (buf, values)
        });
        Stream { host, op, inputs, step: LaneStep { slot: 2, ..LaneStep::default() }, at: 0 }
    }

    /// Runs the next `rows` rows, of which `kept` stay; returns q, k, v, g and beta of the kept.
    fn pass(&mut self, rows: usize, kept: usize, commit: Commit) -> Vec<u8> {
        let total = self.op.lanes.rows;
        for (buf, values) in &self.inputs {
            let width = values.len() / total;
            let part = &values[self.at * width..][..rows * width];
            self.host.write(*buf, bytemuck::cast_slice(part));
        }
        self.step.rows = rows as u32;
        self.host.write(self.op.lanes.step, bytemuck::bytes_of(&self.step));
        self.host.run(&GdnPrepare {
            commit,
            lanes: Lanes { rows, max_rows: rows, ..self.op.lanes },
            ..self.op
        });
        self.host.sync().expect("the pass");
        self.step.parity ^= 1;
        self.step.pending = if commit == Commit::Deferred { kept as u32 } else { 0 };
        self.at += kept;
        let op = &self.op;
        let mut out = Vec::new();
        for t in 0..kept {
            for buf in [op.q, op.k, op.v, op.g, op.beta] {
                let mut row = vec![0; buf.bytes / total];
                self.host.read(buf.rows(t, 1, row.len()), &mut row);
                out.extend(row);
            }
        }
        out
    }
}

#[test]
fn passes_of_any_size_make_the_same_rows() {
    const ROWS: usize = 40;
    for mode in [HostMode::Simd, HostMode::Reference] {
        let whole = Stream::new(mode, ROWS).pass(ROWS, ROWS, Commit::Immediate);
        let mut stream = Stream::new(mode, ROWS);
        let mut cut = Vec::new();
        let passes = [
            (1, 1, Commit::Immediate),
            (8, 0, Commit::Deferred),
            (8, 1, Commit::Deferred),
            (8, 8, Commit::Deferred),
            (2, 2, Commit::Immediate),
            (0, 0, Commit::Deferred),
            (0, 0, Commit::Immediate),
            (1, 1, Commit::Deferred),
            (4, 2, Commit::Deferred),
            (5, 5, Commit::Immediate),
            (3, 3, Commit::Deferred),
            (17, 17, Commit::Immediate),
        ];
        for (rows, kept, commit) in passes {
            cut.extend(stream.pass(rows, kept, commit));
        }
        assert_eq!(stream.at, ROWS);
        assert!(whole == cut, "{mode:?}");

        // Taking one rejected row as kept must show.
        let mut stream = Stream::new(mode, ROWS);
        let mut wrong = stream.pass(8, 4, Commit::Deferred);
        stream.step.pending += 1;
        wrong.extend(stream.pass(8, 8, Commit::Deferred));
        assert!(whole[..wrong.len()] != wrong, "{mode:?}");
    }
}

#[test]
fn refuses_what_it_cannot_compute() {
    let mut host = Host::new(Isa::Portable, 1);
    let mut b = Builder::new(&mut host);
    let good = build(&mut b, TINY, &[(3, 0, 0, 0), (8, 1, 0, 0)], Commit::Deferred, false);
    good.check().expect("the geometry of the other cases");
    let with = |change: &dyn Fn(&mut GdnPrepare)| {
        let mut op = good;
        change(&mut op);
        op.check()
    };
    let cases: [&dyn Fn(&mut GdnPrepare); 13] = [
        &|op| op.geometry.key_dim = 60,
        &|op| op.geometry.value_dim = 272,
        &|op| op.geometry.key_heads = 5,
        &|op| op.geometry.key_heads = 0,
        &|op| op.geometry.value_heads = usize::MAX / 6 * 6,
        &|op| op.block = 7,
        &|op| op.block = usize::MAX,
        &|op| op.lanes.rows = 12,
        &|op| op.lanes.max_rows = 9,
        &|op| op.a = op.a.slice(0, 4),
        &|op| op.conv = op.conv.slice(0, 4),
        &|op| op.dt_bias = op.qkv,
        &|op| op.v = op.v.slice(0, op.v.bytes - 4),
    ];
    for (i, change) in cases.iter().enumerate() {
        assert!(with(change).is_err(), "change {i}");
    }
}
