//! What the benches of the 27B shape share: its sizes, a card, and made-up buffers on it.

#![allow(dead_code, unreachable_pub, reason = "each bench uses a part")]
#![expect(clippy::disallowed_methods, reason = "a bench picks its compiler by the environment")]

use std::path::PathBuf;

use cuda::{Cuda, Options};
use ops::{Buf, Device, GdnGeometry, HeadMap, LaneStep, Lanes};

pub const HEADS: usize = 24;
pub const KV_HEADS: usize = 4;
pub const DIM: usize = 256;
pub const GDN: GdnGeometry = GdnGeometry {
    key_heads: 16,
    value_heads: 48,
    key_dim: 128,
    value_dim: 128,
    head_map: HeadMap::Grouped,
};
pub const BLOCK: usize = 8;
/// Bytes per second that an H200 was measured to reach.
pub const BANDWIDTH: f64 = 4.65e12;

pub struct Bench {
    pub dev: Cuda,
    pub words: Vec<String>,
    pub key: u64,
}

impl Bench {
    /// On the first card, for the lines that the command line asks for; without a card says so.
    pub fn open() -> Option<Bench> {
        let options = Options {
            nvrtc: std::env::var_os("TH_NVRTC").map(PathBuf::from).into_iter().collect(),
            cache: std::env::var_os("TH_CUBINS").map(PathBuf::from),
            ..Options::default()
        };
        let dev = Cuda::open(&options).map_err(|why| println!("skipped: {why}")).ok()?;
        println!("{}", dev.info().name);
        Some(Bench { dev, words: std::env::args().skip(1).collect(), key: 0 })
    }

    pub fn wanted(&self, name: &str) -> bool {
        self.words.is_empty() || self.words.iter().any(|w| name.contains(w.as_str()))
    }

    pub fn alloc(&mut self, bytes: usize) -> Buf {
        self.dev.alloc(bytes, "bench").expect("memory")
    }

    /// f32 in −1..1 times `scale`.
    pub fn floats(&mut self, count: usize, scale: f32) -> Buf {
        let buf = self.alloc(4 * count);
        self.dev.upload(buf, 1 << 20, &|_, offset, part| {
            for (i, x) in part.chunks_exact_mut(4).enumerate() {
                x.copy_from_slice(&(scale * noise(offset / 4 + i)).to_le_bytes());
            }
        });
        buf
    }

    /// bf16 in −1..1.
    pub fn halves(&mut self, count: usize) -> Buf {
        let buf = self.alloc(2 * count);
        self.dev.upload(buf, 1 << 20, &|_, offset, part| {
            for (i, x) in part.chunks_exact_mut(2).enumerate() {
                x.copy_from_slice(&noise(offset / 2 + i).to_le_bytes()[2..]);
            }
        });
        buf
    }

    pub fn pod<T: bytemuck::Pod>(&mut self, values: &[T]) -> Buf {
        let buf = self.alloc(size_of_val(values));
        self.dev.write(buf, bytemuck::cast_slice(values));
        buf
    }

    pub fn lanes(&mut self, count: usize, rows: usize, pos: usize, pending: usize) -> Lanes {
        let steps: Vec<LaneStep> = (0..count)
            .map(|l| LaneStep {
                row0: (l * rows) as u32,
                rows: rows as u32,
                pos: pos as u32,
                slot: l as u32,
                pending: pending as u32,
                ..LaneStep::default()
            })
            .collect();
        Lanes { step: self.pod(&steps), count, rows: count * rows, max_rows: rows }
    }
}

/// A pseudo-random number in −1..1.
pub fn noise(i: usize) -> f32 {
    let mut z = (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (z >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}
