//! The memory plan: what a model takes on its device, before anything is loaded.
//!
//! What would be allocated is not modelled but measured, on a device that only counts
//! ([`DryRun`](ops::DryRun)): so the plan is right to the byte for whatever the engine allocates. Lanes and
//! context shrink until they fit, unless they were asked for; what is left goes to pages, then to the
//! prefix cache.

use std::fmt;

use ops::PAGE_TOKENS;

use crate::engine::{Engine, EngineOptions, MemoryBytes};
use ops::DryRun;

/// What was asked for; `None` leaves it to the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// Tokens that a lane holds.
    pub context: Option<usize>,
    /// Lanes.
    pub lanes: Option<usize>,
    /// Bytes of the prefix cache.
    pub cache: Option<u64>,
    /// Bytes that may be used in all.
    pub max_memory: Option<u64>,
}

/// What there is to plan with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes of memory that are free where the model is to lie.
    pub free: u64,
    /// The longest context that the model was made for.
    pub longest_context: usize,
    /// The context to plan for if none was asked for.
    pub default_context: usize,
    /// The lanes to plan for if none were asked for.
    pub default_lanes: usize,
}

/// Bytes by purpose, and in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Of model and lanes.
    pub memory: MemoryBytes,
    /// Of working buffers.
    pub working: u64,
    /// Of one page of all pools.
    pub page: u64,
    /// Of one kept state.
    pub snapshot: u64,
    /// Rows that a verify pass may run beyond a lane's context.
    pub block: usize,
}

impl Footprint {
    /// All bytes.
    pub fn total(&self) -> u64 {
        self.memory.total() + self.working
    }

    /// What an engine takes that was built on a device that only counts.
    pub fn of(engine: &Engine<DryRun>) -> Footprint {
        let memory = engine.memory();
        Footprint {
            memory,
            working: (engine.dev.bytes() as u64).saturating_sub(memory.total()),
            page: engine.page_bytes() as u64,
            snapshot: engine.snapshot_bytes() as u64,
            block: engine.block(),
        }
    }
}

/// Sizes that fit.
#[derive(Clone, Debug)]
pub struct Plan {
    /// For [`Engine::new`].
    pub options: EngineOptions,
    /// What they take.
    pub footprint: Footprint,
    /// Bytes of the prefix cache: its kept states, and pages beyond those of the lanes.
    pub cache: u64,
    /// Bytes that may be used.
    pub budget: u64,
}

/// No sizes fit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TooLarge {
    /// Bytes needed at the least, or for what was asked.
    pub footprint: Footprint,
    /// Bytes of the prefix cache that was asked for.
    pub cache: u64,
    /// For so many lanes
    pub lanes: usize,
    /// of so many tokens.
    pub context: usize,
    /// Bytes that may be used.
    pub budget: u64,
}

impl std::error::Error for TooLarge {}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mb = |bytes: u64| format!("{} MB", bytes.div_ceil(1_000_000));
        let m = &self.footprint.memory;
        let TooLarge { lanes, context, .. } = self;
        write!(
            f,
            "{} may be used and {} are needed: {} for weights, {} for the draft, {} for keys and values \
             ({lanes} lanes, {context} tokens), {} for recurrent state, {} for working buffers, {} for the \
             prefix cache",
            mb(self.budget),
            mb(self.footprint.total() + self.cache),
            mb(m.weights),
            mb(m.draft),
            mb(m.kv),
            mb(m.state),
            mb(self.footprint.working),
            mb(self.cache),
        )
    }
}

/// Left free: for what the system and the driver take while the engine runs.
const MARGIN: (u64, u64) = (256 << 20, 32);
/// The smallest context that the plan offers by itself.
const LEAST_CONTEXT: usize = 512;
/// Pages of its own that a checkpoint has, as a rule.
const PAGES_PER_SNAPSHOT: u64 = 16;
/// The most that the prefix cache takes by itself: this many bytes, or this many checkpoints.
const MOST_CACHE: (u64, u64) = (1 << 30, 64);

