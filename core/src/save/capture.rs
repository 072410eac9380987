//! Capture: the half of a save that the caller waits for. The caller's thread and the pool's
//! helpers take windows in order, fill each into a slot, and send it to the flush. A window with
//! copies from a device is sent when its copies have arrived.
//!
//! The [`CaptureTiming`] of the providers decides how long the caller waits.
//! [`Capture::run_eager`] copies the leaves that the caller may change after the return. It also
//! enqueues the copies that the caller's later work on the device waits for. Another thread's
//! [`Capture::run`] does the rest. The windows of each device have a thread of their own.

mod fill;
mod worker;

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use self::fill::fill;
use self::worker::{CaptureJob, PendingWindows};
use super::SaveOptions;
use super::link::Link;
use super::progress::Progress;
use super::schedule::{self, ScheduledWindow};
use super::torn::FirstReading;
use super::windows::Windows;
use crate::deadline::deadline_after;
use crate::format::index::Index;
use crate::provider::CaptureTiming;
use crate::staging::{Filled, Full, Slot, StagingPool, Task};
use crate::sync::{AtomicUsize, Mutex, Sender};
use crate::sys::Device;
use crate::{Error, Result};

/// A message from the capture to the flush.
pub(super) enum Message {
    /// A filled window, with its number.
    Window(usize, Slot<Full>),
    /// The capture is over. The flush drops the windows and their providers, which may take
    /// milliseconds.
    Over(Box<Windows>),
}

/// The parts of a [`Capture::new`].
pub(super) struct CaptureParts {
    pub windows: Windows,
    /// For messages.
    pub indexes: Arc<Vec<Index>>,
    pub sender: Sender<Message>,
    pub link: Arc<Link>,
    pub pool: Arc<StagingPool>,
    pub progress: Arc<Progress>,
    pub options: SaveOptions,
}

/// Called once, when every copy of a save has been started or none will be.
pub type WhenStarted = Box<dyn FnOnce() + Send>;

/// The half that copies. Dropping it cancels the save.
pub struct Capture {
    /// `None` once it is over.
    parts: Option<CaptureParts>,
    /// Windows to copy or enqueue before the caller continues, in order.
    eager: Vec<ScheduledWindow>,
    /// The other windows.
    deferred: Vec<ScheduledWindow>,
    pending: PendingWindows,
    devices: Vec<Arc<Device>>,
    starts: Arc<StartCounter>,
    /// The first readings, if torn saves are detected.
    first: Option<Arc<FirstReading>>,
    link: Arc<Link>,
    progress: Arc<Progress>,
}

impl Capture {
    pub(super) fn new(parts: CaptureParts) -> Self {
        let (link, progress) = (Arc::clone(&parts.link), Arc::clone(&parts.progress));
        let devices = schedule::devices(&parts.windows);
        let windows = schedule::schedule(&parts.windows, &devices);
        let starts = Arc::new(StartCounter { left: AtomicUsize::new(windows.len()), call: Mutex::new(None) });
        let (eager, deferred) =
            windows.into_iter().partition(|window| window.timing > CaptureTiming::Deferred);
        Self {
            parts: Some(parts),
            eager,
            deferred,
            pending: VecDeque::new(),
            devices,
            starts,
            first: None,
            link,
            progress,
        }
    }

    /// The save's counters.
    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// True if something must be captured while the caller waits.
    pub fn has_eager(&self) -> bool {
        !self.eager.is_empty()
    }

    /// The devices that it copies from.
    pub fn devices(&self) -> &[Arc<Device>] {
        &self.devices
    }

    /// True if [`Capture::run_eager`] only starts some copies. After it, the caller's later work on
    /// the devices must be made to wait for them ([`Device::sent_before`]).
    pub fn is_fenced(&self) -> bool {
        self.eager.iter().any(|window| window.timing == CaptureTiming::Enqueued)
    }

    /// Sets a function to call once, on any thread: when every copy has been started and all host
    /// memory is read, or when no further copy will start.
    pub fn when_started(&self, call: WhenStarted) {
        *self.starts.call.lock().unwrap_or_else(PoisonError::into_inner) = Some(call);
        if self.starts.left.load(Ordering::Acquire) == 0 {
            self.starts.call();
        }
    }

