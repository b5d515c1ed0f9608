//! The engine: a device, a target, perhaps a draft, and the memory of its lanes.

use model::{
    Draft, DraftState, Lane, Scratch, ScratchShape, State, StateShape, Target, page_table,
};
use ops::{Buf, Commit, Device, DeviceError, LaneStep, Lanes, PAGE_TOKENS};

use crate::drafter::Drafter;
use crate::round::{Round, RoundBuffers};
use crate::sampler::{Sampler, SamplingError};

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
    /// Rows of a prefill pass.
    pub chunk: usize,
    /// Rows of a verify pass when the drafter runs on the host.
    pub host_block: usize,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions { context: 4096, slots: 1, chunk: 512, host_block: 8 }
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
    step: Buf,
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
        let block = match (&drafter, &draft) {
            (Drafter::DFlash, Some(draft)) => draft.block,
            (Drafter::Host(_), _) => options.host_block,
            _ => 1,
        };
        let max_pages = (options.context + block).div_ceil(PAGE_TOKENS);
        let slots = options.slots;
        let act = dev.info().act;
        let table = page_table(&mut dev, slots, max_pages)?;
        let state = State::new(&mut dev, &StateShape::of(&target, slots, block, max_pages), table)?;
        let taps = draft.as_ref().map(|d| d.taps.clone()).unwrap_or_default();
        let rows = options.chunk.max(slots * block);
        let shape = ScratchShape::of(&target, (rows, slots * block), taps, act);
        let scratch = Scratch::new(&mut dev, &shape)?;
        let draft = match draft {
            None => None,
            Some(draft) => {
                let pages = (slots, max_pages);
                let state =
                    DraftState::new(&mut dev, &draft, &target, options.chunk, pages, table, act)?;
                Some((draft, state))
            }
        };
        let buffers =
            RoundBuffers::new(&mut dev, &target, draft.as_ref().map(|d| &d.0), slots, block)?;
        let step = dev.alloc(slots * size_of::<LaneStep>(), "lane steps")?;
        Ok(Engine { dev, target, draft, drafter, state, scratch, buffers, step, options, block })
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

    /// Where proposals come from.
    pub fn drafter(&self) -> &Drafter {
        &self.drafter
    }

    /// Refuses a prompt that can't be answered.
    pub fn check_prompt(&self, prompt: &[u32]) -> Result<(), EngineError> {
        let (tokens, context) = (prompt.len(), self.context());
        if tokens >= context {
            return Err(EngineError::PromptTooLong { tokens, context });
        }
        let vocab = self.target.vocab;
        match prompt.iter().find(|&&id| id as usize >= vocab) {
            Some(&id) => Err(EngineError::UnknownToken { id, vocab }),
            None if prompt.is_empty() => Err(EngineError::EmptyPrompt),
            None => Ok(()),
        }
    }

    /// Empties a slot.
    pub fn clear(&mut self, slot: u32) {
        self.state.clear(&mut self.dev, slot as usize, self.options.slots);
    }

    /// Runs tokens into a lane's cache, in passes that end on the absolute page grid, so that the
    /// state's bits depend on positions alone.
    pub fn prefill(&mut self, lane: &mut Lane, tokens: &[u32]) -> Result<(), EngineError> {
        let end = lane.pos as usize + tokens.len();
        let mut rest = tokens;
        while !rest.is_empty() {
            let pos = lane.pos as usize;
            let grid = (pos + self.options.chunk) / PAGE_TOKENS * PAGE_TOKENS;
            let rows = grid.min(end) - pos;
            let (now, later) = rest.split_at(rows);
            self.prefill_pass(lane, now)?;
            rest = later;
        }
        Ok(())
    }

    fn prefill_pass(&mut self, lane: &mut Lane, tokens: &[u32]) -> Result<(), EngineError> {
        let rows = tokens.len();
        let lanes = self.set_step(lane, rows);
        let (dev, s) = (&mut self.dev, &self.scratch);
        dev.write(s.ids, bytemuck::cast_slice(tokens));
        model::forward(dev, &self.target, &self.state, s, lanes, Commit::Immediate, 0..0);
        if let (Drafter::DFlash, Some((draft, state))) = (&self.drafter, &self.draft) {
            model::draft_context(dev, draft, state, s.features, lanes);
        }
        dev.sync()?;
        lane.advance(rows as u32);
        Ok(())
    }

    /// Describes a pass of one lane to the device.
    pub(crate) fn set_step(&mut self, lane: &Lane, rows: usize) -> Lanes {
        self.dev.write(self.step, bytemuck::bytes_of(&lane.step(0, rows as u32)));
        let step = self.step.slice(0, size_of::<LaneStep>());
        Lanes { step, count: 1, rows, max_rows: rows }
    }

    /// Prepares a slot for an answer: sampling options, and the history that penalties count.
    pub fn start(&mut self, slot: u32, prompt: &[u32], sampler: &Sampler, stops: &[u32]) {
        if let Drafter::Host(drafter) = &mut self.drafter {
            drafter.reset(prompt);
        }
        self.buffers.start(&mut self.dev, slot, prompt, sampler, stops);
    }

    /// One round of a lane whose last token, not yet in the cache, is `anchor`.
    pub fn round(&mut self, lane: &mut Lane, anchor: u32) -> Result<Round, EngineError> {
        crate::round::round(self, lane, anchor)
    }
}
