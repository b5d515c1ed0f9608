//! Cases every device must pass.

use super::SPLIT_PAGES;
use crate::kv::Part;
use crate::simd::Isa;
use crate::testing::{Builder, Tolerance, conformance, on_each_device, row_invariance};
use crate::{
    Attention, Buf, Device, DeviceError, Host, KvDtype, KvPool, LaneStep, Lanes, Op, PAGE_TOKENS,
    Pass, Unsupported,
};

crate::testing::cases!(
    head_maps_and_dims,
    rows_and_edges,
    several_lanes,
    more_items_than_blocks,
    windows_and_blocks,
    a_row_alone_returns_its_value,
    equal_scores_average_the_values,
    the_largest_score_takes_all,
    a_row_does_not_depend_on_its_neighbours,
    bits_do_not_depend_on_scratch,
    a_row_does_not_depend_on_a_border_of_chunks,
    poison_stays_where_it_is_seen,
    prompts,
    prompts_may_be_cut_anywhere,
    poison_among_many_rows_stays_where_it_is_seen,
    int8_pages,
    int8_by_hand,
    int8_extremes,
);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane {
    pub(crate) slot: u32,
    pub(crate) pos: u32,
    pub(crate) rows: u32,
}

pub(crate) fn lane(slot: u32, pos: u32, rows: u32) -> Lane {
    Lane { slot, pos, rows }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) dim: usize,
    pub(crate) causal: bool,
    pub(crate) window: Option<usize>,
    pub(crate) kv: KvDtype,
}

pub(crate) const SHAPE: Shape =
    Shape { heads: 6, kv_heads: 2, dim: 64, causal: true, window: None, kv: KvDtype::Bf16 };

const KINDS: [KvDtype; 2] = [KvDtype::Bf16, KvDtype::Int8];

fn bf16(x: f32) -> u16 {
    half::bf16::from_f32(x).to_bits()
}

/// A pool whose pages are NaN except for what the lanes may see: every slot's positions below
/// `ends[slot]`, from the first key that any row's window reaches. Contents depend on the slot,
/// the position and the head alone. The pages of slots are scattered over the pool.
pub(crate) fn pool(b: &mut Builder, shape: Shape, seen: &[(usize, usize)]) -> KvPool {
    let Shape { kv_heads, dim, .. } = shape;
    let max_pages = seen.iter().map(|s| s.1.div_ceil(PAGE_TOKENS)).max().unwrap_or(0) + 1;
    let pages = seen.len() * max_pages + 3;
    // No factor in common with the number of pages: a permutation.
    let step = if pages.is_multiple_of(7) { pages - 1 } else { 7 };
    let table: Vec<u32> = (0..seen.len() * max_pages).map(|i| (step * i % pages) as u32).collect();
    let mut pool = KvPool {
        keys: Buf { alloc: 0, offset: 0, bytes: 0 },
        values: Buf { alloc: 0, offset: 0, bytes: 0 },
        table: b.pod(&table),
        max_pages,
        kv_heads,
        head_dim: dim,
        dtype: shape.kv,
    };
    let mut keys = vec![0xFF_u8; pages * pool.page_bytes()];
    let mut values = keys.clone();
    let (mut key, mut value) = (vec![0.0; dim], vec![0.0; dim]);
    for (slot, &(start, end)) in seen.iter().enumerate() {
        for pos in start..end {
            b.reseed((slot * 1_000_003 + pos) as u64 + 77);
            let page = table[slot * max_pages + pos / PAGE_TOKENS] as usize;
            for head in 0..kv_heads {
                for i in 0..dim {
                    (key[i], value[i]) = (3.0 * (b.uniform() - 0.5), b.uniform() - 0.4);
                }
                put(&pool, &mut keys, Part::Key, (page, head), pos, &key);
                put(&pool, &mut values, Part::Value, (page, head), pos, &value);
            }
        }
    }
    (pool.keys, pool.values) = (b.bytes(&keys), b.bytes(&values));
    pool
}

/// Puts a key or value into the bytes of all pages.
fn put(
    pool: &KvPool,
    all: &mut [u8],
    part: Part,
    (page, head): (usize, usize),
    pos: usize,
    x: &[f32],
) {
    let bytes = pool.dtype.block_bytes(pool.head_dim);
    let block = &mut all[(page * pool.kv_heads + head) * bytes..][..bytes];
    // With the alignment of scales, which the bytes have by chance only.
    let mut words = bytemuck::allocation::pod_collect_to_vec::<u8, u32>(block);
    pool.put(bytemuck::cast_slice_mut(&mut words), part, pos, x);
    block.copy_from_slice(bytemuck::cast_slice(&words));
}

