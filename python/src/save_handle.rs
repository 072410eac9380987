//! The future of one save, as Python sees it. Its waits handle signals. Errors become exceptions.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use stepwell_core::deadline::StallTimer;
use stepwell_manager::{Error, Outcome, Save};

use crate::errors::{build, raise_manager};
use crate::events::Events;
use crate::wait;

/// A save that has begun or was refused.
#[pyclass(frozen, module = "stepwell._core")]
pub struct SaveHandle {
    save: Save,
    seen: AtomicBool,
    /// Leaves that this process has left out: path and reason.
    #[pyo3(get)]
    unsupported: Vec<(String, String)>,
}

impl SaveHandle {
    /// Wraps a save.
    pub fn new(save: Save) -> Self {
        Self { save, seen: AtomicBool::new(false), unsupported: Vec::new() }
    }

    /// Adds the leaves that were left out.
    pub fn without(self, unsupported: Vec<(String, String)>) -> Self {
        Self { unsupported, ..self }
    }

    /// Waits until every copy of the capture has started. Raises after the stall timeout without
    /// progress.
    pub fn wait_started(&self, py: Python<'_>) -> PyResult<()> {
        self.wait(py, None, "the capture", |save, slice| save.wait_started(Some(slice)).ok()).map(drop)
    }

    /// Waits for an event of the save. Returns `None` after the timeout. Without one, fails after
    /// the stall timeout without progress of this save or an earlier one.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        what: &str,
        ready: impl Fn(&Save, Duration) -> Option<T> + Sync,
    ) -> PyResult<Option<T>> {
        let limit = wait::seconds(timeout);
        let begun = Instant::now();
        let mut timer = StallTimer::new(self.save.stall_timeout());
        let answer = wait::poll(py, limit, |slice| match ready(&self.save, slice) {
            Some(answer) => Some(Ok(answer)),
            None if limit.is_none() && timer.left(self.save.progress()).is_zero() => {
                let waited_for = format!("{what} of the save of step {}", self.save.step());
                Some(Err(Error::Timeout { waited_for, waited: begun.elapsed() }))
            }
            None => None,
        })?;
        answer.transpose().map_err(|error| raise_manager(py, &error))
    }
}

#[pymethods]
impl SaveHandle {
    fn step(&self) -> u64 {
        self.save.step()
    }

    fn done(&self) -> bool {
        self.save.is_done()
    }

    fn captured(&self) -> bool {
        self.save.captured()
    }

    /// Waits for the capture. Returns false after the timeout. Without one, raises after the stall
    /// timeout without progress.
    #[pyo3(signature = (timeout = None))]
    pub fn wait_captured(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let captured =
            self.wait(py, timeout, "the capture", |save, slice| save.wait_captured(Some(slice)).ok())?;
        Ok(captured.is_some())
    }

    /// Waits for the commit, and raises the save's failure. Raises `TimeoutError` after the
    /// timeout, or, without one, after the stall timeout without progress. The save itself
    /// continues.
    #[pyo3(signature = (timeout = None))]
    fn result(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let ended = |save: &Save, slice| save.wait_unseen(Some(slice)).ok().flatten();
        match self.wait(py, timeout, "the commit", ended)? {
            Some(Outcome::Committed) => Ok(()),
            Some(Outcome::NotCommitted(error) | Outcome::DurabilityUncertain(error)) => {
                let exception = build(py, &error)?;
                self.seen.store(true, Ordering::Relaxed);
                self.save.acknowledge();
                Err(exception)
            }
            None => Err(PyTimeoutError::new_err(format!(
                "waited {:.1} s for the save of step {}; it goes on in the background",
                timeout.unwrap_or_default(),
                self.save.step()
            ))),
        }
    }

    /// Makes `events` run a callback once the save is over.
    fn on_done(&self, events: &Events, number: u64) {
        let events = events.clone();
        self.save.on_done(Box::new(move |_| events.callback(number)));
    }

    /// Returns a failure that this handle has not reported. It stays unseen.
    fn unseen_failure(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        Ok(match self.save.outcome() {
            Some(Outcome::NotCommitted(error) | Outcome::DurabilityUncertain(error))
                if !self.seen.load(Ordering::Relaxed) =>
            {
                Some(build(py, &error)?.into_value(py).into_any())
            }
            _ => None,
        })
    }

    /// Returns the outcome, with text and kind of a failure: `("committed", None, None)`,
    /// `("failed", text, kind)`, `("uncertain", text, kind)`, or `("pending", None, None)`. A
    /// failure stays unseen.
    fn outcome(&self) -> (&'static str, Option<String>, Option<&'static str>) {
        match self.save.outcome() {
            None => ("pending", None, None),
            Some(Outcome::Committed) => ("committed", None, None),
            Some(Outcome::NotCommitted(error)) => ("failed", Some(error.to_string()), Some(error.kind())),
            Some(Outcome::DurabilityUncertain(error)) => {
                ("uncertain", Some(error.to_string()), Some(error.kind()))
            }
        }
    }

    /// Returns a number that changes with the progress of the save.
    fn progress(&self) -> u64 {
        let stats = self.save.stats().pipeline;
        stats.captured_bytes.wrapping_add(stats.written_bytes)
    }

    /// Returns the bytes, the files, and the seconds of each phase.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.save.stats();
        let out = PyDict::new(py);
        out.set_item("nbytes", stats.pipeline.total_bytes)?;
        out.set_item("captured_bytes", stats.pipeline.captured_bytes)?;
        out.set_item("written_bytes", stats.pipeline.written_bytes)?;
        out.set_item("files", stats.files)?;
        out.set_item("plan_seconds", stats.pipeline.plan_seconds)?;
        out.set_item("capture_seconds", stats.pipeline.capture_seconds)?;
        out.set_item("queued_seconds", stats.queued_seconds)?;
        out.set_item("write_seconds", stats.pipeline.write_seconds)?;
        out.set_item("checksum_seconds", stats.pipeline.checksum_seconds)?;
        out.set_item("staging_seconds", stats.pipeline.waited_seconds)?;
        out.set_item("sync_seconds", stats.pipeline.sync_seconds)?;
        out.set_item("commit_seconds", stats.commit_seconds)?;
        out.set_item("total_seconds", stats.total_seconds)?;
        Ok(out)
    }
}
