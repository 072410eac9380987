//! Pauses of a conversion for the saves of a manager, which go first.

use std::sync::Arc;
use std::time::Duration;

use crate::environment::{Clock, SystemClock};

/// Poll interval of work that waits for saves to end.
const SAVE_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Pauses for at most half of the time: a run that saves all the time gets its exports, too.
pub struct SavePauses {
    clock: Arc<dyn Clock>,
    begun: Duration,
    paused: Duration,
}

impl Default for SavePauses {
    /// Begins work that pauses.
    fn default() -> Self {
        Self::new(Arc::new(SystemClock::default()))
    }
}

impl SavePauses {
    fn new(clock: Arc<dyn Clock>) -> Self {
        Self { begun: clock.monotonic(), paused: Duration::ZERO, clock }
    }

    /// Waits while `goes_on` is true and pauses are less than half of the time.
    pub fn wait(&mut self, mut goes_on: impl FnMut() -> bool) {
        let mut now = self.clock.monotonic();
        while self.paused < now.saturating_sub(self.begun) / 2 && goes_on() {
            self.clock.pause(SAVE_POLL_INTERVAL);
            let then = std::mem::replace(&mut now, self.clock.monotonic());
            self.paused += now.saturating_sub(then);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    const WORK: Duration = Duration::from_secs(2);

    /// A clock that only pauses and work move.
    #[derive(Default)]
    struct ManualClock(Mutex<Duration>);

    impl Clock for ManualClock {
        fn unix_ns(&self) -> i64 {
            0
        }

        fn monotonic(&self) -> Duration {
            *self.0.lock().unwrap()
        }

        fn pause(&self, how_long: Duration) {
            // A busy machine takes longer.
            *self.0.lock().unwrap() += 3 * how_long;
        }
    }

    /// Returns the time of all pauses beside some work.
    fn paused(is_saving: impl Fn() -> bool) -> Duration {
        let clock = Arc::new(ManualClock::default());
        let mut pauses = SavePauses::new(Arc::<ManualClock>::clone(&clock));
        for _ in 0..100 {
            *clock.0.lock().unwrap() += WORK / 100;
            pauses.wait(&is_saving);
        }
        clock.monotonic().checked_sub(WORK).unwrap()
    }

    #[test]
    fn pauses_for_saves_take_half_of_the_time() {
        let all = paused(|| true);
        let most = WORK + 3 * SAVE_POLL_INTERVAL;
        assert!(all >= WORK && all <= most, "{all:?}");
        assert_eq!(paused(|| false), Duration::ZERO);
    }
}
