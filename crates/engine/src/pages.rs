//! Which pages of the pools are free, and how often the others are referred to.
//!
//! A page of [`PAGE_TOKENS`](ops::PAGE_TOKENS) positions belongs to one lane while it is being filled.
//! Once full it never changes, and lanes and checkpoints refer to it together. A checkpoint that
//! ends inside a page shares it with the lane that fills it: the lane writes only behind the
//! checkpoint's end. Whoever goes on from there copies the page first.

/// Reference counts of all pages.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    counts: Vec<u32>,
    free: Vec<u32>,
}

impl Pages {
    /// All of `total` pages free.
    pub(crate) fn new(total: usize) -> Pages {
        // Low numbers are handed out first.
        Pages { counts: vec![0; total], free: (0..total as u32).rev().collect() }
    }

    /// A free page, now referred to once.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.counts[page as usize] = 1;
        Some(page)
    }

    /// One more reference to a page.
    ///
    /// # Panics
    /// If the page is free.
    pub(crate) fn share(&mut self, page: u32) {
        let count = &mut self.counts[page as usize];
        assert!(*count > 0, "page {page} is free");
        *count += 1;
    }

    /// One reference less; the page is free after the last.
    ///
    /// # Panics
    /// If the page is free.
    pub(crate) fn release(&mut self, page: u32) {
        let count = &mut self.counts[page as usize];
        assert!(*count > 0, "page {page} is free");
        *count -= 1;
        if *count == 0 {
            self.free.push(page);
        }
    }

    /// References to a page.
    pub(crate) fn count(&self, page: u32) -> u32 {
        self.counts[page as usize]
    }

    /// Pages that exist.
    pub(crate) fn total(&self) -> usize {
        self.counts.len()
    }

    /// Pages that nobody refers to.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Pages in use.
    pub(crate) fn used(&self) -> usize {
        self.total() - self.free()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Pages;

    proptest! {
        /// Against a list of references, one entry each.
        #[test]
        fn counts_agree_with_a_list(total in 0usize..9, steps in prop::collection::vec((0u8..3, 0usize..64), 0..200)) {
            let mut pages = Pages::new(total);
            let mut held: Vec<u32> = Vec::new();
            for (what, which) in steps {
                match what {
                    0 => match pages.take() {
                        Some(page) => {
                            prop_assert!(!held.contains(&page), "page {} was in use", page);
                            held.push(page);
                        }
                        None => prop_assert_eq!(pages.free(), 0),
                    },
                    1 if !held.is_empty() => {
                        let page = held[which % held.len()];
                        pages.share(page);
                        held.push(page);
                    }
                    2 if !held.is_empty() => pages.release(held.swap_remove(which % held.len())),
                    _ => {}
                }
                let mut distinct = held.clone();
                distinct.sort_unstable();
                distinct.dedup();
                prop_assert_eq!(pages.used(), distinct.len());
                for page in 0..total as u32 {
                    let want = held.iter().filter(|&&p| p == page).count();
                    prop_assert_eq!(pages.count(page) as usize, want);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "page 0 is free")]
    fn a_free_page_cannot_be_released() {
        let mut pages = Pages::new(1);
        let page = pages.take().expect("a page");
        pages.release(page);
        pages.release(page);
    }
}