/// First and end position that each slot's lanes may see.
pub(crate) fn seen(shape: Shape, list: &[Lane]) -> Vec<(usize, usize)> {
    let slots = list.iter().map(|l| l.slot + 1).max().unwrap_or(0);
    let range = |slot| {
        let lane = list.iter().find(|l| l.slot == slot && l.rows > 0)?;
        let start = shape.window.map_or(0, |w| (lane.pos as usize + 1).saturating_sub(w));
        Some((start, (lane.pos + lane.rows) as usize))
    };
    (0..slots).map(|slot| range(slot).unwrap_or((0, 0))).collect()
}

/// Of a round.
pub(crate) fn build(b: &mut Builder, shape: Shape, list: &[Lane]) -> Attention {
    let Shape { heads, kv_heads, dim, causal, window, .. } = shape;
    let kv = pool(b, shape, &seen(shape, list));
    let step =
        |&Lane { slot, pos, rows }: &Lane| LaneStep { rows, pos, slot, ..Default::default() };
    let lanes = b.lanes(list.iter().map(step));
    let rows = lanes.rows;
    let scratch = b.bytes(&vec![0xFF; Attention::scratch_bytes(rows, (heads, kv_heads), dim)]);
    let out = b.out_f32("out", rows * heads * dim);
    b.reseed(5);
    let q = b.normal(rows * heads * dim, 1.0);
    let scale = (dim as f32).powf(-0.5);
    let pass = Pass::Round;
    Attention { q, kv, out, scratch, lanes, heads, scale, causal, window, pass }
}

fn build_prompt(b: &mut Builder, shape: Shape, list: &[Lane]) -> Attention {
    Attention { pass: Pass::Prompt, ..build(b, shape, list) }
}

fn check(shape: Shape, list: &[Lane]) {
    check_in(Pass::Round, shape, list);
}

fn check_in(pass: Pass, shape: Shape, list: &[Lane]) {
    let tolerance = Tolerance::relative(5e-6).rounded_elsewhere();
    let label = format!("attention {pass:?} {shape:?} {list:?}");
    conformance(&label, tolerance, |b| Attention { pass, ..build(b, shape, list) });
}

const SPLIT: u32 = (SPLIT_PAGES * PAGE_TOKENS) as u32;

#[cfg_attr(test, test)]
fn head_maps_and_dims() {
    for (heads, kv_heads) in [(1, 1), (3, 1), (9, 3), (8, 2), (6, 1), (16, 2), (16, 1), (5, 5)] {
        check(Shape { heads, kv_heads, dim: 16, ..SHAPE }, &[lane(0, 60, 9)]);
    }
    for dim in [16, 32, 48, 64, 80, 96, 112, 128, 256] {
        check(Shape { dim, ..SHAPE }, &[lane(1, 60, 7)]);
    }
}

#[cfg_attr(test, test)]
fn rows_and_edges() {
    let shape = Shape { dim: 16, ..SHAPE };
    for rows in [1, 2, 3, 5, 7, 8, 13, 16, 17, 130] {
        check(shape, &[lane(0, 0, rows)]);
        check(shape, &[lane(0, SPLIT - 3, rows)]);
    }
    for pos in [62, 63, 64, 65, SPLIT - 1, SPLIT, 3 * SPLIT + 5] {
        check(shape, &[lane(2, pos, 1)]);
        check(shape, &[lane(2, pos, 3)]);
    }
}

#[cfg_attr(test, test)]
fn several_lanes() {
    let shape = Shape { dim: 32, ..SHAPE };
    check(shape, &[lane(2, 3, 8), lane(0, 300, 1), lane(1, 0, 0), lane(3, 127, 17)]);
    check(Shape { causal: false, ..shape }, &[lane(1, 64, 8), lane(0, 5, 8)]);
}

/// Lanes of one row and of several in turns, so that a block's items are not alike.
#[cfg_attr(test, test)]
fn more_items_than_blocks() {
    let unlike: Vec<Lane> =
        (0..150).map(|slot| lane(slot, 150 + slot, [1, 8, 3][slot as usize % 3])).collect();
    check(Shape { dim: 16, ..SHAPE }, &unlike);
}

