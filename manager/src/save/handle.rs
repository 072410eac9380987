//! The handle of a save. It has two tracks, capture and persist. Any thread may query or await
//! them.
//!
//! Every accepted save ends in exactly one [`Outcome`]. A failure stays *unseen* until a waiter
//! gets the outcome, or until the manager raises it, once.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use stepwell_core::deadline::StallTimer;
use stepwell_core::save::{Progress, SaveStats};
use stepwell_core::sync::{Condvar, Mutex, MutexGuard};
use stepwell_core::sys::{Device, UserStream};

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
    /// Returns the reason why it is not committed.
    pub fn error(&self) -> Option<&Arc<Error>> {
        match self {
            Self::Committed => None,
            Self::NotCommitted(error) | Self::DurabilityUncertain(error) => Some(error),
        }
    }
}

/// The reason why a save was not begun. It is no error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// The save policy said no.
    Policy,
    /// The manager writes nothing.
    ReadOnly,
    /// The step exists already, and the caller asked to skip it.
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

/// A wait without a timeout checks for progress at this interval.
const PROGRESS_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Called when a save is over.
pub type Callback = Box<dyn FnOnce(&Outcome) + Send>;

#[derive(Default)]
struct SaveTracks {
    /// True if every copy of the capture has been started, or no more will be.
    started: bool,
    /// The capture: pending (`None`), done (`true`) or failed (`false`).
    captured: Option<bool>,
    outcome: Option<Outcome>,
    seen: bool,
    stats: Stats,
    callbacks: Vec<Callback>,
    /// The pending saves that are written before this one.
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
    /// Counts progress that moves no bytes: another rank is alive.
    events: AtomicU64,
    /// The devices whose memory it copies.
    devices: Vec<Arc<Device>>,
    begun: Instant,
    cancel: Arc<AtomicBool>,
    /// The longest time without progress before a wait fails.
    stall_timeout: Duration,
}

impl SaveInner {
    /// The handle of a save that never began.
    fn over(step: u64) -> Self {
        Self {
            step,
            refusal: None,
            state: Mutex::default(),
            changed: Condvar::new(),
            progress: None,
            events: AtomicU64::new(0),
            devices: Vec::new(),
            begun: Instant::now(),
            cancel: Arc::default(),
            stall_timeout: Duration::ZERO,
        }
    }
}

