//! A device that only counts: the memory plan, the cost and the route of every op, before any
//! weight is loaded.

use std::collections::BTreeMap;

use crate::device::{Counters, Device, DeviceError, DeviceInfo, Fill};
use crate::kernel::{Card, Launch, Plan};
use crate::{ActDtype, Buf, Cost, Op, TileOrder, Unsupported};

/// What one kind of op adds up to.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    /// Runs.
    pub runs: usize,
    /// Sum of the costs.
    pub cost: Cost,
}

/// Allocates nothing and computes nothing.
#[derive(Debug)]
pub struct DryRun {
    act: ActDtype,
    /// Bytes of each allocation, with its purpose.
    pub allocations: Vec<(String, usize)>,
    /// Costs by op name since the last [`DryRun::reset`].
    pub ops: BTreeMap<&'static str, Counted>,
    /// Geometry that an op refused.
    pub unsupported: Vec<Unsupported>,
    /// The first launch of each kernel that the ops need on `card`.
    pub launches: Vec<Launch>,
    card: Option<Card>,
    plan: Plan,
}

impl DryRun {
    /// An empty plan for a device with these activations.
    pub fn new(act: ActDtype) -> DryRun {
        DryRun {
            act,
            allocations: Vec::new(),
            ops: BTreeMap::new(),
            unsupported: Vec::new(),
            launches: Vec::new(),
            card: None,
            plan: Plan::default(),
        }
    }

    /// An empty plan for an NVIDIA card.
    pub fn on_card(card: Card) -> DryRun {
        DryRun { card: Some(card), ..DryRun::new(ActDtype::Bf16) }
    }

    fn plan(&mut self, card: &Card, op: &dyn Op) -> Result<(), Unsupported> {
        self.plan.clear();
        op.cuda(card, &mut self.plan)?;
        for launch in self.plan.launches() {
            let same = |l: &Launch| {
                (l.source, l.defines, l.entry) == (launch.source, launch.defines, launch.entry)
            };
            if !self.launches.iter().any(same) {
                self.launches.push(*launch);
            }
        }
        Ok(())
    }

    /// Forgets the ops counted so far; keeps the allocations.
    pub fn reset(&mut self) {
        self.ops.clear();
    }

    /// The cost of all ops counted.
    pub fn total(&self) -> Cost {
        let mut total = Cost::default();
        self.ops.values().for_each(|c| total += c.cost);
        total
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.allocations.iter().map(|(_, bytes)| bytes).sum()
    }
}

impl Device for DryRun {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: "dry run".to_owned(),
            act: self.act,
            tiles: TileOrder::Vectors,
            // No kernel of a card reads them yet.
            int8_pages: self.card.is_none(),
        }
    }

    fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError> {
        self.allocations.push((what.to_owned(), bytes));
        Ok(Buf { alloc: (self.allocations.len() - 1) as u32, offset: 0, bytes })
    }

    fn upload(&mut self, _: Buf, _: usize, _: &Fill<'_>) {}

    fn write(&mut self, _: Buf, _: &[u8]) {}

    fn read(&mut self, _: Buf, out: &mut [u8]) {
        out.fill(0);
    }

    fn zero(&mut self, _: Buf) {}

    fn copy(&mut self, _: Buf, _: Buf) {}

    fn run(&mut self, op: &dyn Op) {
        let planned = op.check().and_then(|()| match self.card {
            Some(card) => self.plan(&card, op),
            None => Ok(()),
        });
        if let Err(unsupported) = planned
            && !self.unsupported.contains(&unsupported)
        {
            self.unsupported.push(unsupported);
        }
        let counted = self.ops.entry(op.name()).or_default();
        counted.runs += 1;
        counted.cost += op.cost();
    }

    fn publish(&mut self, _: Buf) {}

    fn receive(&mut self, out: &mut [u8]) -> Result<(), DeviceError> {
        out.fill(0);
        Ok(())
    }

    fn replay(&mut self, _key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        body(self);
    }

    fn stamp(&mut self) {}

    fn stamps(&mut self) -> Vec<f64> {
        Vec::new()
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }

    fn read_bandwidth(&mut self, _: &[Buf]) -> f64 {
        0.0
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}
