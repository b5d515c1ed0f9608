//! What a lane holds does not depend on how its rows were cut into passes, bit for bit: a block of
//! rows, the same rows one at a time, a prefill cut anywhere, and any share of a block kept.

mod common;

use common::{Rig, golden, ids};
use ops::gdn_prepare::CONV_TAPS;
use ops::{ActDtype, Buf, Device, KvPool, PAGE_TOKENS, Pass};

const BLOCK: usize = common::BLOCK;

/// Everything that a lane's future depends on, in a form that does not show how it came about.
#[derive(PartialEq)]
struct Memory {
    /// Keys and values of the target's layers, then of the draft's: `(layer, kept positions)`.
    kv: Vec<Vec<u16>>,
    /// The last rows before the convolution of each GatedDeltaNet layer.
    history: Vec<Vec<u32>>,
    /// The recurrent state of each GatedDeltaNet layer, with all kept rows in it.
    state: Vec<Vec<u32>>,
    /// Logits of a row behind the kept ones.
    next: Vec<u32>,
}

impl Memory {
    /// The first part that differs.
    fn difference(&self, other: &Memory) -> Option<&'static str> {
        let parts = [
            (self.kv == other.kv, "keys or values"),
            (self.history == other.history, "convolution history"),
            (self.state == other.state, "recurrent state"),
            (self.next == other.next, "next logits"),
        ];
        parts.into_iter().find(|(same, _)| !same).map(|(_, name)| name)
    }
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|x| x.to_bits()).collect()
}

fn rows_of_bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| bits(row)).collect()
}

fn read<T: bytemuck::Pod>(rig: &mut Rig, buf: Buf) -> Vec<T> {
    let mut out = vec![T::zeroed(); buf.bytes / size_of::<T>()];
    rig.dev.read(buf, bytemuck::cast_slice_mut(&mut out));
    out
}

/// Keys and values at positions before `end`. The rig's page table is the identity.
fn kv_before(rig: &mut Rig, kv: &KvPool, end: usize) -> Vec<u16> {
    let pages = end.div_ceil(PAGE_TOKENS);
    let bytes = 2 * kv.page_offset(pages, 0);
    let keys: Vec<u16> = read(rig, kv.keys.slice(0, bytes));
    let values: Vec<u16> = read(rig, kv.values.slice(0, bytes));
    let mut out = Vec::with_capacity(2 * end * kv.kv_heads * kv.head_dim);
    for pos in 0..end {
        for head in 0..kv.kv_heads {
            let block = kv.page_offset(pos / PAGE_TOKENS, head);
            out.extend((0..kv.head_dim).map(|i| keys[block + KvPool::key_offset(pos, i)]));
            let at = block + pos % PAGE_TOKENS * kv.head_dim;
            out.extend(&values[at..at + kv.head_dim]);
        }
    }
    out
}

/// Runs `next` behind what the lane holds and keeps nothing of it, so that pending rows enter the
/// state; then takes stock.
fn memory(rig: &mut Rig, next: u32) -> Memory {
    let logits = rig.verify(&[next], 0);
    let (end, parity) = (rig.lane.pos as usize, rig.lane.parity as usize);
    assert_eq!(rig.lane.pending, 0);
    let pools: Vec<KvPool> = rig.state.kv.iter().chain(&rig.draft_state.kv).copied().collect();
    let cells = rig.state.cells.clone();
    let channels = rig.target.gdn.expect("GatedDeltaNet layers").channels();
    let half = 4 * channels * (CONV_TAPS - 1 + BLOCK);
    let last = |history: Buf| history.slice(parity * half, 4 * channels * (CONV_TAPS - 1));
    Memory {
        kv: pools.iter().map(|kv| kv_before(rig, kv, end)).collect(),
        history: cells.iter().map(|cell| read(rig, last(cell.history))).collect(),
        state: cells.iter().map(|cell| read(rig, cell.state)).collect(),
        next: bits(&logits[0]),
    }
}

fn text() -> Vec<u32> {
    ids(&golden("code")["prompt_ids"])
}

/// Where blocks are tried: behind a prefill, across the edge of a page, and behind a block of which
/// some rows were rejected, so that rows are pending.
#[derive(Clone, Copy, Debug)]
enum Start {
    Prefill(usize),
    Pending(usize),
}

const STARTS: [Start; 3] = [Start::Prefill(7), Start::Prefill(60), Start::Pending(17)];

