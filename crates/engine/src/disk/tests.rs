use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use ops::PAGE_TOKENS;

use super::*;

/// A folder that goes when the test does.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("th-engine-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Folder(path)
    }

    fn options(&self, quota: u64) -> DiskOptions {
        let (dir, fingerprint) = (self.0.clone(), "one".to_owned());
        DiskOptions { dir, quota, write_rate: 1 << 30, fingerprint }
    }

    fn files(&self) -> Vec<PathBuf> {
        let folders = fs::read_dir(&self.0).expect("the folder").flatten();
        let folders = folders.filter(|folder| folder.path().is_dir());
        let files = folders.flat_map(|folder| fs::read_dir(folder.path()).expect("a folder"));
        let mut files: Vec<PathBuf> = files.flatten().map(|file| file.path()).collect();
        files.sort();
        files
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(kind: u32, parts: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| if i < parts { i as u32 } else { 1000 * (kind + 1) + i as u32 }).collect()
}

/// A checkpoint whose bytes are a function of its text.
fn stored(text: &[u32], exact_until: usize, known: &[bool]) -> Stored {
    let page =
        |tokens: &[u32]| tokens.iter().map(|&t| t as u8).cycle().take(300).collect::<Vec<_>>();
    let pages = text.chunks_exact(PAGE_TOKENS).enumerate();
    let tail = &text[text.len() / PAGE_TOKENS * PAGE_TOKENS..];
    Stored {
        text: text.to_vec(),
        exact_until,
        snapshot: page(&text[text.len() - 1..]),
        pages: pages
            .map(|(i, tokens)| (!known.get(i).is_some_and(|&k| k)).then(|| page(tokens)))
            .collect(),
        tail: if tail.is_empty() { Vec::new() } else { page(tail) },
    }
}

fn keep(disk: &mut Disk, text: &[u32], exact_until: usize) {
    let known = disk.has_pages(text, exact_until);
    disk.store(stored(text, exact_until, &known));
}

fn load(disk: &mut Disk, key: Key) -> Option<Stored> {
    assert!(disk.load(key));
    let begun = Instant::now();
    loop {
        if let Some((of, stored)) = disk.poll() {
            assert_eq!(of, key);
            return stored;
        }
        assert!(begun.elapsed().as_secs() < 60 && disk.is_alive());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_is_kept_survives_a_restart() {
    let folder = Folder::new("restart");
    let texts = [text(0, 150, 200), text(1, 150, 200), text(2, 150, 128)];
    let mut disk = Disk::open(&folder.options(1 << 20)).expect("a folder");
    for text in &texts {
        keep(&mut disk, text, 150);
    }
    let bytes = disk.bytes();
    drop(disk);
    // Two pages in common, one and a tail each of the first two: pages are shared, states are not.
    let on_disk: u64 = folder.files().iter().map(|f| fs::metadata(f).expect("a file").len()).sum();
    assert_eq!((folder.files().len(), bytes), (2 + 2 + 3, on_disk));
    let mut disk = Disk::open(&folder.options(1 << 20)).expect("a folder");
    assert_eq!(disk.bytes(), bytes);
    for text in &texts {
        let prompt = [&text[..], &[5, 6]].concat();
        let (key, len) = disk.find(&prompt, CachePolicy::Shared).expect("kept");
        assert_eq!(len, text.len());
        assert_eq!(load(&mut disk, key), Some(stored(text, 150, &[])));
    }
    // Exact state only: of these, the one that ends with a page before 150.
    let prompt = [&texts[0][..], &[5]].concat();
    let exact = disk.find(&prompt, CachePolicy::Exact).map(|(_, len)| len);
    assert_eq!(exact, Some(128));
    assert_eq!(disk.find(&prompt, CachePolicy::Off), None);
    assert!(disk.find(&[9, 9, 9], CachePolicy::Shared).is_none());
    drop(disk);
    // Another build finds nothing, and harms nothing while there is room.
    let other = DiskOptions { fingerprint: "two".to_owned(), ..folder.options(1 << 20) };
    assert!(Disk::open(&other).expect("a folder").find(&prompt, CachePolicy::Shared).is_none());
    assert_eq!(folder.files().len(), 7);
    drop(Disk::open(&DiskOptions { quota: 100, ..other }).expect("a folder"));
    assert_eq!(folder.files().len(), 0);
}

#[test]
fn a_damaged_file_is_a_miss() {
    let folder = Folder::new("damage");
    let text = text(0, 0, 200);
    let prompt = [&text[..], &[5, 6]].concat();
    let files = {
        keep(&mut Disk::open(&folder.options(1 << 20)).expect("a folder"), &text, 200);
        folder.files()
    };
    assert_eq!(files.len(), 4);
    let damage: [(&str, fn(&Path, Vec<u8>)); 4] = [
        ("a bit flipped", |path, mut bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
            fs::write(path, bytes).expect("written");
        }),
        ("cut short", |path, bytes| {
            fs::write(path, &bytes[..bytes.len() - 40]).expect("written");
        }),
        ("empty", |path, _| fs::write(path, []).expect("written")),
        ("gone", |path, _| fs::remove_file(path).expect("removed")),
    ];
    for (what, harm) in damage {
        for file in &files {
            harm(file, fs::read(file).expect("a file"));
            let mut disk = Disk::open(&folder.options(1 << 20)).expect("a folder");
            // Found out at the start, or when it is read; then it is forgotten.
            if let Some((key, _)) = disk.find(&prompt, CachePolicy::Shared) {
                assert_eq!(load(&mut disk, key), None, "{what}: {}", file.display());
                assert!(disk.error().is_some_and(|why| !why.is_empty()));
            }
            assert!(disk.find(&prompt, CachePolicy::Shared).is_none(), "{what}");
            assert_eq!(disk.bytes(), 0);
            keep(&mut disk, &text, 200);
            drop(disk);
            assert_eq!(folder.files(), files, "{what}: {}", file.display());
        }
    }
    // What a crash leaves: a draft of a file, and pages without their checkpoint.
    fs::write(files[0].with_extension("tmp"), [1, 2, 3]).expect("written");
    let state = files.iter().find(|file| file.extension().is_some_and(|e| e == "state"));
    fs::remove_file(state.expect("a state")).expect("removed");
    drop(Disk::open(&folder.options(1 << 20)).expect("a folder"));
    assert_eq!(folder.files().len(), 0);
}

/// What a file's header says is only looked at if there is a whole one.
#[test]
fn a_file_may_be_cut_anywhere() {
    let folder = Folder::new("cut");
    fs::create_dir_all(&folder.0).expect("a folder");
    let (files, key, kind) = (files::Folder(folder.0.clone()), [7; 32], blob::Kind::State);
    blob::write(&files, kind, &key, &[1; 20]).expect("written");
    let path = folder.0.join(blob::name(kind, &key));
    let whole = fs::read(&path).expect("a file");
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).expect("written");
        let start = blob::peek(&files, &key, kind, 8).map(|start| start.len());
        assert_eq!(start, length.checked_sub(blob::HEADER).map(|rest| rest.min(8)), "{length}");
        assert!(blob::read(&files, kind, &key).is_err());
    }
}

