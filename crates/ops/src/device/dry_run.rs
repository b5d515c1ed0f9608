//! A device that only counts: the memory plan, the cost and the route of every op, before any
//! weight is loaded.

use std::collections::{BTreeMap, HashSet};

use crate::device::{Counters, Device, DeviceError, DeviceInfo, Fill};
use crate::kernel::{Card, Defines, LIKE_ALONE, Launch, Plan};
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
    /// The first launch of each kernel that the ops need on `card`. Stages of a sequence to record are joined.
    pub launches: Vec<Launch>,
    /// What tells their kernels apart: where they are, and what they are compiled for.
    kernels: HashSet<(&'static str, &'static str, Defines)>,
    card: Option<Card>,
    plan: Plan,
    recording: bool,
    /// Stages that more may join, and how many they are.
    chain: Option<(Launch, usize)>,
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
            kernels: HashSet::new(),
            card: None,
            plan: Plan::default(),
            recording: false,
            chain: None,
        }
    }

    /// An empty plan for an NVIDIA card.
    pub fn on_card(card: Card) -> DryRun {
        DryRun { card: Some(card), ..DryRun::new(ActDtype::Bf16) }
    }

    fn plan(&mut self, card: &Card, op: &dyn Op) -> Result<(), Unsupported> {
        let mut plan = std::mem::take(&mut self.plan);
        plan.clear();
        let planned = op.cuda(card, &mut plan);
        if planned.is_ok() {
            plan.launches().iter().for_each(|launch| self.launch(launch));
        }
        self.plan = plan;
        planned
    }

    fn launch(&mut self, launch: &Launch) {
        if !self.recording || launch.stage.is_none() {
            self.end_chain();
            return self.note(*launch);
        }
        let join =
            |(chain, stages): (Launch, usize)| Some((chain.joined(stages, launch)?, stages + 1));
        let joined = self.chain.and_then(join);
        if joined.is_none() {
            self.end_chain();
        }
        self.chain = joined.or(Some((*launch, 1)));
    }

    fn end_chain(&mut self) {
        if let Some((chain, _)) = self.chain.take() {
            self.note(chain);
        }
    }

    fn note(&mut self, launch: Launch) {
        if self.kernels.insert((launch.source.name, launch.entry, launch.defines)) {
            self.launches.push(launch);
        }
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
            like_alone: self.card.map_or(usize::MAX, |_| LIKE_ALONE),
        }
    }

    fn alloc(&mut self, bytes: usize, what: &str) -> Result<Buf, DeviceError> {
        self.allocations.push((what.to_owned(), bytes));
        Ok(Buf { alloc: (self.allocations.len() - 1) as u32, offset: 0, bytes })
    }

    fn upload(&mut self, _: Buf, _: usize, _: &Fill<'_>) {}

    fn write(&mut self, _: Buf, _: &[u8]) {
        self.end_chain();
    }

    fn read(&mut self, _: Buf, out: &mut [u8]) {
        out.fill(0);
    }

    fn zero(&mut self, _: Buf) {
        self.end_chain();
    }

    fn copy(&mut self, _: Buf, _: Buf) {
        self.end_chain();
    }

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

    fn publish(&mut self, _: Buf) {
        self.end_chain();
    }

    fn receive(&mut self, out: &mut [u8]) -> Result<(), DeviceError> {
        out.fill(0);
        Ok(())
    }

    fn replay(&mut self, _key: u64, body: &mut dyn FnMut(&mut dyn Device)) {
        self.recording = true;
        body(self);
        self.end_chain();
        self.recording = false;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::MOST_STAGES;
    use crate::{Act, Codes, Format, Linear, LinearPart, Pass, RmsNorm, ScaleDtype, Weight};

    const HOPPER: Card = Card { arch: 90, sms: 132, shared: 227 << 10 };

    /// Names of defines of each launch that a norm and a product after it need.
    fn launches(run: impl FnOnce(&mut DryRun, &dyn Op, &dyn Op)) -> Vec<Vec<&'static str>> {
        let (k, n, pass) = (64, 16, Pass::Round);
        let buf = |alloc, bytes| Buf { alloc, offset: 0, bytes };
        let out = Act { buf: buf(2, 2 * k), width: k, dtype: ActDtype::Bf16 };
        let norm =
            RmsNorm { x: buf(0, 4 * k), weight: buf(1, 4 * k), out, rows: 1, pass, eps: 1e-6 };
        let format = Format::Affine { codes: Codes::U4, group: 64, scale: ScaleDtype::Bf16 };
        let bytes = format.packed_bytes(n, k).expect("whole groups");
        let weight = Weight { buf: buf(3, bytes), format, n, k };
        let part = LinearPart { weight, out: buf(4, 4 * n), add: false };
        let mut dev = DryRun::on_card(HOPPER);
        run(&mut dev, &norm, &Linear::new(out, 1, pass, &[part]));
        assert_eq!(dev.unsupported, []);
        let names = |l: &Launch| l.defines.as_slice().iter().map(|(name, _)| *name).collect();
        dev.launches.iter().map(names).collect()
    }

    #[test]
    fn stages_of_a_recorded_sequence_are_one_launch() {
        let both = |d: &Vec<&str>| d.contains(&"NORM_WIDTH") && d.contains(&"BLOCKS");
        let joined = launches(|dev, norm, product| {
            dev.replay(0, &mut |dev| {
                dev.run(norm);
                dev.run(product);
            });
        });
        assert!(joined.len() == 1 && both(&joined[0]), "{joined:?}");
        // Not where something comes between them, nor outside a recorded sequence.
        let parted = launches(|dev, norm, product| {
            dev.replay(0, &mut |dev| {
                dev.run(norm);
                dev.publish(Buf { alloc: 4, offset: 0, bytes: 4 });
                dev.run(product);
            });
        });
        let apart = launches(|dev, norm, product| {
            dev.run(norm);
            dev.run(product);
        });
        assert_eq!(parted, apart);
        assert!(apart.len() == 2 && !apart.iter().any(both), "{apart:?}");
    }

    #[test]
    fn a_chain_has_so_many_stages_at_most() {
        let long = launches(|dev, norm, product| {
            dev.replay(0, &mut |dev| {
                (0..MOST_STAGES).for_each(|_| dev.run(norm));
                dev.run(product);
            });
        });
        assert_eq!(long.len(), 2, "{long:?}");
    }
}
