//! First every row on its own, in parallel: its distribution (a short list or one weight per
//! token) and its pick, into scratch. Then every lane: the rule, on integers.

use super::{Accept, JudgedRow, LogitRows, Row, Target, select, target};
use crate::random::{RACE_BLOCK, exponentials};
use crate::sampling::{clean, clean_simd, race, race_time};
use crate::simd::{Kernel, LANES, Simd};
use crate::{Cpu, Mem, ONE, Rule, SamplerParams};

/// The longest list: top-k up to here never weighs the whole vocabulary.
pub(super) const LIST: usize = 256;

/// One row's part of scratch: a [`State`], a list of ids and weights, a logit or weight per token.
pub(super) fn row_bytes(valid: usize) -> usize {
    size_of::<State>() + 8 * LIST + 4 * padded(valid)
}

/// Rows in scratch are padded with −∞ to whole blocks.
fn padded(valid: usize) -> usize {
    valid.next_multiple_of(RACE_BLOCK)
}

#[repr(C)]
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct State {
    total: u64,
    /// Entries of the list, or [`DENSE`].
    len: u32,
    pick: u32,
    log_sum: f32,
    degenerate: u32,
    padding: [u32; 10],
}

/// The row's distribution is one weight per token.
const DENSE: u32 = u32::MAX;

struct Scratch<'m> {
    state: &'m mut State,
    ids: &'m mut [u32],
    weights: &'m mut [u32],
    dense: &'m mut [u32],
}

impl Accept {
    fn scratch_row<'m>(&self, mem: &'m Mem, row: usize) -> Scratch<'m> {
        let all = self.scratch.rows(row, 1, row_bytes(self.valid));
        let list = all.slice(size_of::<State>(), 8 * LIST);
        let dense = size_of::<State>() + 8 * LIST;
        Scratch {
            state: &mut mem.get_mut(all.slice(0, size_of::<State>()))[0],
            ids: mem.get_mut(list.slice(0, 4 * LIST)),
            weights: mem.get_mut(list.slice(4 * LIST, 4 * LIST)),
            dense: mem.get_mut(all.slice(dense, 4 * padded(self.valid))),
        }
    }
}

pub(super) fn run(op: &Accept, mem: &Mem, cpu: &Cpu) {
    let per_lane = match op.logit_rows {
        LogitRows::All => op.lanes.max_rows,
        LogitRows::Last => 1,
    };
    cpu.pool.run(op.lanes.count * per_lane, &|chunk| {
        let (lane, i) = (chunk / per_lane, chunk % per_lane);
        if i < op.judged(&op.step(mem, lane)).0 {
            cpu.isa.dispatch(Judge { op, mem, lane, i });
        }
    });
    cpu.pool.run(op.lanes.count, &|lane| {
        let step = op.step(mem, lane);
        let judged = op.judged(&step).0;
        let mut rows: [JudgedRow; Accept::MAX_ROWS] = std::array::from_fn(|i| {
            if i >= judged {
                let target = Target { ids: &[], weights: &mut [], total: 0 };
                return JudgedRow { target, pick: 0, log_sum: 0.0, degenerate: false };
            }
            let s = op.scratch_row(mem, op.logit_row(lane, &step, i));
            let target = match s.state.len {
                DENSE => Target { ids: &[], weights: s.dense, total: s.state.total },
                len => {
                    let (ids, weights) = (&s.ids[..len as usize], &mut s.weights[..len as usize]);
                    Target { ids, weights, total: s.state.total }
                }
            };
            let (pick, log_sum) = (s.state.pick, s.state.log_sum);
            JudgedRow { target, pick, log_sum, degenerate: s.state.degenerate != 0 }
        });
        op.finish(mem, lane, &mut rows[..judged]);
    });
}

struct Judge<'a> {
    op: &'a Accept,
    mem: &'a Mem,
    lane: usize,
    i: usize,
}

impl Kernel for Judge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let step = self.op.step(self.mem, self.lane);
        let row = self.op.row(self.mem, self.lane, &step, self.i);
        let out = self.op.scratch_row(self.mem, self.op.logit_row(self.lane, &step, self.i));
        let params = row.params;
        let logits = bytemuck::cast_slice_mut::<u32, f32>(out.dense);
        let mut state = State::default();
        copy(s, row.raw, logits);
        if params.flags & SamplerParams::LOGPROBS != 0 {
            let max = largest(s, logits);
            let total = select::total_weight(s, &SamplerParams::default(), logits, max);
            state.log_sum = target::log_sum_of(max, total);
        }
        adjust(&row, logits);
        let max = largest(s, logits);
        if max == f32::NEG_INFINITY {
            (state.pick, state.degenerate, state.len) = (row.fallback(), 1, 1);
            (out.ids[0], out.weights[0], state.total) = (state.pick, ONE, u64::from(ONE));
            *out.state = state;
            return;
        }
        let rule = params.rule();
        if rule == Rule::Greedy {
            state.pick = first(s, logits, max);
            *out.state = state;
            return;
        }
        let valid = row.raw.len();
        if let Some(kept) = select::short(s, params, logits, valid, max, out.ids, out.weights) {
            let len = kept.0;
            (state.len, state.total) = (len as u32, kept.1);
            if rule == Rule::Invariant {
                let (ids, weights) = (&out.ids[..len], &out.weights[..len]);
                state.pick = ids[race(params.seed, row.position, ids, weights)];
            }
        } else {
            let total = select::dense(s, params, valid, max, out.dense);
            (state.len, state.total) = (DENSE, total);
            if rule == Rule::Invariant {
                state.pick = dense_race(s, params.seed, row.position, out.dense);
            }
        }
        *out.state = state;
    }
}