/// A page that many checkpoints need is damaged: all of them are forgotten, so that none is found in vain and
/// whoever keeps such a text next writes the page anew.
#[test]
fn a_damaged_page_takes_all_with_it_that_need_it() {
    let folder = Folder::new("shared-damage");
    let texts = [text(0, 128, 200), text(1, 128, 200), text(2, 64, 150)];
    let first = {
        let mut disk = Disk::open(&folder.options(1 << 20)).expect("a folder");
        keep(&mut disk, &texts[0][..128], 128);
        drop(disk);
        folder.files()
    };
    for end in 0..2 {
        let mut disk = Disk::open(&folder.options(1 << 20)).expect("a folder");
        texts.iter().for_each(|text| keep(&mut disk, text, 200));
        drop(disk);
        let mut pages = first.iter().filter(|f| f.extension().is_some_and(|e| e == "page"));
        let page = pages.nth(end).expect("two pages");
        let mut bytes = fs::read(page).expect("a file");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(page, bytes).expect("written");
        let mut disk = Disk::open(&folder.options(1 << 20)).expect("a folder");
        let found = |disk: &Disk, i: usize| {
            disk.find(&[&texts[i][..], &[9]].concat(), CachePolicy::Shared).map(|(key, _)| key)
        };
        let key = found(&disk, 0).expect("not known to be damaged yet");
        assert_eq!(load(&mut disk, key), None);
        // Whichever page it was, the first two texts have it; if it is the first, all have.
        assert_eq!((found(&disk, 0), found(&disk, 1)), (None, None));
        texts.iter().for_each(|text| keep(&mut disk, text, 200));
        drop(disk);
        let mut disk = Disk::open(&folder.options(1 << 20)).expect("a folder");
        for (i, text) in texts.iter().enumerate() {
            let key = found(&disk, i).expect("written anew");
            assert_eq!(load(&mut disk, key), Some(stored(text, 200, &[])), "text {i}");
        }
    }
}

#[test]
fn two_processes_do_not_share_a_folder() {
    let folder = Folder::new("lock");
    let disk = Disk::open(&folder.options(1 << 20)).expect("a folder");
    for fingerprint in ["one", "two"] {
        let options =
            DiskOptions { fingerprint: fingerprint.to_owned(), ..folder.options(1 << 20) };
        let why = Disk::open(&options).expect_err("in use").to_string();
        assert!(why.contains("--cache-dir"), "{why}");
    }
    // Whoever is about to leave is waited for.
    let leaves = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        drop(disk);
    });
    assert!(Disk::open(&folder.options(1 << 20)).is_ok(), "it goes with its process");
    leaves.join().expect("dropped");
}

