//! A device that runs every op on two others and names the first element on which they disagree.
//!
//! `a` is believed: what is read comes from it. After each op the buffers that the op writes are
//! read from both, and those elements count that the op wrote on either, which is to say, changed.
//! What an op left in its working memory ([`Elements::Scratch`]) is not compared.
//!
//! Ops name their buffers by number, so both devices must number them alike. [`Diff`] allocates
//! large regions from both and cuts them itself, which leaves as the only demand that a device
//! numbers large allocations 0, 1, 2 and lets each begin at offset 0.

use std::fmt;

use crate::device::{Counters, Device, DeviceError, DeviceInfo, Fill};
use crate::testing::Tolerance;
use crate::{
    ACT_GROUP, Act, ActDtype, ActGroup, Binding, Bindings, Buf, Elements, Host, Op, PAGE_TOKENS,
    Rounded,
};

/// Large enough for every device to give it an allocation of its own.
const REGION_BYTES: usize = 64 << 20;
const ALIGN: usize = 256;

/// Where two devices first disagreed.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// How many ops had run before this one.
    pub run: usize,
    /// The op's name.
    pub op: &'static str,
    /// The name of the buffer in the op's bindings.
    pub output: &'static str,
    /// Which element of it: the index in the buffer, or row and column of activations.
    pub element: String,
    /// What `a` has there.
    pub want: f64,
    /// What `b` has there.
    pub got: f64,
    /// How far apart they may be.
    pub bound: f64,
    /// The op with its fields.
    pub fields: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Difference { run, op, output, element, want, got, bound, fields } = self;
        write!(f, "op {run}, `{op}`: `{output}`{element} is {got}, want {want} within {bound}")?;
        write!(f, ", in {fields}")
    }
}

/// What [`Op::rounded`] says, of a device's memory after it ran the op.
type Roundings<A> = fn(&A, &dyn Op) -> Option<Vec<Rounded>>;

/// Runs ops on `a` and `b`. The first difference beyond the tolerance is kept, and is the error of
/// the next [`Device::sync`]; what follows it is not compared.
#[derive(Debug)]
pub struct Diff<A, B> {
    /// The device that is believed.
    pub a: A,
    /// The device under test.
    pub b: B,
    tolerance: Tolerance,
    /// What `b` may make of an op, as `a` knows it.
    rounded: Option<Roundings<A>>,
    resync: bool,
    runs: usize,
    difference: Option<Difference>,
    reported: bool,
    /// The region that buffers are cut from, and how much of it is taken.
    open: Option<(Buf, usize)>,
}

impl<B: Device> Diff<Host, B> {
    /// `b` rounds operands to bf16: [`Op::rounded`].
    #[must_use]
    pub fn rounded(self) -> Diff<Host, B> {
        Diff { rounded: Some(|host, op| op.rounded(host.mem())), ..self }
    }
}

impl<A: Device, B: Device> Diff<A, B> {
    /// Compares floats within `tolerance`, by bits if it is exact; whole numbers always by value.
    pub fn new(a: A, b: B, tolerance: Tolerance) -> Diff<A, B> {
        let (runs, difference, reported, open) = (0, None, false, None);
        let (rounded, resync) = (None, false);
        Diff { a, b, tolerance, rounded, resync, runs, difference, reported, open }
    }

    /// After each op `b` gets what `a` wrote. So each op is judged by itself, on equal inputs, and
    /// small errors don't add up along a pass: the way to compare a device of other rounding.
    #[must_use]
    pub fn resynced(self) -> Diff<A, B> {
        Diff { resync: true, ..self }
    }

    /// Ops run so far.
    pub fn runs(&self) -> usize {
        self.runs
    }

    /// Where the devices first disagreed.
    pub fn difference(&self) -> Option<&Difference> {
        self.difference.as_ref()
    }

