//! The options of a restore, its statistics and its failure.

use std::time::Duration;

use crate::Error;

/// Limits that depend on the time that one request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadLimits {
    /// Bytes of one transfer, unless one block is larger.
    pub read_bytes: u64,
    /// Limit on unneeded bytes between two needed blocks of one read.
    pub max_gap_bytes: u64,
    /// Files that are opened at once.
    pub files_at_once: usize,
}

impl ReadLimits {
    /// For a disk. From this size on, queue depth hardly matters. One more read costs about as much
    /// as a gap.
    pub const LOCAL: Self = Self { read_bytes: 4 << 20, max_gap_bytes: 64 << 10, files_at_once: 1 };
    /// For a store, where each read waits tens of milliseconds.
    pub const REMOTE: Self = Self { read_bytes: 8 << 20, max_gap_bytes: 1 << 20, files_at_once: 32 };
}

/// Limits of a restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Limit on bytes of read buffers. Raised if it does not hold one block for each of two reads.
    pub budget_bytes: u64,
    /// Limit on reads in flight.
    pub queue_depth: usize,
    /// Limits of single requests.
    pub limits: ReadLimits,
    /// Threads that verify and copy. The calling thread reads.
    pub threads: usize,
    /// The restore fails after this long without progress.
    pub stall_timeout: Duration,
    /// True if other ranks read on this machine too. Then parts of a range are read through the
    /// page cache, where the others find the rest.
    pub shares: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            // 4 MiB × 8 saturated every disk that was measured. The rest is for buffers in
            // verification and copying.
            budget_bytes: 64 << 20,
            queue_depth: 8,
            limits: ReadLimits::LOCAL,
            threads: crate::sys::cores().min(16),
            stall_timeout: Duration::from_secs(120),
            shares: false,
        }
    }
}

impl LoadOptions {
    /// The defaults for a store.
    pub fn remote() -> Self {
        Self { budget_bytes: 256 << 20, queue_depth: 32, limits: ReadLimits::REMOTE, ..Self::default() }
    }
}

/// The statistics of a restore.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadStats {
    /// Bytes read directly, or through the page cache if the engine has no other way.
    pub bytes_read: u64,
    /// Bytes read through the page cache. They were there, or other ranks may need the bytes
    /// between those that this one needs.
    pub bytes_cached: u64,
    /// Bytes written to destinations.
    pub bytes_copied: u64,
    /// Blocks whose checksum was verified.
    pub blocks_verified: u64,
    /// Pieces that arrived damaged or not at all, and were right when they were read again.
    pub pieces_mended: u64,
    /// Number of transfers.
    pub reads: u64,
    /// Peak of buffer bytes in use.
    pub peak_buffer_bytes: u64,
    /// Duration of the restore.
    pub elapsed: Duration,
}

/// A restore that failed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct LoadFailure {
    /// The cause.
    #[source]
    pub error: Error,
    /// Numbers of the destinations that were written to, partly or completely, before the failure.
    /// Their content is undefined.
    pub overwritten: Vec<u32>,
}

impl From<Error> for LoadFailure {
    /// A failure before any write.
    fn from(error: Error) -> Self {
        Self { error, overwritten: Vec::new() }
    }
}

impl From<LoadFailure> for Error {
    /// Drops the list of overwritten destinations.
    fn from(failure: LoadFailure) -> Self {
        failure.error
    }
}
