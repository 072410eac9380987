//! Files and directories, behind one trait with several engines.
//!
//! Every file operation of the manager and of this crate, on names and on data alike, goes through [`Disk`], [`Dir`] and [`File`], so that the
//! product and the simulated file system of the tests run the same code. Large data moves through a [`Queue`], which takes
//! buffers by value and gives them back: memory in flight is not reachable.
//!
//! Durability is the caller's to order: a write is durable after a later [`File::sync`] that was called after the write had completed, an
//! entry of a directory after a [`Dir::sync`]. Nothing here syncs on its own, but for [`Disk::create_dir_all`] and [`Dir::write_file`], which say so.

pub mod conformance;
pub mod noting;
mod posix;
mod probe;
mod room;
mod section;
mod shared;
#[cfg(any(test, feature = "test-support"))]
pub mod simulated;
#[cfg(test)]
mod tests;
mod threaded;
mod transfer;
mod uring;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::Result;
use crate::sys::{Buffer, Mapping};

pub use probe::{Engine, open_disk};
pub use room::{NoRoom, Room, with_room};
pub use section::{SECTION_ALIGNMENT, Section};
pub use shared::{Purpose, shared_disk};

/// Which engine serves a directory, and why: what a capability probe found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineChoice {
    /// `io_uring`, `threads` or `buffered` (or `simulated`).
    pub engine: &'static str,
    /// Whether data files are opened with O_DIRECT.
    pub direct: bool,
    /// Required alignment of memory, offset and length for O_DIRECT, in bytes (1 where not direct).
    pub alignment: usize,
    /// Whether buffers are registered with io_uring.
    pub registered: bool,
    /// One sentence per decision: what was tried, what the system answered, what that means.
    pub reasons: Vec<String>,
}

/// What an entry of a directory is.
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
    /// Its name, one component. Names that are not UTF-8 are not ours and come with replacement characters.
    pub name: String,
    /// What it is.
    pub kind: EntryKind,
    /// Its inode number, as the directory has it: where that is another, something else has the name.
    pub inode: u64,
}

/// What is known of a file or directory without opening it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// What it is.
    pub kind: EntryKind,
    /// Length in bytes.
    pub len: u64,
    /// Device and inode: the identity of what stands under a name. Of what stands there now: a number is given to another file once its file is gone.
    pub id: (u64, u64),
    /// When it last changed, in content, length or name (ctime), in nanoseconds of the file system's own clock; a simulated disk counts changes.
    pub changed: i64,
}

/// How a rename treats what already has the new name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rename {
    /// Fails with EEXIST (`RENAME_NOREPLACE`); where the file system has no such flag, a check and a plain rename (the caller holds the root's lock).
    NoReplace,
    /// Replaces a file atomically (plain `rename`; only ever used on files).
    Replace,
    /// Swaps the two (`RENAME_EXCHANGE`); EINVAL where the file system cannot.
    Exchange,
}

/// How a lock is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockKind {
    /// Many holders.
    Shared,
    /// One holder.
    Exclusive,
}

/// A held lock (an open-file-description lock: it dies with its holder, and excludes other holders in the same process too). Dropping it releases it.
pub trait Lock: Send + Sync {}

/// One file system, seen through one engine.
pub trait Disk: Send + Sync {
    /// Which engine this is and why it was chosen.
    fn choice(&self) -> &EngineChoice;

    /// Opens a directory by path.
    fn open_dir(&self, path: &Path) -> Result<Arc<dyn Dir>>;

    /// Opens a directory by path, making it and its missing ancestors; each one made has its parent synced.
    fn create_dir_all(&self, path: &Path) -> Result<Arc<dyn Dir>>;

    /// A queue of at most `depth` reads and writes in flight. Queues are not shared between threads.
    fn queue(&self, depth: usize) -> Result<Box<dyn Queue>>;

    /// A queue for reads into memory that was not announced by [`Disk::register`]: it is not told of what was.
    fn queue_for_reads(&self, depth: usize) -> Result<Box<dyn Queue>> {
        self.queue(depth)
    }

