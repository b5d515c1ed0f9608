//! One round of one lane or several: propose, verify, accept, commit.
//!
//! All rows go through one pass. Lanes that draft come first, a block of rows each, so that the draft
//! runs over the first part of the same rows; the others follow with one row each. Which lanes take
//! part, in which order and with how many rows, stays as it is while rounds are in flight.

use std::collections::VecDeque;

use model::{Draft, DraftState, Lane, Scratch, State, Target};
use ops::accept::Accept;
use ops::{Buf, Device, LaneResult, LaneStep, Lanes, Pass};

use crate::buffers::RoundBuffers;
use crate::drafter::Drafter;
use crate::engine::{Engine, EngineError};

/// A lane that takes part in rounds.
#[derive(Clone, Copy, Debug)]
pub struct Going {
    /// Where it stands.
    pub lane: Lane,
    /// Its last token, not yet in the cache.
    pub anchor: u32,
    /// Whether it drafts, if there is a drafter.
    pub draft: bool,
    /// Likeliest tokens to report beside each emitted one, with log-probabilities; `None` for neither.
    pub logprobs: Option<usize>,
    /// Whether [`Masker`] says which tokens may come.
    pub masked: bool,
}

impl Going {
    /// A lane without further wishes.
    pub fn new(lane: Lane, anchor: u32, draft: bool) -> Going {
        Going { lane, anchor, draft, logprobs: None, masked: false }
    }
}

/// Says which tokens may come, for lanes that are [`Going::masked`].
pub trait Masker {
    /// Fills `masks`, `[proposals.len() + 1][words]`, all bits set before: see
    /// [`Constraint::masks`](crate::service::Constraint::masks).
    fn masks(&mut self, slot: u32, proposals: &[u32], masks: &mut [u32]);
}

/// For lanes that are not.
#[derive(Debug)]
pub(crate) struct Unmasked;

impl Masker for Unmasked {
    fn masks(&mut self, _: u32, _: &[u32], _: &mut [u32]) {}
}

/// What one round emitted for one lane.
#[derive(Clone, Debug)]
pub struct Round {
    tokens: [u32; Accept::MAX_ROWS],
    count: usize,
    /// Proposals verified.
    pub proposed: usize,
    /// A row had no finite logit.
    pub degenerate: bool,
    /// The device ended the lane behind these tokens: a stop token, or no room for more. Rounds after
    /// that emit nothing.
    pub ended: bool,
    /// For each token its log-probability and the likeliest tokens of its row with theirs, if asked for.
    pub logprobs: Vec<(f32, Vec<(u32, f32)>)>,
}

impl Round {
    /// The accepted proposals and the token that follows them. Empty only after the lane ended.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens[..self.count]
    }

    /// A round that no engine made.
    #[cfg(test)]
    pub(crate) fn made(emitted: &[u32], proposed: usize, ended: bool) -> Round {
        let mut tokens = [0; Accept::MAX_ROWS];
        tokens[..emitted.len()].copy_from_slice(emitted);
        let (count, degenerate, logprobs) = (emitted.len(), false, Vec::new());
        Round { tokens, count, proposed, degenerate, ended, logprobs }
    }

    pub(crate) fn of(result: &LaneResult<'_>) -> Round {
        let mut tokens = [0; Accept::MAX_ROWS];
        tokens[..result.tokens.len()].copy_from_slice(result.tokens);
        Round {
            tokens,
            count: result.tokens.len(),
            proposed: result.proposed,
            degenerate: result.flags & LaneResult::DEGENERATE != 0,
            ended: result.flags & (LaneResult::STOPPED | LaneResult::LIMIT) != 0,
            logprobs: Vec::new(),
        }
    }
}

/// Rounds in flight at one time.
pub(crate) fn depth(ahead: bool) -> usize {
    if ahead { 2 } else { 1 }
}

/// A lane's place in the rounds on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) slot: u32,
    pub(crate) row0: u32,
    pub(crate) rows: u32,
    pub(crate) logprobs: Option<usize>,
    pub(crate) masked: bool,
}

