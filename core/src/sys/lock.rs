//! Open-file-description locks. They belong to the open file, not to the process. So two holders in
//! one process exclude each other. Closing another descriptor of the same file does not release
//! them, unlike POSIX record locks.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::Descriptor;
use crate::Result;

fn set(fd: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<()> {
    let request = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    loop {
        // SAFETY: F_OFD_SETLK reads one `flock`, which outlives the call; it never blocks.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// A held lock. Dropping it unlocks the file before it closes it: an escaped copy of the descriptor
/// (in a child of a bare `clone`) then holds no lock.
#[derive(Debug)]
pub struct HeldLock(Descriptor);

impl HeldLock {
    /// Locks the whole file behind `fd`, shared or exclusive. An exclusive lock needs a descriptor
    /// that is open for writing. `None` if somebody else holds the lock.
    pub fn take(fd: Descriptor, exclusive: bool) -> io::Result<Option<Self>> {
        let kind = if exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
        let open = fd.get().map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
        match set(open, kind) {
            Ok(()) => Ok(Some(Self(fd))),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the descriptor of the locked file.
    pub fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.get()
    }
}

impl Drop for HeldLock {
    fn drop(&mut self) {
        if let Ok(fd) = self.0.get() {
            let _ = set(fd, libc::F_UNLCK);
        }
    }
}
