//! Keys and values, in pages.

use crate::{Buf, Mem, PAGE_TOKENS, Unsupported};

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// bf16, rounded to nearest even.
    #[default]
    Bf16,
    /// int8 with one f32 scale for each key and each value of a head: see [`quantize`].
    ///
    /// The scale is f32 although bf16 would save 2 bytes of about a hundred: the largest element is then exactly
    /// 127 steps whatever the scale, and a step is the same number for whoever writes and whoever reads.
    Int8,
}

impl KvDtype {
    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            KvDtype::Bf16 => "bf16",
            KvDtype::Int8 => "int8",
        }
    }

    /// Bytes of one head's keys, or values, of one page.
    pub const fn block_bytes(self, head_dim: usize) -> usize {
        match self {
            KvDtype::Bf16 => 2 * PAGE_TOKENS * head_dim,
            KvDtype::Int8 => PAGE_TOKENS * (head_dim + size_of::<f32>()),
        }
    }
}

/// Keys and values of one layer, in pages of [`PAGE_TOKENS`] positions.
///
/// bf16: `values` is `[pages][kv_heads][PAGE_TOKENS][head_dim]`. `keys` is
/// `[pages][kv_heads][head_dim / 2][PAGE_TOKENS][2]`: a 32-bit word holds two neighbouring elements
/// of one key, and the words of a page's keys lie side by side. So 16 keys fill a vector without a
/// shuffle, scores need no sum across lanes, and a word is what one thread of a tensor-core
/// multiply holds.
///
/// int8: both are `[pages][kv_heads]` of blocks, a block being its codes and then `[PAGE_TOKENS]` f32 scales. Codes of
/// values are `[PAGE_TOKENS][head_dim]`, of keys `[head_dim][PAGE_TOKENS]`. A page is one range of bytes in
/// either form, so whoever copies, shares or stores pages needs to know its length and nothing else.
///
/// `table` is `[slots][max_pages]` u32: the pool page that holds positions
/// `[PAGE_TOKENS·i, PAGE_TOKENS·(i+1))` of a slot's lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPool {
    /// Keys, after norm and rotary embedding.
    pub keys: Buf,
    /// Values.
    pub values: Buf,
    /// Page table, shared by all layers.
    pub table: Buf,
    /// Pages a lane may own: the row length of `table`.
    pub max_pages: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// How elements are stored.
    pub dtype: KvDtype,
}

impl KvPool {
    /// Elements of a head's keys (or values) in one page.
    pub fn block(&self) -> usize {
        PAGE_TOKENS * self.head_dim
    }

    /// Element offset of a head's block of one page, in bf16 `keys` and `values`.
    pub fn page_offset(&self, page: usize, kv_head: usize) -> usize {
        (page * self.kv_heads + kv_head) * self.block()
    }

    /// Element offset, inside a block of bf16 `keys`, of element `i` of the key at `pos`.
    pub fn key_offset(pos: usize, i: usize) -> usize {
        (i / 2 * PAGE_TOKENS + pos % PAGE_TOKENS) * 2 + i % 2
    }

    /// Bytes of one page's keys, or values.
    pub fn page_bytes(&self) -> usize {
        self.kv_heads * self.dtype.block_bytes(self.head_dim)
    }

    /// Bytes of one position's key and value, of all heads.
    pub fn token_bytes(&self) -> usize {
        2 * self.page_bytes() / PAGE_TOKENS
    }

    /// Which block of a buffer a head has in one page, as bytes.
    fn block_of(&self, buf: Buf, page: usize, kv_head: usize) -> Buf {
        buf.rows(page * self.kv_heads + kv_head, 1, self.dtype.block_bytes(self.head_dim))
    }

    /// A head's keys of one page.
    pub(crate) fn key_block(&self, page: usize, kv_head: usize) -> Buf {
        self.block_of(self.keys, page, kv_head)
    }

    /// A head's values of one page.
    pub(crate) fn value_block(&self, page: usize, kv_head: usize) -> Buf {
        self.block_of(self.values, page, kv_head)
    }

