//! What a caller may set, what a restore reports, and how it fails.

use std::time::Duration;

use crate::Error;

/// How a restore reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Bytes of read buffers at a time; raised where it would not hold one block for each of two reads.
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
            // 4 MiB × 8 saturates what was measured; the rest is for buffers that are being checked and copied meanwhile.
            budget_bytes: 64 << 20,
            queue_depth: 8,
            threads: crate::sys::cores().min(16),
            stall_timeout: Duration::from_secs(120),
        }
    }
}

/// What a restore did.
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
    /// Numbers of the destinations that were written to before, in part or as a whole. Their content is no longer what it was, and not
    /// (all of) what was asked for.
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
