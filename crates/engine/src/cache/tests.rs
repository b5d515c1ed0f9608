use proptest::prelude::*;

use super::*;

/// A text of `len` tokens that is a function of `kind` from position `parts` on.
fn text(kind: u32, parts: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| if i < parts { i as u32 } else { 1000 * (kind + 1) + i as u32 }).collect()
}

/// Keeps a text, with pages of its own.
fn keep(cache: &mut PrefixCache, pages: &mut Pages, text: &[u32], exact_until: usize) -> bool {
    let Some(snapshot) = cache.reserve(pages) else { return false };
    let count = text.len().div_ceil(PAGE_TOKENS);
    let own: Vec<u32> = (0..count)
        .map(|_| {
            while pages.free() == 0 {
                assert!(cache.evict(pages, None), "pages enough for one text");
            }
            pages.take().expect("a page")
        })
        .collect();
    cache.insert(text, &own, exact_until, snapshot, pages);
    own.into_iter().for_each(|page| pages.release(page));
    true
}

#[test]
fn the_longest_beginning_wins_and_misses_say_why() {
    let (mut cache, mut pages) = (PrefixCache::new(8), Pages::new(64));
    let prompt = text(0, 1000, 300);
    assert_eq!(cache.find(&prompt, CachePolicy::Shared), Found::nothing(miss::EMPTY));
    keep(&mut cache, &mut pages, &prompt[..128], 128);
    keep(&mut cache, &mut pages, &prompt[..200], 200);
    keep(&mut cache, &mut pages, &prompt[..299], 299);
    let found = cache.find(&prompt, CachePolicy::Shared);
    assert_eq!((found.tokens(), found.miss), (299, ""));
    // Another end: the tail of the longest no longer fits, then no tail does.
    let found = cache.find(&text(1, 250, 300), CachePolicy::Shared);
    assert_eq!((found.tokens(), found.known_pages, found.miss), (200, 3, miss::PARTS));
    let found = cache.find(&text(1, 195, 300), CachePolicy::Shared);
    assert_eq!((found.tokens(), found.known_pages, found.miss), (128, 3, miss::NO_STATE));
    let found = cache.find(&text(1, 10, 300), CachePolicy::Shared);
    assert_eq!((found.tokens(), found.known_pages, found.miss), (0, 0, miss::OTHER));
    // The last token is the anchor, so a kept text needs one more.
    assert_eq!(cache.find(&prompt[..128], CachePolicy::Shared).tokens(), 0);
    assert_eq!(cache.find(&prompt[..129], CachePolicy::Shared).tokens(), 128);
}

#[test]
fn only_exact_state_where_that_is_asked_for() {
    let (mut cache, mut pages) = (PrefixCache::new(8), Pages::new(64));
    let prompt = text(0, 1000, 400);
    // An answer that began at 150: rounds made what lies behind.
    keep(&mut cache, &mut pages, &prompt[..320], 150);
    let found = cache.find(&prompt, CachePolicy::Shared);
    assert_eq!(found.hit.map(|hit| (hit.len, hit.exact_until)), Some((320, 128)));
    let found = cache.find(&prompt, CachePolicy::Exact);
    assert_eq!((found.tokens(), found.miss), (0, miss::ROUNDS));
    // Exact but inside a page: only where the first round follows.
    keep(&mut cache, &mut pages, &prompt[..150], 150);
    assert_eq!(cache.find(&prompt, CachePolicy::Exact).tokens(), 0);
    assert_eq!(cache.find(&prompt[..151], CachePolicy::Exact).tokens(), 150);
    keep(&mut cache, &mut pages, &prompt[..192], 192);
    assert_eq!(cache.find(&prompt, CachePolicy::Exact).tokens(), 192);
    // The same text by rounds and by passes has pages of either kind, and the first two in common.
    assert_eq!(pages.used(), 5 + 1 + 1);
    assert!(cache.has(&prompt[..192], true) && !cache.has(&prompt[..320], true));
}

#[test]
fn shared_beginnings_are_kept_once() {
    let (mut cache, mut pages) = (PrefixCache::new(8), Pages::new(64));
    for kind in 0..4 {
        keep(&mut cache, &mut pages, &text(kind, 256, 320), 320);
    }
    assert_eq!((pages.used(), cache.pages_alone(&pages)), (4 + 4, 8));
    assert_eq!(cache.len(), 4);
    cache.clear(&mut pages);
    assert_eq!((pages.used(), cache.len()), (0, 0));
}

#[test]
fn the_least_recently_used_goes_first() {
    let (mut cache, mut pages) = (PrefixCache::new(2), Pages::new(64));
    let texts = [0, 1, 2].map(|kind| text(kind, 0, 100));
    keep(&mut cache, &mut pages, &texts[0][..99], 99);
    keep(&mut cache, &mut pages, &texts[1][..99], 99);
    let hit = cache.find(&texts[0], CachePolicy::Shared).hit.expect("kept");
    cache.open(hit.id);
    keep(&mut cache, &mut pages, &texts[2][..99], 99);
    let found = texts.map(|text| cache.find(&text, CachePolicy::Shared).tokens());
    assert_eq!((found, cache.evictions()), ([99, 0, 99], 1));
}

proptest! {
    /// Whatever is kept and evicted: what is found is what was kept, and no page is lost.
    #[test]
    fn agrees_with_a_list(steps in prop::collection::vec((0u32..4, 0usize..260, 1usize..260, 0usize..260, any::<bool>()), 1..60)) {
        let (mut cache, mut pages) = (PrefixCache::new(6), Pages::new(24));
        for (kind, parts, len, exact, evict) in steps {
            let text = text(kind, parts, len);
            if evict {
                cache.evict(&mut pages, None);
            } else {
                prop_assert!(keep(&mut cache, &mut pages, &text, exact));
            }
            let all = cache.all();
            prop_assert_eq!(all.len(), cache.len());
            let prompt = [&text[..], &[7]].concat();
            let found = cache.find(&prompt, CachePolicy::Shared);
            let want = all.iter().filter(|(kept, ..)| text.starts_with(kept)).map(|(kept, ..)| kept.len()).max();
            prop_assert_eq!(found.tokens(), want.unwrap_or(0));
            if let Some(hit) = found.hit {
                let (snapshot, chain, tail) = cache.open(hit.id).expect("found");
                let chain: Vec<u32> = chain.into_iter().chain(tail).collect();
                prop_assert!(all.contains(&(text[..hit.len].to_vec(), snapshot, chain)));
            }
            let mut used: Vec<u32> = all.iter().flat_map(|(.., pages)| pages.clone()).collect();
            used.sort_unstable();
            used.dedup();
            prop_assert_eq!((pages.used(), cache.pages_alone(&pages)), (used.len(), used.len()));
        }
        cache.clear(&mut pages);
        prop_assert_eq!(pages.used(), 0);
    }
}
