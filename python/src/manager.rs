//! The manager of one root, as Python sees it. Calls that may wait run on another thread, so that
//! signal handlers run meanwhile.

mod closing;
mod opening;
mod ticket;
mod tiers;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use stepwell_core::deadline::StallTimer;
use stepwell_core::sys::spawn;
use stepwell_manager::retention::{RegularSaves, Retention, SizedStep};
use stepwell_manager::{AdoptedStep, Decision, Exists, Hold, Manager as Engined, Mode, Save};

use crate::board::Agreeing;
use crate::checkpoint::{Checkpoint, CopiedPart, part_of, telling};
use crate::convert::Sharing;
use crate::errors::{build, raise, raise_manager};
use crate::events::Events;
use crate::ingest::streams_of;
use crate::location::Location;
use crate::options;
use crate::save_handle::SaveHandle;
use crate::snapshot::{OnDevices, Snapshot, request};
use crate::state::{ChoiceArguments, State, flatten};
use crate::trace::{self, DigestRow, TraceRow};
use crate::wait;
use stepwell_manager::copy::CopyProgress;

use self::closing::Closing;
use self::tiers::{TierArgument, WantedTier};

pub use self::ticket::Ticket;
pub use self::tiers::{carry_within, is_copied, tier_states, tiers_of, wait_carried, wait_until_carried};

type Error = stepwell_manager::Error;

/// Poll interval of the wait for an interrupted save.
const INTERRUPTED_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// The timeout of the engine's close. It has a fixed deadline, so this is practically none: the
/// callers that wait for it check its progress.
const NO_DEADLINE: Duration = Duration::from_secs(1_000_000_000);

/// The manager of one root.
#[pyclass(frozen, module = "stepwell._core")]
pub struct Manager {
    inner: Arc<Engined>,
    stall_timeout: Duration,
    /// The saves that were pending at the last check. Waits measure their progress.
    saves: Mutex<Vec<Save>>,
    /// The worker thread for queries.
    standby: wait::Standby,
    /// Shared by the work of a save on other threads, until it has ended. An interrupt leaves such
    /// work behind.
    saving: Arc<()>,
    /// Set by the first `close`.
    closing: OnceLock<Arc<Closing>>,
}

impl Drop for Manager {
    fn drop(&mut self) {
        // A close that has begun continues on its own thread, and reports to its callers.
        if self.inner.is_closed() {
            return;
        }
        // The engine's drop would close it, and may wait for the disk while it holds the GIL. So
        // close it detached. In a forked child, close does nothing.
        let closed = Python::try_attach(|py| py.detach(|| self.inner.close(None)));
        if let Some(Err(error)) = closed
            && !matches!(error, Error::ForkedProcess(_))
        {
            tracing::error!(%error, "a manager was dropped without close()");
        }
    }
}

/// Runs a call of the engine that may wait.
pub(crate) fn call<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> PyResult<T> {
    wait::on_thread(py, work)?.map_err(|error| raise_manager(py, &error))
}

pub(crate) fn exists_named(name: &str) -> PyResult<Exists> {
    match name {
        "error" => Ok(Exists::Error),
        "skip" => Ok(Exists::Skip),
        "replace" => Ok(Exists::Replace),
        other => Err(PyValueError::new_err(format!("exists={other:?}"))),
    }
}

pub(crate) fn json(text: &str) -> PyResult<serde_json::Value> {
    serde_json::from_str(text).map_err(|error| PyValueError::new_err(format!("custom_metadata: {error}")))
}

