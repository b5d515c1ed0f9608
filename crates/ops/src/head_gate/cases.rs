//! Cases every device must pass.

use crate::testing::{Builder, Tolerance, conformance, row_invariance};
use crate::{ActDtype, HeadGate, Op};

crate::testing::cases!(
    agrees_with_the_definition,
    the_gate_is_the_second_half_of_each_head,
    without_a_gate_it_copies,
    a_row_does_not_depend_on_its_neighbours,
);

fn build(
    b: &mut Builder,
    rows: usize,
    heads: usize,
    dim: usize,
    gated: bool,
    act: ActDtype,
) -> HeadGate {
    let width = heads * dim;
    b.reseed(1);
    let x = b.normal(rows * width, 2.0);
    b.reseed(2);
    let q_gate = gated.then(|| b.normal(rows * 2 * width, 4.0));
    HeadGate { x, q_gate, out: b.out_act("out", rows, width, act), rows, heads, dim }
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    for rows in [1, 2, 8, 17, 40] {
        for (heads, dim, act) in [
            (1, 16, ActDtype::F32),
            (9, 64, ActDtype::I8),
            (4, 80, ActDtype::I8),
            (3, 48, ActDtype::F32),
            (24, 256, ActDtype::I8),
        ] {
            for gated in [false, true] {
                let name = format!("head_gate {rows}x{heads}x{dim} {act:?} gated {gated}");
                conformance(&name, Tolerance::relative(1e-6), |b| {
                    build(b, rows, heads, dim, gated, act)
                });
            }
        }
    }
}

#[cfg_attr(test, test)]
fn the_gate_is_the_second_half_of_each_head() {
    conformance("gates", Tolerance::relative(1e-6), |b| {
        let x = b.f32(&[3.0; 32]);
        // Head 0: gate 0 opens half. Head 1: a large gate opens fully. Queries must not matter.
        let mut gates = vec![f32::NAN; 64];
        gates[16..32].fill(0.0);
        gates[48..64].fill(80.0);
        let q_gate = Some(b.f32(&gates));
        let out = b.out_act("out", 1, 32, ActDtype::F32);
        let want: Vec<f32> = (0..32).map(|i| if i < 16 { 1.5 } else { 3.0 }).collect();
        b.expect("out", &want);
        HeadGate { x, q_gate, out, rows: 1, heads: 2, dim: 16 }
    });
}

#[cfg_attr(test, test)]
fn without_a_gate_it_copies() {
    conformance("copy", Tolerance::exact(), |b| build(b, 3, 6, 32, false, ActDtype::I8));
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    row_invariance("head_gate", 17, |b, rows| build(b, rows, 9, 64, true, ActDtype::I8));
}

#[test]
fn refuses_what_it_cannot_do() {
    let mut host = crate::Host::new(crate::simd::Isa::Portable, 1);
    let mut b = Builder::new(&mut host);
    let good = build(&mut b, 2, 2, 32, true, ActDtype::I8);
    assert!(good.check().is_ok());
    for bad in [
        HeadGate { rows: 3, ..good },
        HeadGate { dim: 8, heads: 8, ..good },
        HeadGate { heads: 3, ..good },
        HeadGate { x: good.x.slice(0, 128), ..good },
        HeadGate { q_gate: Some(good.x), ..good },
    ] {
        assert!(bad.check().is_err(), "{bad:?}");
    }
}
