//! Cases every device must pass.

use crate::testing::{Builder, Tolerance, conformance, row_invariance};
use crate::{ActDtype, GatedNorm, Op};

crate::testing::cases!(
    agrees_with_the_definition,
    heads_are_normed_apart_and_gated_after,
    a_row_does_not_depend_on_its_neighbours,
);

fn build(b: &mut Builder, rows: usize, heads: usize, dim: usize, act: ActDtype) -> GatedNorm {
    let weight = b.normal(dim, 1.0);
    let x = b.normal(rows * heads * dim, 3.0);
    b.reseed(7);
    let gate = b.normal(rows * heads * dim, 3.0);
    let out = b.out_act("out", rows, heads * dim, act);
    GatedNorm { x, gate, weight, out, rows, dim, eps: 1e-6 }
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    for rows in [1, 3, 8, 17] {
        for (heads, dim, act) in [
            (1, 16, ActDtype::F32),
            (3, 16, ActDtype::F32),
            (4, 16, ActDtype::I8),
            (16, 48, ActDtype::I8),
            (12, 64, ActDtype::I8),
            (5, 128, ActDtype::I8),
            (48, 128, ActDtype::I8),
            (3, 256, ActDtype::I8),
        ] {
            let name = format!("gated_norm {rows}x{heads}x{dim} {act:?}");
            conformance(&name, Tolerance::relative(2e-6), |b| build(b, rows, heads, dim, act));
        }
    }
}

#[cfg_attr(test, test)]
fn heads_are_normed_apart_and_gated_after() {
    conformance("gated_norm by hand", Tolerance::relative(1e-6), |b| {
        // Head 0 is all 4s, head 1 all −1s: both norm to ±1, whatever the other holds.
        let x: Vec<f32> = (0..32).map(|i| if i < 16 { 4.0 } else { -1.0 }).collect();
        let (x, gate, weight) = (b.f32(&x), b.f32(&[1.0; 32]), b.f32(&[2.0; 16]));
        let silu = 0.731_058_6;
        let want: Vec<f32> =
            (0..32).map(|i| if i < 16 { 2.0 * silu } else { -2.0 * silu }).collect();
        let out = b.out_act("out", 1, 32, ActDtype::F32);
        b.expect("out", &want);
        GatedNorm { x, gate, weight, out, rows: 1, dim: 16, eps: 0.0 }
    });
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    row_invariance("gated_norm", 9, |b, rows| build(b, rows, 12, 64, ActDtype::I8));
}

#[test]
fn refuses_what_it_cannot_compute() {
    let mut host = crate::Host::new(crate::simd::Isa::Portable, 1);
    let mut b = Builder::new(&mut host);
    let good = build(&mut b, 2, 2, 32, ActDtype::I8);
    good.check().expect("the geometry of the other cases");
    assert!(GatedNorm { dim: 24, ..good }.check().is_err());
    assert!(GatedNorm { dim: 0, ..good }.check().is_err());
    assert!(GatedNorm { dim: 48, ..good }.check().is_err());
    assert!(GatedNorm { rows: 3, ..good }.check().is_err());
    assert!(GatedNorm { gate: good.gate.slice(0, 64), ..good }.check().is_err());
    assert!(GatedNorm { weight: good.weight.slice(0, 64), ..good }.check().is_err());
}
