//! Leases: what a reader holds so that nobody deletes or thins the step under it.
//!
//! A lease is a shared lock on the step's `.lease`, opened read-only, taken below the *opened directory*. After locking, the reader looks whether that
//! directory is still the one under the step's name: if it was retired meanwhile, the lock is on trash. It dies with its process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stepwell_core::io::{Dir, Lock, LockKind};

use crate::directory_layout::LEASE;
use crate::error::{Error, Result};

/// How often a step that is replaced while it is opened is looked up again.
const TRIES: usize = 8;
/// Between two looks at a lease that someone holds exclusively (a thinning, which takes milliseconds).
const PAUSE: Duration = Duration::from_millis(5);

/// A held lease. Dropping it gives the step free.
pub struct Lease {
    lock: Option<Box<dyn Lock>>,
}

impl Lease {
    /// Whether it protects: a file system without locks, or a step whose `.lease` is missing, gives one that does not.
    pub fn protects(&self) -> bool {
        self.lock.is_some()
    }
}

/// Opens `parent/name` and leases it. `None`: no such directory.
pub fn acquire(parent: &dyn Dir, name: &str, patience: Duration) -> Result<Option<(Arc<dyn Dir>, Lease)>> {
    let start = Instant::now();
    for _ in 0..TRIES {
        let dir = match parent.open_dir(name) {
            Ok(dir) => dir,
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let lock = loop {
            match dir.try_lock(LEASE, LockKind::Shared, false) {
                Ok(Some(lock)) => break Some(lock),
                Ok(None) if start.elapsed() < patience => std::thread::sleep(PAUSE),
                Ok(None) => {
                    return Err(Error::Timeout {
                        waited_for: format!(
                            "the lease of {}, which is being thinned or removed",
                            dir.path().display()
                        ),
                        waited: start.elapsed(),
                    });
                }
                Err(error) if error.is_not_found() || is_without_locks(&error) => {
                    tracing::warn!(
                        path = %dir.path().display(), %error,
                        "this step cannot be leased; it may be removed while it is read"
                    );
                    break None;
                }
                Err(error) => return Err(error.into()),
            }
        };
        match parent.stat(name)? {
            Some(stat) if stat.id == dir.id()? => return Ok(Some((dir, Lease { lock }))),
            // Replaced or retired between opening and locking: look again.
            Some(_) => {}
            None => return Ok(None),
        }
    }
    Err(Error::StepGone { path: parent.path().join(name), what: "the step".to_owned() })
}

/// Whether the answer to a lock means that this file system has none.
pub(crate) fn is_without_locks(error: &stepwell_core::Error) -> bool {
    const ENOLCK: i32 = 37;
    const EOPNOTSUPP: i32 = 95;
    const ENOSYS: i32 = 38;
    matches!(error.errno(), Some(ENOLCK | EOPNOTSUPP | ENOSYS))
}
