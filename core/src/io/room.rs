//! What helps a save to make its files: room on a full disk, and files to write over.

use std::sync::Arc;

use super::File;
use crate::Result;

/// What helps a save to make its files.
pub trait Room {
    /// The disk is full: makes room, and gives whether there may be some now.
    fn make(&mut self) -> bool;

    /// A file that is no longer needed where it was, to be written over: it stands under that path below the step's directory now, with so many bytes preallocated at
    /// least. `None`: there is none, and a new one is to be made.
    fn take_over(&mut self, _path: &str, _len_hint: u64) -> Option<Arc<dyn File>> {
        None
    }
}

/// No help.
pub struct NoRoom;

impl Room for NoRoom {
    fn make(&mut self) -> bool {
        false
    }
}

/// Makes something on a disk. Where that is full, `make_room` is asked (it says whether there may be room now), and it is made once more. For the *making* of
/// directories and files, and for nothing else: a write or a sync that failed is never tried again.
pub fn with_room<T>(make_room: &mut dyn FnMut() -> bool, mut make: impl FnMut() -> Result<T>) -> Result<T> {
    match make() {
        Err(error) if error.is_full() => {
            tracing::info!(%error, "the disk is full: making room and trying once more");
            if make_room() { make() } else { Err(error) }
        }
        made => made,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    /// How often room was made, and how often the thing, if it fails with that errno so many times.
    fn tried(errno: i32, failures: u32, may_help: bool) -> (u32, u32, Result<u32>) {
        let (mut rooms, mut makes) = (0, 0);
        let mut make_room = || {
            rooms += 1;
            may_help
        };
        let made = with_room(&mut make_room, || {
            makes += 1;
            if makes > failures {
                return Ok(makes);
            }
            Err(Error::io("create", "/x", std::io::Error::from_raw_os_error(errno)))
        });
        (rooms, makes, made)
    }

    #[test]
    fn what_finds_no_room_is_made_once_more_and_only_once() {
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
