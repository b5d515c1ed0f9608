//! top_k, propose and accept on a card: every outcome against the CPU's bits, and times of a round's
//! end, for lanes of 8 rows.
//!
//! `cargo run --release -p cuda --example round_end_bench [LANES [VOCABULARY [PART OF A NAME]]]`;
//! `TH_NVRTC` names the folder of the run-time compiler.

#![expect(clippy::disallowed_methods, reason = "an example picks its compiler by the environment")]

use std::path::PathBuf;
use std::time::Instant;

use cuda::{Cuda, Options};
use ops::simd::Isa;
use ops::{
    Accept, Buf, Device, Host, LaneStep, Lanes, LogitBias, LogitRows, Proposals, Propose, Rule,
    SamplerParams, Selector, TopK, random,
};

const ROWS: usize = 8;
const K: usize = 16;
const RANK: usize = 256;
const BIASES: usize = 4;
/// Ops in one recording, so that what a submission costs is shared.
const REPEATS: usize = 100;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, or| args.get(i).map_or(or, |arg| arg.parse().expect("a number"));
    let (lanes, valid) = (number(0, 1), number(1, 248_320));
    let only = args.get(2).map_or("", String::as_str);
    let options = Options {
        nvrtc: std::env::var_os("TH_NVRTC").map(PathBuf::from).into_iter().collect(),
        ..Options::default()
    };
    let mut cuda = match Cuda::open(&options) {
        Ok(cuda) => cuda,
        Err(why) => return println!("skipped: {why}"),
    };
    println!("{}: {lanes} lanes of {ROWS} rows, vocabulary {valid}", cuda.info().name);
    let mut host = Host::new(Isa::detect(), 16);
    let ours = Round::new(&mut cuda, lanes, valid);
    let theirs = Round::new(&mut host, lanes, valid);
    ours.inputs(&mut cuda);
    theirs.inputs(&mut host);
    let mut key = 0;
    for (name, params, masked) in settings().into_iter().filter(|s| s.0.contains(only)) {
        let accept =
            |round: &Round| Accept { masks: Some(round.masks).filter(|_| masked), ..round.accept };
        // The same three rounds on both.
        let mut accepted = 0;
        ours.start(&mut cuda, &params);
        theirs.start(&mut host, &params);
        for turn in 0..3 {
            for (round, dev) in [(&ours, &mut cuda as &mut dyn Device), (&theirs, &mut host)] {
                dev.run(&round.top_k);
                dev.run(&round.propose);
                dev.run(&accept(round));
                dev.sync().expect("every op to run");
            }
            for ((what, a), (_, b)) in ours.outcomes().into_iter().zip(theirs.outcomes()) {
                let (a, b) = (words(&mut cuda, a), words(&mut host, b));
                let at = a.iter().zip(&b).position(|(a, b)| a != b);
                assert!(at.is_none(), "{name}, round {turn}: `{what}` differs at word {at:?}");
                if what == "results" {
                    accepted += a.chunks(a.len() / lanes).map(|lane| lane[0]).sum::<u32>();
                }
            }
        }
        let mut time = |body: &dyn Fn(&mut dyn Device)| {
            key += 1;
            let replay = |dev: &mut Cuda| {
                let start = Instant::now();
                dev.replay(key, &mut |dev| (0..REPEATS).for_each(|_| body(dev)));
                dev.sync().expect("every op to run");
                start.elapsed().as_secs_f64() * 1e6 / REPEATS as f64
            };
            let mut times: Vec<f64> = (0..9).map(|_| replay(&mut cuda)).collect();
            times[1..].sort_by(f64::total_cmp);
            times[4]
        };
        let judge = accept(&ours);
        let whole = time(&|dev| dev.run(&judge));
        let kept = f64::from(accepted) / (3 * lanes) as f64;
        print!("{name:<44} accept {whole:>7.2} µs, {kept:.1} tokens");
        if name.ends_with("top_k 20") {
            let search = time(&|dev| dev.run(&ours.top_k));
            let choose = time(&|dev| dev.run(&ours.propose));
            print!("; top_k {search:.2} µs, propose {choose:.2} µs");
        }
        println!();
    }
}

