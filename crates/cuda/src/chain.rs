//! Neighbouring stages of a recording, made one launch ([`ops::kernel::Program`]).

use ops::kernel::{Launch, MOST_STAGES, MOST_WORDS, Program};

/// A launch that stages may still join.
#[derive(Debug)]
pub(crate) struct Chain {
    pub(crate) launch: Launch,
    pub(crate) program: Box<Program>,
}

impl Chain {
    /// Of one stage. `meetings` is the address of a word for all chains of a device.
    pub(crate) fn new(launch: &Launch, kind: u32, args: &[u64], meetings: u64) -> Chain {
        let (kinds, words) = ([0; MOST_STAGES], [[0; MOST_WORDS]; MOST_STAGES]);
        let program = Box::new(Program { meetings, count: 0, kind: kinds, word: words });
        let mut chain = Chain { launch: *launch, program };
        chain.push(kind, args);
        chain
    }

    /// Takes one more stage in, if it fits.
    pub(crate) fn join(&mut self, launch: &Launch, kind: u32, args: &[u64]) -> bool {
        let joined = self.launch.joined(self.program.count as usize, launch);
        if let Some(joined) = joined {
            self.launch = joined;
            self.push(kind, args);
        }
        joined.is_some()
    }

    fn push(&mut self, kind: u32, args: &[u64]) {
        let at = self.program.count as usize;
        self.program.kind[at] = u64::from(kind);
        self.program.word[at][..args.len()].copy_from_slice(args);
        self.program.count += 1;
    }
}
