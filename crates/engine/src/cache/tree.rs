//! Texts of checkpoints, page by page.

use ops::PAGE_TOKENS;

use super::CheckpointId;
use crate::pages::Pages;

/// Names a node; [`ROOT`] is the empty text.
pub(super) type NodeId = u32;

pub(super) const ROOT: NodeId = 0;

/// One full page of a text.
#[derive(Clone, Debug)]
struct Node {
    parent: NodeId,
    tokens: Vec<u32>,
    page: u32,
    /// Whether prefill passes made it, and all pages before it.
    exact: bool,
    depth: usize,
    children: Vec<NodeId>,
    checkpoints: Vec<CheckpointId>,
}

/// See the module. Nodes that lead to no checkpoint are removed.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: Vec<Option<Node>>,
    free: Vec<NodeId>,
}

impl Default for Tree {
    fn default() -> Tree {
        let root = Node {
            parent: ROOT,
            tokens: Vec::new(),
            page: 0,
            exact: true,
            depth: 0,
            children: Vec::new(),
            checkpoints: Vec::new(),
        };
        Tree { nodes: vec![Some(root)], free: Vec::new() }
    }
}

impl Tree {
    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id as usize].as_ref().expect("nodes that are referred to exist")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id as usize].as_mut().expect("nodes that are referred to exist")
    }

    /// Every node whose text `text` begins with, the root left out.
    pub(super) fn matching(&self, text: &[u32]) -> Vec<NodeId> {
        let mut found = Vec::new();
        let mut ends = vec![ROOT];
        for block in text.chunks_exact(PAGE_TOKENS) {
            let children = ends.iter().flat_map(|&end| &self.node(end).children);
            ends = children.copied().filter(|&child| self.node(child).tokens == block).collect();
            if ends.is_empty() {
                break;
            }
            found.extend_from_slice(&ends);
        }
        found
    }

    /// Pages of a node's text.
    pub(super) fn depth(&self, node: NodeId) -> usize {
        self.node(node).depth
    }

    /// The first pages of a node's text that prefill passes made.
    pub(super) fn exact_depth(&self, node: NodeId) -> usize {
        let mut at = node;
        while !self.node(at).exact {
            at = self.node(at).parent;
        }
        self.depth(at)
    }

    /// Checkpoints that end at or right behind a node.
    pub(super) fn checkpoints(&self, node: NodeId) -> &[CheckpointId] {
        &self.node(node).checkpoints
    }

    /// A node's pages, in order of position.
    pub(super) fn chain(&self, node: NodeId) -> Vec<u32> {
        let mut chain: Vec<u32> = self.up(node).map(|at| self.node(at).page).collect();
        chain.reverse();
        chain
    }

    /// A node and those above it, the root left out.
    fn up(&self, node: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let above = |&at: &NodeId| Some(self.node(at).parent).filter(|&at| at != ROOT);
        std::iter::successors(Some(node).filter(|&at| at != ROOT), above)
    }

    /// The node of a text of full pages, the first `exact` of them made by prefill passes. Pages of
    /// nodes that are new come from `lane_pages`, and are referred to once more.
    pub(super) fn insert(
        &mut self,
        text: &[u32],
        lane_pages: &[u32],
        exact: usize,
        pages: &mut Pages,
    ) -> NodeId {
        let mut at = ROOT;
        for (i, block) in text.chunks_exact(PAGE_TOKENS).enumerate() {
            let exact = i < exact;
            let same = |&child: &NodeId| {
                let child = self.node(child);
                child.exact == exact && child.tokens == block
            };
            let known = self.node(at).children.iter().copied().find(same);
            at = known.unwrap_or_else(|| {
                pages.share(lane_pages[i]);
                self.add(at, block, lane_pages[i], exact)
            });
        }
        at
    }

    fn add(&mut self, parent: NodeId, block: &[u32], page: u32, exact: bool) -> NodeId {
        let node = Node {
            parent,
            tokens: block.to_vec(),
            page,
            exact,
            depth: self.depth(parent) + 1,
            children: Vec::new(),
            checkpoints: Vec::new(),
        };
        let id = self.free.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            (self.nodes.len() - 1) as u32
        });
        self.nodes[id as usize] = Some(node);
        self.node_mut(parent).children.push(id);
        id
    }

    /// Notes a checkpoint at a node.
    pub(super) fn hang(&mut self, node: NodeId, checkpoint: CheckpointId) {
        self.node_mut(node).checkpoints.push(checkpoint);
    }

    /// Forgets a checkpoint, and the nodes that led only to it.
    pub(super) fn unhang(&mut self, node: NodeId, checkpoint: CheckpointId, pages: &mut Pages) {
        self.node_mut(node).checkpoints.retain(|&id| id != checkpoint);
        let mut at = node;
        while at != ROOT {
            let node = self.node(at);
            if !node.children.is_empty() || !node.checkpoints.is_empty() {
                return;
            }
            let (parent, page) = (node.parent, node.page);
            pages.release(page);
            self.nodes[at as usize] = None;
            self.free.push(at);
            self.node_mut(parent).children.retain(|&child| child != at);
            at = parent;
        }
    }

    /// Each node's page.
    pub(super) fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.nodes[1..].iter().flatten().map(|node| node.page)
    }

    /// A node's text.
    pub(super) fn text(&self, node: NodeId) -> Vec<u32> {
        let mut blocks: Vec<&[u32]> =
            self.up(node).map(|at| self.node(at).tokens.as_slice()).collect();
        blocks.reverse();
        blocks.concat()
    }
}
