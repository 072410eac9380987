//! Files and directories behind one trait, with several engines.
//!
//! Every file operation of this crate and of the manager goes through [`Disk`], [`Dir`] and
//! [`File`]. So the product and the simulated file system of the tests run the same code. Large
//! data moves through a [`Queue`], which takes buffers by value and returns them: nobody can reach
//! memory in flight.
//!
//! The caller orders durability. A write is durable after a [`File::sync`] that started after the
//! write had completed, a directory entry after a [`Dir::sync`]. Only [`Disk::create_dir_all`] and
//! [`Dir::write_file`] sync by themselves.

mod capabilities;
pub mod change_log;
mod memory_file;
mod mounts;
mod posix;
mod posix_disk;
mod probe;
mod reclaim;
mod section;
#[cfg(feature = "remote")]
pub(crate) mod settings_file;
mod shared;
#[cfg(any(test, feature = "test-support"))]
pub mod simulated;
#[cfg(test)]
mod tests;
mod threaded;
mod transfer;
mod uring;
pub(crate) mod workers;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::Result;
use crate::sys::{Buffer, Mapping};

pub use capabilities::{file_system, supported_calls};
pub use memory_file::MemoryFile;
pub use probe::{Engine, open_disk};
pub use reclaim::{NoReclaimer, SpaceReclaimer, retry_if_full};
pub use section::{SECTION_ALIGNMENT, Section};
pub use shared::{Purpose, shared_disk};

/// The engine that serves a directory, with the findings of the capability probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineChoice {
    /// `io_uring`, `threads` or `buffered` (or `simulated`).
    pub engine: &'static str,
    /// True if data files are opened with O_DIRECT.
    pub direct: bool,
    /// Required alignment of memory, offset and length for O_DIRECT, in bytes (1 where not direct).
    pub alignment: usize,
    /// True if buffers are registered with io_uring.
    pub registered: bool,
    /// One sentence per decision: what was tried, what the system answered, what follows.
    pub reasons: Vec<String>,
}

/// The kind of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symlink, device or socket: never followed.
    Other,
}

/// One entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Its name, one component. Names that are not UTF-8 are foreign; bad bytes are replaced.
    pub name: String,
    /// Its kind.
    pub kind: EntryKind,
    /// Its inode number in the directory. Another number means that the name was reused.
    pub inode: u64,
}

/// Facts about a file or directory that is not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Its kind.
    pub kind: EntryKind,
    /// Length in bytes.
    pub len: u64,
    /// Device and inode. The file system may reuse the pair after the file is gone.
    pub id: (u64, u64),
    /// Time of the last change of content, length or name (ctime), in nanoseconds of the file
    /// system's clock. A simulated disk counts changes.
    pub changed: i64,
    /// Time of the last change of content or length (mtime), likewise.
    pub modified: i64,
}

/// How a rename treats an existing target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rename {
    /// Fails with EEXIST (`RENAME_NOREPLACE`). File systems without that flag get a check and a
    /// plain rename; the caller holds the root's lock.
    NoReplace,
    /// Replaces a file atomically (plain `rename`, used on files only).
    Replace,
    /// Swaps the two (`RENAME_EXCHANGE`). EINVAL if the file system cannot.
    Exchange,
}

/// The mode of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockKind {
    /// Many holders.
    Shared,
    /// One holder.
    Exclusive,
}

/// A held lock. Dropping it releases it.
///
/// An open-file-description lock: it ends with its holder, and also excludes holders in the same
/// process.
pub trait Lock: Send + Sync {
    /// Device and inode of the locked file, as [`Stat::id`]. Its name may be gone, or another
    /// file's.
    fn id(&self) -> Result<(u64, u64)>;
}

/// One file system, seen through one engine.
pub trait Disk: Send + Sync {
    /// The engine, and why it was chosen.
    fn choice(&self) -> &EngineChoice;

    /// Opens a directory by path.
    fn open_dir(&self, path: &Path) -> Result<Arc<dyn Dir>>;

    /// Opens a directory by path. Creates it and missing ancestors, and syncs the parent of each.
    fn create_dir_all(&self, path: &Path) -> Result<Arc<dyn Dir>>;

    /// Opens a directory whose files other libraries wrote. In a store it costs no request, and may
    /// be missing.
    fn open_foreign_dir(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        self.open_dir(path)
    }

