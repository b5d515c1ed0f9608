//! The runtime itself, on the card, if there is one.

mod common;

use common::{card, matrix, pattern};
use cuda::{Cuda, OpenError, Options};
use ops::rms_norm::RmsNorm;
use ops::{
    Act, ActDtype, Buf, CopyRows, Device, DeviceError, Linear, LinearPart, Pass, SiluMul, Weight,
};

fn bytes_of(dev: &mut Cuda, buf: Buf) -> Vec<u8> {
    let mut bytes = vec![0; buf.bytes];
    dev.read(buf, &mut bytes);
    bytes
}

#[test]
fn a_device_that_is_not_there_is_a_sentence() {
    match Cuda::open(&Options { ordinal: 99, ..Options::default() }) {
        Err(OpenError::NoDevice { ordinal: 99, .. } | OpenError::NoDriver) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_moves_whole() {
    let Some(mut dev) = card() else { return };
    let small = dev.alloc(1000, "small").expect("memory");
    assert_eq!(bytes_of(&mut dev, small), vec![0; 1000]);
    // Pieces that don't divide the slots, nor the buffer.
    for (bytes, piece) in
        [(1, 1), (1000, 7), (3 << 20, 4096), (70_000_001, 99_991), (9 << 20, 9 << 20)]
    {
        let buf = dev.alloc(bytes, "upload").expect("memory");
        dev.upload(buf, piece, &|_, offset, part| {
            assert!(offset % piece == 0 && part.len() <= piece);
            part.iter_mut().enumerate().for_each(|(i, b)| *b = pattern(offset + i));
        });
        let back = bytes_of(&mut dev, buf);
        assert!(back.iter().enumerate().all(|(i, &b)| b == pattern(i)), "{bytes} in {piece}");
    }
    let (a, b) =
        (dev.alloc(5 << 20, "a").expect("memory"), dev.alloc(5 << 20, "b").expect("memory"));
    let values: Vec<u8> = (0..5 << 20).map(pattern).collect();
    dev.write(a, &values);
    dev.copy(a, b);
    dev.zero(a);
    assert!(bytes_of(&mut dev, b) == values);
    assert!(bytes_of(&mut dev, a).iter().all(|&b| b == 0));
    // Buffers take the memory that they have, not a multiple of some page each.
    let before = dev.memory_bytes();
    for i in 0..20 {
        dev.alloc((17 << 20) + i, "not whole pages").expect("memory");
    }
    assert!(dev.memory_bytes() - before < (20 * 17 + 4) << 20, "{}", dev.memory_bytes() - before);
    assert_eq!(dev.sync(), Ok(()));
}

/// A chain in which each launch reads what the one before it wrote, longer than the card is wide.
fn chain(dev: &mut dyn Device, bufs: &[Buf], width: usize, rows: usize) {
    for pair in bufs.windows(2) {
        let to = Act { buf: pair[1], width, dtype: ActDtype::F32 };
        dev.run(&CopyRows {
            from: pair[0],
            width,
            to,
            column: 0,
            finish: true,
            rows,
            pass: Pass::Round,
        });
    }
}

#[test]
fn launches_see_what_those_before_wrote() {
    let Some(mut dev) = card() else { return };
    let (width, rows) = (4096, 16);
    let bufs: Vec<Buf> =
        (0..60).map(|_| dev.alloc(4 * width * rows, "chain").expect("memory")).collect();
    for round in 0..50u32 {
        let values: Vec<u8> =
            (0..width * rows).flat_map(|i| (i as u32 ^ round).to_le_bytes()).collect();
        dev.write(bufs[0], &values);
        match round % 2 {
            0 => chain(&mut dev, &bufs, width, rows),
            _ => dev.replay(7, &mut |dev| chain(dev, &bufs, width, rows)),
        }
        assert!(bytes_of(&mut dev, bufs[59]) == values, "round {round}");
    }
    assert_eq!(dev.sync(), Ok(()));
}

/// What an MLP does to `x`: stages that a recording joins.
fn mlp(dev: &mut dyn Device, m: &Mlp, rows: usize) {
    let part = |weight, out, add| LinearPart { weight, out, add };
    for _ in 0..10 {
        dev.run(&RmsNorm { x: m.x, weight: m.norm, out: m.xn, rows, pass: Pass::Round, eps: 1e-6 });
        let parts = [part(m.gate, m.gates, false), part(m.up, m.ups, false)];
        dev.run(&Linear::new(m.xn, rows, Pass::Round, &parts));
        dev.run(&SiluMul { gate: m.gates, up: m.ups, out: m.act, rows, pass: Pass::Round });
        dev.run(&Linear::new(m.act, rows, Pass::Round, &[part(m.down, m.x, true)]));
    }
}

struct Mlp {
    x: Buf,
    norm: Buf,
    xn: Act,
    gate: Weight,
    up: Weight,
    gates: Buf,
    ups: Buf,
    act: Act,
    down: Weight,
}

#[test]
fn joined_stages_have_the_bits_of_stages_apart() {
    let Some(mut dev) = card() else { return };
    // More half tiles than a pass has, runs that differ by one, and a k that blocks share.
    let (hidden, inner, most) = (5120, 17_408, 64);
    let mut f32s = |count: usize| dev.alloc(4 * count, "f32").expect("memory");
    let (x, norm) = (f32s(most * hidden), f32s(hidden));
    let (gates, ups) = (f32s(most * inner), f32s(most * inner));
    let mut act = |width: usize| {
        let buf = dev.alloc(2 * most * width, "act").expect("memory");
        Act { buf, width, dtype: ActDtype::Bf16 }
    };
    let (xn, act) = (act(hidden), act(inner));
    // Small weights of mean 0.
    let mut matrix = |n, k| matrix(&mut dev, (n, k), 0x3a80, 0xbbf0);
    let (gate, up, down) = (matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner));
    let m = Mlp { x, norm, xn, gate, up, gates, ups, act, down };
    let ones: Vec<u8> = (0..hidden).flat_map(|_| 1f32.to_le_bytes()).collect();
    dev.write(norm, &ones);
    let start: Vec<u8> =
        (0..most * hidden).flat_map(|i| (f32::from(pattern(i)) - 127.5).to_le_bytes()).collect();
    let mut row = Vec::new();
    for rows in [1, 8, 2, 12, 20, 64] {
        dev.write(x, &start);
        mlp(&mut dev, &m, rows);
        let apart = bytes_of(&mut dev, x.rows(0, rows, 4 * hidden));
        for replay in 0..3 {
            dev.write(x, &start);
            dev.replay(rows as u64, &mut |dev| mlp(dev, &m, rows));
            let joined = bytes_of(&mut dev, x.rows(0, rows, 4 * hidden));
            assert!(joined == apart, "{rows} rows, replay {replay}");
        }
        // A row does not depend on how many there are.
        row = if row.is_empty() { apart[..4 * hidden].to_vec() } else { row };
        assert!(row == apart[..4 * hidden], "{rows} rows");
        assert!(row != start[..4 * hidden], "nothing was computed");
        assert!(
            row.chunks_exact(4).all(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).is_finite())
        );
    }
    assert_eq!(dev.sync(), Ok(()));
}

