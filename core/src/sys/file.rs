//! System calls on files that no safe crate wraps.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `cachestat(2)`, Linux 6.5. The number is the same on every architecture.
const SYS_CACHESTAT: libc::c_long = 451;

#[repr(C)]
struct Range {
    offset: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct CacheStat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Returns the bytes of the range that the page cache holds, in whole pages but at most `len`.
/// `None` if the system cannot say: an older kernel, a sandbox, another user's file.
pub fn cached_bytes(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Option<u64> {
    if len == 0 {
        return Some(0); // to the kernel a length of 0 means "to the end"
    }
    let range = Range { offset, len };
    let mut stat = CacheStat::default();
    // SAFETY: both structures have the kernel's layout and outlive the call, which reads the one
    // and fills the other.
    let answer =
        unsafe { libc::syscall(SYS_CACHESTAT, fd.as_raw_fd(), &raw const range, &raw mut stat, 0_u32) };
    // SAFETY: no memory is involved.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
    (answer == 0).then(|| stat.cached.saturating_mul(page).min(len))
}

/// Writes the range from the page cache to the disk and waits for it (`sync_file_range`). It starts
/// the writes early but does not make them durable. Its error must not be ignored: a later fsync
/// may not report the failed write again.
pub fn write_out(fd: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<()> {
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    let flags = libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    loop {
        // SAFETY: no memory is involved.
        if unsafe { libc::sync_file_range(fd.as_raw_fd(), offset, len, flags) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::ENOSYS | libc::EINVAL | libc::ESPIPE) => return Ok(()), // not here
            _ => return Err(error),
        }
    }
}
