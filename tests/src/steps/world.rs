//! The injected world: a clock that ticks by itself, and randomness that repeats.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stepwell_core::io::simulated::{SimDisk, mix};
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::{Clock, Environment, Rng};

/// Wall-clock time goes on by a second whenever someone looks; deadlines are real, and pauses take
/// no time.
struct Ticking {
    unix_ns: AtomicI64,
    start: Instant,
    paused_ns: AtomicU64,
}

impl Clock for Ticking {
    fn unix_ns(&self) -> i64 {
        self.unix_ns.fetch_add(1_000_000_000, Ordering::Relaxed)
    }

    fn monotonic(&self) -> Duration {
        self.start.elapsed() + Duration::from_nanos(self.paused_ns.load(Ordering::Relaxed))
    }

    fn pause(&self, how_long: Duration) {
        self.paused_ns.fetch_add(how_long.as_nanos() as u64, Ordering::Relaxed);
    }
}

struct Seeded {
    seed: u64,
    drawn: AtomicU64,
}

impl Rng for Seeded {
    fn next_u128(&self) -> u128 {
        let drawn = self.drawn.fetch_add(1, Ordering::Relaxed);
        let high = mix(self.seed, 2 * drawn);
        (u128::from(high) << 64) | u128::from(mix(self.seed, 2 * drawn + 1))
    }
}

/// The world of one process. Two processes on one disk need two seeds: identities are never drawn
/// twice.
pub fn environment(disk: &SimDisk, seed: u64) -> Environment {
    Environment {
        disk: Arc::new(disk.clone()),
        clock: Arc::new(Ticking {
            unix_ns: AtomicI64::new(1_700_000_000_000_000_000),
            start: Instant::now(),
            paused_ns: AtomicU64::new(0),
        }),
        rng: Arc::new(Seeded { seed: mix(seed, 0x5eed), drawn: AtomicU64::new(0) }),
        coordinator: Arc::new(SingleProcess),
        staging: None,
    }
}
