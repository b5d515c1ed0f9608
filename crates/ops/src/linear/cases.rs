//! Cases every device must pass.

use std::collections::{BTreeSet, HashSet};

use super::samples::{Kind, Sample, exact_sample, float, sample};
use crate::kernel::{Arg, Card, Plan};
use crate::linear::{DenseDtype, GgmlType, PackError, Source, TILE};
use crate::testing::{Builder, Tolerance, conformance, on_each_device, row_invariance};
use crate::{
    Act, ActDtype, DeviceError, DryRun, Format, Linear, LinearPart, Op, Pass, ScaleDtype, TileOrder,
};

crate::testing::cases!(
    int8_products_have_the_bits_of_the_definition,
    every_number_of_rows,
    shipped_shapes,
    inputs_in_chunks,
    f32_products_of_quantized_weights,
    dense_products,
    the_identity_returns_its_input,
    ones_count_their_codes,
    parts_of_different_formats,
    a_row_does_not_depend_on_its_neighbours,
    rows_of_several_lanes,
    prompts,
    products_of_exact_weights,
    prompts_may_be_cut_anywhere,
    more_outputs_than_a_pass,
);

/// The same bits on the CPU. Elsewhere quantised weights may be rounded to bf16, which moves a weight by up to 2^-8 of
/// it, a root mean square of 2^-9.2, and so a sum of products by that much of its root mean square. Rows of
/// the samples are up to 1.6 times the whole, and of 100,000 sums one is 4.5 deviations off: 2^-6.3.
fn rounded() -> Tolerance {
    Tolerance::exact().elsewhere(WEIGHTS_ROUNDED)
}
const WEIGHTS_ROUNDED: f32 = 1.0 / 64.0;

/// One random matrix and `rows` random rows of a round.
fn build(b: &mut Builder, kind: Kind, rows: usize, n: usize, k: usize, act: ActDtype) -> Linear {
    b.reseed((n * 31 + k) as u64);
    let weight = sample(b, kind, n, k).weight(b);
    let x = b.normal_values(rows * k, 2.0);
    let x = b.act(&x, rows, k, act);
    let out = b.out_f32("out", rows * n);
    Linear::new(x, rows, Pass::Round, &[LinearPart { weight, out, add: false }])
}

/// The smallest multiple of the kind's unit and of the activation group that is at least `k`.
fn inputs(kind: Kind, k: usize) -> usize {
    k.next_multiple_of(kind.unit().max(crate::ACT_GROUP))
}

#[cfg_attr(test, test)]
fn int8_products_have_the_bits_of_the_definition() {
    for kind in Kind::quantized() {
        for (rows, n, k) in [(1, 33, 64), (3, 70, 320), (9, 5, 128)] {
            let k = inputs(kind, k);
            let name = format!("linear {kind:?} {rows}x{n}x{k}");
            conformance(&name, rounded(), |b| build(b, kind, rows, n, k, ActDtype::I8));
        }
    }
}

#[cfg_attr(test, test)]
fn every_number_of_rows() {
    for kind in [Kind::Mlx(4, 64, ScaleDtype::Bf16), Kind::Ggml(GgmlType::Q6_K)] {
        for rows in 1..=19 {
            let name = format!("linear {kind:?} {rows} rows");
            conformance(&name, rounded(), |b| build(b, kind, rows, 40, 256, ActDtype::I8));
        }
    }
}

#[cfg_attr(test, test)]
fn shipped_shapes() {
    let kind = Kind::Mlx(4, 64, ScaleDtype::Bf16);
    for (rows, n, k) in [(1, 1536, 576), (8, 576, 1536), (2, 96, 5120), (1, 64, 17408)] {
        let name = format!("linear {rows}x{n}x{k}");
        conformance(&name, rounded(), |b| build(b, kind, rows, n, k, ActDtype::I8));
    }
}

