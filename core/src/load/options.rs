//! The options of a restore, its statistics and its failure.

use std::time::Duration;

use crate::Error;

/// Limits of a restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Limit on bytes of read buffers. Raised if it does not hold one block for each of two reads.
    pub budget_bytes: u64,
    /// Limit on reads in flight.
    pub queue_depth: usize,
    /// Threads that verify and copy. The calling thread reads.
    pub threads: usize,
    /// The restore fails after this long without progress.
    pub stall_timeout: Duration,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            // 4 MiB × 8 saturated every disk that was measured. The rest is for buffers in
            // verification and copying.
            budget_bytes: 64 << 20,
            queue_depth: 8,
            threads: crate::sys::cores().min(16),
            stall_timeout: Duration::from_secs(120),
        }
    }
}

/// The division of a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shares {
    /// Threads that verify and copy. Each has its own buffer for reads through the page cache.
    pub(super) threads: usize,
    /// Number of buffers for direct reads.
    pub(super) read_buffers: usize,
}

impl LoadOptions {
    /// Returns the budget, at most the address space.
    pub(super) fn budget(&self) -> usize {
        usize::try_from(self.budget_bytes).unwrap_or(usize::MAX)
    }

    /// Divides the budget for buffers of these sizes. The threads' own buffers get at most a
    /// quarter, and there are at most `cells` threads. A prefetch calls this before a run is
    /// planned.
    pub(super) fn shares(&self, cells: usize, cell_buffer: usize, read_buffer: usize) -> Shares {
        let budget = self.budget();
        let threads = self.threads.min(budget / 4 / cell_buffer.max(1)).min(cells).max(1);
        let left = budget.saturating_sub(threads * cell_buffer);
        Shares { threads, read_buffers: (left / read_buffer.max(1)).max(2) }
    }
}

/// The statistics of a restore.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadStats {
    /// Bytes read directly, or through the page cache if the engine has no other way.
    pub bytes_read: u64,
    /// Bytes that were already in the page cache.
    pub bytes_cached: u64,
    /// Bytes written to destinations.
    pub bytes_copied: u64,
    /// Blocks whose checksum was verified.
    pub blocks_verified: u64,
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
