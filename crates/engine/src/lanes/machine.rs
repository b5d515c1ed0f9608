//! What lanes need of an engine: the seam at which tests put a machine of their own.

use model::Lane;
use ops::Device;

use crate::engine::{Engine, EngineError};
use crate::round::{self, Going, Masker, Round};
use crate::sampler::{Bounds, Sampler};

/// Sizes of a machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) context: usize,
    pub(crate) vocab: usize,
    pub(crate) slots: usize,
    /// Pages of all lanes and checkpoints.
    pub(crate) pages: usize,
    pub(crate) snapshots: usize,
    pub(crate) snapshot_bytes: usize,
    pub(crate) page_bytes: usize,
    /// Rows of a verify pass.
    pub(crate) block: usize,
    /// Rows of a prefill pass.
    pub(crate) chunk: usize,
    /// Rounds that may be in flight.
    pub(crate) depth: usize,
    /// Whether rounds draft only while that is faster.
    pub(crate) adapts: bool,
    /// Rows of a round up to which each has the bits that it has alone.
    pub(crate) like_alone: usize,
}

/// Computes for lanes.
pub(crate) trait Machine {
    fn limits(&self) -> Limits;
    /// Gives a slot its pages, in order of position.
    fn set_pages(&mut self, slot: u32, pages: &[u32]);
    fn copy_page(&mut self, from: u32, to: u32);
    /// Appends a page's bytes, of all pools.
    fn read_page(&mut self, page: u32, bytes: &mut Vec<u8>);
    fn write_page(&mut self, page: u32, bytes: &[u8]);
    /// Appends a kept state's bytes.
    fn read_snapshot(&mut self, snapshot: u32, bytes: &mut Vec<u8>);
    fn write_snapshot(&mut self, snapshot: u32, bytes: &[u8]);
    /// Whether what was read and written is right.
    fn sync(&mut self) -> Result<(), EngineError>;
    /// Empties a slot.
    fn clear(&mut self, slot: u32);
    /// Keeps what a lane without rounds in flight remembers besides its pages.
    fn save(&mut self, lane: &mut Lane, snapshot: u32) -> Result<(), EngineError>;
    /// Makes a slot go on from a kept state. Nobody waits for it.
    fn restore(&mut self, snapshot: u32, slot: u32, pos: u32) -> Lane;
    /// Runs tokens into a lane's cache in one pass. No rounds may be in flight.
    fn prefill(&mut self, lane: &mut Lane, tokens: &[u32]) -> Result<(), EngineError>;
    /// Prepares a slot for an answer.
    fn start(&mut self, slot: u32, prompt: &[u32], sampler: &Sampler, bounds: &Bounds<'_>);
    /// The slots of the rounds in flight.
    fn flight(&self, slots: &mut Vec<u32>);
    fn submit(
        &mut self,
        going: &[Going],
        depth: usize,
        masker: &mut dyn Masker,
    ) -> Result<(), EngineError>;
    fn receive(&mut self, lane: &mut Lane) -> Result<Round, EngineError>;
    /// Whether the machine still works, after something failed.
    fn probe(&mut self) -> Result<(), EngineError>;
}

impl<D: Device> Machine for Engine<D> {
    fn limits(&self) -> Limits {
        let shape = self.page_shape();
        Limits {
            context: self.context(),
            vocab: self.target().vocab,
            slots: shape.slots,
            pages: shape.pages,
            snapshots: self.snapshots(),
            snapshot_bytes: self.snapshot_bytes(),
            page_bytes: self.page_bytes(),
            block: self.block(),
            chunk: self.chunk(),
            depth: round::depth(self.may_run_ahead()),
            adapts: self.adapts(),
            like_alone: self.dev.info().like_alone,
        }
    }

    fn set_pages(&mut self, slot: u32, pages: &[u32]) {
        Engine::set_pages(self, slot, pages);
    }

    fn copy_page(&mut self, from: u32, to: u32) {
        Engine::copy_page(self, from, to);
    }

    fn read_page(&mut self, page: u32, bytes: &mut Vec<u8>) {
        let bufs = self.page_buffers(page);
        self.read_all(&bufs, bytes);
    }

    fn write_page(&mut self, page: u32, bytes: &[u8]) {
        let bufs = self.page_buffers(page);
        self.write_all(&bufs, bytes);
    }

    fn read_snapshot(&mut self, snapshot: u32, bytes: &mut Vec<u8>) {
        self.read_all(&[self.state.snapshot_buffer(snapshot as usize)], bytes);
    }

    fn write_snapshot(&mut self, snapshot: u32, bytes: &[u8]) {
        self.write_all(&[self.state.snapshot_buffer(snapshot as usize)], bytes);
    }

    fn sync(&mut self) -> Result<(), EngineError> {
        Ok(self.dev.sync()?)
    }

    fn clear(&mut self, slot: u32) {
        Engine::clear(self, slot);
    }

    fn save(&mut self, lane: &mut Lane, snapshot: u32) -> Result<(), EngineError> {
        Engine::save(self, lane, snapshot)
    }

    fn restore(&mut self, snapshot: u32, slot: u32, pos: u32) -> Lane {
        Engine::restore(self, snapshot, slot, pos)
    }

    fn prefill(&mut self, lane: &mut Lane, tokens: &[u32]) -> Result<(), EngineError> {
        self.prefill_pass(lane, tokens)
    }

    fn start(&mut self, slot: u32, prompt: &[u32], sampler: &Sampler, bounds: &Bounds<'_>) {
        Engine::start(self, slot, prompt, sampler, bounds);
    }

    fn flight(&self, slots: &mut Vec<u32>) {
        self.pipeline.flight(slots);
    }

    fn submit(
        &mut self,
        going: &[Going],
        depth: usize,
        masker: &mut dyn Masker,
    ) -> Result<(), EngineError> {
        Engine::submit(self, going, depth, masker)
    }

    fn receive(&mut self, lane: &mut Lane) -> Result<Round, EngineError> {
        Engine::receive(self, lane)
    }

    fn probe(&mut self) -> Result<(), EngineError> {
        Engine::probe(self)
    }
}
