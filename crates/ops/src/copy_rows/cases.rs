//! Cases every device must pass.

use crate::testing::{Builder, Tolerance, conformance, row_invariance};
use crate::{ActDtype, CopyRows, Op, Pass};

crate::testing::cases!(
    agrees_with_the_definition,
    columns_outside_stay,
    a_row_does_not_depend_on_its_neighbours,
);

/// A copy into rows that already hold other values, as earlier taps left them.
fn build(
    b: &mut Builder,
    rows: usize,
    width: usize,
    column: usize,
    to_width: usize,
    act: ActDtype,
    finish: bool,
) -> CopyRows {
    let values = b.normal_values(rows * to_width, 1.0);
    let to = b.act(&values, rows, to_width, act);
    b.updated_act("to", to);
    b.reseed(3);
    CopyRows {
        from: b.normal(rows * width, 2.0),
        width,
        to,
        column,
        finish,
        rows,
        pass: Pass::Round,
    }
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    for rows in [1, 2, 8, 17] {
        for (width, column, to_width, act) in [
            (7, 3, 11, ActDtype::F32),
            (576, 0, 576, ActDtype::I8),
            (576, 576, 3 * 576, ActDtype::I8),
            (5120, 4 * 5120, 5 * 5120, ActDtype::I8),
        ] {
            for (finish, pass) in [(false, Pass::Prompt), (true, Pass::Prompt), (true, Pass::Round)]
            {
                let name =
                    format!("copy_rows {rows}x{width}@{column}/{to_width} {finish} {pass:?}");
                conformance(&name, Tolerance::exact(), |b| {
                    let op = build(b, rows, width, column, to_width, act, finish);
                    CopyRows { pass, ..op }
                });
            }
        }
    }
}

#[cfg_attr(test, test)]
fn columns_outside_stay() {
    conformance("copy_rows by hand", Tolerance::exact(), |b| {
        let to = b.act(&[1.0, 2.0, 3.0, 4.0], 1, 4, ActDtype::F32);
        b.updated_f32("to", to.buf.slice(0, 16));
        b.expect("to", &[1.0, 8.0, 9.0, 4.0]);
        CopyRows {
            from: b.f32(&[8.0, 9.0]),
            width: 2,
            to,
            column: 1,
            finish: true,
            rows: 1,
            pass: Pass::Round,
        }
    });
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    row_invariance("copy_rows", 6, |b, rows| build(b, rows, 64, 32, 192, ActDtype::I8, true));
}

#[test]
fn refuses_what_it_cannot_compute() {
    let mut host = crate::Host::new(crate::simd::Isa::Portable, 1);
    let mut b = Builder::new(&mut host);
    let good = build(&mut b, 2, 32, 32, 128, ActDtype::I8, true);
    good.check().expect("the geometry of the other cases");
    assert!(CopyRows { column: 97, ..good }.check().is_err());
    assert!(CopyRows { column: usize::MAX, ..good }.check().is_err());
    assert!(CopyRows { width: 33, ..good }.check().is_err());
    assert!(CopyRows { rows: 3, ..good }.check().is_err());
}
