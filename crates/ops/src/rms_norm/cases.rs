//! Cases every device must pass.

use crate::testing::{Builder, Tolerance, conformance, row_invariance};
use crate::{ActDtype, Pass, RmsNorm};

crate::testing::cases!(
    agrees_with_the_definition,
    a_row_of_ones_stays_ones,
    zeros_and_outliers,
    a_row_does_not_depend_on_its_neighbours,
);

fn build(b: &mut Builder, rows: usize, width: usize, act: ActDtype) -> RmsNorm {
    let weight = b.normal(width, 1.0);
    let x = b.normal(rows * width, 3.0);
    RmsNorm {
        x,
        weight,
        out: b.out_act("out", rows, width, act),
        rows,
        pass: Pass::Round,
        eps: 1e-6,
    }
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    for rows in [1, 2, 8, 17, 40] {
        for (width, act) in [
            (16, ActDtype::F32),
            (64, ActDtype::I8),
            (576, ActDtype::I8),
            (5120, ActDtype::I8),
            (5120, ActDtype::F32),
        ] {
            let name = format!("rms_norm {rows}x{width} {act:?}");
            for pass in [Pass::Prompt, Pass::Round] {
                let build = |b: &mut Builder| RmsNorm { pass, ..build(b, rows, width, act) };
                conformance(&format!("{name} {pass:?}"), Tolerance::relative(2e-6), build);
            }
        }
    }
}

#[cfg_attr(test, test)]
fn a_row_of_ones_stays_ones() {
    conformance("ones", Tolerance::relative(1e-6), |b| {
        let x = b.f32(&[1.0; 64]);
        let weight = b.f32(&[1.0; 64]);
        let out = b.out_act("out", 1, 64, ActDtype::I8);
        b.expect("out", &[1.0; 64]);
        RmsNorm { x, weight, out, rows: 1, pass: Pass::Round, eps: 0.0 }
    });
}

#[cfg_attr(test, test)]
fn zeros_and_outliers() {
    conformance("outliers", Tolerance::relative(2e-6), |b| {
        let mut x = vec![0.0; 3 * 64];
        x[64] = 3e6;
        x[70] = -1e-20;
        let x = b.f32(&x);
        let weight = b.normal(64, 1.0);
        RmsNorm {
            x,
            weight,
            out: b.out_act("out", 3, 64, ActDtype::I8),
            rows: 3,
            pass: Pass::Round,
            eps: 1e-6,
        }
    });
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    row_invariance("rms_norm", 17, |b, rows| build(b, rows, 576, ActDtype::I8));
}