/// Rounds enqueued and not read yet, and what the device holds when they are done.
#[derive(Debug, Default)]
pub(crate) struct Pipeline {
    /// The lanes of the rounds on the device, in the order of their rows.
    places: Vec<Place>,
    /// How many of them draft on the device: the first.
    drafted: usize,
    /// Whether the draft's cache goes along, also where none drafts.
    followed: bool,
    in_flight: usize,
    /// What was read and not handed over yet.
    read: VecDeque<(u32, Round)>,
    /// Where nothing is in flight and this is set, the steps and anchors that lie on the device.
    resident: bool,
    steps: Vec<LaneStep>,
    anchors: Vec<u32>,
    /// Rows of the draft's ids that are masks but for their blocks' anchors.
    clean: usize,
    /// Reused by [`begin`].
    spare: (Vec<Place>, Vec<LaneStep>),
    ids: Vec<u32>,
}

impl Pipeline {
    pub(crate) fn new(slots: usize, block: usize) -> Pipeline {
        Pipeline {
            places: Vec::with_capacity(slots),
            read: VecDeque::with_capacity(4 * slots),
            steps: Vec::with_capacity(slots),
            anchors: Vec::with_capacity(slots),
            spare: (Vec::with_capacity(slots), Vec::with_capacity(slots)),
            ids: Vec::with_capacity(slots * block),
            clean: slots * block,
            ..Pipeline::default()
        }
    }

    /// The device's steps or anchors were written over.
    pub(crate) fn forget(&mut self) {
        self.resident = false;
    }

    /// Nothing that was enqueued or read counts any more.
    pub(crate) fn reset(&mut self) {
        (self.in_flight, self.resident) = (0, false);
        self.read.clear();
    }

    /// The slots of the rounds on the device, or else of those read and not handed over.
    pub(crate) fn flight(&self, slots: &mut Vec<u32>) {
        slots.clear();
        if self.in_flight > 0 {
            slots.extend(self.places.iter().map(|place| place.slot));
        } else {
            slots.extend(self.read.iter().map(|(slot, _)| *slot));
            slots.sort_unstable();
            slots.dedup();
        }
    }

    /// Rounds of a slot that were not handed over.
    pub(crate) fn in_flight(&self, slot: u32) -> usize {
        let read = self.read.iter().filter(|(of, _)| *of == slot).count();
        read + self.on_device(slot)
    }

    /// Whether what a slot's next round takes can be timed: it was not read yet, and no round of others is before it.
    pub(crate) fn is_next(&self, slot: u32) -> bool {
        let read = self.read.iter().any(|(of, _)| *of == slot);
        !read && (self.in_flight == 0 || self.on_device(slot) > 0)
    }

    fn on_device(&self, slot: u32) -> usize {
        if self.places.iter().any(|place| place.slot == slot) { self.in_flight } else { 0 }
    }

    fn rows(&self) -> usize {
        self.places.last().map_or(0, |place| (place.row0 + place.rows) as usize)
    }

    fn lanes(&self, step: Buf) -> Lanes {
        let count = self.places.len();
        let max_rows = self.places.iter().map(|place| place.rows as usize).max().unwrap_or(1);
        let step = step.slice(0, count * size_of::<LaneStep>());
        Lanes { step, count, rows: self.rows(), max_rows }
    }

    fn shape(&self, step: Buf) -> Shape {
        Shape {
            lanes: self.lanes(step),
            drafted: self.drafted,
            masked: self.places.iter().any(|place| place.masked),
            likeliest: self.places.iter().any(|place| place.logprobs.is_some()),
        }
    }

    /// Names the sequence of ops of a round with these places.
    fn key(&self, part: u64) -> u64 {
        let shape = self.shape(Buf { alloc: 0, offset: 0, bytes: usize::MAX });
        let lanes = shape.lanes;
        let words = [lanes.rows as u64, lanes.max_rows as u64, shape.drafted as u64];
        let key = words.iter().fold(lanes.count as u64, |key, word| key << 13 | word);
        let flags = [self.followed, shape.masked, shape.likeliest];
        flags.iter().fold(key, |key, &flag| key << 1 | u64::from(flag)) << 1 | part
    }
}

