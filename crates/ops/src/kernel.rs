//! How an op runs on a GPU: launches as data.
//!
//! An op's [`Op::cuda`](crate::Op::cuda) is a pure function from its fields and the [`Card`] to a [`Plan`]; a
//! runtime compiles the sources, turns buffers into addresses and launches. Nothing here depends on
//! what the device buffers hold: what varies from pass to pass is read by the kernels themselves
//! ([`LaneStep`](crate::LaneStep)), so a recorded plan can be replayed.
//!
//! Every kernel runs under programmatic dependent launch and obeys one rule: before `wait()` (see
//! `prelude.cuh`) it touches nothing but weights, its own shared memory, and lane memory. So launches are
//! ordered as if each waited for the one before it, and copies of weights overlap its end.
//!
//! **Lane memory** is what a pass finds from before: its steps, page tables, keys and values of earlier
//! positions, a cell's state, history and pending rows. A pass begins with [`Embed`](crate::Embed), which lets the next
//! launch go only after its own `wait()`; so whatever ran before the pass is complete when any other
//! launch of the pass begins. A kernel may therefore read lane memory early, past the first-level cache,
//! and write it if nothing else in the pass does either. Two such ops on the same cell need an `Embed`, a copy or
//! a read between them.

use crate::Buf;

/// What a plan may depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Card {
    /// Compute capability: 90 for 9.0.
    pub arch: u32,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Bytes of shared memory that one block may have.
    pub shared: u32,
}

/// One translation unit. The runtime puts [`PRELUDE`] before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// For reports: the path of the file below `crates/ops/src`.
    pub name: &'static str,
    /// CUDA C++ without includes.
    pub text: &'static str,
}

/// What every kernel may use.
pub const PRELUDE: &str = include_str!("prelude.cuh");

/// One argument of a kernel, in the order of its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// The address of a buffer's first byte.
    Buf(Buf),
    /// A null pointer: an optional buffer that is not there.
    Null,
    /// `unsigned`.
    U32(u32),
    /// `float`.
    F32(f32),
    /// The address of [`WORK_BYTES`] of memory that an op may use until it is over.
    Work,
}

/// Enough for 64 rows of 32,768 inputs of a product ([`crate::Linear`]).
pub const WORK_BYTES: usize = 4 << 20;

impl From<Buf> for Arg {
    fn from(buf: Buf) -> Arg {
        Arg::Buf(buf)
    }
}

impl From<Option<Buf>> for Arg {
    fn from(buf: Option<Buf>) -> Arg {
        buf.map_or(Arg::Null, Arg::Buf)
    }
}

impl From<u32> for Arg {
    fn from(value: u32) -> Arg {
        Arg::U32(value)
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Arg {
        Arg::F32(value)
    }
}

/// A list of fixed capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct List<T, const N: usize> {
    items: [T; N],
    len: usize,
}

impl<T: Copy, const N: usize> List<T, N> {
    /// The items.
    ///
    /// # Panics
    /// If there are more than N.
    fn of(items: &[T], filler: T) -> Self {
        assert!(items.len() <= N, "{} items in a list of {N}", items.len());
        let mut list = List { items: [filler; N], len: items.len() };
        list.items[..items.len()].copy_from_slice(items);
        list
    }

    /// In order.
    pub fn as_slice(&self) -> &[T] {
        &self.items[..self.len]
    }

    /// With one more, if there is room.
    fn with(mut self, item: T) -> Option<Self> {
        *self.items.get_mut(self.len)? = item;
        self.len += 1;
        Some(self)
    }
}

/// Compile-time constants of a kernel.
pub type Defines = List<(&'static str, i64), 24>;

/// One kernel launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Launch {
    /// Where the kernel is.
    pub source: Source,
    /// Its name: an `extern "C" __global__` function.
    pub entry: &'static str,
    /// Compile-time constants: geometry that the kernel is specialised for.
    pub defines: Defines,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Blocks that share a cluster; 1 for none.
    pub cluster: u32,
    /// Arguments.
    pub args: List<Arg, 32>,
    /// The launch is a chain of one stage of this kind, whose words the arguments are: its kernel takes
    /// a [`Program`] instead. In a recorded sequence neighbours of the same shape join.
    pub stage: Option<u32>,
}

/// Rows of a round up to which each has the bits that it has alone.
pub const LIKE_ALONE: usize = crate::chain::LIKE_ALONE;
/// The most stages of a chain.
pub const MOST_STAGES: usize = 56;
/// The most words of a stage.
pub const MOST_WORDS: usize = 19;

