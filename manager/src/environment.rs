//! The environment of a manager: disk, clock, randomness, other ranks, staging memory. It is
//! injected, so that the product and the simulators run the same code.

use std::hash::{BuildHasher, Hasher};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use stepwell_core::io::{Disk, Engine, open_disk};
use stepwell_core::staging::StagingPool;

use crate::coordination::{Coordinator, SingleProcess};
use crate::error::Result;

/// A clock. Steps are ordered by number, never by time. Time is for records, for policies in
/// seconds, and for deadlines.
pub trait Clock: Send + Sync {
    /// Returns the wall-clock time in nanoseconds since 1970.
    fn unix_ns(&self) -> i64;
    /// Returns a time that never goes back.
    fn monotonic(&self) -> Duration;
    /// Waits for that time.
    fn pause(&self, how_long: Duration) {
        std::thread::sleep(how_long);
    }
}

/// A source of random numbers for identities, never for secrets.
pub trait Rng: Send + Sync {
    /// Returns a unique number.
    fn next_u128(&self) -> u128;
}

/// The environment of a manager.
#[derive(Clone)]
pub struct Environment {
    /// Files and directories.
    pub disk: Arc<dyn Disk>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Identities.
    pub rng: Arc<dyn Rng>,
    /// The other ranks.
    pub coordinator: Arc<dyn Coordinator>,
    /// The staging memory. `None`: that of the process, which all managers share.
    pub staging: Option<Arc<StagingPool>>,
}

impl Environment {
    /// The environment of one process on a real disk, with an engine for the directory, or for its
    /// nearest existing ancestor.
    pub fn real(path: &Path, engine: Engine) -> Result<Self> {
        Ok(Self::single_process(open_disk(path, engine)?))
    }

    /// The environment of one process with the system's clock and randomness, over a given disk.
    pub fn single_process(disk: Arc<dyn Disk>) -> Self {
        Self {
            disk,
            clock: Arc::new(SystemClock::default()),
            rng: Arc::new(SystemRng),
            coordinator: Arc::new(SingleProcess),
            staging: None,
        }
    }

    /// Returns the staging memory.
    pub(crate) fn pool(&self) -> Arc<StagingPool> {
        self.staging.clone().unwrap_or_else(StagingPool::shared)
    }

    /// Returns a new identity as 32 hex digits.
    pub(crate) fn hex_id(&self) -> String {
        format!("{:032x}", self.rng.next_u128())
    }

    /// Returns the name of a new branch: the prefix and 8 hex digits.
    pub(crate) fn new_branch(&self, prefix: &str) -> String {
        let unique = self.hex_id();
        format!("{prefix}{}", unique.get(..8).unwrap_or(&unique))
    }
}

/// The system's clocks.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { start: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn unix_ns(&self) -> i64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
    }

    fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }
}

/// The kernel's random source.
#[derive(Debug, Default)]
pub struct SystemRng;

impl Rng for SystemRng {
    fn next_u128(&self) -> u128 {
        if let Ok(number) = stepwell_core::sys::random() {
            return number;
        }
        // In a sandbox without /dev, use the standard library's hash keys, which getrandom(2)
        // seeds.
        let half = || {
            let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
            hasher.write_u32(std::process::id());
            hasher.write_u128(SystemClock::default().unix_ns().unsigned_abs().into());
            u128::from(hasher.finish())
        };
        (half() << 64) | half()
    }
}