/// Where activations exceed the first-level cache, tiles keep their sums between chunks of inputs.
#[cfg_attr(test, test)]
fn inputs_in_chunks() {
    for (kind, rows, n, k) in [
        (Kind::Mlx(4, 64, ScaleDtype::Bf16), 8, 544, 3072),
        (Kind::Mlx(8, 128, ScaleDtype::F16), 10, 40, 5248),
        (Kind::Ggml(GgmlType::Q4_K), 8, 64, 5120),
    ] {
        let name = format!("linear {kind:?} {rows}x{n}x{k}");
        conformance(&name, rounded(), |b| build(b, kind, rows, n, k, ActDtype::I8));
    }
}

#[cfg_attr(test, test)]
fn f32_products_of_quantized_weights() {
    for kind in Kind::quantized() {
        for (rows, n, k) in [(1, 33, 32usize), (6, 40, 384)] {
            let k = k.next_multiple_of(kind.unit());
            let name = format!("linear f32 {kind:?} {rows}x{n}x{k}");
            conformance(&name, Tolerance::relative(1e-4), |b| {
                build(b, kind, rows, n, k, ActDtype::F32)
            });
        }
    }
}

#[cfg_attr(test, test)]
fn dense_products() {
    for kind in Kind::dense() {
        for (rows, n, k) in [(1, 1, 1), (2, 7, 15), (3, 12, 576), (5, 33, 100), (8, 4, 16)] {
            let name = format!("linear {kind:?} {rows}x{n}x{k}");
            conformance(&name, Tolerance::relative(1e-5), |b| {
                build(b, kind, rows, n, k, ActDtype::F32)
            });
        }
        conformance("beside int8", Tolerance::relative(1e-5), |b| {
            build(b, kind, 3, 12, 192, ActDtype::I8)
        });
    }
}

/// An MLX matrix with weight `value(o, k)` in 0..16.
fn codes(n: usize, k: usize, value: impl Fn(usize, usize) -> u8) -> Sample {
    let dtype = ScaleDtype::F32;
    let mut data = vec![0; n * k / 2];
    for o in 0..n {
        for i in 0..k {
            data[(o * k + i) / 2] |= value(o, i) << (4 * (i % 2));
        }
    }
    let [scales, biases] = [1.0, 0.0].map(|value| float(dtype, value).repeat(n * k / 64));
    Sample { kind: Kind::Mlx(4, 64, dtype), n, k, data, scales, biases }
}

#[cfg_attr(test, test)]
fn the_identity_returns_its_input() {
    for act in [ActDtype::F32, ActDtype::I8] {
        conformance("identity", Tolerance::relative(2e-6), |b| {
            let weight = codes(64, 64, |o, k| u8::from(o == k)).weight(b);
            // Multiples of max/127, so that int8 holds them exactly.
            let values: Vec<f32> = (0..128).map(|i| (i % 64) as f32 * 2.0 - 1.0).collect();
            let x =
                b.act(&values.iter().map(|v| v / 125.0 * 127.0).collect::<Vec<_>>(), 2, 64, act);
            let out = b.out_f32("out", 128);
            if act == ActDtype::F32 {
                b.expect("out", &values.iter().map(|v| v / 125.0 * 127.0).collect::<Vec<_>>());
            }
            Linear::new(x, 2, Pass::Round, &[LinearPart { weight, out, add: false }])
        });
    }
}

#[cfg_attr(test, test)]
fn ones_count_their_codes() {
    for act in [ActDtype::F32, ActDtype::I8] {
        conformance("count", Tolerance::relative(2e-6), |b| {
            let weight = codes(40, 128, |o, _| (o % 16) as u8).weight(b);
            let x = b.act(&[1.0; 128], 1, 128, act);
            let out = b.out_f32("out", 40);
            let counts: Vec<f32> = (0..40).map(|o| 128.0 * (o % 16) as f32).collect();
            b.expect("out", &counts);
            Linear::new(x, 1, Pass::Round, &[LinearPart { weight, out, add: false }])
        });
    }
}