/// The one argument of a chain's kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Program {
    /// Address of a `u64` that was zero once, and that only chains of the same number of blocks write.
    pub meetings: u64,
    /// Stages.
    pub count: u64,
    /// What each does.
    pub kind: [u64; MOST_STAGES],
    /// Their arguments' bits.
    pub word: [[u64; MOST_WORDS]; MOST_STAGES],
}

impl Launch {
    /// A launch of `grid` blocks of `block` threads without dynamic shared memory.
    pub fn new(
        source: Source,
        entry: &'static str,
        defines: &[(&'static str, i64)],
        grid: [u32; 3],
        block: u32,
        args: &[Arg],
    ) -> Launch {
        let (defines, args) = (List::of(defines, ("", 0)), List::of(args, Arg::Null));
        Launch { source, entry, defines, grid, block, shared: 0, cluster: 1, args, stage: None }
    }

    /// With this much dynamic shared memory.
    #[must_use]
    pub fn shared(self, bytes: u32) -> Launch {
        Launch { shared: bytes, ..self }
    }

    /// In clusters of this many blocks.
    #[must_use]
    pub fn cluster(self, blocks: u32) -> Launch {
        Launch { cluster: blocks, ..self }
    }

    /// As a stage of a chain.
    #[must_use]
    pub fn stage(self, kind: u32) -> Launch {
        Launch { stage: Some(kind), ..self }
    }

    /// The launch of this one, which has `stages`, and the next, if they may join: this one's with the other's defines and the
    /// most threads and shared memory. The arguments stay this one's.
    pub fn joined(&self, stages: usize, next: &Launch) -> Option<Launch> {
        let shape = |l: &Launch| (l.source, l.entry, l.grid, l.cluster);
        let full = stages >= MOST_STAGES;
        if full || self.stage.is_none() || next.stage.is_none() || shape(self) != shape(next) {
            return None;
        }
        let mut defines = self.defines;
        for &(name, value) in next.defines.as_slice() {
            match defines.as_slice().iter().find(|(known, _)| *known == name) {
                Some(&(_, known)) if known != value => return None,
                Some(_) => {}
                None => defines = defines.with((name, value))?,
            }
        }
        let (block, shared) = (self.block.max(next.block), self.shared.max(next.shared));
        Some(Launch { defines, block, shared, ..*self })
    }
}

/// The launches of one op, in order.
#[derive(Debug, Default)]
pub struct Plan {
    launches: Vec<Launch>,
}

impl Plan {
    /// Adds a launch.
    pub fn push(&mut self, launch: Launch) {
        self.launches.push(launch);
    }

    /// In order.
    pub fn launches(&self) -> &[Launch] {
        &self.launches
    }

    /// Forgets the launches and keeps the memory.
    pub fn clear(&mut self) {
        self.launches.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: Source = Source { name: "a.cu", text: "" };

    fn stage(defines: &[(&'static str, i64)], shared: u32) -> Launch {
        let launch = Launch::new(SOURCE, "run", defines, [132, 1, 1], 384, &[Arg::Null]);
        launch.shared(shared).cluster(2).stage(0)
    }

    #[test]
    fn neighbours_join_unless_they_contradict() {
        let (a, b) = (stage(&[("WIDTH", 64)], 10), stage(&[("WIDTH", 64), ("ROWS", 8)], 5));
        let both = a.joined(1, &b).expect("the same shape");
        assert_eq!(both.defines.as_slice(), [("WIDTH", 64), ("ROWS", 8)]);
        assert_eq!((both.shared, both.args), (10, a.args));
        assert_eq!(b.joined(1, &a).map(|l| l.shared), Some(10));
        // Another value, another shape, and a launch by itself.
        assert_eq!(both.joined(1, &stage(&[("ROWS", 16)], 0)), None);
        assert_eq!(a.joined(MOST_STAGES, &b), None);
        assert_eq!(a.joined(1, &Launch { block: 512, ..b }).map(|l| l.block), Some(512));
        assert_eq!(a.joined(1, &Launch { cluster: 4, ..b }), None);
        assert_eq!(a.joined(1, &Launch { stage: None, ..b }), None);
        assert_eq!(Launch { stage: None, ..a }.joined(1, &b), None);
    }

    #[test]
    fn defines_that_do_not_fit_do_not_join() {
        const NAMES: [&str; 24] = [
            "A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K", "L", "M", "N", "O", "P", "Q",
            "R", "S", "T", "U", "V", "W", "X",
        ];
        let full = stage(&NAMES.map(|name| (name, 1)), 0);
        assert!(full.joined(1, &stage(&[("X", 1)], 0)).is_some());
        assert_eq!(full.joined(1, &stage(&[("Y", 1)], 0)), None);
    }
}
