//! Directories and files of a POSIX system (Linux), for all real engines. The engines differ only
//! in how a queue transfers large data.

mod dir;
mod file;
mod resolve;

use std::path::Path;
use std::sync::{Arc, Mutex};

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use crate::sys::{Buffer, Descriptor};
use crate::{Error, Result};

pub use dir::PosixDir;
pub use file::{DirectIo, PosixFile, direct_io};

/// The findings of the probe, which all directories and files of one disk share.
#[derive(Debug)]
pub struct Settings {
    /// The alignment in bytes that queues demand of offset, length and address. 1 if data files are
    /// opened without O_DIRECT.
    pub alignment: usize,
    /// True if data files are opened with O_DIRECT.
    pub direct: bool,
    /// True if directories can be fsynced. A few network file systems answer EINVAL.
    pub sync_dirs: bool,
    bounce: Bounce,
}

impl Settings {
    /// Returns settings. `direct` is the alignment for direct I/O, `None` for the page cache.
    pub fn new(direct: Option<usize>, sync_dirs: bool) -> Arc<Self> {
        let alignment = direct.unwrap_or(1).max(1);
        Arc::new(Self { alignment, direct: direct.is_some(), sync_dirs, bounce: Bounce::default() })
    }
}

/// A few aligned buffers for small direct reads. They are mappings, not heap memory. If a process
/// forks during a direct read into memory that the child shares, the parent may keep the old bytes
/// (before Linux 6.3). Children do not inherit these mappings.
#[derive(Debug, Default)]
struct Bounce(Mutex<Vec<Buffer>>);

/// The size of such a buffer in bytes.
const BOUNCE_BYTES: usize = 2 << 20;
/// Buffers kept for the next reader.
const BOUNCE_KEPT: usize = 4;

impl Bounce {
    fn with<T>(&self, act: impl FnOnce(&mut Buffer) -> Result<T>) -> Result<T> {
        let kept = self.0.lock().ok().and_then(|mut kept| kept.pop());
        let mut buffer = match kept {
            Some(buffer) => buffer,
            None => Buffer::alone(BOUNCE_BYTES)?,
        };
        let answer = act(&mut buffer);
        if let Ok(mut kept) = self.0.lock()
            && kept.len() < BOUNCE_KEPT
        {
            kept.push(buffer);
        }
        answer
    }
}

/// Opens a directory by the user's path, which may contain symlinks.
pub fn open_dir(settings: &Arc<Settings>, path: &Path) -> Result<PosixDir> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = retry_on_intr(|| rustix::fs::open(path, flags, Mode::empty()))
        .map_err(|errno| Error::io("open", path, errno))?;
    Ok(PosixDir::new(Descriptor::new(fd, "directory"), path.to_path_buf(), Arc::clone(settings)))
}

/// Makes the entry of a directory durable, if its parent may be opened.
fn sync_entry(settings: &Arc<Settings>, path: &Path) -> Result<()> {
    let parent = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => return Ok(()),
    };
    match open_dir(settings, parent) {
        Ok(parent) => crate::io::Dir::sync(&parent),
        // The parent may be traversed but not read, so this process has created nothing in it.
        Err(error) if matches!(error.errno(), Some(libc::EACCES | libc::EPERM)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Creates a directory and its missing ancestors, each durable in its parent, and opens it. Makes
/// an existing one durable as well.
pub fn create_dir_all(settings: &Arc<Settings>, path: &Path) -> Result<PosixDir> {
    let mut missing = Vec::new();
    let mut there = path;
    let base = loop {
        let named = if there.as_os_str().is_empty() { Path::new(".") } else { there };
        match open_dir(settings, named) {
            Ok(dir) => break dir,
            Err(error) if error.is_not_found() => {
                let Some(parent) = there.parent() else { return Err(error) };
                missing.push(there);
                there = parent;
            }
            Err(error) => return Err(error),
        }
    };
    // The process that created the deepest existing directory may have been killed before its entry
    // was durable, so sync it too. Each directory created below is synced before the next one, so
    // no other entry is in doubt.
    sync_entry(settings, there)?;
    let mut parent = base;
    for path in missing.into_iter().rev() {
        match retry_on_intr(|| rustix::fs::mkdir(path, Mode::from_raw_mode(0o777))) {
            // Another process may have created it. Its entry may not be durable yet, so sync the
            // parent all the same.
            Ok(()) | Err(Errno::EXIST) => crate::io::Dir::sync(&parent)?,
            Err(errno) => return Err(Error::io("mkdir", path, errno)),
        }
        parent = open_dir(settings, path)?;
    }
    Ok(parent)
}
