//! Space for a save: free space on a full disk, and files to write over.

use std::sync::Arc;

use super::File;
use crate::Result;

/// Helps a save to create its files.
pub trait SpaceReclaimer {
    /// Frees space on a full disk. Returns whether space may be available now.
    fn reclaim(&mut self) -> bool;

    /// Moves an unused file to that path below the step's directory, to be written over, with at
    /// least `len_hint` bytes preallocated. `None`: the caller creates a new file.
    fn take_over(&mut self, _path: &str, _len_hint: u64) -> Option<Arc<dyn File>> {
        None
    }
}

/// No help.
pub struct NoReclaimer;

impl SpaceReclaimer for NoReclaimer {
    fn reclaim(&mut self) -> bool {
        false
    }
}

/// Creates something on a disk. On a full disk it calls `reclaim_space` and tries once more. Only
/// for *creating* directories and files: a failed write or sync is never retried.
pub fn retry_if_full<T>(
    reclaim_space: &mut dyn FnMut() -> bool,
    mut make: impl FnMut() -> Result<T>,
) -> Result<T> {
    match make() {
        Err(error) if error.is_full() => {
            tracing::info!(%error, "disk full: freeing space and trying once more");
            if reclaim_space() { make() } else { Err(error) }
        }
        made => made,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    /// Runs `retry_if_full` on something that fails so often. Returns the number of calls of each.
    fn tried(errno: i32, failures: u32, may_help: bool) -> (u32, u32, Result<u32>) {
        let (mut reclaims, mut makes) = (0, 0);
        let mut reclaim_space = || {
            reclaims += 1;
            may_help
        };
        let made = retry_if_full(&mut reclaim_space, || {
            makes += 1;
            if makes > failures {
                return Ok(makes);
            }
            Err(Error::io("create", "/x", std::io::Error::from_raw_os_error(errno)))
        });
        (reclaims, makes, made)
    }

    #[test]
    fn creating_on_a_full_disk_is_retried_once() {
        assert!(matches!(tried(libc::ENOSPC, 0, true), (0, 1, Ok(_))));
        for errno in [libc::ENOSPC, libc::EDQUOT] {
            assert!(matches!(tried(errno, 1, true), (1, 2, Ok(_))));
            assert!(matches!(tried(errno, 2, true), (1, 2, Err(error)) if error.is_full()));
            assert!(matches!(tried(errno, 1, false), (1, 1, Err(error)) if error.is_full()));
        }
    }

    #[test]
    fn any_other_failure_is_final() {
        assert!(matches!(tried(libc::EIO, 1, true), (0, 1, Err(error)) if error.errno() == Some(libc::EIO)));
    }
}
