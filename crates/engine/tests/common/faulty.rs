//! A device that fails when it is told to.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use delegate::delegate;
use ops::{Buf, Counters, Device, DeviceError, DeviceInfo, Fill, Host, Op};

/// What is to go wrong; shared with the test.
#[derive(Debug, Default)]
pub struct Wrong {
    /// Fails the op that comes after so many more; negative is never.
    pub in_ops: AtomicI64,
    /// Panics in that op's stead, outside of what a device catches.
    pub panics: AtomicBool,
    /// From then on nothing works any more, until there is a new device.
    pub lost: AtomicBool,
    /// Loading fails too.
    pub out_of_memory: AtomicBool,
}

impl Wrong {
    pub fn nothing() -> Arc<Wrong> {
        Arc::new(Wrong { in_ops: AtomicI64::new(-1), ..Wrong::default() })
    }

    pub fn after(&self, ops: i64) {
        self.in_ops.store(ops, Ordering::SeqCst);
    }
}

#[derive(Debug)]
pub struct Faulty {
    pub inner: Host,
    pub wrong: Arc<Wrong>,
    failed: Option<DeviceError>,
    /// What was replayed by key, and what is noted of a sequence now.
    replayed: HashMap<u64, u64>,
    noted: Option<DefaultHasher>,
}

impl Faulty {
    pub fn new(inner: Host, wrong: Arc<Wrong>) -> Faulty {
        wrong.lost.store(false, Ordering::SeqCst);
        Faulty { inner, wrong, failed: None, replayed: HashMap::new(), noted: None }
    }

    fn error(&mut self) -> Option<DeviceError> {
        if self.wrong.lost.load(Ordering::SeqCst) {
            return Some(DeviceError::Op { op: "any", why: "the device is lost".to_owned() });
        }
        self.failed.take()
    }
}

impl Device for Faulty {
    delegate! {
        to self.inner {
            fn info(&self) -> DeviceInfo;
            fn upload(&mut self, buf: Buf, piece: usize, fill: &Fill<'_>);
            fn write(&mut self, buf: Buf, bytes: &[u8]);
            fn read(&mut self, buf: Buf, out: &mut [u8]);
            fn zero(&mut self, buf: Buf);
            fn copy(&mut self, from: Buf, to: Buf);
            fn counters(&self) -> Counters;
        }
    }

    fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError> {
        if self.wrong.out_of_memory.load(Ordering::SeqCst) {
            return Err(DeviceError::OutOfMemory { bytes, what: what.to_owned() });
        }
        self.inner.alloc(bytes, what)
    }

    fn run(&mut self, op: &dyn Op) {
        let left = self.wrong.in_ops.load(Ordering::SeqCst);
        if left >= 0 {
            self.wrong.in_ops.store(left - 1, Ordering::SeqCst);
        }
        if left == 0 {
            assert!(!self.wrong.panics.swap(false, Ordering::SeqCst), "a panic as asked for");
            let why = "as asked for".to_owned();
            self.failed = Some(DeviceError::Op { op: op.name(), why });
        }
        if let Some(noted) = &mut self.noted {
            format!("{op:?}").hash(noted);
        }
        self.inner.run(op);
    }

    fn publish(&mut self, buf: Buf) {
        if let Some(noted) = &mut self.noted {
            buf.hash(noted);
        }
        self.inner.publish(buf);
    }

    fn receive(&mut self, out: &mut [u8]) -> Result<(), DeviceError> {
        if let Some(error) = self.error() {
            // Nothing that was published counts any more.
            while self.inner.receive(&mut []).is_ok() {}
            return Err(error);
        }
        self.inner.receive(out)
    }

    /// A device that records would do again what it did first.
    fn replay(&mut self, key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        self.noted = Some(DefaultHasher::new());
        body(self);
        let noted = self.noted.take().map(|noted| noted.finish());
        let first = self.replayed.entry(key).or_insert(noted.unwrap_or_default());
        assert_eq!(Some(*first), noted, "another sequence has key {key:#x}");
    }

    fn stamp(&mut self) {}

    fn stamps(&mut self) -> Vec<f64> {
        Vec::new()
    }

    fn read_bandwidth(&mut self, _: &[Buf]) -> f64 {
        0.0
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        match self.error() {
            Some(error) => Err(error),
            None => self.inner.sync(),
        }
    }
}