#[pymethods]
impl Manager {
    #[new]
    #[pyo3(signature = (root, options, ranks = None, tiers = None))]
    fn new(
        py: Python<'_>,
        root: Location,
        options: &str,
        ranks: Option<Agreeing<'_>>,
        tiers: Option<Vec<TierArgument>>,
    ) -> PyResult<Self> {
        let further = tiers.unwrap_or_default().into_iter();
        let further = further.map(|tier| WantedTier::new(py, tier)).collect::<PyResult<Vec<_>>>()?;
        let (options, engine) = options::parse(py, options)?;
        let stall_timeout = options.stall_timeout;
        let ranks = ranks.map(Agreeing::ranks);
        let path = root.path.clone();
        let open = move || {
            let environment = options::environment_of(&root, engine, &options, ranks)?;
            let further = further.into_iter().map(WantedTier::place).collect::<Result<Vec<_>, _>>()?;
            Engined::open_with_tiers(&root.path, options, environment, &further)
        };
        let inner =
            opening::on_thread(py, &path, stall_timeout, open)?.map_err(|error| raise_manager(py, &error))?;
        Ok(Self {
            inner: Arc::new(inner),
            stall_timeout,
            saves: Mutex::default(),
            standby: wait::Standby::default(),
            saving: Arc::default(),
            closing: OnceLock::new(),
        })
    }

