//! The handle of a save: two tracks, capture and persist, that any thread may look at or wait for.
//!
//! Every accepted save ends in exactly one [`Outcome`]. A failure is *sticky* until someone has seen it: whoever waits for the outcome, or the
//! manager, which raises it once.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use stepwell_core::save::{Progress, SaveStats};

use crate::error::Error;

/// How a save ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The step survives a power cut.
    Committed,
    /// Nothing of it is visible.
    NotCommitted(Arc<Error>),
    /// It stands under its name, but may not survive a power cut.
    DurabilityUncertain(Arc<Error>),
}

impl Outcome {
    /// Whether the step is committed.
    pub fn is_committed(&self) -> bool {
        matches!(self, Self::Committed)
    }

    /// Why it is not committed.
    pub fn error(&self) -> Option<&Arc<Error>> {
        match self {
            Self::Committed => None,
            Self::NotCommitted(error) | Self::DurabilityUncertain(error) => Some(error),
        }
    }
}

/// Why a save was not begun, without that being an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The save policy said no.
    Policy,
    /// The manager writes nothing.
    ReadOnly,
    /// The step is there already, and `exists="skip"`.
    Exists,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Policy => "the save policy says no",
            Self::ReadOnly => "the manager is read-only",
            Self::Exists => "the step exists already",
        })
    }
}

/// What a save did, and how long its phases took (in seconds).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// The pipeline: bytes, planning, capture, writing, checksums, syncing.
    pub pipeline: SaveStats,
    /// Data files.
    pub files: u64,
    /// Waiting for earlier saves.
    pub queued_seconds: f64,
    /// Indexes, manifest, directory syncs, votes and the rename.
    pub commit_seconds: f64,
    /// From the call to the outcome.
    pub total_seconds: f64,
}

/// What is called when a save is over.
pub type Callback = Box<dyn FnOnce(&Outcome) + Send>;

#[derive(Default)]
struct State {
    /// Capture: pending (`None`), done or failed.
    captured: Option<bool>,
    outcome: Option<Outcome>,
    seen: bool,
    stats: Stats,
    callbacks: Vec<Callback>,
}

struct Shared {
    step: u64,
    refusal: Option<Refusal>,
    state: Mutex<State>,
    changed: Condvar,
    progress: Option<Arc<Progress>>,
    begun: Instant,
    cancel: Arc<AtomicBool>,
}

/// See the module documentation. Clones are the same save.
#[derive(Clone)]
pub struct Save {
    shared: Arc<Shared>,
}

impl fmt::Debug for Save {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Save")
            .field("step", &self.step())
            .field("outcome", &self.outcome())
            .finish_non_exhaustive()
    }
}

impl Save {
    pub(crate) fn begun(step: u64, progress: Arc<Progress>, begun: Instant, cancel: Arc<AtomicBool>) -> Self {
        Self::new(step, None, Some(progress), begun, cancel)
    }

    pub(crate) fn refused(step: u64, refusal: Refusal) -> Self {
        Self::new(step, Some(refusal), None, Instant::now(), Arc::default())
    }

    fn new(
        step: u64,
        refusal: Option<Refusal>,
        progress: Option<Arc<Progress>>,
        begun: Instant,
        cancel: Arc<AtomicBool>,
    ) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Shared { step, refusal, state, changed, progress, begun, cancel };
        Self { shared: Arc::new(shared) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether two handles are of one save.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// The step.
    pub fn step(&self) -> u64 {
        self.shared.step
    }

    /// Why nothing was begun; `None` for a save that was.
    pub fn refusal(&self) -> Option<Refusal> {
        self.shared.refusal
    }

    /// Whether it is over (a refused one always is).
    pub fn is_done(&self) -> bool {
        self.refusal().is_some() || self.lock().outcome.is_some()
    }

    /// Whether the state may be changed: every byte is captured, or the save is over.
    pub fn captured(&self) -> bool {
        let state = self.lock();
        self.refusal().is_some() || state.captured.is_some() || state.outcome.is_some()
    }

    /// Waits until [`Save::captured`]; `false` by the deadline.
    pub fn wait_captured(&self, timeout: Option<Duration>) -> bool {
        self.wait_until(timeout, |state| state.captured.is_some() || state.outcome.is_some())
    }

    /// Ends it if it is not captured yet: the capture stops after the copy it is at, the call that captures returns an error, and the save ends not
    /// committed. A save that is captured goes on. Returns at once.
    pub fn cancel(&self) {
        self.shared.cancel.store(true, Ordering::Release);
    }

    /// Waits for the outcome; `None` by the deadline (the save goes on), and for a refused save. Whoever gets a failure from here has seen it.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Outcome> {
        let outcome = self.wait_unseen(timeout)?;
        self.acknowledge();
        Some(outcome)
    }

