//! Capture: the half of a save that the caller waits for. The caller's thread and the pool's
//! helpers take windows one by one, in order, fill each into a slot, and hand it to the flush.
//! Copies of a device are only started here, and their windows are handed on when the copies have
//! arrived.
//!
//! The [`CaptureTiming`] of the providers decides how long the caller waits. [`Capture::run_eager`]
//! copies the leaves that the caller may change when it returns. It enqueues the copies that the
//! caller's work on the device can be made to wait for. The rest is for another thread's
//! [`Capture::run`]. Each device's windows have a thread of their own.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::SaveOptions;
use super::due::{Due, Lane, due, lanes, queues};
use super::link::Link;
use super::progress::Progress;
use super::torn::FirstReading;
use super::windows::{Leaf, PartSource, WindowPart, Windows};
use crate::deadline::deadline_after;
use crate::format::index::Index;
use crate::provider::{CaptureTiming, Fill};
use crate::staging::{CopyQueue, Door, Filled, Filling, Free, Full, Pending, Slot, StagingPool, Task};
use crate::sync::{AtomicUsize, Mutex, Sender};
use crate::{Error, Result};

/// A message from the capture to the flush.
pub(super) enum Message {
    /// A filled window.
    Window(usize, Slot<Full>),
    /// The capture is over. The plan and its providers are no longer needed, but dropping them may
    /// take milliseconds.
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
    /// Windows of which something must have happened when the caller goes on; in order.
    soon: Vec<Due>,
    /// The others.
    later: Vec<Due>,
    /// Windows whose copies have been started, and nobody has waited for yet.
    arriving: VecDeque<(Due, Slot<Pending>)>,
    /// The devices that copy.
    queues: Vec<Arc<dyn CopyQueue>>,
    starts: Arc<Starts>,
    /// The first readings, if torn saves are detected.
    first: Option<Arc<FirstReading>>,
    link: Arc<Link>,
    progress: Arc<Progress>,
}

impl Capture {
    pub(super) fn new(parts: CaptureParts) -> Self {
        let (link, progress) = (Arc::clone(&parts.link), Arc::clone(&parts.progress));
        let queues = queues(&parts.windows);
        let due = due(&parts.windows, &queues);
        let starts = Arc::new(Starts { left: AtomicUsize::new(due.len()), call: Mutex::new(None) });
        let (soon, later) = due.into_iter().partition(|due| due.timing > CaptureTiming::Deferred);
        let arriving = VecDeque::new();
        Self { parts: Some(parts), soon, later, arriving, queues, starts, first: None, link, progress }
    }

    /// The save's counters.
    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// True if there is something that is to happen while the caller waits.
    pub fn has_eager(&self) -> bool {
        !self.soon.is_empty()
    }

    /// The queues of the devices that it copies from.
    pub fn queues(&self) -> &[Arc<dyn CopyQueue>] {
        &self.queues
    }

    /// True if [`Capture::run_eager`] only starts some of what it takes, so that the caller's work
    /// on the devices has to be made to wait ([`CopyQueue::precede`]) when it has returned.
    pub fn is_fenced(&self) -> bool {
        self.soon.iter().any(|due| due.timing == CaptureTiming::Enqueued)
    }

    /// Has that called once every copy has been started (and all host memory was read), or none
    /// will be any more; on whatever thread.
    pub fn when_started(&self, call: WhenStarted) {
        *self.starts.call.lock().unwrap_or_else(PoisonError::into_inner) = Some(call);
        if self.starts.left.load(Ordering::Acquire) == 0 {
            self.starts.over();
        }
    }

    /// Reads what is to be captured behind the call, here and now, and has the capture compare:
    /// what has changed by then fails the save ([`Error::Torn`]). It takes as long as capturing all
    /// of it would.
    pub fn read_first(&mut self) -> Result<()> {
        let Some(parts) = &self.parts else { return Ok(()) };
        let stall = parts.options.stall_timeout;
        let mut first = FirstReading::default();
        for due in self.soon.iter().chain(&self.later).filter(|due| due.timing < CaptureTiming::Copied) {
            let (slot, _) =
                parts.pool.acquire(stall, parts.link.poll_interval(), || parts.link.unwanted())?;
            let window = due.window as usize;
            let filled = fill(&parts.windows, window, slot.begin(), &parts.indexes, &parts.link)?;
            let slot = match filled {
                Filled::Full(slot) => slot,
                Filled::Pending(slot) => slot.wait(deadline_after(stall))?,
            };
            first.note(&parts.windows, due.window, slot.bytes());
        }
        self.first = Some(Arc::new(first));
        Ok(())
    }

