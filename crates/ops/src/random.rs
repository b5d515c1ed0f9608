//! Counter-based random numbers: a number is a function of what it is for, not of how many were
//! drawn before it, so results do not depend on lanes, slots, chunks or the order of work.
//!
//! The generator is Philox4x32-10 (Salmon et al., SC 2011). Its key is the request's seed; its
//! counter is `[index, position, purpose, 0]`. `position` is an absolute token position:
//!
//! | purpose | position | index | drawn for |
//! |---|---|---|---|
//! | [`Purpose::Draft`] | the round's anchor | proposal, from 1 | a proposal from its candidates |
//! | [`Purpose::Accept`] | the round's anchor | proposal, from 1 | the test of a proposal |
//! | [`Purpose::Target`] | the round's anchor | accepted proposals | the round's last token |
//! | [`Purpose::Race`] | the token's own | see [`exponential`] | the drafter-invariant rule |
//!
//! The anchor of a lane moves forward in every round, so the first three never repeat, although
//! a position may be proposed for in several rounds. The last one repeats on purpose: draft and
//! target, and every round that looks at a position, see the same numbers.
//!
//! Only 32-bit integer operations, conversions to nearest and f32 add, multiply, divide and fused
//! multiply-add occur, in one order: every device gives the same bits.

use crate::simd::{LANES, Simd};

/// What a random number is for. Part of the counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// Drawing a proposal.
    Draft = 1,
    /// Testing a proposal.
    Accept = 2,
    /// Drawing the last token of a round.
    Target = 3,
    /// The exponential variates of the drafter-invariant rule.
    Race = 4,
}

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// Philox4x32-10.
#[inline(always)]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k0, mut k1]) = (counter, key);
    for _ in 0..ROUNDS {
        let p = u64::from(MULTIPLIERS[0]) * u64::from(a);
        let q = u64::from(MULTIPLIERS[1]) * u64::from(c);
        (a, b, c, d) = ((q >> 32) as u32 ^ b ^ k0, q as u32, (p >> 32) as u32 ^ d ^ k1, p as u32);
        (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
    }
    [a, b, c, d]
}

/// A uniform number in [0, 1), in units of 2⁻³².
pub fn uniform(seed: [u32; 2], position: u32, purpose: Purpose, index: u32) -> u32 {
    philox([index, position, purpose as u32, 0], seed)[0]
}

/// Tokens that one call of [`exponentials`] covers.
pub(crate) const RACE_BLOCK: usize = 4 * LANES;

/// A variate of the exponential law with mean 1, for one token at one position. The token with
/// the smallest `exponential / weight` is a draw from the normalised weights: the race form of the
/// Gumbel-max rule (`−ln exponential` is the Gumbel noise), with one logarithm less and no rounding
/// of large sums.
///
/// One Philox block serves the four tokens `64·g + l + {0, 16, 32, 48}`: block `16·g + l`.
pub fn exponential(seed: [u32; 2], position: u32, token: u32) -> f32 {
    let block = (token / 64) * 16 + token % 16;
    let words = philox([block, position, Purpose::Race as u32, 0], seed);
    exponential_of(words[(token / 16 % 4) as usize])
}

/// [`exponential`] of the [`RACE_BLOCK`] tokens from `first` on, a multiple of it.
#[inline(always)]
pub(crate) fn exponentials<S: Simd>(
    s: S,
    seed: [u32; 2],
    position: u32,
    first: u32,
) -> [S::F; RACE_BLOCK / LANES] {
    let words = philox_lanes(first / 4, position, seed);
    let mut times = [s.splat(0.0); RACE_BLOCK / LANES];
    // No closures here: one that holds vector operations is compiled without their instructions
    // unless it happens to be inlined.
    for (time, words) in times.iter_mut().zip(&words) {
        let (mut f, mut halvings) = ([0.0; LANES], [0.0; LANES]);
        for l in 0..LANES {
            (f[l], halvings[l]) = reduce(words[l]);
        }
        let (f, halvings) = (s.load(&f), s.load(&halvings));
        let q = s.div(f, s.add(s.splat(2.0), f));
        let q2 = s.mul(q, q);
        let mut p = s.splat(ATANH[0]);
        for c in &ATANH[1..] {
            p = s.fma(p, q2, s.splat(*c));
        }
        let ln = s.mul(s.mul(s.splat(-2.0), q), p);
        *time = s.fma(halvings, s.splat(std::f32::consts::LN_2), ln);
    }
    times
}