/// Empties the lane and fills it up to a start; returns the text that follows.
fn begin(rig: &mut Rig, start: Start, text: &[u32]) -> Vec<u32> {
    rig.reset();
    match start {
        Start::Prefill(n) => {
            rig.prefill(&text[..n], 512);
            text[n..].to_vec()
        }
        Start::Pending(n) => {
            rig.prefill(&text[..n], 512);
            let block = spoilt(&text[n..n + BLOCK], 5);
            rig.verify(&block, 5);
            text[n + 5..].to_vec()
        }
    }
}

/// Rows of which the first `right` are as given and the others are not.
fn spoilt(rows: &[u32], right: usize) -> Vec<u32> {
    let wrong = rows.iter().enumerate().map(|(i, id)| if i < right { *id } else { id + 1 });
    wrong.collect()
}

#[test]
fn a_block_of_rows_has_the_bits_of_one_row_at_a_time() {
    let mut rig = Rig::new(ActDtype::I8, None);
    let text = text();
    for start in STARTS {
        for rows in 2..=BLOCK {
            let rest = begin(&mut rig, start, &text);
            let block = rows_of_bits(&rig.verify(&rest[..rows], rows));
            let together = memory(&mut rig, rest[rows]);

            begin(&mut rig, start, &text);
            for (i, (id, want)) in rest.iter().zip(&block).enumerate() {
                let got = rows_of_bits(&rig.verify(&[*id], 1));
                assert!(got[0] == *want, "{start:?}: row {i} of {rows} alone has other logits");
            }
            let alone = memory(&mut rig, rest[rows]);
            assert_eq!(alone.difference(&together), None, "{start:?}: after {rows} rows");
        }
    }
}

#[test]
fn a_prefill_has_the_same_bits_however_it_is_cut() {
    let mut rig = Rig::new(ActDtype::I8, None);
    let text = text();
    let (prompt, next) = (&text[..150], text[150]);
    rig.reset();
    rig.prefill(prompt, 512);
    let whole = memory(&mut rig, next);

    // On the page grid, as the engine cuts, and anywhere.
    rig.reset();
    rig.prefill(prompt, PAGE_TOKENS);
    assert_eq!(memory(&mut rig, next).difference(&whole), None, "in pages");
    for cuts in [&[1, 149][..], &[63, 2, 85], &[7, 64, 64, 15], &[100, 1, 1, 48]] {
        rig.reset();
        let mut rest = prompt;
        for &rows in cuts {
            let (now, later) = rest.split_at(rows);
            rig.pass(now, Pass::Prompt, 0..0);
            rig.lane.advance(rows as u32);
            rest = later;
        }
        assert_eq!(memory(&mut rig, next).difference(&whole), None, "cut into {cuts:?}");
    }

    // The last part in blocks, as if it had been generated.
    rig.reset();
    rig.prefill(&prompt[..90], 512);
    for block in prompt[90..].chunks(BLOCK - 1) {
        rig.verify(block, block.len());
    }
    assert_eq!(memory(&mut rig, next).difference(&whole), None, "in blocks");
}

#[test]
fn keeping_some_rows_of_a_block_is_running_just_those() {
    let mut rig = Rig::new(ActDtype::I8, None);
    let text = text();
    for start in STARTS {
        for kept in 0..=BLOCK {
            // A scan of exactly the kept rows, and a next row that is not the rejected one.
            let rest = begin(&mut rig, start, &text);
            rest[..kept].iter().for_each(|id| drop(rig.verify(&[*id], 1)));
            let want = memory(&mut rig, rest[kept]);

            let block = spoilt(&rest[..BLOCK], kept);
            begin(&mut rig, start, &text);
            rig.verify(&block, kept);
            let got = memory(&mut rig, rest[kept]);
            assert_eq!(got.difference(&want), None, "{start:?}: {kept} rows kept");

            begin(&mut rig, start, &text);
            if kept > 0 {
                rig.pass(&rest[..kept], Pass::Prompt, 0..0);
                rig.lane.advance(kept as u32);
            }
            let got = memory(&mut rig, rest[kept]);
            assert_eq!(got.difference(&want), None, "{start:?}: {kept} rows at once");

            // The arms that must fail: a rejected row in the state, and a kept one left out.
            for wrong in [kept + 1, kept.wrapping_sub(1)] {
                if wrong > BLOCK || matches!(start, Start::Prefill(60)) {
                    continue;
                }
                begin(&mut rig, start, &text);
                rig.verify(&block, kept);
                rig.lane.pending = wrong as u32;
                let got = memory(&mut rig, rest[kept]);
                let differs =
                    got.history != want.history && got.state != want.state && got.next != want.next;
                assert!(differs, "{start:?}: {wrong} rows in the state instead of {kept}");
                assert!(got.kv == want.kv, "positions decide what is kept of keys and values");
            }
        }
    }
}
