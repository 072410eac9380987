//! An open data file.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::{Errno, retry_on_intr};

use super::Settings;
use crate::io::{File, SECTION_ALIGNMENT, Transfer};
use crate::sys::{Descriptor, cached_bytes};
use crate::{Error, Result};

/// The system's answer about O_DIRECT on a file (`STATX_DIOALIGN`, Linux 6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectIo {
    /// The system does not report it.
    Unknown,
    /// Not possible for this file.
    Unsupported,
    /// Possible, with this alignment of memory and offsets in bytes.
    Aligned(usize),
}

/// Returns the alignment of direct I/O on an open file.
pub fn direct_io(fd: BorrowedFd<'_>) -> DirectIo {
    let mask = StatxFlags::DIOALIGN;
    match retry_on_intr(|| rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, mask)) {
        Ok(stat) if StatxFlags::from_bits_retain(stat.stx_mask).contains(mask) => {
            match stat.stx_dio_mem_align.max(stat.stx_dio_offset_align) {
                _ if stat.stx_dio_offset_align == 0 => DirectIo::Unsupported,
                align => DirectIo::Aligned(align as usize),
            }
        }
        _ => DirectIo::Unknown,
    }
}

/// See the module documentation.
#[derive(Debug)]
pub struct PosixFile {
    data: Arc<Descriptor>,
    direct: bool,
    /// A second descriptor without O_DIRECT, opened for the first buffered read. `None` if that is
    /// impossible.
    buffered: OnceLock<Option<Arc<Descriptor>>>,
    path: PathBuf,
    settings: Arc<Settings>,
}

impl PosixFile {
    /// Takes over a descriptor that was opened with O_NONBLOCK, so that the open does not wait for
    /// a pipe or device. Fails if it is no regular file. Switches to direct I/O if the settings and
    /// the file allow it.
    pub(super) fn adopt(fd: OwnedFd, path: PathBuf, settings: &Arc<Settings>) -> Result<Self> {
        let fd = Descriptor::new(fd, "file");
        let open = fd.get()?;
        let stat = rustix::fs::fstat(open).map_err(|errno| Error::io("stat", &path, errno))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
            return Err(Error::io("open", path, source));
        }
        let direct = settings.direct && set_direct(open, settings.alignment);
        if !direct {
            rustix::fs::fcntl_setfl(open, OFlags::empty())
                .map_err(|errno| Error::io("open", &path, errno))?;
        }
        Ok(Self {
            data: Arc::new(fd),
            direct,
            buffered: OnceLock::new(),
            path,
            settings: Arc::clone(settings),
        })
    }

    /// Returns the descriptor for a transfer, and the alignment at which short transfers continue.
    pub fn descriptor(&self, transfer: Transfer) -> (Arc<Descriptor>, usize) {
        if self.direct
            && transfer == Transfer::ReadCached
            && let Some(buffered) = self.buffered.get_or_init(|| self.reopen())
        {
            return (Arc::clone(buffered), 1);
        }
        (Arc::clone(&self.data), if self.direct { self.settings.alignment } else { 1 })
    }

    /// Opens the same inode again without O_DIRECT, through `/proc`, because the name may belong to
    /// another file by now. Fails without `/proc`.
    fn reopen(&self) -> Option<Arc<Descriptor>> {
        let link = format!("/proc/self/fd/{}", self.data.get().ok()?.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let fd = retry_on_intr(|| rustix::fs::open(link.as_str(), flags, Mode::empty())).ok()?;
        // Without readahead: the bytes behind a range may belong to nobody.
        let _ = rustix::fs::fadvise(&fd, 0, None, rustix::fs::Advice::Random);
        Some(Arc::new(Descriptor::new(fd, "file")))
    }

    fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.data.get()
    }

    fn failed(&self, op: &'static str) -> impl Fn(Errno) -> Error {
        let path = self.path.clone();
        move |errno| Error::io(op, &path, errno)
    }

    /// Preallocates, so that a full disk is detected now, and direct writes need not extend the
    /// file (twice as fast for small ones). Does nothing on file systems without it.
    pub(super) fn preallocate(&self, len: u64) -> Result<()> {
        let fd = self.fd()?;
        let mode = rustix::fs::FallocateFlags::empty();
        match retry_on_intr(|| rustix::fs::fallocate(fd, mode, 0, len)) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(errno) => Err(Error::io("allocate", &self.path, errno)),
        }
    }

    /// Extends the file at its end, from a multiple of [`SECTION_ALIGNMENT`]. Returns the offset.
    pub(super) fn extend(&self, len: u64) -> Result<u64> {
        let no_room = || Error::io("allocate", &self.path, Errno::FBIG);
        let first = self.len()?.checked_next_multiple_of(SECTION_ALIGNMENT).ok_or_else(no_room)?;
        let end = first.checked_add(len).ok_or_else(no_room)?;
        // If blocks cannot be reserved, set the length.
        let (fd, mode) = (self.fd()?, rustix::fs::FallocateFlags::empty());
        match retry_on_intr(|| rustix::fs::fallocate(fd, mode, first, len)) {
            Ok(()) => Ok(first),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.set_len(end).map(|()| first),
            Err(errno) => Err(Error::io("allocate", &self.path, errno)),
        }
    }

    /// Reads into `into` from `offset`. Reads less at the end of the file.
    fn read_buffered(&self, fd: BorrowedFd<'_>, into: &mut [u8], offset: u64) -> Result<usize> {
        let mut done = 0;
        while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match retry_on_intr(|| rustix::io::pread(fd, &mut *rest, offset + done as u64)) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(errno) => return Err(Error::io("read", &self.path, errno)),
            }
        }
        Ok(done)
    }

    /// Reads as [`Self::read_buffered`], but with direct reads of whole blocks, which do not change
    /// the page cache.
    fn read_direct(&self, fd: BorrowedFd<'_>, into: &mut [u8], offset: u64) -> Result<usize> {
        let align = self.settings.alignment as u64;
        self.settings.bounce.with(|buffer| {
            let mut done = 0;
            while done < into.len() {
                let at = offset + done as u64;
                let start = at - at % align;
                let skip = (at - start) as usize;
                let want = (skip + into.len() - done).next_multiple_of(align as usize).min(buffer.len());
                let Some(window) = buffer.get_mut(..want) else { break };
                let count = retry_on_intr(|| rustix::io::pread(fd, &mut *window, start))
                    .map_err(self.failed("read"))?;
                let fresh = window.get(skip..count).unwrap_or_default();
                let Some(target) = into.get_mut(done..) else { break };
                let count = fresh.len().min(target.len());
                if count == 0 {
                    break; // the end of the file
                }
                target[..count].copy_from_slice(&fresh[..count]);
                done += count;
            }
            Ok(done)
        })
    }
}

