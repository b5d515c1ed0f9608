//! Who is next: pure decisions, without a device and without a clock.

use std::cmp::Reverse;
use std::time::Duration;

use crate::service::Priority;

/// How often something that came later may go first, of the same priority.
pub(crate) const OVERTAKING: u32 = 8;

/// Something that waits for its turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) priority: Priority,
    /// Prompt tokens left to compute.
    pub(crate) remaining: usize,
    /// Who came first has the lower number.
    pub(crate) arrival: u64,
    /// How often something that came later went first.
    pub(crate) overtaken: u32,
}

/// The order in which candidates should go, as indices: by priority; within one, those overtaken too
/// often by arrival, then the least remaining work first.
pub(crate) fn order(candidates: &[Candidate]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.sort_by_key(|&i| {
        let c = &candidates[i];
        let waited = c.overtaken >= OVERTAKING;
        let remaining = if waited { 0 } else { c.remaining };
        (Reverse(c.priority), !waited, remaining, c.arrival)
    });
    order
}

/// Whether `other` is overtaken when `chosen` goes.
pub(crate) fn overtakes(chosen: &Candidate, other: &Candidate) -> bool {
    chosen.priority == other.priority && other.arrival < chosen.arrival
}

/// Shares the device between prefill and rounds.
///
/// After each prefill slice while lanes decode, rounds get their share of the time before the next
/// slice, and one round at least. So a decoding lane waits for one slice and one round at most.
#[derive(Clone, Debug)]
pub(crate) struct Turns {
    /// Rounds' part of the time: 0 to below 1.
    share: f64,
    /// Time that rounds have coming.
    owed: Duration,
    round_due: bool,
}

impl Turns {
    pub(crate) fn new(share: f64) -> Turns {
        Turns { share: share.clamp(0.0, 0.95), owed: Duration::ZERO, round_due: false }
    }

    /// A slice was computed, while lanes decoded or not.
    pub(crate) fn prefilled(&mut self, took: Duration, decoding: bool) {
        self.round_due = decoding;
        self.owed =
            if decoding { took.mul_f64(self.share / (1.0 - self.share)) } else { Duration::ZERO };
    }

    /// A round was computed.
    pub(crate) fn decoded(&mut self, took: Duration) {
        self.round_due = false;
        self.owed = self.owed.saturating_sub(took);
    }

    /// Whether a slice may come before the next round.
    pub(crate) fn prefill_may_go(&self) -> bool {
        !self.round_due && self.owed.is_zero()
    }
}

/// Tokens a second, from what was measured lately.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rate(f64);

impl Rate {
    pub(crate) fn add(&mut self, tokens: usize, took: Duration) {
        let seconds = took.as_secs_f64();
        if seconds > 0.0 {
            let rate = tokens as f64 / seconds;
            // A bound in time has to hold where it got slower: later positions cost more.
            self.0 = if self.0 == 0.0 || rate < self.0 { rate } else { 0.7 * self.0 + 0.3 * rate };
        }
    }

    /// Tokens within a time; `None` before anything was measured.
    pub(crate) fn within(&self, time: Duration) -> Option<usize> {
        (self.0 > 0.0).then_some((self.0 * time.as_secs_f64()) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(priority: Priority, remaining: usize, arrival: u64, overtaken: u32) -> Candidate {
        Candidate { priority, remaining, arrival, overtaken }
    }

    #[test]
    fn short_ones_go_first_but_not_for_ever() {
        use Priority::{High, Low, Normal};
        let mut all = vec![
            candidate(Normal, 9000, 0, 0),
            candidate(Normal, 10, 1, 0),
            candidate(Low, 1, 2, OVERTAKING),
            candidate(High, 500, 3, 0),
            candidate(Normal, 10, 4, 0),
        ];
        assert_eq!(order(&all), [3, 1, 4, 0, 2]);
        all[0].overtaken = OVERTAKING;
        assert_eq!(order(&all), [3, 0, 1, 4, 2]);
        assert!(overtakes(&all[4], &all[1]) && !overtakes(&all[1], &all[4]));
        assert!(!overtakes(&all[3], &all[0]), "a higher priority has a right to it");
    }

    #[test]
    fn nobody_is_overtaken_more_often_than_the_bound() {
        // A long one among short ones that never stop coming.
        let mut waiting = vec![candidate(Priority::Normal, 100_000, 0, 0)];
        for arrival in 1.. {
            waiting.push(candidate(Priority::Normal, 1, arrival, 0));
            let chosen = waiting.remove(order(&waiting)[0]);
            if chosen.arrival == 0 {
                assert_eq!(arrival, u64::from(OVERTAKING) + 1);
                return;
            }
            waiting.iter_mut().filter(|c| overtakes(&chosen, c)).for_each(|c| c.overtaken += 1);
        }
    }

    #[test]
    fn rounds_get_their_share() {
        for share in [0.0, 0.25, 0.5, 0.9] {
            let mut turns = Turns::new(share);
            let (slice, round) = (Duration::from_millis(100), Duration::from_millis(7));
            let (mut prefill, mut decode, mut gap) = (Duration::ZERO, Duration::ZERO, 0);
            for _ in 0..20_000 {
                if turns.prefill_may_go() {
                    turns.prefilled(slice, true);
                    prefill += slice;
                    gap += 1;
                    assert_eq!(gap, 1, "two slices without a round between them");
                } else {
                    turns.decoded(round);
                    decode += round;
                    gap = 0;
                }
            }
            let got = decode.as_secs_f64() / (decode + prefill).as_secs_f64();
            assert!(got >= share && got < share + 0.07, "{share}: {got}");
        }
        let mut turns = Turns::new(0.5);
        turns.prefilled(Duration::from_secs(1), false);
        assert!(turns.prefill_may_go(), "nobody to wait for");
    }
}
