//! Leases: what a reader holds so that nobody deletes or thins the step under it.
//!
//! A lease is a shared lock on the step's `.lease`, opened read-only, taken below the *opened
//! directory*. After locking, the reader looks whether that directory is still the one under the
//! step's name: if it was retired meanwhile, the lock is on trash. It dies with its process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stepwell_core::io::{Dir, Lock, LockKind};

use crate::directory_layout::{LEASE, MANIFEST};
use crate::error::{Error, Result};

/// How often a step that is replaced while it is opened is looked up again.
const LEASE_TRIES: usize = 8;
/// Between two looks at a lease that someone holds exclusively while the step stands: a thinning,
/// which takes milliseconds.
const LEASE_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How often a temporary is made that others take for a dead one's.
const TEMPORARY_TRIES: usize = 100;

/// A held lease. Dropping it gives the step free.
pub struct Lease {
    lock: Option<Box<dyn Lock>>,
}

impl Lease {
    /// True if it protects: a file system without locks, or a step whose `.lease` is missing, gives
    /// one that does not.
    pub fn protects(&self) -> bool {
        self.lock.is_some()
    }
}

/// Opens `parent/name` and leases it. `None`: no such directory.
pub fn acquire(parent: &dyn Dir, name: &str, timeout: Duration) -> Result<Option<(Arc<dyn Dir>, Lease)>> {
    let start = Instant::now();
    'looks: for _ in 0..LEASE_TRIES {
        let dir = match parent.open_dir(name) {
            Ok(dir) => dir,
            Err(error) if error.is_gone() => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut refused = None;
        let lock = loop {
            match dir.try_lock(LEASE, LockKind::Shared, false) {
                Ok(Some(lock)) => break Some(lock),
                // Retired meanwhile: who has locked it there keeps it for as long as they like.
                Ok(None) if parent.stat(name)?.map(|stat| stat.id) != Some(dir.id()?) => continue 'looks,
                Ok(None) if start.elapsed() < timeout => std::thread::sleep(LEASE_POLL_INTERVAL),
                Ok(None) => {
                    return Err(Error::Timeout {
                        waited_for: format!(
                            "the lease of {}, which is being thinned or removed",
                            dir.path().display()
                        ),
                        waited: start.elapsed(),
                    });
                }
                Err(error) if error.is_not_found() || error.is_without_locks() => {
                    refused = Some(error);
                    break None;
                }
                Err(error) => return Err(error.into()),
            }
        };
        match parent.stat(name)? {
            Some(stat) if stat.id == dir.id()? => {
                // An invalid step has no lease either. Opening it reports the error.
                if let Some(error) = refused
                    && dir.stat(MANIFEST)?.is_some()
                {
                    tracing::warn!(
                        path = %dir.path().display(), %error,
                        "this step cannot be leased; it may be removed while it is read"
                    );
                }
                return Ok(Some((dir, Lease { lock })));
            }
            // Replaced or retired between opening and locking: look again.
            Some(_) => {}
            None => return Ok(None),
        }
    }
    Err(Error::StepGone { path: parent.path().join(name), what: "the step".to_owned() })
}

/// A temporary, and what says that its owner lives.
pub struct OwnedTemporary {
    /// The directory.
    pub dir: Arc<dyn Dir>,
    /// Its held lease; `None` where there are no locks.
    pub life: Option<Box<dyn Lock>>,
}

/// Creates a temporary whose held lease shows that its owner lives, for temporaries outside of the
/// root's lock. Without locks the lease shows nothing. `shared`: another rank may have created it.
pub fn own_temporary(parent: &dyn Dir, name: &str, shared: bool) -> stepwell_core::Result<OwnedTemporary> {
    let mut tries = TEMPORARY_TRIES;
    loop {
        tries -= 1;
        let dir = match parent.create_dir(name) {
            // Another rank created it; or this call did, and a process that took it for a dead
            // one's has not removed it yet.
            Err(error) if error.already_exists() && (shared || tries < TEMPORARY_TRIES - 1) => {
                parent.open_dir(name)
            }
            made => made,
        };
        let dir = match dir {
            Err(error) if error.is_not_found() && tries > 0 => continue,
            dir => dir?,
        };
        // A shared lock, so that readers need not wait right after the rename.
        let lock = match dir.try_lock(LEASE, LockKind::Shared, true) {
            Ok(lock) => lock,
            Err(error) if error.is_without_locks() => return Ok(OwnedTemporary { dir, life: None }),
            // Taken for a dead one's in the moment before it was locked.
            Err(error) if error.is_not_found() && tries > 0 => continue,
            Err(error) => {
                // A retry would report that it exists.
                if !shared && let Err(error) = parent.remove_dir(name) {
                    tracing::warn!(%error, "a temporary that could not be locked could not be removed either");
                }
                return Err(error);
            }
        };
        let stands = parent.stat(name)?.map(|stat| stat.id) == Some(dir.id()?);
        match lock {
            Some(lock) if stands => return Ok(OwnedTemporary { dir, life: Some(lock) }),
            _ if tries > 0 => std::thread::sleep(LEASE_POLL_INTERVAL),
            _ => {
                let why = std::io::Error::other("another process removes it each time");
                return Err(stepwell_core::Error::io("lock", dir.path(), why));
            }
        }
    }
}
