//! What the tests on a card share.

#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]
#![expect(clippy::disallowed_methods, reason = "a test picks its compiler by the environment")]

use std::path::PathBuf;

use cuda::{Cuda, Options};
use ops::{Device, ScaleDtype, Weight, linear};

/// The first card, with the compiler and the cache that `TH_NVRTC` and `TH_CUBINS` name; without one says so.
pub fn card() -> Option<Cuda> {
    let folder = |name| std::env::var_os(name).map(PathBuf::from);
    let options = Options {
        nvrtc: folder("TH_NVRTC").into_iter().collect(),
        cache: folder("TH_CUBINS"),
        ..Options::default()
    };
    Cuda::open(&options).map_err(|why| println!("skipped: {why}")).ok()
}

/// Bytes like random ones.
pub fn pattern(at: usize) -> u8 {
    (at.wrapping_mul(0x9E37_79B9) >> 13) as u8
}

/// A matrix of random codes of 4 bits, each group with this scale and bias in bf16.
pub fn matrix(dev: &mut Cuda, (n, k): (usize, usize), scale: u16, bias: u16) -> Weight {
    let codes: Vec<u8> = (0..n * k / 2).map(pattern).collect();
    let [scales, biases] = [scale, bias]
        .map(|bits| (0..n * k / 64).flat_map(|_| bits.to_le_bytes()).collect::<Vec<u8>>());
    let source = linear::Source::Mlx {
        bits: 4,
        group: 64,
        scale: ScaleDtype::Bf16,
        codes: &codes,
        scales: &scales,
        biases: &biases,
    };
    let format = source.check(n, k).expect("whole groups");
    let mut packed = vec![0; format.packed_bytes(n, k).expect("a size")];
    source.pack_piece(dev.info().tiles, (n, k), 0, &mut packed).expect("whole");
    let buf = dev.alloc(packed.len(), "matrix").expect("memory");
    dev.write(buf, &packed);
    Weight { buf, format, n, k }
}
