//! A sorted list of the best so far; a block of logits is looked at only if its largest beats the
//! list's last. Long rows are cut into segments, whose lists are merged at the end.

use super::TopK;
use crate::simd::{Kernel, LANES, Simd};
use crate::{Cpu, Mem};

/// Logits compared at once with the list's last.
const BLOCK: usize = 8 * LANES;

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
            if best.len == op.k && !(value > values_last(&best)) {
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
}

/// The largest of `x`, as many as `ids` and `values` hold (1 or more, at most `x.len()`), largest
/// first, with their indices; ties go to the lowest index, NaN counts as −∞.
#[inline(always)]
pub(crate) fn select<S: Simd>(s: S, x: &[f32], ids: &mut [u32], values: &mut [f32]) {
    let k = values.len();
    let mut best = List { ids, values, len: 0 };
    let head = k.next_multiple_of(BLOCK).min(x.len());
    for (i, &value) in x[..head].iter().enumerate() {
        let value = if value.is_nan() { f32::NEG_INFINITY } else { value };
        if best.len < k || value > values_last(&best) {
            best.insert(i as u32, value);
        }
    }
    let mut last = values_last(&best);
    let blocks = x[head..].chunks_exact(BLOCK);
    let tail = x.len() - blocks.remainder().len();
    for (b, block) in blocks.enumerate() {
        let mut largest = s.load(block);
        for i in (LANES..BLOCK).step_by(LANES) {
            // The new values come first: where they are NaN the old ones stay.
            largest = s.max(s.load(&block[i..]), largest);
        }
        if s.reduce_max(s.max(largest, s.splat(f32::NEG_INFINITY))) > last {
            last = take_block(s, &mut best, head + b * BLOCK, block);
        }
    }
    for (i, &value) in x[tail..].iter().enumerate() {
        if value > last {
            best.insert((tail + i) as u32, value);
            last = values_last(&best);
        }
    }
}

#[inline(always)]
fn take_block<S: Simd>(s: S, best: &mut List, first: usize, block: &[f32]) -> f32 {
    let mut last = values_last(best);
    for i in (0..BLOCK).step_by(LANES) {
        let x = s.max(s.load(&block[i..]), s.splat(f32::NEG_INFINITY));
        if s.reduce_max(x) > last {
            for (j, &value) in block[i..i + LANES].iter().enumerate() {
                if value > last {
                    best.insert((first + i + j) as u32, value);
                    last = values_last(best);
                }
            }
        }
    }
    last
}
