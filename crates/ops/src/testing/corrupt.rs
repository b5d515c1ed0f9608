//! A device that gets one element of one op wrong, to see whether anyone notices.

use delegate::delegate;

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
    delegate! {
        to self.inner {
            fn info(&self) -> DeviceInfo;
            fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError>;
            fn upload(&mut self, buf: Buf, piece: usize, fill: &Fill<'_>);
            fn write(&mut self, buf: Buf, bytes: &[u8]);
            fn read(&mut self, buf: Buf, out: &mut [u8]);
            fn zero(&mut self, buf: Buf);
            fn copy(&mut self, from: Buf, to: Buf);
            fn publish(&mut self, buf: Buf);
            fn receive(&mut self, out: &mut [u8]) -> Result<(), DeviceError>;
            fn stamp(&mut self);
            fn stamps(&mut self) -> Vec<f64>;
            fn counters(&self) -> Counters;
            fn read_bandwidth(&mut self, of: &[Buf]) -> f64;
            fn sync(&mut self) -> Result<(), DeviceError>;
        }
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

    fn replay(&mut self, _key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        body(self);
    }
}
