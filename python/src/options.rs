//! Decodes the package's options from JSON.

use std::sync::Arc;

use pyo3::prelude::*;
use serde::Deserialize;

use stepwell_core::io::{Engine, Purpose};
use stepwell_manager::coordination::Coordinator;
use stepwell_manager::coordination::shared_directory::SharedDirectory;
use stepwell_manager::directory_layout::CONTROL;
use stepwell_manager::{Environment, Options};

use crate::board::Ranks;
use crate::errors::invalid;
use crate::location::{self, Location};

/// The JSON of `stepwell._options.to_json`. Unknown names and wrong types are errors, never
/// defaults.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    engine: String,
    options: Options,
}

/// Returns the manager's options, and the I/O engine.
pub fn parse(py: Python<'_>, text: &str) -> PyResult<(Options, Engine)> {
    let Written { engine: name, options } =
        serde_json::from_str(text).map_err(|error| invalid(py, &format!("options: {error}")))?;
    Ok((options, engine(py, &name)?))
}

/// Returns the I/O engine with a name.
pub fn engine(py: Python<'_>, name: &str) -> PyResult<Engine> {
    name.parse().map_err(|error| invalid(py, &format!("{error}")))
}

/// Returns the real environment of one of several processes. Without another coordinator, they meet
/// in the root.
pub fn environment_of(
    location: &Location,
    engine: Engine,
    options: &Options,
    ranks: Option<Ranks>,
) -> Result<Environment, stepwell_manager::Error> {
    let purpose = if options.read_only { Purpose::Read } else { Purpose::Write };
    let environment = location.environment(engine, purpose)?;
    let coordinator: Arc<dyn Coordinator> = match ranks {
        None => return Ok(environment),
        Some(Ranks::Board(board)) => Arc::new(board),
        Some(Ranks::Directory(membership, directory)) => {
            membership.check()?;
            if directory.is_none() && location.is_store() {
                return Err(stepwell_manager::Error::Invalid(format!(
                    "the ranks of a SharedDirectory meet on a file system, and {} is an object store: pass path=, or another coordinator",
                    location.path.display()
                )));
            }
            if directory.is_none() && options.per_machine {
                return Err(stepwell_manager::Error::Invalid(format!(
                    "each machine has {} for itself, so the ranks of a SharedDirectory cannot meet there: pass path=, or another coordinator",
                    location.path.display()
                )));
            }
            let directory = directory.unwrap_or_else(|| location.path.join(CONTROL));
            // The root may be in a store, and the directory on a disk.
            let parent = location::of_path(&directory, engine, purpose)?.disk.create_dir_all(&directory)?;
            Arc::new(SharedDirectory::meet(&parent, membership, &*environment.rng, options.stall_timeout)?)
        }
    };
    Ok(Environment { coordinator, ..environment })
}