/// Four parts of different formats and sizes, two of which add.
fn four_parts(b: &mut Builder, rows: usize) -> Linear {
    let k = 256;
    let kinds = [
        (Kind::Mlx(4, 64, ScaleDtype::Bf16), 96),
        (Kind::Dense(DenseDtype::Bf16), 12),
        (Kind::Ggml(GgmlType::Q4_K), 33),
        (Kind::Mlx(8, 32, ScaleDtype::F16), 17),
    ];
    let weights = kinds.map(|(kind, n)| sample(b, kind, n, k).weight(b));
    let mut part = 0;
    let parts = weights.map(|weight| {
        let size = rows * weight.n;
        part += 1;
        let add = part % 2 == 0;
        let out = if add {
            b.reseed(part);
            let out = b.normal(size, 3.0);
            b.updated_f32(&format!("out {part}"), out);
            out
        } else {
            b.out_f32(&format!("out {part}"), size)
        };
        LinearPart { weight, out, add }
    });
    b.reseed(77);
    let x = b.normal_values(rows * k, 1.0);
    let x = b.act(&x, rows, k, ActDtype::I8);
    Linear::new(x, rows, Pass::Round, &parts)
}

#[cfg_attr(test, test)]
fn parts_of_different_formats() {
    for rows in [1, 2, 11] {
        let tolerance = Tolerance::relative(1e-5).elsewhere(WEIGHTS_ROUNDED);
        conformance("four parts", tolerance, |b| four_parts(b, rows));
    }
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    row_invariance("four parts", 17, four_parts);
    for (kind, k) in [
        (Kind::Mlx(4, 64, ScaleDtype::Bf16), 576),
        (Kind::Ggml(GgmlType::IQ4_XS), 256),
        (Kind::Dense(DenseDtype::F16), 100),
    ] {
        for act in [ActDtype::I8, ActDtype::F32] {
            if act == ActDtype::F32 || k % 64 == 0 {
                row_invariance("linear", 17, |b, rows| build(b, kind, rows, 40, k, act));
            }
        }
    }
}

/// As many rows as may share a pass without changing each other.
#[cfg_attr(test, test)]
fn rows_of_several_lanes() {
    let kind = Kind::Mlx(4, 64, ScaleDtype::Bf16);
    row_invariance("linear of 64", 64, |b, rows| build(b, kind, rows, 40, 576, ActDtype::I8));
    // On a large card, in this order: as many outputs of a block as a pass has; more; a sum of fewer inputs than others.
    const ROWS: [usize; 6] = [1, 8, 12, 17, 32, 64];
    // Sums of several places besides, in runs of 10 half tiles and of 13.
    let shapes = [(38_000, 64), (40_000, 64), (5_000, 1_600), (20_000, 640), (27_000, 640)];
    for (n, k) in shapes {
        row_invariance("linear of some of 64", ROWS.len(), |b, i| {
            build(b, kind, ROWS[i - 1], n, k, ActDtype::I8)
        });
    }
    for kind in Kind::quantized() {
        let k = inputs(kind, 1100);
        row_invariance("linear of some of 64", ROWS.len(), |b, i| {
            build(b, kind, ROWS[i - 1], 50, k, ActDtype::I8)
        });
        let name = format!("linear {kind:?} 20 rows");
        conformance(&name, rounded(), |b| build(b, kind, 20, 50, k, ActDtype::I8));
        let name = format!("linear {kind:?} 40 rows");
        conformance(&name, rounded(), |b| build(b, kind, 40, 50, k, ActDtype::I8));
    }
}