#[cfg_attr(test, test)]
fn windows_and_blocks() {
    for causal in [true, false] {
        for window in [1, 5, 64, 100] {
            let shape = Shape { dim: 16, causal, window: Some(window), ..SHAPE };
            for (pos, rows) in [(0, 8), (60, 8), (127, 1), (SPLIT - 2, 70), (2 * SPLIT + 30, 17)] {
                check(shape, &[lane(0, pos, rows)]);
            }
        }
        check(Shape { dim: 16, causal, ..SHAPE }, &[lane(0, SPLIT + 60, 8)]);
    }
}

#[cfg_attr(test, test)]
fn a_row_alone_returns_its_value() {
    conformance("one key", Tolerance::exact(), |b| {
        let shape = Shape { heads: 2, kv_heads: 1, dim: 32, ..SHAPE };
        let op = build(b, shape, &[lane(0, 0, 1)]);
        let value: Vec<f32> = (0..32).map(|i| i as f32).collect();
        let mut values = vec![0xFFFF_u16; op.kv.values.bytes / 2];
        // The slot's first page is page 0 of the pool.
        values[..32].copy_from_slice(&value.iter().map(|&x| bf16(x)).collect::<Vec<_>>());
        b.expect("out", &[value.clone(), value].concat());
        Attention { kv: KvPool { values: b.pod(&values), ..op.kv }, ..op }
    });
}

#[cfg_attr(test, test)]
fn equal_scores_average_the_values() {
    conformance("average", Tolerance::relative(1e-6), |b| {
        let shape = Shape { heads: 1, kv_heads: 1, dim: 16, ..SHAPE };
        let op = build(b, shape, &[lane(0, 2, 1)]);
        let mut values = vec![0xFFFF_u16; op.kv.values.bytes / 2];
        for pos in 0..3 {
            values[16 * pos..][..16].fill(bf16([1.0, 2.0, 6.0][pos]));
        }
        b.expect("out", &[3.0; 16]);
        let q = b.f32(&[0.0; 16]);
        Attention { q, kv: KvPool { values: b.pod(&values), ..op.kv }, ..op }
    });
}

#[cfg_attr(test, test)]
fn the_largest_score_takes_all() {
    conformance("one hot", Tolerance::relative(1e-6), |b| {
        let shape = Shape { heads: 1, kv_heads: 1, dim: 16, ..SHAPE };
        let op = build(b, shape, &[lane(0, 70, 1)]);
        let (mut keys, mut values) =
            (vec![0; op.kv.keys.bytes / 2], vec![0; op.kv.values.bytes / 2]);
        // Position 65 lies in the slot's second page, the 8th of the pool's 6, counted round.
        let block = op.kv.page_offset(7 % 6, 0);
        keys[block + KvPool::key_offset(65, 3)] = bf16(1.0);
        values[block + 16..][..16].fill(bf16(-4.0));
        let mut q = [0.0; 16];
        q[3] = 1000.0;
        b.expect("out", &[-4.0; 16]);
        let kv = KvPool { keys: b.pod(&keys), values: b.pod(&values), ..op.kv };
        Attention { q: b.f32(&q), kv, ..op }
    });
}

#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_its_neighbours() {
    let cases = [(SPLIT - 9, None), (60, Some(20))];
    for ((pos, window), kv) in cases.into_iter().flat_map(|case| KINDS.map(|kv| (case, kv))) {
        let shape = Shape { heads: 9, kv_heads: 3, dim: 16, window, kv, ..SHAPE };
        row_invariance("attention", 18, |b, rows| {
            // The pool always holds all 18 rows' keys, so rows that a row can't see are there.
            let mut op = build(b, shape, &[lane(0, pos, 18)]);
            let step = LaneStep { rows: rows as u32, pos, ..Default::default() };
            op.lanes = Lanes { step: b.pod(&[step]), count: 1, rows, max_rows: rows };
            op.out = b.out_f32("rows", rows * 9 * 16);
            op
        });
    }
}

