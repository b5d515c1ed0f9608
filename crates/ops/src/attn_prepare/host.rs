//! In parallel over the pages that the pass writes: the rows of one lane that share a page belong
//! to one thread, so no two threads write the same block of keys.

use super::{AttnPrepare, MAX_DIM, Turn};
use crate::simd::{Kernel, LANES, Simd, math};
use crate::{Buf, Cpu, KvDtype, LaneStep, Mem, PAGE_TOKENS, kv};

pub(super) fn run(op: &AttnPrepare, mem: &Mem, cpu: &Cpu) {
    let steps = op.lanes.steps(mem);
    let pages = steps.iter().map(pages_of).sum();
    cpu.pool.run(pages, &|index| {
        if let Some((step, page)) = nth_page(steps, index) {
            cpu.isa.dispatch(Page { op, mem, step, page });
        }
    });
}

/// Pages that a lane's rows touch.
fn pages_of(step: &LaneStep) -> usize {
    let (pos, rows) = (step.pos as usize, step.rows as usize);
    if rows == 0 { 0 } else { (pos + rows - 1) / PAGE_TOKENS - pos / PAGE_TOKENS + 1 }
}

/// The lane and the absolute page number of the pass's `index`th page.
fn nth_page(steps: &[LaneStep], mut index: usize) -> Option<(&LaneStep, usize)> {
    for step in steps {
        let pages = pages_of(step);
        if index < pages {
            return Some((step, step.pos as usize / PAGE_TOKENS + index));
        }
        index -= pages;
    }
    None
}

/// A lane's rows whose positions lie in one page.
struct Page<'a> {
    op: &'a AttnPrepare,
    mem: &'a Mem,
    step: &'a LaneStep,
    page: usize,
}

impl Kernel for Page<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Page { op, mem, step, page } = self;
        let dim = op.kv.head_dim;
        let inv_freq = op.inv_freq(mem);
        let pool_page = op.kv.pages(mem, step.slot)[page] as usize;
        let (first, end) = (step.pos as usize, (step.pos + step.rows) as usize);
        let mut turn = Turn::new();
        let mut head = [0.0; MAX_DIM];
        for pos in first.max(page * PAGE_TOKENS)..end.min((page + 1) * PAGE_TOKENS) {
            let row = step.row0 as usize + (pos - first);
            turn.set(pos, inv_freq, math::sin_cos);
            if let Some(q) = &op.queries {
                let norm = q.norm.map(|norm| mem.get(norm));
                let out = q.out_row(mem, row, dim).chunks_exact_mut(dim);
                for (x, out) in q.row(mem, row).chunks_exact(q.stride).zip(out) {
                    norm_and_turn(s, op, &x[..dim], norm, &turn, out);
                }
            }
            let norm = op.k_norm.map(|norm| mem.get(norm));
            let k = op.kv_row(mem, op.k, row).chunks_exact(dim);
            let v = op.kv_row(mem, op.v, row).chunks_exact(dim);
            for (h, (k, v)) in k.zip(v).enumerate() {
                norm_and_turn(s, op, k, norm, &turn, &mut head[..dim]);
                let blocks = [op.kv.key_block(pool_page, h), op.kv.value_block(pool_page, h)];
                match op.kv.dtype {
                    KvDtype::Bf16 => store_bf16(s, mem, blocks, [&head[..dim], v], pos),
                    KvDtype::Int8 => store_int8(s, mem, blocks, [&head[..dim], v], pos),
                }
            }
        }
    }
}