    /// Returns the ticket for a save of the step, its pending save, or the reason why nothing is
    /// saved. Raises for an existing step, for one below the latest, and after earlier failures.
    fn decide<'py>(
        slf: &Bound<'py, Self>,
        step: u64,
        force: bool,
        exists: &str,
        answers: BTreeMap<String, bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let exists = exists_named(exists)?;
        this.wait_for_interrupted_save(py)?;
        this.check_before_saving(py, step)?;
        let saving = Arc::clone(&this.saving);
        let decide = move |inner: &Engined| Ok((inner.decide(step, force, exists, &answers)?, saving));
        let (decision, _) = this.query(py, decide)?;
        match decision {
            Decision::Save(ticket) => Bound::new(py, Ticket::new(slf, ticket)).map(Bound::into_any),
            Decision::Pending(save) => Bound::new(py, SaveHandle::new(save)).map(Bound::into_any),
            Decision::Refuse(refusal) => Ok(PyString::new(py, &refusal.to_string()).into_any()),
        }
    }

    fn should_save(&self, py: Python<'_>, step: u64, answers: BTreeMap<String, bool>) -> PyResult<bool> {
        if self.inner.ranks().1 > 1 {
            // It may ask the leader.
            return self.query(py, move |inner| inner.should_save(step, &answers));
        }
        let inner = Arc::clone(&self.inner);
        py.detach(move || inner.should_save(step, &answers)).map_err(|error| raise_manager(py, &error))
    }

    /// Returns this process's rank, and the number of ranks.
    fn ranks(&self) -> (u32, u32) {
        self.inner.ranks()
    }

    /// Returns the step of a restore: the leader's answer, on every rank.
    #[pyo3(signature = (step = None))]
    fn choose(&self, py: Python<'_>, step: Option<u64>) -> PyResult<u64> {
        self.query(py, move |inner| inner.choose(step))
    }

    /// Returns the session in which the ranks share exports. All make this call.
    fn sharing(&self, py: Python<'_>) -> PyResult<Sharing> {
        let inner = Arc::clone(&self.inner);
        call(py, move || inner.sharing()).map(Sharing::new_from)
    }

    /// Returns those of these stored leaves that no rank wants, in order. `None` if the ranks do
    /// not restore in the same way. Every rank calls it once in a restore, before it reads.
    fn wanted_by_none(&self, py: Python<'_>, how: String, leaves: Vec<u32>) -> PyResult<Option<Vec<u32>>> {
        self.together(py, move |inner| inner.wanted_by_none(&how, leaves))
    }

    /// True if all ranks pass the same text. All ranks make this call.
    fn alike(&self, py: Python<'_>, what: String) -> PyResult<bool> {
        self.together(py, move |inner| inner.alike(&what))
    }

    /// Raises on all ranks if one of them has failed (`cause`).
    #[pyo3(signature = (what, cause = None))]
    fn agree(&self, py: Python<'_>, what: String, cause: Option<String>) -> PyResult<()> {
        self.together(py, move |inner| {
            let mine = cause.map_or(Ok(()), |cause| Err(failed(inner, cause)));
            inner.agree(&what, mine)
        })
    }

    /// Reports to the other ranks that a call of a restore raised on this rank, for a reason that
    /// is not an answer of the ranks.
    fn leave_restore(&self, cause: &str) {
        let (inner, cause) = (Arc::clone(&self.inner), cause.to_owned());
        // The caller does not wait for this.
        let _ = spawn("stepwell-leave", move || inner.leave_restore(&cause));
    }

    /// Ends the session of several ranks, because a call of this rank failed before its save had a
    /// number.
    fn end_session(&self, py: Python<'_>, cause: String) -> PyResult<()> {
        self.query(py, move |inner| {
            inner.end_session(&cause);
            Ok(())
        })
    }

    /// Does not wait in the close for steps that the leader carries from this machine.
    fn leave_at_once(&self) {
        self.inner.leave_at_once();
    }

    /// Waits until every leaf is captured, so that the caller may change the state. Raises after
    /// the stall timeout without progress.
    fn wait_captured(&self, py: Python<'_>) -> PyResult<()> {
        let saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting: Vec<Save> =
            saves.iter().filter(|save| !save.is_done() && !save.captured()).cloned().collect();
        drop(saves);
        waiting.into_iter().try_for_each(|save| SaveHandle::new(save).wait_captured(py, None).map(drop))
    }

    /// Returns the numbers of the devices whose arrays are still to be captured.
    fn devices_in_flight(&self) -> Vec<u32> {
        let saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        let devices: BTreeSet<u32> = saves.iter().flat_map(Save::devices).collect();
        devices.into_iter().collect()
    }

    /// Call it before the state changes on these streams. Makes each stream wait on its device for
    /// pending captures. This thread waits only for copies that could not start yet, for leaves in
    /// host memory, and for devices without a given stream.
    fn guard(&self, py: Python<'_>, streams: HashMap<u32, u64>) -> PyResult<()> {
        let waiting: Vec<Save> = {
            let saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
            saves.iter().filter(|save| !save.captured()).cloned().collect()
        };
        if waiting.is_empty() {
            return Ok(());
        }
        let streams = streams_of(py, &streams)?;
        for save in waiting {
            let devices = save.devices();
            let fenced = !devices.is_empty() && devices.iter().all(|device| streams.contains_key(device));
            let handle = SaveHandle::new(save.clone());
            if !fenced {
                handle.wait_captured(py, None)?;
                continue;
            }
            handle.wait_started(py)?;
            save.fence(&streams).map_err(|error| raise(py, &error))?;
        }
        Ok(())
    }

    /// Raises the errors that `save` would raise for a state.
    fn check(
        &self,
        py: Python<'_>,
        state: &Bound<'_, PyAny>,
        choice: ChoiceArguments,
        events: &Events,
    ) -> PyResult<()> {
        let state = flatten(state, choice, self.inner.ranks().1 == 1)?;
        let (request, parcel) = request(py, 0, &state, Snapshot::Auto, OnDevices::default(), events)?;
        let inner = Arc::clone(&self.inner);
        let checked = py.detach(move || inner.check(request.state));
        parcel.give_back(py);
        checked.map_err(|error| raise_manager(py, &error))
    }

    fn request_preemption(&self) {
        self.inner.request_preemption();
    }

    fn reached_preemption(&self, py: Python<'_>, step: u64) -> PyResult<bool> {
        if self.inner.ranks().1 > 1 {
            return self.query(py, move |inner| inner.reached_preemption(step));
        }
        self.inner.reached_preemption(step).map_err(|error| raise_manager(py, &error))
    }

    fn restored(&self, step: u64) {
        self.inner.restored(step);
    }

    fn latest_step(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.query(py, Engined::latest_step)
    }

    fn all_steps(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.query(py, Engined::all_steps)
    }

    /// Returns session and number of the save that a step is of. `None` if there is no such step.
    fn attempt(&self, py: Python<'_>, step: u64) -> PyResult<Option<(String, u64)>> {
        self.query(py, move |inner| match inner.manifest(Some(step)) {
            Ok(manifest) => Ok(Some((manifest.attempt.session.clone(), manifest.attempt.counter))),
            Err(Error::StepNotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        })
    }

    fn next_step(&self, py: Python<'_>) -> PyResult<u64> {
        self.query(py, Engined::next_step)
    }

    fn reload(&self, py: Python<'_>) -> PyResult<()> {
        self.query(py, Engined::reload)
    }

    #[pyo3(signature = (metric = None, mode = None))]
    fn best_step(
        &self,
        py: Python<'_>,
        metric: Option<String>,
        mode: Option<String>,
    ) -> PyResult<Option<u64>> {
        let mode = match mode.as_deref() {
            Some("min") => Some(Mode::Min),
            Some("max") => Some(Mode::Max),
            Some(other) => return Err(PyValueError::new_err(format!("mode={other:?}"))),
            None => None,
        };
        let by = metric.zip(mode);
        self.query(py, move |inner| {
            inner.best_step(by.as_ref().map(|(metric, mode)| (metric.as_str(), *mode)))
        })
    }

    fn metrics(&self, py: Python<'_>, step: u64) -> PyResult<BTreeMap<String, f64>> {
        self.query(py, move |inner| inner.metrics(step))
    }

    /// Returns the metrics of an open step, even if it was retired meanwhile.
    fn metrics_of(&self, py: Python<'_>, checkpoint: &Checkpoint) -> PyResult<BTreeMap<String, f64>> {
        let opened = checkpoint.get(py)?;
        let step = opened.step().map_err(|error| raise_manager(py, &error))?;
        let manifest = Arc::clone(step.manifest());
        self.query(py, move |inner| inner.metrics_of(&manifest))
    }

    fn add_metrics(&self, py: Python<'_>, step: u64, metrics: BTreeMap<String, f64>) -> PyResult<()> {
        self.query(py, move |inner| inner.add_metrics(step, &metrics))
    }

    /// Returns the session. All ranks have the same.
    fn session(&self) -> &str {
        self.inner.session()
    }

    /// Returns the digests of a state. `streams` are the current streams of its devices.
    fn digests(
        &self,
        py: Python<'_>,
        state: &Bound<'_, State>,
        streams: HashMap<u32, u64>,
        events: &Events,
    ) -> PyResult<Vec<DigestRow>> {
        trace::digests(py, &self.inner, state.get(), &streams, events)
    }

    fn add_trace(&self, py: Python<'_>, step: u64, json: String) -> PyResult<()> {
        self.query(py, move |inner| inner.add_trace(step, json))
    }

    fn traces(&self, py: Python<'_>, step: u64) -> PyResult<Vec<TraceRow>> {
        self.query(py, move |inner| inner.traces(step)).map(trace::rows)
    }

    fn delete(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.query(py, move |inner| inner.delete(step))
    }

    /// Copies an open checkpoint into this root, with its step number. `progress` is called as in
    /// `verify`.
    #[pyo3(signature = (checkpoint, part, progress = None))]
    fn add(
        &self,
        py: Python<'_>,
        checkpoint: &Checkpoint,
        part: CopiedPart,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (inner, source) = (Arc::clone(&self.inner), checkpoint.get(py)?);
        telling(py, progress.as_ref(), move |seen| {
            inner.add(source.step()?, &part_of(part), &mut |at: CopyProgress| seen(at.done, at.total))
        })
    }

    /// The name of a step that the root does not have yet.
    fn free_name(&self, py: Python<'_>, step: u64) -> PyResult<String> {
        self.query(py, move |inner| inner.free_name(step, "add a step"))
    }

    /// Commits a step whose bytes are files of another library, which `files` names as the manifest
    /// does.
    fn adopt(
        &self,
        py: Python<'_>,
        step: u64,
        files: &str,
        written_unix_ns: i64,
        metrics: BTreeMap<String, f64>,
        custom_metadata: &str,
    ) -> PyResult<()> {
        let files = serde_json::from_str(files)
            .map_err(|error| PyValueError::new_err(format!("adopted files: {error}")))?;
        let custom_metadata = json(custom_metadata)?;
        let adopted = AdoptedStep { step, files, written_unix_ns, metrics, custom_metadata };
        self.query(py, move |inner| inner.adopt(&adopted))
    }

    fn delete_branch(&self, py: Python<'_>, branch: String) -> PyResult<Vec<String>> {
        self.query(py, move |inner| inner.delete_branch(&branch))
    }

    /// Invalid directories with a step's name: name and reason.
    fn quarantined(&self, py: Python<'_>) -> PyResult<Vec<(String, String)>> {
        let found = self.query(py, Engined::quarantined)?;
        Ok(found.into_iter().map(|quarantined| (quarantined.name, quarantined.reason)).collect())
    }

    /// The user's metadata of the root, as JSON.
    fn root_metadata(&self) -> Option<String> {
        self.inner.root_metadata().map(ToString::to_string)
    }

    #[pyo3(signature = (step, branch = None))]
    fn rewind(&self, py: Python<'_>, step: u64, branch: Option<String>) -> PyResult<(String, Vec<u64>)> {
        let inner = Arc::clone(&self.inner);
        call(py, move || inner.rewind(step, branch.as_deref()))
    }

    fn hold(&self, py: Python<'_>, step: u64) -> PyResult<Held> {
        let hold = self.query(py, move |inner| inner.hold(step))?;
        Ok(Held { hold: Mutex::new(Some(hold)) })
    }

    /// Sets the steps that retention leaves alone.
    fn keep(&self, steps: BTreeSet<u64>) {
        self.inner.keep(steps);
    }

    /// The retention plan, as JSON.
    fn plan_retention(&self, py: Python<'_>) -> PyResult<String> {
        let plan = self.query(py, Engined::plan_retention)?;
        serde_json::to_string(&plan).map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    /// Everything known about directories with a step's name, as JSON.
    fn report(&self, py: Python<'_>) -> PyResult<String> {
        let report = self.query(py, Engined::report)?;
        serde_json::to_string(&report).map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    /// Applies retention now. Returns the retired steps. They are durably invisible, and their
    /// files are deleted before `close` ends.
    fn apply_retention(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let inner = Arc::clone(&self.inner);
        call(py, move || inner.apply_retention())
    }

    fn prepare(&self, py: Python<'_>, nbytes: u64, devices: Vec<u32>) -> PyResult<()> {
        let inner = Arc::clone(&self.inner);
        call(py, move || inner.prepare(nbytes, &devices))
    }

    #[pyo3(signature = (step = None))]
    fn checkpoint(&self, py: Python<'_>, step: Option<u64>) -> PyResult<Checkpoint> {
        let inner = Arc::clone(&self.inner);
        Checkpoint::open(py, move || inner.checkpoint(step))
    }

    /// Waits for all saves, and raises a failure. Polls, so that an interrupted wait does not take
    /// a failure.
    #[pyo3(signature = (timeout = None))]
    fn wait_until_finished(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = wait::seconds(timeout);
        let begun = Instant::now();
        let mut timer = StallTimer::new(self.stall_timeout);
        let mut last = None;
        let answer =
            wait::poll(py, limit, |interval| match self.inner.wait_until_finished(Some(interval)) {
                Err(Error::Timeout { waited_for, .. }) => {
                    let waited = begun.elapsed();
                    let stalled = limit.is_none() && timer.left(self.count_progress()).is_zero();
                    let error = Error::Timeout { waited_for, waited };
                    if stalled {
                        return Some(Err(error));
                    }
                    last = Some(error);
                    None
                }
                answer => Some(answer),
            })?;
        match (answer, last) {
            (Some(answer), _) => answer.map_err(|error| self.raise_failure(py, &error)),
            (None, Some(error)) => Err(raise_manager(py, &error)),
            (None, None) => Ok(()),
        }
    }

    fn check_for_errors(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.check_for_errors().map_err(|error| self.raise_failure(py, &error))
    }

    /// Starts the close, once, and waits for it. After an interrupt or a timeout, the close
    /// continues, and another call may wait for it. Without a timeout, the wait fails after the
    /// stall timeout without progress.
    #[pyo3(signature = (timeout = None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = wait::seconds(timeout);
        self.standby.clear();
        let closing = self.closing.get_or_init(|| {
            let closing = Arc::new(Closing::default());
            let (inner, ending) = (Arc::clone(&self.inner), Arc::clone(&closing));
            let begun = spawn("stepwell-close", move || ending.end(inner.close(Some(NO_DEADLINE))));
            if let Err(error) = begun {
                let error = stepwell_core::Error::io(
                    "start a thread for the close of",
                    Path::new("the manager"),
                    error,
                );
                closing.end(Err(error.into()));
            }
            closing
        });
        let begun = Instant::now();
        // Twice as long with several ranks: the leader's own timeout names the missing ranks.
        let stall_timeout =
            if self.inner.ranks().1 > 1 { self.stall_timeout.saturating_mul(2) } else { self.stall_timeout };
        let mut timer = StallTimer::new(stall_timeout);
        let timed_out = || {
            let due = Some(self.inner.due_in_tiers()).filter(|due| !due.is_empty());
            let waited_for =
                self.pending_saves().or(due).unwrap_or_else(|| "the close of the manager".to_owned());
            Error::Timeout { waited_for, waited: begun.elapsed() }
        };
        let answer = wait::poll(py, limit, |interval| {
            let stalled =
                || (limit.is_none() && timer.left(self.count_progress()).is_zero()).then(|| Err(timed_out()));
            closing.wait(interval).or_else(stalled)
        })?;
        match answer {
            Some(Ok(())) => Ok(()),
            None => Err(raise_manager(py, &timed_out())),
            Some(Err(error)) => Err(build(py, &error).unwrap_or_else(|interrupt| {
                closing.put_back(error);
                interrupt
            })),
        }
    }

    /// Returns a value that changes with the progress of pending saves: their number, and a
    /// counter.
    fn progress(&self) -> (usize, u64) {
        self.count_progress()
    }

    /// True if the close has ended, and a caller has got its failure.
    fn is_closed(&self) -> bool {
        self.closing.get().is_some_and(|closing| closing.is_over())
    }
}

impl Manager {
    /// The engine's manager.
    pub(crate) fn engine(&self) -> Arc<Engined> {
        Arc::clone(&self.inner)
    }

    fn check_before_saving(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.inner.check_before_saving(step).map_err(|error| self.raise_failure(py, &error))
    }

    /// Returns the exception for a failure of an earlier save. If a signal handler raises
    /// meanwhile, returns its exception, and keeps the failure for the next caller.
    fn raise_failure(&self, py: Python<'_>, error: &Error) -> PyErr {
        build(py, error).unwrap_or_else(|interrupt| {
            self.inner.put_back(error);
            interrupt
        })
    }

    /// Adds a save to the pending ones.
    fn remember(&self, save: &Save) {
        let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        saves.retain(|save| !save.is_done());
        if save.refusal().is_none() {
            saves.push(save.clone());
        }
    }

    /// Returns the number of pending saves, and a counter that changes with their progress.
    fn count_progress(&self) -> (usize, u64) {
        let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        saves.retain(|save| !save.is_done());
        let carried = self.inner.carry_progress();
        (saves.len(), saves.iter().fold(carried, |sum, save| sum.wrapping_add(save.progress_counter())))
    }

    /// Describes the saves that `close` waits for.
    fn pending_saves(&self) -> Option<String> {
        let (pending, _) = self.count_progress();
        let saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        saves.first().map(|first| format!("{pending} save(s), the oldest of step {}", first.step()))
    }

    /// Makes a call of all ranks in a restore. It has no timeout here, because a rank may read for
    /// long. The call itself fails for a silent rank, and names it.
    fn together<T: Send + 'static>(
        &self,
        py: Python<'_>,
        ask: impl FnOnce(&Engined) -> Result<T, Error> + Send + 'static,
    ) -> PyResult<T> {
        let inner = Arc::clone(&self.inner);
        call(py, move || ask(&inner))
    }

    /// Waits for what an interrupt has left behind: the number of the interrupted save comes before
    /// that of the next one, as on the other ranks.
    fn wait_for_interrupted_save(&self, py: Python<'_>) -> PyResult<()> {
        if self.inner.ranks().1 == 1 || Arc::strong_count(&self.saving) == 1 {
            return Ok(());
        }
        let begun = Instant::now();
        let ended = wait::poll(py, Some(self.stall_timeout.saturating_mul(2)), |_| {
            std::thread::sleep(INTERRUPTED_POLL_INTERVAL);
            (Arc::strong_count(&self.saving) == 1).then_some(())
        })?;
        ended.ok_or_else(|| {
            let waited_for = "an interrupted save to end".to_owned();
            raise_manager(py, &Error::Timeout { waited_for, waited: begun.elapsed() })
        })
    }

    /// Makes a call that reads directories and small files. If the disk does not answer, Ctrl-C
    /// still works, and the call fails after the stall timeout.
    fn query<T: Send + 'static>(
        &self,
        py: Python<'_>,
        ask: impl FnOnce(&Engined) -> Result<T, Error> + Send + 'static,
    ) -> PyResult<T> {
        let inner = Arc::clone(&self.inner);
        // Twice as long with several ranks: their own timeout names the missing ranks.
        let limit =
            if inner.ranks().1 > 1 { self.stall_timeout.saturating_mul(2) } else { self.stall_timeout };
        let answer = self.standby.on_thread_within(py, limit, move || ask(&inner))?;
        if self.inner.is_closed() {
            self.standby.clear();
        }
        let stalled = || {
            let waited_for = format!("{} to be read", self.inner.path().display());
            Error::Timeout { waited_for, waited: self.stall_timeout }
        };
        answer.unwrap_or_else(|| Err(stalled())).map_err(|error| raise_manager(py, &error))
    }
}