#[cfg_attr(test, test)]
fn prompts() {
    for kind in Kind::quantized() {
        let k = inputs(kind, 320);
        for rows in [5, 66] {
            let name = format!("linear {kind:?} prompt of {rows} rows");
            let op = |b: &mut Builder| prompt(build(b, kind, rows, 50, k, ActDtype::I8));
            conformance(&name, rounded(), op);
        }
    }
    let kind = Kind::Mlx(4, 64, ScaleDtype::Bf16);
    for (rows, n, k) in
        [(1, 70, 128), (64, 300, 832), (65, 1, 64), (129, 300, 128), (200, 515, 832), (384, 70, 64)]
    {
        let name = format!("linear prompt {rows}x{n}x{k}");
        let op = |b: &mut Builder| prompt(build(b, kind, rows, n, k, ActDtype::I8));
        conformance(&name, rounded(), op);
        // A round of so many is multiplied as well as one of few.
        conformance(&format!("{name}, round"), rounded(), |b| {
            build(b, kind, rows, n, k, ActDtype::I8)
        });
    }
    let rounded = Tolerance::relative(1e-5).elsewhere(WEIGHTS_ROUNDED);
    conformance("four parts of a prompt", rounded, |b| prompt(four_parts(b, 130)));
}

/// Weights that bf16 holds, and sums that f32 holds in any order: every kernel has the bits of the definition.
#[cfg_attr(test, test)]
fn products_of_exact_weights() {
    let check = |kind: Kind, pass: Pass, (rows, n, k): (usize, usize, usize)| {
        let name = format!("linear of exact weights {kind:?} {pass:?} {rows}x{n}x{k}");
        conformance(&name, Tolerance::exact(), |b| {
            b.reseed((n * 31 + k) as u64);
            let weight = exact_sample(b, kind, n, k).weight(b);
            let x = exact_inputs(b, rows, k);
            let x = b.act(&x, rows, k, ActDtype::I8);
            let out = b.out_f32("out", rows * n);
            Linear::new(x, rows, pass, &[LinearPart { weight, out, add: false }])
        });
    };
    for kind in Kind::quantized() {
        let k = inputs(kind, EXACT.1);
        for (pass, rows) in [(Pass::Round, &[1, 8, 16, 32, 64][..]), (Pass::Prompt, &[5, 66])] {
            rows.iter().for_each(|&rows| check(kind, pass, (rows, EXACT.0, k)));
        }
    }
    let mlx = Kind::Mlx(4, 64, ScaleDtype::Bf16);
    for shape in [(40, 50, 320), (384, 70, 64), (150, 270, 320), (321, 33, 1088)] {
        check(mlx, Pass::Prompt, shape);
    }
    for shape in [(8, 270, 1088), (12, 33, 64), (20, 70, 1600), (64, 515, 576)] {
        check(mlx, Pass::Round, shape);
    }
    // A wave of a large card's blocks for many rows; runs of many half tiles, and a k that blocks share. More rows of a round have
    // the bits of one there: see rows_of_several_lanes.
    check(mlx, Pass::Prompt, MANY);
    for (n, k) in [(40_000, 64), (5_000, 1_600), (20_000, 640), (27_000, 640)] {
        check(mlx, Pass::Round, (1, n, k));
    }
    check(mlx, Pass::Round, (40, 5_000, 1_600));
}

/// Outputs, and inputs at least: more than the warps of a block take at a time.
const EXACT: (usize, usize) = (50, 576);

/// Small whole numbers. The largest of each group is 127, so that int8 holds them as they are.
fn exact_inputs(b: &mut Builder, rows: usize, k: usize) -> Vec<f32> {
    let mut x: Vec<f32> = (0..rows * k).map(|_| (b.random() % 5) as f32 - 2.0).collect();
    for group in x.chunks_exact_mut(crate::ACT_GROUP) {
        let at = b.random() as usize % crate::ACT_GROUP;
        group[at] = if b.random() & 1 == 0 { 127.0 } else { -127.0 };
    }
    x
}

/// Rows, outputs and inputs of a prompt's product that Hopper has another kernel for than for smaller ones.
const MANY: (usize, usize, usize) = (155, 33_700, 64);

/// The same op of a prompt.
fn prompt(op: Linear) -> Linear {
    Linear { pass: Pass::Prompt, ..op }
}