    /// Copies everything that is left, on this thread and on helpers; returns when every byte is in
    /// a slot (or in a file already), and the sources may change. [`Error::Cancelled`] if the flush
    /// has failed or was dropped, or if [`SaveOptions::cancel`] was set before the last copy;
    /// [`Error::Timeout`] if no slot has come back for the stall timeout. When this returns,
    /// whatever the outcome, nothing but a device reads the sources any more, and what a device
    /// reads stays. The providers are dropped soon after, on the flush's thread (or here, if that
    /// has ended), and at the latest before `Flush::run` returns.
    pub fn run(mut self) -> Result<()> {
        let windows = self.soon.drain(..).chain(self.later.drain(..));
        let windows = windows.map(|due| Due { timing: CaptureTiming::Copied, ..due }).collect();
        for (due, _) in &mut self.arriving {
            due.timing = CaptureTiming::Copied;
        }
        self.copy(windows)
    }

    /// Copies what cannot wait, and starts the copies that must be enqueued. Returns the rest for
    /// another thread's [`Capture::run`], or `None`.
    pub fn run_eager(mut self) -> Result<Option<Self>> {
        let windows = std::mem::take(&mut self.soon);
        if !windows.is_empty() || self.later.is_empty() {
            self.copy(windows)?;
        }
        Ok(self.parts.is_some().then_some(self))
    }

