//! The options of a restore, its statistics and its failure.

use std::time::Duration;

use crate::Error;

/// How a restore reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Bytes of read buffers at a time; raised where it would not hold one block for each of two
    /// reads.
    pub budget_bytes: u64,
    /// Reads in flight.
    pub queue_depth: usize,
    /// Threads that verify and copy, beside the calling one, which reads.
    pub threads: usize,
    /// How long nothing may happen before the restore gives up.
    pub stall_timeout: Duration,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            // 4 MiB × 8 saturates what was measured; the rest is for buffers that are being checked
            // and copied meanwhile.
            budget_bytes: 64 << 20,
            queue_depth: 8,
            threads: crate::sys::cores().min(16),
            stall_timeout: Duration::from_secs(120),
        }
    }
}

/// How a budget is shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shares {
    /// Threads that verify and copy, each with a buffer of its own for what comes through the page
    /// cache.
    pub(super) threads: usize,
    /// Buffers that are read into.
    pub(super) read_buffers: usize,
}

impl LoadOptions {
    /// The budget as a number of bytes of this machine.
    pub(super) fn budget(&self) -> usize {
        usize::try_from(self.budget_bytes).unwrap_or(usize::MAX)
    }

    /// Shares the budget out, for buffers of these sizes: a quarter of it at most is for the
    /// threads' own, of which there are no more than `cells` to work on. A head start asks for the
    /// same before a run is planned.
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
    /// Bytes read past the page cache (or through it where the engine has no other way).
    pub bytes_read: u64,
    /// Bytes that the page cache held.
    pub bytes_cached: u64,
    /// Bytes written to destinations.
    pub bytes_copied: u64,
    /// Blocks whose checksum was compared.
    pub blocks_verified: u64,
    /// Transfers.
    pub reads: u64,
    /// Most bytes of buffers in use at a time.
    pub peak_buffer_bytes: u64,
    /// From start to end.
    pub elapsed: Duration,
}

/// A restore that failed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct LoadFailure {
    /// Why.
    #[source]
    pub error: Error,
    /// Numbers of the destinations that were written to before, in part or as a whole. Their
    /// content is no longer what it was, and not (all of) what was asked for.
    pub overwritten: Vec<u32>,
}

impl From<Error> for LoadFailure {
    /// Nothing was overwritten.
    fn from(error: Error) -> Self {
        Self { error, overwritten: Vec::new() }
    }
}

impl From<LoadFailure> for Error {
    /// Forgets what was overwritten.
    fn from(failure: LoadFailure) -> Self {
        failure.error
    }
}
