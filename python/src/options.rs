//! Options as JSON from the package → options of the manager.

use std::path::Path;
use std::time::Duration;

use pyo3::prelude::*;
use serde_json::Value;

use stepwell_core::io::{Engine, Purpose, shared_disk};
use stepwell_manager::{Environment, OnSaveError, Options};

use crate::errors::invalid;

/// What `stepwell.options.to_json` wrote: the manager's options, and which engine to use.
pub fn parse(py: Python<'_>, text: &str) -> PyResult<(Options, Engine)> {
    let wrong = |error: serde_json::Error| invalid(py, &format!("options: {error}"));
    let mut all: serde_json::Map<String, Value> = serde_json::from_str(text).map_err(wrong)?;
    let mut take = |name: &str| all.remove(name).unwrap_or(Value::Null);
    let mut options = Options {
        save_policy: serde_json::from_value(take("save_policy")).map_err(wrong)?,
        retention: serde_json::from_value(take("retention")).map_err(wrong)?,
        step_name: serde_json::from_value(take("step_name")).map_err(wrong)?,
        staging_bytes: take("staging_bytes").as_u64(),
        read_only: take("read_only").as_bool().unwrap_or(false),
        create: take("create").as_bool().unwrap_or(true),
        take_over: take("take_over").as_bool().unwrap_or(false),
        capture_threads: take("capture_threads").as_u64().map(|threads| threads as usize),
        root_metadata: take("root_metadata"),
        ..Options::default()
    };
    let whole = |value: Value, default: u64| value.as_u64().unwrap_or(default);
    options.max_pending = whole(take("max_pending"), options.max_pending as u64) as usize;
    options.queue_depth = whole(take("queue_depth"), options.queue_depth as u64) as usize;
    options.chunk_bytes = whole(take("chunk_bytes"), options.chunk_bytes);
    options.min_row_bytes = whole(take("min_row_bytes"), options.min_row_bytes);
    options.block_bytes = whole(take("block_bytes"), options.block_bytes);
    if let Some(seconds) = take("stall_timeout").as_f64() {
        options.stall_timeout = Duration::try_from_secs_f64(seconds)
            .map_err(|error| invalid(py, &format!("stall_timeout={seconds}: {error}")))?;
    }
    if take("on_save_error").as_str() == Some("warn") {
        options.on_save_error = OnSaveError::Warn;
    }
    Ok((options, engine(py, take("engine").as_str().unwrap_or("auto"))?))
}

/// An engine by its name.
pub fn engine(py: Python<'_>, name: &str) -> PyResult<Engine> {
    name.parse().map_err(|error| invalid(py, &format!("{error}")))
}

/// The real world of one process, for what lies at `path`.
pub fn environment(
    path: &Path,
    engine: Engine,
    purpose: Purpose,
) -> Result<Environment, stepwell_manager::Error> {
    Ok(Environment::single_process(shared_disk(path, engine, purpose)?))
}
