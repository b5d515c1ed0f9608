//! A device that times every op of another.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::device::{Device, DeviceError, DeviceInfo};
use crate::{Buf, Cost, Op};

/// Time and cost of one kind of op.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpCount {
    /// Runs.
    pub runs: usize,
    /// Wall time.
    pub time: Duration,
    /// Sum of the costs.
    pub cost: Cost,
}

/// Runs ops on `inner` one at a time and adds up their time by name.
#[derive(Debug)]
pub struct Trace<D> {
    /// The device that computes.
    pub inner: D,
    /// What was run, by op name.
    pub ops: BTreeMap<&'static str, OpCount>,
}

impl<D: Device> Trace<D> {
    /// Starts with empty counters.
    pub fn new(inner: D) -> Trace<D> {
        Trace { inner, ops: BTreeMap::new() }
    }
}

impl<D: Device> Device for Trace<D> {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError> {
        self.inner.alloc(bytes, what)
    }

    fn upload(&mut self, buf: Buf, piece: usize, fill: &(dyn Fn(usize, &mut [u8]) + Sync)) {
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
        let start = Instant::now();
        self.inner.run(op);
        let count = self.ops.entry(op.name()).or_default();
        count.runs += 1;
        count.time += start.elapsed();
        count.cost += op.cost();
    }

    fn replay(&mut self, _key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        body(self);
    }

    fn read_bandwidth(&mut self, of: &[Buf]) -> f64 {
        self.inner.read_bandwidth(of)
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        self.inner.sync()
    }
}
