//! In parallel over the pages that the pass writes: the rows of one lane that share a page belong
//! to one thread, so no two threads write the same block of keys.

use super::{AttnPrepare, MAX_DIM, Turn};
use crate::simd::{Kernel, LANES, Simd, math};
use crate::{Cpu, LaneStep, Mem, PAGE_TOKENS};

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
                let keys = mem.get_mut::<u32>(op.kv.key_block(pool_page, h));
                store_key(s, &head[..dim], keys, pos % PAGE_TOKENS);
                let values = op.kv.value_block(pool_page, h);
                let value = mem.get_mut(values.rows(pos % PAGE_TOKENS, 1, 2 * dim));
                for i in (0..dim).step_by(LANES) {
                    s.store_bf16(s.load(&v[i..]), &mut value[i..]);
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
