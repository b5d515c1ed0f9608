//! The prefix cache: which states of which texts are kept, and where.
//!
//! A **checkpoint** is all that a lane needs to go on at a position: the pages up to there, and a
//! snapshot of its recurrent state. Texts form a tree with one node for each full page, so that
//! checkpoints share the pages of common beginnings; a checkpoint that ends inside a page also has
//! that page. Nothing here touches a device: pages and snapshots are numbers.
//!
//! What prefill passes made is **exact**: its bits depend on the text alone. What rounds made while
//! answering may differ in rounding on some devices, so the tree keeps the two apart: pages made by
//! rounds hang below exact ones and never the other way round, and [`CachePolicy::Exact`] stays on
//! the exact side.

mod tree;

use ops::PAGE_TOKENS;

use crate::pages::Pages;
use crate::service::CachePolicy;
use tree::{NodeId, ROOT, Tree};

/// What the cache has for a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The checkpoint to go on from.
    pub(crate) hit: Option<Hit>,
    /// Full pages of the prompt whose text is known, kept state or not: where prompts parted before.
    pub(crate) known_pages: usize,
    /// Why no more was found; empty if all was.
    pub(crate) miss: &'static str,
}

impl Found {
    /// Prompt tokens that need not be computed.
    pub(crate) fn tokens(&self) -> usize {
        self.hit.as_ref().map_or(0, |hit| hit.len)
    }

    /// Nothing, for this reason.
    pub(crate) fn nothing(miss: &'static str) -> Found {
        Found { hit: None, known_pages: 0, miss }
    }
}

/// A checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hit {
    /// Which.
    pub(crate) id: CheckpointId,
    /// Its position.
    pub(crate) len: usize,
    /// Up to where its text was computed by prefill passes.
    pub(crate) exact_until: usize,
}

/// Names a checkpoint within the cache.
pub(crate) type CheckpointId = u32;

#[derive(Clone, Debug)]
struct Checkpoint {
    /// Its last full page.
    node: NodeId,
    /// Tokens behind it, and the page they lie in; empty at a page's end.
    tail: Vec<u32>,
    tail_page: Option<u32>,
    snapshot: u32,
    len: usize,
    exact: bool,
    used: u64,
    /// No other checkpoint ever had it.
    serial: u64,
}

/// A checkpoint's parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    pub(crate) text: Vec<u32>,
    pub(crate) exact_until: usize,
    pub(crate) snapshot: u32,
    /// Full pages, in order of position.
    pub(crate) pages: Vec<u32>,
    /// The page in which it ends.
    pub(crate) tail_page: Option<u32>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    tree: Tree,
    checkpoints: Vec<Option<Checkpoint>>,
    free_ids: Vec<CheckpointId>,
    free_snapshots: Vec<u32>,
    snapshots: usize,
    /// Counts uses: the least recent goes first.
    clock: u64,
    evictions: u64,
}

/// Why a prompt found less than all of itself.
mod miss {
    pub(super) const EMPTY: &str = "nothing is kept yet";
    pub(super) const OTHER: &str = "no kept text begins like this one";
    pub(super) const PARTS: &str = "kept texts go on differently from there";
    pub(super) const NO_STATE: &str = "no state is kept where this text parts from kept ones";
    pub(super) const ROUNDS: &str =
        "what is kept further on was made by rounds, and only exact state is asked for";
}

impl PrefixCache {
    /// An empty cache with room for this many checkpoints.
    pub(crate) fn new(snapshots: usize) -> PrefixCache {
        PrefixCache {
            tree: Tree::default(),
            checkpoints: Vec::new(),
            free_ids: Vec::new(),
            free_snapshots: (0..snapshots as u32).rev().collect(),
            snapshots,
            clock: 0,
            evictions: 0,
        }
    }

    /// Whether anything can be kept.
    pub(crate) fn is_on(&self) -> bool {
        self.snapshots > 0
    }

    /// Checkpoints.
    pub(crate) fn len(&self) -> usize {
        self.snapshots - self.free_snapshots.len()
    }

