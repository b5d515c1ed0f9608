//! Whether a round drafts: only while that pays.
//!
//! A drafted round costs more than a plain one and emits more tokens; which weighs more depends on
//! the machine (on a processor that computes barely faster than it reads, eight rows cost far more
//! than one) and on the text. So both are measured while answering: seconds of either kind of round and
//! tokens of a drafted one, as means that forget. The slower kind is tried again now and then.
//!
//! What is emitted does not depend on this: see the exactness contract. Where it would (a seed with
//! an acceptance rule that depends on the proposals), the caller drafts always.

/// Rounds of either kind before the first comparison, and of a try that goes well: of one lane, and at
/// the least. With more lanes each round says more, and the dearer kind costs more.
const TRY: u32 = 6;
const LEAST_TRY: u32 = 2;
/// Rounds between two tries of the slower kind: at first, and after many that went badly, each of
/// which doubles it.
const BETWEEN_TRIES: std::ops::RangeInclusive<u32> = 12..=192;
/// The next try waits until so many times the time has passed that the last one lost.
const EARNED: f64 = 20.0;
/// How much faster the other kind must be before it replaces the current one.
const MARGIN: f64 = 1.05;
/// Weight of the newest sample in a mean.
const NEWEST: f64 = 0.125;
/// How far above its mean a sample counts: a round that something disturbed took longer than any
/// round of its kind does.
const CREDIBLE: f64 = 2.0;

/// The two kinds of rounds, timed.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    plain: Mean,
    drafted: Mean,
    /// Tokens of a drafted round.
    tokens: Mean,
    drafting: bool,
    /// Rounds of a try.
    rounds: u32,
    /// Rounds and seconds left before the other kind is tried, and then rounds of that try.
    until_try: u32,
    wait: f64,
    in_try: u32,
    /// Seconds that this try has lost against the current kind.
    loss: f64,
    /// Rounds between tries now.
    between: u32,
}

impl Pace {
    /// For rounds of so many lanes.
    pub(crate) fn of(lanes: usize) -> Pace {
        let rounds = (TRY / lanes as u32).max(LEAST_TRY);
        Pace {
            plain: Mean::default(),
            drafted: Mean::default(),
            tokens: Mean::default(),
            drafting: true,
            rounds,
            until_try: rounds,
            wait: 0.0,
            in_try: 0,
            loss: 0.0,
            between: *BETWEEN_TRIES.start(),
        }
    }

    /// Whether the next round should draft.
    pub(crate) fn drafts(&self) -> bool {
        self.drafting != (self.in_try > 0)
    }

    /// Takes note of a round that took `seconds` and emitted `tokens`, the mean of its lanes.
    pub(crate) fn took(&mut self, drafted: bool, seconds: f64, tokens: f64) {
        if drafted {
            self.drafted.add(seconds);
            self.tokens.add(tokens);
        } else {
            self.plain.add(seconds);
        }
        let learning = self.plain.samples.min(self.drafted.samples) < self.rounds;
        if self.in_try > 0 {
            let tokens = if drafted { tokens } else { 1.0 };
            let current = self.rate(self.drafting);
            // Another round only if this one was better, or nothing is known yet.
            let go_on = learning || tokens / seconds > current;
            if !learning {
                // What disturbed a round is not its kind's fault.
                let mean = if drafted { &self.drafted } else { &self.plain };
                self.loss += mean.credible(seconds) - tokens / current;
            }
            self.in_try = if go_on { self.in_try - 1 } else { 0 };
            if self.in_try == 0 {
                self.wait = EARNED * std::mem::take(&mut self.loss);
                self.decide();
            }
            return;
        }
        self.wait -= seconds;
        if self.until_try > 0 || self.wait > 0.0 {
            self.until_try = self.until_try.saturating_sub(1);
            if self.drafting && !learning {
                // A text that drafts badly shows without a try.
                self.decide();
            }
        } else {
            self.in_try = self.rounds;
            self.until_try = self.between;
            self.between = (2 * self.between).min(*BETWEEN_TRIES.end());
        }
    }

    /// What a round of a kind takes.
    #[cfg(test)]
    pub(crate) fn seconds(&self, drafted: bool) -> f64 {
        if drafted { self.drafted.value } else { self.plain.value }
    }