/// Whether these lanes, in any order, are those of the rounds in flight.
pub(crate) fn is_in_flight<D: Device>(e: &Engine<D>, going: &[Going]) -> bool {
    let p = &e.pipeline;
    p.in_flight > 0
        && p.places.len() == going.len()
        && going.iter().all(|g| p.places.iter().any(|place| place.slot == g.lane.slot))
}

/// Enqueues one round. Plain decoding is the same with nothing proposed: one row.
///
/// The device moves the lanes itself, so a round may follow another whose result was not read: then
/// `going` is not looked at. The host writes only where lanes begin, join, leave, or were moved by hand,
/// and the proposals of drafters of its own.
fn submit<D: Device>(
    e: &mut Engine<D>,
    going: &[Going],
    masker: &mut dyn Masker,
) -> Result<(), EngineError> {
    if e.pipeline.in_flight == 0 {
        begin(e, going);
    }
    let (shape, keys) = (e.pipeline.shape(e.step), [e.pipeline.key(0), e.pipeline.key(1)]);
    // On a drafter's proposals the rows of a batch take any number: too many shapes to record.
    let record = shape.lanes.count == 1 || !matches!(e.drafter, Drafter::Host(_));
    let run = |e: &mut Engine<D>, key: u64, body: &mut dyn FnMut(Parts<'_>, &mut dyn Device)| {
        let (dev, parts) = e.parts();
        if record { dev.replay(key, &mut |dev| body(parts, dev)) } else { body(parts, dev) }
    };
    run(e, keys[0], &mut |parts, dev| {
        parts.verify(dev, shape);
        if !shape.masked {
            parts.accept(dev, shape);
        }
    });
    if shape.masked {
        // While the device verifies, the host finds what the proposals allow.
        let Engine { dev, buffers, pipeline: p, .. } = e;
        p.ids.clear();
        if shape.lanes.max_rows > 1 {
            p.ids.resize(shape.lanes.rows, 0);
            dev.receive(bytemuck::cast_slice_mut(&mut p.ids))?;
        }
        buffers.write_masks(dev, &p.places, &p.ids, masker);
        run(e, keys[1], &mut |parts, dev| parts.accept(dev, shape));
    }
    e.pipeline.in_flight += 1;
    Ok(())
}

/// All that decides the ops of a round of one model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) lanes: Lanes,
    /// How many of them draft on the device: the first.
    pub(crate) drafted: usize,
    pub(crate) masked: bool,
    pub(crate) likeliest: bool,
}

/// What the ops of a round work on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts<'e> {
    pub(crate) target: &'e Target,
    /// If it drafts on the device.
    pub(crate) draft: Option<&'e (Draft, DraftState)>,
    pub(crate) state: &'e State,
    pub(crate) scratch: &'e Scratch,
    pub(crate) buffers: &'e RoundBuffers,
}

