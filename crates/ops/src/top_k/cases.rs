//! Cases every device must pass.

use crate::TopK;
use crate::testing::{Builder, Tolerance, conformance, row_invariance};

crate::testing::cases!(
    answers_by_hand,
    rows_without_any_number,
    agrees_with_the_definition,
    a_row_does_not_depend_on_its_neighbours,
);

fn build(b: &mut Builder, logits: &[f32], stride: usize, valid: usize, k: usize) -> TopK {
    let rows = logits.len() / stride;
    TopK {
        logits: b.f32(logits),
        ids: b.out_bytes("ids", 4 * rows * k),
        values: b.out_f32("values", rows * k),
        scratch: b.bytes(&vec![0xFF; TopK::scratch_bytes(rows, valid, k)]),
        rows,
        stride,
        valid,
        k,
    }
}

fn as_f32(ids: &[u32]) -> Vec<f32> {
    ids.iter().map(|&id| f32::from_bits(id)).collect()
}

#[cfg_attr(test, test)]
fn answers_by_hand() {
    let nan = f32::NAN;
    let inf = f32::INFINITY;
    let row = [1.0, 3.0, nan, 3.0, -inf, inf, 2.0, 99.0];
    conformance("by hand", Tolerance::exact(), |b| {
        b.expect("values", &[inf, 3.0, 3.0, 2.0]);
        build(b, &row, 8, 7, 4)
    });
    // Ids are compared as bytes: check them on their own, read back as floats.
    conformance("ids by hand", Tolerance::exact(), |b| {
        let op = build(b, &row, 8, 7, 7);
        let ids = b.out_f32("as floats", 7);
        b.expect("as floats", &as_f32(&[5, 1, 3, 6, 0, 2, 4]));
        TopK { ids, ..op }
    });
}

#[cfg_attr(test, test)]
fn rows_without_any_number() {
    for fill in [f32::NAN, f32::NEG_INFINITY] {
        conformance("nothing to choose from", Tolerance::exact(), |b| {
            let op = build(b, &[fill; 700], 700, 700, 5);
            let ids = b.out_f32("as floats", 5);
            b.expect("as floats", &as_f32(&[0, 1, 2, 3, 4]));
            TopK { ids, ..op }
        });
    }
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    for (rows, valid, stride, k) in [
        (1, 1, 1, 1),
        (3, 16, 16, 16),
        (2, 31, 40, 31),
        (7, 129, 140, 5),
        (5, 1000, 1024, 16),
        (2, 16_385, 16_400, 32),
        (2, 49_152, 49_152, 16),
        (1, 50_001, 50_016, 1),
        (3, 100_003, 100_004, 20),
        (2, 248_320, 248_320, 16),
        (1, 1 << 20, 1 << 20, 32),
    ] {
        let name = format!("top_k {rows}x{valid} of {stride} k {k}");
        conformance(&name, Tolerance::exact(), |b| {
            let x = b.normal_values(rows * stride, 3.0);
            build(b, &x, stride, valid, k)
        });
        conformance(&format!("{name}, many ties"), Tolerance::exact(), |b| {
            let x: Vec<f32> = (0..rows * stride).map(|_| (b.random() % 5) as f32 - 2.0).collect();
            build(b, &x, stride, valid, k)
        });
        conformance(&format!("{name}, ascending"), Tolerance::exact(), |b| {
            let x: Vec<f32> = (0..rows * stride).map(|i| i as f32).collect();
            build(b, &x, stride, valid, k)
        });
        conformance(&format!("{name}, NaN and infinities"), Tolerance::exact(), |b| {
            let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0];
            let mut x = b.normal_values(rows * stride, 3.0);
            for i in 0..x.len() {
                if b.random() % 3 == 0 {
                    x[i] = odd[(b.random() % 5) as usize];
                }
            }
            build(b, &x, stride, valid, k)
        });
    }
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    row_invariance("top_k", 9, |b, rows| {
        let x = b.normal_values(rows * 600, 2.0);
        build(b, &x, 600, 590, 16)
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    let mut dev = crate::Host::new(crate::simd::Isa::Portable, 1);
    let mut b = Builder::new(&mut dev);
    let good = build(&mut b, &[0.0; 64], 32, 30, 8);
    let refused = |op: TopK| crate::Op::check(&op).is_err();
    assert!(!refused(good));
    assert!(refused(TopK { k: 0, ..good }));
    assert!(refused(TopK { k: 33, ..good }));
    assert!(refused(TopK { valid: 33, ..good }));
    assert!(refused(TopK { valid: 7, ..good }));
    assert!(refused(TopK { rows: 3, ..good }));
    assert!(refused(TopK { rows: usize::MAX, ..good }));
    assert!(refused(TopK { scratch: good.scratch.slice(0, 8), ..good }));
}
