//! The options of a manager. Every option is typed; none switches another off.

use std::time::Duration;

use serde::{Deserialize, Deserializer};
use stepwell_core::load::LoadOptions;
use stepwell_core::sys::total_memory;

use crate::error::{Error, Result};
use crate::retention::Retention;
use crate::save_policy::SavePolicy;
use crate::step_name::StepName;

/// The scope of [`Options::writers`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WritersPer {
    /// On each machine.
    #[default]
    Node,
    /// On each socket of a machine, for ranks that are bound to one.
    Socket,
}

/// The owner of a data file for each item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FilesPer {
    /// Each rank.
    #[default]
    Rank,
    /// Each machine: its ranks write side by side.
    Node,
}

/// See [`Options::default`] for the defaults: every call saves, nothing is deleted. The bindings
/// pass them as JSON; there, times are seconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own; no two exclude each other")]
pub struct Options {
    /// Which calls of `save` write.
    pub save_policy: SavePolicy,
    /// Which steps stay.
    pub retention: Retention,
    /// How steps are named; `None`: as the root says, or `step_` with eight digits.
    pub step_name: Option<StepName>,
    /// Bytes of staging memory; `None`: what the states need, up to a quarter of the free memory.
    pub staging_bytes: Option<u64>,
    /// Saves that may wait beside the one that is being written.
    pub max_pending: usize,
    /// Write nothing at all.
    pub read_only: bool,
    /// Make the root where it is missing.
    pub create: bool,
    /// On a file system without locks: become the writer, once no other has given a sign of life
    /// for `silence`.
    pub take_over: bool,
    /// How long a writer that did not end by itself must have been silent before its root is taken
    /// over; only where there are no locks.
    #[serde(deserialize_with = "seconds")]
    pub silence: Duration,
    /// How long retention waits for a reader's lease before it removes a step from the listing.
    /// Without locks there are no leases: the files of a retired step then stay for this time.
    #[serde(deserialize_with = "seconds")]
    pub grace: Duration,
    /// Files of so many bytes of the last retired step are written over by the next save; `None`:
    /// all are deleted.
    pub overwrite_from_bytes: Option<u64>,
    /// Retention verifies the newest step before it deletes or thins older ones. A damaged step
    /// does not count. Costs a read of each step by the leader, after its commit.
    pub verify_before_retiring: bool,
    /// The effect of a background failure that nobody has seen.
    pub on_save_error: OnSaveError,
    /// Bytes of a chunk, about.
    pub chunk_bytes: u64,
    /// Rows of chunks stay at least so long, in bytes.
    pub min_row_bytes: u64,
    /// Bytes of a block: the unit of checksums and of reading.
    pub block_bytes: u64,
    /// At most so many ranks of each node, or socket, write what others hold too; `None`: all of
    /// them.
    pub writers: Option<u32>,
    /// The scope of `writers`.
    pub writers_per: WritersPer,
    /// Into how many files the ranks write.
    pub files_per: FilesPer,
    /// True if replicas that layouts declare are compared, by samples; what is simply there on
    /// several ranks always is.
    pub compare_replicas: bool,
    /// Threads that capture; `None`: a few.
    pub capture_threads: Option<usize>,
    /// Reads or writes in flight; `None`: 16 writes, and as many reads as [`LoadOptions`] has by
    /// default.
    pub queue_depth: Option<usize>,
    /// How long nothing may happen before a wait gives up.
    #[serde(deserialize_with = "seconds")]
    pub stall_timeout: Duration,
    /// For debugging: reads everything that is captured behind a call twice, first while the caller
    /// waits, and fails a save of which something was changed in between.
    pub detect_torn: bool,
    /// The user's metadata of the root; the first writer's stays.
    pub root_metadata: serde_json::Value,
}

/// See [`Options::queue_depth`].
const WRITES_IN_FLIGHT: usize = 16;

/// Nothing waits for longer than 31 years: sums of timeouts stay within every clock.
const MAX_STALL_TIMEOUT: Duration = Duration::from_secs(1_000_000_000);

