//! Cases every device must pass.

use super::AttnMix;
use crate::attention::SPLIT_PAGES;
use crate::attention::cases::{Lane, Shape, lane, pool, seen};
use crate::kernel::{Card, Plan};
use crate::testing::{Builder, Tolerance, conformance, on_each_device, row_invariance};
use crate::{
    ActDtype, Attention, AttnPrepare, Device, DeviceError, HeadGate, KvDtype, LaneStep, Lanes, Op,
    PAGE_TOKENS, Pass, Queries, Rope, RopePairing, Unsupported,
};

crate::testing::cases!(
    agrees_with_the_definition,
    geometries,
    windows_and_blocks,
    has_the_bits_of_its_parts,
    a_row_does_not_depend_on_its_neighbours,
    bits_do_not_depend_on_scratch,
    int8_pages,
);

const SPLIT: u32 = (SPLIT_PAGES * PAGE_TOKENS) as u32;

/// The rest of the shape.
#[derive(Clone, Copy, Debug)]
struct Form {
    gated: bool,
    norms: bool,
    rope_dims: usize,
    pairing: RopePairing,
}

const FORM: Form = Form { gated: true, norms: true, rope_dims: 16, pairing: RopePairing::Halves };
const SHAPE: Shape =
    Shape { heads: 6, kv_heads: 2, dim: 64, causal: true, window: None, kv: KvDtype::Bf16 };

fn build(b: &mut Builder, shape: Shape, form: Form, list: &[Lane]) -> AttnMix {
    let mix = build_uncompared(b, shape, form, list);
    b.updated_pages(&mix.prepare.kv);
    mix
}

/// Without a look at the pages.
fn build_uncompared(b: &mut Builder, shape: Shape, form: Form, list: &[Lane]) -> AttnMix {
    let Shape { heads, kv_heads, dim, causal, window, .. } = shape;
    let Form { gated, norms, rope_dims, pairing } = form;
    let kv = pool(b, shape, &seen(shape, list));
    let step =
        |&Lane { slot, pos, rows }: &Lane| LaneStep { rows, pos, slot, ..Default::default() };
    let lanes = b.lanes(list.iter().map(step));
    let rows = lanes.rows;
    let scratch = b.bytes(&vec![0xFF; Attention::scratch_bytes(rows, (heads, kv_heads), dim)]);
    let width = heads * dim;
    // Working memory, poisoned: whoever reads it has to have written it.
    let rotated = b.f32(&vec![f32::NAN; rows * width]);
    let mixed = b.f32(&vec![f32::NAN; rows * width]);
    let freq: Vec<f32> =
        (0..rope_dims / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / rope_dims as f32)).collect();
    let rope = Rope { inv_freq: b.f32(&freq), dims: rope_dims, pairing };
    b.reseed(1);
    let q_norm = norms.then(|| b.normal(dim, 1.0));
    let k_norm = norms.then(|| b.normal(dim, 1.0));
    let stride = if gated { 2 * dim } else { dim };
    b.reseed(2);
    let q = b.normal(rows * heads * stride, 1.0);
    b.reseed(3);
    let k = b.normal(rows * kv_heads * dim, 1.0);
    b.reseed(4);
    let v = b.normal(rows * kv_heads * dim, 1.0);
    let dtype = if width.is_multiple_of(64) { ActDtype::I8 } else { ActDtype::F32 };
    let out = b.out_act("out", rows, width, dtype);
    let scale = (dim as f32).powf(-0.5);
    AttnMix {
        prepare: AttnPrepare {
            queries: Some(Queries { q, stride, norm: q_norm, heads, out: rotated }),
            k,
            v,
            k_norm,
            rope,
            kv,
            lanes,
            eps: 1e-6,
        },
        attention: Attention {
            q: rotated,
            kv,
            out: mixed,
            scratch,
            lanes,
            heads,
            scale,
            causal,
            window,
            pass: Pass::Round,
        },
        gate: HeadGate { x: mixed, q_gate: gated.then_some(q), out, rows, heads, dim },
    }
}