    /// Fills these windows. Keeps those whose copies are enqueued and may arrive later.
    fn copy(&mut self, windows: Vec<Due>) -> Result<()> {
        let started = Instant::now();
        let Some(parts) = self.parts.take() else {
            return Err(Error::internal("one run of a capture", "a second one"));
        };
        let count = windows.len();
        let lanes = lanes(windows, self.queues.len());
        let threads = parts.options.capture_threads.max(lanes.len()).min(count);
        let pool = Arc::clone(&parts.pool);
        let job = Arc::new(CaptureJob {
            parts,
            lanes,
            workers: AtomicUsize::new(0),
            starts: Arc::clone(&self.starts),
            first: self.first.clone(),
            arriving: Mutex::new(std::mem::take(&mut self.arriving)),
            error: Mutex::new(None),
            door: Arc::default(),
        });
        let task: Arc<dyn Task> = Arc::clone(&job) as Arc<dyn Task>;
        pool.help(threads.saturating_sub(1), &task);
        drop(task);
        job.work();
        job.door.close();
        let error = job.error.lock().unwrap_or_else(PoisonError::into_inner).take();
        let error = error.map(Error::Shared).or_else(|| self.link.cancelled());
        // All helpers have left, and none comes in any more: this is the only handle.
        if let Some(CaptureJob { mut parts, arriving, .. }) = Arc::into_inner(job) {
            self.arriving = arriving.into_inner().unwrap_or_else(PoisonError::into_inner);
            if (self.later.is_empty() && self.arriving.is_empty()) || error.is_some() {
                if parts.options.drops_providers {
                    parts.windows.leaves.clear();
                }
                // If the flush has ended, the message comes back and is dropped here.
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
        self.starts.over();
    }
}

/// Counts the windows whose copies have not been started.
struct Starts {
    left: AtomicUsize,
    call: Mutex<Option<WhenStarted>>,
}

impl Starts {
    fn one(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.over();
        }
    }

    fn over(&self) {
        let call = self.call.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(call) = call {
            call();
        }
    }
}

/// The state that the capturing threads share.
struct CaptureJob {
    parts: CaptureParts,
    lanes: Vec<Lane>,
    /// How many threads have come.
    workers: AtomicUsize,
    starts: Arc<Starts>,
    first: Option<Arc<FirstReading>>,
    /// Windows that were started before, and then those that nobody has to wait for.
    arriving: Mutex<VecDeque<(Due, Slot<Pending>)>>,
    /// The first failure; the flush has it too.
    error: Mutex<Option<Arc<Error>>>,
    door: Arc<Door>,
}

impl Task for CaptureJob {
    fn work(&self) {
        let mut worker = CaptureWorker { job: self, pending: VecDeque::new() };
        let worked = catch_unwind(AssertUnwindSafe(|| worker.work()));
        let error = match worked {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(panic) => {
                Error::internal("a result", format!("a state provider panicked: {}", message(&*panic)))
            }
        };
        if let Error::Cancelled(why) = error {
            // The consequence of something else, which may be recorded here by another thread.
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
    fn lock_arriving(&self) -> crate::sync::MutexGuard<'_, VecDeque<(Due, Slot<Pending>)>> {
        self.arriving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next window for a worker: of its own lane, then of any.
    fn next(&self, worker: usize) -> Option<Due> {
        let lanes = self.lanes.iter().cycle().skip(worker % self.lanes.len().max(1)).take(self.lanes.len());
        lanes.into_iter().find_map(Lane::take)
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// One capturing thread.
struct CaptureWorker<'a> {
    job: &'a CaptureJob,
    /// Windows whose copies a device still makes, in order. They are kept here, so that the next
    /// ones can be started meanwhile.
    pending: VecDeque<(Due, Slot<Pending>)>,
}

impl CaptureWorker<'_> {
    fn work(&mut self) -> Result<()> {
        let parts = &self.job.parts;
        let number = self.job.workers.fetch_add(1, Ordering::Relaxed);
        // Copies that were enqueued earlier hold slots. The first caller takes care of them.
        self.pending = std::mem::take(&mut *self.job.lock_arriving());
        // Asked for the next window before whether it is wanted: what was captured whole may be
        // committed already, and is not called cancelled.
        while let Some(due) = self.job.next(number) {
            if let Some(error) = parts.link.unwanted() {
                return Err(error);
            }
            let slot = self.slot()?;
            let window = due.window as usize;
            let filled = fill(&parts.windows, window, slot.begin(), &parts.indexes, &parts.link)?;
            self.job.starts.one();
            match filled {
                Filled::Full(slot) => self.hand_on(due.window, slot)?,
                Filled::Pending(slot) => self.pending.push_back((due, slot)),
            }
        }
        while self.pending.iter().any(|(due, _)| due.timing == CaptureTiming::Copied) {
            self.resolve_one()?;
        }
        if !self.pending.is_empty() {
            // They hold slots. The next thread that waits for a slot takes care of them.
            self.job.lock_arriving().append(&mut self.pending);
            parts.pool.wake();
        }
        Ok(())
    }

    /// Returns a free slot. Resolves pending windows before this thread waits for others, because
    /// others might wait for them.
    fn slot(&mut self) -> Result<Slot<Free>> {
        let parts = &self.job.parts;
        // Longer than the flush waits for the disk: where that is what stalls, its error is the one
        // to report.
        let stall = parts.options.stall_timeout.saturating_add(parts.options.stall_timeout / 4);
        loop {
            if let Some(slot) = parts.pool.try_acquire()? {
                return Ok(slot);
            }
            if self.resolve_one()? {
                continue;
            }
            let left_to_us = Cell::new(false);
            let stop = || {
                left_to_us.set(!self.job.lock_arriving().is_empty());
                let again = || Error::Cancelled("there are windows to wait for".to_owned());
                parts.link.unwanted().or_else(|| left_to_us.get().then(again))
            };
            match parts.pool.acquire(stall, parts.link.poll_interval(), stop) {
                Ok((slot, time)) => {
                    if let Some(time) = time {
                        parts.progress.waited(time);
                    }
                    return Ok(slot);
                }
                Err(Error::Cancelled(_)) if left_to_us.get() && parts.link.unwanted().is_none() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for the oldest window that is pending here, or that another thread has left, and hands
    /// it on; whether there was one.
    fn resolve_one(&mut self) -> Result<bool> {
        let oldest = self.pending.pop_front();
        let Some((due, slot)) = oldest.or_else(|| self.job.lock_arriving().pop_front()) else {
            return Ok(false);
        };
        let deadline = deadline_after(self.job.parts.options.stall_timeout);
        self.hand_on(due.window, slot.wait(deadline)?)?;
        Ok(true)
    }

    fn hand_on(&self, window: u32, slot: Slot<Full>) -> Result<()> {
        let parts = &self.job.parts;
        if let Some(first) = &self.job.first {
            first.check(&parts.windows, window, slot.bytes(), &parts.indexes)?;
        }
        let window = window as usize;
        let bytes = parts.windows.list.get(window).map_or(0, |window| window.len);
        parts.progress.captured(bytes);
        if parts.sender.send(Message::Window(window, slot)).is_err() {
            return Err(parts
                .link
                .cancelled()
                .unwrap_or_else(|| Error::Cancelled("the flush has ended".into())));
        }
        Ok(())
    }
}

/// Fills a window: every part in order, zeros between them.
fn fill(
    all: &Windows,
    window: usize,
    mut slot: Slot<Filling>,
    indexes: &[Index],
    link: &Link,
) -> Result<Filled> {
    let missing = || Error::internal("a window of the plan", format!("window {window}"));
    let window = all.list.get(window).ok_or_else(missing)?;
    let parts = all.parts.get(window.parts.clone()).ok_or_else(missing)?;
    let mut fills: Vec<Fill<'_>> = Vec::new();
    let mut end = 0_u64;
    let mut filled = || -> Result<()> {
        let mut parts = parts.iter().peekable();
        while let Some(part) = parts.next() {
            if let Some(error) = link.unwanted() {
                return Err(error);
            }
            zero(&mut slot, end, u64::from(part.at))?;
            end = u64::from(part.at) + u64::from(part.len);
            let Some((owner, first)) = chunk_fill(all, part) else {
                let from = part.from as usize;
                let bytes = all.arena.get(from..from + part.len as usize).ok_or_else(missing)?;
                slot.part(u64::from(part.at), u64::from(part.len))?.copy_from_slice(bytes);
                continue;
            };
            // Everything that this slot takes of one leaf goes to its provider in one call.
            fills.clear();
            fills.push(first);
            while let Some((_, next)) =
                parts.peek().and_then(|part| chunk_fill(all, part)).filter(|&(other, _)| other == owner)
            {
                zero(&mut slot, end, next.at)?;
                end = next.at + next.len;
                fills.push(next);
                parts.next();
            }
            let leaf = all.leaves.get(owner as usize).ok_or_else(missing)?;
            leaf.provider.capture(&fills, &mut slot).map_err(|error| named(error, leaf, indexes))?;
        }
        zero(&mut slot, end, window.len)
    };
    let filled = filled();
    // Also after an error: what devices were asked to copy may still arrive.
    let slot = slot.finish();
    filled.map(|()| slot)
}

/// The part as a fill, with its leaf's number; `None` if it is no chunk's.
fn chunk_fill<'a>(all: &'a Windows, part: &WindowPart) -> Option<(u32, Fill<'a>)> {
    let PartSource::Chunk(chunk) = part.source else { return None };
    let chunk = all.chunks.get(chunk as usize)?;
    let fill =
        Fill { local: &chunk.local, from: part.from, len: u64::from(part.len), at: u64::from(part.at) };
    Some((chunk.leaf, fill))
}

fn zero(slot: &mut Slot<Filling>, from: u64, to: u64) -> Result<()> {
    if from < to {
        slot.part(from, to - from)?.fill(0);
    }
    Ok(())
}

/// The error with the leaf's path, where it has none of its own.
fn named(error: Error, leaf: &Leaf, indexes: &[Index]) -> Error {
    let path = || {
        let index = indexes.get(leaf.item as usize);
        index.map(|index| index.tree.leaf_path(leaf.number).to_string()).unwrap_or_default()
    };
    match error {
        Error::Misuse(what) => Error::Leaf { leaf: path(), what },
        Error::Internal { expected, found } => {
            Error::Internal { expected: format!("{expected} (leaf `{}`)", path()), found }
        }
        other => other,
    }
}
