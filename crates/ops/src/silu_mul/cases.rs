//! Cases every device must pass.

use crate::testing::{Builder, Tolerance, conformance, row_invariance};
use crate::{ActDtype, Op, Pass, SiluMul};

crate::testing::cases!(
    agrees_with_the_definition,
    known_values,
    a_row_does_not_depend_on_its_neighbours,
);

fn build(b: &mut Builder, rows: usize, width: usize, act: ActDtype) -> SiluMul {
    let gate = b.normal(rows * width, 4.0);
    b.reseed(2);
    let up = b.normal(rows * width, 2.0);
    SiluMul { gate, up, out: b.out_act("out", rows, width, act), rows, pass: Pass::Round }
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    for rows in [1, 3, 8, 17] {
        for (width, act) in [
            (16, ActDtype::F32),
            (48, ActDtype::F32),
            (64, ActDtype::I8),
            (1536, ActDtype::I8),
            (17_408, ActDtype::I8),
        ] {
            let name = format!("silu_mul {rows}x{width} {act:?}");
            for pass in [Pass::Prompt, Pass::Round] {
                let build = |b: &mut Builder| SiluMul { pass, ..build(b, rows, width, act) };
                conformance(&format!("{name} {pass:?}"), Tolerance::relative(2e-6), build);
            }
        }
    }
}

#[cfg_attr(test, test)]
fn known_values() {
    conformance("silu_mul by hand", Tolerance::relative(1e-6), |b| {
        let mut gate = vec![0.0; 32];
        gate[..4].copy_from_slice(&[1.0, -200.0, 200.0, -1.0]);
        let (gate, up) = (b.f32(&gate), b.f32(&[2.0; 32]));
        let out = b.out_act("out", 1, 32, ActDtype::F32);
        let mut want = vec![0.0; 32];
        want[..4].copy_from_slice(&[1.462_117_2, 0.0, 400.0, -0.537_882_84]);
        b.expect("out", &want);
        SiluMul { gate, up, out, rows: 1, pass: Pass::Round }
    });
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    row_invariance("silu_mul", 9, |b, rows| build(b, rows, 1536, ActDtype::I8));
}

#[test]
fn refuses_what_it_cannot_compute() {
    let mut host = crate::Host::new(crate::simd::Isa::Portable, 1);
    let mut b = Builder::new(&mut host);
    let good = build(&mut b, 2, 64, ActDtype::I8);
    good.check().expect("the geometry of the other cases");
    let mut wide = good;
    wide.out.width = 63;
    assert!(wide.check().is_err());
    assert!(SiluMul { rows: 3, ..good }.check().is_err());
    assert!(SiluMul { up: good.up.slice(0, 4), ..good }.check().is_err());
    assert!(SiluMul { rows: usize::MAX, ..good }.check().is_err());
}
