//! Deadlines from timeouts of any size.

use std::time::{Duration, Instant};

/// The longest wait (34 years). Longer timeouts are cut to it, because every system can represent
/// such an instant.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// Returns the instant at which a wait that begins now has lasted for `timeout`. A timeout that is
/// too long for the clock never ends.
pub fn deadline_after(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout.min(FOREVER)).unwrap_or(now)
}

/// The deadline of a wait that continues as long as there is progress. `T` is a value that changes
/// with all progress.
pub struct StallTimer<T> {
    limit: Duration,
    deadline: Instant,
    seen: Option<T>,
}

impl<T: PartialEq> StallTimer<T> {
    /// Returns a timer that starts now, and ends after `limit` without progress.
    pub fn new(limit: Duration) -> Self {
        Self { limit, deadline: deadline_after(limit), seen: None }
    }

    /// Returns the time that is left. It starts again if `progress` differs from the last call's.
    pub fn left(&mut self, progress: T) -> Duration {
        if self.seen.as_ref() != Some(&progress) {
            self.seen = Some(progress);
            self.deadline = deadline_after(self.limit);
        }
        self.deadline.saturating_duration_since(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_timer_ends_only_without_progress() {
        let mut timer = StallTimer::new(Duration::from_millis(40));
        let begun = Instant::now();
        for step in 0..6 {
            assert!(!timer.left(step).is_zero());
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(begun.elapsed() >= Duration::from_millis(60));
        while !timer.left(5).is_zero() {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(begun.elapsed() >= Duration::from_millis(90));
    }

    #[test]
    fn the_longest_timeout_there_is_is_not_over_at_once() {
        assert!(deadline_after(Duration::MAX) > Instant::now() + Duration::from_secs(1_000_000_000));
        assert!(deadline_after(Duration::ZERO) <= Instant::now());
    }
}
