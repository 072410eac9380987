//! The handle of a save: two tracks, capture and persist, that any thread may look at or wait for.
//!
//! Every accepted save ends in exactly one [`Outcome`]. A failure is *sticky* until somebody has
//! seen it: a waiter for the outcome, or the manager, which raises it once.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use stepwell_core::deadline::StallTimer;
use stepwell_core::save::{Progress, SaveStats};
use stepwell_core::staging::CopyQueue;
use stepwell_core::sync::{Condvar, Mutex, MutexGuard};
use stepwell_core::sys::UserStream;

use crate::error::{Error, Result};
use crate::guard::guarded;

/// How a save ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The step survives a power cut.
    Committed,
    /// Nothing is visible.
    NotCommitted(Arc<Error>),
    /// The step has its name, but may not survive a power cut.
    DurabilityUncertain(Arc<Error>),
}

impl Outcome {
    /// True if the step is committed.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// The statistics of a save, with the durations of its phases in seconds.
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

/// How often somebody who waits without a deadline looks whether there is progress.
const PROGRESS_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Called when a save is over.
pub type Callback = Box<dyn FnOnce(&Outcome) + Send>;

#[derive(Default)]
struct SaveTracks {
    /// Every copy of the capture has been started, or none will be any more.
    started: bool,
    /// Capture: pending (`None`), done or failed.
    captured: Option<bool>,
    outcome: Option<Outcome>,
    seen: bool,
    stats: Stats,
    callbacks: Vec<Callback>,
    /// The saves that are written before this one.
    ahead: Vec<Weak<SaveInner>>,
}

impl SaveTracks {
    fn is_started(&self) -> bool {
        self.started || self.is_captured()
    }

    fn is_captured(&self) -> bool {
        self.captured.is_some() || self.outcome.is_some()
    }
}

struct SaveInner {
    step: u64,
    refusal: Option<Refusal>,
    state: Mutex<SaveTracks>,
    changed: Condvar,
    progress: Option<Arc<Progress>>,
    /// Counts what is done for it beside the moving of bytes: other ranks are waited for, and live.
    events: AtomicU64,
    /// The devices that it is copied from.
    queues: Vec<Arc<dyn CopyQueue>>,
    begun: Instant,
    cancel: Arc<AtomicBool>,
    /// How long it may make no progress while somebody waits for it.
    stall_timeout: Duration,
}

impl SaveInner {
    /// The handle of a save without anything to wait for.
    fn over(step: u64) -> Self {
        Self {
            step,
            refusal: None,
            state: Mutex::default(),
            changed: Condvar::new(),
            progress: None,
            events: AtomicU64::new(0),
            queues: Vec::new(),
            begun: Instant::now(),
            cancel: Arc::default(),
            stall_timeout: Duration::ZERO,
        }
    }
}

/// See the module documentation. Clones are the same save.
#[derive(Clone)]
pub struct Save {
    shared: Arc<SaveInner>,
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
    pub(crate) fn begun(
        step: u64,
        progress: Arc<Progress>,
        queues: Vec<Arc<dyn CopyQueue>>,
        begun: Instant,
        cancel: Arc<AtomicBool>,
        stall_timeout: Duration,
    ) -> Self {
        let progress = Some(progress);
        Self::of(SaveInner { progress, queues, begun, cancel, stall_timeout, ..SaveInner::over(step) })
    }

    pub(crate) fn refused(step: u64, refusal: Refusal) -> Self {
        Self::of(SaveInner { refusal: Some(refusal), ..SaveInner::over(step) })
    }

    /// One that has failed before anything was begun; its caller knows.
    pub(crate) fn failed_unbegun(step: u64, error: Error) -> Self {
        let save = Self::of(SaveInner::over(step));
        save.settle(Outcome::NotCommitted(Arc::new(error)));
        save.acknowledge();
        save
    }

    fn of(shared: SaveInner) -> Self {
        Self { shared: Arc::new(shared) }
    }

    /// Says which saves are written before it: while they get on, so does it.
    pub(crate) fn set_ahead(&self, pending: &[Self]) {
        self.lock().ahead = pending.iter().map(|save| Arc::downgrade(&save.shared)).collect();
    }

    pub(crate) fn cancel_flag(&self) -> &AtomicBool {
        &self.shared.cancel
    }