    /// Reads all windows that are not yet copied when `save` returns. The capture compares them
    /// later, and fails the save if one has changed ([`Error::Torn`]). Takes as long as capturing
    /// them.
    pub fn read_first(&mut self) -> Result<()> {
        let Some(parts) = &self.parts else { return Ok(()) };
        let stall = parts.options.stall_timeout;
        let mut first = FirstReading::default();
        let windows = self.eager.iter().chain(&self.deferred);
        for window in windows.filter(|window| window.timing < CaptureTiming::Copied) {
            let (slot, _) =
                parts.pool.acquire(stall, parts.link.poll_interval(), || parts.link.capture_stopped())?;
            let position = window.window as usize;
            let filled = fill(&parts.windows, position, slot.begin(), &parts.indexes, &parts.link)?;
            let slot = match filled {
                Filled::Full(slot) => slot,
                Filled::Pending(slot) => slot.wait(deadline_after(stall))?,
            };
            first.note(&parts.windows, window.window, slot.bytes());
        }
        self.first = Some(Arc::new(first));
        Ok(())
    }

    /// Copies everything that is left, on this thread and on helpers. When it returns, with any
    /// result, the host memory of the sources is no longer read and may change. After an error, a
    /// device may still read its sources, and keeps them alive.
    ///
    /// The flush's thread drops the providers soon after. If the flush has ended, this call drops
    /// them. `Flush::run` returns after they are dropped.
    ///
    /// [`Error::Cancelled`] if the flush failed or was dropped, or if [`SaveOptions::cancel`] was
    /// set before the last copy. [`Error::Timeout`] if no slot was returned for the stall timeout.
    pub fn run(mut self) -> Result<()> {
        let windows = self.eager.drain(..).chain(self.deferred.drain(..));
        let windows = windows.map(|window| ScheduledWindow { timing: CaptureTiming::Copied, ..window });
        let windows = windows.collect();
        for (window, _) in &mut self.pending {
            window.timing = CaptureTiming::Copied;
        }
        self.copy(windows)
    }

    /// Copies what cannot wait, and starts the copies that must be enqueued. Returns the rest for
    /// another thread's [`Capture::run`], or `None`.
    pub fn run_eager(mut self) -> Result<Option<Self>> {
        let windows = std::mem::take(&mut self.eager);
        if !windows.is_empty() || self.deferred.is_empty() {
            self.copy(windows)?;
        }
        Ok(self.parts.is_some().then_some(self))
    }

    /// Fills these windows. Keeps those whose copies are enqueued and may arrive later.
    fn copy(&mut self, windows: Vec<ScheduledWindow>) -> Result<()> {
        let started = Instant::now();
        let Some(parts) = self.parts.take() else {
            return Err(Error::internal("one run of a capture", "a second one"));
        };
        let count = windows.len();
        let lanes = schedule::lanes(windows, self.devices.len());
        let threads = parts.options.capture_threads.max(lanes.len()).min(count);
        let pool = Arc::clone(&parts.pool);
        let job = Arc::new(CaptureJob {
            parts,
            lanes,
            workers: AtomicUsize::new(0),
            starts: Arc::clone(&self.starts),
            first: self.first.clone(),
            pending: Mutex::new(std::mem::take(&mut self.pending)),
            error: Mutex::new(None),
            door: Arc::default(),
        });
        let task: Arc<dyn Task> = Arc::clone(&job) as Arc<dyn Task>;
        pool.help(threads.saturating_sub(1), &task);
        drop(task);
        job.work();
        job.door.close();
        let error = job.error.lock().unwrap_or_else(PoisonError::into_inner).take();
        let error = error.map(Error::Shared).or_else(|| self.link.stopped());
        // The door is closed and all helpers have left, so this is the only handle.
        if let Some(CaptureJob { mut parts, pending, .. }) = Arc::into_inner(job) {
            self.pending = pending.into_inner().unwrap_or_else(PoisonError::into_inner);
            if (self.deferred.is_empty() && self.pending.is_empty()) || error.is_some() {
                if parts.options.drops_providers {
                    parts.windows.leaves.clear();
                }
                // If the flush has ended, `send` returns the message, which is dropped here.
                let _ = parts.sender.send(Message::Over(Box::new(parts.windows)));
            } else {
                self.parts = Some(parts);
            }
        }
        self.progress.captured_since(started);
        error.map_or(Ok(()), Err)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if self.parts.is_some() {
            self.link.stop("the capture was dropped before it was complete");
        }
        self.starts.call();
    }
}

/// Counts the windows whose copies have not been started.
struct StartCounter {
    left: AtomicUsize,
    call: Mutex<Option<WhenStarted>>,
}

impl StartCounter {
    /// Counts one window.
    fn count(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.call();
        }
    }

    /// Calls the function, unless it was called before.
    fn call(&self) {
        let call = self.call.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(call) = call {
            call();
        }
    }
}