impl Parts<'_> {
    /// Proposes, runs target and draft over all rows, and takes up what the round before kept.
    pub(crate) fn verify(self, dev: &mut dyn Device, shape: Shape) {
        let Parts { target, state, scratch, buffers, .. } = self;
        let lanes = shape.lanes;
        if let Some((draft, draft_state)) = self.draft.filter(|_| shape.drafted > 0) {
            let drafting = first(lanes, shape.drafted, draft.block);
            model::draft_block(dev, draft, target, draft_state, drafting);
            dev.run(&buffers.top_k(draft_state, target, drafting));
            dev.run(&buffers.propose(draft, draft_state, target, scratch.ids, lanes, drafting));
        }
        if shape.masked && lanes.max_rows > 1 {
            dev.publish(scratch.ids.slice(0, 4 * lanes.rows));
        }
        model::forward(dev, target, state, scratch, lanes, Pass::Round, 0..lanes.rows);
        if let Some((draft, draft_state)) = self.draft {
            model::draft_context(dev, draft, draft_state, scratch.features, lanes, Pass::Round);
        }
    }

    /// Accepts proposals, and publishes what came of it.
    pub(crate) fn accept(self, dev: &mut dyn Device, shape: Shape) {
        let Parts { target, scratch, buffers, .. } = self;
        let (lanes, masked) = (shape.lanes, shape.masked);
        let draft_ids = self.draft.map(|(_, draft_state)| draft_state.ids);
        dev.run(&buffers.accept(target, scratch.ids, draft_ids, scratch.logits, masked, lanes));
        if shape.likeliest {
            dev.run(&buffers.likeliest(target, scratch.logits, lanes));
        }
        dev.publish(buffers.results(lanes));
        if shape.likeliest {
            buffers.likeliest_results(lanes.rows).for_each(|part| dev.publish(part));
        }
    }
}

/// The first `count` lanes of a pass, which have `rows` rows each.
fn first(lanes: Lanes, count: usize, rows: usize) -> Lanes {
    let step = lanes.step.slice(0, count * size_of::<LaneStep>());
    Lanes { step, count, rows: count * rows, max_rows: rows }
}

/// Submits rounds of these lanes until `depth` are in flight.
pub(crate) fn submit_until<D: Device>(
    e: &mut Engine<D>,
    going: &[Going],
    depth: usize,
    masker: &mut dyn Masker,
) -> Result<(), EngineError> {
    // A lane with a round that was read but not handed over is not where the device left it: that
    // round comes first.
    if going.iter().any(|g| e.pipeline.read.iter().any(|(slot, _)| *slot == g.lane.slot)) {
        return Ok(());
    }
    if !is_in_flight(e, going) {
        park(e)?;
    }
    while e.pipeline.in_flight < depth {
        submit(e, going, masker)?;
    }
    Ok(())
}

/// Reads the rounds in flight, so that other lanes can have the steps and the ids on the device.
pub(crate) fn park<D: Device>(e: &mut Engine<D>) -> Result<(), EngineError> {
    while e.pipeline.in_flight > 0 {
        take(e)?;
    }
    Ok(())
}

/// Hands over a lane's oldest round and moves the host's account of the lane.
pub(crate) fn receive<D: Device>(e: &mut Engine<D>, lane: &mut Lane) -> Result<Round, EngineError> {
    let of_lane = |(slot, _): &(u32, Round)| *slot == lane.slot;
    if !e.pipeline.read.iter().any(of_lane) {
        take(e)?;
    }
    let at = e.pipeline.read.iter().position(of_lane);
    let round = at.and_then(|at| e.pipeline.read.remove(at)).map(|(_, round)| round);
    let round = round.unwrap_or_else(|| panic!("slot {} has no round in flight", lane.slot));
    lane.commit(round.count as u32);
    if let Drafter::Host(drafters) = &mut e.drafter {
        drafters[lane.slot as usize].extend(round.tokens());
    }
    Ok(round)
}

/// Waits for the oldest round on the device.
fn take<D: Device>(e: &mut Engine<D>) -> Result<(), EngineError> {
    let Engine { dev, buffers, pipeline: p, step, .. } = e;
    let outcome = buffers.receive(dev, p.lanes(*step), &p.places);
    if let Err(error) = outcome {
        // After a failure, nothing that was enqueued counts any more.
        p.in_flight = 0;
        return Err(error.into());
    }
    p.in_flight -= 1;
    for i in 0..p.places.len() {
        let (place, round) = (p.places[i], buffers.round(i, &p.places));
        let step = &mut p.steps[i];
        (step.pos, step.pending) = (step.pos + round.count as u32, round.count as u32);
        step.parity ^= 1;
        if round.ended {
            step.rows = 0;
        }
        if let Some(&anchor) = round.tokens().last() {
            p.anchors[i] = anchor;
        }
        p.read.push_back((place.slot, round));
    }
    p.resident = p.in_flight == 0;
    Ok(())
}