/// A save. Clones are handles of the same save.
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
        devices: Vec<Arc<Device>>,
        begun: Instant,
        cancel: Arc<AtomicBool>,
        stall_timeout: Duration,
    ) -> Self {
        let progress = Some(progress);
        Self::of(SaveInner { progress, devices, begun, cancel, stall_timeout, ..SaveInner::over(step) })
    }

    pub(crate) fn refused(step: u64, refusal: Refusal) -> Self {
        Self::of(SaveInner { refusal: Some(refusal), ..SaveInner::over(step) })
    }

    /// A save that failed before it began. Its caller has the error.
    pub(crate) fn failed_unbegun(step: u64, error: Error) -> Self {
        let save = Self::of(SaveInner::over(step));
        save.set_outcome(Outcome::NotCommitted(Arc::new(error)));
        save.acknowledge();
        save
    }

    fn of(shared: SaveInner) -> Self {
        Self { shared: Arc::new(shared) }
    }

    /// Sets the saves that are written before it. Their progress counts as its progress.
    pub(crate) fn set_ahead(&self, pending: &[Self]) {
        self.lock().ahead = pending.iter().map(|save| Arc::downgrade(&save.shared)).collect();
    }

    pub(crate) fn cancel_flag(&self) -> &AtomicBool {
        &self.shared.cancel
    }

    /// True if the step will never be visible. A failed capture decides that before the save is
    /// over. A step that may not be durable has not failed: it exists, and its number is taken.
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

    /// Its step.
    pub fn step(&self) -> u64 {
        self.shared.step
    }

    /// Returns the reason why it was not begun. `None` if it was begun.
    pub fn refusal(&self) -> Option<Refusal> {
        self.shared.refusal
    }

    /// True if it is over. A refused save always is.
    pub fn is_done(&self) -> bool {
        self.refusal().is_some() || self.lock().outcome.is_some()
    }

    /// True if the caller may change the state: every byte is captured, or the save is over.
    pub fn captured(&self) -> bool {
        self.refusal().is_some() || self.lock().is_captured()
    }

    /// Waits until [`Save::captured`]. Fails with [`Error::Timeout`] as [`Save::wait`] does.
    pub fn wait_captured(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait_until(timeout, "the capture", SaveTracks::is_captured)
    }

    /// Waits until all host memory is read and every copy of a device was started. Only devices
    /// then still copy ([`Save::fence`]). Fails with [`Error::Timeout`] as [`Save::wait`] does.
    pub fn wait_started(&self, timeout: Option<Duration>) -> Result<()> {
        self.wait_until(timeout, "the capture", SaveTracks::is_started)
    }

    /// True if [`Save::wait_started`] would return at once.
    pub fn started(&self) -> bool {
        self.refusal().is_some() || self.lock().is_started()
    }

    /// Returns the numbers of the devices that may still copy.
    pub fn devices(&self) -> Vec<u32> {
        if self.captured() {
            return Vec::new();
        }
        self.shared.devices.iter().map(|device| device.ordinal()).collect()
    }

    /// Makes later work on the caller's streams wait, on the device, for the copies that have
    /// started. Skips devices without a given stream.
    pub fn fence(&self, streams: &BTreeMap<u32, UserStream>) -> stepwell_core::Result<()> {
        if self.captured() {
            return Ok(());
        }
        for device in &self.shared.devices {
            if let Some(stream) = streams.get(&device.ordinal()) {
                device.sent_before(*stream)?;
            }
        }
        Ok(())
    }

    /// Ends it if it is not captured yet. The capture stops after its current copy, the call that
    /// captures returns an error, and nothing is committed. A captured save goes on. Returns at
    /// once.
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

    /// [`Save::wait`] for a caller that may fail to report a failure. Call [`Save::acknowledge`]
    /// once it is reported.
    pub fn wait_unseen(&self, timeout: Option<Duration>) -> Result<Option<Outcome>> {
        if self.refusal().is_some() {
            return Ok(None);
        }
        self.wait_until(timeout, "the commit", |state| state.outcome.is_some())?;
        Ok(self.outcome())
    }

    /// Returns the outcome if there is one. A failure stays unseen.
    pub fn outcome(&self) -> Option<Outcome> {
        self.lock().outcome.clone()
    }

    /// Marks a failure as seen.
    pub fn acknowledge(&self) {
        self.lock().seen = true;
    }

    /// Returns its statistics so far.
    pub fn stats(&self) -> Stats {
        let mut stats = self.lock().stats;
        if let Some(progress) = &self.shared.progress {
            stats.pipeline = progress.snapshot();
        }
        stats
    }

    /// Runs a callback once it is over, on an engine thread. If it is over already, runs it here,
    /// at once.
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

    /// Returns a value that changes as long as this save, or one before it, makes progress. A wait
    /// fails when it has not changed for [`Save::stall_timeout`].
    pub fn progress(&self) -> impl PartialEq + Copy + Send + use<> {
        let ahead: Vec<_> = self.lock().ahead.iter().filter_map(Weak::upgrade).collect();
        let ahead: Vec<Self> = ahead.into_iter().map(|shared| Self { shared }).collect();
        let left = ahead.iter().filter(|save| !save.is_done()).count();
        let bytes = ahead
            .iter()
            .fold(self.progress_counter(), |bytes, save| bytes.wrapping_add(save.progress_counter()));
        (left, bytes, self.captured())
    }

    /// The longest time without progress before a wait without a timeout fails.
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

    /// Sets the outcome. The first one stays. Returns the callbacks, which the caller passes to
    /// [`Save::call`] once it holds no lock.
    pub(crate) fn set_outcome(&self, outcome: Outcome) -> Vec<Callback> {
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

    /// Runs the callbacks.
    pub(crate) fn call(&self, callbacks: Vec<Callback>) {
        let Some(outcome) = self.outcome() else { return };
        for callback in callbacks {
            // A callback that panics must end neither the others nor this thread.
            if let Err(error) = guarded("a callback", || callback(&outcome)) {
                tracing::warn!(step = self.step(), %error, "a callback of this save failed");
            }
        }
    }

    /// Returns a number that changes with progress: bytes captured and written, and heartbeats of
    /// other ranks.
    pub fn progress_counter(&self) -> u64 {
        let stats = self.shared.progress.as_ref().map(|progress| progress.snapshot()).unwrap_or_default();
        let bytes = stats.captured_bytes.wrapping_add(stats.written_bytes);
        bytes.wrapping_add(self.shared.events.load(Ordering::Relaxed))
    }

    /// Records progress that moves no bytes.
    pub(crate) fn record_progress(&self) {
        self.shared.events.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns a failure that nobody has seen, and marks it as seen.
    pub(crate) fn take_unseen(&self) -> Option<Arc<Error>> {
        let mut state = self.lock();
        let error = state.outcome.as_ref().and_then(|outcome| outcome.error().cloned())?;
        (!std::mem::replace(&mut state.seen, true)).then_some(error)
    }

    /// Marks a failure as unseen again, because it could not be reported.
    pub(crate) fn mark_unseen(&self) {
        self.lock().seen = false;
    }

    /// True if it failed and nobody has seen it.
    pub(crate) fn is_unseen(&self) -> bool {
        let state = self.lock();
        !state.seen && state.outcome.as_ref().is_some_and(|outcome| outcome.error().is_some())
    }
}
