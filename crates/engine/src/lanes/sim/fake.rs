//! A machine that computes nothing but keeps books like one: a lane's state is a hash of the tokens that
//! made it, and a page holds the hash of the text up to each of its positions. So whoever reads a
//! state or a page that belongs to another text is caught.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use model::Lane;
use ops::{DeviceError, PAGE_TOKENS};

use crate::engine::EngineError;
use crate::lanes::{Limits, Machine};
use crate::round::{Going, Masker, Round};
use crate::sampler::{Bounds, Sampler};

/// Ids that exist.
pub(super) const VOCAB: usize = 64;

/// The time, which passes as the machine says.
#[derive(Clone, Debug, Default)]
pub(super) struct Time(Arc<AtomicU64>);

impl Time {
    pub(super) fn now(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::Relaxed))
    }

    pub(super) fn pass(&self, micros: u64) {
        self.0.fetch_add(micros, Ordering::Relaxed);
    }
}

/// Seeded randomness.
#[derive(Clone, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    /// True once in so many times.
    pub(super) fn one_in(&mut self, times: usize) -> bool {
        times > 0 && self.below(times) == 0
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The state after one more token.
pub(super) fn after(state: u64, token: u32) -> u64 {
    mix(state.wrapping_mul(31).wrapping_add(u64::from(token) + 1))
}

/// What the device takes for a round of so many lanes.
pub(super) fn round_time(lanes: usize) -> Duration {
    Duration::from_micros(3000 + 500 * lanes as u64)
}

/// The token that follows a text.
pub(super) fn answer(state: u64) -> u32 {
    (state >> 20) as u32 % VOCAB as u32
}

/// What the machine does wrong, once in so many times; 0 is never.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    /// A pass or a copy fails, and the machine goes on.
    pub(super) fails: usize,
    /// Of those, it is lost.
    pub(super) lost: usize,
    /// A page is not copied although that was asked for.
    pub(super) forgets_copies: bool,
    /// A snapshot is changed by whoever goes on from it.
    pub(super) spoils_snapshots: bool,
}

/// A slot on the device.
#[derive(Clone, Debug)]
struct Slot {
    table: Vec<u32>,
    state: u64,
    /// By parity: states after each row of a pass, and the state that the pass found. Rows can be
    /// taken up by that one only.
    pending: [(u64, Vec<u64>); 2],
    end: u32,
    stops: Vec<u32>,
    /// While rounds are in flight: where the device has the lane.
    step: Lane,
    anchor: u32,
    frozen: bool,
    draft: bool,
}

impl Slot {
    fn new(slot: u32) -> Slot {
        Slot {
            table: Vec::new(),
            state: 0,
            pending: Default::default(),
            end: 0,
            stops: Vec::new(),
            step: Lane::new(slot),
            anchor: 0,
            frozen: false,
            draft: false,
        }
    }
}

/// The state before each state that ever was, on any machine: a disk outlives them.
pub(super) type Before = Rc<RefCell<HashMap<u64, u64>>>;

pub(super) struct Fake {
    limits: Limits,
    pub(super) clock: Time,
    random: Random,
    faults: Faults,
    slots: Vec<Slot>,
    pages: Vec<[u64; PAGE_TOKENS]>,
    saved: Vec<u64>,
    before: Before,
    flight: Vec<u32>,
    /// With when the device is done.
    rounds: VecDeque<(HashMap<u32, Round>, Duration)>,
    lost: bool,
    /// Something failed that nobody waited for: whoever waits next is told, and until then nothing is done.
    failed: bool,
    /// The first thing that was not as it had to be.
    pub(super) wrong: Option<String>,
    /// Pages written since somebody set this to 0.
    pub(super) written: usize,
}

