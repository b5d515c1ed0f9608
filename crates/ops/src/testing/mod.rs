//! The conformance harness: one set of cases, every device.
//!
//! A case is a function that builds an op on a [`Builder`]. It is built again for each device from
//! the same seed, so all see the same inputs. Outputs start poisoned (NaN, or 0xFF bytes) and
//! every buffer lies between guard zones that must stay intact.
//!
//! Without more, cases run on the CPU. Once another device is [registered](register), the same cases
//! run on that device alone and are held to the same definitions.

mod corrupt;
mod devices;

pub use corrupt::Corrupt;
pub use devices::{Case, Skip, WithDevice, on_each_device, register, skipped};
#[cfg(feature = "cases")]
pub use devices::{all_cases, plans};

use half::bf16;

use crate::kv::Part;
use crate::simd::Isa;
use crate::{
    Act, ActDtype, Buf, Device, DeviceError, Host, HostMode, KvDtype, KvPool, LaneStep, Lanes, Mem,
    Op, Rounded, Unsupported,
};

/// Lists the functions of a case file that run on every device. Each of them is also a test of the
/// CPU: `#[cfg_attr(test, test)]`.
#[cfg(any(test, feature = "cases"))]
macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        #[cfg(feature = "cases")]
        pub(crate) const CASES: &[$crate::testing::Case] =
            &[$((stringify!($name), $name as fn())),*];
    };
}
#[cfg(any(test, feature = "cases"))]
pub(crate) use cases;

const GUARD: usize = 256;
const GUARD_BYTE: u8 = 0xA5;

/// How far from the definition a device may be: |got − want| ≤ rel · (|want| + scale of the output),
/// where the scale is the output's root mean square.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    rel: f32,
    elsewhere: Elsewhere,
}

/// What holds on devices that are not the CPU.
#[derive(Clone, Copy, Debug, Default)]
enum Elsewhere {
    /// The same.
    #[default]
    Same,
    /// Another relative tolerance.
    Relative(f32),
    /// What the op says: [`Op::rounded`].
    Rounded,
}

impl Tolerance {
    /// Bit equality with the definition.
    pub fn exact() -> Tolerance {
        Tolerance::relative(0.0)
    }

    /// Relative to the element and to the output's root mean square.
    pub fn relative(rel: f32) -> Tolerance {
        Tolerance { rel, elsewhere: Elsewhere::Same }
    }

    /// Another relative tolerance for devices that are not the CPU, where the order of sums or the
    /// precision of products differs by design.
    #[must_use]
    pub fn elsewhere(self, rel: f32) -> Tolerance {
        Tolerance { elsewhere: Elsewhere::Relative(rel), ..self }
    }

    /// On devices that are not the CPU, `out` is held to what the op itself says of their roundings: [`Op::rounded`].
    #[must_use]
    pub fn rounded_elsewhere(self) -> Tolerance {
        Tolerance { elsewhere: Elsewhere::Rounded, ..self }
    }

    /// Whether only equal bits will do.
    pub(crate) fn is_exact(self) -> bool {
        self.rel == 0.0
    }

    /// How far an element may be from `want` in an output of this root mean square.
    pub(crate) fn bound(self, want: f32, rms: f32) -> f32 {
        self.rel * (want.abs() + rms)
    }
}

/// What a case gets where it asks for int8 activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    /// int8.
    AsAsked,
    /// bf16: the device's own.
    Bf16,
    /// f32 whose inputs are rounded to bf16: what the definition sees beside a device with bf16 rows.
    RoundedF32,
}

impl Rows {
    fn of(dev: &dyn Device) -> Rows {
        match dev.info().act {
            ActDtype::Bf16 => Rows::Bf16,
            ActDtype::I8 | ActDtype::F32 => Rows::AsAsked,
        }
    }

