//! The runtime itself, on the card, if there is one.

#![expect(clippy::disallowed_methods, reason = "a test picks its compiler by the environment")]

use std::path::PathBuf;

use cuda::{Cuda, OpenError, Options};
use ops::{Act, ActDtype, Buf, CopyRows, Device, DeviceError};

fn open() -> Option<Cuda> {
    let options = Options {
        nvrtc: std::env::var_os("TH_NVRTC").map(PathBuf::from).into_iter().collect(),
        ..Options::default()
    };
    match Cuda::open(&options) {
        Ok(cuda) => Some(cuda),
        Err(why) => {
            println!("skipped: {why}");
            None
        }
    }
}

fn bytes_of(dev: &mut Cuda, buf: Buf) -> Vec<u8> {
    let mut bytes = vec![0; buf.bytes];
    dev.read(buf, &mut bytes);
    bytes
}

fn pattern(at: usize) -> u8 {
    (at.wrapping_mul(0x9E37_79B9) >> 13) as u8
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
    let Some(mut dev) = open() else { return };
    let small = dev.alloc(1000, "small").expect("memory");
    assert_eq!(bytes_of(&mut dev, small), vec![0; 1000]);
    // Pieces that don't divide the slots, nor the buffer.
    for (bytes, piece) in
        [(1, 1), (1000, 7), (3 << 20, 4096), (70_000_001, 99_991), (9 << 20, 9 << 20)]
    {
        let buf = dev.alloc(bytes, "upload").expect("memory");
        dev.upload(buf, piece, &|offset, part| {
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
    assert_eq!(dev.sync(), Ok(()));
}

/// A chain in which each launch reads what the one before it wrote, longer than the card is wide.
fn chain(dev: &mut dyn Device, bufs: &[Buf], width: usize, rows: usize) {
    for pair in bufs.windows(2) {
        let to = Act { buf: pair[1], width, dtype: ActDtype::F32 };
        dev.run(&CopyRows { from: pair[0], width, to, column: 0, finish: true, rows });
    }
}

#[test]
fn launches_see_what_those_before_wrote() {
    let Some(mut dev) = open() else { return };
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

#[test]
fn published_copies_arrive_in_order() {
    let Some(mut dev) = open() else { return };
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
    let Some(mut dev) = open() else { return };
    let buf = dev.alloc(4096, "rows").expect("memory");
    let to = Act { buf, width: 64, dtype: ActDtype::F32 };
    let op = CopyRows { from: buf, width: 64, to, column: 0, finish: true, rows: 2 };
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
    let Some(mut dev) = open() else { return };
    let bufs: Vec<Buf> = (0..8).map(|_| dev.alloc(512 << 20, "read").expect("memory")).collect();
    let rate = dev.read_bandwidth(&bufs);
    println!("{}: reads {:.0} GB/s", dev.info().name, rate / 1e9);
    assert_eq!(dev.sync(), Ok(()));
    assert!(rate > 1e10);
}
