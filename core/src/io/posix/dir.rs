//! An open directory, and operations on names below it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::buffer::spare_capacity;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::{Errno, retry_on_intr};

use super::resolve::{in_parent, open_beneath};
use super::{PosixFile, Settings};
use crate::io::{Dir, Entry, EntryKind, File, Lock, LockKind, NextPiece, PIECE_BYTES, Rename, Stat};
use crate::sys::{Descriptor, Exclusive, HeldLock, try_reserve_huge, with_exclusive_file};
use crate::{Error, Result};

/// See the module documentation.
#[derive(Debug)]
pub struct PosixDir {
    fd: Descriptor,
    path: PathBuf,
    settings: Arc<Settings>,
}

impl Lock for HeldLock {
    fn id(&self) -> Result<(u64, u64)> {
        let stat = rustix::fs::fstat(self.fd()?).map_err(|errno| Error::io("stat", "<a lock>", errno))?;
        Ok((stat.st_dev, stat.st_ino))
    }
}

impl PosixDir {
    pub(super) fn new(fd: Descriptor, path: PathBuf, settings: Arc<Settings>) -> Self {
        Self { fd, path, settings }
    }

    /// Returns the descriptor, for the probe.
    pub fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.fd.get()
    }

    fn failed(&self, op: &'static str, name: &str) -> impl Fn(Errno) -> Error {
        let path = if name.is_empty() { self.path.clone() } else { self.path.join(name) };
        move |errno| Error::io(op, &path, errno)
    }

    /// Opens a file or lock below. The mode is for a new file.
    fn open(&self, name: &str, flags: OFlags) -> Result<OwnedFd> {
        open_beneath(self.fd()?, name, flags, creation_mode(flags)).map_err(self.failed("open", name))
    }

    fn in_parent<T>(
        &self,
        op: &'static str,
        name: &str,
        act: impl FnOnce(BorrowedFd<'_>, &str) -> rustix::io::Result<T>,
    ) -> Result<T> {
        in_parent(self.fd()?, name, act).map_err(self.failed(op, name))
    }

    /// Removes an entry that this call has created exclusively but could not finish.
    fn discard(&self, name: &str) {
        if let Err(error) = self.remove_file(name) {
            tracing::warn!(%error, "a file that could not be finished could not be removed either");
        }
    }

    /// Returns a new data file with this name, preallocated. If that fails, removes the name.
    fn to_write(&self, name: &str, fd: OwnedFd, len_hint: u64) -> Result<Arc<dyn File>> {
        let made = PosixFile::adopt(fd, self.path.join(name), &self.settings).and_then(|file| {
            if len_hint > 0 {
                file.preallocate(len_hint)?;
            }
            Ok(file)
        });
        match made {
            Ok(file) => Ok(Arc::new(file)),
            Err(error) => {
                self.discard(name);
                Err(error)
            }
        }
    }

    /// True if a file has the owner, permissions and attributes of a file that is now created as
    /// `to`. This process has just created that directory, which shows them. A file with its own
    /// attributes (an access control list, a backup's checksum) never matches.
    fn is_as_new(&self, fd: &OwnedFd, stat: &rustix::fs::Stat, to: &str) -> Result<bool> {
        let above = to.rsplit_once('/').map_or(".", |(above, _)| above);
        let dir = rustix::fs::statat(self.fd()?, above, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(self.failed("stat", above))?;
        if (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777) != (dir.st_uid, dir.st_gid, dir.st_mode & 0o666)
        {
            return Ok(false);
        }
        let mut names = Vec::with_capacity(256);
        Ok(match rustix::fs::flistxattr(fd, spare_capacity(&mut names)) {
            // SELinux derives its label from the directory, so it is equal.
            Ok(_) => {
                names.split(|&byte| byte == 0).all(|name| name.is_empty() || name == b"security.selinux")
            }
            Err(Errno::NOTSUP) => true,
            Err(_) => false,
        })
    }

    /// Creates a file that `write` fills. It is removed if that fails.
    fn create_whole(&self, name: &str, write: impl FnOnce(&OwnedFd) -> Result<()>) -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let fd = open_beneath(self.fd()?, name, flags, creation_mode(flags))
            .map_err(self.failed("create", name))?;
        let written = write(&fd);
        if written.is_err() {
            self.discard(name);
        }
        written
    }

    fn write_new(&self, name: &str, fd: &OwnedFd, bytes: &[u8]) -> Result<()> {
        self.write_piece(name, fd, bytes)?;
        rustix::fs::fsync(fd).map_err(self.failed("fsync", name))
    }

    fn write_piece(&self, name: &str, fd: &OwnedFd, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match retry_on_intr(|| rustix::io::write(fd, rest)).map_err(self.failed("write", name))? {
                0 => return Err(Error::io("write", self.path.join(name), io::ErrorKind::WriteZero)),
                count => rest = rest.get(count..).unwrap_or_default(),
            }
        }
        Ok(())
    }
}