fn settings() -> Vec<(String, SamplerParams, bool)> {
    let p = SamplerParams::top_p_of;
    let plain = SamplerParams { seed: [7, 9], ..SamplerParams::default() };
    let mut all = Vec::new();
    for rule in [Rule::Greedy, Rule::Token, Rule::Block, Rule::Invariant] {
        let plain = SamplerParams { rule: rule as u32, ..plain };
        let penalised = SamplerParams { presence: 0.5, frequency: 0.1, repetition: 1.05, ..plain };
        let log = SamplerParams { flags: SamplerParams::LOGPROBS, ..plain };
        let min_p = SamplerParams { min_logit: SamplerParams::min_logit_of(0.05, 1.0), ..plain };
        for (name, params) in [
            ("top_k 20", SamplerParams { top_k: 20, ..plain }),
            ("top_k 20, penalties", SamplerParams { top_k: 20, ..penalised }),
            ("top_k 20, penalties, biases", SamplerParams { top_k: 20, biases: 4, ..penalised }),
            ("top_k 20, log-probabilities", SamplerParams { top_k: 20, ..log }),
            ("top_k 20 top_p .95", SamplerParams { top_k: 20, top_p: p(0.95), ..plain }),
            ("top_k 2000", SamplerParams { top_k: 2000, ..plain }),
            ("top_k 2000 top_p .999", SamplerParams { top_k: 2000, top_p: p(0.999), ..plain }),
            ("top_p .95", SamplerParams { top_p: p(0.95), ..plain }),
            ("top_p .95, T = 2", SamplerParams { top_p: p(0.95), inv_temperature: 0.5, ..plain }),
            ("top_p .8, T = 20", SamplerParams { top_p: p(0.8), inv_temperature: 0.05, ..plain }),
            ("min_p .05", min_p),
            ("no cuts", plain),
            ("no cuts, T = 3", SamplerParams { inv_temperature: 0.33, ..plain }),
        ] {
            if rule != Rule::Greedy || !name.contains("_p") && !name.contains("cuts") {
                all.push((format!("{}, {name}", rule.name()), params, false));
            }
        }
        let masked = SamplerParams { flags: SamplerParams::MASKED, top_k: 20, ..penalised };
        all.push((format!("{}, top_k 20, penalties, mask", rule.name()), masked, true));
    }
    all
}

fn uniform(i: u32, salt: u32) -> f32 {
    random::philox([i, salt, 0, 0], [1, 2])[0] as f32 / 4_294_967_296.0
}

/// Logits shaped like a language model's: a Zipf law over shuffled ids, with noise of which some is
/// the drafter's own.
fn logits(valid: usize, row: u32, own: f32) -> Vec<f32> {
    (0..valid as u32)
        .map(|t| {
            let rank = uniform(t, 1000 + row) * valid as f32;
            let noise = uniform(t, row) * 2.0 - 1.0 + own * uniform(t, 5000 + row);
            14.0 - 1.6 * (1.0 + rank).ln() + noise
        })
        .collect()
}

fn words(dev: &mut dyn Device, buf: Buf) -> Vec<u32> {
    let mut words = vec![0u32; buf.bytes / 4];
    dev.read(buf, bytemuck::cast_slice_mut(&mut words));
    words
}

/// The end of a round and its buffers on one device.
struct Round {
    top_k: TopK,
    propose: Propose,
    accept: Accept,
    masks: Buf,
}