/// A held step.
#[pyclass(frozen, module = "stepwell._core")]
pub struct Held {
    hold: Mutex<Option<Hold>>,
}

/// Returns the number of saves until the disk is full under a retention rule, or `None` for never.
/// `steps` are those of [`SizedStep`], by number.
#[pyfunction]
pub fn saves_until_full(
    py: Python<'_>,
    retention: &str,
    steps: &str,
    interval_steps: u64,
    interval_ns: i64,
    free: u64,
) -> PyResult<Option<f64>> {
    let wrong = |error: serde_json::Error| PyValueError::new_err(error.to_string());
    let rule: Retention = serde_json::from_str(retention).map_err(wrong)?;
    let kept: Vec<SizedStep> = serde_json::from_str(steps).map_err(wrong)?;
    let every = RegularSaves { steps: interval_steps, ns: interval_ns };
    call(py, move || rule.saves_until_full(kept, every, free))
}

/// Returns the error of a failure on this rank. The other ranks get it through the leader, which
/// adds the rank to another rank's failure.
fn failed(inner: &Engined, cause: String) -> Error {
    match inner.ranks() {
        (0, _) => Error::RankFailed { rank: 0, cause },
        _ => Error::Invalid(cause),
    }
}

#[pymethods]
impl Held {
    fn close(&self) {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}