/// The mode of a new file. `openat2` refuses a mode if it creates no file.
fn creation_mode(flags: OFlags) -> Mode {
    if flags.contains(OFlags::CREATE) { Mode::from_raw_mode(0o666) } else { Mode::empty() }
}

/// Returns the ctime in nanoseconds.
fn changed(stat: &rustix::fs::Stat) -> i64 {
    let nanoseconds = i64::try_from(stat.st_ctime_nsec).unwrap_or(0);
    stat.st_ctime.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

/// Returns the mtime in nanoseconds.
fn modified(stat: &rustix::fs::Stat) -> i64 {
    let nanoseconds = i64::try_from(stat.st_mtime_nsec).unwrap_or(0);
    stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

fn kind_of(kind: FileType) -> EntryKind {
    match kind {
        FileType::RegularFile => EntryKind::File,
        FileType::Directory => EntryKind::Dir,
        _ => EntryKind::Other,
    }
}

impl Dir for PosixDir {
    fn path(&self) -> &Path {
        &self.path
    }

    fn open_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        let fd = self.open(name, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let fd = Descriptor::new(fd, "directory");
        Ok(Arc::new(Self::new(fd, self.path.join(name), Arc::clone(&self.settings))))
    }

    fn create_dir(&self, name: &str) -> Result<Arc<dyn Dir>> {
        let mode = Mode::from_raw_mode(0o777);
        self.in_parent("mkdir", name, |dir, last| retry_on_intr(|| rustix::fs::mkdirat(dir, last, mode)))?;
        let opened = self.open_dir(name);
        if opened.is_err()
            && let Err(error) = self.remove_dir(name)
        {
            // A retry would report that it exists, and hide the original error.
            tracing::warn!(%error, "a directory that could not be opened could not be removed either");
        }
        opened
    }

    fn unsorted_entries(&self) -> Result<Vec<Entry>> {
        let fd = self.fd()?;
        let mut entries = Vec::new();
        for entry in rustix::fs::Dir::read_from(fd).map_err(self.failed("list", ""))? {
            let entry = entry.map_err(self.failed("list", ""))?;
            let raw = entry.file_name();
            if matches!(raw.to_bytes(), b"." | b"..") {
                continue;
            }
            let kind = match entry.file_type() {
                // Some file systems do not report the type.
                FileType::Unknown => match rustix::fs::statat(fd, raw, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                    Err(Errno::NOENT) => continue,
                    Err(errno) => return Err(self.failed("stat", &raw.to_string_lossy())(errno)),
                },
                kind => kind,
            };
            let name = raw.to_string_lossy().into_owned();
            entries.push(Entry { name, kind: kind_of(kind), inode: entry.ino() });
        }
        Ok(entries)
    }

    fn stat(&self, name: &str) -> Result<Option<Stat>> {
        let answer = in_parent(self.fd()?, name, |dir, last| {
            retry_on_intr(|| rustix::fs::statat(dir, last, AtFlags::SYMLINK_NOFOLLOW))
        });
        match answer {
            Ok(stat) => Ok(Some(Stat {
                kind: kind_of(FileType::from_raw_mode(stat.st_mode)),
                len: u64::try_from(stat.st_size).unwrap_or(0),
                id: (stat.st_dev, stat.st_ino),
                changed: changed(&stat),
                modified: modified(&stat),
            })),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(self.failed("stat", name)(errno)),
        }
    }

    fn id(&self) -> Result<(u64, u64)> {
        let stat = rustix::fs::fstat(self.fd()?).map_err(self.failed("stat", ""))?;
        Ok((stat.st_dev, stat.st_ino))
    }

    fn changed(&self) -> Result<i64> {
        let stat = rustix::fs::fstat(self.fd()?).map_err(self.failed("stat", ""))?;
        Ok(changed(&stat))
    }

    fn create_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        let fd = open_beneath(
            self.fd()?,
            name,
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
            Mode::from_raw_mode(0o666),
        )
        .map_err(self.failed("create", name))?;
        self.to_write(name, fd, len_hint)
    }

    fn take_over(&self, from: &str, to: &str, len_hint: u64) -> Result<Option<Arc<dyn File>>> {
        let fd = self.open(from, OFlags::RDWR | OFlags::NONBLOCK)?;
        let stat = rustix::fs::fstat(&fd).map_err(self.failed("stat", from))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
            || stat.st_nlink != 1
            || !self.is_as_new(&fd, &stat, to)?
        {
            return Ok(None);
        }
        let keep = match with_exclusive_file(fd.as_fd(), || self.rename(from, to, Rename::NoReplace)) {
            Exclusive::Unavailable => return Ok(None),
            Exclusive::Undisturbed(renamed) => renamed.map(|()| true)?,
            // Another process has opened the file by its old name, and still has it open.
            Exclusive::Interrupted(renamed) => renamed.map(|()| false)?,
        };
        // Another process may have found the old name before, and made a hard link since. Check the
        // number of links again as late as possible.
        // The type of the number of links depends on the processor.
        let has_names = |fd: &OwnedFd, one: bool| {
            rustix::fs::fstat(fd).map_or(!one, |stat| stat.st_nlink < 2 && (stat.st_nlink == 1) == one)
        };
        let look = match fd.try_clone() {
            Ok(look) if keep && has_names(&fd, true) => look,
            _ => {
                self.discard(to);
                return Ok(None);
            }
        };
        // If this fails, the old name is already gone.
        let file = self.to_write(to, fd, len_hint);
        if has_names(&look, file.is_ok()) {
            return file.map(Some);
        }
        // It has another name. Preallocation may have made it longer.
        let _ = rustix::fs::ftruncate(&look, u64::try_from(stat.st_size).unwrap_or(0));
        if file.is_ok() {
            self.discard(to);
        }
        file.map(|_| None)
    }

    fn overwrite_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>> {
        let fd = self.open(name, OFlags::RDWR | OFlags::NONBLOCK)?;
        let file = PosixFile::adopt(fd, self.path.join(name), &self.settings)?;
        if len_hint > 0 {
            file.preallocate(len_hint)?;
        }
        Ok(Arc::new(file))
    }

    fn extend_file(&self, name: &str, len: u64) -> Result<(Arc<dyn File>, u64)> {
        let (flags, mode) = (OFlags::RDWR | OFlags::CREATE, Mode::from_raw_mode(0o666));
        let fd = open_beneath(self.fd()?, name, flags, mode).map_err(self.failed("open", name))?;
        let file = PosixFile::adopt(fd, self.path.join(name), &self.settings)?;
        let first = file.extend(len)?;
        Ok((Arc::new(file), first))
    }

    fn open_file(&self, name: &str) -> Result<Arc<dyn File>> {
        let fd = self.open(name, OFlags::RDONLY | OFlags::NONBLOCK)?;
        Ok(Arc::new(PosixFile::adopt(fd, self.path.join(name), &self.settings)?))
    }

    fn read_file(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        let fd = self.open(name, OFlags::RDONLY | OFlags::NONBLOCK)?;
        let stat = rustix::fs::fstat(&fd).map_err(self.failed("stat", name))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
            return Err(Error::io("open", self.path.join(name), source));
        }
        let too_long = |found| Error::Limit {
            what: format!("the length in bytes of {}", self.path.join(name).display()),
            found,
            limit,
        };
        let len = u64::try_from(stat.st_size).unwrap_or(0);
        if len > limit {
            return Err(too_long(len));
        }
        // Advise to read all of it at once: read-ahead would take many round trips.
        let _ = rustix::fs::fadvise(&fd, 0, None, rustix::fs::Advice::WillNeed);
        // Read one byte more than the length, to detect a growing file. A sparse file may claim any
        // length, so a failed allocation is an error, not an abort.
        let mut bytes = Vec::new();
        let no_memory = |_| Error::io("read", self.path.join(name), io::ErrorKind::OutOfMemory);
        try_reserve_huge(&mut bytes, len as usize + 1).map_err(no_memory)?;
        loop {
            if bytes.len() as u64 > limit {
                return Err(too_long(bytes.len() as u64));
            }
            if bytes.len() == bytes.capacity() {
                bytes.try_reserve(1).map_err(no_memory)?;
            }
            // Read into uninitialised memory, and never far beyond the limit.
            let count = retry_on_intr(|| rustix::io::read(&fd, spare_capacity(&mut bytes)))
                .map_err(self.failed("read", name))?;
            if count == 0 {
                return Ok(bytes);
            }
        }
    }

    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.create_whole(name, |fd| self.write_new(name, fd, bytes))
    }

    fn write_pieces(&self, name: &str, _: u64, next: NextPiece<'_>) -> Result<()> {
        self.create_whole(name, |fd| {
            loop {
                let piece = next(PIECE_BYTES)?;
                if piece.is_empty() {
                    return rustix::fs::fsync(fd).map_err(self.failed("fsync", name));
                }
                self.write_piece(name, fd, &piece)?;
            }
        })
    }

    fn rename(&self, from: &str, to: &str, how: Rename) -> Result<()> {
        let fd = self.fd()?;
        let answer = in_parent(fd, from, |from_dir, from_last| {
            in_parent(fd, to, |to_dir, to_last| {
                let renamed = |flags| rustix::fs::renameat_with(from_dir, from_last, to_dir, to_last, flags);
                let flagged = |flags| retry_on_intr(|| renamed(flags));
                let plain = || retry_on_intr(|| rustix::fs::renameat(from_dir, from_last, to_dir, to_last));
                match how {
                    Rename::Replace => plain(),
                    // Do not repeat it after EINTR: if the first call was carried out, a second one
                    // would undo it.
                    Rename::Exchange => match renamed(RenameFlags::EXCHANGE) {
                        Err(Errno::NOSYS | Errno::OPNOTSUPP) => Err(Errno::INVAL),
                        answer => answer,
                    },
                    Rename::NoReplace => match flagged(RenameFlags::NOREPLACE) {
                        // The file system (NFS, some FUSE) or the kernel does not support the flag.
                        // A rename of a directory into itself is EINVAL too, also in the call
                        // below.
                        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                            match rustix::fs::statat(to_dir, to_last, AtFlags::SYMLINK_NOFOLLOW) {
                                Ok(_) => Err(Errno::EXIST),
                                Err(Errno::NOENT) => plain(),
                                Err(errno) => Err(errno),
                            }
                        }
                        answer => answer,
                    },
                }
            })
        });
        answer.map_err(|errno| {
            // Only some errors tell which of the two names they concern.
            let name = if errno == Errno::EXIST { to } else { from };
            self.failed("rename", name)(errno)
        })
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        self.in_parent("remove", name, |dir, last| {
            retry_on_intr(|| rustix::fs::unlinkat(dir, last, AtFlags::empty()))
        })
    }

    fn remove_dir(&self, name: &str) -> Result<()> {
        self.in_parent("remove", name, |dir, last| {
            retry_on_intr(|| rustix::fs::unlinkat(dir, last, AtFlags::REMOVEDIR))
        })
    }

    fn sync(&self) -> Result<()> {
        let fd = self.fd()?;
        if !self.settings.sync_dirs {
            return Ok(()); // the probe found that this file system has no such thing, and said so in its reasons
        }
        rustix::fs::fsync(fd).map_err(self.failed("fsync", ""))
    }

    fn try_lock(&self, name: &str, kind: LockKind, create: bool) -> Result<Option<Box<dyn Lock>>> {
        let exclusive = kind == LockKind::Exclusive;
        let mut flags = if exclusive { OFlags::RDWR } else { OFlags::RDONLY };
        if create {
            flags |= OFlags::CREATE;
        }
        let fd = Descriptor::unshared("lock", || self.open(name, flags | OFlags::NONBLOCK))?;
        let taken = HeldLock::take(fd, exclusive)
            .map_err(|source| Error::io("lock", self.path.join(name), source))?;
        Ok(taken.map(|lock| Box::new(lock) as Box<dyn Lock>))
    }

    fn free_bytes(&self) -> Result<u64> {
        let stat = rustix::fs::fstatvfs(self.fd()?).map_err(self.failed("statvfs", ""))?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
}