    /// Tokens a second of either kind.
    fn rate(&self, drafted: bool) -> f64 {
        if drafted { self.tokens.value / self.drafted.value } else { 1.0 / self.plain.value }
    }

    /// Keeps to the kind with more tokens a second.
    fn decide(&mut self) {
        if self.rate(!self.drafting) > MARGIN * self.rate(self.drafting) {
            self.drafting = !self.drafting;
            self.between = *BETWEEN_TRIES.start();
            self.until_try = self.between;
        }
    }
}

/// A mean that forgets: plain at first, then the newest sample counts [`NEWEST`].
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    value: f64,
    samples: u32,
}

impl Mean {
    fn add(&mut self, sample: f64) {
        let credible = self.credible(sample);
        self.samples = self.samples.saturating_add(1);
        let weight = (1.0 / f64::from(self.samples)).max(NEWEST);
        self.value += weight * (credible - self.value);
    }

    /// As much of a sample as counts.
    fn credible(&self, sample: f64) -> f64 {
        if self.samples == 0 { sample } else { sample.min(CREDIBLE * self.value) }
    }
}

#[cfg(test)]
mod tests {
    use super::Pace;

    /// Runs `rounds` rounds and returns tokens a second, and the share of rounds that drafted.
    fn run(
        pace: &mut Pace,
        rounds: usize,
        plain: f64,
        drafted: f64,
        tokens: &dyn Fn(usize) -> usize,
    ) -> (f64, f64) {
        let (mut seconds, mut emitted, mut drafts) = (0.0, 0, 0);
        for round in 0..rounds {
            let drafting = pace.drafts();
            let (took, count) = if drafting { (drafted, tokens(round)) } else { (plain, 1) };
            pace.took(drafting, took, count as f64);
            seconds += took;
            emitted += count;
            drafts += usize::from(drafting);
        }
        (emitted as f64 / seconds, drafts as f64 / rounds as f64)
    }

    #[test]
    fn drafts_while_that_pays() {
        let (_, share) = run(&mut Pace::of(1), 1000, 1.0, 1.5, &|i| 2 + i % 2);
        assert!(share > 0.95, "{share}");
    }

    #[test]
    fn never_much_slower_than_plain_rounds() {
        for (cost, tokens) in [(3.0, 2), (4.0, 1), (2.0, 1), (1.2, 1), (8.0, 5)] {
            let (rate, share) = run(&mut Pace::of(1), 2000, 1.0, cost, &|_| tokens);
            assert!(rate > 0.95, "cost {cost}, {tokens} tokens: {rate}");
            assert!(share < 0.05, "{share}");
        }
        // Many lanes: soon decided, and tries are rare where they are dear.
        let (rate, _) = run(&mut Pace::of(8), 300, 1.0, 8.0, &|_| 5);
        assert!(rate > 0.93, "{rate}");
    }

    #[test]
    fn follows_the_text() {
        let mut pace = Pace::of(1);
        let (_, chat) = run(&mut pace, 500, 1.0, 2.5, &|_| 2);
        let (_, code) = run(&mut pace, 1000, 1.0, 2.5, &|_| 6);
        let (_, chat_again) = run(&mut pace, 500, 1.0, 2.5, &|_| 2);
        assert!(chat < 0.1 && code > 0.8 && chat_again < 0.1, "{chat} {code} {chat_again}");
    }

    #[test]
    fn a_disturbed_round_changes_nothing_for_long() {
        let mut pace = Pace::of(1);
        run(&mut pace, 200, 1.0, 1.5, &|_| 3);
        pace.took(pace.drafts(), 40.0, 3.0);
        let (_, share) = run(&mut pace, 400, 1.0, 1.5, &|_| 3);
        assert!(share > 0.7, "{share}");
        // Nor does one inside a try.
        let mut pace = Pace::of(1);
        run(&mut pace, 100, 1.0, 3.0, &|_| 2);
        while pace.in_try == 0 {
            pace.took(pace.drafts(), 1.0, 1.0);
        }
        pace.took(true, 100.0, 2.0);
        let (_, share) = run(&mut pace, 1000, 1.0, 1.5, &|_| 4);
        assert!(share > 0.7, "{share}");
    }
}
