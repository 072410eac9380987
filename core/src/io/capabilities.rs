//! The calls that a file system supports, one by one, for reports to people. The engine works
//! around those that are missing.

use std::io;
use std::path::Path;

use rustix::fs::{FallocateFlags, Mode, OFlags, RenameFlags};
use rustix::io::{Errno, retry_on_intr};

use super::mounts;
use crate::{Error, Result};

/// The length that is reserved as a trial.
const RESERVED_BYTES: u64 = 1 << 20;

/// Tries calls in an empty directory, and leaves two files there. Returns the name of each, with
/// the answer of the system.
pub fn supported_calls(dir: &Path) -> Result<Vec<(&'static str, io::Result<()>)>> {
    let failed = |errno| Error::io("try", dir, errno);
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = rustix::fs::open(dir, flags, Mode::empty()).map_err(failed)?;
    let make = |name| {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        rustix::fs::openat(&fd, name, flags, Mode::RUSR | Mode::WUSR).map_err(failed)
    };
    let (file, _) = (make("one")?, make("two")?);
    let rename = |flags| rustix::fs::renameat_with(&fd, "one", &fd, "two", flags);
    let reserve = || rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, RESERVED_BYTES);
    let calls = [
        ("sync_dirs", rustix::fs::fsync(&fd)),
        ("preallocate", retry_on_intr(reserve)),
        ("rename_exchange", rename(RenameFlags::EXCHANGE)),
        // The last one: if it replaces the file, the flag was ignored.
        (
            "rename_noreplace",
            match rename(RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => Ok(()),
                Ok(()) => Err(Errno::NOTSUP),
                Err(errno) => Err(errno),
            },
        ),
    ];
    Ok(calls.into_iter().map(|(name, answer)| (name, answer.map_err(io::Error::from))).collect())
}

/// Returns the type of the file system of a path, such as `ext4`. `None` if the kernel's list of
/// mounts does not say it.
pub fn file_system(path: &Path) -> Result<Option<String>> {
    let stat = rustix::fs::stat(path).map_err(|errno| Error::io("stat", path, errno))?;
    Ok(mounts::file_system(stat.st_dev))
}
