//! Capture: the half of a save that the caller waits for. Windows are taken one by one, in order, by the caller's thread and the pool's helpers; each
//! is filled into a slot and handed to the flush. Windows that hold nothing but what [lazy](crate::provider::StateProvider::is_lazy) providers give can be left to another
//! thread: [`Capture::run_eager`] takes the others, which come first.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::SaveOptions;
use super::link::Link;
use super::progress::Progress;
use super::windows::{Leaf, Part, Source, Windows};
use crate::deadline::deadline_after;
use crate::format::index::Index;
use crate::provider::{Fill, Ticket};
use crate::staging::{Door, Filled, Filling, Free, Full, Pending, Slot, StagingPool, Task, Waited};
use crate::sync::{AtomicUsize, Mutex, Sender};
use crate::{Error, Result};

/// What goes from the capture to the flush.
pub(super) enum Message {
    /// A filled window.
    Window(usize, Slot<Full>),
    /// The capture is over. The plan and its providers are no longer needed, but taking 20 000 of them apart takes milliseconds, which the caller need not
    /// wait for.
    Over(Box<Windows>),
}

/// What [`Capture::new`] is made of.
pub(super) struct Parts {
    pub windows: Windows,
    /// For messages.
    pub indexes: Arc<Vec<Index>>,
    pub sender: Sender<Message>,
    pub link: Arc<Link>,
    pub pool: Arc<StagingPool>,
    pub progress: Arc<Progress>,
    pub options: SaveOptions,
}

/// What a capture did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CaptureStats {
    /// Bytes put into slots.
    pub bytes: u64,
    /// Seconds from the call to its return.
    pub seconds: f64,
    /// How often a slot had to be waited for.
    pub slots_waited: u64,
    /// Seconds that the threads spent waiting for slots, added up.
    pub waited_seconds: f64,
}

/// The half that copies. Dropping it cancels the save.
pub struct Capture {
    /// `None` once it is over.
    parts: Option<Parts>,
    /// Windows with something that the caller may change when the call returns, and the others; in order.
    eager: Vec<u32>,
    lazy: Vec<u32>,
    link: Arc<Link>,
    progress: Arc<Progress>,
}

impl Capture {
    pub(super) fn new(parts: Parts) -> Self {
        let (link, progress) = (Arc::clone(&parts.link), Arc::clone(&parts.progress));
        let (eager, lazy) = by_haste(&parts.windows);
        Self { parts: Some(parts), eager, lazy, link, progress }
    }

    /// The save's counters.
    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// Slots that would hold the whole save, so that this never waits for the disk.
    pub fn slots(&self) -> usize {
        self.eager.len() + self.lazy.len()
    }

    /// Whether there is something that is to be copied while the caller waits.
    pub fn has_eager(&self) -> bool {
        !self.eager.is_empty()
    }

    /// Copies everything that is left, on this thread and on helpers; returns when every byte is in a slot (or in a file already), and the sources may change.
    /// [`Error::Cancelled`] if the flush has failed or was dropped, or if [`SaveOptions::cancel`] was set before the last copy; [`Error::Timeout`] if no slot has come back for the stall timeout. When this
    /// returns, whatever the outcome, nothing reads the sources any more. The providers are dropped soon after, on the flush's thread (or here,
    /// if that has ended), and at the latest before `Flush::run` returns.
    pub fn run(mut self) -> Result<CaptureStats> {
        let started = Instant::now();
        let windows: Vec<u32> = self.eager.drain(..).chain(self.lazy.drain(..)).collect();
        self.copy(windows)?;
        let stats = self.progress.snapshot();
        Ok(CaptureStats {
            bytes: stats.captured_bytes,
            seconds: started.elapsed().as_secs_f64(),
            slots_waited: stats.slots_waited,
            waited_seconds: stats.waited_seconds,
        })
    }

    /// Copies what cannot wait, as [`Capture::run`] does. What is left is for another thread's [`Capture::run`]; `None` where nothing is.
    pub fn run_eager(mut self) -> Result<Option<Self>> {
        let windows = std::mem::take(&mut self.eager);
        if !windows.is_empty() || self.lazy.is_empty() {
            self.copy(windows)?;
        }
        Ok(self.parts.is_some().then_some(self))
    }

    fn copy(&mut self, windows: Vec<u32>) -> Result<()> {
        let started = Instant::now();
        let Some(parts) = self.parts.take() else {
            return Err(Error::Misuse("a capture runs once".into()));
        };
        let threads = parts.options.capture_threads.min(windows.len());
        let pool = Arc::clone(&parts.pool);
        let job =
            Job { parts, windows, next: AtomicUsize::new(0), error: Mutex::new(None), door: Arc::default() };
        let job = Arc::new(job);
        let task: Arc<dyn Task> = Arc::clone(&job) as Arc<dyn Task>;
        pool.help(threads.saturating_sub(1), &task);
        drop(task);
        job.work();
        job.door.close();
        let error = job.error.lock().unwrap_or_else(PoisonError::into_inner).take();
        let error = error.or_else(|| self.link.cancelled());
        // All helpers have left, and none comes in any more: this is the only handle.
        if let Some(Job { parts, .. }) = Arc::into_inner(job) {
            if self.lazy.is_empty() || error.is_some() {
                // Where the flush has ended, this comes back and is dropped here.
                let _ = parts.sender.send(Message::Over(Box::new(parts.windows)));
            } else {
                self.parts = Some(parts);
            }
        }
        self.progress.captured_since(started);
        error.map_or(Ok(()), Err)
    }
}

