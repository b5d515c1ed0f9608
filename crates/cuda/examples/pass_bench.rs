//! Times of whole passes of a target of the 27B shape, next to the time that their bytes or products need: rounds
//! of one and of several lanes, at several contexts, and prefills. Weights are random bytes, which are made faster than
//! random weights; rounds are recorded sequences, without a draft.
//!
//! `pass_bench [round|prefill|…]`: the lines whose name contains one of the words.

mod common;

use std::time::Instant;

use common::{BANDWIDTH, BLOCK, Bench, noise};
use model::{
    AttentionShape, AttentionWeights, GdnWeights, Layer, Logical, Mixer, Mlp, PageShape, Scratch,
    ScratchShape, State, StateShape, Target, TargetSource, forward, page_table, synth,
};
use ops::{ActDtype, Codes, Device, Format, Lanes, PAGE_TOKENS, Pass, Rope, ScaleDtype, Weight};

/// Lanes, tokens that one of them may have, and pages of them all.
const LANES: usize = 16;
const CONTEXT: usize = 129 << 10;
const PAGES: usize = 256 << 10 >> 6;
/// Rows of a prefill pass.
const CHUNK: usize = 2048;
/// Multiply-adds of matrices in bf16, twice a second: what an H200 was measured to reach.
const MATRIX_RATE: f64 = 790e12;
/// Bytes of 16 outputs of 64 inputs: scales and biases, then codes.
const CELL: usize = 576;

/// Weights on the card.
struct Made<'b> {
    bench: &'b mut Bench,
    spec: model::spec::Spec,
    cells: Vec<u8>,
    /// Bytes and elements that a pass reads.
    bytes: usize,
    elements: usize,
}

impl Made<'_> {
    fn weight(&mut self, of: Logical) -> Weight {
        let [n, k] = self.spec.matrix_shape(of).expect("a matrix");
        let format = Format::Affine { codes: Codes::U4, group: 64, scale: ScaleDtype::Bf16 };
        let buf = self.bench.alloc(format.packed_bytes(n, k).expect("whole groups"));
        let cells = &self.cells;
        self.bench.dev.upload(buf, 1800 * CELL, &|_, offset, part| {
            let from = offset / CELL * 7 % 1024 * CELL;
            part.copy_from_slice(&cells[from..][..part.len()]);
        });
        if of != Logical::Embed {
            (self.bytes, self.elements) = (self.bytes + buf.bytes, self.elements + n * k);
        }
        Weight { buf, format, n, k }
    }

    fn vector(&mut self, of: Logical) -> ops::Buf {
        let values = synth::vector(of, self.spec.vector_len(of).expect("a vector"), 0);
        self.bench.pod(&values)
    }

    fn layer(&mut self, i: usize, (attention, gdn): (usize, usize)) -> Layer {
        use Logical as L;
        let mixer = if (i + 1).is_multiple_of(4) {
            let w = AttentionWeights {
                q: self.weight(L::Q(i)),
                k: self.weight(L::K(i)),
                v: self.weight(L::V(i)),
                o: self.weight(L::O(i)),
                q_norm: Some(self.vector(L::QNorm(i))),
                k_norm: Some(self.vector(L::KNorm(i))),
            };
            Mixer::Attention(attention, w)
        } else {
            let w = GdnWeights {
                qkv: self.weight(L::GdnQkv(i)),
                z: self.weight(L::GdnZ(i)),
                b: self.weight(L::GdnB(i)),
                a: self.weight(L::GdnA(i)),
                out: self.weight(L::GdnOut(i)),
                conv: self.vector(L::GdnConv(i)),
                decay: self.vector(L::GdnDecay(i)),
                dt_bias: self.vector(L::GdnDtBias(i)),
                norm: self.vector(L::GdnNorm(i)),
            };
            Mixer::GatedDelta(gdn, w)
        };
        Layer {
            input_norm: self.vector(L::InputNorm(i)),
            mixer,
            post_norm: self.vector(L::PostNorm(i)),
            mlp: Mlp {
                gate: self.weight(L::Gate(i)),
                up: self.weight(L::Up(i)),
                down: self.weight(L::Down(i)),
            },
        }
    }
}

/// Cells whose scales are near 0.004 and whose codes are anything.
fn cells() -> Vec<u8> {
    let mut bytes = vec![0u8; 4096 * CELL];
    for (c, cell) in bytes.chunks_exact_mut(CELL).enumerate() {
        let (header, codes) = cell.split_at_mut(64);
        for (i, place) in header.chunks_exact_mut(2).enumerate() {
            let scale = 0.004 * (1.0 + 0.3 * noise(c * 32 + i));
            let value = if i % 2 == 0 { scale } else { -7.5 * 0.004 };
            place.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes());
        }
        for (i, code) in codes.iter_mut().enumerate() {
            *code = (noise(c * 777 + i) * 127.9) as i8 as u8;
        }
    }
    bytes
}

impl Made<'_> {
    fn target(&mut self) -> Target {
        let spec = self.spec.clone();
        let layers = spec.layer_types.len();
        let layers = (0..layers).map(|i| self.layer(i, (i / 4, i - i / 4))).collect();
        let (embed, lm_head) = (self.weight(Logical::Embed), self.weight(Logical::LmHead));
        let a = &spec.attention;
        let inv_freq = self.bench.pod(&a.rope.inv_freq());
        let rope = Rope { inv_freq, dims: a.rope.dims, pairing: a.rope.pairing };
        Target {
            embed,
            lm_head,
            final_norm: self.vector(Logical::FinalNorm),
            layers,
            attention: AttentionShape {
                heads: a.num_heads,
                kv_heads: a.num_kv_heads,
                head_dim: a.head_dim,
                gated: a.gated,
                rope,
            },
            gdn: spec.gdn,
            eps: spec.rms_norm_eps,
            vocab: spec.vocab_size,
            intermediate: spec.intermediate_size,
        }
    }
}

