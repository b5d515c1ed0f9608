//! Cases every device must pass.

use crate::simd::Isa;
use crate::testing::{Builder, Tolerance, conformance, row_invariance};
use crate::{
    AttnPrepare, Buf, Device, Host, KvDtype, KvPool, LaneStep, Lanes, Op, PAGE_TOKENS, Queries,
    Rope, RopePairing,
};

crate::testing::cases!(
    agrees_with_the_definition,
    geometries,
    queries_are_accurate,
    a_quarter_turn_by_hand,
    a_context_only_pass_fills_the_cache,
    a_row_does_not_depend_on_its_neighbours,
    int8_pages,
    int8_by_hand,
);

/// One lane's rows: slot, position, rows.
type Lane = (u32, u32, u32);

#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    gated: bool,
    norms: bool,
    rope_dims: usize,
    pairing: RopePairing,
    kv: KvDtype,
}

const SHAPE: Shape = Shape {
    heads: 4,
    kv_heads: 2,
    dim: 64,
    gated: true,
    norms: true,
    rope_dims: 32,
    pairing: RopePairing::Halves,
    kv: KvDtype::Bf16,
};

const SLOTS: usize = 3;
const MAX_PAGES: usize = 5;

fn lanes(b: &mut Builder, lanes: &[Lane]) -> Lanes {
    b.lanes(lanes.iter().map(|&(slot, pos, rows)| LaneStep {
        rows,
        pos,
        slot,
        ..LaneStep::default()
    }))
}

/// A pool of poisoned pages, handed to the slots in a scattered order.
fn pool(b: &mut Builder, kv_heads: usize, head_dim: usize, dtype: KvDtype) -> KvPool {
    let pages = SLOTS * MAX_PAGES;
    let bytes = vec![0xFF; pages * kv_heads * dtype.block_bytes(head_dim)];
    let table: Vec<u32> = (0..pages).map(|i| (7 * i % pages) as u32).collect();
    let (keys, values) = (b.bytes(&bytes), b.bytes(&bytes));
    let table = b.pod(&table);
    let pool = KvPool { keys, values, table, max_pages: MAX_PAGES, kv_heads, head_dim, dtype };
    b.updated_pages(&pool);
    pool
}

fn inv_freq(b: &mut Builder, dims: usize) -> Buf {
    let freq: Vec<f32> =
        (0..dims / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / dims as f32)).collect();
    b.f32(&freq)
}

fn build(b: &mut Builder, shape: Shape, list: &[Lane]) -> AttnPrepare {
    let Shape { heads, kv_heads, dim, gated, norms, rope_dims, pairing, kv } = shape;
    let lanes = lanes(b, list);
    let kv = pool(b, kv_heads, dim, kv);
    let rope = Rope { inv_freq: inv_freq(b, rope_dims), dims: rope_dims, pairing };
    b.reseed(1);
    let q_norm = norms.then(|| b.normal(dim, 1.0));
    let k_norm = norms.then(|| b.normal(dim, 1.0));
    let stride = if gated { 2 * dim } else { dim };
    b.reseed(2);
    let q = b.normal(lanes.rows * heads * stride, 2.0);
    b.reseed(3);
    let k = b.normal(lanes.rows * kv_heads * dim, 2.0);
    b.reseed(4);
    let v = b.normal(lanes.rows * kv_heads * dim, 1.0);
    let out = b.out_f32("q_out", lanes.rows * heads * dim);
    let queries = Some(Queries { q, stride, norm: q_norm, heads, out });
    AttnPrepare { queries, k, v, k_norm, rope, kv, lanes, eps: 1e-6 }
}

/// A unit in the last place of bf16: the norms' last bits may tip a rounding.
fn tolerance() -> Tolerance {
    Tolerance::relative(1.0 / 128.0)
}

/// One lane and several, at a page's beginning, over its end and within; one without rows.
const LISTS: [&[Lane]; 5] = [
    &[(0, 0, 1)],
    &[(1, 60, 8)],
    &[(2, 100, 130)],
    &[(2, 3, 17), (0, 64, 2), (1, 255, 1)],
    &[(0, 10, 0), (1, 0, 5)],
];

#[cfg_attr(test, test)]
fn agrees_with_the_definition() {
    for list in LISTS {
        conformance(&format!("attn_prepare {list:?}"), tolerance(), |b| build(b, SHAPE, list));
    }
}