#[inline(always)]
fn copy<S: Simd>(s: S, raw: &[f32], logits: &mut [f32]) {
    let whole = raw.len() - raw.len() % LANES;
    for i in (0..whole).step_by(LANES) {
        s.store(clean_simd(s, s.load(&raw[i..])), &mut logits[i..]);
    }
    logits[whole..].fill(f32::NEG_INFINITY);
    for i in whole..raw.len() {
        logits[i] = clean(raw[i]);
    }
}

/// Penalties, biases and mask. Only touched tokens are computed.
#[inline(always)]
fn adjust(row: &Row, logits: &mut [f32]) {
    if row.params.penalises() {
        const BLOCK: usize = 64;
        for (counts, logits) in row.counts.chunks(BLOCK).zip(logits.chunks_mut(BLOCK)) {
            if counts.iter().fold(0, |any, &count| any | count) == 0 {
                continue;
            }
            for (z, &count) in logits.iter_mut().zip(counts) {
                *z = row.params.penalised(*z, count);
            }
        }
        for &token in row.drafts {
            if let Some(&raw) = row.raw.get(token as usize) {
                logits[token as usize] = row.params.penalised(clean(raw), row.count(token));
            }
        }
    }
    for bias in row.biases {
        if (bias.token as usize) < row.raw.len() {
            let z = &mut logits[bias.token as usize];
            *z = clean(*z + bias.bias);
        }
    }
    for (&word, logits) in row.mask.unwrap_or(&[]).iter().zip(logits.chunks_mut(32)) {
        if word != u32::MAX {
            for (bit, z) in logits.iter_mut().enumerate() {
                *z = if word >> bit & 1 == 0 { f32::NEG_INFINITY } else { *z };
            }
        }
    }
}

/// The largest of clean logits.
#[inline(always)]
fn largest<S: Simd>(s: S, logits: &[f32]) -> f32 {
    let mut max = [s.splat(f32::NEG_INFINITY); 4];
    for block in logits.chunks_exact(4 * LANES) {
        for (i, max) in max.iter_mut().enumerate() {
            *max = s.max(s.load(&block[i * LANES..]), *max);
        }
    }
    s.reduce_max(s.max(s.max(max[0], max[1]), s.max(max[2], max[3])))
}

/// The first token of the largest logit.
#[inline(always)]
fn first<S: Simd>(s: S, logits: &[f32], max: f32) -> u32 {
    for (b, block) in logits.chunks_exact(4 * LANES).enumerate() {
        let low = s.max(s.load(block), s.load(&block[LANES..]));
        let high = s.max(s.load(&block[2 * LANES..]), s.load(&block[3 * LANES..]));
        if s.reduce_max(s.max(low, high)) == max {
            let at = block.iter().position(|&z| z == max).unwrap_or(0);
            return (b * 4 * LANES + at) as u32;
        }
    }
    0
}

/// [`race`] between all tokens.
#[inline(always)]
fn dense_race<S: Simd>(s: S, seed: [u32; 2], position: u32, weights: &[u32]) -> u32 {
    let (mut best, mut winner) = (f32::INFINITY, 0);
    for (b, block) in weights.chunks_exact(RACE_BLOCK).enumerate() {
        if block.iter().fold(0, |any, &w| any | w) == 0 {
            continue;
        }
        let first = b * RACE_BLOCK;
        let exponentials = exponentials(s, seed, position, first as u32);
        let mut times = [0.0; RACE_BLOCK];
        let mut least = s.splat(f32::INFINITY);
        for (v, exponential) in exponentials.into_iter().enumerate() {
            let mut w = [0.0; LANES];
            for l in 0..LANES {
                // Weights are below 2³¹: a signed conversion is exact and one instruction.
                w[l] = block[v * LANES + l] as i32 as f32;
            }
            let time = s.div(exponential, s.load(&w));
            s.store(time, &mut times[v * LANES..]);
            least = s.min(time, least);
        }
        if -s.reduce_max(s.sub(s.splat(0.0), least)) < best {
            for (i, &time) in times.iter().enumerate() {
                if time < best {
                    (best, winner) = (time, first + i);
                }
            }
        }
    }
    debug_assert_eq!(best, {
        let exponential = crate::random::exponential(seed, position, winner as u32);
        race_time(exponential, weights[winner])
    });
    winner as u32
}