impl Fake {
    pub(super) fn new(limits: Limits, seed: u64, clock: Time, faults: Faults) -> Fake {
        Fake {
            clock,
            random: Random(seed),
            faults,
            slots: (0..limits.slots as u32).map(Slot::new).collect(),
            pages: vec![[0; PAGE_TOKENS]; limits.pages],
            saved: vec![0; limits.snapshots],
            before: Before::default(),
            flight: Vec::new(),
            rounds: VecDeque::new(),
            lost: false,
            failed: false,
            wrong: None,
            written: 0,
            limits,
        }
    }

    /// The same machine, which knows of the states that others came by.
    pub(super) fn knowing(self, before: &Before) -> Fake {
        Fake { before: Rc::clone(before), ..self }
    }

    /// Whether a snapshot and pages are those of a text.
    pub(super) fn holds(&self, text: &[u32], snapshot: u32, pages: &[u32]) -> Result<(), String> {
        let mut state = 0;
        for (i, &token) in text.iter().enumerate() {
            state = after(state, token);
            let page = pages[i / PAGE_TOKENS];
            if self.pages[page as usize][i % PAGE_TOKENS] != state {
                return Err(format!(
                    "page {page} of a checkpoint of {} was changed at {i}",
                    text.len()
                ));
            }
        }
        if self.saved[snapshot as usize] != state {
            return Err(format!("snapshot {snapshot} was changed"));
        }
        Ok(())
    }

    fn spend(&self, micros: u64) {
        self.clock.pass(micros);
    }

    fn note(&mut self, wrong: impl FnOnce() -> String) {
        self.wrong.get_or_insert_with(wrong);
    }

    /// Whether what was asked for is not done.
    fn breaks(&mut self) -> bool {
        self.failed |= self.random.one_in(self.faults.fails);
        self.failed
    }

    /// Fails now and then; then the slots that took part hold nothing of use.
    fn may_fail(&mut self, slots: &[u32]) -> Result<(), EngineError> {
        if !self.breaks() {
            return Ok(());
        }
        self.failed = false;
        for &slot in slots {
            self.slots[slot as usize].state = self.random.next();
        }
        self.lost |= self.random.one_in(self.faults.lost);
        (self.flight, self.rounds) = (Vec::new(), VecDeque::new());
        Err(DeviceError::Op { op: "fake", why: "as asked for".to_owned() }.into())
    }

    /// The state of a lane once its pending rows are taken up, after a look at its pages.
    fn taken_up(&mut self, lane: &Lane) -> u64 {
        let slot = &self.slots[lane.slot as usize];
        let (before, rows) = &slot.pending[lane.parity as usize];
        let (state, fits) = match lane.pending {
            0 => (slot.state, true),
            n => (rows[n as usize - 1], *before == slot.state),
        };
        if !fits {
            self.note(|| format!("slot {} takes up rows of another state", lane.slot));
        }
        // Every position that the next rows will see.
        let mut at = state;
        for pos in (0..lane.pos as usize).rev() {
            let page = self.slots[lane.slot as usize].table.get(pos / PAGE_TOKENS);
            let held = page.map(|&page| self.pages[page as usize][pos % PAGE_TOKENS]);
            if held != Some(at) {
                let (slot, end) = (lane.slot, lane.pos);
                self.note(|| format!("slot {slot} at {end} sees another text's position {pos}"));
                break;
            }
            // A page's end is as good as the whole of it: pages are only ever copied whole.
            at = *self.before.borrow().get(&at).unwrap_or(&u64::MAX);
        }
        state
    }

    fn write(&mut self, slot: u32, pos: usize, value: u64) {
        match self.slots[slot as usize].table.get(pos / PAGE_TOKENS) {
            Some(&page) => self.pages[page as usize][pos % PAGE_TOKENS] = value,
            None => self.note(|| format!("slot {slot} has no page for {pos}")),
        }
    }

    fn extend(&mut self, state: u64, token: u32) -> u64 {
        let next = after(state, token);
        self.before.borrow_mut().insert(next, state);
        next
    }

