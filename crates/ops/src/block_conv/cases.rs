//! Cases every device must pass.

use crate::testing::{Builder, Tolerance, conformance, row_invariance};
use crate::{ActDtype, BlockConv, BlockConvOut, LaneStep, Lanes, Op};

crate::testing::cases!(
    agrees_with_the_definition,
    the_first_row_of_a_lane_sees_no_other_lane,
    a_row_does_not_depend_on_its_neighbours,
);

/// Lanes of these row counts, one after the other.
fn lanes(b: &mut Builder, rows: &[usize]) -> Lanes {
    b.lanes(rows.iter().map(|&rows| LaneStep { rows: rows as u32, ..LaneStep::default() }))
}

fn build(
    b: &mut Builder,
    rows: &[usize],
    (width, group, taps): (usize, usize, usize),
    side: usize,
    act: Option<ActDtype>,
) -> BlockConv {
    let base = b.normal(taps * width, 1.0);
    let lanes = lanes(b, rows);
    let total = lanes.rows;
    b.reseed(1);
    let x = b.normal_values(total * width, 1.0);
    let x = b.act(&x, total, width, act.unwrap_or(ActDtype::F32));
    b.reseed(2);
    let dynamic = b.normal(total * 2 * taps * (width / group), 0.5);
    let out = match act {
        Some(act) => BlockConvOut::Act(b.out_act("out", total, width, act)),
        None => {
            b.reseed(3);
            let residual = b.normal(total * width, 1.0);
            b.updated_f32("out", residual);
            BlockConvOut::Add(residual)
        }
    };
    BlockConv { x, dynamic, side, base, out, lanes, taps, width, group }
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    for rows in [&[1][..], &[8], &[3, 0, 5], &[1, 17, 2]] {
        for shape in [(16, 16, 1), (64, 16, 2), (96, 32, 3), (576, 16, 2), (5120, 16, 2)] {
            for side in [0, 1] {
                for act in [None, Some(ActDtype::F32), Some(ActDtype::I8)] {
                    if shape.0 % 64 != 0 && act == Some(ActDtype::I8) {
                        continue;
                    }
                    let name = format!("block_conv {rows:?} {shape:?} {side} {act:?}");
                    conformance(&name, Tolerance::exact(), |b| build(b, rows, shape, side, act));
                }
            }
        }
    }
}

#[cfg_attr(test, test)]
fn the_first_row_of_a_lane_sees_no_other_lane() {
    conformance("block_conv by hand", Tolerance::exact(), |b| {
        // Two lanes of two rows; taps 1 (self) and 10 (previous row) plus dynamic 0 and 100.
        let x: Vec<f32> = [1.0, 2.0, 3.0, 4.0].iter().flat_map(|&v| [v; 16]).collect();
        let base: Vec<f32> = [1.0, 10.0].iter().flat_map(|&v| [v; 16]).collect();
        // [row, side, tap]: side 0 must not be read.
        let dynamic: Vec<f32> = (0..4).flat_map(|_| [f32::NAN, f32::NAN, 0.0, 100.0]).collect();
        let want: Vec<f32> = [1.0, 112.0, 3.0, 334.0].iter().flat_map(|&v| [v; 16]).collect();
        let x = b.act(&x, 4, 16, ActDtype::F32);
        let (base, dynamic) = (b.f32(&base), b.f32(&dynamic));
        let lanes = lanes(b, &[2, 2]);
        let act = b.out_act("out", 4, 16, ActDtype::F32);
        b.expect("out", &want);
        let out = BlockConvOut::Act(act);
        BlockConv { x, dynamic, side: 1, base, out, lanes, taps: 2, width: 16, group: 16 }
    });
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    row_invariance("block_conv", 9, |b, rows| {
        build(b, &[rows], (128, 16, 2), 0, Some(ActDtype::I8))
    });
}

#[test]
fn refuses_what_it_cannot_compute() {
    let mut host = crate::Host::new(crate::simd::Isa::Portable, 1);
    let mut b = Builder::new(&mut host);
    let good = build(&mut b, &[2, 3], (64, 16, 2), 0, None);
    good.check().expect("the geometry of the other cases");
    assert!(BlockConv { group: 8, ..good }.check().is_err());
    assert!(BlockConv { width: 72, ..good }.check().is_err());
    assert!(BlockConv { taps: 3, ..good }.check().is_err());
    assert!(BlockConv { taps: 0, ..good }.check().is_err());
    assert!(BlockConv { side: 2, ..good }.check().is_err());
    let lanes = Lanes { rows: 6, ..good.lanes };
    assert!(BlockConv { lanes, ..good }.check().is_err());
    let lanes = Lanes { count: 3, ..good.lanes };
    assert!(BlockConv { lanes, ..good }.check().is_err());
}