    /// True if each request waits for a network. Reads are larger then, and more are in flight.
    fn is_remote(&self) -> bool {
        false
    }

    /// True if each root has a ledger, as in an object store. Nothing can be renamed beside a root
    /// then.
    fn keeps_ledgers(&self) -> bool {
        false
    }

    /// Returns a queue for at most `depth` reads and writes in flight. One thread uses a queue.
    fn queue(&self, depth: usize) -> Result<Box<dyn Queue>>;

    /// Returns a queue for reads into memory that [`Disk::register`] has not announced.
    fn queue_for_reads(&self, depth: usize) -> Result<Box<dyn Queue>> {
        self.queue(depth)
    }

    /// Announces the memory of the buffers of later queues, so that an engine may register it with
    /// the kernel (pinned once, not for every transfer). A failure costs only speed: queues then
    /// work without it. Keeps no memory alive.
    fn register(&self, _memory: &[Arc<Mapping>]) -> Result<()> {
        Ok(())
    }
}

/// An open directory.
///
/// Names are single components or relative paths below it. They are resolved beneath it and never
/// through symlinks (`openat2`, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS).
pub trait Dir: Send + Sync {
    /// The path with which it was opened. For messages only.
    fn path(&self) -> &Path;

    /// Opens a directory below this one.
    fn open_dir(&self, name: &str) -> Result<Arc<dyn Dir>>;

    /// Creates one directory (mode 0777 less the umask) and opens it. EEXIST if the name is taken.
    /// Not durable before this directory's [`Dir::sync`].
    fn create_dir(&self, name: &str) -> Result<Arc<dyn Dir>>;

    /// Returns all entries except `.` and `..`, in any order.
    fn unsorted_entries(&self) -> Result<Vec<Entry>>;

    /// Returns [`Dir::unsorted_entries`], sorted by name.
    fn entries(&self) -> Result<Vec<Entry>> {
        let mut entries = self.unsorted_entries()?;
        entries.sort_unstable();
        Ok(entries)
    }

    /// Returns facts about a name, `None` if it does not exist. Does not follow symlinks.
    fn stat(&self, name: &str) -> Result<Option<Stat>>;

    /// The identity of this open directory: (device, inode).
    fn id(&self) -> Result<(u64, u64)>;

    /// Time of the last change of this directory or its entries, as [`Stat::changed`]. Two changes
    /// within one clock tick of the file system (milliseconds) may show the same time: a different
    /// time proves a change, an equal time proves nothing.
    fn changed(&self) -> Result<i64>;

    /// Creates a file for writing (`O_EXCL`), for direct I/O if this engine uses it. Preallocates
    /// `len_hint` bytes if the file system can, so that a full disk shows early (ENOSPC, EDQUOT).
    /// [`File::set_len`] cuts surplus.
    fn create_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>>;

    /// Renames a file and opens it for writing over its content, for direct I/O if this engine uses
    /// it. `len_hint` as in [`Dir::create_file`]. Returns `None` unless the file is known to be
    /// unshared: it has another name too, or somebody may have it open. Syncs neither directory.
    fn take_over(&self, _from: &str, _to: &str, _len_hint: u64) -> Result<Option<Arc<dyn File>>> {
        Ok(None)
    }

    /// Opens an existing file for writing over its content, for direct I/O if this engine uses it.
    /// `len_hint` as in [`Dir::create_file`]; the content stays.
    fn overwrite_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>>;

    /// Opens a file for writing as [`Dir::create_file`] does, creates it if needed, and adds `len`
    /// bytes at its end. Returns the file and the offset of those bytes, a multiple of
    /// [`SECTION_ALIGNMENT`]. Callers exclude each other by a lock on the file.
    fn extend_file(&self, name: &str, len: u64) -> Result<(Arc<dyn File>, u64)>;

    /// Opens a file for reading, for direct I/O if this engine uses it.
    fn open_file(&self, name: &str) -> Result<Arc<dyn File>>;

    /// [`Dir::open_file`] of a file whose length is recorded elsewhere. A store need not be asked
    /// for it then: a missing or short object is found when it is read.
    fn open_recorded(&self, name: &str, _len: u64) -> Result<Arc<dyn File>> {
        self.open_file(name)
    }

    /// The lengths of all files below a directory of this one, by their paths in it. An empty name
    /// is this directory. `None` if that costs a call for each file, as on disks.
    fn lengths(&self, _name: &str) -> Result<Option<BTreeMap<String, u64>>> {
        Ok(None)
    }