    fn dtype(self, asked: ActDtype) -> ActDtype {
        match (asked, self) {
            (ActDtype::I8, Rows::Bf16) => ActDtype::Bf16,
            (ActDtype::I8, Rows::RoundedF32) => ActDtype::F32,
            _ => asked,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    F32,
    Bf16,
    /// Keys or values of a pool in int8.
    Int8(KvPool, Part),
    Act(Act),
    Bytes,
}

#[derive(Clone, Debug)]
struct Output {
    name: String,
    buf: Buf,
    kind: Kind,
}

/// Buffers of a case on one device.
pub struct Builder<'d> {
    dev: &'d mut dyn Device,
    rows: Rows,
    seed: u64,
    guards: Vec<Buf>,
    outputs: Vec<Output>,
    expected: Vec<(String, Vec<f32>)>,
}

impl<'d> Builder<'d> {
    /// A builder on `dev`.
    pub fn new(dev: &'d mut dyn Device) -> Builder<'d> {
        let rows = Rows::of(dev);
        Builder::with(dev, rows)
    }

    fn with(dev: &'d mut dyn Device, rows: Rows) -> Builder<'d> {
        let (guards, outputs, expected) = (Vec::new(), Vec::new(), Vec::new());
        Builder { dev, rows, seed: 0x9E37_79B9_7F4A_7C15, guards, outputs, expected }
    }

    /// How the device wants quantised weights packed.
    #[cfg(any(test, feature = "cases"))]
    pub(crate) fn tile_order(&self) -> crate::TileOrder {
        self.dev.info().tiles
    }

    fn guarded(&mut self, bytes: usize) -> Buf {
        let padded = bytes.next_multiple_of(64);
        let all = self.dev.alloc(GUARD + padded + GUARD, "case").expect("memory for a test case");
        let before = all.slice(0, GUARD);
        let after = all.slice(GUARD + bytes, padded - bytes + GUARD);
        for guard in [before, after] {
            self.dev.write(guard, &vec![GUARD_BYTE; guard.bytes]);
            self.guards.push(guard);
        }
        all.slice(GUARD, bytes)
    }

    /// The next number of a fixed sequence, uniform in 0..2^64 (SplitMix64).
    pub fn random(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Starts another sequence, so that an input does not depend on how much was drawn before it.
    pub fn reseed(&mut self, seed: u64) {
        self.seed = seed.wrapping_mul(0xD134_2543_DE82_EF95);
    }

    /// Uniform in 0..1.
    pub fn uniform(&mut self) -> f32 {
        (self.random() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// An input of raw bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> Buf {
        let buf = self.guarded(bytes.len());
        self.dev.write(buf, bytes);
        buf
    }

    /// An input of given values.
    pub fn pod<T: bytemuck::Pod>(&mut self, values: &[T]) -> Buf {
        self.bytes(bytemuck::cast_slice(values))
    }

    /// An input of given f32 values.
    pub fn f32(&mut self, values: &[f32]) -> Buf {
        self.pod(values)
    }

    /// Random values of roughly normal law with this deviation, on the host.
    pub fn normal_values(&mut self, count: usize, deviation: f32) -> Vec<f32> {
        (0..count)
            .map(|_| {
                let sum: f32 = (0..4).map(|_| self.uniform() - 0.5).sum();
                sum * deviation * 1.732
            })
            .collect()
    }

    /// An input of roughly normal law.
    pub fn normal(&mut self, count: usize, deviation: f32) -> Buf {
        let values = self.normal_values(count, deviation);
        self.f32(&values)
    }

    /// An activation input whose quantised parts match its f32 part. Where a case asks for int8, a
    /// device that wants other rows gets its own.
    pub fn act(&mut self, values: &[f32], rows: usize, width: usize, dtype: ActDtype) -> Act {
        assert_eq!(values.len(), rows * width);
        let round = self.rows == Rows::RoundedF32 && dtype == ActDtype::I8;
        let dtype = self.rows.dtype(dtype);
        let stride = Act::stride(width, dtype);
        if dtype == ActDtype::Bf16 {
            let mut bytes = vec![0; rows * stride];
            for (row, values) in bytes.chunks_exact_mut(stride).zip(values.chunks_exact(width)) {
                for (to, &x) in row.chunks_exact_mut(2).zip(values) {
                    to.copy_from_slice(&bf16::from_f32(x).to_le_bytes());
                }
            }
            return Act { buf: self.bytes(&bytes), width, dtype };
        }
        let mut mem = Mem::default();
        let act = Act { buf: mem.alloc(rows * stride, "act").expect("memory"), width, dtype };
        for row in 0..rows {
            let out = act.row_mut(&mem, row);
            out.x.copy_from_slice(&values[row * width..][..width]);
            if round {
                out.x.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
            }
            out.quantize();
        }
        let buf = self.bytes(mem.get::<u8>(act.buf));
        Act { buf, width, dtype }
    }

    /// The lanes of a pass, their rows one after the other: `row0` is filled in.
    pub fn lanes(&mut self, steps: impl IntoIterator<Item = LaneStep>) -> Lanes {
        let (mut rows, mut max_rows) = (0, 0);
        let place = |step: LaneStep| {
            let row0 = rows;
            rows += step.rows;
            max_rows = max_rows.max(step.rows);
            LaneStep { row0, ..step }
        };
        let steps: Vec<LaneStep> = steps.into_iter().map(place).collect();
        let (rows, max_rows) = (rows as usize, max_rows as usize);
        Lanes { step: self.pod(&steps), count: steps.len(), rows, max_rows }
    }

    fn output(&mut self, name: &str, bytes: usize, kind: impl Fn(Buf) -> Kind) -> Buf {
        let buf = self.guarded(bytes);
        self.dev.write(buf, &vec![0xFF; bytes]);
        self.outputs.push(Output { name: name.to_owned(), buf, kind: kind(buf) });
        buf
    }

    /// An f32 output, poisoned with NaN.
    pub fn out_f32(&mut self, name: &str, count: usize) -> Buf {
        self.output(name, 4 * count, |_| Kind::F32)
    }

    /// An output compared byte for byte.
    pub fn out_bytes(&mut self, name: &str, bytes: usize) -> Buf {
        self.output(name, bytes, |_| Kind::Bytes)
    }

    /// An activation output, of the dtype that [`Builder::act`] would have. Its padding is not compared.
    pub fn out_act(&mut self, name: &str, rows: usize, width: usize, dtype: ActDtype) -> Act {
        let dtype = self.rows.dtype(dtype);
        let act = |buf| Act { buf, width, dtype };
        let buf = self.output(name, rows * Act::stride(width, dtype), |buf| Kind::Act(act(buf)));
        act(buf)
    }

    /// Also compares an input that the op updates in place, as f32.
    pub fn updated_f32(&mut self, name: &str, buf: Buf) {
        self.outputs.push(Output { name: name.to_owned(), buf, kind: Kind::F32 });
    }

    /// Also compares an activation input that the op updates in place.
    pub fn updated_act(&mut self, name: &str, act: Act) {
        self.outputs.push(Output { name: name.to_owned(), buf: act.buf, kind: Kind::Act(act) });
    }

    /// Also compares the pages of a pool, which the op updates in place. Rounding makes small differences up to a
    /// unit in the last place of bf16 (2^-7), or up to a step of int8 (2^-7 of the head's largest element).
    pub fn updated_pages(&mut self, kv: &KvPool) {
        for (name, buf, part) in [("keys", kv.keys, Part::Key), ("values", kv.values, Part::Value)]
        {
            let kind = match kv.dtype {
                KvDtype::Bf16 => Kind::Bf16,
                KvDtype::Int8 => Kind::Int8(*kv, part),
            };
            self.outputs.push(Output { name: name.to_owned(), buf, kind });
        }
    }

    /// Also compares an input that the op updates in place, byte for byte.
    pub fn updated_bytes(&mut self, name: &str, buf: Buf) {
        self.outputs.push(Output { name: name.to_owned(), buf, kind: Kind::Bytes });
    }

    /// What the definition must give for an f32 or activation output: an answer worked out by hand.
    pub fn expect(&mut self, name: &str, values: &[f32]) {
        self.expected.push((name.to_owned(), values.to_vec()));
    }
}

/// Outputs after a run, as f32 and as bytes.
struct Outcome {
    name: String,
    values: Vec<f32>,
    bytes: Vec<u8>,
    kind: Kind,
}

/// What came of a case.
struct Ran<O> {
    op: O,
    outcomes: Vec<Outcome>,
    expected: Vec<(String, Vec<f32>)>,
}

/// Runs a case; an error if the device can't do its geometry.
fn run_on<O: Op>(
    label: &str,
    dev: &mut dyn Device,
    rows: Rows,
    build: &impl Fn(&mut Builder) -> O,
) -> Result<Ran<O>, Unsupported> {
    let mut builder = Builder::with(dev, rows);
    let op = build(&mut builder);
    op.check().unwrap_or_else(|e| panic!("{label}: {e}"));
    let Builder { dev, guards, outputs, expected, .. } = builder;
    dev.run(&op);
    match dev.sync() {
        Err(DeviceError::Unsupported(why)) => return Err(why),
        other => other.unwrap_or_else(|e| panic!("{label}: {e}")),
    }
    for guard in guards {
        let mut bytes = vec![0; guard.bytes];
        dev.read(guard, &mut bytes);
        assert!(bytes.iter().all(|&b| b == GUARD_BYTE), "{label}: wrote outside a buffer");
    }
    let outcomes = outputs.into_iter().map(|out| {
        let mut bytes = vec![0u8; out.buf.bytes];
        dev.read(out.buf, &mut bytes);
        outcome(out, bytes)
    });
    Ok(Ran { op, outcomes: outcomes.collect(), expected })
}

/// The case on the CPU, which can do every geometry that cases have.
fn run_on_host<O: Op>(
    label: &str,
    mut host: Host,
    rows: Rows,
    build: &impl Fn(&mut Builder) -> O,
) -> Ran<O> {
    run_on(label, &mut host, rows, build).unwrap_or_else(|e| panic!("{label}: {e}"))
}

fn outcome(out: Output, bytes: Vec<u8>) -> Outcome {
    let floats = |b: &[u8]| bytemuck::allocation::pod_collect_to_vec::<u8, f32>(b);
    let widened = |b: &[u8]| -> Vec<f32> {
        b.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
    };
    let (values, bytes) = match out.kind {
        Kind::F32 => (floats(&bytes), bytes),
        Kind::Bf16 => (widened(&bytes), bytes),
        Kind::Int8(kv, part) => {
            let blocks = bytes.chunks_exact(kv.dtype.block_bytes(kv.head_dim));
            // Buffers on the host have the alignment of scales only by chance.
            let blocks = blocks.map(bytemuck::allocation::pod_collect_to_vec::<u8, u32>);
            let values = blocks.flat_map(|block| {
                let of = |i: usize| {
                    let block = bytemuck::cast_slice(&block);
                    kv.element(block, part, i / kv.head_dim, i % kv.head_dim) as f32
                };
                // Of NaNs only that they are some counts.
                let values = (0..kv.block()).map(of);
                values.map(|v| if v.is_nan() { f32::NAN } else { v }).collect::<Vec<_>>()
            });
            (values.collect(), bytes)
        }
        Kind::Bytes => (Vec::new(), bytes),
        Kind::Act(act) => {
            let used = Act::used(act.width, act.dtype);
            let rows = bytes.chunks_exact(act.row_bytes());
            let values = match act.dtype {
                ActDtype::Bf16 => rows.clone().flat_map(|r| widened(&r[..used])).collect(),
                ActDtype::F32 | ActDtype::I8 => {
                    rows.clone().flat_map(|r| floats(&r[..4 * act.width])).collect()
                }
            };
            (values, rows.flat_map(|r| r[..used].to_vec()).collect())
        }
    };
    Outcome { name: out.name, values, bytes, kind: out.kind }
}

fn compare(label: &str, want: &Outcome, got: &Outcome, tolerance: Tolerance) {
    if tolerance.rel == 0.0 || matches!(want.kind, Kind::Bytes) {
        if want.bytes != got.bytes {
            let at = want.bytes.iter().zip(&got.bytes).position(|(a, b)| a != b);
            let at4 = at.unwrap_or(0) / 4;
            panic!(
                "{label}: `{}` differs at byte {at:?}: as f32 want {:?} got {:?}",
                want.name,
                want.values.get(at4),
                got.values.get(at4)
            );
        }
        return;
    }
    assert_close(label, &want.name, &want.values, &got.values, tolerance);
}

fn assert_close(label: &str, name: &str, want: &[f32], got: &[f32], tolerance: Tolerance) {
    assert_eq!(want.len(), got.len(), "{label}: `{name}` length");
    // Elements that stay poisoned don't count.
    let finite = want.iter().filter(|v| v.is_finite());
    let squares: f64 = finite.clone().map(|&v| f64::from(v).powi(2)).sum();
    let rms = (squares / finite.count().max(1) as f64).sqrt() as f32;
    for (i, (&w, &g)) in want.iter().zip(got).enumerate() {
        let bound = tolerance.bound(w, rms);
        let close = (w - g).abs() <= bound || w.to_bits() == g.to_bits();
        assert!(close, "{label}: `{name}`[{i}] want {w} got {g}, bound {bound}");
    }
}

/// Holds an output to what its op says of a card's roundings; bf16 rows are rounded once more.
fn assert_rounded(label: &str, want: &[Rounded], got: &Outcome) {
    assert_eq!(want.len(), got.values.len(), "{label}: `{}` length", got.name);
    let once_more = match got.kind {
        Kind::Act(act) if act.dtype == ActDtype::Bf16 => 1.0 / 256.0,
        _ => 0.0,
    };
    for (i, (&Rounded { want, within }, &got)) in want.iter().zip(&got.values).enumerate() {
        let within = within + once_more * (want.abs() + within);
        let close = Rounded { want, within }.allows(got);
        assert!(close, "{label}: `out`[{i}] want {want} got {got}, within {within}");
    }
}

/// Builds and runs a case on the scalar reference and on the SIMD host with every instruction set
/// and with 1 and 3 threads. The hosts must agree with the reference within `tolerance`, and with
/// one another bit for bit. With a [registered](register) device: on the reference and on that
/// device, twice.
pub fn conformance<O: Op>(label: &str, tolerance: Tolerance, build: impl Fn(&mut Builder) -> O) {
    if devices::conformance(label, tolerance, &build) {
        return;
    }
    let reference = Host::with(HostMode::Reference, Isa::Portable, 1, ActDtype::I8);
    let Ran { outcomes: want, expected, .. } = run_on_host(label, reference, Rows::AsAsked, &build);
    for (name, values) in &expected {
        let out = want.iter().find(|o| &o.name == name).expect("an output of that name");
        assert_close(
            label,
            name,
            values,
            &out.values,
            Tolerance::relative(tolerance.rel.max(1e-6)),
        );
    }
    let mut first: Option<Vec<Outcome>> = None;
    for isa in Isa::available() {
        for threads in [1, 3] {
            let label = format!("{label} on {} x{threads}", isa.name());
            let host = Host::with(HostMode::Simd, isa, threads, ActDtype::I8);
            let got = run_on_host(&label, host, Rows::AsAsked, &build).outcomes;
            for (w, g) in want.iter().zip(&got) {
                compare(&label, w, g, tolerance);
            }
            match &first {
                None => first = Some(got),
                Some(first) => {
                    for (w, g) in first.iter().zip(&got) {
                        compare(&label, w, g, Tolerance::exact());
                    }
                }
            }
        }
    }
}

/// Runs a case of `max` rows and, for each fewer number of rows, the same case cut short; the rows
/// they share must have the same bits. `build(b, rows)` draws what does not depend on `rows` first,
/// and at most one row input last, so that the rows of a shorter case are the first of a longer one;
/// further row inputs come from [`Builder::reseed`].
pub fn row_invariance<O: Op>(label: &str, max: usize, build: impl Fn(&mut Builder, usize) -> O) {
    if devices::row_invariance(label, max, &build) {
        return;
    }
    for isa in Isa::available() {
        let run = |rows: usize| {
            let host = Host::with(HostMode::Simd, isa, 2, ActDtype::I8);
            run_on_host(label, host, Rows::AsAsked, &|b: &mut Builder| build(b, rows)).outcomes
        };
        same_rows(&format!("{label} on {}", isa.name()), max, &run(max), run);
    }
}

/// Holds every shorter case's rows to the first ones of `all`.
fn same_rows(label: &str, max: usize, all: &[Outcome], mut run: impl FnMut(usize) -> Vec<Outcome>) {
    for rows in 1..max {
        for (whole, part) in all.iter().zip(run(rows)) {
            let head = &whole.bytes[..part.bytes.len()];
            assert!(head == part.bytes, "{label}: {rows} of {max} rows");
        }
    }
}