/// Norm and rotation of one head.
#[inline(always)]
fn norm_and_turn<S: Simd>(
    s: S,
    op: &AttnPrepare,
    x: &[f32],
    norm: Option<&[f32]>,
    turn: &Turn,
    out: &mut [f32],
) {
    if let Some(weight) = norm {
        let mut squares = s.splat(0.0);
        for i in (0..x.len()).step_by(LANES) {
            let v = s.load(&x[i..]);
            squares = s.fma(v, v, squares);
        }
        let mean = s.sum(squares) / x.len() as f32;
        let scale = s.splat(1.0 / (mean + op.eps).sqrt());
        for i in (0..x.len()).step_by(LANES) {
            let v = s.mul(s.mul(s.load(&x[i..]), scale), s.load(&weight[i..]));
            s.store(v, &mut out[i..]);
        }
    } else {
        out.copy_from_slice(x);
    }
    turn.apply(&mut out[..op.rope.dims], op.rope.pairing);
}

/// Puts a head's key and value into their blocks, in bf16.
#[inline(always)]
fn store_bf16<S: Simd>(s: S, mem: &Mem, blocks: [Buf; 2], [key, value]: [&[f32]; 2], pos: usize) {
    let (dim, slot) = (key.len(), pos % PAGE_TOKENS);
    store_key(s, key, mem.get_mut(blocks[0]), slot);
    let to = mem.get_mut(blocks[1].rows(slot, 1, 2 * dim));
    for i in (0..dim).step_by(LANES) {
        s.store_bf16(s.load(&value[i..]), &mut to[i..]);
    }
}

/// Puts a head's key and value into their blocks, in int8.
#[inline(always)]
fn store_int8<S: Simd>(s: S, mem: &Mem, blocks: [Buf; 2], [key, value]: [&[f32]; 2], pos: usize) {
    let (dim, slot) = (key.len(), pos % PAGE_TOKENS);
    let parts = |block: Buf| {
        let codes = PAGE_TOKENS * dim;
        let scales = mem.get_mut::<f32>(block.slice(codes, 4 * PAGE_TOKENS));
        (mem.get_mut::<i8>(block.slice(0, codes)), scales)
    };
    let (codes, scales) = parts(blocks[0]);
    let mut quants = [0; MAX_DIM];
    scales[slot] = quantize(s, key, &mut quants[..dim]);
    for (codes, &quant) in codes.chunks_exact_mut(PAGE_TOKENS).zip(&quants) {
        codes[slot] = quant;
    }
    let (codes, scales) = parts(blocks[1]);
    scales[slot] = quantize(s, value, &mut codes[slot * dim..][..dim]);
}

/// A head's codes, and their scale: the definition of [`crate::kv`], bit for bit.
#[inline(always)]
fn quantize<S: Simd>(s: S, x: &[f32], codes: &mut [i8]) -> f32 {
    let zero = s.splat(0.0);
    let (mut largest, mut odd) = (zero, zero);
    for i in (0..x.len()).step_by(LANES) {
        let v = s.load(&x[i..]);
        largest = s.max(largest, s.max(v, s.sub(zero, v)));
        // 0 · x is 0, or NaN if x is not finite; and NaN stays.
        odd = s.fma(v, zero, odd);
    }
    let finite = !s.sum(odd).is_nan();
    let (scale, factor) = kv::scale_of(s.reduce_max(largest), finite);
    if !finite {
        codes.fill(0);
        return scale;
    }
    let factor = s.splat(factor);
    for i in (0..x.len()).step_by(LANES) {
        s.store_i8(s.mul(s.load(&x[i..]), factor), &mut codes[i..]);
    }
    scale
}

/// Scatters a key over the words of its page's block (see [`crate::KvPool`]).
#[inline(always)]
fn store_key<S: Simd>(s: S, key: &[f32], block: &mut [u32], slot: usize) {
    let mut half = [0u16; MAX_DIM];
    for i in (0..key.len()).step_by(LANES) {
        s.store_bf16(s.load(&key[i..]), &mut half[i..]);
    }
    let words = block.chunks_exact_mut(PAGE_TOKENS);
    for (pair, words) in half.chunks_exact(2).zip(words) {
        words[slot] = u32::from(pair[0]) | u32::from(pair[1]) << 16;
    }
}