/// The windows of which something must be copied before the caller goes on, and those that can wait.
fn by_haste(all: &Windows) -> (Vec<u32>, Vec<u32>) {
    let every = 0..all.list.len() as u32;
    if !all.leaves.iter().any(|leaf| leaf.provider.is_lazy()) {
        return (every.collect(), Vec::new());
    }
    every.partition(|&window| {
        let parts = all.list.get(window as usize).and_then(|window| all.parts.get(window.parts.clone()));
        parts.into_iter().flatten().any(|part| {
            let leaf = chunk_fill(all, part).and_then(|(leaf, _)| all.leaves.get(leaf as usize));
            leaf.is_some_and(|leaf| !leaf.provider.is_lazy())
        })
    })
}

impl Drop for Capture {
    fn drop(&mut self) {
        if self.parts.is_some() {
            self.link.stop("the capture was dropped before it was complete");
        }
    }
}

/// What the capturing threads share.
struct Job {
    parts: Parts,
    /// What is to be copied.
    windows: Vec<u32>,
    /// The next of these that nobody has taken.
    next: AtomicUsize,
    /// The first failure.
    error: Mutex<Option<Error>>,
    door: Arc<Door>,
}

impl Task for Job {
    fn work(&self) {
        let mut worker = Worker { job: self, pending: VecDeque::new() };
        let worked = catch_unwind(AssertUnwindSafe(|| worker.work()));
        let error = match worked {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(panic) => Error::Misuse(format!("a state provider panicked: {}", message(&*panic))),
        };
        self.parts.link.stop(match &error {
            Error::Cancelled(why) => why.clone(),
            error => format!("the capture failed: {error}"),
        });
        let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        // A cancellation is the consequence of something else, which may be recorded here by another thread.
        if first.is_none() && !matches!(error, Error::Cancelled(_)) {
            *first = Some(error);
        }
    }

    fn door(&self) -> &Arc<Door> {
        &self.door
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// One capturing thread.
struct Worker<'a> {
    job: &'a Job,
    /// Windows whose copies a device still makes, in order. They are kept here, so that the next ones can be started meanwhile.
    pending: VecDeque<(usize, Slot<Pending>)>,
}

impl Worker<'_> {
    fn work(&mut self) -> Result<()> {
        let parts = &self.job.parts;
        loop {
            let next = self.job.next.fetch_add(1, Ordering::Relaxed);
            let Some(&window) = self.job.windows.get(next) else {
                // Asked after this: what was captured whole may be committed already, and is not called cancelled.
                break;
            };
            let window = window as usize;
            if let Some(error) = parts.link.unwanted() {
                return Err(error);
            }
            let slot = self.slot()?;
            match fill(&parts.windows, window, slot.begin(), &parts.indexes, &parts.link)? {
                Filled::Full(slot) => self.hand_on(window, slot)?,
                Filled::Pending(slot) => self.pending.push_back((window, slot)),
            }
        }
        while self.resolve_one()? {}
        Ok(())
    }

    /// A free slot. What is pending here is resolved before this thread waits for others: they might wait for it.
    fn slot(&mut self) -> Result<Slot<Free>> {
        let parts = &self.job.parts;
        loop {
            if let Some(slot) = parts.pool.try_acquire()? {
                return Ok(slot);
            }
            if !self.resolve_one()? {
                break;
            }
        }
        // Longer than the flush waits for the disk: where that is what stalls, its error is the one to report.
        let stall = parts.options.stall_timeout.saturating_add(parts.options.stall_timeout / 4);
        let (slot, Waited(time)) =
            parts.pool.acquire(stall, parts.link.patience(), || parts.link.unwanted())?;
        if let Some(time) = time {
            parts.progress.waited(time);
        }
        Ok(slot)
    }

    /// Waits for the oldest pending window and hands it on; whether there was one.
    fn resolve_one(&mut self) -> Result<bool> {
        let Some((window, slot)) = self.pending.pop_front() else { return Ok(false) };
        let deadline = deadline_after(self.job.parts.options.stall_timeout);
        self.hand_on(window, slot.wait(deadline)?)?;
        Ok(true)
    }

    fn hand_on(&self, window: usize, slot: Slot<Full>) -> Result<()> {
        let parts = &self.job.parts;
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
    let missing = || Error::Misuse(format!("window {window} is not in the plan"));
    let window = all.list.get(window).ok_or_else(missing)?;
    let parts = all.parts.get(window.parts.clone()).ok_or_else(missing)?;
    let mut fences = Vec::new();
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
            match leaf.provider.capture(&fills, &mut slot) {
                Ok(Ticket::Done) => {}
                Ok(Ticket::Event(fence)) => fences.push(fence),
                Err(error) => return Err(named(error, leaf, indexes)),
            }
        }
        zero(&mut slot, end, window.len)
    };
    let filled = filled();
    // Also after an error: what devices were asked to copy may still arrive.
    let slot = slot.finish(fences);
    filled.map(|()| slot)
}

/// The part as a fill, with its leaf's number; `None` if it is no chunk's.
fn chunk_fill<'a>(all: &'a Windows, part: &Part) -> Option<(u32, Fill<'a>)> {
    let Source::Chunk(chunk) = part.source else { return None };
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
    match error {
        Error::Misuse(what) => {
            let path =
                indexes.get(leaf.item as usize).map(|index| index.tree.leaf_path(leaf.number).to_string());
            Error::Leaf { leaf: path.unwrap_or_default(), what }
        }
        other => other,
    }
}