    /// [`Save::wait`] for one who may not get to tell a failure, and says [`Save::acknowledge`] when he has.
    pub fn wait_unseen(&self, timeout: Option<Duration>) -> Option<Outcome> {
        if self.refusal().is_some() || !self.wait_until(timeout, |state| state.outcome.is_some()) {
            return None;
        }
        self.outcome()
    }

    /// The outcome if there is one. Looking is not seeing: a failure stays sticky.
    pub fn outcome(&self) -> Option<Outcome> {
        self.lock().outcome.clone()
    }

    /// Says that a failure has been told to someone.
    pub fn acknowledge(&self) {
        self.lock().seen = true;
    }

    /// What it has done so far.
    pub fn stats(&self) -> Stats {
        let mut stats = self.lock().stats;
        if let Some(progress) = &self.shared.progress {
            stats.pipeline = progress.snapshot();
        }
        stats
    }

    /// Calls back once it is over, on an engine thread (at once, on this thread, where it is over already).
    pub fn on_done(&self, callback: Callback) {
        let mut state = self.lock();
        match state.outcome.clone() {
            None => state.callbacks.push(callback),
            Some(outcome) => {
                drop(state);
                callback(&outcome);
            }
        }
    }

    fn wait_until(&self, timeout: Option<Duration>, done: impl Fn(&State) -> bool) -> bool {
        if self.refusal().is_some() {
            return true;
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.lock();
        while !done(&state) {
            state = match deadline {
                None => self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|d| !d.is_zero())
                    else {
                        return false;
                    };
                    self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }

    pub(crate) fn set_captured(&self, ok: bool) {
        self.lock().captured = Some(ok);
        self.shared.changed.notify_all();
    }

    pub(crate) fn set_stats(&self, set: impl FnOnce(&mut Stats)) {
        set(&mut self.lock().stats);
    }

    /// Ends it; the first outcome stays. The callbacks that this gives are to be called with [`Save::call`] once the caller holds no lock.
    pub(crate) fn settle(&self, outcome: Outcome) -> Vec<Callback> {
        let mut state = self.lock();
        if state.outcome.is_some() {
            return Vec::new();
        }
        state.stats.total_seconds = self.shared.begun.elapsed().as_secs_f64();
        state.outcome = Some(outcome);
        self.shared.changed.notify_all();
        std::mem::take(&mut state.callbacks)
    }

    /// Calls back.
    pub(crate) fn call(&self, callbacks: Vec<Callback>) {
        let Some(outcome) = self.outcome() else { return };
        for callback in callbacks {
            callback(&outcome);
        }
    }

    /// Bytes done so far: what "progress" means to those who wait for it.
    pub(crate) fn bytes_done(&self) -> u64 {
        let stats = self.shared.progress.as_ref().map(|progress| progress.snapshot()).unwrap_or_default();
        stats.captured_bytes.wrapping_add(stats.written_bytes)
    }

    /// The failure, if there is one that nobody has seen; it is seen from now on.
    pub(crate) fn take_unseen(&self) -> Option<Arc<Error>> {
        let mut state = self.lock();
        let error = state.outcome.as_ref().and_then(|outcome| outcome.error().cloned())?;
        (!std::mem::replace(&mut state.seen, true)).then_some(error)
    }

    /// A failure that was taken could not be told.
    pub(crate) fn not_seen(&self) {
        self.lock().seen = false;
    }

    /// Whether it failed and nobody has seen it.
    pub(crate) fn is_unseen(&self) -> bool {
        let state = self.lock();
        !state.seen && state.outcome.as_ref().is_some_and(|outcome| outcome.error().is_some())
    }
}
