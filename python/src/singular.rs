//! Operations on a path without a manager: save or open one checkpoint, inspect a root.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use stepwell_core::io::{self, Engine, Purpose};
use stepwell_core::staging::StagingPool;
use stepwell_core::sys::{Driver, driver};
use stepwell_manager::root::PathKind;
use stepwell_manager::singular;
use stepwell_manager::{Environment, Error, Manager as Engined, Options, SaveRequest, metrics, root};

use crate::board::Agreeing;
use crate::checkpoint::Checkpoint;
use crate::errors::raise_manager;
use crate::events::Events;
use crate::location::{FindingRow, Location};
use crate::manager::{call, exists_named, json};
use crate::options;
use crate::save_handle::SaveHandle;
use crate::snapshot::{OnDevices, Snapshot, request};
use crate::state::State;
use crate::wait;

/// The right to save to one path. On several ranks, dropping it unused ends the save on all ranks.
#[pyclass(frozen, module = "stepwell._core")]
pub struct PathTicket {
    path: PathBuf,
    unused: Mutex<Option<singular::PathTicket>>,
    /// The reason why it is not used, for the other ranks.
    cause: Arc<OnceLock<String>>,
}

impl PathTicket {
    fn take(&self) -> Option<singular::PathTicket> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl PathTicket {
    /// Checks the path. Several ranks meet here. Raises for an existing path, unless `exists`
    /// allows its replacement.
    #[new]
    #[pyo3(signature = (path, exists, options, ranks = None))]
    fn new(
        py: Python<'_>,
        path: Location,
        exists: &str,
        options: &str,
        ranks: Option<Agreeing<'_>>,
    ) -> PyResult<Self> {
        let (options, engine) = options::parse(py, options)?;
        let exists = exists_named(exists)?;
        let ranks = ranks.map(Agreeing::ranks);
        let shown = path.path.clone();
        let ticket = call(py, move || {
            let environment = options::environment_of(&path, engine, &options, ranks)?;
            singular::PathTicket::new(&path.path, exists, &options, &environment)
        })?;
        let cause = ticket.cause();
        Ok(Self { path: shown, unused: Mutex::new(Some(ticket)), cause })
    }

    /// Saves a flattened state. Returns when it is captured. A copy of a step has its number.
    #[expect(clippy::too_many_arguments, reason = "the arguments of `save`, one by one")]
    #[pyo3(signature = (state, metrics, custom_metadata, snapshot, streams, events, step = 0))]
    fn save(
        &self,
        py: Python<'_>,
        state: &State,
        metrics: BTreeMap<String, f64>,
        custom_metadata: &str,
        snapshot: &str,
        streams: HashMap<u32, u64>,
        events: &Events,
        step: u64,
    ) -> PyResult<SaveHandle> {
        let devices = OnDevices::new(py, &streams, Vec::new())?;
        let (request, parcel) = request(py, step, state, Snapshot::named(snapshot)?, devices, events)?;
        let unsupported = parcel.flat().map(|flat| flat.unsupported.clone()).unwrap_or_default();
        let request = SaveRequest { metrics, custom_metadata: json(custom_metadata)?, ..request };
        let cancel = Arc::clone(&request.cancel);
        let ticket = self.take().ok_or_else(|| PyRuntimeError::new_err("this ticket was used before"))?;
        let shown = self.path.display().to_string();
        let save = wait::until_stopped(
            py,
            &cancel,
            move || ticket.save(request),
            |late| {
                // It was captured before it could be stopped, so it goes on. Keep its handle to
                // report its failure.
                if let Ok(save) = late {
                    let kept = py
                        .import("stepwell._singular")
                        .and_then(|module| module.call_method1("keep", (SaveHandle::new(save), shown)));
                    if let Err(error) = kept {
                        error.write_unraisable(py, None);
                    }
                }
            },
        )?
        .map_err(|error| raise_manager(py, &error))?;
        parcel.give_back(py);
        Ok(SaveHandle::new(save).without(unsupported))
    }

    /// Ends the save on all ranks because the caller has raised, unless this ticket was used.
    fn fail(&self, py: Python<'_>, cause: String) -> PyResult<()> {
        let _ = self.cause.set(cause);
        let ticket = self.take();
        wait::on_thread(py, move || drop(ticket))
    }
}

/// Returns the kind of a location: absent, checkpoint, root or directory.
#[pyfunction]
pub fn path_kind(py: Python<'_>, path: Location) -> PyResult<&'static str> {
    let kind = call(py, move || {
        let environment = path.environment(Engine::Auto, Purpose::Read)?;
        root::path_kind(&environment, &path.path)
    })?;
    Ok(match kind {
        PathKind::Absent => "absent",
        PathKind::Checkpoint => "checkpoint",
        PathKind::Root => "root",
        PathKind::Directory => "directory",
    })
}

/// Returns the directories of a root in a store, with the bytes of their files. For a disk, the
/// command line looks itself.
#[pyfunction]
pub fn stored_names(py: Python<'_>, root: Location) -> PyResult<Vec<(String, u64)>> {
    call(py, move || {
        let environment = root.environment(Engine::Auto, Purpose::Read)?;
        let directory = environment.disk.open_dir(&root.path)?;
        let names = directory.entries()?.into_iter().map(|entry| entry.name);
        let with_bytes = |name: String| {
            let lengths = directory.lengths(&name)?.unwrap_or_default();
            Ok((name, lengths.values().sum()))
        };
        names.map(with_bytes).collect()
    })
}

/// Tries the store of a URL that nothing else uses, and removes all objects below it. Writers race
/// for `races` keys.
#[pyfunction]
#[pyo3(signature = (url, races=1))]
pub fn probe_store(py: Python<'_>, url: Location, races: u32) -> PyResult<Vec<FindingRow>> {
    call(py, move || url.probe(races))
}

/// Opens the checkpoint at the path, or the newest step (or `step`) of the root there.
#[pyfunction]
#[pyo3(signature = (path, step = None, engine = "auto"))]
pub fn open_path(py: Python<'_>, path: Location, step: Option<u64>, engine: &str) -> PyResult<Checkpoint> {
    let engine = options::engine(py, engine)?;
    Checkpoint::open(py, move || {
        let environment = path.environment(engine, Purpose::Read)?;
        let path = path.path;
        let gone = || Error::StepNotFound { step, root: path.clone(), latest: None };
        let is_root = match root::path_kind(&environment, &path)? {
            PathKind::Absent => return Err(gone()),
            PathKind::Checkpoint => false,
            PathKind::Root => true,
            // A copy of a root may lack its `.stepwell` directory.
            PathKind::Directory => {
                step.is_some() || !reader(&path, environment.clone())?.all_steps()?.is_empty()
            }
        };
        if !is_root {
            let opened = stepwell_manager::Checkpoint::open(&path, &environment)?;
            return if step.is_none_or(|step| step == opened.step()) { Ok(opened) } else { Err(gone()) };
        }
        reader(&path, environment)?.checkpoint(step)
    })
}

fn reader(path: &Path, environment: Environment) -> Result<Engined, Error> {
    Engined::open(path, Options { read_only: true, create: false, ..Options::default() }, environment)
}

/// Keeps the staging memory of this process until it ends.
#[pyfunction]
pub fn keep_staging_memory() {
    StagingPool::keep();
}

/// Adds metrics to a committed step of a root, from outside its writer.
#[pyfunction]
pub fn add_metrics(py: Python<'_>, root: Location, step: u64, values: BTreeMap<String, f64>) -> PyResult<()> {
    call(py, move || {
        let environment = root.environment(Engine::Auto, Purpose::Write)?;
        let root = root.path;
        if root::path_kind(&environment, &root)? == PathKind::Absent {
            return Err(Error::StepNotFound { step: Some(step), root, latest: None });
        }
        let manifest = reader(&root, environment.clone())?.manifest(Some(step))?;
        let directory = root::open(&environment, &root, false)?;
        metrics::add(&*directory, &manifest.attempt, step, &values, &environment)
    })
}

/// An item of a repaired step: its name, its index, the damage of the index (or `None`), its number
/// of leaves, and true if the manifest records the index again.
type RepairedItem = (String, String, Option<String>, u64, bool);

/// Rebuilds the damaged indexes of a step's directory.
#[pyfunction]
pub fn repair(py: Python<'_>, path: Location, dry_run: bool) -> PyResult<Vec<RepairedItem>> {
    let found = call(py, move || {
        let environment = path.environment(Engine::Auto, Purpose::Write)?;
        stepwell_manager::repair::repair(&path.path, &environment, dry_run)
    })?;
    Ok(found.into_iter().map(|one| (one.item, one.path, one.damage, one.leaves, one.recorded)).collect())
}

/// Removes the damaged indexes that `repair` has kept, after the step was verified.
#[pyfunction]
pub fn forget_damaged(py: Python<'_>, path: Location) -> PyResult<()> {
    call(py, move || {
        let environment = path.environment(Engine::Auto, Purpose::Write)?;
        stepwell_manager::repair::forget_damaged(&path.path, &environment)
    })
}

/// Deletes a checkpoint whose directory another library names. Returns false if readers hold it.
/// Its name is free then, and the next call for a checkpoint beside it deletes its files.
#[pyfunction]
pub fn remove_guest(py: Python<'_>, path: Location) -> PyResult<bool> {
    call(py, move || {
        let environment = path.environment(Engine::Auto, Purpose::Write)?;
        stepwell_manager::guest::remove(&path.path, &environment)
    })
}

/// Returns the I/O engine for a path, and why: engine, direct, alignment, registered, reasons.
#[pyfunction]
#[pyo3(signature = (path, engine = "auto"))]
pub fn engine_choice(
    py: Python<'_>,
    path: Location,
    engine: &str,
) -> PyResult<(&'static str, bool, usize, bool, Vec<String>)> {
    let engine = options::engine(py, engine)?;
    let environment = call(py, move || path.environment(engine, Purpose::Write))?;
    let choice = environment.disk.choice();
    Ok((choice.engine, choice.direct, choice.alignment, choice.registered, choice.reasons.clone()))
}

/// A call of a file system, and the answer of the system if it is not supported.
type CallRow = (&'static str, Option<String>);

/// Returns the type of a path's file system, if the system says it.
#[pyfunction]
pub fn file_system(py: Python<'_>, path: PathBuf) -> PyResult<Option<String>> {
    call(py, move || Ok(io::file_system(&path)?))
}

/// Returns the calls that a path's file system supports, tried in an empty directory: each with its
/// name and `None`, or the answer of the system.
#[pyfunction]
pub fn supported_calls(py: Python<'_>, path: PathBuf) -> PyResult<Vec<CallRow>> {
    let calls = call(py, move || Ok(io::supported_calls(&path)?))?;
    let answer =
        |(name, answer): (_, std::io::Result<()>)| (name, answer.err().map(|error| error.to_string()));
    Ok(calls.into_iter().map(answer).collect())
}

/// Returns the CUDA driver's version and the names of its devices, and `None`; or the reason why no
/// driver can be used. This call initialises CUDA in this process.
#[pyfunction]
pub fn cuda() -> (Option<(i32, Vec<String>)>, Option<String>) {
    let names = |driver: &'static Driver| -> Result<_, stepwell_core::Error> {
        let devices = (0..driver.count() as u32).map(|ordinal| Ok(driver.device(ordinal)?.name().to_owned()));
        Ok((driver.version(), devices.collect::<Result<_, stepwell_core::Error>>()?))
    };
    match driver().and_then(names) {
        Ok(found) => (Some(found), None),
        Err(error) => (None, Some(error.to_string())),
    }
}