/// Makes the device hold the lanes' steps, their anchors, and what drafters on the host propose.
fn begin<D: Device>(e: &mut Engine<D>, going: &[Going]) {
    let block = e.block();
    let vocab = e.target.vocab as u32;
    let Engine { dev, drafter, draft, pipeline: p, scratch, step, .. } = e;
    let (mut places, mut steps) = std::mem::take(&mut p.spare);
    places.clear();
    steps.clear();
    p.ids.clear();
    let mut written = 0;
    (p.drafted, p.followed) = (0, drafter.on_device(draft.as_ref()).is_some());
    let proposes = !matches!(drafter, Drafter::None);
    let drafts = |g: &Going| g.draft && proposes;
    let ordered = going.iter().filter(|g| drafts(g)).chain(going.iter().filter(|g| !drafts(g)));
    for (i, g) in ordered.enumerate() {
        let row0 = p.ids.len();
        p.ids.push(g.anchor);
        match drafter {
            Drafter::DFlash if g.draft => {
                p.drafted += 1;
                p.ids.resize(row0 + block, 0);
            }
            Drafter::Host(drafters) if g.draft => {
                p.ids.resize(row0 + block, 0);
                let count = drafters[g.lane.slot as usize].propose(&mut p.ids[row0 + 1..]);
                let proposed = &p.ids[row0 + 1..][..count];
                // A drafter may propose anything; what isn't a token of the model ends the block.
                let count = proposed.iter().take_while(|&&id| id < vocab).count();
                p.ids.truncate(row0 + 1 + count);
                written = p.ids.len();
            }
            _ => {}
        }
        let (row0, rows) = (row0 as u32, (p.ids.len() - row0) as u32);
        let Going { logprobs, masked, .. } = *g;
        places.push(Place { slot: g.lane.slot, row0, rows, logprobs, masked });
        steps.push(g.lane.step(row0, rows));
        let known = p.resident
            && p.places.get(i).is_some_and(|was| was.row0 == row0)
            && p.anchors.get(i) == Some(&g.anchor);
        if !known {
            written = p.ids.len();
        }
    }
    if !p.resident || p.steps != steps {
        dev.write(*step, bytemuck::cast_slice(&steps));
    }
    if written > 0 {
        dev.write(scratch.ids, bytemuck::cast_slice(&p.ids[..written]));
    }
    p.anchors.clear();
    p.anchors.extend(places.iter().map(|place| p.ids[place.row0 as usize]));
    // `accept` leaves anchors in the draft's ids too: where several lanes have rows, they may lie
    // where a later block has its masks.
    let blocks = p.drafted * block;
    if let Some((draft, state)) = draft.as_ref().filter(|_| written > 0 || blocks > p.clean) {
        p.ids.fill(draft.mask_id);
        places.iter().zip(&p.anchors).for_each(|(place, a)| p.ids[place.row0 as usize] = *a);
        dev.write(state.ids, bytemuck::cast_slice(&p.ids));
    }
    if places.len() > 1 || blocks > p.clean {
        p.clean = blocks;
    }
    p.spare = (std::mem::replace(&mut p.places, places), std::mem::replace(&mut p.steps, steps));
}

#[cfg(test)]
mod tests {
    use super::{Pipeline, Place, Round};

    #[test]
    fn only_a_round_that_nothing_is_before_is_timed() {
        let mut p = Pipeline::new(2, 4);
        assert!(p.is_next(0) && p.is_next(1));
        p.places.push(Place { slot: 0, row0: 0, rows: 1, logprobs: None, masked: false });
        p.in_flight = 2;
        assert!(p.is_next(0) && !p.is_next(1));
        // Parked for another lane, it was waited for by that one.
        (p.in_flight, p.read) = (0, [(0, Round::made(&[1], 0, false))].into());
        assert!(!p.is_next(0) && p.is_next(1));
    }
}
