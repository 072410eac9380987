//! The options of a manager. No option disables another one.

use std::time::Duration;

use serde::{Deserialize, Deserializer};
use stepwell_core::format::block;
use stepwell_core::io::Disk;
use stepwell_core::load::LoadOptions;
use stepwell_core::staging::DEFAULT_SLOT_BYTES;
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
    /// On each socket of a machine, for ranks that are bound to a socket.
    Socket,
}

/// The owner of a data file for each item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FilesPer {
    /// Each rank.
    #[default]
    Rank,
    /// Each machine: its ranks write into one file.
    Node,
}

/// The options of a manager. By default every call saves, and nothing is deleted. In JSON, times
/// are in seconds.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own; no two exclude each other")]
pub struct Options {
    /// The calls of `save` that write.
    pub save_policy: SavePolicy,
    /// The steps that stay.
    pub retention: Retention,
    /// The pattern of step names. `None`: the root's, or `step_` with eight digits.
    pub step_name: Option<StepName>,
    /// Bytes of staging memory. `None`: as much as the states need, up to a quarter of the free
    /// memory.
    pub staging_bytes: Option<u64>,
    /// The number of saves that may wait beside the one that is being written.
    pub max_pending: usize,
    /// True for a manager that writes nothing.
    pub read_only: bool,
    /// True if the root is a directory on the local disk of each machine ([`crate::machines`]).
    pub per_machine: bool,
    /// The number of machines that have a file, if the root is on the local disk of each. 1: none
    /// has a copy.
    pub copies: u32,
    /// True to create a missing root.
    pub create: bool,
    /// True to become the writer on a file system without locks, once no other writer has sent a
    /// heartbeat for `silence`.
    pub take_over: bool,
    /// The time without a heartbeat after which the root of a writer that did not close may be
    /// taken over. Only used without locks.
    #[serde(deserialize_with = "seconds")]
    pub silence: Duration,
    /// The longest wait of retention for a reader's lease, before it retires the step. Without
    /// locks, the files of a retired step stay for this time.
    #[serde(deserialize_with = "seconds")]
    pub grace: Duration,
    /// The next save overwrites files of the last retired step that have at least so many bytes.
    /// `None`: all are deleted.
    pub overwrite_from_bytes: Option<u64>,
    /// True to verify the newest step before older ones are deleted or thinned. A damaged step does
    /// not count. The leader then reads each step after its commit.
    pub verify_before_retiring: bool,
    /// The effect of a background failure that nobody has seen.
    pub on_save_error: OnSaveError,
    /// The approximate size of a chunk in bytes.
    pub chunk_bytes: u64,
    /// The minimal length of a chunk's rows in bytes.
    pub min_row_bytes: u64,
    /// The size of a block in bytes: the unit of checksums and reads.
    pub block_bytes: u64,
    /// The most ranks of a node, or socket, that write replicated data. `None`: all of them.
    pub writers: Option<u32>,
    /// The scope of `writers`.
    pub writers_per: WritersPer,
    /// The owner of a data file: a rank or a machine.
    pub files_per: FilesPer,
    /// True to compare samples of replicas that layouts declare. Plain leaves of several ranks are
    /// always compared.
    pub compare_replicas: bool,
    /// The number of capture threads. `None`: a few.
    pub capture_threads: Option<usize>,
    /// The reads or writes in flight. `None`: 16 writes, and the reads of [`LoadOptions::default`].
    pub queue_depth: Option<usize>,
    /// The longest time without progress before a wait fails.
    #[serde(deserialize_with = "seconds")]
    pub stall_timeout: Duration,
    /// For debugging: reads all late captures twice, first while the caller waits. A save fails if
    /// a leaf has changed in between.
    pub detect_torn: bool,
    /// The user's metadata of the root. The first writer's stays.
    pub root_metadata: serde_json::Value,
}

/// See [`Options::queue_depth`].
const WRITES_IN_FLIGHT: usize = 16;

/// The largest timeout, 31 years. Sums of timeouts then fit every clock.
const MAX_STALL_TIMEOUT: Duration = Duration::from_secs(1_000_000_000);

/// The smallest silence: a writer sends several heartbeats in it, each with a sync.
const MIN_SILENCE: Duration = Duration::from_millis(60);

/// The effect of a background failure that nobody has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnSaveError {
    /// The next call raises it, once.
    #[default]
    Raise,
    /// It is logged.
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
            per_machine: false,
            copies: 1,
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

/// True if the launcher has started several ranks on this machine: torchrun or Open MPI.
fn has_ranks_beside() -> bool {
    let several =
        |name| std::env::var(name).is_ok_and(|ranks| ranks.parse::<u32>().is_ok_and(|ranks| ranks > 1));
    several("LOCAL_WORLD_SIZE") || several("OMPI_COMM_WORLD_LOCAL_SIZE")
}

impl Options {
    /// Returns the number of writes in flight.
    pub(crate) fn write_depth(&self) -> usize {
        self.queue_depth.unwrap_or(WRITES_IN_FLIGHT)
    }

    /// Returns the options for reads. `shares`: other ranks read on this machine too, which the
    /// launcher may say as well. Then half of the buffers keep its disks as busy, and take half of
    /// the memory.
    pub fn load_options(&self, disk: &dyn Disk, shares: bool) -> LoadOptions {
        let mut ours = if disk.is_remote() { LoadOptions::remote() } else { LoadOptions::default() };
        let shares = shares || has_ranks_beside();
        if shares {
            ours.budget_bytes /= 2;
        }
        LoadOptions {
            queue_depth: self.queue_depth.unwrap_or(ours.queue_depth),
            stall_timeout: self.stall_timeout,
            shares,
            ..ours
        }
    }

    /// Refuses options that can never work.
    pub fn check(&self) -> Result<()> {
        self.save_policy.check()?;
        self.retention.check()?;
        block::check_size(self.block_bytes)
            .map_err(|what| Error::Invalid(format!("block_bytes={}: {what}", self.block_bytes)))?;
        if self.block_bytes > DEFAULT_SLOT_BYTES as u64 {
            return Err(Error::Invalid(format!(
                "block_bytes={} is more than {DEFAULT_SLOT_BYTES}, the bytes of a slot",
                self.block_bytes
            )));
        }
        if let (Some(bytes), Some(there)) = (self.staging_bytes, total_memory())
            && bytes > there
        {
            // The ring is faulted in whole: the system would kill the process.
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
        if self.copies == 0 || (self.copies > 1 && !self.per_machine) {
            return Err(Error::Invalid(format!(
                "copies={} must be at least 1, and more only for a root on the local disks of several machines",
                self.copies
            )));
        }
        if self.writers == Some(0) {
            return Err(Error::Invalid(
                "the number of writers is 0, so nobody would write. It must be at least 1".to_owned(),
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