    /// Reads a whole small file. [`crate::Error::Limit`] if it is longer than `limit` bytes.
    fn read_file(&self, name: &str, limit: u64) -> Result<Vec<u8>>;

    /// Creates a small file (`O_EXCL`), writes and fsyncs it. Its entry is not durable before this
    /// directory's [`Dir::sync`].
    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Replaces a small file, durably. Either the old or the new one exists at any time. `new_name`
    /// is its name before it has replaced the other, where that is needed.
    fn replace_file(&self, name: &str, new_name: &str, bytes: &[u8]) -> Result<()> {
        match self.remove_file(new_name) {
            Err(error) if !error.is_not_found() => return Err(error),
            _ => {}
        }
        self.write_file(new_name, bytes)?;
        self.rename(new_name, name, Rename::Replace)?;
        self.sync()
    }

    /// Creates a file (`O_EXCL`) out of pieces, and fsyncs it, as [`Dir::write_file`]. `next` gets
    /// the most bytes of a piece. It returns a shorter one at the end of the file, and an empty one
    /// behind it. `len_hint` is the length, or somewhat more.
    fn write_pieces(&self, name: &str, len_hint: u64, next: NextPiece<'_>) -> Result<()> {
        let mut bytes = next(usize::try_from(len_hint).unwrap_or(usize::MAX))?;
        loop {
            match next(PIECE_BYTES)? {
                piece if piece.is_empty() => return self.write_file(name, &bytes),
                piece => bytes.extend_from_slice(&piece),
            }
        }
    }

    /// Creates a file (`O_EXCL`) with the content of another, and fsyncs it, as
    /// [`Dir::write_file`]. `copied` gets the bytes of each piece; `false` stops the copy (EINTR).
    fn copy_file(&self, name: &str, from: &dyn File, copied: &mut dyn FnMut(u64) -> bool) -> Result<()> {
        let len = from.len()?;
        let (mut offset, mut written) = (0, 0);
        self.write_pieces(name, len, &mut |most| {
            if written > 0 && !copied(written) {
                return Err(stopped(self.path(), name));
            }
            let piece = from.read_at(offset, most.min(usize::try_from(len - offset).unwrap_or(most)))?;
            if piece.is_empty() && offset < len {
                return Err(crate::Error::io(
                    "copy",
                    self.path().join(name),
                    std::io::ErrorKind::UnexpectedEof,
                ));
            }
            written = piece.len() as u64;
            offset += written;
            Ok(piece)
        })
    }

    /// Renames within this directory.
    fn rename(&self, from: &str, to: &str, how: Rename) -> Result<()>;

    /// Removes a file.
    fn remove_file(&self, name: &str) -> Result<()>;

    /// Removes files. One that is missing is no error.
    fn remove_files(&self, names: &[String]) -> Result<()> {
        for name in names {
            match self.remove_file(name) {
                Err(error) if error.is_not_found() => {}
                removed => removed?,
            }
        }
        Ok(())
    }

    /// Removes an empty directory.
    fn remove_dir(&self, name: &str) -> Result<()>;

    /// Makes entries durable: fsync of the directory.
    fn sync(&self) -> Result<()>;

    /// Tries to lock a file below this directory. `create` makes a missing file, for writers.
    /// [`LockKind::Shared`] opens read-only. Returns `None` if somebody else holds the lock. Fails
    /// with ENOLCK, ENOTSUP or EOPNOTSUPP if the file system has no locks.
    fn try_lock(&self, name: &str, kind: LockKind, create: bool) -> Result<Option<Box<dyn Lock>>>;

    /// Free bytes for an unprivileged writer.
    fn free_bytes(&self) -> Result<u64>;

    /// The fence that keeps an earlier writer of this root out. `None` on file systems, which have
    /// locks.
    fn fence(&self) -> Option<&dyn WriterFence> {
        None
    }
}

/// The owner of a root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Counts the writers of the root.
    pub epoch: u64,
    /// The writer's session.
    pub session: String,
    /// The writer, for messages.
    pub owner: String,
}

/// An exact fence: no change of an earlier owner has effect after another one has taken the root.
pub trait WriterFence {
    /// Returns the owner. `None`: the root is new.
    fn owner(&self) -> Result<Option<Owner>>;

