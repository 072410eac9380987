//! The pending saves of a manager, in order, and the failures of those that ended.
//!
//! One lock guards all of it. A caller that sees an outcome must not find the save pending, and one
//! that finds no pending save must find the failure. Each part has an owner: `persister` changes
//! the [`Writes`], `capturer` the [`Captures`], `open` the [`Shutdown`], and this file the
//! [`EndedSaves`].

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use stepwell_core::deadline::StallTimer;
use stepwell_core::staging::StagingPool;

use crate::error::Error;
use crate::save::Save;
use crate::save::job::{Capturing, SaveJob};

/// A wait for progress polls at this interval.
const PROGRESS_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// See the module documentation.
#[derive(Default)]
pub(super) struct Saves {
    queued: Mutex<QueuedSaves>,
    pub(super) changed: Condvar,
}

/// The saves, behind their lock.
#[derive(Default)]
pub(super) struct QueuedSaves {
    pub(super) end: Shutdown,
    pub(super) captures: Captures,
    pub(super) writes: Writes,
    /// The save counter of the session, which numbers the next save.
    pub(super) counter: u64,
    /// The saves that are not over, oldest first.
    pub(super) pending: Vec<Save>,
    pub(super) endings: EndedSaves,
    /// The staging ring, from the first use until the manager is closed.
    pub(super) pool: Option<Arc<StagingPool>>,
}

/// The progress of `close`.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own; no two exclude each other")]
pub(super) struct Shutdown {
    /// `close` was called: all other calls fail.
    pub(super) closed: bool,
    /// A call of `close` runs.
    pub(super) closing: bool,
    /// A later `close` has nothing to wait for.
    pub(super) ended: bool,
    /// The threads end once no work is left.
    pub(super) stop: bool,
}

/// The saves that wait for their write. Each gets the next turn number when it leaves the queue.
#[derive(Default)]
pub(super) struct Writes {
    pub(super) queue: VecDeque<SaveJob>,
    /// Counts of saves: taken from the queue, finished with the write, ended.
    pub(super) taken: u64,
    pub(super) written: u64,
    pub(super) ended: u64,
    pub(super) threads: Vec<JoinHandle<()>>,
}

impl Writes {
    pub(super) fn has_been_written(&mut self, turn: u64) {
        self.written = self.written.max(turn + 1);
    }
}

/// The captures of the saves.
#[derive(Default)]
pub(super) struct Captures {
    /// True while a save is captured, by its caller or by the capturer.
    pub(super) capturing: bool,
    /// True while a save has the right to capture and is not in the queue yet. No other save may
    /// enter the queue before it.
    pub(super) claimed: bool,
    /// Unfinished captures whose callers have continued, in the order of their saves.
    pub(super) rests: VecDeque<Capturing>,
    pub(super) thread: Option<JoinHandle<()>>,
}

impl Captures {
    /// True if a capture runs or waits.
    pub(super) fn are_under_way(&self) -> bool {
        self.capturing || !self.rests.is_empty()
    }
}

/// The saves that ended.
#[derive(Default)]
pub(super) struct EndedSaves {
    /// Failed saves whose failure nobody has seen.
    failed: Vec<Save>,
    /// The save whose failure was raised last.
    taken: Option<Save>,
    /// The last failure, seen or not.
    last_failure: Option<Save>,
    /// Numbers of saves that have ended, from `over_before` on. All below have ended.
    over: BTreeSet<u64>,
    over_before: u64,
    /// Failed saves whose failure the ranks have not discussed yet ([`super::together`]).
    open_failures: BTreeSet<u64>,
}

impl Saves {
    pub(super) fn lock(&self) -> MutexGuard<'_, QueuedSaves> {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the lock until the next change, or for that long.
    pub(super) fn wait<'a>(
        &'a self,
        queued: MutexGuard<'a, QueuedSaves>,
        pause: Duration,
    ) -> MutexGuard<'a, QueuedSaves> {
        self.changed.wait_timeout(queued, pause).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits while `blocked`. Returns `None` after the limit: without progress of the oldest save,
    /// or in total if the limit is `fixed`.
    pub(super) fn wait_while(
        &self,
        limit: Duration,
        fixed: bool,
        mut blocked: impl FnMut(&QueuedSaves) -> bool,
    ) -> Option<MutexGuard<'_, QueuedSaves>> {
        let mut timer = StallTimer::new(limit);
        let mut queued = self.lock();
        while blocked(&queued) {
            let progress = queued
                .pending
                .first()
                .map(|first| (queued.pending.len(), first.step(), first.progress_counter()));
            let left = timer.left(progress.filter(|_| !fixed));
            if left.is_zero() {
                return None;
            }
            queued = self.wait(queued, left.min(PROGRESS_POLL_INTERVAL));
        }
        Some(queued)
    }
}