/// A model and where its passes leave what they leave.
struct Passes<'b> {
    bench: &'b mut Bench,
    target: Target,
    state: State,
    scratch: Scratch,
    bytes: usize,
    elements: usize,
}

impl Passes<'_> {
    /// Milliseconds of one call, median of `repeats`, and their range.
    fn time(&mut self, repeats: usize, run: &mut dyn FnMut(&mut Self)) -> [f64; 3] {
        run(self);
        self.bench.dev.sync().expect("a pass");
        let mut times: Vec<f64> = (0..repeats)
            .map(|_| {
                let start = Instant::now();
                run(self);
                self.bench.dev.sync().expect("a pass");
                start.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        [times[repeats / 2], times[0], times[repeats - 1]]
    }

    fn round(&mut self, (count, rows): (usize, usize), pos: usize) {
        let name = format!("round of {count} x {rows} at {pos}");
        if !self.bench.wanted(&name) {
            return;
        }
        let lanes = self.bench.lanes(count, rows, pos, rows.min(4));
        self.bench.key += 1;
        let key = self.bench.key;
        const TIMES: usize = 10;
        let [median, least, most] = self
            .time(9, &mut |p| {
                for _ in 0..TIMES {
                    p.bench.dev.replay(key, &mut |dev| {
                        let (m, s) = (&p.target, &p.scratch);
                        forward(dev, m, &p.state, s, lanes, Pass::Round, 0..lanes.rows);
                    });
                }
            })
            .map(|all| all / TIMES as f64);
        let (heads, dim) = (self.target.attention.kv_heads, self.target.attention.head_dim);
        let cells = self.target.layer_counts();
        let kv = cells.0 * 4 * heads * dim * count * pos;
        let gdn = self.target.gdn.expect("a hybrid");
        let states = cells.1 * 2 * 4 * gdn.value_heads * gdn.key_dim * gdn.value_dim * count;
        let floor = (self.bytes + kv + states) as f64 / BANDWIDTH * 1e3;
        let times = median / floor;
        println!(
            "{name:28} {median:8.3} ms  ({least:.3} .. {most:.3})  {times:.2} x {floor:.3} ms"
        );
    }

    fn prefill(&mut self, tokens: usize) {
        let name = format!("prefill of {tokens}");
        if !self.bench.wanted(&name) {
            return;
        }
        let passes: Vec<Lanes> =
            (0..tokens / CHUNK).map(|i| self.bench.lanes(1, CHUNK, i * CHUNK, 0)).collect();
        let [median, least, most] = self.time(3, &mut |p| {
            for lanes in &passes {
                let (m, s, rows) = (&p.target, &p.scratch, lanes.rows);
                let last = rows - 1..rows;
                forward(&mut p.bench.dev, m, &p.state, s, *lanes, Pass::Prompt, last);
            }
        });
        let head = self.target.lm_head.n * self.target.lm_head.k;
        let a = self.target.attention;
        // Scores and sums of values, half of all pairs.
        let pairs = self.target.layer_counts().0 * 2 * a.heads * a.head_dim * tokens * tokens / 2;
        let flops = 2.0 * ((self.elements - head) * tokens + pairs) as f64;
        let rate = flops / (median * 1e-3);
        let (tera, share) = (rate / 1e12, 100.0 * rate / MATRIX_RATE);
        println!(
            "{name:28} {median:8.1} ms  ({least:.1} .. {most:.1})  {tera:.0} TFLOP/s, {share:.0} %"
        );
    }
}

fn main() {
    let Some(mut bench) = Bench::open() else { return };
    let start = Instant::now();
    let source = TargetSource::open("synth:qwen3.8-27b".as_ref()).expect("a shape with a name");
    let spec = source.spec().clone();
    let mut made = Made { bench: &mut bench, spec, cells: cells(), bytes: 0, elements: 0 };
    let target = made.target();
    let (bytes, elements) = (made.bytes, made.elements);
    println!("{:.2} GB a pass, made in {:.1} s", bytes as f64 / 1e9, start.elapsed().as_secs_f64());
    let dev = &mut bench.dev;
    let pages = PageShape { pages: PAGES, ..PageShape::full(LANES, CONTEXT / PAGE_TOKENS) };
    let table = page_table(dev, &pages).expect("memory");
    // All lanes read the same pages; those of one lane are its own.
    let row: Vec<u32> = (0..pages.max_pages).map(|i| (i * 7919 % PAGES) as u32).collect();
    dev.write(table, bytemuck::cast_slice(&row.repeat(LANES)));
    let state = State::new(dev, &StateShape::of(&target, BLOCK, pages, 0), table).expect("memory");
    let shape = ScratchShape::of(&target, (CHUNK, LANES * BLOCK), Vec::new(), ActDtype::Bf16);
    let scratch = Scratch::new(dev, &shape).expect("memory");
    let ids: Vec<u32> = (0..CHUNK as u32).map(|i| 1000 + 77 * i).collect();
    dev.write(scratch.ids, bytemuck::cast_slice(&ids));
    let mut passes = Passes { bench: &mut bench, target, state, scratch, bytes, elements };
    for pos in [0, 8 << 10, 32 << 10, 128 << 10] {
        passes.round((1, 1), pos);
        passes.round((1, 8), pos);
    }
    for lanes in [(2, 8), (4, 8), (8, 8), (16, 8)] {
        passes.round(lanes, 0);
    }
    for tokens in [2 << 10, 8 << 10, 32 << 10] {
        passes.prefill(tokens);
    }
}
