//! The number of parts and ranges that are on their way at once.
//!
//! A store that answers 429 or 503 wants fewer. Each such answer halves the number, and then each
//! round of answers adds one, as TCP does. Without this, most parts would be sent several
//! times: a store reads a part before it refuses it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Semaphore, SemaphorePermit};

/// The most requests at once.
const MOST: usize = 64;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Pace {
    permits: Semaphore,
    state: Mutex<PaceState>,
}

#[derive(Debug)]
struct PaceState {
    /// The requests that may be on their way.
    limit: usize,
    /// Permits that are still out, and above the limit.
    excess: usize,
    /// The answers since the limit has changed.
    answers: usize,
    slowed_at: Option<Instant>,
}

impl Default for Pace {
    fn default() -> Self {
        let state = PaceState { limit: MOST, excess: 0, answers: 0, slowed_at: None };
        Self { permits: Semaphore::new(MOST), state: Mutex::new(state) }
    }
}

impl Pace {
    /// Waits until one more request may begin. `None` never comes: the permits are never closed.
    pub(super) async fn permit(&self) -> Option<SemaphorePermit<'_>> {
        self.permits.acquire().await.ok()
    }

    /// Records the answer to a request that began then. `is_busy`: `None` if there was none that
    /// says it.
    pub(super) fn answered(&self, permit: SemaphorePermit<'_>, began: Instant, is_busy: Option<bool>) {
        let mut state = self.state();
        // Requests of the same round are refused together.
        if is_busy == Some(true) && state.slowed_at.is_none_or(|slowed| slowed <= began) {
            let running = (state.limit + state.excess).saturating_sub(self.permits.available_permits());
            let limit = (state.limit.min(running) / 2).max(1);
            state.excess += state.limit - limit;
            (state.limit, state.answers, state.slowed_at) = (limit, 0, Some(Instant::now()));
            let free = self.permits.forget_permits(state.excess);
            state.excess -= free;
        } else if is_busy == Some(false) && state.limit < MOST {
            state.answers += 1;
            if state.answers >= state.limit {
                (state.limit, state.answers) = (state.limit + 1, 0);
                match state.excess.checked_sub(1) {
                    Some(less) => state.excess = less,
                    None => self.permits.add_permits(1),
                }
            }
        }
        if let Some(less) = state.excess.checked_sub(1) {
            state.excess = less;
            permit.forget();
        }
    }

    fn state(&self) -> MutexGuard<'_, PaceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(pace: &Pace, number: usize) -> Vec<SemaphorePermit<'_>> {
        (0..number).map_while(|_| pace.permits.try_acquire().ok()).collect()
    }

    #[test]
    fn a_busy_store_gets_half_of_the_requests() {
        let pace = Pace::default();
        let began = Instant::now();
        for permit in taken(&pace, MOST) {
            pace.answered(permit, began, Some(true));
        }
        assert_eq!(taken(&pace, MOST).len(), MOST / 2, "one round is refused together");
        for _ in 0..10 {
            let permit = taken(&pace, 1).remove(0);
            pace.answered(permit, Instant::now(), Some(true));
        }
        assert_eq!(taken(&pace, MOST).len(), 1, "one may always begin");
    }

    #[test]
    fn each_round_of_answers_adds_a_request() {
        let pace = Pace::default();
        let began = Instant::now();
        for permit in taken(&pace, MOST) {
            pace.answered(permit, began, Some(true));
        }
        for limit in MOST / 2..MOST + 5 {
            let permits = taken(&pace, MOST + 1);
            assert_eq!(permits.len(), limit.min(MOST));
            for permit in permits {
                pace.answered(permit, Instant::now(), Some(false));
            }
        }
    }

    #[test]
    fn permits_that_are_out_count() {
        let pace = Pace::default();
        let mut out = taken(&pace, MOST);
        pace.answered(out.remove(0), Instant::now(), Some(true));
        for left in (MOST / 2..MOST - 1).rev() {
            assert_eq!(taken(&pace, 1).len(), 0, "{left} are out");
            pace.answered(out.remove(0), Instant::now(), Some(false));
        }
        drop(out);
        assert!(taken(&pace, MOST).len() >= MOST / 2);
    }
}
