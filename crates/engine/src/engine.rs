//! The engine: a device, a target, perhaps a draft, and the memory of its lanes.

use std::collections::BTreeMap;

use model::{
    Draft, DraftState, Lane, PageShape, Scratch, ScratchShape, State, StateShape, Target,
    copy_page, page_table,
};
use ops::{
    Buf, Counted, Device, DeviceError, DryRun, KvDtype, KvPool, LaneStep, Lanes, PAGE_TOKENS,
    PUBLISHED, Pass, Unsupported, Weight,
};

use crate::buffers::RoundBuffers;
use crate::drafter::Drafter;
use crate::round::{Going, Masker, Parts, Pipeline, Round, Shape, depth};
use crate::sampler::{Bounds, Sampler, SamplingError};

/// A request or a device that failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device failed; the lanes it ran are lost.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Nothing to continue.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {tokens} tokens and the context holds {context}: shorten it or raise --context"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens the context holds.
        context: usize,
    },
    /// Not a token of this model.
    #[error("token {id} is not in the vocabulary of {vocab}")]
    UnknownToken {
        /// The token.
        id: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A sampling option that makes no sense.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The model's numbers are broken.
    #[error(
        "the model gave no finite logit at position {pos}: its weights or its files are damaged"
    )]
    Degenerate {
        /// Position of the row.
        pos: u32,
    },
}

/// Sizes chosen at load.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Tokens a lane can hold.
    pub context: usize,
    /// Lanes.
    pub slots: usize,
    /// Pages of keys and values that exist, at least what one lane can fill; `None` for what all lanes
    /// can fill. The prefix cache keeps more with more of them.
    pub pages: Option<usize>,
    /// States that can be kept besides those of the lanes: checkpoints of the prefix cache.
    pub snapshots: usize,
    /// How keys and values are stored.
    pub kv: KvDtype,
    /// Rows of a prefill pass.
    pub chunk: usize,
    /// Rows of a verify pass when the drafter runs on the host.
    pub host_block: usize,
    /// Submit a round before the one before it was read, so that the device never waits for the
    /// host. An end that only the host sees then costs a round that is thrown away.
    pub ahead: bool,
    /// Draft only while that is faster, as measured ([`Pace`](crate::pace::Pace)), and while rows keep their
    /// bits ([`DeviceInfo::like_alone`](ops::DeviceInfo::like_alone)).
    pub adapt: bool,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            context: 4096,
            slots: 1,
            pages: None,
            snapshots: 0,
            kv: KvDtype::Bf16,
            chunk: 512,
            host_block: 8,
            ahead: false,
            adapt: false,
        }
    }
}

/// Bytes that one round must move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundBytes {
    /// Weights, once for each pass that reads them.
    pub weights: u64,
    /// Recurrent state, read and written.
    pub state: u64,
    /// Keys and values.
    pub kv: u64,
}

impl RoundBytes {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.weights + self.state + self.kv
    }
}

/// Bytes that a loaded model takes on its device, working buffers left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryBytes {
    /// Matrices of the target, each once.
    pub weights: u64,
    /// Matrices and codebooks of the draft.
    pub draft: u64,
    /// Pages of keys and values of all lanes, the draft's included.
    pub kv: u64,
    /// Recurrent cells of all lanes, with their histories and pending rows.
    pub state: u64,
    /// Recurrent cells kept for the prefix cache.
    pub snapshots: u64,
}

impl MemoryBytes {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.weights + self.draft + self.kv + self.state + self.snapshots
    }
}

/// Everything that runs.
#[derive(Debug)]
pub struct Engine<D> {
    /// The device.
    pub dev: D,
    pub(crate) target: Target,
    pub(crate) draft: Option<(Draft, DraftState)>,
    pub(crate) drafter: Drafter,
    pub(crate) state: State,
    pub(crate) scratch: Scratch,
    pub(crate) buffers: RoundBuffers,
    pub(crate) pipeline: Pipeline,
    pub(crate) step: Buf,
    table: Buf,
    pages: PageShape,
    options: EngineOptions,
    block: usize,
}

