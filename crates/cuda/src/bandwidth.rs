//! How fast the card reads memory: the denominator of every floor.

use ops::kernel::{Arg, Launch, Source};
use ops::{Buf, DeviceError};

use crate::Cuda;
use crate::gpu::{Event, explain};

const CHUNK: usize = 1 << 20;
/// Several times any cache.
const LIMIT: usize = 16 << 30;
const PASSES: usize = 5;

const READ: Source = Source { name: "../../cuda/src/read.cu", text: include_str!("read.cu") };

/// Bytes per second of one long read of `of`: the best of a few passes.
pub(crate) fn read_bandwidth(cuda: &mut Cuda, of: &[Buf]) -> Result<f64, DeviceError> {
    let mut chunks: Vec<[u64; 2]> = Vec::new();
    let mut bytes = 0;
    for buf in of {
        let address = cuda.memory.address(*buf);
        let usable = buf.bytes / 16 * 16;
        for start in (0..usable).step_by(CHUNK) {
            if bytes < LIMIT && address.is_multiple_of(16) {
                let len = (usable - start).min(CHUNK);
                chunks.push([address + start as u64, len as u64]);
                bytes += len;
            }
        }
    }
    if chunks.is_empty() {
        return Ok(0.0);
    }
    let table = cuda.scratch(size_of::<[u64; 2]>() * chunks.len() + 4, "bandwidth")?;
    let list: Vec<u8> = chunks.iter().flatten().flat_map(|v| v.to_le_bytes()).collect();
    cuda.write_bytes(table, &list)?;
    let sink = table.slice(list.len(), 4);
    let args = [Arg::Buf(table), Arg::U32(chunks.len() as u32), Arg::Buf(sink)];
    let launch = Launch::new(READ, "read_all", &[], [4 * cuda.card().sms, 1, 1], 512, &args);
    let failed = |why| DeviceError::Op { op: "read bandwidth", why };
    let (start, end) = (Event::timed().map_err(explain), Event::timed().map_err(explain));
    let (start, end) = (start.map_err(failed)?, end.map_err(failed)?);
    let mut best = f64::INFINITY;
    for _ in 0..PASSES {
        let outcome = (|| {
            start.record(&cuda.stream).map_err(explain)?;
            cuda.launch(&launch)?;
            end.record(&cuda.stream).map_err(explain)?;
            end.synchronize().map_err(explain)?;
            end.seconds_since(&start).map_err(explain)
        })();
        best = outcome.map_err(failed)?.min(best);
    }
    Ok(bytes as f64 / best)
}