#[cfg_attr(test, test)]
fn geometries() {
    for dim in [16, 64, 80, 128, 256] {
        for pairing in [RopePairing::Halves, RopePairing::Adjacent] {
            for rope_dims in [0, 2, 14, dim / 4, dim] {
                for (heads, kv_heads, gated, norms) in [(9, 3, true, true), (1, 1, false, false)] {
                    let kv = KvDtype::Bf16;
                    let shape =
                        Shape { heads, kv_heads, dim, gated, norms, rope_dims, pairing, kv };
                    let name = format!("attn_prepare dim {dim} rope {rope_dims} {pairing:?}");
                    conformance(&name, tolerance(), |b| build(b, shape, &[(1, 62, 4)]));
                }
            }
        }
    }
}

/// The queries alone, whose tolerance need not allow for bf16.
#[cfg_attr(test, test)]
fn queries_are_accurate() {
    conformance("queries", Tolerance::relative(2e-6), |b| {
        let mut op = build(b, SHAPE, &[(1, 60, 8)]);
        // Zero keys and values round to themselves.
        let zeros = vec![0.0; op.k.bytes / 4];
        (op.k, op.v) = (b.f32(&zeros), b.f32(&zeros));
        op
    });
}

#[cfg_attr(test, test)]
fn a_quarter_turn_by_hand() {
    for (pairing, want) in [
        (RopePairing::Halves, [-3.0, -4.0, 1.0, 2.0]),
        (RopePairing::Adjacent, [-2.0, 1.0, -4.0, 3.0]),
    ] {
        conformance("quarter turn", tolerance(), |b| {
            let kv = pool(b, 1, 16, KvDtype::Bf16);
            let mut head = [5.0; 16];
            head[..4].copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
            let k = b.f32(&head);
            let v = b.f32(&head);
            // Position 2 at a frequency of pi / 4 turns by a right angle.
            let inv_freq = b.f32(&[std::f32::consts::FRAC_PI_4; 2]);
            let rope = Rope { inv_freq, dims: 4, pairing };
            let q = b.f32(&head);
            let out = b.out_f32("q_out", 16);
            let queries = Some(Queries { q, stride: 16, norm: None, heads: 1, out });
            head[..4].copy_from_slice(&want);
            b.expect("q_out", &head);
            // The key lands in slot 2 of page 0 of the lane, which is page 0 of the pool.
            let poison = f32::from_bits(0xFFFF_0000);
            let mut keys = vec![poison; SLOTS * MAX_PAGES * 16 * PAGE_TOKENS];
            let mut values = keys.clone();
            for i in 0..16 {
                keys[KvPool::key_offset(2, i)] = head[i];
            }
            values[2 * 16..][..4].copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
            values[2 * 16 + 4..][..12].fill(5.0);
            b.expect("keys", &keys);
            b.expect("values", &values);
            let lanes = lanes(b, &[(0, 2, 1)]);
            AttnPrepare { queries, k, v, k_norm: None, rope, kv, lanes, eps: 0.0 }
        });
    }
}

#[cfg_attr(test, test)]
fn a_context_only_pass_fills_the_cache() {
    conformance("context rows", tolerance(), |b| {
        let op = build(b, SHAPE, &[(1, 62, 4)]);
        AttnPrepare { queries: None, ..op }
    });
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    row_invariance("attn_prepare", 17, |b, rows| {
        let mut op = build(b, SHAPE, &[(1, 55, rows as u32)]);
        // The pools of passes of different length differ; the next test compares them.
        (op.kv.keys, op.kv.values) = (copy_of(b, op.kv.keys), copy_of(b, op.kv.values));
        op
    });
}

fn copy_of(b: &mut Builder, buf: Buf) -> Buf {
    b.bytes(&vec![0; buf.bytes])
}

/// A step of int8: the norms' last bits may tip a rounding.
#[cfg_attr(test, test)]
fn int8_pages() {
    let tolerance = Tolerance::relative(1.0 / 32.0);
    let shape = Shape { kv: KvDtype::Int8, ..SHAPE };
    for list in LISTS {
        conformance(&format!("attn_prepare int8 {list:?}"), tolerance, |b| build(b, shape, list));
    }
    for dim in [16, 80, 128, 256] {
        for norms in [true, false] {
            let shape = Shape { dim, norms, rope_dims: 14, ..shape };
            let name = format!("attn_prepare int8 dim {dim} norms {norms}");
            conformance(&name, tolerance, |b| build(b, shape, &[(1, 62, 4)]));
        }
    }
}

