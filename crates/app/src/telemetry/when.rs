//! Points in time as people write them.

use std::time::Duration;

use super::timeline::micros;

/// Microseconds since 1970 of `15m`, `2h` or `7d` before now, of `2026-11-30T08:00Z`, or of such a
/// number itself.
///
/// # Errors
/// The text is none of these, in words.
pub fn parse(text: &str, now_us: u64) -> Result<u64, String> {
    if let Ok(us) = text.parse::<u64>() {
        return Ok(us);
    }
    if let Some(ago) = duration(text) {
        return Ok(now_us.saturating_sub(micros(ago)));
    }
    let at = text.parse::<jiff::Timestamp>().map(|at| at.as_microsecond());
    at.ok().and_then(|us| u64::try_from(us).ok()).ok_or_else(|| {
        format!("{text:?} is no time; write 15m, 2h or 7d for so long ago, or 2026-11-30T08:00:00Z")
    })
}

/// A number with one of the units s, m, h, d.
pub fn duration(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        _ => return None,
    };
    let count = number.parse::<u64>().ok().filter(|_| !number.starts_with('+'))?;
    count.checked_mul(seconds).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let now = 1_000_000_000_000;
        assert_eq!(parse("5s", now), Ok(now - 5_000_000));
        assert_eq!(parse("2h", now), Ok(now - 7_200_000_000));
        assert_eq!(parse("99999999d", now), Ok(0));
        assert_eq!(parse("1700000000000000", now), Ok(1_700_000_000_000_000));
        assert_eq!(parse("1970-01-01T00:00:01Z", now), Ok(1_000_000));
        for bad in
            ["", "h", "-1h", "+1h", "1w", "1.5h", "yesterday", "é", "1é", "99999999999999999999d"]
        {
            assert!(parse(bad, now).unwrap_err().contains("no time"), "{bad}");
        }
    }
}