    /// True if nothing of it will ever be visible, even if it is not over: an incomplete capture is
    /// not committed. (A step that may not be durable has not failed in this sense: it exists, and
    /// its number is taken.)
    pub(crate) fn has_failed(&self) -> bool {
        let state = self.lock();
        match &state.outcome {
            Some(outcome) => matches!(outcome, Outcome::NotCommitted(_)),
            None => state.captured == Some(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, SaveTracks> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if two handles are of one save.
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

    /// True if it is over (a refused one always is).
    pub fn is_done(&self) -> bool {
        self.refusal().is_some() || self.lock().outcome.is_some()
    }

    /// True if the state may be changed: every byte is captured, or the save is over.
    pub fn captured(&self) -> bool {
        self.refusal().is_some() || self.lock().is_captured()
    }

    /// Waits until [`Save::captured`]. [`Error::Timeout`] as of [`Save::wait`].
    pub fn wait_captured(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait_until(timeout, "the capture", SaveTracks::is_captured)
    }

    /// Waits until every copy of the capture has been started and all host memory is read: what is
    /// left is for the devices that copy ([`Save::precede`]). [`Error::Timeout`] as of
    /// [`Save::wait`].
    pub fn wait_started(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait_until(timeout, "the capture", SaveTracks::is_started)
    }

    /// True if [`Save::wait_started`] would return at once.
    pub fn started(&self) -> bool {
        self.refusal().is_some() || self.lock().is_started()
    }

    /// The numbers of the devices that may still copy what is captured.
    pub fn devices(&self) -> Vec<u32> {
        if self.captured() {
            return Vec::new();
        }
        self.shared.queues.iter().map(|queue| queue.ordinal()).collect()
    }

    /// Makes what is put on the caller's streams from now on wait, each on its device, for the
    /// copies that have been started. A device that no stream is named of is left out.
    pub fn precede(&self, streams: &BTreeMap<u32, UserStream>) -> stepwell_core::Result<()> {
        if self.captured() {
            return Ok(());
        }
        for queue in &self.shared.queues {
            if let Some(stream) = streams.get(&queue.ordinal()) {
                queue.precede(*stream)?;
            }
        }
        Ok(())
    }

    /// Ends it if it is not captured yet: the capture stops after the copy it is at, the call that
    /// captures returns an error, and the save ends not committed. A save that is captured goes on.
    /// Returns at once.
    pub fn cancel(&self) {
        self.shared.cancel.store(true, Ordering::Release);
    }

    /// Waits for the outcome; `None` for a refused save. Fails with [`Error::Timeout`] at the
    /// deadline or, without one, after the stall timeout without progress of this save or an
    /// earlier one. The save itself continues. A failure returned here counts as seen.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<Outcome>> {
        let outcome = self.wait_unseen(timeout)?;
        self.acknowledge();
        Ok(outcome)
    }

    /// [`Save::wait`] for one who may not get to tell a failure, and says [`Save::acknowledge`]
    /// when he has.
    pub fn wait_unseen(&self, timeout: Option<Duration>) -> Result<Option<Outcome>> {
        if self.refusal().is_some() {
            return Ok(None);
        }
        self.wait_until(timeout, "the commit", |state| state.outcome.is_some())?;
        Ok(self.outcome())
    }

    /// The outcome if there is one. Looking is not seeing: a failure stays sticky.
    pub fn outcome(&self) -> Option<Outcome> {
        self.lock().outcome.clone()
    }

    /// Says that a failure has been told to someone.
    pub fn acknowledge(&self) {
        self.lock().seen = true;
    }

    /// Its statistics so far.
    pub fn stats(&self) -> Stats {
        let mut stats = self.lock().stats;
        if let Some(progress) = &self.shared.progress {
            stats.pipeline = progress.snapshot();
        }
        stats
    }

    /// Calls back once it is over, on an engine thread (at once, on this thread, where it is over
    /// already).
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

    fn wait_until(
        &self,
        timeout: Option<Duration>,
        what: &str,
        done: impl Fn(&SaveTracks) -> bool,
    ) -> Result<()> {
        if self.refusal().is_some() {
            return Ok(());
        }
        let begun = Instant::now();
        let mut timer = StallTimer::new(timeout.unwrap_or(self.shared.stall_timeout));
        loop {
            // A timeout of the caller is fixed.
            let left = timer.left(timeout.is_none().then(|| self.progress()));
            let state = self.lock();
            if done(&state) {
                return Ok(());
            }
            if left.is_zero() {
                let waited_for = format!("{what} of the save of step {}", self.step());
                return Err(Error::Timeout { waited_for, waited: begun.elapsed() });
            }
            // Progress of other ranks does not wake this thread.
            let pause = if timeout.is_none() { left.min(PROGRESS_POLL_INTERVAL) } else { left };
            drop(self.shared.changed.wait_timeout(state, pause));
        }
    }

    /// Something that changes as long as it gets on, or a save before it does: for one who waits in
    /// slices, and gives up when it has not changed for [`Save::stall_timeout`].
    pub fn progress(&self) -> impl PartialEq + Copy + Send + use<> {
        let ahead: Vec<_> = self.lock().ahead.iter().filter_map(Weak::upgrade).collect();
        let ahead: Vec<Self> = ahead.into_iter().map(|shared| Self { shared }).collect();
        let left = ahead.iter().filter(|save| !save.is_done()).count();
        let bytes = ahead
            .iter()
            .fold(self.progress_counter(), |bytes, save| bytes.wrapping_add(save.progress_counter()));
        (left, bytes, self.captured())
    }

    /// How long it may make no progress while somebody waits for it without a deadline.
    pub fn stall_timeout(&self) -> Duration {
        self.shared.stall_timeout
    }

    pub(crate) fn set_started(&self) {
        self.lock().started = true;
        self.shared.changed.notify_all();
    }

    pub(crate) fn set_captured(&self, ok: bool) {
        self.lock().captured = Some(ok);
        self.shared.changed.notify_all();
    }

    pub(crate) fn set_stats(&self, set: impl FnOnce(&mut Stats)) {
        set(&mut self.lock().stats);
    }

    /// Ends it; the first outcome stays. The callbacks that this gives are to be called with
    /// [`Save::call`] once the caller holds no lock.
    pub(crate) fn settle(&self, outcome: Outcome) -> Vec<Callback> {
        let mut state = self.lock();
        if state.outcome.is_some() {
            return Vec::new();
        }
        state.stats.total_seconds = self.shared.begun.elapsed().as_secs_f64();
        state.outcome = Some(outcome);
        state.ahead.clear();
        self.shared.changed.notify_all();
        std::mem::take(&mut state.callbacks)
    }

    /// Calls back.
    pub(crate) fn call(&self, callbacks: Vec<Callback>) {
        let Some(outcome) = self.outcome() else { return };
        for callback in callbacks {
            // Each for itself: one that panics takes no other's turn, nor the thread that calls it.
            if let Err(error) = guarded("a callback", || callback(&outcome)) {
                tracing::warn!(step = self.step(), %error, "what was to be called when this save was over failed");
            }
        }
    }

    /// A number that changes as long as it gets on: bytes captured and written, and signs of life
    /// of other ranks.
    pub fn progress_counter(&self) -> u64 {
        let stats = self.shared.progress.as_ref().map(|progress| progress.snapshot()).unwrap_or_default();
        let bytes = stats.captured_bytes.wrapping_add(stats.written_bytes);
        bytes.wrapping_add(self.shared.events.load(Ordering::Relaxed))
    }

    /// It gets on, though no bytes move.
    pub(crate) fn record_progress(&self) {
        self.shared.events.fetch_add(1, Ordering::Relaxed);
    }

    /// The failure, if there is one that nobody has seen; it is seen from now on.
    pub(crate) fn take_unseen(&self) -> Option<Arc<Error>> {
        let mut state = self.lock();
        let error = state.outcome.as_ref().and_then(|outcome| outcome.error().cloned())?;
        (!std::mem::replace(&mut state.seen, true)).then_some(error)
    }

    /// A failure that was taken could not be told.
    pub(crate) fn mark_unseen(&self) {
        self.lock().seen = false;
    }

    /// True if it failed and nobody has seen it.
    pub(crate) fn is_unseen(&self) -> bool {
        let state = self.lock();
        !state.seen && state.outcome.as_ref().is_some_and(|outcome| outcome.error().is_some())
    }
}