fn check(shape: Shape, form: Form, list: &[Lane]) {
    // A unit in the last place of bf16: the norms' last bits may tip a rounding of a key. In int8 they may tip a
    // step of the scale.
    let rel = if shape.kv == KvDtype::Int8 { 1.0 / 32.0 } else { 1.0 / 128.0 };
    let tolerance = Tolerance::relative(rel).rounded_elsewhere();
    let label = format!("attn_mix {shape:?} {form:?} {list:?}");
    conformance(&label, tolerance, |b| build(b, shape, form, list));
}

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    let lists: [&[Lane]; 9] = [
        &[lane(0, 0, 1)],
        &[lane(0, 0, 8)],
        &[lane(1, 60, 8)],
        &[lane(2, 63, 1)],
        &[lane(2, SPLIT - 3, 7)],
        &[lane(0, SPLIT, 5)],
        &[lane(1, 3 * SPLIT + 5, 8)],
        &[lane(2, 3, 8), lane(0, 2 * SPLIT - 2, 3), lane(1, 0, 0), lane(3, 127, 1)],
        // More rows of a lane than one item of work has: the parts.
        &[lane(0, SPLIT - 20, 70)],
    ];
    for list in lists {
        check(SHAPE, FORM, list);
    }
}

#[cfg_attr(test, test)]
fn geometries() {
    for (heads, kv_heads) in [(1, 1), (3, 1), (9, 3), (16, 2)] {
        check(Shape { heads, kv_heads, dim: 16, ..SHAPE }, FORM, &[lane(0, 60, 5)]);
    }
    let (halves, adjacent) = (RopePairing::Halves, RopePairing::Adjacent);
    for (dim, rope_dims, pairing) in [
        (16, 0, halves),
        (16, 16, adjacent),
        (48, 14, halves),
        (48, 48, halves),
        (80, 20, adjacent),
        (80, 80, halves),
        (128, 128, halves),
        (256, 64, halves),
    ] {
        for on in [true, false] {
            let form = Form { gated: on, norms: on, rope_dims, pairing };
            check(Shape { dim, ..SHAPE }, form, &[lane(1, 61, 4)]);
        }
    }
}

#[cfg_attr(test, test)]
fn windows_and_blocks() {
    for causal in [true, false] {
        for window in [None, Some(1), Some(5), Some(64), Some(300)] {
            let shape = Shape { dim: 16, causal, window, ..SHAPE };
            for (pos, rows) in [(0, 8), (60, 8), (SPLIT - 2, 8), (2 * SPLIT + 30, 7)] {
                check(shape, FORM, &[lane(0, pos, rows)]);
            }
        }
    }
}

/// A step of int8 is what the norms' last bits may tip here.
#[cfg_attr(test, test)]
fn int8_pages() {
    let shape = Shape { kv: KvDtype::Int8, ..SHAPE };
    let lists: [&[Lane]; 4] = [
        &[lane(0, 0, 8)],
        &[lane(2, SPLIT - 3, 7)],
        &[lane(2, 3, 8), lane(0, 2 * SPLIT - 2, 3), lane(1, 0, 0), lane(3, 127, 1)],
        &[lane(0, SPLIT - 20, 70)],
    ];
    for list in lists {
        check(shape, FORM, list);
    }
    for (dim, rope_dims) in [(16, 0), (80, 20), (128, 128), (256, 64)] {
        let form = Form { rope_dims, ..FORM };
        check(Shape { dim, ..shape }, form, &[lane(1, 61, 4)]);
    }
}

/// Runs ops and returns the output, the keys and the values.
fn bytes(dev: &mut dyn Device, mix: &AttnMix, ops: &[&dyn Op]) -> Result<Vec<u8>, Unsupported> {
    ops.iter().for_each(|op| dev.run(*op));
    match dev.sync() {
        Err(DeviceError::Unsupported(why)) => return Err(why),
        done => done.expect("the ops"),
    }
    let (act, kv) = (mix.gate.out, mix.prepare.kv);
    let out = act.buf.slice(0, mix.gate.rows * act.row_bytes());
    let mut all = Vec::new();
    for buf in [out, kv.keys, kv.values] {
        let mut bytes = vec![0; buf.bytes];
        dev.read(buf, &mut bytes);
        all.extend(bytes);
    }
    Ok(all)
}

const LISTS: [&[Lane]; 4] = [
    // On a card, chunks of two lengths with this shape's heads.
    &[Lane { slot: 0, pos: 66 * 128 - 3, rows: 8 }],
    &[Lane { slot: 0, pos: 9 * SPLIT + 250, rows: 8 }],
    &[Lane { slot: 1, pos: 0, rows: 1 }],
    &[Lane { slot: 1, pos: 700, rows: 2 }, Lane { slot: 0, pos: 2 * SPLIT - 1, rows: 5 }],
];