/// A prompt's rows have the same bits in one pass and in several.
#[cfg_attr(test, test)]
fn prompts_may_be_cut_anywhere() {
    let mlx = Kind::Mlx(4, 64, ScaleDtype::Bf16);
    for (kind, n, k) in [
        (mlx, 300, 832),
        (Kind::Mlx(8, 32, ScaleDtype::F16), 40, 320),
        (Kind::Ggml(GgmlType::Q6_K), 70, 512),
        (Kind::Dense(DenseDtype::Bf16), 40, 128),
    ] {
        for cuts in [&[64, 64, 64, 8][..], &[1, 199], &[40, 160]] {
            in_parts(kind, (n, k), cuts);
        }
    }
    // The whole is for a kernel of its own: see MANY.
    in_parts(mlx, (MANY.1, MANY.2), &[64, 5, MANY.0 - 69]);
}

/// Kernels follow from the kind of pass, the format and the card; from rows only where a round has very many.
#[test]
fn kernels_do_not_follow_from_rows() {
    for arch in [80, 89, 90, 100, 120] {
        let card = Card { arch, sms: 132, shared: 227 << 10 };
        let mut dev = DryRun::on_card(card);
        let dense = [DenseDtype::F32, DenseDtype::Bf16].map(Kind::Dense);
        for kind in Kind::quantized().into_iter().chain(dense) {
            let op =
                build(&mut Builder::new(&mut dev), kind, 96, 50, inputs(kind, 64), ActDtype::I8);
            let kernels = |pass, rows| kernels(&op, &card, pass, rows);
            for rows in 1..=96 {
                let label = format!("{kind:?} on sm_{arch}: {rows} rows");
                assert_eq!(kernels(Pass::Prompt, rows), kernels(Pass::Prompt, 96), "{label}");
                let as_one = kernels(Pass::Round, rows) == kernels(Pass::Round, 1);
                let own = kernels(Pass::Prompt, rows) != kernels(Pass::Round, 1);
                // What has a kernel of its own for prompts also has one for large rounds.
                assert_eq!(as_one, !own || rows <= 64, "{label}");
                assert!(!own || arch == 90, "{label}");
            }
        }
        let mlx = Kind::Mlx(4, 64, ScaleDtype::Bf16);
        let op = build(&mut Builder::new(&mut dev), mlx, 8, 50, 64, ActDtype::I8);
        let short = kernels(&op, &card, Pass::Prompt, 8) == BTreeSet::from(["linear_short"]);
        assert_eq!(short, arch == 90, "sm_{arch}");
        let (rows, n, k) = MANY;
        let op = build(&mut Builder::new(&mut dev), mlx, rows, n, k, ActDtype::I8);
        let most = kernels(&op, &card, Pass::Prompt, rows) == BTreeSet::from(["linear_many"]);
        assert_eq!(most, arch == 90, "sm_{arch}");
    }
}

fn kernels(op: &Linear, card: &Card, pass: Pass, rows: usize) -> BTreeSet<&'static str> {
    let mut plan = Plan::default();
    Linear { pass, rows, ..*op }.cuda(card, &mut plan).expect("a plan");
    plan.launches().iter().map(|launch| launch.entry).collect()
}

/// Who compiles kernels ahead goes through prompts of multiples of 16 rows.
#[test]
fn prompts_of_any_rows_have_the_kernels_of_multiples_of_16() {
    let launches = |op: &Linear, card: &Card, rows| {
        let mut plan = Plan::default();
        prompt(Linear { rows, ..*op }).cuda(card, &mut plan).expect("a plan");
        plan.launches().iter().map(|l| (l.source.name, l.defines, l.shared)).collect::<Vec<_>>()
    };
    let mut seen = HashSet::new();
    let card = Card { arch: 90, sms: 132, shared: 227 << 10 };
    let mut dev = DryRun::on_card(card);
    for kind in Kind::quantized() {
        let k = inputs(kind, 256);
        let op = build(&mut Builder::new(&mut dev), kind, 2048, 5120, k, ActDtype::I8);
        for rows in 1..=2048usize {
            let all = launches(&op, &card, rows.next_multiple_of(16));
            assert_eq!(launches(&op, &card, rows), all, "{kind:?}: {rows} rows");
            seen.extend(all);
        }
    }
    assert!(seen.len() > 2 * Kind::quantized().len(), "rows never mattered");
}

