//! How a block's keys and values become numbers.

use super::block::{EVEN, LOADS_PAIRS, ODD};
use crate::PAGE_TOKENS;
use crate::simd::{LANES, Simd};

/// A head's keys and values of one page, as [`crate::KvPool`] has them.
pub(super) trait Stored: Copy {
    /// What they are arrays of. 2 · [`PAGE_TOKENS`] words hold two neighbouring elements of all keys, `head_dim`
    /// words a value.
    type Word: bytemuck::Pod + Sync;
    /// Whether sums of values lie as bf16 pairs widen: of each 32 elements first the even, then the odd ones.
    const INTERLEAVED: bool;
    /// Whether what is loaded is yet to be multiplied by a scale.
    const SCALED: bool;

    /// Of two neighbouring elements of keys the first (`half` 0) or the second, for 16 keys from `key` on.
    fn key<S: Simd>(s: S, words: &[Self::Word], half: usize, key: usize) -> S::F;

    /// Vector `c` of a group of a value's columns, loaded as `LOAD` says.
    fn value<S: Simd, const LOAD: u8>(s: S, row: &[Self::Word], c: usize) -> S::F;
}

/// bf16.
#[derive(Clone, Copy)]
pub(super) struct Bf16;

impl Stored for Bf16 {
    type Word = u16;
    const INTERLEAVED: bool = true;
    const SCALED: bool = false;

    #[inline(always)]
    fn key<S: Simd>(s: S, words: &[u16], half: usize, key: usize) -> S::F {
        let words = &words[2 * key..];
        if half == 0 { s.load_bf16_even(words) } else { s.load_bf16_odd(words) }
    }

    #[inline(always)]
    fn value<S: Simd, const LOAD: u8>(s: S, row: &[u16], c: usize) -> S::F {
        match LOAD {
            LOADS_PAIRS if c.is_multiple_of(2) => s.load_bf16_even(&row[c * LANES..]),
            LOADS_PAIRS => s.load_bf16_odd(&row[(c - 1) * LANES..]),
            EVEN => s.load_bf16_even(row),
            ODD => s.load_bf16_odd(row),
            _ => s.load_bf16(row),
        }
    }
}

/// int8 codes with a scale for each key and value.
#[derive(Clone, Copy)]
pub(super) struct Int8;

impl Stored for Int8 {
    type Word = u8;
    const INTERLEAVED: bool = false;
    const SCALED: bool = true;

    #[inline(always)]
    fn key<S: Simd>(s: S, words: &[u8], half: usize, key: usize) -> S::F {
        s.load_i8(&words[half * PAGE_TOKENS + key..])
    }

    #[inline(always)]
    fn value<S: Simd, const LOAD: u8>(s: S, row: &[u8], c: usize) -> S::F {
        s.load_i8(&row[if LOAD == ODD { LANES } else { c * LANES }..])
    }
}