/// Positions from which a row's chunks are longer on a card: here the rows of a pass have chunks of two lengths.
#[cfg_attr(test, test)]
fn a_row_does_not_depend_on_a_border_of_chunks() {
    let shape = Shape { heads: 8, kv_heads: 8, dim: 16, ..SHAPE };
    // Windows that begin inside a chunk, and whose chunks have all lengths.
    check(Shape { window: Some(2048), ..shape }, &[lane(0, 2048 + 60, 3)]);
    check(Shape { window: Some(2500), ..shape }, &[lane(0, 4500, 8)]);
    check(Shape { causal: false, ..shape }, &[lane(0, 2048 - 4, 8)]);
    for (pos, rows) in [(2048 - 4, 7), (2 * 2048 - 1, 2)] {
        check(shape, &[lane(0, pos, rows)]);
        row_invariance("attention at a border", rows as usize, |b, rows_here| {
            let mut op = build(b, shape, &[lane(0, pos, rows)]);
            let step = LaneStep { rows: rows_here as u32, pos, ..Default::default() };
            op.lanes =
                Lanes { step: b.pod(&[step]), count: 1, rows: rows_here, max_rows: rows_here };
            op.out = b.out_f32("rows", rows_here * shape.heads * shape.dim);
            op
        });
    }
}

/// Runs an op and returns the output's bits.
fn bits(
    dev: &mut dyn Device,
    build: impl Fn(&mut Builder) -> Attention,
) -> Result<Vec<u32>, Unsupported> {
    let op = build(&mut Builder::new(dev));
    dev.run(&op);
    match dev.sync() {
        Err(DeviceError::Unsupported(why)) => return Err(why),
        other => other.expect("the op"),
    }
    let mut bits = vec![0; op.out.bytes / 4];
    dev.read(op.out, bytemuck::cast_slice_mut(&mut bits));
    Ok(bits)
}

/// What bf16 pages are swept over, in fewer steps: what comes after the loads is the same.
#[cfg_attr(test, test)]
fn int8_pages() {
    let shape = Shape { kv: KvDtype::Int8, dim: 16, ..SHAPE };
    for (heads, kv_heads) in [(1, 1), (9, 3), (16, 1), (5, 5)] {
        check(Shape { heads, kv_heads, ..shape }, &[lane(0, 60, 9)]);
    }
    for dim in [16, 32, 48, 64, 80, 96, 112, 128, 256] {
        check(Shape { dim, ..shape }, &[lane(1, 60, 7)]);
    }
    for rows in [1, 2, 3, 5, 8, 17, 130] {
        check(shape, &[lane(0, 0, rows)]);
        check(shape, &[lane(0, SPLIT - 3, rows)]);
    }
    for pos in [62, 63, 64, SPLIT - 1, SPLIT, 3 * SPLIT + 5] {
        check(shape, &[lane(2, pos, 1)]);
    }
    let lanes = [lane(2, 3, 8), lane(0, 300, 1), lane(1, 0, 0), lane(3, 127, 17)];
    check(Shape { dim: 32, ..shape }, &lanes);
    for causal in [true, false] {
        for window in [1, 5, 64, 100] {
            let shape = Shape { causal, window: Some(window), ..shape };
            for (pos, rows) in [(0, 8), (60, 8), (SPLIT - 2, 70)] {
                check(shape, &[lane(0, pos, rows)]);
            }
        }
    }
}

/// A pool of one lane's first page, with these keys and values.
fn first_page(b: &mut Builder, kv: KvPool, keys: &[&[f32]], values: &[&[f32]]) -> KvPool {
    let mut all = [vec![0xFF; kv.keys.bytes], vec![0xFF; kv.values.bytes]];
    for (pos, (key, value)) in keys.iter().zip(values).enumerate() {
        put(&kv, &mut all[0], Part::Key, (0, 0), pos, key);
        put(&kv, &mut all[1], Part::Value, (0, 0), pos, value);
    }
    KvPool { keys: b.bytes(&all[0]), values: b.bytes(&all[1]), ..kv }
}

/// A key that all others are much smaller than, whose value steps of a half represent as it is.
#[cfg_attr(test, test)]
fn int8_by_hand() {
    conformance("one hot in int8", Tolerance::relative(1e-6), |b| {
        let shape = Shape { heads: 1, kv_heads: 1, dim: 32, kv: KvDtype::Int8, ..SHAPE };
        let op = build(b, shape, &[lane(0, 2, 1)]);
        let value: Vec<f32> = (0..32).map(|i| if i == 0 { 63.5 } else { i as f32 / 2.0 }).collect();
        let (zeros, ones, mut one) = ([0.0; 32], [1.0; 32], [0.0; 32]);
        one[3] = 1.0;
        let kv = first_page(b, op.kv, &[&zeros, &one, &zeros], &[&ones, &value, &ones]);
        let mut q = [0.0; 32];
        q[3] = 1000.0;
        b.expect("out", &value);
        Attention { q: b.f32(&q), kv, ..op }
    });
}