impl Round {
    fn new(dev: &mut dyn Device, lanes: usize, valid: usize) -> Round {
        let mut alloc = |bytes: usize| dev.alloc(bytes, "bench").expect("memory");
        let rows = lanes * ROWS;
        let top_k = TopK {
            logits: alloc(4 * rows * valid),
            ids: alloc(4 * rows * K),
            values: alloc(4 * rows * K),
            scratch: alloc(TopK::scratch_bytes(rows, valid, K)),
            rows,
            stride: valid,
            valid,
            k: K,
        };
        let step = alloc(lanes * size_of::<LaneStep>());
        let lanes = Lanes { step, count: lanes, rows, max_rows: ROWS };
        let selector = Selector {
            predecessor: alloc(2 * valid * RANK),
            successor: alloc(2 * valid * RANK),
            query: alloc(4 * rows * RANK),
            vocab: valid,
            rank: RANK,
        };
        let proposals = Proposals { buf: alloc(Proposals::bytes(lanes.count, ROWS, K)), k: K };
        let propose = Propose {
            candidates: top_k.ids,
            values: top_k.values,
            selector: Some(selector),
            params: alloc(lanes.count * size_of::<SamplerParams>()),
            ids: alloc(4 * rows),
            proposals,
            lanes,
            draft_stride: ROWS,
            draft_first: 0,
        };
        let accept = Accept {
            logits: alloc(4 * rows * valid),
            logit_rows: LogitRows::All,
            ids: propose.ids,
            draft_ids: None,
            proposals: Some(proposals),
            params: propose.params,
            counts: alloc(4 * lanes.count * valid),
            biases: alloc(lanes.count * BIASES * size_of::<LogitBias>()),
            bias_capacity: BIASES,
            masks: None,
            results: alloc(Accept::results_bytes(lanes.count, ROWS)),
            scratch: alloc(Accept::scratch_bytes(rows, valid)),
            lanes,
            stride: valid,
            valid,
        };
        Round { top_k, propose, accept, masks: alloc(4 * rows * valid.div_ceil(32)) }
    }

    /// What stays the same.
    fn inputs(&self, dev: &mut dyn Device) {
        let valid = self.accept.valid;
        for row in 0..self.top_k.rows {
            for (buf, own) in [(self.top_k.logits, 1.0), (self.accept.logits, 0.0)] {
                let values = logits(valid, row as u32, own);
                dev.write(buf.rows(row, 1, 4 * valid), bytemuck::cast_slice(&values));
            }
        }
        let selector = self.propose.selector.expect("it has one");
        for (salt, buf) in [(1, selector.predecessor), (2, selector.successor)] {
            let value = |i| (((uniform(i, salt) - 0.5) * 0.2).to_bits() >> 16) as u16;
            let some: Vec<u16> = (0..100_003).map(value).collect();
            let codes: Vec<u16> = some.iter().copied().cycle().take(buf.bytes / 2).collect();
            dev.write(buf, bytemuck::cast_slice(&codes));
        }
        let query: Vec<f32> =
            (0..selector.query.bytes as u32 / 4).map(|i| uniform(i, 3) - 0.5).collect();
        dev.write(selector.query, bytemuck::cast_slice(&query));
        let masks: Vec<u32> = (0..self.masks.bytes as u32 / 4)
            .map(|i| if i % 3 == 0 { u32::MAX } else { random::philox([i, 0, 0, 0], [3, 3])[0] })
            .collect();
        dev.write(self.masks, bytemuck::cast_slice(&masks));
    }

    /// What a text starts with.
    fn start(&self, dev: &mut dyn Device, params: &SamplerParams) {
        let Accept { lanes, valid, .. } = self.accept;
        for lane in 0..lanes.count {
            let step = LaneStep {
                row0: (lane * ROWS) as u32,
                rows: ROWS as u32,
                pos: 100 + lane as u32,
                slot: (lanes.count - 1 - lane) as u32,
                ..LaneStep::default()
            };
            dev.write(lanes.step.rows(lane, 1, 32), bytemuck::bytes_of(&step));
            let seed = [params.seed[0], lane as u32];
            let params = SamplerParams { seed, ..*params };
            let bytes = bytemuck::bytes_of(&params);
            dev.write(self.accept.params.rows(lane, 1, bytes.len()), bytes);
            let biases = [3, 11, 500, 7].map(|token| LogitBias { token, bias: 1.5 });
            let row = self.accept.biases.rows(lane, 1, size_of_val(&biases));
            dev.write(row, bytemuck::cast_slice(&biases));
        }
        let counts: Vec<u32> = (0..(lanes.count * valid) as u32)
            .map(|i| if i % 40 == 0 { i / 40 % 3 } else { 0 })
            .collect();
        dev.write(self.accept.counts, bytemuck::cast_slice(&counts));
        dev.write(self.accept.ids, &vec![0; 4 * lanes.rows]);
    }

    fn outcomes(&self) -> [(&'static str, Buf); 7] {
        [
            ("candidates", self.top_k.ids),
            ("values", self.top_k.values),
            ("ids", self.accept.ids),
            ("proposals", self.propose.proposals.buf),
            ("results", self.accept.results),
            ("step", self.accept.lanes.step),
            ("counts", self.accept.counts),
        ]
    }
}