    /// A region of the same number on both devices.
    fn region(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError> {
        let (a, b) = (self.a.alloc(bytes, what)?, self.b.alloc(bytes, what)?);
        if (a.alloc, a.offset) == (b.alloc, b.offset) {
            return Ok(Buf { bytes, ..a });
        }
        let why = format!("the devices number their allocations differently: {a:?} and {b:?}");
        Err(DeviceError::Op { op: "alloc", why })
    }

    /// Runs an op on both and compares what it wrote.
    fn run_compared(&mut self, op: &dyn Op) {
        let mut bindings = Bindings::default();
        op.bind(&mut bindings);
        let written: Vec<Binding> =
            bindings.iter().filter(|b| b.access != crate::Access::Read).copied().collect();
        let before: Vec<[Vec<u8>; 2]> = written.iter().map(|b| self.contents(b.buf)).collect();
        self.a.run(op);
        self.b.run(op);
        for (binding, before) in written.iter().zip(&before) {
            let after = self.contents(binding.buf);
            if self.difference.is_none() && after[0] != after[1] {
                self.difference = self.compare(op, binding, before, &after);
            }
            if self.resync && after[0] != after[1] {
                self.b.write(binding.buf, &after[0]);
            }
        }
    }

    /// A buffer's bytes on both devices.
    fn contents(&mut self, buf: Buf) -> [Vec<u8>; 2] {
        let mut bytes = [vec![0; buf.bytes], vec![0; buf.bytes]];
        self.a.read(buf, &mut bytes[0]);
        self.b.read(buf, &mut bytes[1]);
        bytes
    }

    fn compare(
        &self,
        op: &dyn Op,
        binding: &Binding,
        before: &[Vec<u8>; 2],
        after: &[Vec<u8>; 2],
    ) -> Option<Difference> {
        let outputs = Outputs { before, after, tolerance: self.tolerance };
        let out = (binding.name == "out").then_some(()).and(self.rounded);
        let rounded = out.and_then(|rounded| rounded(&self.a, op));
        let mismatch = match binding.elements {
            Elements::Scratch => None,
            Elements::F32 if let Some(rounded) = &rounded => outputs.rounded(rounded, None),
            Elements::Act(act)
                if act.dtype == ActDtype::F32
                    && let Some(rounded) = &rounded =>
            {
                outputs.rounded(rounded, Some(act))
            }
            Elements::U32 => outputs.words(),
            Elements::F32 => outputs.floats(4, f32_of),
            Elements::Bf16 => outputs.floats(2, bf16),
            Elements::Int8Pages { codes } => outputs.int8_pages(codes),
            Elements::Act(act) => outputs.activations(act),
        };
        mismatch.map(|m| Difference {
            run: self.runs,
            op: op.name(),
            output: binding.name,
            element: m.element,
            want: m.want,
            got: m.got,
            bound: m.bound,
            fields: format!("{op:?}"),
        })
    }
}

fn f32_of(b: &[u8]) -> f32 {
    f32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

/// Where activation rows have the f32 of an element.
fn spot(act: &Act, i: usize) -> usize {
    i / act.width * act.row_bytes() + 4 * (i % act.width)
}

fn bf16(b: &[u8]) -> f32 {
    f32::from_bits(u32::from_le_bytes([0, 0, b[0], b[1]]))
}

struct Mismatch {
    element: String,
    want: f64,
    got: f64,
    bound: f64,
}

/// One written buffer, before and after an op, on `a` and on `b`.
struct Outputs<'a> {
    before: &'a [Vec<u8>; 2],
    after: &'a [Vec<u8>; 2],
    tolerance: Tolerance,
}

impl Outputs<'_> {
    /// Whether the op changed these bytes on either device.
    fn wrote(&self, range: std::ops::Range<usize>) -> bool {
        (0..2).any(|i| self.before[i][range.clone()] != self.after[i][range.clone()])
    }

    fn differs(&self, range: std::ops::Range<usize>) -> bool {
        self.after[0][range.clone()] != self.after[1][range]
    }

