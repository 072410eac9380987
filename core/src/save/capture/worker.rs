//! The threads of a capture, and the state that they share.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use super::fill::fill;
use super::{CaptureParts, Message, StartCounter};
use crate::deadline::deadline_after;
use crate::provider::CaptureTiming;
use crate::save::schedule::{self, Lane, ScheduledWindow};
use crate::save::torn::FirstReading;
use crate::staging::{Door, Filled, Free, Full, Pending, Slot, Task};
use crate::sync::{AtomicUsize, Mutex, MutexGuard};
use crate::{Error, Result};

/// Windows whose copies were started on a device and have not been waited for, in order.
pub(super) type PendingWindows = VecDeque<(ScheduledWindow, Slot<Pending>)>;

/// The windows that several threads capture together.
pub(super) struct CaptureJob {
    pub parts: CaptureParts,
    pub lanes: Vec<Lane>,
    /// The number of threads that have joined.
    pub workers: AtomicUsize,
    pub starts: Arc<StartCounter>,
    pub first: Option<Arc<FirstReading>>,
    /// Pending windows that no thread holds.
    pub pending: Mutex<PendingWindows>,
    /// The first failure. The flush gets it too.
    pub error: Mutex<Option<Arc<Error>>>,
    pub door: Arc<Door>,
}

impl Task for CaptureJob {
    fn work(&self) {
        let mut worker = CaptureWorker { job: self, pending: VecDeque::new() };
        let worked = catch_unwind(AssertUnwindSafe(|| worker.work()));
        let error = match worked {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(panic) => {
                let found = format!("a state provider panicked: {}", panic_message(&*panic));
                Error::internal("a result", found)
            }
        };
        if let Error::Cancelled(why) = error {
            // Another failure caused this, and its thread records it.
            self.parts.link.stop(why);
            return;
        }
        let error = Arc::new(error);
        self.parts.link.fail(&error);
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    fn door(&self) -> &Arc<Door> {
        &self.door
    }
}

impl CaptureJob {
    fn lock_pending(&self) -> MutexGuard<'_, PendingWindows> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the next window for a worker: from its own lane first, then from any other.
    fn next(&self, worker: usize) -> Option<ScheduledWindow> {
        let count = self.lanes.len();
        self.lanes.iter().cycle().skip(worker % count.max(1)).take(count).find_map(Lane::take)
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// One capturing thread.
struct CaptureWorker<'a> {
    job: &'a CaptureJob,
    /// Its pending windows. It starts the next copies before it waits for these.
    pending: PendingWindows,
}

impl CaptureWorker<'_> {
    fn work(&mut self) -> Result<()> {
        let parts = &self.job.parts;
        let number = self.job.workers.fetch_add(1, Ordering::Relaxed);
        // The first worker takes the pending windows of the earlier run: they hold slots.
        self.pending = std::mem::take(&mut *self.job.lock_pending());
        // Take a window before the check for cancellation. A complete capture may be committed
        // already, so it must not end as cancelled.
        while let Some(window) = self.job.next(number) {
            if let Some(error) = parts.link.capture_stopped() {
                return Err(error);
            }
            let slot = self.slot()?;
            let position = window.window as usize;
            let filled = fill(&parts.windows, position, slot.begin(), &parts.indexes, &parts.link)?;
            self.job.starts.count();
            match filled {
                Filled::Full(slot) => self.send(window.window, slot)?,
                Filled::Pending(slot) => self.pending.push_back((window, slot)),
            }
            let mut ahead = self.job.lanes.iter().flat_map(Lane::ahead);
            ahead.any(|next| schedule::read_ahead(&parts.windows, next));
        }
        while self.pending.iter().any(|(window, _)| window.timing == CaptureTiming::Copied) {
            self.finish_oldest()?;
        }
        if !self.pending.is_empty() {
            // They hold slots. The next thread that waits for a slot finishes them.
            self.job.lock_pending().append(&mut self.pending);
            parts.pool.wake();
        }
        Ok(())
    }

    /// Returns a free slot. Finishes pending windows before it waits, because other threads may
    /// wait for their slots.
    fn slot(&mut self) -> Result<Slot<Free>> {
        let parts = &self.job.parts;
        // Longer than the flush waits for the disk. If the disk stalls, the flush reports it first.
        let stall = parts.options.stall_timeout.saturating_add(parts.options.stall_timeout / 4);
        loop {
            if let Some(slot) = parts.pool.try_acquire()? {
                return Ok(slot);
            }
            if self.finish_oldest()? {
                continue;
            }
            let pending_left = Cell::new(false);
            let stop = || {
                pending_left.set(!self.job.lock_pending().is_empty());
                let finish_first = || Error::Cancelled("there are pending windows to finish".to_owned());
                parts.link.capture_stopped().or_else(|| pending_left.get().then(finish_first))
            };
            match parts.pool.acquire(stall, parts.link.poll_interval(), stop) {
                Ok((slot, time)) => {
                    if let Some(time) = time {
                        parts.progress.waited(time);
                    }
                    return Ok(slot);
                }
                Err(Error::Cancelled(_)) if pending_left.get() && parts.link.capture_stopped().is_none() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for the oldest pending window of this worker, or else of the job, and sends it to the
    /// flush. Returns false if no window is pending.
    fn finish_oldest(&mut self) -> Result<bool> {
        let oldest = self.pending.pop_front();
        let Some((window, slot)) = oldest.or_else(|| self.job.lock_pending().pop_front()) else {
            return Ok(false);
        };
        let deadline = deadline_after(self.job.parts.options.stall_timeout);
        self.send(window.window, slot.wait(deadline)?)?;
        Ok(true)
    }

    /// Sends a full window to the flush.
    fn send(&self, window: u32, slot: Slot<Full>) -> Result<()> {
        let parts = &self.job.parts;
        if let Some(first) = &self.job.first {
            first.check(&parts.windows, window, slot.bytes(), &parts.indexes)?;
        }
        let window = window as usize;
        let bytes = parts.windows.list.get(window).map_or(0, |window| window.len);
        parts.progress.captured(bytes);
        if parts.sender.send(Message::Window(window, slot)).is_err() {
            let ended = || Error::Cancelled("the flush has ended".into());
            return Err(parts.link.stopped().unwrap_or_else(ended));
        }
        Ok(())
    }
}
