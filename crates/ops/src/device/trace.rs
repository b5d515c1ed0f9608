//! A device that times every op of another.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use delegate::delegate;

use crate::device::{Counters, Device, DeviceError, DeviceInfo, Fill};
use crate::{Buf, Cost, Op};

/// Time and cost of one kind of op.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpCount {
    /// Runs.
    pub runs: usize,
    /// Time on the device.
    pub time: Duration,
    /// Sum of the costs.
    pub cost: Cost,
}

/// What was stamped: each op's name and cost, in order.
type Log = Vec<(&'static str, Cost)>;

/// Runs ops on `inner` with a time stamp before and after each, and adds up their time by name. No
/// two ops overlap, so the sum is more than a round takes without stamps.
#[derive(Debug)]
pub struct Trace<D> {
    /// The device that computes.
    pub inner: D,
    /// What was run, by op name, up to the last `sync` or `receive`.
    pub ops: BTreeMap<&'static str, OpCount>,
    /// Whether ops are timed; if not, the device works as without this.
    pub stamping: bool,
    /// Whether replayed sequences are recorded; if not, their ops are enqueued one by one each time.
    pub recording: bool,
    stamped: Log,
    recorded: HashMap<u64, Log>,
}

impl<D: Device> Trace<D> {
    /// The name under which nothing at all is timed once in each replayed sequence: what a pair of
    /// stamps costs.
    pub const NOTHING: &'static str = "(a pair of stamps)";

    /// Starts with empty counters.
    pub fn new(inner: D) -> Trace<D> {
        let (ops, recorded) = (BTreeMap::new(), HashMap::new());
        Trace { inner, ops, stamping: true, recording: true, stamped: Log::new(), recorded }
    }

    /// Adds up what was stamped since the last time.
    fn settle(&mut self) {
        let stamps = self.inner.stamps();
        for ((name, cost), pair) in self.stamped.drain(..).zip(stamps.chunks_exact(2)) {
            let count = self.ops.entry(name).or_default();
            count.runs += 1;
            count.time += Duration::from_secs_f64((pair[1] - pair[0]).max(0.0));
            count.cost += cost;
        }
    }
}

/// Runs an op between two stamps.
fn stamped(dev: &mut dyn Device, log: &mut Log, op: &dyn Op) {
    dev.stamp();
    dev.run(op);
    dev.stamp();
    log.push((op.name(), op.cost()));
}

impl<D: Device> Device for Trace<D> {
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
            fn counters(&self) -> Counters;
            fn read_bandwidth(&mut self, of: &[Buf]) -> f64;
        }
    }

    fn run(&mut self, op: &dyn Op) {
        if self.stamping {
            stamped(&mut self.inner, &mut self.stamped, op);
        } else {
            self.inner.run(op);
        }
    }

    fn receive(&mut self, out: &mut [u8]) -> Result<(), DeviceError> {
        let received = self.inner.receive(out);
        self.settle();
        received
    }

    fn replay(&mut self, key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        if !self.recording {
            return body(self);
        }
        if !self.stamping {
            return self.inner.replay(key, body);
        }
        let log = self.recorded.entry(key).or_default();
        // Another recording than the one without stamps.
        self.inner.replay(key ^ 1 << 63, &mut |dev| {
            log.clear();
            dev.stamp();
            dev.stamp();
            log.push((Self::NOTHING, Cost::default()));
            body(&mut Stamping { dev, log });
        });
        self.stamped.extend_from_slice(log);
    }

    fn stamp(&mut self) {}

    fn stamps(&mut self) -> Vec<f64> {
        Vec::new()
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        let synced = self.inner.sync();
        self.settle();
        synced
    }
}

/// A device inside a replayed sequence.
struct Stamping<'a> {
    dev: &'a mut dyn Device,
    log: &'a mut Log,
}

impl Device for Stamping<'_> {
    delegate! {
        to self.dev {
            fn info(&self) -> DeviceInfo;
            fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError>;
            fn upload(&mut self, buf: Buf, piece: usize, fill: &Fill<'_>);
            fn write(&mut self, buf: Buf, bytes: &[u8]);
            fn read(&mut self, buf: Buf, out: &mut [u8]);
            fn zero(&mut self, buf: Buf);
            fn copy(&mut self, from: Buf, to: Buf);
            fn publish(&mut self, buf: Buf);
            fn receive(&mut self, out: &mut [u8]) -> Result<(), DeviceError>;
            fn counters(&self) -> Counters;
            fn read_bandwidth(&mut self, of: &[Buf]) -> f64;
            fn sync(&mut self) -> Result<(), DeviceError>;
        }
    }

    fn run(&mut self, op: &dyn Op) {
        stamped(self.dev, self.log, op);
    }

    fn replay(&mut self, _key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        body(self);
    }

    fn stamp(&mut self) {}

    fn stamps(&mut self) -> Vec<f64> {
        Vec::new()
    }
}
