//! Saves that give the same bytes on every run: with a clock that stands still, and identities that
//! are counted.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stepwell_core::io::Disk;
use stepwell_core::io::simulated::mix;
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::{
    Clock, Environment, Error, Exists, Manager, Options, Outcome, Retention, Rng, SaveRequest,
};

use super::{look, states};

/// Wall-clock time stands still; deadlines are real.
struct Stopped(Instant);

impl Clock for Stopped {
    fn unix_ns(&self) -> i64 {
        1_700_000_000_000_000_000
    }

    fn monotonic(&self) -> Duration {
        self.0.elapsed()
    }
}

/// The same ids on every run.
#[derive(Default)]
struct Counted(AtomicU64);

impl Rng for Counted {
    fn next_u128(&self) -> u128 {
        let drawn = self.0.fetch_add(1, Ordering::SeqCst);
        (u128::from(mix(drawn, 1)) << 64) | u128::from(mix(drawn, 2))
    }
}

fn environment(disk: Arc<dyn Disk>) -> Environment {
    Environment {
        disk,
        clock: Arc::new(Stopped(Instant::now())),
        rng: Arc::new(Counted::default()),
        coordinator: Arc::new(SingleProcess),
        staging: None,
    }
}

/// Small blocks, and the newest two steps.
pub fn options() -> Options {
    Options { retention: Retention::KeepLatest { n: 2 }, ..look::options() }
}

/// Three steps with metrics, under retention; the last one is replaced. The first error ends it.
pub fn save(root: &Path, disk: Arc<dyn Disk>, options: &Options) -> Result<(), Arc<Error>> {
    let manager = Manager::open(root, options.clone(), environment(disk))?;
    for (step, exists) in [(1, Exists::Error), (2, Exists::Error), (3, Exists::Error), (3, Exists::Replace)] {
        let metrics =
            BTreeMap::from([("loss".to_owned(), f64::from(step as u32)), ("worst".to_owned(), f64::NAN)]);
        let custom_metadata = serde_json::json!({"tokens": step});
        let request =
            SaveRequest { metrics, custom_metadata, exists, ..SaveRequest::new(step, states::state(step)) };
        match manager.save(request)?.wait(Some(Duration::from_secs(60)))? {
            Some(Outcome::NotCommitted(error) | Outcome::DurabilityUncertain(error)) => return Err(error),
            Some(Outcome::Committed) | None => {}
        }
    }
    Ok(manager.close(None)?)
}
