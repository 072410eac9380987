//! The manager of one root, as Python sees it. Calls that may wait run on a thread of their own, so
//! that signals are answered.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use stepwell_core::deadline::StallTimer;
use stepwell_core::sys::spawn;
use stepwell_manager::{Decision, Exists, Hold, Manager as Engined, Mode, Save, SaveRequest, Ticket};

use crate::board::Agreeing;
use crate::checkpoint::{Checkpoint, CopiedPart, part_of, telling};
use crate::errors::{build, raise, raise_manager};
use crate::events::Events;
use crate::ingest::streams_of;
use crate::options;
use crate::save_handle::SaveHandle;
use crate::snapshot::{OnDevices, Snapshot, source};
use crate::state::{ChoiceArguments, flatten};
use crate::wait;

type Error = stepwell_manager::Error;

/// The engine's close has a deadline that no progress moves. Those who wait for it look at the
/// progress; it has all the time there is.
const NO_DEADLINE: Duration = Duration::from_secs(1_000_000_000);

/// The manager of one root.
#[pyclass(frozen, module = "stepwell._core")]
pub struct Manager {
    inner: Arc<Engined>,
    stall_timeout: Duration,
    /// Saves that were not over when last looked at: what waits look at to see progress.
    saves: Mutex<Vec<Save>>,
    /// The worker thread for queries.
    standby: wait::Standby,
    /// There from the first `close` on.
    closing: OnceLock<Arc<Closing>>,
}

/// The one close of a manager, on its own thread. Callers of `close` wait for it; an interrupt or a
/// timeout ends only that wait.
#[derive(Default)]
struct Closing {
    state: Mutex<ClosingState>,
    changed: Condvar,
}

#[derive(Default)]
struct ClosingState {
    over: bool,
    /// For the first that sees it.
    failure: Option<Error>,
}

