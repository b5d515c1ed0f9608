//! A device that gets one element of one op wrong, to see whether anyone notices.

use crate::device::{Counters, Device, DeviceError, DeviceInfo, Fill};
use crate::{Bindings, Buf, Op};

/// Runs ops on `inner` and spoils one byte.
#[derive(Debug)]
pub struct Corrupt<D> {
    /// The device that computes.
    pub inner: D,
    /// The op whose output is spoilt.
    pub op: &'static str,
    /// Which of its runs, counted from 0.
    pub run: usize,
    /// The name of the output.
    pub output: &'static str,
    /// Byte of the output.
    pub byte: usize,
    /// Bits of that byte that are flipped.
    pub bits: u8,
    /// Runs of the op so far.
    pub seen: usize,
}

impl<D: Device> Corrupt<D> {
    /// Spoils the element at byte `byte` of an output in the `run`th run of an op: flips the bits of
    /// `bits` in that byte.
    pub fn new(
        inner: D,
        (op, run): (&'static str, usize),
        output: &'static str,
        (byte, bits): (usize, u8),
    ) -> Corrupt<D> {
        Corrupt { inner, op, run, output, byte, bits, seen: 0 }
    }

    fn spoil(&mut self, op: &dyn Op) {
        let mut bindings = Bindings::default();
        op.bind(&mut bindings);
        let output = bindings.iter().find(|b| b.name == self.output);
        let buf = output.expect("an output of that name").buf;
        let mut byte = [0];
        let at = buf.slice(self.byte, 1);
        self.inner.read(at, &mut byte);
        self.inner.write(at, &[byte[0] ^ self.bits]);
    }
}

impl<D: Device> Device for Corrupt<D> {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError> {
        self.inner.alloc(bytes, what)
    }

    fn upload(&mut self, buf: Buf, piece: usize, fill: &Fill<'_>) {
        self.inner.upload(buf, piece, fill);
    }

    fn write(&mut self, buf: Buf, bytes: &[u8]) {
        self.inner.write(buf, bytes);
    }

    fn read(&mut self, buf: Buf, out: &mut [u8]) {
        self.inner.read(buf, out);
    }

    fn zero(&mut self, buf: Buf) {
        self.inner.zero(buf);
    }

    fn copy(&mut self, from: Buf, to: Buf) {
        self.inner.copy(from, to);
    }

    fn run(&mut self, op: &dyn Op) {
        self.inner.run(op);
        if op.name() == self.op {
            if self.seen == self.run {
                self.spoil(op);
            }
            self.seen += 1;
        }
    }

    fn publish(&mut self, buf: Buf) {
        self.inner.publish(buf);
    }

    fn receive(&mut self, out: &mut [u8]) -> Result<(), DeviceError> {
        self.inner.receive(out)
    }

    fn replay(&mut self, _key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        body(self);
    }

    fn stamp(&mut self) {
        self.inner.stamp();
    }

    fn stamps(&mut self) -> Vec<f64> {
        self.inner.stamps()
    }

    fn counters(&self) -> Counters {
        self.inner.counters()
    }

    fn read_bandwidth(&mut self, of: &[Buf]) -> f64 {
        self.inner.read_bandwidth(of)
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        self.inner.sync()
    }
}
