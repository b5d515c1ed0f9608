//! Two passes: a lower bound of the k-th largest, then a sorted list of the best so far, for which
//! a block of logits is looked at only if its largest beats the bound or the list's last. Long rows
//! are cut into segments, whose lists are merged at the end.

use super::TopK;
use crate::simd::{Kernel, LANES, Simd};
use crate::{Cpu, Mem};

/// Logits compared at once with the list's last.
const BLOCK: usize = 8 * LANES;

/// Parts of a row whose maxima bound the k-th largest logit, for k up to this.
const PARTS: usize = 16 * LANES;

pub(super) fn run(op: &TopK, mem: &Mem, cpu: &Cpu) {
    let segments = TopK::segments(op.valid);
    cpu.pool.run(op.rows * segments, &|chunk| {
        cpu.isa.dispatch(Segment { op, mem, row: chunk / segments, segment: chunk % segments });
    });
    for row in 0..op.rows {
        merge(op, mem, row, segments);
    }
}

/// Ids and values of one segment's list.
fn list<'m>(op: &TopK, mem: &'m Mem, row: usize, segment: usize) -> (&'m mut [u32], &'m mut [f32]) {
    let index = row * TopK::segments(op.valid) + segment;
    let list = op.scratch.rows(index, 1, 8 * op.k);
    (mem.get_mut(list.slice(0, 4 * op.k)), mem.get_mut(list.slice(4 * op.k, 4 * op.k)))
}

fn segment_range(op: &TopK, segment: usize) -> std::ops::Range<usize> {
    let start = segment * TopK::SEGMENT;
    start..(start + TopK::SEGMENT).min(op.valid)
}

struct Segment<'a> {
    op: &'a TopK,
    mem: &'a Mem,
    row: usize,
    segment: usize,
}

impl Kernel for Segment<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let op = self.op;
        let row = self.mem.get::<f32>(op.logits.rows(self.row, 1, 4 * op.stride));
        let range = segment_range(op, self.segment);
        let (ids, values) = list(op, self.mem, self.row, self.segment);
        let (start, len) = (range.start, range.len().min(op.k));
        select(s, &row[range], &mut ids[..len], &mut values[..len]);
        ids[..len].iter_mut().for_each(|id| *id += start as u32);
    }
}

/// Merges the lists of a row's segments. Later segments hold higher ids, so of equal values the
/// earlier segment's comes first.
fn merge(op: &TopK, mem: &Mem, row: usize, segments: usize) {
    let ids = mem.get_mut::<u32>(op.ids.rows(row, 1, 4 * op.k));
    let values = mem.get_mut::<f32>(op.values.rows(row, 1, 4 * op.k));
    let mut best = List { ids, values, len: 0 };
    for segment in 0..segments {
        let (ids, values) = list(op, mem, row, segment);
        let len = segment_range(op, segment).len().min(op.k);
        for (&id, &value) in ids[..len].iter().zip(&values[..len]) {
            if best.len == op.k && (value <= values_last(&best) || value.is_nan()) {
                break;
            }
            best.insert(id, value);
        }
    }
}

fn values_last(list: &List) -> f32 {
    list.values[list.len - 1]
}

/// The best so far: values descending, equal values by ascending id.
struct List<'a> {
    ids: &'a mut [u32],
    values: &'a mut [f32],
    len: usize,
}

impl List<'_> {
    /// Puts a value behind those that are not smaller; of a full list the last falls out.
    #[inline(always)]
    fn insert(&mut self, id: u32, value: f32) {
        let mut at = self.len.min(self.values.len() - 1);
        while at > 0 && self.values[at - 1] < value {
            self.values[at] = self.values[at - 1];
            self.ids[at] = self.ids[at - 1];
            at -= 1;
        }
        (self.ids[at], self.values[at]) = (id, value);
        self.len = (self.len + 1).min(self.values.len());
    }

    /// Inserts a value above `last`, and returns what the next one must exceed.
    #[inline(always)]
    fn take(&mut self, id: u32, value: f32, last: f32) -> f32 {
        self.insert(id, value);
        if self.len == self.values.len() { values_last(self) } else { last }
    }
}

/// The largest of `x`, as many as `ids` and `values` hold (1 or more, at most `x.len()`), largest
/// first, with their indices; ties go to the lowest index, NaN counts as −∞.
#[inline(always)]
pub(crate) fn select<S: Simd>(s: S, x: &[f32], ids: &mut [u32], values: &mut [f32]) {
    let k = values.len();
    let mut best = List { ids, values, len: 0 };
    let mut last = lower_bound(s, x, k);
    let mut head = 0;
    if last == f32::NEG_INFINITY {
        head = k.next_multiple_of(BLOCK).min(x.len());
        for (i, &value) in x[..head].iter().enumerate() {
            let value = if value.is_nan() { f32::NEG_INFINITY } else { value };
            if best.len < k || value > values_last(&best) {
                best.insert(i as u32, value);
            }
        }
        last = values_last(&best);
    }
    let blocks = x[head..].chunks_exact(BLOCK);
    let tail = x.len() - blocks.remainder().len();
    for (b, block) in blocks.enumerate() {
        let mut largest = s.splat(f32::NEG_INFINITY);
        for i in (0..BLOCK).step_by(LANES) {
            // The new values come first: where they are NaN the old ones stay.
            largest = s.max(s.load(&block[i..]), largest);
        }
        if s.reduce_max(largest) > last {
            last = take_block(s, &mut best, head + b * BLOCK, block, last);
        }
    }
    for (i, &value) in x[tail..].iter().enumerate() {
        if value > last {
            last = best.take((tail + i) as u32, value, last);
        }
    }
}

/// A number that the k largest all exceed, and few others: just below the k-th largest of the
/// maxima of [`PARTS`] interleaved parts, each of which is some element. −∞ if that says nothing.
#[inline(always)]
fn lower_bound<S: Simd>(s: S, x: &[f32], k: usize) -> f32 {
    if k > PARTS {
        return f32::NEG_INFINITY;
    }
    let mut largest = [s.splat(f32::NEG_INFINITY); PARTS / LANES];
    for block in x.chunks_exact(PARTS) {
        for (v, largest) in largest.iter_mut().enumerate() {
            *largest = s.max(s.load(&block[v * LANES..]), *largest);
        }
    }
    let mut parts = [0.0; PARTS];
    for (v, largest) in largest.into_iter().enumerate() {
        s.store(largest, &mut parts[v * LANES..]);
    }
    let (_, kth, _) = parts.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    kth.next_down()
}

#[inline(always)]
fn take_block<S: Simd>(s: S, best: &mut List, first: usize, block: &[f32], mut last: f32) -> f32 {
    for i in (0..BLOCK).step_by(LANES) {
        let x = s.max(s.load(&block[i..]), s.splat(f32::NEG_INFINITY));
        if s.reduce_max(x) > last {
            for (j, &value) in block[i..i + LANES].iter().enumerate() {
                if value > last {
                    last = best.take((first + i + j) as u32, value, last);
                }
            }
        }
    }
    last
}