impl<D: Device> Engine<D> {
    /// Allocates the memory of the lanes around loaded weights.
    pub fn new(
        mut dev: D,
        target: Target,
        draft: Option<Draft>,
        drafter: Drafter,
        options: EngineOptions,
    ) -> Result<Engine<D>, DeviceError> {
        check_pages(&dev, options.kv)?;
        let block = match (&drafter, &draft) {
            (Drafter::DFlash, Some(draft)) => draft.block,
            (Drafter::Host(_), _) => options.host_block,
            _ => 1,
        };
        let max_pages = (options.context + block).div_ceil(PAGE_TOKENS);
        let slots = options.slots;
        let options = EngineOptions { chunk: options.chunk.max(PAGE_TOKENS), ..options };
        let act = dev.info().act;
        let mut pages = PageShape { kv: options.kv, ..PageShape::full(slots, max_pages) };
        pages.pages = options.pages.unwrap_or(pages.pages).max(max_pages);
        let drafter = drafter.for_slots(slots);
        let table = page_table(&mut dev, &pages)?;
        let shape = StateShape::of(&target, block, pages, options.snapshots);
        let state = State::new(&mut dev, &shape, table)?;
        let taps = draft.as_ref().map(|d| d.taps.clone()).unwrap_or_default();
        let rows = options.chunk.max(slots * block);
        let shape = ScratchShape::of(&target, (rows, slots * block), taps, act);
        let scratch = Scratch::new(&mut dev, &shape)?;
        let draft = match draft {
            None => None,
            Some(draft) => {
                let chunk = options.chunk;
                let state = DraftState::new(&mut dev, &draft, &target, chunk, &pages, table, act)?;
                Some((draft, state))
            }
        };
        let depth = depth(options.ahead);
        let buffers = RoundBuffers::new(
            &mut dev,
            &target,
            draft.as_ref().map(|d| &d.0),
            slots,
            block,
            depth,
        )?;
        let step = dev.alloc(slots * size_of::<LaneStep>(), "lane steps")?;
        Ok(Engine {
            dev,
            target,
            draft,
            drafter,
            state,
            scratch,
            buffers,
            pipeline: Pipeline::new(slots, block),
            step,
            table,
            pages,
            options,
            block,
        })
    }

    /// Tokens a lane can hold.
    pub fn context(&self) -> usize {
        self.options.context
    }

    /// Rows of a verify pass.
    pub fn block(&self) -> usize {
        self.block
    }

    /// The model's shape and weights.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Changes where proposals come from, between answers; returns what it was. A device's draft can
    /// be left out and taken up again, but not added to an engine that was built without one.
    pub fn set_drafter(&mut self, drafter: Drafter) -> Drafter {
        self.pipeline.forget();
        std::mem::replace(&mut self.drafter, drafter.for_slots(self.options.slots))
    }

    /// Where proposals come from.
    pub fn drafter(&self) -> &Drafter {
        &self.drafter
    }

    /// What one round at a context of `pos` tokens must move: the numerator of the floor.
    pub fn round_bytes(&self, pos: usize) -> RoundBytes {
        let (attention, recurrent) = (self.state.kv.iter(), self.state.cells.iter());
        let draft_pools = self.draft.iter().flat_map(|(_, state)| &state.kv);
        let per_token = |kv: &KvPool| kv.token_bytes() as u64;
        RoundBytes {
            weights: self.round_ops().values().map(|op| op.cost.weight_bytes).sum(),
            // Read once and written once.
            state: 2 * recurrent.map(|c| (c.state.bytes / self.options.slots) as u64).sum::<u64>(),
            kv: pos as u64 * attention.chain(draft_pools).map(per_token).sum::<u64>(),
        }
    }

