//! Cases every device must pass.

use crate::linear::samples::{Kind, sample};
use crate::testing::{Builder, Tolerance, conformance, row_invariance};
use crate::{ActDtype, DryRun, Embed, Op};

crate::testing::cases!(rows_are_the_checkpoint_s, a_row_does_not_depend_on_its_neighbours,);

fn build(b: &mut Builder, kind: Kind, rows: usize, n: usize, k: usize) -> Embed {
    let table = sample(b, kind, n, k).weight(b);
    let ids: Vec<u32> = (0..rows).map(|_| (b.random() % n as u64) as u32).collect();
    Embed { ids: b.pod(&ids), table, out: b.out_f32("out", rows * k), rows }
}

#[cfg_attr(test, test)]
fn rows_are_the_checkpoint_s() {
    for kind in Kind::quantized().into_iter().chain(Kind::dense()) {
        conformance(&format!("embed {kind:?}"), Tolerance::exact(), |b| {
            let (n, k) = (70, 192usize.next_multiple_of(kind.unit()));
            let table = sample(b, kind, n, k);
            // Edges of tiles, and two ids past the end.
            let ids = [0, 31, 32, 69, 70, u32::MAX];
            let rows = ids.map(|id| (id as usize).min(n - 1));
            let want = rows.map(|row| table.source().dequantize_row(n, k, row).expect("a row"));
            b.expect("out", &want.concat());
            let out = b.out_f32("out", ids.len() * k);
            Embed { ids: b.pod(&ids), table: table.weight(b), out, rows: ids.len() }
        });
    }
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    let kind = Kind::Mlx(4, 64, crate::ScaleDtype::Bf16);
    row_invariance("embed", 17, |b, rows| build(b, kind, rows, 40, 128));
}

#[test]
fn refuses_wrong_sizes() {
    let mut dev = DryRun::new(ActDtype::I8);
    let mut b = Builder::new(&mut dev);
    let good = build(&mut b, Kind::Mlx(4, 64, crate::ScaleDtype::Bf16), 3, 40, 128);
    assert!(good.check().is_ok());
    for change in [
        (|op| op.rows = 4) as fn(&mut Embed),
        |op| op.rows = usize::MAX,
        |op| op.table.n = 0,
        |op| op.table.n = 65,
        |op| op.table.k = 64,
        |op| op.out.bytes -= 4,
    ] {
        let mut op = good;
        change(&mut op);
        assert!(op.check().is_err(), "{op:?}");
    }
}
