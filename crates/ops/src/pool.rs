//! The claim pool: low-latency fork and join for the token loop.
//!
//! Workers spin for a moment and then sleep. A job is a number of chunks, claimed one at a time
//! from an atomic ticket by the workers and by the caller. The caller waits for claimed chunks and
//! never for threads, so a worker that lost its core costs at most the chunk it holds.
//!
//! The ticket packs an epoch (upper 32 bits) and the next chunk (lower 32). To publish a job the
//! caller first closes the old ticket (`CLOSED` as next chunk), then writes the job, then opens the
//! new epoch: a worker that still holds the old ticket fails its compare-and-swap.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

const CLOSED: u64 = u32::MAX as u64;
const SPINS: u32 = 20_000;

type Body = *const (dyn Fn(usize) + Sync);

struct Shared {
    ticket: AtomicU64,
    chunks: AtomicUsize,
    done: AtomicUsize,
    panicked: AtomicBool,
    body: std::cell::UnsafeCell<Option<Body>>,
    sleepers: AtomicU32,
    stop: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `body` is written only by the caller while the ticket is closed and every chunk of
// the previous job is done, and read only by a thread that has claimed a chunk of the open job.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer it holds is valid while a job runs, on whichever thread.
unsafe impl Send for Shared {}

/// A fixed set of threads that run one chunked job at a time.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    busy: AtomicBool,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

impl Pool {
    /// A pool that computes on `threads` threads, the caller's included.
    pub fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared {
            ticket: AtomicU64::new(CLOSED),
            chunks: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            body: std::cell::UnsafeCell::new(None),
            sleepers: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let workers = (1..threads.max(1))
            .filter_map(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("op-{i}"))
                    .spawn(move || work(&shared))
                    .ok()
            })
            .collect();
        Pool { shared, workers, busy: AtomicBool::new(false) }
    }

    /// Threads that take part, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `body(chunk)` once for each chunk in `0..chunks`, in any order, on any thread.
    ///
    /// # Panics
    /// If a chunk panicked, once all others are done; and if called from inside a job.
    pub fn run(&self, chunks: usize, body: &(dyn Fn(usize) + Sync)) {
        if chunks <= 1 || self.workers.is_empty() {
            (0..chunks).for_each(body);
            return;
        }
        assert!(chunks < CLOSED as usize, "too many chunks");
        assert!(!self.busy.swap(true, Ordering::Acquire), "a pool runs one job at a time");
        let s = &*self.shared;
        let epoch = (s.ticket.load(Ordering::Relaxed) >> 32).wrapping_add(1) & u64::from(u32::MAX);
        // The ticket is closed here: `run` leaves it closed, see below.
        s.chunks.store(chunks, Ordering::Relaxed);
        s.done.store(0, Ordering::Relaxed);
        // SAFETY: no thread reads the body while the ticket is closed and all chunks are done. The
        // lifetime is erased, but `run` returns only after the last chunk.
        unsafe {
            *s.body.get() = Some(std::mem::transmute::<
                *const (dyn Fn(usize) + Sync + '_),
                *const (dyn Fn(usize) + Sync + 'static),
            >(body));
        }
        s.ticket.store(epoch << 32, Ordering::SeqCst);
        if s.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = s.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            s.wake.notify_all();
        }
        claim_chunks(s);
        let mut spins = 0u32;
        while s.done.load(Ordering::Acquire) < chunks {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        s.ticket.store(epoch << 32 | CLOSED, Ordering::SeqCst);
        self.busy.store(false, Ordering::Release);
        assert!(!s.panicked.swap(false, Ordering::Relaxed), "a chunk of an op panicked");
    }

    /// Runs `body(start, end)` over `0..items` cut into ranges of `grain` items.
    pub fn ranges(&self, items: usize, grain: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        let grain = grain.max(1);
        self.run(items.div_ceil(grain), &|c| body(c * grain, ((c + 1) * grain).min(items)));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let _guard = self.shared.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker catches its chunks' panics, so joining can't fail; nothing to do if it did.
            let _ = worker.join();
        }
    }
}

/// Claims and runs chunks of the open job until none is left.
fn claim_chunks(s: &Shared) {
    loop {
        let ticket = s.ticket.load(Ordering::Acquire);
        let next = ticket & CLOSED;
        if next == CLOSED || next as usize >= s.chunks.load(Ordering::Relaxed) {
            return;
        }
        if s.ticket
            .compare_exchange_weak(ticket, ticket + 1, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
        {
            continue;
        }
        // SAFETY: this thread claimed a chunk of the open epoch, so the body stays in place until
        // `done` counts that chunk.
        let body = unsafe { (*s.body.get()).map(|b| &*b) };
        let run = std::panic::AssertUnwindSafe(|| body.map(|b| b(next as usize)));
        if std::panic::catch_unwind(run).is_err() {
            s.panicked.store(true, Ordering::Relaxed);
        }
        s.done.fetch_add(1, Ordering::Release);
    }
}

fn has_work(s: &Shared) -> bool {
    let next = s.ticket.load(Ordering::SeqCst) & CLOSED;
    next != CLOSED && (next as usize) < s.chunks.load(Ordering::Relaxed)
}

fn work(s: &Shared) {
    let mut idle = 0u32;
    while !s.stop.load(Ordering::Relaxed) {
        if has_work(s) {
            claim_chunks(s);
            idle = 0;
        } else if idle < SPINS {
            idle += 1;
            std::hint::spin_loop();
        } else {
            let guard = s.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            s.sleepers.fetch_add(1, Ordering::SeqCst);
            if !has_work(s) && !s.stop.load(Ordering::SeqCst) {
                // Spurious wake-ups and poisoning both lead back to the loop's checks.
                drop(s.wake.wait(guard));
            }
            s.sleepers.fetch_sub(1, Ordering::SeqCst);
            idle = 0;
        }
    }
}