impl QueuedSaves {
    /// The pending saves that have not failed, oldest first.
    pub(super) fn live(&self) -> impl Iterator<Item = &Save> {
        self.pending.iter().filter(|save| !save.has_failed())
    }

    /// Returns the first save on which this rank still has to report.
    pub(super) fn first_open(&self, has_voted: impl Fn(u64) -> bool) -> u64 {
        let is_open = |&save: &u64| !self.endings.over.contains(&save) && !has_voted(save);
        (self.endings.over_before..self.counter).find(is_open).unwrap_or(self.counter)
    }

    /// Gives the next number to a save that this rank takes no part in. Returns the number.
    pub(super) fn end_unbegun(&mut self, save: Save) -> u64 {
        let counter = self.counter;
        self.counter += 1;
        self.endings.over.insert(counter);
        self.endings.open_failures.insert(counter);
        // This rank raises the failure in the same call as the ranks that have not seen it.
        self.endings.last_failure = Some(save);
        counter
    }
}

impl EndedSaves {
    /// Records the end of a save.
    pub(super) fn add(&mut self, counter: u64, save: &Save, has_failed: bool) {
        self.failed.retain(Save::is_unseen);
        if has_failed {
            self.failed.push(save.clone());
            self.last_failure = Some(save.clone());
            self.open_failures.insert(counter);
        }
        self.over.insert(counter);
    }

    /// True if the save with that number is over.
    pub(super) fn is_over(&self, counter: u64) -> bool {
        counter < self.over_before || self.over.contains(&counter)
    }

    /// True if all saves before that number are over.
    pub(super) fn are_over(&self, before: u64) -> bool {
        (self.over_before..before).all(|counter| self.over.contains(&counter))
    }

    /// Forgets the numbers of saves that are over.
    pub(super) fn forget(&mut self, before: u64) {
        self.over = self.over.split_off(&before);
        self.over_before = self.over_before.max(before);
    }

    /// Returns the failed saves below that number whose failure the ranks have not discussed yet.
    pub(super) fn open_failures(&self, before: u64) -> Vec<u64> {
        self.open_failures.range(..before).copied().collect()
    }

    /// Closes a failure that the ranks need not discuss, because the leader has committed the save.
    pub(super) fn close_failure(&mut self, counter: u64) {
        self.open_failures.remove(&counter);
    }

    /// Closes all failures below that number, after the ranks have discussed them.
    pub(super) fn close_failures(&mut self, before: u64) {
        self.open_failures = self.open_failures.split_off(&before);
    }

    /// Returns the last save that failed, seen or not.
    pub(super) fn last_failure(&self) -> Option<&Save> {
        self.last_failure.as_ref()
    }

    /// Returns the saves whose failure nobody has seen.
    pub(super) fn unseen(&self) -> impl Iterator<Item = &Save> {
        self.failed.iter().filter(|save| save.is_unseen())
    }

    /// Takes out the save with the oldest unseen failure.
    pub(super) fn take(&mut self) -> Option<Save> {
        let taken = (!self.failed.is_empty()).then(|| self.failed.remove(0))?;
        self.taken = Some(taken.clone());
        Some(taken)
    }

    /// Takes back the failure that was raised last, because it could not be reported.
    pub(super) fn put_back(&mut self, failure: &Arc<Error>) {
        let is_it = |save: &Save| {
            save.outcome()
                .and_then(|outcome| outcome.error().cloned())
                .is_some_and(|error| Arc::ptr_eq(&error, failure))
        };
        let known = self.taken.iter().chain(&self.last_failure).find(|save| is_it(save)).cloned();
        let Some(save) = known else { return };
        save.mark_unseen();
        if !self.failed.iter().any(|failed| failed.is(&save)) {
            self.failed.push(save);
        }
    }
}
