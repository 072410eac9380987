//! Leases: a reader holds one so that no writer deletes or thins its step.
//!
//! A lease is a shared lock on the step's `.lease`, taken below the *opened directory*. After that,
//! the reader checks that the step's name still leads to that directory: otherwise the lock is on
//! trash. It ends with its process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stepwell_core::io::{Dir, Lock, LockKind};

use crate::directory_layout::{LEASE, MANIFEST};
use crate::error::{Error, Result};

/// The most tries for a step that is replaced while it is opened.
const LEASE_TRIES: usize = 8;
/// The poll interval for a lease that a thinning holds exclusively, for milliseconds.
const LEASE_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The most tries for a temporary that other processes remove as a dead writer's.
const TEMPORARY_TRIES: usize = 100;

/// A held lease. Dropping it releases the step.
pub struct Lease {
    lock: Option<Box<dyn Lock>>,
}

impl Lease {
    /// True if it protects the step. On a file system without locks, or if `.lease` is missing, it
    /// does not.
    pub fn protects(&self) -> bool {
        self.lock.is_some()
    }
}

/// Opens and leases `parent/name`. `None` if it does not exist.
pub fn acquire(parent: &dyn Dir, name: &str, timeout: Duration) -> Result<Option<(Arc<dyn Dir>, Lease)>> {
    let start = Instant::now();
    'tries: for _ in 0..LEASE_TRIES {
        let dir = match parent.open_dir(name) {
            Ok(dir) => dir,
            Err(error) if error.is_gone() => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut refused = None;
        let lock = loop {
            match dir.try_lock(LEASE, LockKind::Shared, false) {
                Ok(Some(lock)) => break Some(lock),
                // It was retired, and its lock may be held for long: look the step up again.
                Ok(None) if parent.stat(name)?.map(|stat| stat.id) != Some(dir.id()?) => continue 'tries,
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
                // An invalid step has no lease either. Its opening reports the error.
                // In a store no step has a lease, which its documentation says.
                if let Some(error) = refused.filter(|_| parent.fence().is_none())
                    && dir.stat(MANIFEST)?.is_some()
                {
                    tracing::warn!(
                        path = %dir.path().display(), %error,
                        "this step cannot be leased; it may be removed while it is read"
                    );
                }
                return Ok(Some((dir, Lease { lock })));
            }
            // It was replaced or retired between opening and locking: try again.
            Some(_) => {}
            None => return Ok(None),
        }
    }
    Err(Error::StepGone { path: parent.path().join(name), what: "the step".to_owned() })
}

/// A temporary and its lease.
pub struct OwnedTemporary {
    /// The directory.
    pub dir: Arc<dyn Dir>,
    /// Its held lease. `None` without locks.
    pub lease: Option<Box<dyn Lock>>,
}

/// Creates a temporary whose held lease shows that its owner is alive, for temporaries that no
/// root's lock protects. `shared`: another rank may have created it.
pub fn own_temporary(parent: &dyn Dir, name: &str, shared: bool) -> stepwell_core::Result<OwnedTemporary> {
    let mut tries = TEMPORARY_TRIES;
    loop {
        tries -= 1;
        let dir = match parent.create_dir(name) {
            // Another rank created it. Or an earlier try of this call did, and another process
            // takes it for a dead writer's and is about to remove it.
            Err(error) if error.already_exists() && (shared || tries < TEMPORARY_TRIES - 1) => {
                parent.open_dir(name)
            }
            made => made,
        };
        let dir = match dir {
            Err(error) if error.is_not_found() && tries > 0 => continue,
            dir => dir?,
        };
        // Take a shared lock, so that readers need not wait right after the rename.
        let lock = match dir.try_lock(LEASE, LockKind::Shared, true) {
            Ok(lock) => lock,
            Err(error) if error.is_without_locks() => return Ok(OwnedTemporary { dir, lease: None }),
            // Another process removed it before it was locked.
            Err(error) if error.is_not_found() && tries > 0 => continue,
            Err(error) => {
                // Remove it, so that a later save does not find it.
                if !shared && let Err(error) = parent.remove_dir(name) {
                    tracing::warn!(%error, "removing an unlocked temporary failed");
                }
                return Err(error);
            }
        };
        // Another process may have removed the directory, or recreated it.
        let is_same = parent.stat(name)?.map(|stat| stat.id) == Some(dir.id()?);
        match lock {
            Some(lock) if is_same => return Ok(OwnedTemporary { dir, lease: Some(lock) }),
            _ if tries > 0 => std::thread::sleep(LEASE_POLL_INTERVAL),
            _ => {
                let why = std::io::Error::other("another process removes it each time");
                return Err(stepwell_core::Error::io("lock", dir.path(), why));
            }
        }
    }
}