/// A thread that is behind is told later what to delete, and before anything that is written then.
#[test]
fn what_is_to_go_goes_although_the_queue_is_full() {
    let folder = Folder::new("behind");
    fs::create_dir_all(&folder.0).expect("a folder");
    let files: Arc<dyn Files> = Arc::new(files::Folder(folder.0.clone()));
    let one = {
        let (mut disk, _hand) =
            Disk::by_hand(Arc::clone(&files), 1 << 20, 1 << 30).expect("a disk");
        keep(&mut disk, &text(0, 0, 192), 192);
        disk.bytes()
    };
    let (mut disk, hand) = Disk::by_hand(files, 2 * one, 1 << 30).expect("a disk");
    keep(&mut disk, &text(0, 0, 192), 192);
    keep(&mut disk, &text(1, 0, 192), 192);
    while hand.step() {}
    let (key, _) =
        disk.find(&[&text(0, 0, 192)[..], &[9]].concat(), CachePolicy::Shared).expect("kept");
    (0..QUEUE).for_each(|_| assert!(disk.load(key)));
    // Neither this one nor those that had to make room for it are there afterwards.
    keep(&mut disk, &text(2, 0, 192), 192);
    assert!(!disk.has(&text(2, 0, 192), 192) && !disk.gone.is_empty());
    assert!(!disk.has(&text(1, 0, 192), 192), "the least recently used made room");
    // Nor may one that is written again be deleted after that.
    while hand.step() {
        disk.poll();
    }
    keep(&mut disk, &text(1, 0, 192), 192);
    while hand.step() {}
    disk.poll();
    while hand.step() {}
    let names = fs::read_dir(&folder.0).expect("the folder").flatten();
    let bytes: u64 = names.map(|file| file.metadata().expect("a file").len()).sum();
    assert_eq!((bytes, disk.bytes(), disk.gone.len()), (2 * one, 2 * one, 0));
    assert!(disk.has(&text(0, 0, 192), 192) && disk.has(&text(1, 0, 192), 192));
}

/// A write that fails leaves nothing behind, also where the disk is full.
#[test]
fn a_failed_write_leaves_no_draft() {
    let folder = Folder::new("draft");
    fs::create_dir_all(folder.0.join("name.page")).expect("a folder in the file's place");
    let files = files::Folder(folder.0.clone());
    assert!(files.write("name.page", &[&[1; 100]]).is_err());
    let names: Vec<_> = fs::read_dir(&folder.0).expect("the folder").flatten().collect();
    assert_eq!(names.len(), 1, "{names:?}");
}

#[test]
fn the_quota_holds_and_the_least_recently_used_goes() {
    let folder = Folder::new("quota");
    let one = {
        let mut disk = Disk::open(&folder.options(1 << 20)).expect("a folder");
        keep(&mut disk, &text(0, 0, 192), 192);
        disk.bytes()
    };
    let mut disk = Disk::open(&folder.options(3 * one + one / 2)).expect("a folder");
    for kind in 0..9 {
        keep(&mut disk, &text(kind, 0, 192), 192);
        assert!(disk.bytes() <= 3 * one + one / 2);
        let first = [&text(0, 0, 192)[..], &[1]].concat();
        let (key, _) = disk.find(&first, CachePolicy::Shared).expect("used each time");
        assert!(load(&mut disk, key).is_some());
    }
    let there = |disk: &Disk, kind| disk.has(&text(kind, 0, 192), 192);
    assert_eq!((0..9).filter(|&kind| there(&disk, kind)).collect::<Vec<_>>(), [0, 7, 8]);
    // More than everything is not kept, and throws nothing out.
    keep(&mut disk, &text(20, 0, 64 * 40), 64 * 40);
    assert!(there(&disk, 0) && !disk.has(&text(20, 0, 64 * 40), 64 * 40));
    drop(disk);
    let on_disk: u64 = folder.files().iter().map(|f| fs::metadata(f).expect("a file").len()).sum();
    assert_eq!(on_disk, 3 * one);
}

#[test]
fn writing_keeps_to_its_rate() {
    let folder = Folder::new("rate");
    let options = DiskOptions { write_rate: 100, ..folder.options(1 << 20) };
    let mut disk = Disk::open(&options).expect("a folder");
    let (mut written, second) = (0u64, Duration::from_secs(1));
    for now in 0..100 {
        if disk.may_write(500, now * second) {
            disk.allowance.0 -= 500;
            written += 500;
        }
    }
    assert!((9_000..=11_000).contains(&written), "{written} bytes in 100 s at 100 a second");
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error() {
    let folder = Folder::new("error");
    fs::write(&folder.0, "a file").expect("written");
    assert!(Disk::open(&folder.options(1 << 20)).is_err());
    fs::remove_file(&folder.0).expect("removed");
}
