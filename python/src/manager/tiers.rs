//! The further tiers of a manager.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

use stepwell_core::deadline::{StallTimer, deadline_after};
use stepwell_core::io::{Engine, Purpose};
use stepwell_manager::{Options, TierPlace, TierReport, TierRule};

use super::{Error, Manager};
use crate::errors::raise_manager;
use crate::location::Location;
use crate::options;
use crate::wait;

/// A tier as the package describes it: name, location, options, the steps that it takes (each of
/// which this number divides; all of them, or the newest), bytes per second, and the globs of
/// compressed tensors.
pub type TierArgument = (String, Location, String, u64, bool, Option<u64>, Vec<String>);

/// A tier that is to be opened.
pub struct WantedTier {
    name: String,
    location: Location,
    options: Options,
    engine: Engine,
    rule: TierRule,
    bytes_per_second: Option<u64>,
    compress: Vec<String>,
}

impl WantedTier {
    pub fn new(py: Python<'_>, argument: TierArgument) -> PyResult<Self> {
        let (name, location, text, every, all, bytes_per_second, compress) = argument;
        let (options, engine) = options::parse(py, &text)?;
        let rule = TierRule { every, all };
        Ok(Self { name, location, options, engine, rule, bytes_per_second, compress })
    }

    /// Connects to its store or its disk.
    pub fn place(self) -> Result<TierPlace, Error> {
        let purpose = if self.options.read_only { Purpose::Read } else { Purpose::Write };
        let environment = self.location.environment(self.engine, purpose)?;
        Ok(TierPlace {
            name: self.name,
            path: self.location.path,
            options: self.options,
            environment,
            rule: self.rule,
            bytes_per_second: self.bytes_per_second,
            compress: self.compress,
        })
    }
}

/// The state of a tier: its name (none for the first one), its root, its steps, the due steps, the
/// carried step with its bytes done and in all, the number of superseded steps, the last failure.
type TierRow = (String, String, Vec<u64>, Vec<u64>, Option<(u64, u64, u64)>, u64, Option<(u64, String)>);

fn row(report: TierReport) -> TierRow {
    let TierReport { name, path, steps, due, carried, superseded, failure } = report;
    (name, path.display().to_string(), steps, due, carried, superseded, failure)
}

/// Returns the states of the tiers of a manager, nearest first.
#[pyfunction]
pub fn tier_states(py: Python<'_>, manager: &Manager) -> PyResult<Vec<TierRow>> {
    let reports = manager.query(py, stepwell_manager::Manager::tiers)?;
    Ok(reports.into_iter().map(row).collect())
}

/// Returns the names of the tiers that have the newest attempt of a step.
#[pyfunction]
pub fn tiers_of(py: Python<'_>, manager: &Manager, step: u64) -> PyResult<Vec<String>> {
    manager.query(py, move |inner| inner.tiers_of(step))
}

/// True if other machines have copies of all files of a step.
#[pyfunction]
pub fn is_copied(py: Python<'_>, manager: &Manager, step: u64) -> PyResult<bool> {
    manager.query(py, move |inner| inner.is_copied(step))
}

/// Waits until a tier has a step. Without a name, until other machines have copies of it, if they
/// keep some. Returns false after the timeout. Without one, raises after the
/// stall timeout without progress.
#[pyfunction]
#[pyo3(signature = (manager, step, tier, timeout = None))]
pub fn wait_carried(
    py: Python<'_>,
    manager: &Manager,
    step: u64,
    tier: &str,
    timeout: Option<f64>,
) -> PyResult<bool> {
    manager.wait_for_carriers(py, timeout, |interval| manager.inner.wait_carried(step, tier, interval))
}

/// Waits until no step is due in any tier, as [`wait_carried`].
#[pyfunction]
#[pyo3(signature = (manager, timeout = None))]
pub fn wait_until_carried(py: Python<'_>, manager: &Manager, timeout: Option<f64>) -> PyResult<bool> {
    manager.wait_for_carriers(py, timeout, |interval| manager.inner.wait_until_carried(Some(interval)))
}

/// Waits for pending saves, then brings the newest step that it can to every tier. Returns at the
/// latest after that many seconds.
#[pyfunction]
pub fn carry_within(py: Python<'_>, manager: &Manager, seconds: f64) -> PyResult<()> {
    let deadline = deadline_after(wait::seconds(Some(seconds)).unwrap_or_default());
    let left = move || deadline.saturating_duration_since(Instant::now());
    let rest = move || Some(left().as_secs_f64());
    // After a timeout, a step that is committed is carried.
    manager.wait_for_carriers(py, rest(), |interval| manager.inner.wait_until_saved(interval))?;
    manager.query(py, move |inner| inner.hurry_carriers(left()))?;
    manager.wait_for_carriers(py, rest(), |interval| manager.inner.wait_until_carried(Some(interval)))?;
    Ok(())
}

impl Manager {
    fn wait_for_carriers(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        mut ask: impl FnMut(Duration) -> Result<(), Error> + Send,
    ) -> PyResult<bool> {
        let limit = wait::seconds(timeout);
        let begun = Instant::now();
        let mut timer = StallTimer::new(self.stall_timeout);
        let answer = wait::poll(py, limit, |interval| match ask(interval) {
            Err(Error::Timeout { waited_for, .. }) => {
                let stalled = limit.is_none() && timer.left(self.inner.carry_progress()).is_zero();
                stalled.then(|| Err(Error::Timeout { waited_for, waited: begun.elapsed() }))
            }
            answer => Some(answer),
        })?;
        match answer {
            None => Ok(false),
            Some(answer) => answer.map(|()| true).map_err(|error| raise_manager(py, &error)),
        }
    }
}