    /// Words that must be the same.
    fn words(&self) -> Option<Mismatch> {
        let word = |device: usize, i: usize| {
            let bytes = &self.after[device][4 * i..4 * i + 4];
            f64::from(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        let at = |i: usize| 4 * i..4 * i + 4;
        let found =
            (0..self.after[0].len() / 4).find(|&i| self.differs(at(i)) && self.wrote(at(i)))?;
        let (want, got) = (word(0, found), word(1, found));
        Some(Mismatch { element: format!("[{found}]"), want, got, bound: 0.0 })
    }

    /// Floats of `size` bytes.
    fn floats(&self, size: usize, value: impl Fn(&[u8]) -> f32) -> Option<Mismatch> {
        let all = (0..self.after[0].len() / size).map(|i| size * i);
        let spots: Vec<usize> = all.filter(|&at| self.wrote(at..at + size)).collect();
        // One step of bf16: the same f32, all but, may round either way.
        let step = if size == 2 { 1.0 / 128.0 } else { 0.0 };
        let found = self.first_beyond(&spots, size, step, &value)?;
        Some(Mismatch { element: format!("[{}]", found.0 / size), ..found.1 })
    }

    /// Blocks of codes and scales. Inputs that differ within the tolerance may round to neighbouring steps.
    fn int8_pages(&self, codes: usize) -> Option<Mismatch> {
        let block = codes + 4 * PAGE_TOKENS;
        let all = 0..self.after[0].len() / block;
        let scales =
            all.clone().flat_map(|b| (0..PAGE_TOKENS).map(move |i| b * block + codes + 4 * i));
        let scales: Vec<usize> = scales.filter(|&at| self.wrote(at..at + 4)).collect();
        let value = f32_of;
        if let Some((at, mismatch)) = self.first_beyond(&scales, 4, 0.0, &value) {
            let element = format!("[block {}, scale {}]", at / block, (at % block - codes) / 4);
            return Some(Mismatch { element, ..mismatch });
        }
        let bound = if self.tolerance.is_exact() { 0.0 } else { 1.0 };
        let mut each = all.flat_map(|b| (0..codes).map(move |i| (b, i)));
        each.find_map(|(b, i)| {
            let at = b * block + i;
            let of = |device: usize| f64::from(self.after[device][at].cast_signed());
            let (want, got) = (of(0), of(1));
            let element = || format!("[block {b}, code {i}]");
            let beyond = (want - got).abs() > bound && self.wrote(at..at + 1);
            beyond.then(|| Mismatch { element: element(), want, got, bound })
        })
    }

    /// Elements that `b` may have rounded: floats, or those of activation rows.
    fn rounded(&self, rounded: &[Rounded], act: Option<Act>) -> Option<Mismatch> {
        let place = |i: usize| act.map_or(4 * i, |act| spot(&act, i));
        rounded.iter().enumerate().find_map(|(i, may)| {
            let at = place(i)..place(i) + 4;
            if !self.differs(at.clone()) || !self.wrote(at.clone()) {
                return None;
            }
            let has = f32_of(&self.after[1][at]);
            let [want, got, bound] = [may.want, has, may.within].map(f64::from);
            (!may.allows(has)).then(|| Mismatch { element: format!("[{i}]"), want, got, bound })
        })
    }

    /// The first of some elements, given by their offsets in bytes, that is out of bounds.
    fn first_beyond(
        &self,
        spots: &[usize],
        size: usize,
        step: f32,
        value: &impl Fn(&[u8]) -> f32,
    ) -> Option<(usize, Mismatch)> {
        let of = |device: usize, at: usize| value(&self.after[device][at..at + size]);
        let rms = root_mean_square(spots.iter().map(|&at| of(0, at)));
        spots.iter().filter(|&&at| self.differs(at..at + size)).find_map(|&at| {
            let (want, got) = (of(0, at), of(1, at));
            let exact = self.tolerance.is_exact();
            let bound =
                self.tolerance.bound(want, rms) + if exact { 0.0 } else { step * want.abs() };
            let close = !exact && ((want - got).abs() <= bound || (want.is_nan() && got.is_nan()));
            let (want, got, bound) = (f64::from(want), f64::from(got), f64::from(bound));
            (!close).then(|| (at, Mismatch { element: String::new(), want, got, bound }))
        })
    }

    /// Activation rows: the floats, then the int8 values of each group with its record.
    fn activations(&self, act: Act) -> Option<Mismatch> {
        let (stride, width) = (act.row_bytes(), act.width);
        let rows = self.after[0].len() / stride.max(1);
        let all = (0..rows * width).map(|i| spot(&act, i));
        let spots: Vec<usize> = all.filter(|&at| self.wrote(at..at + 4)).collect();
        let value = f32_of;
        if let Some((at, mismatch)) = self.first_beyond(&spots, 4, 0.0, &value) {
            let element = format!("[row {}, {}]", at / stride, at % stride / 4);
            return Some(Mismatch { element, ..mismatch });
        }
        if act.dtype != ActDtype::I8 {
            return None;
        }
        let per_row = width / ACT_GROUP;
        (0..rows * per_row).find_map(|g| self.group(&act, g / per_row, g % per_row))
    }

    /// One group of int8 values. Inputs that differ within the tolerance may round to neighbouring
    /// steps; the sums must be those of the values beside them.
    fn group(&self, act: &Act, row: usize, group: usize) -> Option<Mismatch> {
        let base = row * act.row_bytes();
        let quants = base + act.quants_offset() + group * ACT_GROUP;
        let record = base + act.groups_offset() + group * size_of::<ActGroup>();
        let (quants, record) = (quants..quants + ACT_GROUP, record..record + size_of::<ActGroup>());
        let same = !self.differs(quants.clone()) && !self.differs(record.clone());
        if same || !(self.wrote(quants.clone()) || self.wrote(record.clone())) {
            return None;
        }
        let of = |device: usize| {
            let bytes = &self.after[device];
            let record: ActGroup = bytemuck::pod_read_unaligned(&bytes[record.clone()]);
            (record, &bytes[quants.clone()])
        };
        let ((want, want_q), (got, got_q)) = (of(0), of(1));
        let beyond = |element: String, want: f32, got: f32, bound: f32| {
            let (want, got, bound) = (f64::from(want), f64::from(got), f64::from(bound));
            Some(Mismatch { element, want, got, bound })
        };
        let name = |part: &str, i: usize| format!("[row {row}, group {group}, {part} {i}]");
        let exact = self.tolerance.is_exact();
        let scale_bound = self.tolerance.bound(want.scale, 0.0);
        if exact && want.scale != got.scale || (want.scale - got.scale).abs() > scale_bound {
            return beyond(name("scale", 0), want.scale, got.scale, scale_bound);
        }
        let step = if exact { 0.0 } else { 1.0 };
        for (i, (&w, &g)) in want_q.iter().zip(got_q).enumerate() {
            let (w, g) = (f32::from(w as i8), f32::from(g as i8));
            if (w - g).abs() > step {
                return beyond(name("value", i), w, g, step);
            }
        }
        let mut sums = [0.0; 7];
        for parts in [1, 2, 4] {
            for (part, q) in got_q.chunks_exact(ACT_GROUP / parts).enumerate() {
                let sum: i32 = q.iter().map(|&q| i32::from(q as i8)).sum();
                sums[ActGroup::sum_index(parts, part)] = sum as f32;
            }
        }
        let wrong = (0..sums.len()).find(|&i| sums[i] != got.sums[i])?;
        beyond(name("sum", wrong), sums[wrong], got.sums[wrong], 0.0)
    }
}

fn root_mean_square(values: impl Iterator<Item = f32>) -> f32 {
    let (mut squares, mut count) = (0.0, 0u32);
    for value in values.filter(|v| v.is_finite()) {
        (squares, count) = (squares + f64::from(value).powi(2), count + 1);
    }
    (squares / f64::from(count.max(1))).sqrt() as f32
}

impl<A: Device, B: Device> Device for Diff<A, B> {
    fn info(&self) -> DeviceInfo {
        let (a, b) = (self.a.info(), self.b.info());
        let name = format!("{} against {}", b.name, a.name);
        DeviceInfo {
            name,
            int8_pages: a.int8_pages && b.int8_pages,
            like_alone: a.like_alone.min(b.like_alone),
            ..a
        }
    }

    fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError> {
        let len = bytes.max(1).checked_next_multiple_of(ALIGN);
        let out_of_memory = || DeviceError::OutOfMemory { bytes, what: what.to_owned() };
        let len = len.ok_or_else(out_of_memory)?;
        if len > REGION_BYTES / 4 {
            return Ok(self.region(len.max(REGION_BYTES), what)?.slice(0, bytes));
        }
        let (region, used) = match self.open {
            Some((region, used)) if used + len <= region.bytes => (region, used),
            _ => (self.region(REGION_BYTES, what)?, 0),
        };
        self.open = Some((region, used + len));
        Ok(region.slice(used, bytes))
    }

    fn upload(&mut self, buf: Buf, piece: usize, fill: &Fill<'_>) {
        self.a.upload(buf, piece, fill);
        self.b.upload(buf, piece, fill);
    }

    fn write(&mut self, buf: Buf, bytes: &[u8]) {
        self.a.write(buf, bytes);
        self.b.write(buf, bytes);
    }

    fn read(&mut self, buf: Buf, out: &mut [u8]) {
        self.a.read(buf, out);
    }

    fn zero(&mut self, buf: Buf) {
        self.a.zero(buf);
        self.b.zero(buf);
    }

    fn copy(&mut self, from: Buf, to: Buf) {
        self.a.copy(from, to);
        self.b.copy(from, to);
    }

    fn run(&mut self, op: &dyn Op) {
        if self.difference.is_some() {
            self.a.run(op);
            self.b.run(op);
        } else {
            self.run_compared(op);
        }
        self.runs += 1;
    }

    fn publish(&mut self, buf: Buf) {
        self.a.publish(buf);
    }

    fn receive(&mut self, out: &mut [u8]) -> Result<(), DeviceError> {
        self.sync()?;
        self.a.receive(out)
    }

    fn replay(&mut self, _key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        body(self);
    }

    fn stamp(&mut self) {
        self.a.stamp();
    }

    fn stamps(&mut self) -> Vec<f64> {
        self.a.stamps()
    }

    fn counters(&self) -> Counters {
        self.a.counters()
    }

    fn read_bandwidth(&mut self, of: &[Buf]) -> f64 {
        self.a.read_bandwidth(of)
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        self.a.sync()?;
        self.b.sync()?;
        match &self.difference {
            Some(difference) if !self.reported => {
                self.reported = true;
                Err(DeviceError::Op { op: difference.op, why: difference.to_string() })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::cases::{SHAPE, build, lane};
    use crate::simd::Isa;
    use crate::testing::{Builder, Corrupt};
    use crate::{Attention, HostMode, Pass, RmsNorm, TopK};

    const WIDTH: usize = 128;

    fn reference() -> Host {
        Host::with(HostMode::Reference, Isa::Portable, 1, ActDtype::I8)
    }

    fn simd() -> Host {
        Host::new(Isa::detect(), 3)
    }

    fn tolerance() -> Tolerance {
        Tolerance::relative(1e-4)
    }

    /// Two norms, the second of the first's floats, and a search in the second's.
    fn run<A: Device, B: Device>(dev: &mut Diff<A, B>) -> Result<(), DeviceError> {
        let mut buf = |bytes: usize| dev.alloc(bytes, "test").expect("memory");
        let (x, weight) = (buf(4 * WIDTH * 3), buf(4 * WIDTH));
        let stride = Act::stride(WIDTH, ActDtype::I8);
        let [out, again] = [buf(8 * stride), buf(8 * stride)].map(|buf| Act {
            buf,
            width: WIDTH,
            dtype: ActDtype::I8,
        });
        let (ids, values, scratch) =
            (buf(4 * 5), buf(4 * 5), buf(TopK::scratch_bytes(1, WIDTH, 5)));
        let numbers = |n: usize| (0..n).map(|i| (i as f32 * 0.7).sin()).collect::<Vec<f32>>();
        dev.write(x, bytemuck::cast_slice(&numbers(3 * WIDTH)));
        dev.write(weight, bytemuck::cast_slice(&numbers(WIDTH)));
        // Buffers have room to spare, with something old in it.
        dev.write(out.buf, &vec![0xFF; out.buf.bytes]);
        dev.run(&RmsNorm { x, weight, out, rows: 3, pass: Pass::Round, eps: 1e-6 });
        let row = out.buf.slice(stride, 4 * WIDTH);
        dev.run(&RmsNorm { x: row, weight, out: again, rows: 1, pass: Pass::Round, eps: 1e-6 });
        let logits = again.buf.slice(0, 4 * WIDTH);
        let (rows, stride, valid, k) = (1, WIDTH, WIDTH, 5);
        dev.run(&TopK { logits, ids, values, scratch, rows, stride, valid, k });
        dev.sync()
    }

    #[test]
    fn devices_that_agree() {
        let mut dev = Diff::new(reference(), simd(), tolerance());
        assert_eq!(run(&mut dev), Ok(()));
        assert_eq!((dev.runs(), dev.difference()), (3, None));
        assert_eq!(run(&mut Diff::new(reference(), simd(), tolerance()).resynced()), Ok(()));
        let portable = Host::new(Isa::Portable, 1);
        assert_eq!(run(&mut Diff::new(portable, simd(), Tolerance::exact())), Ok(()));
        // The definition sums in f64, so bits differ somewhere: an exact comparison must fail.
        assert!(run(&mut Diff::new(reference(), simd(), Tolerance::exact())).is_err());
    }

    /// What is found when one byte is spoilt.
    fn found(op: (&'static str, usize), output: &'static str, spoil: (usize, u8)) -> Difference {
        let mut first = None;
        for resync in [false, true] {
            let mut dev =
                Diff::new(reference(), Corrupt::new(simd(), op, output, spoil), tolerance());
            dev.resync = resync;
            let error = run(&mut dev).expect_err("a difference").to_string();
            assert!(error.starts_with(op.0), "{error}");
            // Told once; the device itself did not fail.
            assert_eq!(dev.sync(), Ok(()));
            let difference = dev.difference().expect("a difference").clone();
            // Equal but for the rounding of what came before.
            let first: &mut Difference = first.get_or_insert(difference.clone());
            let place = |d: &Difference| (d.run, d.op, d.output, d.element.clone());
            assert_eq!(place(first), place(&difference));
        }
        first.expect("two runs")
    }

    #[test]
    fn the_first_wrong_element_is_named() {
        let stride = Act::stride(WIDTH, ActDtype::I8);
        let quants = 4 * WIDTH;
        for (op, output, spoil, run, element) in [
            (("rms_norm", 0), "out", (2 * stride + 4 * 77 + 2, 0x40), 0, "[row 2, 77]"),
            (("rms_norm", 1), "out", (4 * 5 + 2, 0x40), 1, "[row 0, 5]"),
            (("rms_norm", 0), "out", (stride + quants + 70, 0x04), 0, "[row 1, group 1, value 6]"),
            (("rms_norm", 0), "out", (5 * WIDTH + 2, 0x40), 0, "[row 0, group 0, scale 0]"),
            (("rms_norm", 1), "out", (5 * WIDTH + 4 + 2, 0x40), 1, "[row 0, group 0, sum 0]"),
            (("top_k", 0), "ids", (4 * 3, 1), 2, "[3]"),
            (("top_k", 0), "values", (4 * 4 + 2, 0x40), 2, "[4]"),
        ] {
            let difference = found(op, output, spoil);
            assert_eq!(
                (difference.run, difference.op, difference.output, difference.element.as_str()),
                (run, op.0, output, element)
            );
            assert_ne!(difference.want, difference.got);
        }
    }

    #[test]
    fn small_errors_and_working_memory_pass() {
        for (op, output, spoil) in
            [(("rms_norm", 0), "out", (4 * 9, 0x01)), (("top_k", 0), "scratch", (0, 0xFF))]
        {
            let b = Corrupt::new(simd(), op, output, spoil);
            assert_eq!(run(&mut Diff::new(reference(), b, tolerance())), Ok(()));
        }
    }

    #[test]
    fn what_an_op_says_of_roundings_is_allowed_and_no_more() {
        for (spoil, seen) in [((4 * 9, 0x01), false), ((4 * 9 + 2, 0x40), true)] {
            let b = Corrupt::new(simd(), ("attention", 0), "out", spoil);
            let mut dev = Diff::new(reference(), b, Tolerance::exact()).rounded();
            let mut builder = Builder::new(&mut dev);
            let op = build(&mut builder, SHAPE, &[lane(0, 300, 4)]);
            // Queries that rounding leaves as they are: neither of the two rounds any.
            let q = builder.f32(&vec![0.5; op.q.bytes / 4]);
            dev.run(&Attention { q, ..op });
            let (outcome, found) = (dev.sync(), dev.difference().map(|d| d.element.clone()));
            assert_eq!((outcome.is_err(), found), (seen, seen.then(|| "[9]".to_owned())));
        }
    }

    #[test]
    fn devices_that_number_buffers_differently_are_refused() {
        let mut dev = Diff::new(reference(), simd(), tolerance());
        dev.b.alloc(32 << 20, "one too many").expect("memory");
        let error = dev.alloc(64, "test").expect_err("refused").to_string();
        assert!(error.contains("number their allocations differently"), "{error}");
    }

    #[test]
    fn buffers_do_not_overlap() {
        let mut dev = Diff::new(reference(), simd(), tolerance());
        let sizes = [1, 0, 300, 40 << 20, REGION_BYTES / 4, REGION_BYTES / 4, 3 << 20, 100 << 20];
        let bufs = sizes.map(|bytes| dev.alloc(bytes, "test").expect("memory"));
        for (i, a) in bufs.iter().enumerate() {
            assert_eq!(a.bytes, sizes[i]);
            assert!(bufs[..i].iter().all(|b| !a.overlaps(b)));
        }
    }
}
