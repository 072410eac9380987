//! Directories and files of a POSIX system (Linux), for every real engine. The engines differ in
//! how a queue moves large data only.

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

/// The findings of the capability probe, shared by every directory and file of one disk.
#[derive(Debug)]
pub struct Settings {
    /// Alignment that queues demand of offset, length and address, in bytes; 1 where data files are
    /// not opened with O_DIRECT.
    pub alignment: usize,
    /// True if data files are opened with O_DIRECT.
    pub direct: bool,
    /// True if directories can be fsynced; a few network file systems answer EINVAL.
    pub sync_dirs: bool,
    bounce: Bounce,
}

impl Settings {
    /// With `direct`, the alignment; without, the page cache.
    pub fn new(direct: Option<usize>, sync_dirs: bool) -> Arc<Self> {
        let alignment = direct.unwrap_or(1).max(1);
        Arc::new(Self { alignment, direct: direct.is_some(), sync_dirs, bounce: Bounce::default() })
    }
}

/// A few aligned buffers for small direct reads. Heap memory would not do: a fork during a direct
/// read into memory that the child shares may leave the parent with the old bytes (before Linux
/// 6.3); mappings are kept out of children.
#[derive(Debug, Default)]
struct Bounce(Mutex<Vec<Buffer>>);

/// Bytes of a bounce buffer.
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

/// Opens a directory by the user's path, through symlinks if there are any.
pub fn open_dir(settings: &Arc<Settings>, path: &Path) -> Result<PosixDir> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = retry_on_intr(|| rustix::fs::open(path, flags, Mode::empty()))
        .map_err(|errno| Error::io("open", path, errno))?;
    Ok(PosixDir::new(Descriptor::new(fd, "directory"), path.to_path_buf(), Arc::clone(settings)))
}

/// Makes the entry of a directory durable, where its parent may be opened.
fn sync_entry(settings: &Arc<Settings>, path: &Path) -> Result<()> {
    let parent = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => return Ok(()),
    };
    match open_dir(settings, parent) {
        Ok(parent) => crate::io::Dir::sync(&parent),
        // A directory that may be passed through but not read: nothing in it was made by us.
        Err(error) if matches!(error.errno(), Some(libc::EACCES | libc::EPERM)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Makes a directory and its missing ancestors, each durable in its parent, and opens it. One that
/// is there already is made durable as well.
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
    // was durable, so sync that too. Each directory created below is synced before the next, so no
    // other entry is in doubt.
    sync_entry(settings, there)?;
    let mut parent = base;
    for path in missing.into_iter().rev() {
        match retry_on_intr(|| rustix::fs::mkdir(path, Mode::from_raw_mode(0o777))) {
            // Another process may have been faster; its entry may not be durable yet, so the parent
            // is synced all the same.
            Ok(()) | Err(Errno::EXIST) => crate::io::Dir::sync(&parent)?,
            Err(errno) => return Err(Error::io("mkdir", path, errno)),
        }
        parent = open_dir(settings, path)?;
    }
    Ok(parent)
}
