//! One device with every buffer of an `Accept`, for tests that run many rounds.

use crate::simd::Isa;
use crate::{
    Accept, ActDtype, Buf, Device, Host, HostMode, LaneResult, LaneStep, Lanes, LogitBias,
    LogitRows, Op, Proposals, SamplerParams,
};

/// What one lane brings to a round.
pub(super) struct Round<'a> {
    pub(super) params: SamplerParams,
    pub(super) anchor: u32,
    pub(super) pos: u32,
    /// Proposals with their candidates and weights; both empty for point masses.
    pub(super) drafts: &'a [(u32, &'a [u32], &'a [u32])],
    /// One row more than proposals.
    pub(super) logits: &'a [Vec<f32>],
}

/// A copy of a lane's result.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outcome {
    pub(super) tokens: Vec<u32>,
    pub(super) logprobs: Vec<f32>,
    pub(super) log_sums: Vec<f32>,
    pub(super) proposed: usize,
    pub(super) flags: u32,
    pub(super) step: LaneStep,
    pub(super) anchor: u32,
}

pub(super) struct Rig {
    pub(super) dev: Host,
    pub(super) op: Accept,
    slots: usize,
}

impl Rig {
    /// A device of `mode` for `lanes` lanes of up to `max_rows` rows.
    pub(super) fn with(mode: HostMode, lanes: usize, max_rows: usize, valid: usize) -> Rig {
        let mut dev = Host::with(mode, Isa::detect(), 1, ActDtype::I8);
        let mut alloc = |bytes: usize| dev.alloc(bytes, "rig").expect("memory");
        let (rows, k, stride, slots) = (lanes * max_rows, 8, valid + 3, lanes + 1);
        let op = Accept {
            logits: alloc(4 * rows * stride),
            logit_rows: LogitRows::All,
            ids: alloc(4 * rows),
            draft_ids: Some(alloc(4 * rows)),
            proposals: Some(Proposals { buf: alloc(Proposals::bytes(lanes, max_rows, k)), k }),
            params: alloc(slots * size_of::<SamplerParams>()),
            counts: alloc(4 * slots * valid),
            biases: alloc(slots * 4 * size_of::<LogitBias>()),
            bias_capacity: 4,
            masks: Some(alloc(4 * rows * valid.div_ceil(32))),
            results: alloc(Accept::results_bytes(lanes, max_rows)),
            scratch: alloc(Accept::scratch_bytes(rows, valid)),
            lanes: Lanes { step: alloc(lanes * 32), count: lanes, rows, max_rows },
            stride,
            valid,
        };
        op.check().expect("a supported geometry");
        Rig { dev, op, slots }
    }

    pub(super) fn new(max_rows: usize, valid: usize) -> Rig {
        Rig::with(HostMode::Simd, 1, max_rows, valid)
    }

    /// The slot of a lane: not its number, to catch one used for the other.
    pub(super) fn slot(&self, lane: usize) -> usize {
        self.slots - 1 - lane
    }

    pub(super) fn write<T: bytemuck::Pod>(&mut self, buf: Buf, values: &[T]) {
        self.dev.write(buf, bytemuck::cast_slice(values));
    }

    pub(super) fn words(&mut self, buf: Buf) -> Vec<u32> {
        let mut words = vec![0u32; buf.bytes / 4];
        self.dev.read(buf, bytemuck::cast_slice_mut(&mut words));
        words
    }

    /// The counts of a lane's slot.
    pub(super) fn counts(&self, lane: usize) -> Buf {
        self.op.counts.rows(self.slot(lane), 1, 4 * self.op.valid)
    }

    /// The biases of a lane's slot.
    pub(super) fn biases(&self, lane: usize) -> Buf {
        self.op.biases.rows(self.slot(lane), 1, 4 * size_of::<LogitBias>())
    }

    /// Puts a lane's round into the buffers.
    pub(super) fn prepare(&mut self, lane: usize, round: &Round) {
        let (op, max_rows) = (self.op, self.op.lanes.max_rows);
        let row0 = lane * max_rows;
        let step = LaneStep {
            row0: row0 as u32,
            rows: round.logits.len() as u32,
            pos: round.pos,
            slot: self.slot(lane) as u32,
            pending: 1,
            parity: 1,
            ..LaneStep::default()
        };
        self.write(op.lanes.step.rows(lane, 1, 32), &[step]);
        let params = op.params.rows(self.slot(lane), 1, size_of::<SamplerParams>());
        self.write(params, &[round.params]);
        self.write(op.ids.rows(row0, 1, 4), &[round.anchor]);
        let proposals = op.proposals.expect("the rig has proposals");
        for (i, (token, ids, weights)) in round.drafts.iter().enumerate() {
            self.write(op.ids.rows(row0 + i + 1, 1, 4), &[*token]);
            let mem = self.dev.mem();
            let (count, q_ids, q_weights) =
                proposals.get_mut(mem, op.lanes.count, max_rows, lane, i + 1);
            *count = ids.len() as u32;
            q_ids[..ids.len()].copy_from_slice(ids);
            q_weights[..ids.len()].copy_from_slice(weights);
        }
        for (i, logits) in round.logits.iter().enumerate() {
            let row = op.logits.rows(row0 + i, 1, 4 * op.stride);
            let mut padded = logits.clone();
            padded.resize(op.stride, 1e30);
            self.write(row, &padded);
        }
    }

    /// Runs the op on what was prepared.
    pub(super) fn launch(&mut self) {
        self.dev.run(&self.op);
        self.dev.sync().expect("the op to run");
    }

    /// What became of a lane.
    pub(super) fn outcome(&mut self, lane: usize) -> Outcome {
        let op = self.op;
        let results = self.words(op.results);
        let result = LaneResult::of(&results, lane, op.lanes.max_rows);
        let (tokens, flags, proposed) = (result.tokens.to_vec(), result.flags, result.proposed);
        let (logprobs, log_sums) = (result.logprobs.to_vec(), result.log_sums.to_vec());
        let step = self.words(op.lanes.step.rows(lane, 1, 32));
        let anchor = self.words(op.ids.rows(lane * op.lanes.max_rows, 1, 4))[0];
        let step = bytemuck::cast_slice::<u32, LaneStep>(&step)[0];
        Outcome { tokens, logprobs, log_sums, proposed, flags, step, anchor }
    }

    /// One round of a rig of one lane.
    pub(super) fn round(&mut self, round: &Round) -> Outcome {
        self.prepare(0, round);
        self.launch();
        self.outcome(0)
    }
}

/// A model for tests: logits that depend on the last two tokens, by a fixed hash.
pub(super) fn logits_after(valid: usize, spread: f32, before: u32, last: u32) -> Vec<f32> {
    (0..valid as u32)
        .map(|t| {
            let words = crate::random::philox([t, before, last, 99], [5, 6]);
            (words[0] >> 8) as f32 / (1 << 24) as f32 * spread
        })
        .collect()
}