    /// One lane's part of a round: what a device would do with the slot's own step.
    fn one(&mut self, slot: u32) -> Round {
        let Slot { step, frozen, draft, .. } = self.slots[slot as usize].clone();
        let state = self.taken_up(&step);
        self.slots[slot as usize].state = state;
        let block = self.limits.block;
        let rows = if draft { block } else { 1 };
        let right = self.random.below(rows) + 1;
        let (mut tokens, mut states) = (Vec::new(), Vec::new());
        let mut at = state;
        let mut anchor = self.slots[slot as usize].anchor;
        let (end, stops) = {
            let s = &self.slots[slot as usize];
            (s.end, s.stops.clone())
        };
        let mut ended = frozen;
        for i in 0..if frozen { 0 } else { right } {
            let room = end.saturating_sub(step.pos + 1 + i as u32);
            if room == 0 {
                ended = true;
                break;
            }
            at = self.extend(at, anchor);
            self.write(slot, step.pos as usize + i, at);
            states.push(at);
            anchor = answer(at);
            tokens.push(anchor);
            ended = room == 1 || stops.contains(&anchor);
            if ended {
                break;
            }
        }
        if !frozen {
            // Rows that are not kept leave their marks too.
            for i in tokens.len()..rows {
                self.write(slot, step.pos as usize + i, 1);
            }
        }
        let s = &mut self.slots[slot as usize];
        let kept = tokens.len() as u32;
        s.pending[1 - step.parity as usize] = (state, states);
        s.step.commit(kept);
        (s.anchor, s.frozen) = (anchor, ended);
        Round::made(&tokens, rows - 1, ended)
    }
}

impl Machine for Fake {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn set_pages(&mut self, slot: u32, pages: &[u32]) {
        if !self.breaks() {
            self.slots[slot as usize].table = pages.to_vec();
        }
    }

    fn copy_page(&mut self, from: u32, to: u32) {
        if !self.breaks() && !self.faults.forgets_copies {
            self.pages[to as usize] = self.pages[from as usize];
        }
    }

    fn read_page(&mut self, page: u32, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(bytemuck::bytes_of(&self.pages[page as usize]));
    }

    fn write_page(&mut self, page: u32, bytes: &[u8]) {
        self.spend(2_000);
        self.written += 1;
        if self.breaks() {
            return;
        }
        bytemuck::bytes_of_mut(&mut self.pages[page as usize]).copy_from_slice(bytes);
    }