/// Zeros, and magnitudes that no other format of a byte would hold side by side.
#[cfg_attr(test, test)]
fn int8_extremes() {
    for largest in [0.0f32, 1e-44, 1e-30, 1.0, 1e30, 3e38] {
        let label = format!("int8 of {largest:e}");
        conformance(&label, Tolerance::relative(1e-6), |b| {
            let shape = Shape { heads: 1, kv_heads: 1, dim: 16, kv: KvDtype::Int8, ..SHAPE };
            let op = build(b, shape, &[lane(0, 1, 1)]);
            // Equal scores: the key is 0, or the query.
            let (zeros, key) = ([0.0; 16], [largest.min(1e30); 16]);
            let value = [largest; 16];
            let kv = first_page(b, op.kv, &[&key, &zeros], &[&value, &zeros]);
            let half = if largest < 1e-40 { 0.0 } else { largest / 2.0 };
            b.expect("out", &[half; 16]);
            Attention { q: b.f32(&zeros), kv, ..op }
        });
    }
}

/// Several splits, and lanes of different lengths. The last has chunks of two lengths on a card.
fn long_lists() -> [Vec<Lane>; 3] {
    [
        vec![lane(0, 9 * SPLIT + 3, 8)],
        vec![lane(1, 700, 2), lane(0, 2000, 20)],
        vec![lane(1, 66 * 128 - 3, 5)],
    ]
}

fn with_scratch(list: &[Lane], kv: KvDtype, fraction: usize) -> impl Fn(&mut Builder) -> Attention {
    move |b: &mut Builder| {
        let shape = Shape { heads: 8, kv_heads: 2, dim: 48, kv, ..SHAPE };
        let op = build(b, shape, list);
        let scratch = op.scratch.slice(0, (op.scratch.bytes * fraction / 32) & !3);
        Attention { scratch, ..op }
    }
}

/// Scratch for none, few or all splits, and 1 to 5 threads: prefill's way of sharing out the work,
/// decode's, and decode's in several waves.
#[test]
fn bits_do_not_depend_on_the_sharing() {
    for (list, kv) in long_lists().into_iter().flat_map(|list| KINDS.map(|kv| (list.clone(), kv))) {
        let run = |isa, threads, fraction| {
            let op = with_scratch(&list, kv, fraction);
            bits(&mut Host::new(isa, threads), op).expect("the CPU")
        };
        let want = run(Isa::Portable, 1, 0);
        for threads in [1, 2, 5] {
            for fraction in [0, 3, 5, 32] {
                assert!(run(Isa::detect(), threads, fraction) == want);
            }
        }
    }
}

#[cfg_attr(test, test)]
fn bits_do_not_depend_on_scratch() {
    for (list, kv) in long_lists().into_iter().flat_map(|list| KINDS.map(|kv| (list.clone(), kv))) {
        on_each_device("attention with little scratch", |label, dev| {
            let want = bits(dev, with_scratch(&list, kv, 32))?;
            for fraction in [0, 3, 5] {
                let got = bits(dev, with_scratch(&list, kv, fraction))?;
                assert!(got == want, "{label}: {fraction}");
            }
            Ok(())
        });
    }
}

/// One pass over 150 rows of a lane gives the bits of 150 passes of a row.
#[test]
fn prefill_equals_decode() {
    KINDS.into_iter().for_each(rows_together_and_apart);
}

fn rows_together_and_apart(kv: KvDtype) {
    let shape = Shape { heads: 6, kv_heads: 2, dim: 32, window: Some(200), kv, ..SHAPE };
    let mut host = Host::new(Isa::detect(), 2);
    let mut b = Builder::new(&mut host);
    let prefill = build(&mut b, shape, &[lane(0, SPLIT - 20, 150)]);
    let width = 4 * 6 * 32;
    let decode: Vec<Attention> = (0..150)
        .map(|r| {
            let step = LaneStep { rows: 1, pos: SPLIT - 20 + r, ..Default::default() };
            let lanes = Lanes { step: b.pod(&[step]), count: 1, rows: 1, max_rows: 1 };
            let q = prefill.q.rows(r as usize, 1, width);
            Attention { q, out: b.out_f32("row", width / 4), lanes, ..prefill }
        })
        .collect();
    // The same query one position too early: must show.
    let step = LaneStep { rows: 1, pos: SPLIT + 128, ..Default::default() };
    let lanes = Lanes { step: b.pod(&[step]), ..decode[149].lanes };
    let early = Attention { out: b.out_f32("early", width / 4), lanes, ..decode[149] };
    host.run(&prefill);
    decode.iter().chain([&early]).for_each(|op| host.run(op));
    host.sync().unwrap();
    let all = host.mem().get::<u32>(prefill.out);
    for (row, op) in all.chunks_exact(width / 4).zip(&decode) {
        assert!(row == host.mem().get::<u32>(op.out));
    }
    assert!(all[149 * width / 4..] != *host.mem().get::<u32>(early.out));
}