    /// Announces memory that queues made afterwards will be given buffers of, so that an engine may register it with the kernel (pinned
    /// once, not for every transfer). Costs speed only where it fails: queues then work without. Keeps no memory alive.
    fn register(&self, _memory: &[Arc<Mapping>]) -> Result<()> {
        Ok(())
    }
}

/// An open directory. Names are single components or relative paths below it; they are resolved beneath it and never
/// through symlinks (`openat2`, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS).
pub trait Dir: Send + Sync {
    /// Where it was when it was opened; for messages only.
    fn path(&self) -> &Path;

    /// Opens a directory below.
    fn open_dir(&self, name: &str) -> Result<Arc<dyn Dir>>;

    /// Makes one directory (mode 0777 less the umask) and opens it; EEXIST if there is one. Not durable before this directory's [`Dir::sync`].
    fn create_dir(&self, name: &str) -> Result<Arc<dyn Dir>>;

    /// All entries but `.` and `..`, in no order.
    fn unsorted_entries(&self) -> Result<Vec<Entry>>;

    /// [`Dir::unsorted_entries`], sorted by name.
    fn entries(&self) -> Result<Vec<Entry>> {
        let mut entries = self.unsorted_entries()?;
        entries.sort_unstable();
        Ok(entries)
    }

    /// What stands under a name; `None` if nothing does. Does not follow symlinks.
    fn stat(&self, name: &str) -> Result<Option<Stat>>;

    /// The identity of this open directory itself: (device, inode).
    fn id(&self) -> Result<(u64, u64)>;

    /// When this open directory or one of its entries last changed, as [`Stat::changed`]. Two changes within one tick of the file system's clock (milliseconds) may
    /// show the same: what differs has changed, what is the same need not stand still.
    fn changed(&self) -> Result<i64>;

    /// Makes a file for writing (`O_EXCL`), for direct I/O where this engine does that. `len_hint` is preallocated where the file system can
    /// (so that a full disk shows early: ENOSPC, EDQUOT); surplus is cut with [`File::set_len`].
    fn create_file(&self, name: &str, len_hint: u64) -> Result<Arc<dyn File>>;

    /// Gives a file below another name below, and opens it for writing over what it holds, for direct I/O where this engine does that; `len_hint` as of
    /// [`Dir::create_file`]. `None` where it is not known to be nobody else's: it has another name as well, or somebody may have it open. Neither name's directory is synced.
    fn take_over(&self, _from: &str, _to: &str, _len_hint: u64) -> Result<Option<Arc<dyn File>>> {
        Ok(None)
    }

    /// Opens a file for writing, as [`Dir::create_file`] does, makes it where it is not there, and adds so many bytes at its end: the file, and where they begin, a multiple of
    /// [`SECTION_ALIGNMENT`]. One caller at a time: each holds a lock on it.
    fn extend_file(&self, name: &str, len: u64) -> Result<(Arc<dyn File>, u64)>;

    /// Opens a file for reading, for direct I/O where this engine does that.
    fn open_file(&self, name: &str) -> Result<Arc<dyn File>>;

    /// Reads a whole small file; [`crate::Error::Limit`] if it is longer than `limit` bytes.
    fn read_file(&self, name: &str, limit: u64) -> Result<Vec<u8>>;

    /// Makes a small file (`O_EXCL`), writes and fsyncs it. Its entry is not durable before this directory's [`Dir::sync`].
    fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Renames within this directory.
    fn rename(&self, from: &str, to: &str, how: Rename) -> Result<()>;

    /// Removes a file.
    fn remove_file(&self, name: &str) -> Result<()>;

    /// Removes an empty directory.
    fn remove_dir(&self, name: &str) -> Result<()>;

    /// Makes entries durable: fsync of the directory.
    fn sync(&self) -> Result<()>;

    /// Tries to lock a file below (which is made, for writers, where `create` says so). `None`: someone else holds it. ENOLCK, ENOTSUP, EOPNOTSUPP
    /// where the file system has no locks. [`LockKind::Shared`] opens read-only.
    fn try_lock(&self, name: &str, kind: LockKind, create: bool) -> Result<Option<Box<dyn Lock>>>;