/// Whether two blocks share k decides the order of sums: it follows from shapes and the card alone.
#[test]
fn blocks_share_k_whatever_the_rows() {
    let mut shared = BTreeSet::new();
    for (arch, sms) in [(90, 132), (90, 78), (100, 148)] {
        let card = Card { arch, sms, shared: 227 << 10 };
        let mut dev = DryRun::on_card(card);
        for (n, k) in [(5120, 6144), (5120, 17_408), (2048, 5120), (16_480, 5120), (40, 64)] {
            let mlx = Kind::Mlx(4, 64, ScaleDtype::Bf16);
            let op = build(&mut Builder::new(&mut dev), mlx, 64, n, k, ActDtype::I8);
            let split = |rows| splits(&op, &card, rows);
            let one = split(1);
            assert_eq!(one.len(), 1, "one product for one row");
            shared.insert(format!("{one:?}"));
            for rows in 2..=64 {
                let some = split(rows);
                assert!(some.iter().all(|s| *s == one[0]), "{n} x {k}, sm_{arch}: {rows} rows");
            }
        }
    }
    assert_eq!(shared.len(), 2, "some share k and some do not: {shared:?}");
}

/// Whether blocks share k, for each product of a round.
fn splits(op: &Linear, card: &Card, rows: usize) -> Vec<Arg> {
    let mut plan = Plan::default();
    Linear { rows, ..*op }.cuda(card, &mut plan).expect("a plan");
    let products = plan.launches().iter().filter(|l| l.args.as_slice().len() == 19);
    products.map(|l| l.args.as_slice()[6]).collect()
}

fn in_parts(kind: Kind, (n, k): (usize, usize), cuts: &[usize]) {
    on_each_device("linear of a prompt in parts", |label, dev| {
        let mut run = |cuts: &[usize], early: usize| {
            let rows = cuts.iter().sum();
            let op = build(&mut Builder::new(dev), kind, rows, n, k, ActDtype::I8);
            let (all, part, mut first) = (op.x, op.parts[0], 0);
            for &rows in cuts {
                let from = first - early.min(first);
                let x = Act { buf: all.buf.rows(from, rows, all.row_bytes()), ..all };
                let out = part.out.rows(first, rows, 4 * n);
                dev.run(&Linear::new(x, rows, Pass::Prompt, &[LinearPart { out, ..part }]));
                first += rows;
            }
            match dev.sync() {
                Err(DeviceError::Unsupported(why)) => return Err(why),
                other => other.expect("the passes"),
            }
            let mut bits = vec![0u8; part.out.bytes];
            dev.read(part.out, &mut bits);
            Ok(bits)
        };
        let whole = run(&[cuts.iter().sum()], 0)?;
        assert!(run(cuts, 0)? == whole, "{label}: {kind:?} {n}x{k} in {cuts:?}");
        // A part that begins a row too early must show.
        assert!(run(cuts, 1)? != whole, "{label}: {kind:?} {n}x{k} in {cuts:?}, early");
        Ok(())
    });
}

/// More than the processors of a large card hold sums for at a time.
#[cfg_attr(test, test)]
fn more_outputs_than_a_pass() {
    let kind = Kind::Mlx(4, 64, ScaleDtype::Bf16);
    // The last: a ring of few slots that goes round many times.
    for (rows, n, k) in [(1, 39_000, 64), (20, 12_000, 64), (40, 8_500, 1_152)] {
        let name = format!("linear {rows}x{n}x{k}");
        conformance(&name, rounded(), |b| build(b, kind, rows, n, k, ActDtype::I8));
    }
}