    /// Pages that only checkpoints refer to, each once.
    pub(crate) fn pages_alone(&self, pages: &Pages) -> usize {
        // A page in which checkpoints end may be a full page of a longer text too.
        let tails = self.checkpoints.iter().flatten().filter_map(|c| c.tail_page);
        let mut held: Vec<u32> = tails.chain(self.tree.pages()).collect();
        held.sort_unstable();
        let runs = held.chunk_by(|a, b| a == b);
        runs.filter(|run| pages.count(run[0]) as usize == run.len()).count()
    }

    /// Checkpoints thrown away to make room.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions
    }

    /// The longest checkpoint that a prompt begins with, its last token left out: that one is the
    /// first round's anchor.
    pub(crate) fn find(&self, prompt: &[u32], policy: CachePolicy) -> Found {
        let usable = prompt.len().saturating_sub(1);
        let nodes = self.tree.matching(&prompt[..usable]);
        let known_pages = nodes.iter().map(|&node| self.tree.depth(node)).max().unwrap_or(0);
        let candidates = [ROOT].iter().chain(&nodes).flat_map(|&node| self.tree.checkpoints(node));
        let (mut best, mut inexact) = (None::<&Checkpoint>, 0);
        let mut best_id = 0;
        for &id in candidates {
            let Some(checkpoint) = &self.checkpoints[id as usize] else { continue };
            let behind = &prompt[checkpoint.len - checkpoint.tail.len()..usable];
            if !behind.starts_with(&checkpoint.tail) {
                continue;
            }
            // Exact is what goes on as a prompt that found nothing would have: at a page's end, or
            // with the first round.
            let as_cold = checkpoint.len.is_multiple_of(PAGE_TOKENS) || checkpoint.len == usable;
            if policy == CachePolicy::Exact && !(checkpoint.exact && as_cold) {
                inexact = inexact.max(checkpoint.len);
            } else if best.is_none_or(|b| (checkpoint.len, checkpoint.exact) > (b.len, b.exact)) {
                (best, best_id) = (Some(checkpoint), id);
            }
        }
        let len = best.map_or(0, |c| c.len);
        let miss = if len == usable {
            ""
        } else if inexact > len {
            miss::ROUNDS
        } else if known_pages * PAGE_TOKENS > len {
            miss::NO_STATE
        } else if self.len() == 0 {
            miss::EMPTY
        } else if len == 0 {
            miss::OTHER
        } else {
            miss::PARTS
        };
        let hit = best.map(|c| Hit { id: best_id, len, exact_until: self.exact_until(c) });
        Found { hit, known_pages, miss }
    }

    fn exact_until(&self, c: &Checkpoint) -> usize {
        if c.exact { c.len } else { self.tree.exact_depth(c.node) * PAGE_TOKENS }
    }

    /// Takes note that a checkpoint is gone on from. Returns its snapshot, its full pages in order of
    /// position, and the page in which it ends, if it ends inside one.
    pub(crate) fn open(&mut self, id: CheckpointId) -> Option<(u32, Vec<u32>, Option<u32>)> {
        self.clock += 1;
        let checkpoint = self.checkpoints.get_mut(id as usize)?.as_mut()?;
        checkpoint.used = self.clock;
        Some((checkpoint.snapshot, self.tree.chain(checkpoint.node), checkpoint.tail_page))
    }

    /// Whether there is a checkpoint of exactly this text.
    pub(crate) fn has(&self, text: &[u32], exact: bool) -> bool {
        self.locate(text, exact).is_some()
    }

    fn locate(&self, text: &[u32], exact: bool) -> Option<CheckpointId> {
        let (body, tail) = text.split_at(text.len() / PAGE_TOKENS * PAGE_TOKENS);
        let nodes = self.tree.matching(body);
        let last = nodes.iter().filter(|&&node| self.tree.depth(node) * PAGE_TOKENS == body.len());
        let root = [ROOT];
        let ends: Vec<NodeId> =
            if body.is_empty() { root.to_vec() } else { last.copied().collect() };
        ends.iter().flat_map(|&node| self.tree.checkpoints(node)).copied().find(|&id| {
            let checkpoint = self.checkpoints[id as usize].as_ref();
            checkpoint.is_some_and(|c| c.tail == tail && c.exact >= exact)
        })
    }

    /// A snapshot number to save into, from the least recently used checkpoint if none is free.
    pub(crate) fn reserve(&mut self, pages: &mut Pages) -> Option<u32> {
        if self.free_snapshots.is_empty() {
            self.evict(pages, None);
        }
        self.free_snapshots.pop()
    }

    /// Gives back a reserved snapshot number that nothing was saved into.
    pub(crate) fn give_back(&mut self, snapshot: u32) {
        self.free_snapshots.push(snapshot);
    }

    /// Keeps what was saved into a reserved snapshot, for the text so far of a lane with these pages.
    /// Returns the checkpoint's serial number.
    pub(crate) fn insert(
        &mut self,
        text: &[u32],
        lane_pages: &[u32],
        exact_until: usize,
        snapshot: u32,
        pages: &mut Pages,
    ) -> u64 {
        let full = text.len() / PAGE_TOKENS;
        let node = self.tree.insert(
            &text[..full * PAGE_TOKENS],
            &lane_pages[..full],
            exact_until / PAGE_TOKENS,
            pages,
        );
        let tail = text[full * PAGE_TOKENS..].to_vec();
        let tail_page = (!tail.is_empty()).then(|| lane_pages[full]);
        if let Some(page) = tail_page {
            pages.share(page);
        }
        self.clock += 1;
        let exact = text.len() <= exact_until;
        let (len, used, serial) = (text.len(), self.clock, self.clock);
        let checkpoint = Checkpoint { node, tail, tail_page, snapshot, len, exact, used, serial };
        let id = self.free_ids.pop().unwrap_or_else(|| {
            self.checkpoints.push(None);
            (self.checkpoints.len() - 1) as u32
        });
        self.checkpoints[id as usize] = Some(checkpoint);
        self.tree.hang(node, id);
        serial
    }

    /// A checkpoint's serial number.
    pub(crate) fn serial(&self, id: CheckpointId) -> Option<u64> {
        Some(self.checkpoints.get(id as usize)?.as_ref()?.serial)
    }

    /// Whether a checkpoint is still there.
    pub(crate) fn exists(&self, serial: u64) -> bool {
        self.checkpoints.iter().flatten().any(|c| c.serial == serial)
    }

    /// The parts of a checkpoint, if it is still there.
    pub(crate) fn parts(&self, serial: u64) -> Option<Parts> {
        let c = self.checkpoints.iter().flatten().find(|c| c.serial == serial)?;
        Some(Parts {
            text: [self.tree.text(c.node), c.tail.clone()].concat(),
            exact_until: self.exact_until(c),
            snapshot: c.snapshot,
            pages: self.tree.chain(c.node),
            tail_page: c.tail_page,
        })
    }

    /// Throws away the least recently used checkpoint, but not `spared`. Returns whether there was one.
    pub(crate) fn evict(&mut self, pages: &mut Pages, spared: Option<CheckpointId>) -> bool {
        let kept =
            self.checkpoints.iter().enumerate().filter_map(|(id, c)| Some((id, c.as_ref()?)));
        let others = kept.filter(|(id, _)| Some(*id as u32) != spared);
        let Some((id, _)) = others.min_by_key(|(_, c)| c.used) else { return false };
        self.remove(id as u32, pages);
        self.evictions += 1;
        true
    }

    fn remove(&mut self, id: CheckpointId, pages: &mut Pages) {
        let Some(checkpoint) = self.checkpoints[id as usize].take() else { return };
        if let Some(page) = checkpoint.tail_page {
            pages.release(page);
        }
        self.tree.unhang(checkpoint.node, id, pages);
        self.free_snapshots.push(checkpoint.snapshot);
        self.free_ids.push(id);
    }

    /// Throws everything away.
    #[cfg(test)]
    pub(crate) fn clear(&mut self, pages: &mut Pages) {
        for id in 0..self.checkpoints.len() as u32 {
            self.remove(id, pages);
        }
    }

    /// All checkpoints: text, snapshot, and pages in order of position.
    #[cfg(test)]
    pub(crate) fn all(&self) -> Vec<(Vec<u32>, u32, Vec<u32>)> {
        let kept = self.checkpoints.iter().flatten();
        let parts = kept.filter_map(|c| self.parts(c.serial));
        parts
            .map(|p| (p.text, p.snapshot, p.pages.into_iter().chain(p.tail_page).collect()))
            .collect()
    }
}

#[cfg(test)]
mod tests;