    /// Bytes that an unprivileged writer may still write here.
    fn free_bytes(&self) -> Result<u64>;
}

/// An open data file.
#[expect(
    clippy::len_without_is_empty,
    reason = "it is a question to the system, and nobody asks it the other way"
)]
pub trait File: Send + Sync + std::any::Any {
    /// For messages only.
    fn path(&self) -> &Path;

    /// Length in bytes.
    fn len(&self) -> Result<u64>;

    /// Cuts or extends the file.
    fn set_len(&self, len: u64) -> Result<()>;

    /// Makes content and length durable: fsync, never fdatasync. Does not wait for writes still in a queue. A failed sync is never
    /// tried again: the file is dead.
    fn sync(&self) -> Result<()>;

    /// Reads at any offset and length, without a queue and without alignment demands; for small reads (trailers, pages). Short only at the end of the file.
    fn read_at(&self, offset: u64, len: usize) -> Result<Vec<u8>>;

    /// How many bytes of the range the page cache holds, where the system can say (`cachestat`); `None` where not.
    fn cached(&self, offset: u64, len: u64) -> Option<u64>;

    /// Where in the engine's file it begins: 0, but for a [`Section`].
    fn base(&self) -> u64 {
        0
    }

    /// For engines: their own file behind the trait.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// What a queue is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Buffer to file.
    Write,
    /// File to buffer, past the page cache where the engine can.
    Read,
    /// File to buffer through the page cache (the bytes are there already).
    ReadCached,
}

/// A finished transfer, with its buffer.
pub struct Completion {
    /// The caller's number for it.
    pub token: u64,
    /// The memory, given back whatever happened.
    pub buffer: Buffer,
    /// Bytes transferred: all that were asked for, or less at the end of a file that was read. Short transfers are continued by
    /// the queue itself, EINTR and EAGAIN too; a write that makes no progress is an error.
    pub result: Result<usize>,
}

/// Reads and writes in flight. One thread owns a queue. Dropping it waits for what is in flight (as long as there is progress).
pub trait Queue: Send {
    /// Starts a transfer of the first `len` bytes of `buffer`. `offset`, `len` and the buffer's address are multiples of the engine's alignment
    /// (buffers are page-aligned by construction). Blocks only where the queue is full: call [`Queue::complete`] at least every `depth` submissions.
    /// A buffer that could not be submitted comes back as a completion with the error: [`crate::Error::Timeout`] where a full queue made no progress for too long.
    fn submit(
        &mut self,
        transfer: Transfer,
        file: &Arc<dyn File>,
        offset: u64,
        len: usize,
        buffer: Buffer,
        token: u64,
    );

    /// Waits for one transfer to finish; `None` if none is in flight or `timeout` has passed (see [`Queue::in_flight`]).
    fn complete(&mut self, timeout: Duration) -> Option<Completion>;

    /// Transfers submitted and not yet given back.
    fn in_flight(&self) -> usize;
}

/// How long a queue waits for the kernel without any progress: a full one before it refuses a transfer, a dropped one before it leaves memory and threads
/// behind, and says so in the log. (Its users have shorter deadlines of their own, and keep no queue full.)
const STALL_DEADLINE: Duration = Duration::from_secs(30);

/// Why a full queue refuses a transfer.
fn full(transfers: usize, waited: Duration) -> crate::Error {
    let waited_for = format!("room in an I/O queue ({transfers} transfers in flight, none of which ends)");
    crate::Error::Timeout { waited_for, seconds: waited.as_secs_f64() }
}

/// Whether `name` is one plain component: not empty, `.`, `..`, nor with a separator or NUL.
pub fn is_component(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0'])
}

/// Whether `name` is a relative path of plain components: what a [`Dir`] takes.
pub fn is_relative(name: &str) -> bool {
    name.split('/').all(is_component)
}

/// A path for messages.
pub fn join(dir: &Path, name: &str) -> PathBuf {
    dir.join(name)
}
