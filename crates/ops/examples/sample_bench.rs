//! Time of top_k, propose and accept on this machine, for one lane of 8 rows.
//!
//! `cargo run --release -p ops --example sample_bench [THREADS [PART OF A NAME]]`

use std::time::Instant;

use ops::simd::Isa;
use ops::{
    Accept, Device, Host, LaneStep, Lanes, LogitBias, LogitRows, Op, Proposals, Propose, Rule,
    SamplerParams, Selector, TopK, random,
};

const ROWS: usize = 8;
const K: usize = 16;

fn main() {
    let only: Option<usize> = std::env::args().nth(1).and_then(|threads| threads.parse().ok());
    for valid in [49_152, 248_320] {
        for threads in [1, 2].into_iter().filter(|&threads| only.is_none_or(|n| n == threads)) {
            println!(
                "\nvocabulary {valid}, {ROWS} rows, {threads} thread(s), {}",
                Isa::detect().name()
            );
            bench(valid, threads);
        }
    }
}

/// The fastest twentieth of the times of one run, in microseconds: others may use the machine.
fn fastest(mut run: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..200)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 20]
}

fn uniform(i: u32, salt: u32) -> f32 {
    random::philox([i, salt, 0, 0], [1, 2])[0] as f32 / 4_294_967_296.0
}

/// Logits shaped like a language model's: a Zipf law over shuffled ids, with noise.
fn logits(valid: usize, row: u32) -> Vec<f32> {
    let noise = |t: u32| uniform(t, row) * 2.0 - 1.0;
    (0..valid as u32)
        .map(|t| {
            let rank = uniform(t, 1000 + row) * valid as f32;
            14.0 - 1.6 * (1.0 + rank).ln() + noise(t)
        })
        .collect()
}

fn bench(valid: usize, threads: usize) {
    let only = std::env::args().nth(2).unwrap_or_default();
    let mut dev = Host::new(Isa::detect(), threads);
    let mut alloc = |bytes: usize| dev.alloc(bytes, "bench").expect("memory");
    let rank = 256;
    let top_k = TopK {
        logits: alloc(4 * ROWS * valid),
        ids: alloc(4 * ROWS * K),
        values: alloc(4 * ROWS * K),
        scratch: alloc(TopK::scratch_bytes(ROWS, valid, K)),
        rows: ROWS,
        stride: valid,
        valid,
        k: K,
    };
    let lanes = Lanes { step: alloc(32), count: 1, rows: ROWS, max_rows: ROWS };
    let selector = Selector {
        predecessor: alloc(2 * valid * rank),
        successor: alloc(2 * valid * rank),
        query: alloc(4 * ROWS * rank),
        vocab: valid,
        rank,
    };
    let proposals = Proposals { buf: alloc(Proposals::bytes(1, ROWS, K)), k: K };
    let propose = Propose {
        candidates: top_k.ids,
        values: top_k.values,
        selector: Some(selector),
        params: alloc(size_of::<SamplerParams>()),
        ids: alloc(4 * ROWS),
        proposals,
        lanes,
        draft_stride: ROWS,
        draft_first: 1,
    };
    let accept = Accept {
        logits: top_k.logits,
        logit_rows: LogitRows::All,
        ids: propose.ids,
        draft_ids: None,
        proposals: Some(proposals),
        params: propose.params,
        counts: alloc(4 * valid),
        biases: alloc(size_of::<LogitBias>()),
        bias_capacity: 1,
        masks: None,
        results: alloc(Accept::results_bytes(1, ROWS)),
        scratch: alloc(Accept::scratch_bytes(ROWS, valid)),
        lanes,
        stride: valid,
        valid,
    };
    for row in 0..ROWS {
        let buf = top_k.logits.rows(row, 1, 4 * valid);
        dev.write(buf, bytemuck::cast_slice(&logits(valid, row as u32)));
    }
    let step = LaneStep { rows: ROWS as u32, pos: 100, ..LaneStep::default() };
    dev.write(lanes.step, bytemuck::bytes_of(&step));

    let bytes = top_k.cost().other_bytes as f64;
    let time = fastest(|| dev.run(&top_k));
    println!("{:<44}{:>9.1} µs{:>8.1} GB/s", format!("top_k {K}"), time, bytes / time / 1e3);
    let mut params = SamplerParams { rule: Rule::Block as u32, ..SamplerParams::default() };
    dev.write(propose.params, bytemuck::bytes_of(&params));
    println!("{:<44}{:>9.1} µs", "propose, selector of rank 256", fastest(|| dev.run(&propose)));

    let p = SamplerParams::top_p_of;
    let cuts = [
        ("top_k 20 top_p .95", 20, p(0.95)),
        ("top_k 40", 40, p(1.0)),
        ("top_k 200 top_p .95", 200, p(0.95)),
        ("top_p .95", 0, p(0.95)),
        ("no cuts", 0, p(1.0)),
    ];
    for rule in [Rule::Greedy, Rule::Block, Rule::Invariant] {
        for (name, top_k, top_p) in cuts {
            if rule == Rule::Greedy && top_k != 20 {
                continue;
            }
            for (extra, presence, flags) in
                [("", 0.0, 0), (", penalties", 1.5, 0), (", log-probabilities", 0.0, 1)]
            {
                if !extra.is_empty() && top_k != 20 {
                    continue;
                }
                params = SamplerParams {
                    rule: rule as u32,
                    top_k,
                    top_p,
                    presence,
                    flags,
                    ..SamplerParams::default()
                };
                dev.write(propose.params, bytemuck::bytes_of(&params));
                let label = format!("accept {}, {name}{extra}", rule.name());
                if !label.contains(&only) {
                    continue;
                }
                let time = fastest(|| {
                    dev.write(lanes.step, bytemuck::bytes_of(&step));
                    dev.run(&accept);
                });
                println!("{label:<44}{time:>9.1} µs{:>8.1} µs/row", time / ROWS as f64);
            }
        }
    }
    dev.sync().expect("every op to run");
}