    fn read_snapshot(&mut self, snapshot: u32, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.saved[snapshot as usize].to_le_bytes());
    }

    fn write_snapshot(&mut self, snapshot: u32, bytes: &[u8]) {
        let state = bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if !self.breaks() {
            self.saved[snapshot as usize] = state;
        }
    }

    fn sync(&mut self) -> Result<(), EngineError> {
        self.may_fail(&[])
    }

    fn clear(&mut self, slot: u32) {
        if !self.breaks() {
            self.slots[slot as usize].state = 0;
        }
    }

    fn save(&mut self, lane: &mut Lane, snapshot: u32) -> Result<(), EngineError> {
        self.spend(300);
        if self.flight.contains(&lane.slot) {
            self.note(|| "a snapshot of a lane with rounds in flight".to_owned());
        }
        self.may_fail(&[lane.slot])?;
        let state = self.taken_up(lane);
        self.slots[lane.slot as usize].state = state;
        if lane.pending > 0 {
            lane.take_up();
        }
        self.saved[snapshot as usize] = state;
        Ok(())
    }

    fn restore(&mut self, snapshot: u32, slot: u32, pos: u32) -> Lane {
        self.spend(200);
        if !self.breaks() {
            self.slots[slot as usize].state = self.saved[snapshot as usize];
        }
        if self.faults.spoils_snapshots {
            self.saved[snapshot as usize] ^= 1;
        }
        Lane { pos, ..Lane::new(slot) }
    }

    fn prefill(&mut self, lane: &mut Lane, tokens: &[u32]) -> Result<(), EngineError> {
        self.spend(1000 + 100 * tokens.len() as u64);
        if !self.flight.is_empty() {
            self.note(|| "a prefill pass with rounds in flight".to_owned());
        }
        self.may_fail(&[lane.slot])?;
        let mut state = self.taken_up(lane);
        for (i, &token) in tokens.iter().enumerate() {
            state = self.extend(state, token);
            self.write(lane.slot, lane.pos as usize + i, state);
        }
        self.slots[lane.slot as usize].state = state;
        lane.advance(tokens.len() as u32);
        Ok(())
    }

    fn start(&mut self, slot: u32, _: &[u32], _: &Sampler, bounds: &Bounds<'_>) {
        if self.breaks() {
            return;
        }
        let s = &mut self.slots[slot as usize];
        (s.end, s.stops) =
            (bounds.end, bounds.stops.iter().take(ops::MAX_STOPS).copied().collect());
    }

    fn flight(&self, slots: &mut Vec<u32>) {
        slots.clear();
        slots.extend_from_slice(&self.flight);
    }

    fn submit(
        &mut self,
        going: &[Going],
        depth: usize,
        masker: &mut dyn Masker,
    ) -> Result<(), EngineError> {
        let slots: Vec<u32> = going.iter().map(|g| g.lane.slot).collect();
        if self.flight.is_empty() {
            let drafting = going.iter().filter(|g| g.draft).count();
            let rows = going.len() + drafting * (self.limits.block - 1);
            if self.limits.adapts && drafting > 0 && rows > self.limits.like_alone {
                self.note(|| format!("{rows} rows, whose bits differ from those of fewer"));
            }
            for g in going {
                let s = &mut self.slots[g.lane.slot as usize];
                (s.step, s.anchor, s.frozen, s.draft) = (g.lane, g.anchor, false, g.draft);
            }
            self.flight = slots.clone();
        } else if self.flight != slots {
            self.note(|| "rounds of other lanes are in flight".to_owned());
        } else if going.iter().any(|g| g.draft != self.slots[g.lane.slot as usize].draft) {
            self.note(|| "rounds of the other kind are in flight".to_owned());
        }
        while self.rounds.len() < depth {
            self.may_fail(&slots)?;
            for g in going.iter().filter(|g| g.masked) {
                masker.masks(g.lane.slot, &[1, 2], &mut [0; 3 * VOCAB.div_ceil(32)]);
            }
            let round = slots.iter().map(|&slot| (slot, self.one(slot))).collect();
            // It computes while the host does other things.
            let begins = self.rounds.back().map_or(self.clock.now(), |(_, ends)| *ends);
            let ends = begins.max(self.clock.now()) + round_time(slots.len());
            self.rounds.push_back((round, ends));
        }
        Ok(())
    }

    fn receive(&mut self, lane: &mut Lane) -> Result<Round, EngineError> {
        let (round, ends) = self.rounds.front().expect("a round in flight");
        if round.len() == self.flight.len() {
            self.spend(ends.saturating_sub(self.clock.now()).as_micros() as u64);
            self.may_fail(&self.flight.clone())?;
        }
        let (oldest, _) = self.rounds.front_mut().expect("a round in flight");
        let round = oldest.remove(&lane.slot).expect("a round of this lane");
        if oldest.is_empty() {
            self.rounds.pop_front();
            if self.rounds.is_empty() {
                self.flight.clear();
            }
        }
        lane.commit(round.tokens().len() as u32);
        Ok(round)
    }

    fn probe(&mut self) -> Result<(), EngineError> {
        (self.flight, self.rounds, self.failed) = (Vec::new(), VecDeque::new(), false);
        if self.lost {
            return Err(DeviceError::Op { op: "fake", why: "lost".to_owned() }.into());
        }
        Ok(())
    }
}