/// Heads of zeros, of numbers too small and very large, and with what is no number: nothing is added up on the way
/// to the pages, so the definition's bytes are the only right ones.
#[cfg_attr(test, test)]
fn int8_by_hand() {
    conformance("int8 by hand", Tolerance::exact(), |b| {
        let dim = 16;
        let kv = pool(b, 1, dim, KvDtype::Int8);
        let mut heads: Vec<[f32; 16]> = vec![[0.0; 16], [1e-37; 16], [3e38; 16], [-0.0; 16]];
        heads.push(std::array::from_fn(|i| i as f32 - 7.5));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            heads.push(std::array::from_fn(|i| if i == 11 { bad } else { 1.0 }));
        }
        // 127 steps, halves of steps, and both signs.
        heads.push(std::array::from_fn(|i| [127.0, 0.5, 1.5, -2.5][i % 4]));
        let rows = heads.len();
        let all = b.f32(heads.as_flattened());
        let lanes = lanes(b, &[(1, 60, rows as u32)]);
        let rope = Rope { inv_freq: inv_freq(b, 0), dims: 0, pairing: RopePairing::Halves };
        AttnPrepare { queries: None, k: all, v: all, k_norm: None, rope, kv, lanes, eps: 0.0 }
    });
}

/// One pass of 17 rows leaves the pages of 17 passes of one row, bit for bit.
#[test]
fn pages_do_not_depend_on_the_pass() {
    for kv in [KvDtype::Bf16, KvDtype::Int8] {
        pages_of_any_pass(Shape { kv, ..SHAPE });
    }
}

fn pages_of_any_pass(shape: Shape) {
    let run = |one_by_one: bool| {
        let mut host = Host::new(Isa::detect(), 2);
        let mut b = Builder::new(&mut host);
        let op = build(&mut b, shape, &[(1, 55, 17)]);
        let passes: Vec<Lanes> = (0..17)
            .map(|r| {
                let step =
                    LaneStep { row0: r, rows: 1, pos: 55 + r, slot: 1, ..Default::default() };
                Lanes { step: b.pod(&[step]), count: 1, rows: 17, max_rows: 1 }
            })
            .collect();
        if one_by_one {
            passes.into_iter().for_each(|lanes| host.run(&AttnPrepare { lanes, ..op }));
        } else {
            host.run(&op);
        }
        host.sync().unwrap();
        let read = |buf: Buf| host.mem().get::<u8>(buf).to_vec();
        [read(op.kv.keys), read(op.kv.values), read(op.queries.unwrap().out)]
    };
    assert!(run(false) == run(true));
}

#[test]
fn refuses_what_it_cannot_do() {
    let mut host = Host::new(Isa::Portable, 1);
    let mut b = Builder::new(&mut host);
    let good = build(&mut b, SHAPE, &[(0, 0, 2)]);
    assert!(good.check().is_ok());
    let rope = |dims| Rope { dims, ..good.rope };
    let kv = good.kv;
    let queries = good.queries.unwrap();
    for bad in [
        AttnPrepare { rope: rope(33), ..good },
        AttnPrepare { rope: rope(66), ..good },
        AttnPrepare { rope: rope(30), ..good },
        AttnPrepare { kv: KvPool { head_dim: 72, ..kv }, ..good },
        AttnPrepare { kv: KvPool { head_dim: 272, ..kv }, ..good },
        AttnPrepare { kv: KvPool { head_dim: usize::MAX - 15, ..kv }, ..good },
        AttnPrepare { kv: KvPool { kv_heads: usize::MAX, ..kv }, ..good },
        AttnPrepare { kv: KvPool { kv_heads: 0, ..kv }, ..good },
        AttnPrepare { kv: KvPool { max_pages: 0, ..kv }, ..good },
        AttnPrepare { kv: KvPool { max_pages: 4, ..kv }, ..good },
        AttnPrepare { kv: KvPool { values: kv.values.slice(0, 64), ..kv }, ..good },
        AttnPrepare { k: good.k.slice(0, 64), ..good },
        AttnPrepare { k_norm: Some(good.k), ..good },
        AttnPrepare { lanes: Lanes { rows: 3, ..good.lanes }, ..good },
        AttnPrepare { lanes: Lanes { count: 2, ..good.lanes }, ..good },
        AttnPrepare { lanes: Lanes { max_rows: 3, ..good.lanes }, ..good },
        AttnPrepare { queries: Some(Queries { stride: 96, ..queries }), ..good },
        AttnPrepare { queries: Some(Queries { heads: 5, ..queries }), ..good },
    ] {
        assert!(bad.check().is_err(), "{bad:?}");
    }
}
