//! Options as JSON from the package → options of the manager.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use serde::Deserialize;

use stepwell_core::io::{Engine, Purpose, shared_disk};
use stepwell_manager::coordination::Coordinator;
use stepwell_manager::coordination::shared_directory::SharedDirectory;
use stepwell_manager::directory_layout::CONTROL;
use stepwell_manager::{
    Environment, FilesPer, OnSaveError, Options, Retention, SavePolicy, StepName, WritersPer,
};

use crate::board::Ranks;
use crate::errors::invalid;

/// The options as `stepwell._options.to_json` writes them. A name or type that the two sides do not
/// share is an error, never a default.
#[expect(clippy::struct_excessive_bools, reason = "flags as the user has written them")]
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    save_policy: SavePolicy,
    retention: Retention,
    step_name: Option<StepName>,
    staging_bytes: Option<u64>,
    max_pending: usize,
    read_only: bool,
    create: bool,
    take_over: bool,
    silence: f64,
    grace: f64,
    overwrite_from_bytes: Option<u64>,
    on_save_error: Told,
    chunk_bytes: u64,
    min_row_bytes: u64,
    block_bytes: u64,
    writers: Option<u32>,
    writers_per: WritersPer,
    files_per: FilesPer,
    compare_replicas: bool,
    capture_threads: Option<usize>,
    queue_depth: Option<usize>,
    /// Seconds, as `silence` and `grace`.
    stall_timeout: f64,
    detect_torn: bool,
    engine: String,
    root_metadata: serde_json::Value,
}

/// The effect of a background failure.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Told {
    Raise,
    Warn,
}

/// The manager's options, and which engine to use.
pub fn parse(py: Python<'_>, text: &str) -> PyResult<(Options, Engine)> {
    let written: Written =
        serde_json::from_str(text).map_err(|error| invalid(py, &format!("options: {error}")))?;
    let options = Options {
        save_policy: written.save_policy,
        retention: written.retention,
        step_name: written.step_name,
        staging_bytes: written.staging_bytes,
        max_pending: written.max_pending,
        read_only: written.read_only,
        create: written.create,
        take_over: written.take_over,
        silence: seconds(py, "silence", written.silence)?,
        grace: seconds(py, "grace", written.grace)?,
        overwrite_from_bytes: written.overwrite_from_bytes,
        on_save_error: match written.on_save_error {
            Told::Raise => OnSaveError::Raise,
            Told::Warn => OnSaveError::Warn,
        },
        chunk_bytes: written.chunk_bytes,
        min_row_bytes: written.min_row_bytes,
        block_bytes: written.block_bytes,
        writers: written.writers,
        writers_per: written.writers_per,
        files_per: written.files_per,
        compare_replicas: written.compare_replicas,
        capture_threads: written.capture_threads,
        queue_depth: written.queue_depth,
        stall_timeout: seconds(py, "stall_timeout", written.stall_timeout)?,
        detect_torn: written.detect_torn,
        root_metadata: written.root_metadata,
    };
    Ok((options, engine(py, &written.engine)?))
}

fn seconds(py: Python<'_>, name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|error| invalid(py, &format!("{name}={seconds}: {error}")))
}

/// An engine by its name.
pub fn engine(py: Python<'_>, name: &str) -> PyResult<Engine> {
    name.parse().map_err(|error| invalid(py, &format!("{error}")))
}

/// The real environment of one process, for `path`.
pub fn environment(
    path: &Path,
    engine: Engine,
    purpose: Purpose,
) -> Result<Environment, stepwell_manager::Error> {
    Ok(Environment::single_process(shared_disk(path, engine, purpose)?))
}

/// The real world of one of several processes. They meet where the root is, if nothing else carries
/// their messages.
pub fn environment_of(
    path: &Path,
    engine: Engine,
    options: &Options,
    ranks: Option<Ranks>,
) -> Result<Environment, stepwell_manager::Error> {
    let purpose = if options.read_only { Purpose::Read } else { Purpose::Write };
    let environment = environment(path, engine, purpose)?;
    let coordinator: Arc<dyn Coordinator> = match ranks {
        None => return Ok(environment),
        Some(Ranks::Board(board)) => Arc::new(board),
        Some(Ranks::Directory(membership, directory)) => {
            membership.check()?;
            let directory = directory.unwrap_or_else(|| path.join(CONTROL));
            let parent = environment.disk.create_dir_all(&directory)?;
            Arc::new(SharedDirectory::meet(&parent, membership, &*environment.rng, options.stall_timeout)?)
        }
    };
    Ok(Environment { coordinator, ..environment })
}
