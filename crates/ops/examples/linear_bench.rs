//! Speed of `linear` on the shapes of the bundled model and of a 27B model.
//!
//! `cargo run --release -p ops --example linear_bench -- [--format NAME] [--isa NAME] [--shape N]
//! [--rows N] [--threads N] [--mib SIZE]`. Weights are distinct matrices that together exceed the caches (unless `--mib` says less), so one row
//! measures memory; the line `read` is the same buffer read by plain loads. Each figure is the
//! fastest of several passes over all matrices.

use std::time::Instant;

use ops::simd::{Isa, Kernel, Simd};
use ops::{Act, ActDtype, Codes, Device, Format, Host, Linear, LinearPart, Op, ScaleDtype, Weight};

/// Bytes of distinct weights for each shape.
const WEIGHTS: usize = 192 << 20;
const SHAPES: [(usize, usize); 9] = [
    (1536, 576),
    (3072, 576),
    (49152, 576),
    (576, 1536),
    (17408, 5120),
    (5120, 17408),
    (256, 5120),
    (64, 17408),
    (12, 576),
];
const ROWS: [usize; 7] = [1, 2, 4, 8, 16, 64, 512];

fn formats() -> Vec<(&'static str, Format)> {
    let affine = |codes, group, scale| Format::Affine { codes, group, scale };
    let symmetric = |codes, group, scale| Format::Symmetric { codes, group, scale };
    vec![
        ("mlx4", affine(Codes::U4, 64, ScaleDtype::Bf16)),
        ("mlx8", affine(Codes::U8, 64, ScaleDtype::Bf16)),
        ("q4_0", symmetric(Codes::U4, 32, ScaleDtype::F16)),
        ("q4_1", affine(Codes::U4, 32, ScaleDtype::F16)),
        ("q8_0", symmetric(Codes::U8, 32, ScaleDtype::F16)),
        ("q4_k", affine(Codes::U4, 32, ScaleDtype::TwoLevel)),
        ("q5_k", affine(Codes::U8, 32, ScaleDtype::TwoLevel)),
        ("q6_k", symmetric(Codes::U8, 16, ScaleDtype::TwoLevel)),
        ("iq4_xs", symmetric(Codes::Iq4, 32, ScaleDtype::TwoLevel)),
        ("bf16", Format::Bf16),
    ]
}

/// Reads memory with vector loads, and does nothing else.
struct ReadAll<'a>(&'a [f32]);

impl Kernel for ReadAll<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut largest = [s.splat(0.0); 8];
        for block in self.0.chunks_exact(128) {
            for (i, largest) in largest.iter_mut().enumerate() {
                *largest = s.max(*largest, s.load(&block[16 * i..]));
            }
        }
        largest.into_iter().map(|v| s.reduce_max(v)).fold(0.0, f32::max)
    }
}

