//! Results on their way to the host, without a call to the driver: kernels write them into a ring in
//! host memory, and the host looks there.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use cudarc::driver::result::DriverError;
use ops::kernel::{Launch, Source};
use ops::{Buf, PUBLISHED, PUBLISHED_BYTES};

use crate::gpu::{Pinned, Stream, explain};

/// Bytes before a slot's copy; they begin with its number.
const HEADER: usize = 64;
const SLOT_BYTES: usize = HEADER + PUBLISHED_BYTES;
const THREADS: u32 = 128;
/// How long the host looks before it asks the driver whether the card is still at work.
const PATIENCE: Duration = Duration::from_millis(5);

const PUBLISH: Source =
    Source { name: "../../cuda/src/publish.cu", text: include_str!("publish.cu") };

/// The ring, and what was sent and received.
#[derive(Debug)]
pub(crate) struct Mailbox {
    ring: Pinned,
    /// u32 in device memory: copies made.
    pub(crate) count: Buf,
    /// Copies enqueued.
    sent: u32,
    received: u32,
}

impl Mailbox {
    /// `count` is 4 zeroed bytes of device memory.
    pub(crate) fn new(count: Buf) -> Result<Mailbox, DriverError> {
        let ring = Pinned::new(PUBLISHED * SLOT_BYTES)?;
        Ok(Mailbox { ring, count, sent: 0, received: 0 })
    }

    /// The launch that copies `words` words from `from`; its arguments go to [`Mailbox::args`].
    pub(crate) fn launch() -> Launch {
        let defines = [
            ("SLOTS", PUBLISHED as i64),
            ("SLOT_BYTES", SLOT_BYTES as i64),
            ("HEADER", HEADER as i64),
        ];
        Launch::new(PUBLISH, "publish", &defines, [1, 1, 1], THREADS, &[])
    }

    /// The launch's arguments as bits.
    pub(crate) fn args(&self, from: u64, words: usize, count: u64) -> [u64; 4] {
        // Page-locked memory has one address for the host and for the card.
        [from, words as u64, self.ring.address(), count]
    }

    /// Whether the next copy to be received is the last that was sent.
    pub(crate) fn is_last(&self) -> bool {
        self.sent.wrapping_sub(self.received) == 1
    }

    /// Whether that many more copies fit.
    pub(crate) fn room(&self, copies: u32) -> Result<(), String> {
        let waiting = self.sent.wrapping_sub(self.received) + copies;
        if waiting as usize > PUBLISHED {
            return Err(format!("{waiting} published copies wait to be received"));
        }
        Ok(())
    }

    /// Notes that `copies` more are on their way.
    pub(crate) fn sent(&mut self, copies: u32) {
        self.sent = self.sent.wrapping_add(copies);
    }

    /// Nothing sent will be received. The stream must be idle.
    pub(crate) fn forget(&mut self) {
        self.received = self.sent;
    }

    /// Waits for the oldest copy and takes its start.
    pub(crate) fn receive(&mut self, stream: &Stream, out: &mut [u8]) -> Result<(), String> {
        if self.sent == self.received {
            return Err("nothing was published".to_owned());
        }
        if out.len() > PUBLISHED_BYTES {
            return Err(format!("{} bytes of a published copy", out.len()));
        }
        let slot = self.received as usize % PUBLISHED * SLOT_BYTES;
        let number = self.received.wrapping_add(1);
        let mut asked = Instant::now();
        let mut idle = false;
        // SAFETY: inside the ring; the card writes it, so it is read as volatile.
        while unsafe { self.ring.read_u32(slot) } != number {
            if idle {
                return Err("a published copy never came".to_owned());
            }
            std::hint::spin_loop();
            if asked.elapsed() > PATIENCE {
                // All work done means that the number is there at the next look.
                idle = stream.idle().map_err(explain)?;
                asked = Instant::now();
            }
        }
        fence(Ordering::Acquire);
        // SAFETY: the card is done with this slot until it is received.
        let memory = unsafe { self.ring.slice() };
        out.copy_from_slice(&memory[slot + HEADER..][..out.len()]);
        self.received = number;
        Ok(())
    }
}
