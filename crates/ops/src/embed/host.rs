//! A gather: a few strided reads for each group. Too little work for vectors to matter.

use super::Embed;
use crate::linear::layout::Layout;
use crate::{Codes, Cpu, Format, IQ4_TABLE, Mem};

pub(super) fn run(op: &Embed, mem: &Mem, cpu: &Cpu) {
    let k = op.table.k;
    let ids = mem.get::<u32>(op.ids);
    cpu.pool.ranges(op.rows, 4, &|start, end| {
        for row in start..end {
            let (piece, o) = op.piece(mem, ids[row]);
            let out = mem.get_mut::<f32>(op.out.rows(row, 1, 4 * k));
            match Layout::of(op.table.format) {
                None => dense(op.table.format, piece, out),
                Some(layout) => tile_row(&layout, piece, o, out),
            }
        }
    });
}

/// Output `o` of a tile.
fn tile_row(layout: &Layout, tile: &[u8], o: usize, out: &mut [f32]) {
    let zero = layout.zero();
    for (g, out) in out.chunks_exact_mut(layout.group).enumerate() {
        let (scale, bias) = layout.params(tile, o, g);
        let (at, shift) = layout.code_at(o, g * layout.group);
        let codes = tile[at..].chunks(layout.code_bytes(4));
        for (out, codes) in out.chunks_exact_mut(4).zip(codes) {
            for (out, &byte) in out.iter_mut().zip(codes) {
                let nibble = (byte >> shift) & 15;
                let code = match layout.codes {
                    Codes::U4 => i32::from(nibble),
                    Codes::U8 => i32::from(byte),
                    Codes::Iq4 => i32::from(IQ4_TABLE[usize::from(nibble)]) + zero,
                };
                *out = if layout.symmetric {
                    scale * (code - zero) as f32
                } else {
                    scale * code as f32 + bias
                };
            }
        }
    }
}

fn dense(format: Format, bytes: &[u8], out: &mut [f32]) {
    match format {
        Format::F16 => {
            for (out, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = half::f16::from_le_bytes(*b).to_f32();
            }
        }
        Format::Bf16 => {
            for (out, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = half::bf16::from_le_bytes(*b).to_f32();
            }
        }
        _ => {
            for (out, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = f32::from_le_bytes(*b);
            }
        }
    }
}