    /// The ops of one round, by name, with how often they run and what they cost.
    pub fn round_ops(&self) -> BTreeMap<&'static str, Counted> {
        let mut dry = DryRun::new(self.dev.info().act);
        self.dry_round(&mut dry, 1, 1, false);
        dry.ops
    }

    /// What the model and its lanes take on the device.
    pub fn memory(&self) -> MemoryBytes {
        let sum = |buffers: &mut dyn Iterator<Item = Buf>| buffers.map(|b| b.bytes as u64).sum();
        let bufs = |weights: Vec<Weight>| weights.into_iter().map(|w| w.buf);
        let embed = (self.target.embed != self.target.lm_head).then_some(self.target.embed.buf);
        let drafts = || self.draft.iter();
        let codebooks = drafts().filter_map(|(draft, _)| draft.selector.as_ref());
        let codebooks = codebooks.flat_map(|s| [s.predecessor, s.successor]);
        let pools = self.state.kv.iter().chain(drafts().flat_map(|(_, state)| &state.kv));
        let cells = self.state.cells.iter();
        MemoryBytes {
            weights: sum(&mut bufs(self.target.pass_weights()).chain(embed)),
            draft: sum(&mut drafts().flat_map(|(d, _)| bufs(d.pass_weights())).chain(codebooks)),
            kv: sum(&mut pools.flat_map(|kv| [kv.keys, kv.values])),
            state: sum(&mut cells.flat_map(|c| [c.history, c.state, c.pending])),
            snapshots: self.state.saved.bytes as u64,
        }
    }

    /// Runs on `dev` every kind of op that this engine will run: of prefill passes of any number of rows, and of rounds of every
    /// number of lanes, with the drafter and without.
    pub fn rehearse(&self, dev: &mut dyn Device) {
        let (target, s) = (&self.target, &self.scratch);
        // Cards share out the work of prompts by their rows, in tiles of multiples of 16.
        let chunk = self.options.chunk;
        for rows in (16..chunk).step_by(16).chain([chunk]) {
            let lanes = self.lanes(rows);
            model::forward(dev, target, &self.state, s, lanes, Pass::Prompt, 0..0);
            if let Some((draft, state)) = &self.draft {
                model::draft_context(dev, draft, state, s.features, lanes, Pass::Prompt);
            }
        }
        model::take_up(dev, target, &self.state, s, self.lanes(1));
        for count in 1..=self.options.slots {
            let most = if self.block > 1 { count } else { 0 };
            for drafted in 0..=most {
                dev.replay(0, &mut |dev| self.dry_round(dev, count, drafted, true));
            }
        }
    }

    /// The device, and what the ops of a round work on.
    pub(crate) fn parts(&mut self) -> (&mut D, Parts<'_>) {
        let Engine { dev, target, draft, drafter, state, scratch, buffers, .. } = self;
        let draft = drafter.on_device(draft.as_ref());
        (dev, Parts { target, draft, state, scratch, buffers })
    }

    /// The ops of a round of `count` lanes, of which `drafted` have a block of rows. `all`: those that only
    /// some rounds have, too.
    fn dry_round(&self, dev: &mut dyn Device, count: usize, drafted: usize, all: bool) {
        let step = self.step.slice(0, count * size_of::<LaneStep>());
        let max_rows = if drafted > 0 { self.block } else { 1 };
        let lanes = Lanes { step, count, rows: count + drafted * (self.block - 1), max_rows };
        let Engine { target, draft, drafter, state, scratch, buffers, .. } = self;
        let draft = drafter.on_device(draft.as_ref());
        let parts = Parts { target, draft, state, scratch, buffers };
        let drafted = if parts.draft.is_some() { drafted } else { 0 };
        let shape = Shape { lanes, drafted, masked: false, likeliest: all };
        parts.verify(dev, shape);
        parts.accept(dev, shape);
        if all {
            parts.accept(dev, Shape { masked: true, ..shape });
        }
    }

    /// Bytes per second at which the device reads the weights, measured now.
    pub fn read_bandwidth(&mut self) -> f64 {
        let target = self.target.pass_weights();
        let draft = self.draft.iter().flat_map(|(draft, _)| draft.pass_weights());
        let weights: Vec<Buf> = target.into_iter().chain(draft).map(|w| w.buf).collect();
        self.dev.read_bandwidth(&weights)
    }

    /// Refuses a prompt that can't be answered.
    pub fn check_prompt(&self, prompt: &[u32]) -> Result<(), EngineError> {
        check_prompt(prompt, self.context(), self.target.vocab)
    }

    /// Rows of a prefill pass.
    pub fn chunk(&self) -> usize {
        self.options.chunk
    }

    /// States that can be kept.
    pub fn snapshots(&self) -> usize {
        self.options.snapshots
    }

    /// The lanes and pages that exist.
    pub fn page_shape(&self) -> &PageShape {
        &self.pages
    }

    /// Bytes of one page in all pools, the draft's included.
    pub fn page_bytes(&self) -> usize {
        self.pools().map(|pool| 2 * pool.page_bytes()).sum()
    }

    /// Bytes of one kept state.
    pub fn snapshot_bytes(&self) -> usize {
        self.state.snapshot_bytes()
    }

    fn pools(&self) -> impl Iterator<Item = &KvPool> {
        self.state.kv.iter().chain(self.draft.iter().flat_map(|(_, draft)| &draft.kv))
    }

    /// Gives a slot its pages, in order of position.
    pub(crate) fn set_pages(&mut self, slot: u32, pages: &[u32]) {
        let row = self.table.rows(slot as usize, 1, 4 * self.pages.max_pages);
        self.dev.write(row, bytemuck::cast_slice(pages));
    }

    /// Copies one page onto another, in all pools.
    pub(crate) fn copy_page(&mut self, from: u32, to: u32) {
        let draft_pools = self.draft.iter().flat_map(|(_, draft)| &draft.kv);
        copy_page(&mut self.dev, self.state.kv.iter().chain(draft_pools), from, to);
    }

    /// The buffers of one page, of all pools.
    pub(crate) fn page_buffers(&self, page: u32) -> Vec<Buf> {
        let bufs = self.pools().flat_map(|pool| {
            let of = |buf: Buf| buf.rows(page as usize, 1, pool.page_bytes());
            [of(pool.keys), of(pool.values)]
        });
        bufs.collect()
    }

    /// Appends buffers' bytes, one after the other.
    pub(crate) fn read_all(&mut self, bufs: &[Buf], bytes: &mut Vec<u8>) {
        for buf in bufs {
            let start = bytes.len();
            bytes.resize(start + buf.bytes, 0);
            self.dev.read(*buf, &mut bytes[start..]);
        }
    }

    /// Writes what [`Engine::read_all`] read.
    ///
    /// # Panics
    /// If there are not as many bytes.
    pub(crate) fn write_all(&mut self, bufs: &[Buf], bytes: &[u8]) {
        assert_eq!(bufs.iter().map(|buf| buf.bytes).sum::<usize>(), bytes.len());
        let mut rest = bytes;
        for buf in bufs {
            let (now, later) = rest.split_at(buf.bytes);
            self.dev.write(*buf, now);
            rest = later;
        }
    }

    /// Keeps what a lane remembers besides its pages. Rows that are pending are taken up first, which
    /// changes nothing for the lane but when that happens.
    pub(crate) fn save(&mut self, lane: &mut Lane, snapshot: u32) -> Result<(), EngineError> {
        if lane.pending > 0 {
            crate::round::park(self)?;
            self.pipeline.forget();
            self.dev.write(self.step, bytemuck::bytes_of(&lane.step(0, 0)));
            let lanes = self.lanes(1);
            model::take_up(&mut self.dev, &self.target, &self.state, &self.scratch, lanes);
            lane.take_up();
        }
        self.state.save(&mut self.dev, lane, snapshot as usize);
        Ok(self.dev.sync()?)
    }

    /// Makes a slot go on from a kept state at position `pos`. Nobody waits for it: what goes wrong shows in the lane's
    /// first pass.
    pub(crate) fn restore(&mut self, snapshot: u32, slot: u32, pos: u32) -> Lane {
        self.state.restore(&mut self.dev, snapshot as usize, slot, pos)
    }

    /// Whether the device still computes, after something failed: writes something and reads it back.
    pub(crate) fn probe(&mut self) -> Result<(), EngineError> {
        self.pipeline.reset();
        // Results of rounds that count no more must not be taken for those of later ones.
        for _ in 0..PUBLISHED {
            if self.dev.receive(&mut []).is_err() {
                break;
            }
        }
        let steps = [LaneStep { pos: 7, ..LaneStep::default() }, LaneStep::default()];
        for step in steps {
            let mut back = LaneStep::default();
            self.dev.write(self.step, bytemuck::bytes_of(&step));
            self.dev.read(self.step, bytemuck::bytes_of_mut(&mut back));
            self.dev.sync()?;
            if back != step {
                let why = "wrote one thing and read another".to_owned();
                return Err(DeviceError::Op { op: "probe", why }.into());
            }
        }
        Ok(())
    }

    /// Empties a slot.
    pub fn clear(&mut self, slot: u32) {
        self.state.clear(&mut self.dev, slot as usize);
    }

    /// Rows of a lane's next prefill pass when `waiting` tokens wait. Passes end on the absolute page
    /// grid, so that the state's bits depend on positions alone.
    pub(crate) fn chunk_rows(&self, lane: &Lane, waiting: usize) -> usize {
        let pos = lane.pos as usize;
        let end = (pos + self.options.chunk) / PAGE_TOKENS * PAGE_TOKENS;
        waiting.min(end - pos)
    }

    /// Runs tokens into a lane's cache in one pass.
    pub(crate) fn prefill_pass(
        &mut self,
        lane: &mut Lane,
        tokens: &[u32],
    ) -> Result<(), EngineError> {
        let rows = tokens.len();
        let lanes = self.lanes(rows);
        crate::round::park(self)?;
        self.pipeline.forget();
        self.dev.write(self.step, bytemuck::bytes_of(&lane.step(0, rows as u32)));
        let (dev, s) = (&mut self.dev, &self.scratch);
        dev.write(s.ids, bytemuck::cast_slice(tokens));
        model::forward(dev, &self.target, &self.state, s, lanes, Pass::Prompt, 0..0);
        if let (Drafter::DFlash, Some((draft, state))) = (&self.drafter, &self.draft) {
            model::draft_context(dev, draft, state, s.features, lanes, Pass::Prompt);
        }
        dev.sync()?;
        lane.advance(rows as u32);
        Ok(())
    }

    /// A pass of one lane.
    pub(crate) fn lanes(&self, rows: usize) -> Lanes {
        let step = self.step.slice(0, size_of::<LaneStep>());
        Lanes { step, count: 1, rows, max_rows: rows }
    }

    /// Prepares a slot for an answer: sampling options, what ends it, and the history that penalties
    /// count.
    pub fn start(&mut self, slot: u32, prompt: &[u32], sampler: &Sampler, bounds: &Bounds<'_>) {
        if let Drafter::Host(drafters) = &mut self.drafter {
            drafters[slot as usize].reset(prompt);
        }
        self.buffers.start(&mut self.dev, slot, prompt, sampler, bounds);
    }

    /// Whether rounds may be submitted before those before them were read.
    pub(crate) fn may_run_ahead(&self) -> bool {
        self.options.ahead && !matches!(self.drafter, Drafter::Host(_))
    }

    /// Whether rounds draft only while that is faster.
    pub(crate) fn adapts(&self) -> bool {
        self.options.adapt && !matches!(self.drafter, Drafter::None)
    }

    /// Rounds of a slot submitted and not received.
    pub fn in_flight(&self, slot: u32) -> usize {
        self.pipeline.in_flight(slot)
    }

    /// Submits rounds of these lanes until `depth` are in flight. After the first, the device goes on
    /// from where the round before left the lanes, and does as that round did.
    pub fn submit(
        &mut self,
        going: &[Going],
        depth: usize,
        masker: &mut dyn Masker,
    ) -> Result<(), EngineError> {
        crate::round::submit_until(self, going, depth, masker)
    }

    /// Waits for a lane's oldest round in flight, and moves the lane as the device did.
    pub fn receive(&mut self, lane: &mut Lane) -> Result<Round, EngineError> {
        crate::round::receive(self, lane)
    }

    /// Throws away a lane's rounds in flight. They leave it where its last received round did,
    /// with that round's rows in its state.
    pub(crate) fn settle(&mut self, lane: &mut Lane) -> Result<(), EngineError> {
        while self.in_flight(lane.slot) > 0 {
            let kept = self.receive(lane)?.tokens().len();
            lane.uncommit(kept as u32);
            self.pipeline.forget();
        }
        Ok(())
    }
}

/// Refuses pages that the device has no kernels for.
fn check_pages(dev: &dyn Device, kv: KvDtype) -> Result<(), DeviceError> {
    let info = dev.info();
    let able = kv == KvDtype::Bf16 || info.int8_pages;
    let what = || format!("keys and values in {} on {}", kv.name(), info.name);
    let limit = "--kv bf16 there; int8 on the CPU";
    Ok(Unsupported::unless(able, "attention", what, limit)?)
}

/// Refuses a prompt that can't be answered within a context, with ids below `vocab`.
pub(crate) fn check_prompt(
    prompt: &[u32],
    context: usize,
    vocab: usize,
) -> Result<(), EngineError> {
    let tokens = prompt.len();
    if tokens >= context {
        return Err(EngineError::PromptTooLong { tokens, context });
    }
    match prompt.iter().find(|&&id| id as usize >= vocab) {
        Some(&id) => Err(EngineError::UnknownToken { id, vocab }),
        None if prompt.is_empty() => Err(EngineError::EmptyPrompt),
        None => Ok(()),
    }
}