#[cfg_attr(test, test)]
fn has_the_bits_of_its_parts() {
    for (shape, form) in [
        (SHAPE, FORM),
        (Shape { heads: 6, kv_heads: 1, dim: 256, ..SHAPE }, Form { rope_dims: 64, ..FORM }),
        (Shape { dim: 80, ..SHAPE }, Form { gated: false, ..FORM }),
        (Shape { kv: KvDtype::Int8, ..SHAPE }, FORM),
    ] {
        let unlike: Vec<Lane> =
            (0..70).map(|slot| lane(slot, 150 + slot, [1, 8, 3][slot as usize % 3])).collect();
        for list in LISTS.into_iter().chain([unlike.as_slice()]) {
            on_each_device("attn_mix and its parts", |label, dev| {
                let mix = build(&mut Builder::new(dev), shape, form, list);
                let got = bytes(dev, &mix, &[&mix])?;
                let apart = build(&mut Builder::new(dev), shape, form, list);
                let AttnMix { prepare, attention, gate } = &apart;
                let want = bytes(dev, &apart, &[prepare, attention, gate])?;
                let at = got.iter().zip(&want).position(|(a, b)| a != b);
                assert!(at.is_none(), "{label} {shape:?} {list:?}: byte {at:?}");
                Ok(())
            });
        }
    }
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    for (pos, window) in [(SPLIT - 5, None), (60, Some(20)), (3 * SPLIT - 4, None)] {
        let shape = Shape { heads: 9, kv_heads: 3, dim: 16, window, ..SHAPE };
        row_invariance("attn_mix", 9, |b, rows| {
            let mut op = build_uncompared(b, shape, FORM, &[lane(0, pos, 9)]);
            let step = LaneStep { rows: rows as u32, pos, ..Default::default() };
            let lanes = Lanes { step: b.pod(&[step]), count: 1, rows, max_rows: rows };
            let out = b.out_act("rows", rows, 9 * 16, ActDtype::F32);
            (op.prepare.lanes, op.attention.lanes) = (lanes, lanes);
            op.gate = HeadGate { rows, out, ..op.gate };
            op
        });
    }
}

#[cfg_attr(test, test)]
fn bits_do_not_depend_on_scratch() {
    for list in LISTS {
        on_each_device("attn_mix with little scratch", |label, dev| {
            let mut run = |fraction: usize| {
                let mut mix = build(&mut Builder::new(dev), SHAPE, FORM, list);
                let scratch = mix.attention.scratch;
                mix.attention.scratch = scratch.slice(0, (scratch.bytes * fraction / 32) & !3);
                bytes(dev, &mix, &[&mix])
            };
            let want = run(32)?;
            for fraction in [0, 1, 3] {
                assert!(run(fraction)? == want, "{label}: {fraction} of 32 of the scratch");
            }
            Ok(())
        });
    }
}

#[test]
fn refuses_parts_that_do_not_fit_together() {
    let mut host = crate::Host::new(crate::simd::Isa::Portable, 1);
    let good = build(&mut Builder::new(&mut host), SHAPE, FORM, &[lane(0, 3, 4)]);
    good.check().expect("the geometry of the other cases");
    let cases: [&dyn Fn(&mut AttnMix); 8] = [
        &|op| op.attention.pass = Pass::Prompt,
        &|op| op.prepare.queries = None,
        &|op| op.attention.q = op.attention.out,
        &|op| op.gate.x = op.attention.q,
        &|op| op.gate.q_gate = None,
        &|op| op.attention.kv.values = op.attention.kv.keys,
        &|op| op.gate.rows = 3,
        &|op| op.attention.lanes.rows = 3,
    ];
    for (i, change) in cases.iter().enumerate() {
        let mut op = good;
        change(&mut op);
        assert!(op.check().is_err(), "change {i}");
    }
}

/// None of the three ops may run kernels that would take int8 pages for bf16.
#[test]
fn no_kernel_of_a_card_reads_int8_pages() {
    let card = Card { arch: 90, sms: 132, shared: 227 << 10 };
    let mut dry = crate::DryRun::on_card(card);
    for kv in [KvDtype::Int8, KvDtype::Bf16] {
        let mix = build(&mut Builder::new(&mut dry), Shape { kv, ..SHAPE }, FORM, &[lane(0, 3, 4)]);
        let parts: [&dyn Op; 3] = [&mix, &mix.prepare, &mix.attention];
        for op in parts {
            let mut plan = Plan::default();
            match op.cuda(&card, &mut plan) {
                Ok(()) => assert_eq!(kv, KvDtype::Bf16, "{}", op.name()),
                Err(why) => {
                    assert!(kv == KvDtype::Int8 && why.to_string().contains("--kv bf16"), "{why}");
                    assert_eq!(plan.launches().len(), 0);
                }
            }
        }
    }
}