/// NaN in one lane's keys and values spoils that lane's rows that see it, and nothing else.
#[cfg_attr(test, test)]
fn poison_stays_where_it_is_seen() {
    KINDS.into_iter().for_each(poison);
}

fn poison(kv: KvDtype) {
    let (list, bad) = ([lane(0, 70, 4), lane(1, 100, 4)], 72);
    let shape = Shape { heads: 4, kv_heads: 2, dim: 32, kv, ..SHAPE };
    let spoiled = |b: &mut Builder, spoil: bool| {
        let mut op = build(b, shape, &list);
        if spoil {
            let (max_pages, block) = (op.kv.max_pages, op.kv.block());
            // The pool again, from the same seeds, with slot 0's position 72 unseen: NaN.
            let poisoned = pool(b, shape, &[(0, bad), (0, 104)]);
            assert_eq!((poisoned.max_pages, poisoned.block()), (max_pages, block));
            op.kv = poisoned;
        }
        op
    };
    on_each_device("attention with poison", |label, dev| {
        let clean = bits(dev, |b| spoiled(b, false))?;
        let dirty = bits(dev, |b| spoiled(b, true))?;
        let rows = clean.chunks_exact(128).zip(dirty.chunks_exact(128)).enumerate();
        for (row, (clean, dirty)) in rows {
            // Rows 2 and 3 stand at positions 72 and 73.
            if row == 2 || row == 3 {
                assert!(dirty.iter().all(|&x| f32::from_bits(x).is_nan()), "{label}: row {row}");
            } else {
                assert_eq!(clean, dirty, "{label}: row {row}");
            }
        }
        Ok(())
    });
}

/// Parts of prompts, for which devices may have other kernels.
#[cfg_attr(test, test)]
fn prompts() {
    let shape = Shape { heads: 6, kv_heads: 1, dim: 128, ..SHAPE };
    let check = |shape: Shape, list: &[Lane]| check_in(Pass::Prompt, shape, list);
    for (pos, rows) in [(0, 1), (63, 3), (700, 40), (0, 65), (3, 130), (1000, 70), (64, 192)] {
        check(shape, &[lane(0, pos, rows)]);
    }
    check(Shape { heads: 12, kv_heads: 2, dim: 256, ..SHAPE }, &[lane(1, 250, 100)]);
    for (heads, kv_heads) in [(1, 1), (8, 2), (7, 1)] {
        check(Shape { heads, kv_heads, ..shape }, &[lane(0, 20, 90)]);
    }
    check(shape, &[lane(2, 3, 8), lane(0, 300, 100), lane(1, 0, 0), lane(3, 127, 65)]);
    for window in [Some(1), Some(50), Some(300)] {
        for causal in [true, false] {
            check(Shape { heads: 2, causal, window, ..shape }, &[lane(0, 500, 80)]);
        }
    }
    check(Shape { heads: 2, causal: false, ..shape }, &[lane(0, 70, 80)]);
    // Not so wide: what rounds have.
    check(Shape { dim: 64, ..shape }, &[lane(0, 20, 90)]);
    // A lane that has more rows than a round of shipped drafts.
    check_in(Pass::Round, shape, &[lane(2, 3, 8), lane(0, 300, 100)]);
}

