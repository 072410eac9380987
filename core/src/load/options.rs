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
