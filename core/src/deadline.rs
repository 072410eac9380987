//! Deadlines from timeouts of any size.

use std::time::{Duration, Instant};

/// Longer waits than this one (34 years) are as long as it: an instant can be named for it on every
/// system.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// The instant at which a wait that begins now has lasted for `timeout`. One that is too long for
/// the clock has no end, rather than being over at once.
pub fn deadline_after(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout.min(FOREVER)).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_timeout_there_is_is_not_over_at_once() {
        assert!(deadline_after(Duration::MAX) > Instant::now() + Duration::from_secs(1_000_000_000));
        assert!(deadline_after(Duration::ZERO) <= Instant::now());
    }
}
