//! The bundled model on a host device, and its golden data.

#![allow(dead_code, unreachable_pub, reason = "shared by test files that each use a part")]

use std::path::{Path, PathBuf};

use model::{
    Draft, DraftSource, DraftState, Lane, PageShape, Scratch, ScratchShape, State, StateShape,
    Target, TargetSource, page_table,
};
use ops::simd::Isa;
use ops::{ActDtype, Device, Host, HostMode, KvDtype, LaneStep, Lanes, PAGE_TOKENS, Pass};

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub fn golden(name: &str) -> serde_json::Value {
    let path = root().join("tests/golden").join(format!("{name}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
    serde_json::from_str(&text).expect("golden JSON")
}

pub const GOLDENS: [&str; 6] = ["short", "prose200", "long1500", "code", "utf8", "chat"];

pub fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().expect("ids").iter().map(|v| v.as_u64().expect("id") as u32).collect()
}

pub fn floats(value: &serde_json::Value) -> Vec<f32> {
    value.as_array().expect("floats").iter().map(|v| v.as_f64().expect("float") as f32).collect()
}

pub const BLOCK: usize = 8;
const LOGIT_ROWS: usize = 32;
const CHUNK: usize = 512;
const MAX_PAGES: usize = 40;

/// A target, its draft and one lane.
pub struct Rig {
    pub dev: Host,
    pub target: Target,
    pub draft: Draft,
    pub state: State,
    pub scratch: Scratch,
    pub draft_state: DraftState,
    pub lane: Lane,
    step: ops::Buf,
}

impl Rig {
    /// The bundled pair on the best instruction set. `taps`: layers to capture, the draft's if none.
    pub fn new(act: ActDtype, taps: Option<Vec<usize>>) -> Rig {
        let dev = Host::with(HostMode::Simd, Isa::detect(), 2, act);
        Rig::on(dev, act, taps)
    }

    pub fn on(dev: Host, act: ActDtype, taps: Option<Vec<usize>>) -> Rig {
        Rig::with(dev, act, taps, KvDtype::Bf16)
    }

    pub fn with(mut dev: Host, act: ActDtype, taps: Option<Vec<usize>>, kv: KvDtype) -> Rig {
        let source = TargetSource::open(&root().join("models/th-tiny")).expect("target");
        let target = Target::load(&mut dev, &source, &mut |_| ()).expect("target weights");
        let path = root().join("models/th-tiny-dflash");
        let draft_source = DraftSource::open(&path, source.spec()).expect("draft");
        let draft = Draft::load(&mut dev, &draft_source, &mut |_| ()).expect("draft weights");
        let pages = PageShape { kv, ..PageShape::full(1, MAX_PAGES) };
        let table = page_table(&mut dev, &pages).expect("memory");
        let shape = StateShape::of(&target, BLOCK, pages, 1);
        let state = State::new(&mut dev, &shape, table).expect("memory");
        let taps = taps.unwrap_or_else(|| draft.taps.clone());
        let shape = ScratchShape::of(&target, (CHUNK, LOGIT_ROWS), taps, act);
        let scratch = Scratch::new(&mut dev, &shape).expect("memory");
        let draft_state =
            DraftState::new(&mut dev, &draft, &target, CHUNK, &pages, table, act).expect("memory");
        let step = dev.alloc(size_of::<LaneStep>(), "step").expect("memory");
        Rig { dev, target, draft, state, scratch, draft_state, lane: Lane::new(0), step }
    }

    pub fn reset(&mut self) {
        self.lane = Lane::new(0);
        self.state.clear(&mut self.dev, 0);
    }

    pub fn lanes(&mut self, rows: usize) -> Lanes {
        self.dev.write(self.step, bytemuck::bytes_of(&self.lane.step(0, rows as u32)));
        Lanes { step: self.step, count: 1, rows, max_rows: rows }
    }

    fn draft_context(&mut self, lanes: Lanes, pass: Pass) {
        if self.scratch.taps == self.draft.taps {
            let features = self.scratch.features;
            model::draft_context(
                &mut self.dev,
                &self.draft,
                &self.draft_state,
                features,
                lanes,
                pass,
            );
        }
    }

    /// Prefill in chunks of at most `budget` rows that end on the page grid.
    pub fn prefill(&mut self, tokens: &[u32], budget: usize) {
        let mut rest = tokens;
        while !rest.is_empty() {
            let pos = self.lane.pos as usize;
            let end = (pos + budget) / PAGE_TOKENS * PAGE_TOKENS;
            let (now, later) = rest.split_at(rest.len().min(end - pos));
            self.pass(now, Pass::Prompt, 0..0);
            self.lane.advance(now.len() as u32);
            rest = later;
        }
    }

    /// One pass; the lane is not moved. Returns the logits of `logits`, row by row.
    pub fn pass(
        &mut self,
        tokens: &[u32],
        pass: Pass,
        logits: std::ops::Range<usize>,
    ) -> Vec<Vec<f32>> {
        let lanes = self.lanes(tokens.len());
        self.dev.write(self.scratch.ids, bytemuck::cast_slice(tokens));
        let rows = logits.len();
        let (target, state) = (&self.target, &self.state);
        model::forward(&mut self.dev, target, state, &self.scratch, lanes, pass, logits);
        self.draft_context(lanes, pass);
        self.dev.sync().expect("a pass");
        let vocab = self.target.lm_head.n;
        let mut flat = vec![0f32; rows * vocab];
        self.dev.read(self.scratch.logits, bytemuck::cast_slice_mut(&mut flat));
        flat.chunks(vocab).map(<[f32]>::to_vec).collect()
    }

    /// A verify pass of which `keep` rows are kept.
    pub fn verify(&mut self, tokens: &[u32], keep: usize) -> Vec<Vec<f32>> {
        let logits = self.pass(tokens, Pass::Round, 0..tokens.len());
        self.lane.commit(keep as u32);
        logits
    }

    /// The draft's logits for the rows after `anchor`, at the lane's position.
    pub fn propose(&mut self, anchor: u32) -> Vec<Vec<f32>> {
        let lanes = self.lanes(self.draft.block);
        self.dev.write(self.draft_state.ids, bytemuck::bytes_of(&anchor));
        let (draft, target, state) = (&self.draft, &self.target, &self.draft_state);
        model::draft_block(&mut self.dev, draft, target, state, lanes);
        self.dev.sync().expect("a draft pass");
        let vocab = self.target.lm_head.n;
        let mut flat = vec![0f32; self.draft.block * vocab];
        self.dev.read(self.draft_state.logits, bytemuck::cast_slice_mut(&mut flat));
        flat.chunks(vocab).skip(1).map(<[f32]>::to_vec).collect()
    }
}

/// The first largest element.
pub fn argmax(row: &[f32]) -> u32 {
    (1..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32
}