/// A writer gives several signs of life in it, each of which is synced.
const MIN_SILENCE: Duration = Duration::from_millis(60);

/// The effect of a background failure that nobody has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnSaveError {
    /// It raises once, at the next call that can.
    #[default]
    Raise,
    /// It is logged, and training goes on.
    Warn,
}

fn seconds<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Duration, D::Error> {
    Duration::try_from_secs_f64(f64::deserialize(from)?).map_err(serde::de::Error::custom)
}

impl Default for Options {
    fn default() -> Self {
        Self {
            save_policy: SavePolicy::default(),
            retention: Retention::default(),
            step_name: None,
            staging_bytes: None,
            max_pending: 1,
            read_only: false,
            create: true,
            take_over: false,
            silence: Duration::from_secs(60),
            grace: Duration::from_secs(30 * 60),
            overwrite_from_bytes: Some(8 << 20),
            verify_before_retiring: false,
            on_save_error: OnSaveError::default(),
            chunk_bytes: 8 << 20,
            min_row_bytes: 4096,
            block_bytes: stepwell_core::format::block::DEFAULT_BLOCK_BYTES,
            writers: None,
            writers_per: WritersPer::default(),
            files_per: FilesPer::default(),
            compare_replicas: true,
            capture_threads: None,
            queue_depth: None,
            stall_timeout: Duration::from_secs(600),
            detect_torn: false,
            root_metadata: serde_json::Value::Null,
        }
    }
}

impl Options {
    /// Writes in flight.
    pub(crate) fn write_depth(&self) -> usize {
        self.queue_depth.unwrap_or(WRITES_IN_FLIGHT)
    }

    /// How checkpoints are read; `shares`: whether other ranks do so on this machine. Then half of
    /// the buffers keep its disks as busy, and are half of the memory that a restore has to touch
    /// first.
    pub fn load_options(&self, shares: bool) -> LoadOptions {
        let mut ours = LoadOptions::default();
        if shares {
            ours.budget_bytes /= 2;
        }
        LoadOptions {
            queue_depth: self.queue_depth.unwrap_or(ours.queue_depth),
            stall_timeout: self.stall_timeout,
            ..ours
        }
    }

    /// Refuses what can never work.
    pub fn check(&self) -> Result<()> {
        self.save_policy.check()?;
        self.retention.check()?;
        if !self.block_bytes.is_multiple_of(4096)
            || !stepwell_core::limits::BLOCK_BYTES.contains(&self.block_bytes)
        {
            return Err(Error::Invalid(format!(
                "block_bytes={} must be a multiple of 4096 within {:?}",
                self.block_bytes,
                stepwell_core::limits::BLOCK_BYTES
            )));
        }
        if let (Some(bytes), Some(there)) = (self.staging_bytes, total_memory())
            && bytes > there
        {
            // The ring is faulted in whole: the system would end the process for it.
            return Err(Error::Invalid(format!(
                "staging_bytes={bytes} is more memory than this machine has ({there} bytes); pass less, or leave the size to stepwell"
            )));
        }
        if self.silence < MIN_SILENCE || self.silence.max(self.grace) > MAX_STALL_TIMEOUT {
            return Err(Error::Invalid(format!(
                "silence={:?} must be at least {MIN_SILENCE:?}, and silence and grace={:?} at most {MAX_STALL_TIMEOUT:?}",
                self.silence, self.grace
            )));
        }
        if self.stall_timeout > MAX_STALL_TIMEOUT {
            return Err(Error::Invalid(format!(
                "stall_timeout={:e} s must be at most {:e} s",
                self.stall_timeout.as_secs_f64(),
                MAX_STALL_TIMEOUT.as_secs_f64()
            )));
        }
        if self.writers == Some(0) {
            return Err(Error::Invalid(
                "writers=0 leaves nobody to write; pass at least 1, or None".to_owned(),
            ));
        }
        if self.chunk_bytes == 0 || self.queue_depth == Some(0) || self.stall_timeout.is_zero() {
            return Err(Error::Invalid(
                "chunk_bytes, queue_depth and stall_timeout must be more than 0".to_owned(),
            ));
        }
        Ok(())
    }
}
