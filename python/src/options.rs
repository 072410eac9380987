//! Options as JSON from the package → options of the manager.

use std::path::Path;
use std::sync::Arc;

use pyo3::prelude::*;
use serde::Deserialize;

use stepwell_core::io::{Engine, Purpose, shared_disk};
use stepwell_manager::coordination::Coordinator;
use stepwell_manager::coordination::shared_directory::SharedDirectory;
use stepwell_manager::directory_layout::CONTROL;
use stepwell_manager::{Environment, Options};

use crate::board::Ranks;
use crate::errors::invalid;

/// The JSON of `stepwell._options.to_json`. A name or type that the two sides do not share is an
/// error, never a default.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    engine: String,
    options: Options,
}

/// The manager's options, and which engine to use.
pub fn parse(py: Python<'_>, text: &str) -> PyResult<(Options, Engine)> {
    let Written { engine: name, options } =
        serde_json::from_str(text).map_err(|error| invalid(py, &format!("options: {error}")))?;
    Ok((options, engine(py, &name)?))
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