    /// The pages of a slot's lane, in order of position.
    pub(crate) fn pages<'m>(&self, mem: &'m Mem, slot: u32) -> &'m [u32] {
        mem.get(self.table.rows(slot as usize, 1, 4 * self.max_pages))
    }

    /// The geometry that every op on pages shares.
    pub(crate) fn check(&self, op: &'static str) -> Result<(), Unsupported> {
        let dim = self.head_dim;
        let dims = dim.is_multiple_of(16) && (16..=256).contains(&dim);
        let limit = "multiples of 16 up to 256";
        Unsupported::unless(dims, op, || format!("head_dim {dim}"), limit)?;
        let page = self.dtype.block_bytes(dim).checked_mul(self.kv_heads).unwrap_or(0);
        let pages = page > 0
            && self.keys.bytes.is_multiple_of(page)
            && self.keys.bytes == self.values.bytes
            && self.max_pages > 0
            && self.table.bytes.checked_rem(4 * self.max_pages) == Some(0);
        Unsupported::unless(pages, op, || format!("{self:?}"), "whole pages and table rows")
    }

    /// Refuses what no kernel of a card reads yet.
    pub(crate) fn must_be_bf16(&self, op: &'static str) -> Result<(), Unsupported> {
        let what = || format!("keys and values in {} on CUDA", self.dtype.name());
        Unsupported::unless(self.dtype == KvDtype::Bf16, op, what, "bf16: use --kv bf16")
    }

    /// The definition of what a block holds of a position's key (or value), element `i`.
    pub(crate) fn element(&self, block: &[u8], part: Part, pos: usize, i: usize) -> f64 {
        let slot = pos % PAGE_TOKENS;
        match self.dtype {
            KvDtype::Bf16 => {
                let at = match part {
                    Part::Key => KvPool::key_offset(pos, i),
                    Part::Value => slot * self.head_dim + i,
                };
                half::bf16::from_le_bytes([block[2 * at], block[2 * at + 1]]).to_f64()
            }
            KvDtype::Int8 => {
                let (codes, scales) = block.split_at(self.block());
                let scale = bytemuck::cast_slice::<u8, f32>(scales)[slot];
                let code = codes[part.code_offset(self.head_dim, slot, i)].cast_signed();
                f64::from(code) * f64::from(scale)
            }
        }
    }

    /// The definition of storing a position's key (or value) in a block.
    pub(crate) fn put(&self, block: &mut [u8], part: Part, pos: usize, x: &[f32]) {
        let slot = pos % PAGE_TOKENS;
        match self.dtype {
            KvDtype::Bf16 => {
                for (i, &x) in x.iter().enumerate() {
                    let at = match part {
                        Part::Key => KvPool::key_offset(pos, i),
                        Part::Value => slot * self.head_dim + i,
                    };
                    block[2 * at..][..2].copy_from_slice(&half::bf16::from_f32(x).to_le_bytes());
                }
            }
            KvDtype::Int8 => {
                let (codes, scales) = block.split_at_mut(self.block());
                let (scale, quants) = quantize(x);
                bytemuck::cast_slice_mut::<u8, f32>(scales)[slot] = scale;
                for (i, q) in quants.enumerate() {
                    codes[part.code_offset(self.head_dim, slot, i)] = q.cast_unsigned();
                }
            }
        }
    }
}

/// Which of the two: they lie differently in their blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Key,
    Value,
}

impl Part {
    /// Where an int8 block has element `i` of slot `slot`.
    pub(crate) fn code_offset(self, head_dim: usize, slot: usize, i: usize) -> usize {
        match self {
            Part::Key => i * PAGE_TOKENS + slot,
            Part::Value => slot * head_dim + i,
        }
    }
}

/// A head whose elements are all smaller than this is stored as zeros: 127 divided by less would not be finite.
pub(crate) const TOO_SMALL: f32 = 1.0e-36;

/// The scale and the factor of a head's key (or value), of which `largest` is the largest magnitude and which is
/// `finite` or not: codes are `x · factor`, rounded to nearest even. See [`quantize`].
#[inline(always)]
pub(crate) fn scale_of(largest: f32, finite: bool) -> (f32, f32) {
    if !finite {
        (f32::NAN, 0.0)
    } else if largest < TOO_SMALL {
        (0.0, 0.0)
    } else {
        (largest / 127.0, 127.0 / largest)
    }
}

/// The definition of int8: `scale = max|x| / 127`, codes `round half to even (x · (127 / max|x|))` in f32.
///
/// Zeros have scale 0, and so has what is as good as zero. If an element is not finite, the scale is NaN
/// and the codes are zero: whoever sees the key or value gets NaN, as from a NaN in bf16.
fn quantize(x: &[f32]) -> (f32, impl Iterator<Item = i8>) {
    let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let finite = x.iter().all(|x| x.is_finite());
    let (scale, factor) = scale_of(largest, finite);
    let code = move |&x: &f32| if finite { (x * factor).round_ties_even() as i8 } else { 0 };
    (scale, x.iter().map(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized(x: &[f32]) -> (f32, Vec<i8>) {
        let (scale, codes) = quantize(x);
        (scale, codes.collect())
    }

    #[test]
    fn codes_by_hand() {
        assert_eq!(quantized(&[0.0, -0.0]), (0.0, vec![0, 0]));
        assert_eq!(quantized(&[127.0, -127.0, 0.5, 1.5, -2.5]), (1.0, vec![127, -127, 0, 2, -2]));
        // Halves go to even; the sign of the largest does not matter.
        assert_eq!(quantized(&[-254.0, 3.0, 5.0]), (2.0, vec![-127, 2, 2]));
    }

    #[test]
    fn extreme_magnitudes_stay_finite() {
        for largest in [f32::MAX, 1e30, 1.0, 1e-30, TOO_SMALL] {
            let (scale, codes) = quantized(&[largest, -largest, largest / 2.0, 0.0]);
            assert!(scale.is_finite() && scale > 0.0, "{largest}");
            assert_eq!(codes[..2], [127, -127], "{largest}");
            assert!((63..=64).contains(&codes[2]) && codes[3] == 0, "{largest}: {codes:?}");
        }
        for tiny in [0.99 * TOO_SMALL, f32::MIN_POSITIVE, f32::from_bits(1)] {
            assert_eq!(quantized(&[tiny, -tiny]), (0.0, vec![0, 0]));
        }
    }

    #[test]
    fn what_is_not_finite_is_nan_whole() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (scale, codes) = quantized(&[1.0, bad, -3.0]);
            assert!(scale.is_nan(), "{bad}");
            assert_eq!(codes, [0, 0, 0]);
        }
    }

    #[test]
    fn bytes_of_a_block() {
        for dim in [16, 64, 128, 256] {
            assert_eq!(KvDtype::Int8.block_bytes(dim), PAGE_TOKENS * dim + 256);
            assert_eq!(KvDtype::Bf16.block_bytes(dim), 2 * PAGE_TOKENS * dim);
        }
    }
}