/// What `products_of_exact_weights` relies on, and its arm that must fail: whoever takes the scale or the bias of another output or
/// group, or one for the other, gets other sums.
#[test]
fn exact_weights_are_exact_and_their_scales_count() {
    let mut dev = DryRun::new(ActDtype::I8);
    let mut b = Builder::new(&mut dev);
    for kind in Kind::quantized() {
        let (n, k) = (2 * TILE, inputs(kind, EXACT.1));
        let sample = exact_sample(&mut b, kind, n, k);
        let x = exact_inputs(&mut b, 1, k);
        for o in 0..n {
            let weights = sample.source().dequantize_row(n, k, o).expect("a row");
            let rounds = |w: &&f32| half::bf16::from_f32(**w).to_f32() != **w;
            assert_eq!(weights.iter().find(rounds), None, "{kind:?}");
            // Terms are multiples of a power of two. The bits of 2^23 of these are kept whatever they are added to, in matrix units, too.
            let bits = weights.iter().fold(0, |bits, w| bits | (64.0 * w) as i32);
            let most: f32 = weights.iter().zip(&x).map(|(w, x)| (64.0 * w * x).abs()).sum();
            assert!(most < (1u32 << (23 + bits.trailing_zeros())) as f32, "{kind:?}: {most}");
        }

        let (format, packed) = sample.pack(TileOrder::Vectors, 1);
        let layout = super::layout::Layout::of(format).expect("quantised");
        let tile_bytes = layout.tile_bytes(k).expect("whole groups");
        let groups = k / layout.group;
        let params = |o: usize, g: usize| {
            layout.params(&packed[o / TILE * tile_bytes..], o % TILE, g.min(groups - 1))
        };
        let zero = if layout.symmetric { layout.zero() } else { 0 };
        let product = |o: usize, pick: &dyn Fn(usize, usize) -> (f32, f32)| -> f32 {
            let weight = |i: usize| {
                let code = layout.code(&packed[o / TILE * tile_bytes..], o % TILE, i);
                let (scale, bias) = pick(o, i / layout.group);
                scale * (i32::from(code) - zero) as f32 + bias
            };
            x.iter().enumerate().map(|(i, x)| x * weight(i)).sum()
        };
        let check = |what: &str, pick: &dyn Fn(usize, usize) -> (f32, f32)| {
            let moved = (0..n).filter(|&o| product(o, pick) != product(o, &params)).count();
            assert!(10 * moved > 9 * n, "{kind:?}, {what}: {moved} of {n} outputs");
        };
        for (output, group) in [(1, 0), (8, 0), (16, 0), (TILE, 0), (0, 1)] {
            let other = |o: usize, g: usize| params(o ^ output, g ^ group);
            let what = format!("of output ^ {output}, group ^ {group}");
            check(&format!("scale {what}"), &|o, g| (other(o, g).0, params(o, g).1));
            if !layout.symmetric {
                check(&format!("bias {what}"), &|o, g| (params(o, g).0, other(o, g).1));
            }
        }
        if !layout.symmetric {
            check("one for the other", &|o, g| (params(o, g).1, params(o, g).0));
        }
    }
}

/// The arm that must fail: the harness tells f64 sums from f32 ones.
#[test]
#[should_panic(expected = "differs at byte")]
fn exactness_is_not_vacuous() {
    conformance("f32", Tolerance::exact(), |b| {
        build(b, Kind::Mlx(4, 64, ScaleDtype::Bf16), 2, 64, 576, ActDtype::F32)
    });
}

#[test]
fn refuses_what_kernels_cannot_do() {
    let mut dev = DryRun::new(ActDtype::I8);
    let mut b = Builder::new(&mut dev);
    let good = build(&mut b, Kind::Mlx(4, 64, ScaleDtype::Bf16), 4, 40, 128, ActDtype::I8);
    assert!(good.check().is_ok());
    let with = |change: &dyn Fn(&mut Linear)| {
        let mut op = good;
        change(&mut op);
        assert!(op.check().is_err(), "{op:?}");
    };
    with(&|op| op.rows = 5);
    with(&|op| op.rows = usize::MAX);
    with(&|op| op.x.width = 64);
    with(&|op| op.parts[0].weight.n = 65);
    with(&|op| op.parts[0].weight.n = 0);
    with(&|op| op.parts[0].weight.n = usize::MAX);
    with(&|op| op.parts[0].weight.k = 64);
    with(&|op| op.parts[0].weight.buf.bytes -= 1);
    with(&|op| op.parts[0].out.bytes -= 4);
    let formats = [
        (crate::Codes::U4, 48, ScaleDtype::Bf16),
        (crate::Codes::U4, 128, ScaleDtype::TwoLevel),
        (crate::Codes::Iq4, 64, ScaleDtype::F16),
    ];
    for (codes, group, scale) in formats {
        with(&|op| op.parts[0].weight.format = Format::Affine { codes, group, scale });
    }
}