/// [`philox`] of the blocks `first..first + 16` of a position's race: word w of block l in `[w][l]`.
#[inline(always)]
fn philox_lanes(first: u32, position: u32, [mut k0, mut k1]: [u32; 2]) -> [[u32; LANES]; 4] {
    let mut x = [[0; LANES], [position; LANES], [Purpose::Race as u32; LANES], [0; LANES]];
    for l in 0..LANES {
        x[0][l] = first.wrapping_add(l as u32);
    }
    for _ in 0..ROUNDS {
        let mut y = [[0; LANES]; 4];
        for l in 0..LANES {
            let p = u64::from(MULTIPLIERS[0]) * u64::from(x[0][l]);
            let q = u64::from(MULTIPLIERS[1]) * u64::from(x[2][l]);
            y[0][l] = (q >> 32) as u32 ^ x[1][l] ^ k0;
            y[1][l] = q as u32;
            y[2][l] = (p >> 32) as u32 ^ x[3][l] ^ k1;
            y[3][l] = p as u32;
        }
        x = y;
        (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
    }
    x
}

/// Coefficients of atanh(q) / q in q², highest first; with |q| ≤ 0.172 the next one adds 2e-9.
const ATANH: [f32; 5] = [1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0];

/// −ln((1 − v)) for v = (word + ½) / 2³², as `halvings · ln 2 − ln(1 + f)` with `1 + f` in
/// [√½, √2). Where v is small, f is −v itself, so that even variates of 1e-9 keep all their bits.
#[inline(always)]
fn reduce(word: u32) -> (f32, f32) {
    const UNIT: f32 = 1.0 / (1u64 << 32) as f32;
    let v = (word as f32 + 0.5) * UNIT;
    let (f, e) = split((!word as f32 + 0.5) * UNIT);
    (if e == 0 { -v } else { f }, -e as f32)
}

#[inline(always)]
fn exponential_of(word: u32) -> f32 {
    let (f, halvings) = reduce(word);
    let q = f / (2.0 + f);
    let q2 = q * q;
    let p = ATANH[1..].iter().fold(ATANH[0], |p, &c| p.mul_add(q2, c));
    halvings.mul_add(std::f32::consts::LN_2, -2.0 * q * p)
}

/// A positive normal number as (1 + f) · 2^e with 1 + f in [√½, √2).
#[inline(always)]
fn split(x: f32) -> (f32, i32) {
    const SQRT_HALF: i32 = 0x3F35_04F3;
    let bits = x.to_bits() as i32;
    let e = (bits - SQRT_HALF) >> 23;
    (f32::from_bits((bits - (e << 23)) as u32) - 1.0, e)
}

/// ln x of a positive normal number, relative error below 3e-7.
pub(crate) fn ln(x: f32) -> f32 {
    let (f, e) = split(x);
    let q = f / (2.0 + f);
    let q2 = q * q;
    let p = ATANH[1..].iter().fold(ATANH[0], |p, &c| p.mul_add(q2, c));
    (e as f32).mul_add(std::f32::consts::LN_2, 2.0 * q * p)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Isa, Kernel};

    #[test]
    fn philox_gives_the_published_answers() {
        let kat = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([!0; 4], [!0; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, want) in kat {
            assert_eq!(philox(counter, key), want);
        }
    }

    #[test]
    fn ln_is_accurate() {
        let mut x = 1e-30f32;
        while x < 1e30 {
            let exact = f64::from(x).ln();
            let error = (f64::from(ln(x)) - exact).abs();
            assert!(error <= 3e-7 * exact.abs() + 1e-9, "ln({x}) = {} want {exact}", ln(x));
            x *= 1.000_37;
        }
        assert_eq!(ln(1.0), 0.0);
    }

    #[test]
    fn exponentials_are_accurate_from_the_first_to_the_last_word() {
        for shift in 0..32 {
            for low in [0u32, 1, 0x1234_5678] {
                for word in [low >> shift, !(low >> shift), (1 << shift) | (low >> (31 - shift))] {
                    let v = (f64::from(word) + 0.5) / f64::from(2.0f32.powi(32));
                    let exact = -(-v).ln_1p();
                    let got = f64::from(exponential_of(word));
                    assert!((got / exact - 1.0).abs() < 4e-7, "{word:#x}: {got} want {exact}");
                }
            }
        }
    }

    struct Block(u32, [u32; 2], u32);
    impl Kernel for Block {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<f32> {
            exponentials(s, self.1, self.0, self.2).into_iter().flat_map(|v| s.lanes(v)).collect()
        }
    }

    #[test]
    fn a_block_has_the_bits_of_its_tokens_on_every_isa() {
        let seed = [7, 0xFFFF_0001];
        for first in [0, 64, 49_088, 248_256] {
            for isa in Isa::available() {
                let got = isa.dispatch(Block(123_456, seed, first));
                for (i, e) in got.iter().enumerate() {
                    let want = exponential(seed, 123_456, first + i as u32);
                    assert_eq!(e.to_bits(), want.to_bits(), "{} token {first}+{i}", isa.name());
                }
            }
        }
    }

    #[test]
    fn exponentials_have_mean_and_variance_one_and_differ_by_key() {
        let n = 200_000u32;
        let draw = |t| f64::from(exponential([1, 2], 3, t));
        let mean = (0..n).map(draw).sum::<f64>() / f64::from(n);
        let var = (0..n).map(|t| (draw(t) - mean).powi(2)).sum::<f64>() / f64::from(n);
        assert!((mean - 1.0).abs() < 0.01 && (var - 1.0).abs() < 0.03, "{mean} {var}");
        let base = uniform([1, 2], 3, Purpose::Draft, 4);
        for other in [
            uniform([2, 2], 3, Purpose::Draft, 4),
            uniform([1, 3], 3, Purpose::Draft, 4),
            uniform([1, 2], 4, Purpose::Draft, 4),
            uniform([1, 2], 3, Purpose::Accept, 4),
            uniform([1, 2], 3, Purpose::Draft, 5),
        ] {
            assert_ne!(base, other);
        }
    }
}