#[test]
fn published_copies_arrive_in_order() {
    let Some(mut dev) = card() else { return };
    let (width, rows) = (4096, 4);
    let bufs: Vec<Buf> =
        (0..9).map(|_| dev.alloc(4 * width * rows, "chain").expect("memory")).collect();
    let mut next = 0u32;
    for round in 0..100u32 {
        dev.write(bufs[0], &bytes(&vec![round; width * rows]));
        dev.replay(3, &mut |dev| {
            chain(dev, &bufs, width, rows);
            dev.publish(bufs[8].slice(0, 1000));
        });
        // Up to five behind.
        while round - next > round % 6 {
            let mut out = [0; 1000];
            dev.receive(&mut out).expect("a copy");
            assert!(out.chunks_exact(4).all(|w| w == next.to_le_bytes()), "round {next}");
            next += 1;
        }
    }
    let mut out = [0; 4];
    while dev.receive(&mut out).is_ok() {
        assert_eq!(out, next.to_le_bytes());
        next += 1;
    }
    assert_eq!(next, 100);
    // After that error it works again, also outside a recording.
    dev.publish(bufs[8].slice(0, 4));
    assert_eq!(dev.receive(&mut out), Ok(()));
    assert_eq!(out, 99u32.to_le_bytes());
    for _ in 0..9 {
        dev.publish(bufs[8].slice(0, 4));
    }
    assert!(matches!(dev.sync(), Err(DeviceError::Op { op: "publish", .. })), "too many");
}

fn bytes(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[test]
fn failures_surface_at_sync_and_not_before() {
    let Some(mut dev) = card() else { return };
    let buf = dev.alloc(4096, "rows").expect("memory");
    let to = Act { buf, width: 64, dtype: ActDtype::F32 };
    let op =
        CopyRows { from: buf, width: 64, to, column: 0, finish: true, rows: 2, pass: Pass::Round };
    dev.run(&op);
    assert!(matches!(dev.sync(), Err(DeviceError::Op { op: "copy_rows", .. })), "overlap");
    let from = dev.alloc(4096, "rows").expect("memory");
    dev.run(&CopyRows { from, width: 65, ..op });
    assert!(matches!(dev.sync(), Err(DeviceError::Unsupported(_))), "geometry");
    dev.replay(1, &mut |dev| dev.write(from, &[1]));
    assert!(
        matches!(dev.sync(), Err(DeviceError::Op { op: "write", .. })),
        "a write in a recording"
    );
    dev.run(&CopyRows { from, ..op });
    assert_eq!(dev.sync(), Ok(()));
    assert!(matches!(dev.alloc(1 << 50, "too much"), Err(DeviceError::OutOfMemory { .. })));
}

#[test]
fn bandwidth_is_that_of_a_card() {
    let Some(mut dev) = card() else { return };
    let bufs: Vec<Buf> = (0..8).map(|_| dev.alloc(512 << 20, "read").expect("memory")).collect();
    let rate = dev.read_bandwidth(&bufs);
    println!("{}: reads {:.0} GB/s", dev.info().name, rate / 1e9);
    assert_eq!(dev.sync(), Ok(()));
    assert!(rate > 1e10);
}