#[test]
fn packed_weights_are_the_checkpoint_s() {
    let mut dev = DryRun::new(ActDtype::I8);
    let mut b = Builder::new(&mut dev);
    for kind in Kind::quantized() {
        let (n, k) = (37, 2 * kind.unit());
        let sample = sample(&mut b, kind, n, k);
        for order in [TileOrder::Vectors, TileOrder::Fragments] {
            let (format, packed) = sample.pack(order, 1);
            assert_eq!(sample.pack(order, 7), (format, packed.clone()), "{kind:?}");
            let layout = super::layout::Layout::of(format).expect("quantised");
            for row in 0..n {
                let tile = layout.tile_bytes(k).expect("whole groups");
                let tile = &packed[row / TILE * tile..][..tile];
                let want = sample.source().dequantize_row(n, k, row).expect("a row");
                for (i, want) in want.into_iter().enumerate() {
                    let got = match order {
                        TileOrder::Vectors => layout.weight(tile, row % TILE, i),
                        TileOrder::Fragments => {
                            super::fragments::weight(&layout, tile, row % TILE, i)
                        }
                    };
                    assert_eq!(got.to_bits(), want.to_bits(), "{kind:?} {order:?} [{row}, {i}]");
                }
            }
        }
    }
}

#[test]
fn tiny_scales_become_zero() {
    let mut sample = codes(1, 64, |_, _| 3);
    sample.scales = 1e-31f32.to_le_bytes().to_vec();
    sample.biases = 0.25f32.to_le_bytes().to_vec();
    assert_eq!(sample.source().dequantize_row(1, 64, 0).expect("a row"), [0.25; 64]);
}

#[test]
fn pack_names_what_is_wrong() {
    let sample = codes(3, 128, |_, _| 1);
    let source = sample.source();
    let mut out = vec![0; 4096];
    let piece =
        |offset, out: &mut [u8]| source.pack_piece(TileOrder::Vectors, (3, 128), offset, out);
    assert!(matches!(piece(1, &mut out), Err(PackError::Piece { offset: 1, .. })));
    assert!(matches!(piece(0, &mut out[..7]), Err(PackError::Piece { bytes: 7, .. })));
    assert!(matches!(piece(usize::MAX, &mut out), Err(PackError::Piece { .. })));
    assert_eq!(source.check(3, 100), Err(PackError::Inputs { k: 100, unit: 64 }));
    let size = |what| move |e: PackError| matches!(e, PackError::Size { what: w, .. } if w == what);
    assert!(source.check(4, 128).is_err_and(size("codes")));
    assert!(source.check(usize::MAX, 128).is_err_and(size("codes")));
    let Source::Mlx { codes, scales, biases, .. } = source else { panic!("an MLX sample") };
    let mlx =
        |bits, group| Source::Mlx { bits, group, scale: ScaleDtype::Bf16, codes, scales, biases };
    assert!(mlx(4, 64).check(3, 128).is_err_and(size("scales")));
    assert!(matches!(mlx(7, 64).format(), Err(PackError::Unsupported { found: 7, .. })));
    assert!(matches!(mlx(4, 16).format(), Err(PackError::Unsupported { found: 16, .. })));
    assert!(source.dequantize_row(3, 128, 3).is_err());
}

#[test]
fn ggml_types_by_number() {
    for ty in GgmlType::ALL {
        assert_eq!(GgmlType::from_id(ty.id()), Some(ty));
    }
    assert_eq!(GgmlType::from_id(39), None);
}