/// Switches O_DIRECT on and O_NONBLOCK off, unless this file needs a coarser alignment than the
/// engine uses.
fn set_direct(fd: BorrowedFd<'_>, alignment: usize) -> bool {
    match direct_io(fd) {
        DirectIo::Unsupported => false,
        DirectIo::Aligned(wanted) if wanted > alignment => false,
        DirectIo::Aligned(_) | DirectIo::Unknown => rustix::fs::fcntl_setfl(fd, OFlags::DIRECT).is_ok(),
    }
}

impl File for PosixFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn len(&self) -> Result<u64> {
        let stat = rustix::fs::fstat(self.fd()?).map_err(self.failed("stat"))?;
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }

    fn set_len(&self, len: u64) -> Result<()> {
        let fd = self.fd()?;
        retry_on_intr(|| rustix::fs::ftruncate(fd, len)).map_err(self.failed("truncate"))
    }

    fn sync(&self) -> Result<()> {
        let fd = self.fd()?;
        // Never repeat an fsync, not even after EINTR: an error that was reported once may not be
        // reported again.
        rustix::fs::fsync(fd).map_err(self.failed("fsync"))
    }

    fn read_at(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let fd = self.fd()?;
        let there = usize::try_from(self.len()?.saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; len.min(there)];
        let count = if self.direct {
            self.read_direct(fd, &mut bytes, offset)?
        } else {
            self.read_buffered(fd, &mut bytes, offset)?
        };
        bytes.truncate(count);
        Ok(bytes)
    }

    fn cached(&self, offset: u64, len: u64) -> Option<u64> {
        cached_bytes(self.fd().ok()?, offset, len)
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