impl Closing {
    /// How it ended (a failure: for the first that asks); `None` while it goes on.
    fn wait(&self, timeout: Duration) -> Option<Result<(), Error>> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut state, _) = self
            .changed
            .wait_timeout_while(state, timeout, |state| !state.over)
            .unwrap_or_else(PoisonError::into_inner);
        state.over.then(|| state.failure.take().map_or(Ok(()), Err))
    }

    fn end(&self, result: Result<(), Error>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.over = true;
        state.failure = result.err();
        self.changed.notify_all();
    }

    /// Takes back a failure that could not be told: the next who asks gets it.
    fn put_back(&self, error: Error) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).failure = Some(error);
    }

    /// True if there is nothing left to wait for, nor to tell.
    fn is_over(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.over && state.failure.is_none()
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        // A close that was begun goes on by itself, and those who called it have heard of it.
        if self.inner.is_closed() {
            return;
        }
        // The engine's own drop closes what was not closed, which may wait for the disk: not while
        // Python is held up. In a forked child that does nothing.
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
    #[pyo3(signature = (root, options, ranks = None))]
    fn new(py: Python<'_>, root: PathBuf, options: &str, ranks: Option<Agreeing<'_>>) -> PyResult<Self> {
        let (options, engine) = options::parse(py, options)?;
        let stall_timeout = options.stall_timeout;
        let ranks = ranks.map(Agreeing::ranks);
        let inner = call(py, move || {
            let environment = options::environment_of(&root, engine, &options, ranks)?;
            Engined::open(&root, options, environment)
        })?;
        Ok(Self {
            inner: Arc::new(inner),
            stall_timeout,
            saves: Mutex::default(),
            standby: wait::Standby::default(),
            closing: OnceLock::new(),
        })
    }

    /// The right to save a step; or the save of it that is pending already; or why `save` does
    /// nothing with it. Raises an existing step, one below the latest, and earlier failures.
    fn decide<'py>(
        slf: &Bound<'py, Self>,
        step: u64,
        force: bool,
        exists: &str,
        answers: BTreeMap<String, bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let exists = exists_named(exists)?;
        this.check_before_saving(py, step)?;
        match this.query(py, move |inner| inner.decide(step, force, exists, &answers))? {
            Decision::Save(ticket) => Bound::new(py, Turn::new(slf, ticket)).map(Bound::into_any),
            Decision::Pending(save) => Bound::new(py, SaveHandle::new(save)).map(Bound::into_any),
            Decision::Refuse(refusal) => Ok(PyString::new(py, &refusal.to_string()).into_any()),
        }
    }

    fn should_save(&self, py: Python<'_>, step: u64, answers: BTreeMap<String, bool>) -> PyResult<bool> {
        if self.inner.ranks().1 > 1 {
            // It may have to ask.
            return self.query(py, move |inner| inner.should_save(step, &answers));
        }
        let inner = Arc::clone(&self.inner);
        py.detach(move || inner.should_save(step, &answers)).map_err(|error| raise_manager(py, &error))
    }

    /// This process's rank, and how many there are.
    fn ranks(&self) -> (u32, u32) {
        self.inner.ranks()
    }

    /// The step that a restore takes: the leader's answer, on every rank.
    #[pyo3(signature = (step = None))]
    fn choose(&self, py: Python<'_>, step: Option<u64>) -> PyResult<u64> {
        self.query(py, move |inner| inner.choose(step))
    }

    /// Of these stored leaves, in order, those that no rank wants; `None`: the ranks do not restore
    /// in the same way. Every rank asks once in a restore, before it reads.
    fn wanted_by_none(&self, py: Python<'_>, how: String, leaves: Vec<u32>) -> PyResult<Option<Vec<u32>>> {
        self.together(py, move |inner| inner.wanted_by_none(&how, leaves))
    }

    /// True if all ranks say the same; all of them ask.
    fn alike(&self, py: Python<'_>, what: String) -> PyResult<bool> {
        self.together(py, move |inner| inner.alike(&what))
    }

    /// One end for all ranks: where one has failed (`cause`), all raise.
    #[pyo3(signature = (what, cause = None))]
    fn agree(&self, py: Python<'_>, what: String, cause: Option<String>) -> PyResult<()> {
        self.together(py, move |inner| {
            let mine = cause.map_or(Ok(()), |cause| Err(failed(inner, cause)));
            inner.agree(&what, mine)
        })
    }

    /// Something that is none of the ranks' answers has raised in one of these calls: the others
    /// are told.
    fn leave_restore(&self, cause: &str) {
        let (inner, cause) = (Arc::clone(&self.inner), cause.to_owned());
        // The caller does not wait for this.
        let _ = spawn("stepwell-leave", move || inner.leave_restore(&cause));
    }

    /// Ends the session of several ranks: a call of this one failed before it was known which save
    /// it makes.
    fn end_session(&self, py: Python<'_>, cause: String) -> PyResult<()> {
        self.query(py, move |inner| {
            inner.end_session(&cause);
            Ok(())
        })
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

    /// The numbers of the devices from which something is still to be captured behind a call.
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
            save.precede(&streams).map_err(|error| raise(py, &error))?;
        }
        Ok(())
    }

    /// Raises what `save` would raise about a state.
    fn check(
        &self,
        py: Python<'_>,
        state: &Bound<'_, PyAny>,
        choice: ChoiceArguments,
        events: &Events,
    ) -> PyResult<()> {
        let state = flatten(state, choice, self.inner.ranks().1 == 1)?;
        let (state, parcel) = source(&state, Snapshot::Auto, &OnDevices::default(), events)?
            .map_err(|error| raise_manager(py, &error))?;
        let inner = Arc::clone(&self.inner);
        let checked = py.detach(move || inner.check(state));
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

    /// The metrics of an open step, which may have been retired meanwhile.
    fn metrics_of(&self, py: Python<'_>, checkpoint: &Checkpoint) -> PyResult<BTreeMap<String, f64>> {
        let opened = checkpoint.get(py)?;
        let step = opened.step().map_err(|error| raise_manager(py, &error))?;
        let manifest = Arc::clone(step.manifest());
        self.query(py, move |inner| inner.metrics_of(&manifest))
    }

    fn add_metrics(&self, py: Python<'_>, step: u64, metrics: BTreeMap<String, f64>) -> PyResult<()> {
        self.query(py, move |inner| inner.add_metrics(step, &metrics))
    }

    fn delete(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.query(py, move |inner| inner.delete(step))
    }

    /// Copies an open checkpoint into this root, as its step; `progress` as in its `verify`.
    #[pyo3(signature = (checkpoint, part, progress = None))]
    fn add(
        &self,
        py: Python<'_>,
        checkpoint: &Checkpoint,
        part: CopiedPart,
        progress: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (inner, source) = (Arc::clone(&self.inner), checkpoint.get(py)?);
        telling(py, progress.as_ref(), move |seen| inner.add(source.step()?, &part_of(part), seen))
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

    /// Applies retention now; the steps that went, out of sight and durably. Their files go until
    /// the end of `close`.
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

    /// Waits in slices: a failure that is due is not taken by a wait that was interrupted.
    #[pyo3(signature = (timeout = None))]
    fn wait_until_finished(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = wait::seconds(timeout);
        let begun = Instant::now();
        let mut timer = StallTimer::new(self.stall_timeout);
        let mut last = None;
        let answer = wait::poll(py, limit, |slice| match self.inner.wait_until_finished(Some(slice)) {
            Err(Error::Timeout { waited_for, .. }) => {
                let waited = begun.elapsed();
                let stalled = limit.is_none() && timer.left(self.moved()).is_zero();
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
            (Some(answer), _) => answer.map_err(|error| self.tell(py, &error)),
            (None, Some(error)) => Err(raise_manager(py, &error)),
            (None, None) => Ok(()),
        }
    }

    fn check_for_errors(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.check_for_errors().map_err(|error| self.tell(py, &error))
    }

    /// Begins to close, once, and waits for that. After an interrupt or a timeout the closing goes
    /// on, and may be waited for again. Without a timeout it gives up when nothing at all has
    /// happened for the stall timeout.
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
        // The leader waits for the other ranks as long, and says whom it waited for.
        let stall_timeout =
            if self.inner.ranks().1 > 1 { self.stall_timeout.saturating_mul(2) } else { self.stall_timeout };
        let mut timer = StallTimer::new(stall_timeout);
        let timed_out = || {
            let waited_for = self.pending_saves().unwrap_or_else(|| "the close of the manager".to_owned());
            Error::Timeout { waited_for, waited: begun.elapsed() }
        };
        let answer = wait::poll(py, limit, |slice| {
            let stalled =
                || (limit.is_none() && timer.left(self.moved()).is_zero()).then(|| Err(timed_out()));
            closing.wait(slice).or_else(stalled)
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

    /// Something that changes as long as pending saves get on: how many there are, and the bytes
    /// they have moved.
    fn progress(&self) -> (usize, u64) {
        self.moved()
    }

    /// True if `close` is over, so that there is nothing to wait for any more.
    fn is_closed(&self) -> bool {
        self.closing.get().is_some_and(|closing| closing.is_over())
    }
}

impl Manager {
    fn check_before_saving(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.inner.check_before_saving(step).map_err(|error| self.tell(py, &error))
    }

    /// The exception for a failure of an earlier save. A signal handler that raises while the
    /// exception is made has the word instead; the failure is kept then, for the next who asks.
    fn tell(&self, py: Python<'_>, error: &Error) -> PyErr {
        build(py, error).unwrap_or_else(|interrupt| {
            self.inner.put_back(error);
            interrupt
        })
    }

    fn remember(&self, save: &Save) {
        let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        saves.retain(|save| !save.is_done());
        if save.refusal().is_none() {
            saves.push(save.clone());
        }
    }

    /// How many saves are pending, and a number that changes as long as they get on.
    fn moved(&self) -> (usize, u64) {
        let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        saves.retain(|save| !save.is_done());
        (saves.len(), saves.iter().fold(0_u64, |sum, save| sum.wrapping_add(save.progress_counter())))
    }

    /// Describes the saves that `close` waits for.
    fn pending_saves(&self) -> Option<String> {
        let (pending, _) = self.moved();
        let saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        saves.first().map(|first| format!("{pending} save(s), the oldest of step {}", first.step()))
    }

    /// A call that all ranks of a restore make. Waits for a rank that reads for long; the call
    /// itself names a silent rank.
    fn together<T: Send + 'static>(
        &self,
        py: Python<'_>,
        ask: impl FnOnce(&Engined) -> Result<T, Error> + Send + 'static,
    ) -> PyResult<T> {
        let inner = Arc::clone(&self.inner);
        call(py, move || ask(&inner))
    }

    /// A call that reads directories and small files: a disk that does not answer must not take
    /// Ctrl-C with it, nor be waited for without an end.
    fn query<T: Send + 'static>(
        &self,
        py: Python<'_>,
        ask: impl FnOnce(&Engined) -> Result<T, Error> + Send + 'static,
    ) -> PyResult<T> {
        let inner = Arc::clone(&self.inner);
        // Calls to other ranks have their own deadline, and name the rank that they waited for.
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

/// The right to save one step. On several ranks it ends the save of all where it is not used.
#[pyclass(frozen, module = "stepwell._core")]
pub struct Turn {
    manager: Py<Manager>,
    step: u64,
    ticket: Mutex<Option<Ticket>>,
    /// Why it is not used, for the other ranks.
    cause: Arc<OnceLock<String>>,
}

impl Turn {
    fn new(manager: &Bound<'_, Manager>, ticket: Ticket) -> Self {
        let (step, cause) = (ticket.step(), ticket.cause());
        Self { manager: manager.clone().unbind(), step, ticket: Mutex::new(Some(ticket)), cause }
    }

    fn take(&self) -> Option<Ticket> {
        self.ticket.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl Turn {
    /// Saves a state, and returns when it is captured. `on_devices` answers for the CUDA devices of
    /// the state: their current streams, and the memory there that changes in guarded updates only.
    /// An interrupt ends the save: what raises is told by then, and nothing reads the state any
    /// more.
    #[expect(clippy::too_many_arguments, reason = "the arguments of `save`, one by one")]
    fn save(
        &self,
        py: Python<'_>,
        state: &Bound<'_, PyAny>,
        choice: ChoiceArguments,
        metrics: BTreeMap<String, f64>,
        custom_metadata: &str,
        snapshot: &str,
        on_devices: &Bound<'_, PyAny>,
        events: &Events,
    ) -> PyResult<SaveHandle> {
        let manager = self.manager.get();
        manager.check_before_saving(py, self.step)?;
        let state = flatten(state, choice, manager.inner.ranks().1 == 1)?;
        let (streams, attached): (HashMap<u32, u64>, _) = on_devices.call1((state.devices()?,))?.extract()?;
        let devices = OnDevices::new(py, &streams, attached)?;
        let snapshot = Snapshot::named(snapshot)?;
        let (source, parcel) =
            source(&state, snapshot, &devices, events)?.map_err(|error| raise_manager(py, &error))?;
        let cancel = Arc::new(AtomicBool::new(false));
        let request = SaveRequest {
            streams: devices.streams,
            metrics,
            custom_metadata: json(custom_metadata)?,
            cancel: Arc::clone(&cancel),
            drops_providers: snapshot == Snapshot::Eager,
            ..SaveRequest::new(self.step, source)
        };
        let ticket = self.take().ok_or_else(|| PyRuntimeError::new_err("this turn was used"))?;
        let inner = Arc::clone(&manager.inner);
        let planned = if inner.ranks().1 > 1 {
            // The ranks may have to tell each other what they have.
            let inner = Arc::clone(&inner);
            wait::on_thread(py, move || inner.plan(ticket, request))?
        } else {
            py.detach(|| inner.plan(ticket, request))
        };
        let ready = planned.map_err(|error| raise_manager(py, &error))?;
        let save = if inner.begins_at_once(&ready) {
            // Nothing to wait for: a thread of its own would take longer than what it does.
            py.detach(|| inner.begin(ready))
        } else {
            wait::until_stopped(
                py,
                &cancel,
                move || inner.begin(ready),
                // Captured whole before it could be stopped: it goes on, and the manager tells of
                // its failure as of any other's.
                |late| late.into_iter().for_each(|save| manager.remember(&save)),
            )?
        }
        .map_err(|error| raise_manager(py, &error))?;
        manager.remember(&save);
        parcel.give_back(py);
        Ok(SaveHandle::new(save))
    }

    /// Ends the save on all ranks, if this one has not taken part yet: its caller has raised.
    fn fail(&self, py: Python<'_>, cause: String) -> PyResult<()> {
        let _ = self.cause.set(cause);
        match self.take() {
            Some(ticket) if self.manager.get().inner.ranks().1 > 1 => {
                self.manager.get().query(py, move |_| {
                    drop(ticket);
                    Ok(())
                })
            }
            _ => Ok(()),
        }
    }
}

/// A held step.
#[pyclass(frozen, module = "stepwell._core")]
pub struct Held {
    hold: Mutex<Option<Hold>>,
}

/// The report of a rank's own failure. Other ranks get the leader's failure as it is, and any other
/// one in the leader's words.
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
