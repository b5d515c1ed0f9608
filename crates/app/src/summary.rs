//! The figures of an answer, measured by this program's clock: what a client would measure.

use std::time::Duration;

/// Counts and times of one answer, or of several added up. All rates are ratios of sums.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// Answers counted.
    pub answers: usize,
    /// Tokens of the prompts.
    pub prompt_tokens: usize,
    /// Of these, tokens whose state was reused.
    pub cached_tokens: usize,
    /// Tokens of the answers.
    pub output_tokens: usize,
    /// From the request to the prompt's last token in the cache.
    pub prefill: Duration,
    /// From the request to the first token.
    pub first_token: Duration,
    /// From the first token to the end of the last round.
    pub decode: Duration,
    /// Tokens that came in this time: all but those of the first step.
    pub decode_tokens: usize,
    /// Rounds run.
    pub rounds: usize,
    /// Tokens they gave.
    pub round_tokens: usize,
    /// Of the rounds, those after the first step, whose time is in `decode`.
    pub timed_rounds: usize,
    /// Rounds in which something was proposed.
    pub drafted_rounds: usize,
    /// Of these, rounds in which all of it was accepted.
    pub full_rounds: usize,
}

impl Figures {
    /// Adds another answer.
    pub fn add(&mut self, other: &Figures) {
        self.answers += other.answers;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.output_tokens += other.output_tokens;
        self.prefill += other.prefill;
        self.first_token += other.first_token;
        self.decode += other.decode;
        self.decode_tokens += other.decode_tokens;
        self.rounds += other.rounds;
        self.round_tokens += other.round_tokens;
        self.timed_rounds += other.timed_rounds;
        self.drafted_rounds += other.drafted_rounds;
        self.full_rounds += other.full_rounds;
    }

    /// Tokens per second while decoding; the prompt's pass does not count.
    pub fn decode_tps(&self) -> Option<f64> {
        ratio(self.decode_tokens as f64, self.decode.as_secs_f64())
    }

    /// Tokens that a round gives.
    pub fn tokens_per_round(&self) -> Option<f64> {
        ratio(self.round_tokens as f64, self.rounds as f64)
    }

    /// Share of rounds whose proposals were all accepted.
    pub fn full_share(&self) -> Option<f64> {
        ratio(self.full_rounds as f64, self.drafted_rounds as f64)
    }

    /// Time of the rounds over the time that reading the weights takes at least.
    pub fn over_floor(&self, floor_ms_per_round: Option<f64>) -> Option<f64> {
        let floor_ms = floor_ms_per_round? * self.timed_rounds as f64;
        ratio(self.decode.as_secs_f64() * 1e3, floor_ms)
    }

    /// One line for people.
    pub fn line(&self, floor_ms_per_round: Option<f64>) -> String {
        let mut parts = vec![
            format!("prompt {} tokens ({} cached)", self.prompt_tokens, self.cached_tokens),
            format!("output {}", self.output_tokens),
        ];
        match self.answers {
            0 => return "no answers yet".into(),
            1 => parts.push(format!("first token {}", milliseconds(self.first_token))),
            n => {
                parts.insert(0, format!("{n} answers"));
                let mean = self.first_token / u32::try_from(n).unwrap_or(u32::MAX);
                parts.push(format!("first token {} on average", milliseconds(mean)));
            }
        }
        let mut push = |value: Option<f64>, text: &dyn Fn(f64) -> String| {
            parts.extend(value.map(text));
        };
        push(self.decode_tps(), &|x| format!("{x:.1} tok/s"));
        if self.drafted_rounds > 0 {
            push(self.tokens_per_round(), &|x| format!("{x:.2} tokens/round"));
            push(self.full_share(), &|x| format!("{:.0} % of rounds accepted whole", x * 100.0));
        }
        push(self.over_floor(floor_ms_per_round), &|x| format!("{x:.2}x floor"));
        parts.join(" · ")
    }
}

fn ratio(a: f64, b: f64) -> Option<f64> {
    (b > 0.0).then(|| a / b).filter(|x| x.is_finite())
}

/// A duration in a unit that suits it.
pub fn milliseconds(time: Duration) -> String {
    let ms = time.as_secs_f64() * 1e3;
    match ms {
        _ if ms < 10.0 => format!("{ms:.1} ms"),
        _ if ms < 10_000.0 => format!("{ms:.0} ms"),
        _ => format!("{:.1} s", ms / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> Figures {
        Figures {
            answers: 1,
            prompt_tokens: 40,
            cached_tokens: 32,
            output_tokens: 11,
            prefill: Duration::from_millis(18),
            first_token: Duration::from_millis(20),
            decode: Duration::from_millis(500),
            decode_tokens: 10,
            rounds: 4,
            round_tokens: 10,
            timed_rounds: 4,
            drafted_rounds: 4,
            full_rounds: 1,
        }
    }

    #[test]
    fn one_answer() {
        assert_eq!(
            figures().line(Some(100.0)),
            "prompt 40 tokens (32 cached) · output 11 · first token 20 ms · 20.0 tok/s · \
             2.50 tokens/round · 25 % of rounds accepted whole · 1.25x floor"
        );
    }

    #[test]
    fn rates_of_several_answers_are_ratios_of_sums() {
        let mut total = figures();
        total.add(&Figures { decode: Duration::from_millis(1500), ..figures() });
        assert_eq!(total.decode_tps(), Some(10.0));
        assert!(total.line(None).starts_with("2 answers · prompt 80 tokens (64 cached)"));
    }

    #[test]
    fn what_was_not_measured_is_left_out() {
        let one = Figures { answers: 1, prompt_tokens: 3, output_tokens: 1, ..Figures::default() };
        let line = one.line(Some(1.0));
        assert_eq!(line, "prompt 3 tokens (0 cached) · output 1 · first token 0.0 ms");
        assert_eq!(Figures::default().line(None), "no answers yet");
    }
}
