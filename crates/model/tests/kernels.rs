//! Which kernels of a card passes take. Planned only: it needs no card.

use std::collections::BTreeSet;
use std::path::Path;

use model::{
    Draft, DraftSource, DraftState, PageShape, Scratch, ScratchShape, State, StateShape, Target,
    TargetSource, draft_block, draft_context, forward, page_table,
};
use ops::kernel::Card;
use ops::{Buf, Device, DryRun, LaneStep, Lanes, Pass};

const HOPPER: Card = Card { arch: 90, sms: 132, shared: 227 << 10 };
const CARDS: [Card; 4] = [
    Card { arch: 80, sms: 108, shared: 163 << 10 },
    HOPPER,
    Card { arch: 100, sms: 148, shared: 227 << 10 },
    Card { arch: 120, sms: 170, shared: 99 << 10 },
];

/// Rows of a lane's block, and lanes.
const BLOCK: usize = 8;
const LANES: usize = 16;
/// Rows of the largest prompt pass.
const CHUNK: usize = 2048;
/// Rows of prompt passes: on both sides of what rounds have.
const PROMPTS: [usize; 5] = [1, 40, 64, 65, CHUNK];

/// What tells kernels apart: where they are, and what they are compiled for.
type Kernels = BTreeSet<(&'static str, &'static str, Vec<(&'static str, i64)>)>;

/// A model and its draft that exist on paper.
struct Paper {
    card: Card,
    target: Target,
    draft: Draft,
    state: State,
    scratch: Scratch,
    draft_state: DraftState,
    step: Buf,
}

impl Paper {
    fn new(name: &str, card: Card) -> Paper {
        let mut dev = DryRun::on_card(card);
        let source = TargetSource::open(Path::new(name)).expect("a known shape");
        let target = Target::load(&mut dev, &source, &mut |_| ()).expect("a dry run");
        let draft = DraftSource::open(Path::new(name), source.spec()).expect("a known shape");
        let draft = Draft::load(&mut dev, &draft, &mut |_| ()).expect("a dry run");
        let pages = PageShape::full(LANES, 64);
        let table = page_table(&mut dev, &pages).expect("a dry run");
        let shape = StateShape::of(&target, BLOCK, pages, 1);
        let state = State::new(&mut dev, &shape, table).expect("a dry run");
        let act = dev.info().act;
        let sizes = (CHUNK, LANES * BLOCK);
        let shape = ScratchShape::of(&target, sizes, draft.taps.clone(), act);
        let scratch = Scratch::new(&mut dev, &shape).expect("a dry run");
        let draft_state =
            DraftState::new(&mut dev, &draft, &target, CHUNK, &pages, table, act).expect("memory");
        let step = dev.alloc(LANES * size_of::<LaneStep>(), "steps").expect("a dry run");
        Paper { card, target, draft, state, scratch, draft_state, step }
    }

    /// The kernels of a pass of so many rows, apart from the defines in `but`.
    fn kernels(&self, pass: Pass, rows: usize, but: &[&str]) -> Kernels {
        let mut dev = DryRun::on_card(self.card);
        let count = if pass == Pass::Prompt { 1 } else { rows.div_ceil(BLOCK) };
        let step = self.step.slice(0, count * size_of::<LaneStep>());
        let lanes = Lanes { step, count, rows, max_rows: rows.div_ceil(count) };
        let (target, s) = (&self.target, &self.scratch);
        let logits = if pass == Pass::Prompt { 0..0 } else { 0..rows };
        forward(&mut dev, target, &self.state, s, lanes, pass, logits);
        draft_context(&mut dev, &self.draft, &self.draft_state, s.features, lanes, pass);
        if pass == Pass::Round {
            draft_block(&mut dev, &self.draft, target, &self.draft_state, lanes);
        }
        assert_eq!(dev.unsupported, [], "sm_{}: {pass:?} of {rows} rows", self.card.arch);
        // How many half tiles a pass has. Whether blocks share k is not looked at here but by the cases of `linear`.
        let tiles = |name: &str| name.starts_with("T_");
        let kept = |name: &str| !but.contains(&name) && !tiles(name);
        let kernel = |l: &ops::kernel::Launch| {
            let defines = l.defines.as_slice().iter().copied().filter(|(name, _)| kept(name));
            // Where they are no stage of a chain, mixers of several lanes are a launch of the same code.
            match l.entry {
                "gdn_mix" => ("chain.cu", "chain", defines.collect()),
                // Two kernels with one order of sums, which ops' cases compare bit by bit.
                "linear_short" | "linear_many" => ("linear/many.cu", "linear", defines.collect()),
                entry => (l.source.name, entry, defines.collect()),
            }
        };
        dev.launches.iter().map(kernel).collect()
    }
}

/// Defines that say how rows are shared out, of which no row's bits depend: rows and outputs of a block and its ring; and
/// of kernels for rounds, blocks of rows and room for them.
const SHARES: [&str; 9] =
    ["ROWS", "GROUPS", "STAGES", "BLOCKS", "RING", "MIXING", "TILES", "UNITS", "SHARED"];

#[test]
fn a_prompt_takes_the_same_kernels_whatever_its_rows() {
    for name in ["synth:qwen3.8-27b", "synth:tiny"] {
        for card in CARDS {
            // On Hopper prompts have kernels of their own, elsewhere some are those of rounds.
            let but = if card.arch == 90 && name != "synth:tiny" { &SHARES[..3] } else { &SHARES };
            let paper = Paper::new(name, card);
            let whole = paper.kernels(Pass::Prompt, CHUNK, but);
            for rows in PROMPTS {
                let part = paper.kernels(Pass::Prompt, rows, but);
                assert_eq!(part, whole, "{name} on sm_{}: {rows} rows", card.arch);
            }
        }
    }
}

/// On a card of little shared memory a mix of more rows is its parts, which give it the same bits: not looked at here.
#[test]
fn a_round_takes_the_same_kernels_up_to_64_rows() {
    for card in CARDS.into_iter().filter(|card| card.arch != 120) {
        let paper = Paper::new("synth:qwen3.8-27b", card);
        let one = paper.kernels(Pass::Round, 1, &SHARES);
        for rows in 2..=64 {
            let some = paper.kernels(Pass::Round, rows, &SHARES);
            assert_eq!(some, one, "sm_{}: {rows} rows", card.arch);
        }
    }
}

/// The arms that must differ, so that the comparisons above say something: the kinds of pass, and the exception, rounds of
/// more rows than it pays to read weights again for.
#[test]
fn kinds_of_pass_and_larger_rounds_differ() {
    let paper = Paper::new("synth:qwen3.8-27b", HOPPER);
    let prompt = paper.kernels(Pass::Prompt, 8, &SHARES);
    let round = paper.kernels(Pass::Round, 8, &SHARES);
    let names = |kernels: &Kernels| kernels.iter().map(|k| k.0).collect::<BTreeSet<_>>();
    let (ours, theirs) = (names(&prompt), names(&round));
    for source in ["linear/many.cu", "attention/flash.cu", "gated_delta/chunk.cu"] {
        assert!(ours.contains(source) && !theirs.contains(source), "{source}");
    }
    for source in ["chain.cu", "attn_mix/kernel.cu"] {
        assert!(!ours.contains(source) && theirs.contains(source), "{source}");
    }
    let large = names(&paper.kernels(Pass::Round, 72, &SHARES));
    assert!(large.contains("linear/many.cu") && !large.contains("attention/flash.cu"));
}