/// Seconds of the fastest of `passes` calls.
fn fastest(passes: usize, mut call: impl FnMut()) -> f64 {
    let mut best = f64::MAX;
    for _ in 0..passes {
        let start = Instant::now();
        call();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// Repeats a sound pattern of scales and codes: f16 and bf16 bits below 0x3C00 and never
/// subnormal, whatever the layout makes of them.
fn fill(dev: &mut Host, weight: &Weight) {
    dev.upload(weight.buf, 1 << 20, &|offset, bytes| {
        let mut state = offset as u64 | 1;
        for word in bytes.chunks_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
            let bits = (state ^ state >> 29) & 0x3B7F_3B7F_3B7F_3B7F | 0x3000_3000_3000_3000;
            word.copy_from_slice(&bits.to_le_bytes()[..word.len()]);
        }
    });
}

fn shape(
    isa: Isa,
    threads: usize,
    format: Format,
    (n, k): (usize, usize),
    rows_list: &[usize],
    size: usize,
) {
    let mut dev = Host::new(isa, threads);
    let Some(bytes) = format.packed_bytes(n, k) else { return };
    let count = (size / bytes).max(1);
    let all = dev.alloc(count * bytes.next_multiple_of(64), "weights").expect("memory");
    let weights: Vec<Weight> = (0..count)
        .map(|i| Weight { buf: all.slice(i * bytes.next_multiple_of(64), bytes), format, n, k })
        .collect();
    weights.iter().for_each(|w| fill(&mut dev, w));
    for &rows in rows_list {
        let stride = Act::stride(k, ActDtype::I8);
        let x = Act {
            buf: dev.alloc(rows * stride, "x").expect("memory"),
            width: k,
            dtype: ActDtype::I8,
        };
        let pattern: Vec<u8> = (0..rows * stride).map(|i| [3, 0xF0, 0x3F, 0x3C][i % 4]).collect();
        dev.write(x.buf, &pattern);
        let out = dev.alloc(4 * rows * n, "out").expect("memory");
        let used = if rows <= 8 { count } else { (count * 8 / rows).clamp(1, count) };
        let ops: Vec<Linear> = weights[..used]
            .iter()
            .map(|&weight| Linear::new(x, rows, &[LinearPart { weight, out, add: false }]))
            .collect();
        for op in &ops[..1] {
            op.check().expect("a sound op");
        }
        let passes = number_of_passes(rows, used * bytes);
        let seconds = fastest(passes, || ops.iter().for_each(|op| dev.run(op)));
        dev.sync().expect("no failure");
        let each = seconds / used as f64;
        println!(
            "  {n:>6} x {k:<6} rows {rows:<4} {:>9.1} us  {:>6.1} GB/s  {:>8.1} GMAC/s",
            each * 1e6,
            bytes as f64 / each / 1e9,
            (n * k * rows) as f64 / each / 1e9,
        );
    }
}

/// Prints the speed of plain loads, from second-level cache to memory.
fn read_speed(isa: Isa) {
    let layout = std::alloc::Layout::from_size_align(WEIGHTS, 2 << 20).expect("a layout");
    // SAFETY: the layout has a size, the pages are written before they are read, and the memory
    // lives as long as the process.
    let floats = unsafe {
        let bytes = std::alloc::alloc(layout);
        assert!(!bytes.is_null(), "no memory");
        #[cfg(target_os = "linux")]
        libc::madvise(bytes.cast(), WEIGHTS, libc::MADV_HUGEPAGE);
        bytes.write_bytes(0x3C, WEIGHTS);
        std::slice::from_raw_parts(bytes.cast::<f32>(), WEIGHTS / 4)
    };
    for size in [1 << 20, 16 << 20, 64 << 20, WEIGHTS] {
        let seconds = fastest(9, || {
            std::hint::black_box(isa.dispatch(ReadAll(&floats[..size / 4])));
        });
        println!("read {:>4} MiB, 1 thread: {:.1} GB/s", size >> 20, size as f64 / seconds / 1e9);
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        arguments.iter().position(|a| a == name).and_then(|i| arguments.get(i + 1)).cloned()
    };
    let number = |name: &str| value(name).and_then(|v| v.parse::<usize>().ok());
    let isa =
        value("--isa").and_then(|name| Isa::available().into_iter().find(|i| i.name() == name));
    let isa = isa.unwrap_or_else(Isa::detect);
    let wanted = value("--format").unwrap_or_else(|| "mlx4".to_owned());
    let shapes = number("--shape").map_or(SHAPES.to_vec(), |i| vec![SHAPES[i % SHAPES.len()]]);
    let rows = number("--rows").map_or(ROWS.to_vec(), |rows| vec![rows]);
    let threads = number("--threads").map_or(vec![1, 2], |threads| vec![threads]);

    let size = number("--mib").map_or(WEIGHTS, |mib| mib << 20);
    read_speed(isa);
    for (name, format) in
        formats().into_iter().filter(|(name, _)| wanted == "all" || wanted == *name)
    {
        for &threads in &threads {
            println!("{name} {format:?}, {}, {threads} threads", isa.name());
            for &(n, k) in &shapes {
                shape(isa, threads, format, (n, k), &rows, size);
            }
        }
    }
}

/// More passes the shorter they are, since a pass that nothing disturbed is what counts.
fn number_of_passes(rows: usize, bytes: usize) -> usize {
    ((2 << 30) / (bytes * rows.max(4))).clamp(3, 400)
}
