//! How fast this machine reads memory: the denominator of every floor.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::simd::{Kernel, LANES, Simd};
use crate::{Buf, Cpu, Mem};

const CHUNK: usize = 1 << 20;
const LIMIT: usize = 1 << 30;
const AT_LEAST: Duration = Duration::from_millis(60);

/// Bytes per second at which all threads together read `of` in order: the best of several passes
/// over up to 1 GiB.
pub(super) fn read_bandwidth(mem: &Mem, cpu: &Cpu, of: &[Buf]) -> f64 {
    let mut chunks: Vec<Buf> = Vec::new();
    let mut bytes = 0;
    for buf in of {
        for start in (0..buf.bytes / 64 * 64).step_by(CHUNK) {
            if bytes < LIMIT {
                chunks.push(buf.slice(start, (buf.bytes / 64 * 64 - start).min(CHUNK)));
                bytes += chunks[chunks.len() - 1].bytes;
            }
        }
    }
    if chunks.is_empty() {
        return 0.0;
    }
    let sink = AtomicU32::new(0);
    let per_job = chunks.len().div_ceil(cpu.pool.threads() * 4);
    let pass = || {
        let start = Instant::now();
        cpu.pool.ranges(chunks.len(), per_job, &|first, last| {
            for chunk in &chunks[first..last] {
                let max = cpu.isa.dispatch(ReadAll(mem.get(*chunk)));
                sink.fetch_xor(max.to_bits(), Ordering::Relaxed);
            }
        });
        start.elapsed().as_secs_f64()
    };
    let (start, mut best) = (Instant::now(), pass());
    while start.elapsed() < AT_LEAST {
        best = pass().min(best);
    }
    bytes as f64 / best
}

/// Reads everything. The maximum is only there so that the loads can't be dropped; unlike a sum
/// it does not slow down on denormals.
struct ReadAll<'a>(&'a [f32]);

impl Kernel for ReadAll<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut max = [s.splat(0.0); 8];
        for block in self.0.chunks_exact(8 * LANES) {
            for (i, m) in max.iter_mut().enumerate() {
                *m = s.max(*m, s.load(&block[i * LANES..]));
            }
        }
        max.into_iter().fold(0.0, |a, m| a.max(s.reduce_max(m)))
    }
}
