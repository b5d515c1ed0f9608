//! Names for replies, calls and requests.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A name that nothing else has: the prefix and 24 hex digits. Not secret.
pub fn fresh(prefix: &str) -> String {
    // The standard library keys each hasher apart, from the system's randomness.
    let word = || RandomState::new().build_hasher().finish();
    format!("{prefix}{:016x}{:08x}", word(), word() as u32)
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}