    /// Takes the root for a session.
    fn take(&self, session: &str) -> Result<()>;
}

/// Returns the next bytes of a file that is written: see [`Dir::write_pieces`].
pub type NextPiece<'a> = &'a mut dyn FnMut(usize) -> Result<Vec<u8>>;

/// Bytes of a piece of a file on a disk.
const PIECE_BYTES: usize = 8 << 20;

/// The error of a copy that was told to stop.
fn stopped(dir: &Path, name: &str) -> crate::Error {
    crate::Error::io("copy", dir.join(name), std::io::Error::from_raw_os_error(libc::EINTR))
}

/// An open data file.
#[expect(clippy::len_without_is_empty, reason = "it asks the system, and no caller needs is_empty")]
pub trait File: Send + Sync + std::any::Any {
    /// For messages only.
    fn path(&self) -> &Path;

    /// Length in bytes.
    fn len(&self) -> Result<u64>;

    /// Cuts or extends the file.
    fn set_len(&self, len: u64) -> Result<()>;

    /// Makes content and length durable: fsync, never fdatasync. Does not wait for writes in a
    /// queue. A failed sync is never retried: the file must not be used again.
    fn sync(&self) -> Result<()>;

    /// Reads at any offset and length, without a queue or alignment. For small reads (trailers,
    /// pages). Short only at the end of the file.
    fn read_at(&self, offset: u64, len: usize) -> Result<Vec<u8>>;

    /// How many bytes of the range are in the page cache (`cachestat`), `None` if unknown.
    fn cached(&self, offset: u64, len: u64) -> Option<u64>;

    /// Offset of this file in the engine's file: 0 except for a [`Section`].
    fn base(&self) -> u64 {
        0
    }

    /// True for an object of a store, which was stored in one piece.
    fn is_object(&self) -> bool {
        false
    }

    /// The number of the machine that the bytes come from: 0 for this one, and for a store.
    fn source(&self) -> u64 {
        0
    }

    /// Lets engines find their own file behind the trait.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Buffer to file.
    Write,
    /// File to buffer, bypassing the page cache if the engine can.
    Read,
    /// File to buffer through the page cache. Only missing bytes are read, without readahead.
    ReadCached,
}

/// A finished transfer, with its buffer.
pub struct Completion {
    /// The caller's number of the transfer.
    pub token: u64,
    /// The buffer, returned in every case.
    pub buffer: Buffer,
    /// Bytes transferred: all requested bytes, or fewer at the end of a file that was read. The
    /// queue itself continues short transfers, EINTR and EAGAIN. A write without progress is an
    /// error.
    pub result: Result<usize>,
}

/// Reads and writes in flight. One thread owns a queue. Dropping it waits while there is progress.
pub trait Queue: Send {
    /// Starts a transfer of the first `len` bytes of `buffer`. `offset`, `len` and the buffer's
    /// address are multiples of the engine's alignment (buffers are page-aligned by construction).
    /// Blocks only if the queue is full: call [`Queue::complete`] at least every `depth`
    /// submissions. A refused buffer comes back in a completion: [`crate::Error::Timeout`] if a
    /// full queue made no progress.
    fn submit(
        &mut self,
        transfer: Transfer,
        file: &Arc<dyn File>,
        offset: u64,
        len: usize,
        buffer: Buffer,
        token: u64,
    );

    /// Waits for one transfer to finish. Returns `None` if none is in flight or after `timeout`
    /// (see [`Queue::in_flight`]).
    fn complete(&mut self, timeout: Duration) -> Option<Completion>;

    /// Number of submitted transfers that have not completed.
    fn in_flight(&self) -> usize;
}

/// How long a queue waits for the kernel without progress. Then a full queue refuses a transfer,
/// and a dropped one leaks memory and threads and logs it. (Callers have shorter deadlines of their
/// own.)
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The error of a full queue that refuses a transfer.
fn full(transfers: usize, waited: Duration) -> crate::Error {
    let waited_for = format!("a free place in an I/O queue ({transfers} transfers stuck in flight)");
    crate::Error::Timeout { waited_for, seconds: waited.as_secs_f64() }
}

/// True if `name` is one plain component: not empty, `.` or `..`, without separator or NUL.
pub fn is_component(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0'])
}

/// True if `name` is a relative path of plain components, as a [`Dir`] takes it.
pub fn is_relative(name: &str) -> bool {
    name.split('/').all(is_component)
}