/// A lane of 330 rows from `pos` on, and passes of parts of it.
#[cfg_attr(test, test)]
fn prompts_may_be_cut_anywhere() {
    const ROWS: usize = 330;
    let shape = Shape { heads: 6, kv_heads: 2, dim: 128, ..SHAPE };
    on_each_device("attention of a prompt in parts", |label, dev| {
        for (pos, window) in [(0, None), (40, None), (200, Some(90))] {
            let width = 4 * shape.heads * shape.dim;
            let mut run = |cuts: &[usize], late: u32| {
                let all = [lane(0, pos, ROWS as u32)];
                let op = build_prompt(&mut Builder::new(dev), Shape { window, ..shape }, &all);
                let mut first = 0;
                for &rows in cuts {
                    let pos = pos + first as u32 - late * u32::from(first > 0);
                    let step = LaneStep { rows: rows as u32, pos, ..LaneStep::default() };
                    dev.write(op.lanes.step, bytemuck::bytes_of(&step));
                    let (q, out) = (op.q.rows(first, rows, width), op.out.rows(first, rows, width));
                    let lanes = Lanes { rows, max_rows: rows, ..op.lanes };
                    dev.run(&Attention { q, out, lanes, ..op });
                    first += rows;
                }
                match dev.sync() {
                    Err(DeviceError::Unsupported(why)) => return Err(why),
                    other => other.expect("the passes"),
                }
                let mut bits = vec![0u8; op.out.bytes];
                dev.read(op.out, &mut bits);
                Ok(bits)
            };
            let whole = run(&[ROWS], 0)?;
            // As far as the grid, then on; and anywhere.
            let head = PAGE_TOKENS - pos as usize % PAGE_TOKENS;
            for cuts in
                [&[head + 64, 266 - head][..], &[head, 64, 64, 64, 138 - head], &[1, 40, 289]]
            {
                assert!(run(cuts, 0)? == whole, "{label}: {cuts:?} at {pos}, {window:?}");
                // A part one position too early must show.
                assert!(run(cuts, 1)? != whole, "{label}: {cuts:?} at {pos}, {window:?}, early");
            }
        }
        Ok(())
    });
}

/// Keys and values of positions from 230 on are NaN: they spoil the rows there and no other.
#[cfg_attr(test, test)]
fn poison_among_many_rows_stays_where_it_is_seen() {
    let (rows, bad) = (150, 230);
    let shape = Shape { heads: 3, kv_heads: 1, dim: 128, ..SHAPE };
    let list = [lane(0, 100, rows)];
    on_each_device("attention with poison among many rows", |label, dev| {
        let clean = bits(dev, |b| build_prompt(b, shape, &list))?;
        for nan_keys in [true, false] {
            let dirty = bits(dev, |b| {
                let mut op = build_prompt(b, shape, &list);
                let poisoned = pool(b, shape, &[(0, bad)]);
                op.kv.values = poisoned.values;
                if nan_keys {
                    op.kv.keys = poisoned.keys;
                }
                let max_pages = op.kv.max_pages;
                assert!(max_pages == poisoned.max_pages, "{label}: pools of {max_pages} pages");
                op
            })?;
            let width = shape.heads * shape.dim;
            let each = clean.chunks_exact(width).zip(dirty.chunks_exact(width)).enumerate();
            for (row, (clean, dirty)) in each {
                if 100 + row >= bad {
                    let spoiled = dirty.iter().all(|&x| f32::from_bits(x).is_nan());
                    assert!(spoiled, "{label}: row {row}");
                } else {
                    assert!(clean == dirty, "{label}: row {row}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    let mut host = Host::new(Isa::Portable, 1);
    let mut b = Builder::new(&mut host);
    let good = build(&mut b, SHAPE, &[lane(0, 0, 2)]);
    assert!(good.check().is_ok());
    for bad in [
        Attention { heads: 5, ..good },
        Attention { heads: 0, ..good },
        Attention { heads: 98, ..good },
        Attention { heads: 8, ..good },
        Attention { heads: usize::MAX - 1, ..good },
        Attention { window: Some(0), ..good },
        Attention { scale: 0.0, ..good },
        Attention { scale: f32::NAN, ..good },
        Attention { q: good.q.slice(0, 64), ..good },
        Attention { out: good.out.slice(0, 64), ..good },
        Attention { scratch: good.scratch.slice(0, 63), ..good },
        Attention { kv: KvPool { head_dim: 24, ..good.kv }, ..good },
        Attention { kv: KvPool { kv_heads: 0, ..good.kv }, ..good },
        Attention { lanes: Lanes { rows: 9, ..good.lanes }, ..good },
    ] {
        assert!(bad.check().is_err(), "{bad:?}");
    }
    assert!(Attention { scratch: good.scratch.slice(0, 0), ..good }.check().is_ok());
}