/// Finds sizes that fit. `measure` says what an engine with some options would take.
///
/// # Errors
/// Nothing fits, or `measure` failed.
pub fn plan<E: From<TooLarge>>(
    base: EngineOptions,
    wishes: &Wishes,
    room: &Room,
    measure: &mut dyn FnMut(&EngineOptions) -> Result<Footprint, E>,
) -> Result<Plan, E> {
    let margin = MARGIN.0.max(room.free / MARGIN.1).min(room.free / 4);
    let budget = (room.free - margin).min(wishes.max_memory.unwrap_or(u64::MAX));
    let context = wishes.context.unwrap_or(room.default_context.min(room.longest_context));
    let lanes = wishes.lanes.unwrap_or(room.default_lanes).max(1);
    let mut options = EngineOptions { context, slots: lanes, snapshots: 0, ..base };
    let asked_cache = wishes.cache.unwrap_or(0);
    let (mut footprint, full) = loop {
        // Room for one whole lane is the least; the others share what else there is.
        let footprint = measure(&EngineOptions { pages: Some(0), ..options })?;
        let own = (options.context + footprint.block).div_ceil(PAGE_TOKENS) as u64;
        if footprint.total() + asked_cache <= budget {
            break (footprint, own * options.slots as u64);
        }
        if wishes.lanes.is_none() && options.slots > 1 {
            options.slots /= 2;
        } else if wishes.context.is_none() && options.context > LEAST_CONTEXT {
            options.context = (options.context / 2).max(LEAST_CONTEXT);
        } else {
            let (lanes, context) = (options.slots, options.context);
            let cache = asked_cache;
            return Err(TooLarge { footprint, cache, lanes, context, budget }.into());
        }
    };
    let own = full / options.slots as u64;
    let rest = budget - footprint.total() - asked_cache;
    let more = (full - own).min(rest.checked_div(footprint.page).unwrap_or(full));
    let rest = rest - more * footprint.page;
    let each = footprint.snapshot + PAGES_PER_SNAPSHOT * footprint.page;
    let by_itself = (rest / 2).min(MOST_CACHE.0.max(MOST_CACHE.1 * each));
    let cache = wishes.cache.unwrap_or(by_itself);
    let one = u64::from(cache > 0 && cache >= footprint.snapshot + footprint.page);
    let snapshots = cache.checked_div(each).unwrap_or(0).max(one);
    let spare = if snapshots == 0 {
        0
    } else {
        (cache - snapshots * footprint.snapshot).checked_div(footprint.page).unwrap_or(0)
    };
    options.pages = Some((own + more + spare) as usize);
    options.snapshots = snapshots as usize;
    footprint.memory.kv += (more + spare) * footprint.page;
    footprint.memory.snapshots += snapshots * footprint.snapshot;
    let cache = snapshots * footprint.snapshot + spare * footprint.page;
    Ok(Plan { options, footprint, cache, budget })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    /// A model of 1 GB, 4 MB a lane, 1 MB a page, 2 MB a kept state.
    fn measure(options: &EngineOptions) -> Result<Footprint, TooLarge> {
        let own = (options.context + 8).div_ceil(PAGE_TOKENS);
        let pages = options.pages.unwrap_or(own * options.slots).max(own) as u64;
        let memory = MemoryBytes {
            weights: 1024 * MB,
            kv: pages * MB,
            state: 4 * options.slots as u64 * MB,
            snapshots: 2 * options.snapshots as u64 * MB,
            ..MemoryBytes::default()
        };
        let (working, page, snapshot, block) = (16 * MB, MB, 2 * MB, 8);
        Ok(Footprint { memory, working, page, snapshot, block })
    }

    fn room(free: u64) -> Room {
        Room { free, longest_context: 100_000, default_context: 8192, default_lanes: 4 }
    }

    fn planned(wishes: Wishes, free: u64) -> Result<Plan, TooLarge> {
        let plan = plan(EngineOptions::default(), &wishes, &room(free), &mut measure)?;
        // What is promised is what is allocated, and fits.
        assert_eq!(measure(&plan.options)?, plan.footprint);
        assert!(plan.footprint.total() <= plan.budget, "{plan:?}");
        assert!(plan.budget <= free);
        Ok(plan)
    }

    #[test]
    fn sizes_follow_from_what_is_free() {
        let plan = planned(Wishes::default(), 8192 * MB).expect("room");
        let EngineOptions { context, slots, pages, snapshots, .. } = plan.options;
        assert_eq!((context, slots), (8192, 4));
        assert!(
            pages.is_some_and(|pages| pages > 4 * 129) && snapshots == 64,
            "{pages:?} {snapshots}"
        );
        assert!(plan.cache < 2048 * MB);
        // Less: lanes share pages, then there are fewer of them, then shorter ones.
        let plan = planned(Wishes::default(), 1700 * MB).expect("room");
        assert_eq!((plan.options.slots, plan.options.context), (4, 8192));
        assert!(plan.options.pages.is_some_and(|pages| (129..516).contains(&pages)));
        let plan = planned(Wishes::default(), 1440 * MB).expect("room");
        assert_eq!((plan.options.slots, plan.options.context), (2, 8192));
        let plan = planned(Wishes::default(), 1430 * MB).expect("room");
        assert_eq!((plan.options.slots, plan.options.context), (1, 8192));
        let plan = planned(Wishes::default(), 1360 * MB).expect("room");
        assert_eq!((plan.options.slots, plan.options.context), (1, 2048));
    }

    #[test]
    fn what_was_asked_for_is_kept_or_refused_with_the_numbers() {
        let all = Wishes {
            context: Some(16_384),
            lanes: Some(2),
            cache: Some(100 * MB),
            max_memory: Some(2048 * MB),
        };
        let plan = planned(all, 8192 * MB).expect("room");
        assert_eq!((plan.options.context, plan.options.slots, plan.budget), (16_384, 2, 2048 * MB));
        assert!(plan.cache <= 100 * MB && plan.cache > 80 * MB, "{}", plan.cache);
        let none = planned(Wishes { cache: Some(0), ..all }, 8192 * MB).expect("room");
        assert_eq!((none.options.snapshots, none.cache), (0, 0));
        let error =
            planned(Wishes { context: Some(80_000), ..all }, 8192 * MB).expect_err("too much");
        let text = error.to_string();
        for part in
            ["2148 MB may be used", "2 lanes, 80000 tokens", "prefix cache", "1074 MB for weights"]
        {
            assert!(text.contains(part), "{text}");
        }
        assert!(planned(Wishes::default(), 1024 * MB).is_err(), "not even the weights");
        assert!(planned(Wishes::default(), 0).is_err());
    }

    #[test]
    fn whatever_is_free_the_plan_fits_or_says_no() {
        for free in (0..400).map(|i| i * 13 * MB) {
            if let Ok(plan) = planned(Wishes::default(), free) {
                assert!(plan.options.context >= LEAST_CONTEXT);
            }
        }
    }
}
