//! The deleter of retired steps: it works slowly, in the background, and skips steps that readers
//! hold.
//!
//! A step comes here after [`retire`](crate::commit::aside::retire) has made its rename durable.
//! The deleter tries the step's lease exclusively. If a reader holds it, the trash waits for
//! another try. Without locks, it waits for a grace period, which each writer restarts: clocks of
//! two machines are never compared. The next writer deletes the rest when the process ends.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use stepwell_core::deadline::deadline_after;
use stepwell_core::format::manifest::FileEntry;
use stepwell_core::io::{Dir, LockKind};
use stepwell_core::sys::spawn;

use crate::delete_tree::{delete, ignore_missing};
use crate::directory_layout::LEASE;
use crate::environment::Clock;
use crate::guard::guarded;
use crate::spares::Spares;

/// The interval between two tries of a step that readers hold.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// The pause between two files, which leaves the disk to a concurrent save.
const PAUSE_BETWEEN_FILES: Duration = Duration::from_millis(1);
/// The result of one try to delete trash.
#[derive(Debug, PartialEq, Eq)]
pub enum Removed {
    /// It is gone.
    Gone,
    /// Readers hold it.
    Held,
    /// There are no locks: readers may hold it.
    Unprotected,
    /// The deletion was stopped.
    Stopped,
}

/// Deletes one trash directory, unless readers hold it. `unprotected`: delete it without locks too,
/// although a reader may use it.
pub fn remove(
    root: &dyn Dir,
    name: &str,
    unprotected: bool,
    go_on: &mut dyn FnMut() -> bool,
) -> stepwell_core::Result<Removed> {
    let dir = match root.open_dir(name) {
        Ok(dir) => dir,
        Err(error) if error.is_not_found() => return Ok(Removed::Gone),
        // A foreign file under a trash name.
        Err(error) if error.is_no_directory() => {
            ignore_missing(root.remove_file(name))?;
            return Ok(Removed::Gone);
        }
        Err(error) => return Err(error),
    };
    let lock = match dir.try_lock(LEASE, LockKind::Exclusive, false) {
        Ok(Some(lock)) => Some(lock),
        Ok(None) => return Ok(Removed::Held),
        Err(error) if error.is_without_locks() && !unprotected => return Ok(Removed::Unprotected),
        Err(error) if error.is_not_found() || error.is_without_locks() => None,
        Err(error) => return Err(error),
    };
    let mut deleted = delete(root, name, go_on);
    if deleted.as_ref().is_err_and(stepwell_core::Error::is_occupied) {
        // A network file system keeps an open file under another name. Here it is the lock's, and
        // goes with the lock.
        drop(lock);
        deleted = delete(root, name, go_on);
    }
    match deleted {
        Ok(false) => Ok(Removed::Stopped),
        Err(error) if !error.is_not_found() => Err(error),
        // Also if another process has deleted it.
        _ => Ok(Removed::Gone),
    }
}

/// A trash directory.
struct Trash {
    name: String,
    /// The time of its arrival, on the monotonic clock.
    since: Duration,
    /// True without locks: it waits for the end of the grace period.
    unprotected: bool,
}

#[derive(Default)]
struct TrashQueue {
    ready: VecDeque<Trash>,
    /// Trash that readers hold or may hold.
    held: VecDeque<Trash>,
    /// True while the thread deletes one.
    busy: bool,
    /// The number of calls that wait for the deletions. The thread then makes no pauses.
    waiting: usize,
    /// Failed deletions. Each is reported once.
    failed: Vec<stepwell_core::Error>,
    stop: bool,
    /// True once the thread does no more work.
    ended: bool,
}

struct DeleterState {
    root: Arc<dyn Dir>,
    clock: Arc<dyn Clock>,
    grace: Duration,
    queue: Mutex<TrashQueue>,
    changed: Condvar,
}

impl DeleterState {
    fn lock(&self) -> MutexGuard<'_, TrashQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self, trash: &Trash) -> bool {
        self.clock.monotonic().saturating_sub(trash.since) >= self.grace
    }

    /// Moves trash that is due for another try to `ready`.
    fn retry(&self, queue: &mut TrashQueue) {
        for trash in std::mem::take(&mut queue.held) {
            let to =
                if trash.unprotected && !self.is_over(&trash) { &mut queue.held } else { &mut queue.ready };
            to.push_back(trash);
        }
    }
}

/// The background deleter of one root. Its thread starts with the first thing to delete.
pub struct Deleter {
    shared: Arc<DeleterState>,
    spares: Spares,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Deleter {
    /// Returns an idle deleter. Without locks, it leaves trash alone for `grace`. It keeps files of
    /// at least `spare_bytes` bytes of the last retired step, for the next save to overwrite.
    pub fn new(root: Arc<dyn Dir>, clock: Arc<dyn Clock>, grace: Duration, spare_bytes: Option<u64>) -> Self {
        let spares = Spares::new(Arc::clone(&root), spare_bytes);
        let shared = DeleterState { root, clock, grace, queue: Mutex::default(), changed: Condvar::new() };
        Self { shared: Arc::new(shared), spares, thread: Mutex::new(None) }
    }

    /// Returns the files that the next save may overwrite.
    pub fn spares(&self) -> &Spares {
        &self.spares
    }

    /// Takes retired steps, oldest first, whose renames are durable. Keeps the last one, which has
    /// these `files`, for the next save to overwrite, if they are large enough.
    pub fn retire(&self, mut names: Vec<String>, files: &[FileEntry]) {
        let last = names.pop().and_then(|last| self.spares.keep(last, files));
        self.enqueue(names.into_iter().chain(last));
    }

    /// Deletes the files that were kept for the next save.
    pub fn give_up_spares(&self) {
        self.enqueue(self.spares.give_up());
    }

    /// Takes trash whose rename is durable.
    pub fn enqueue(&self, names: impl IntoIterator<Item = String>) {
        let mut queue = self.shared.lock();
        let since = self.shared.clock.monotonic();
        queue.ready.extend(names.into_iter().map(|name| Trash { name, since, unprotected: false }));
        if queue.stop || (queue.ready.is_empty() && queue.held.is_empty()) {
            return;
        }
        self.shared.changed.notify_all();
        drop(queue);
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            match spawn("stepwell-delete", move || work(&shared)) {
                Ok(handle) => *thread = Some(handle),
                Err(error) => {
                    // No thread will delete it, so no call may wait for it.
                    self.shared.lock().ready.clear();
                    tracing::warn!(%error, "starting the deleter failed. The next writer deletes the trash");
                }
            }
        }
    }

    /// Deletes all trash at full speed, because the disk is full, and waits for that. Returns
    /// `false` at the deadline. Trash that readers hold stays.
    pub fn empty_now(&self, timeout: Duration) -> bool {
        self.give_up_spares();
        // Not on this thread: an unlink that hangs in the kernel would block the save permanently.
        self.drain(timeout)
    }

    /// Waits until only trash that readers hold is left, or until the thread has ended. `false` at
    /// the deadline.
    pub fn drain(&self, timeout: Duration) -> bool {
        let deadline = deadline_after(timeout);
        let mut queue = self.shared.lock();
        queue.waiting += 1;
        let drained = loop {
            if queue.ended || (queue.ready.is_empty() && !queue.busy) {
                break true;
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { break false };
            queue = self.shared.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        queue.waiting -= 1;
        drained
    }

    /// Returns the trash names that readers hold.
    pub fn held(&self) -> Vec<String> {
        self.shared.lock().held.iter().map(|trash| trash.name.clone()).collect()
    }

    /// Returns the deletions that failed since the last call.
    pub fn take_failures(&self) -> Vec<stepwell_core::Error> {
        std::mem::take(&mut self.shared.lock().failed)
    }

    /// Tries held trash once more, then ends the thread. The next writer deletes the rest. `false`:
    /// the thread did not end in time, and a later call may wait again.
    pub fn stop(&self, timeout: Duration) -> bool {
        let deadline = deadline_after(timeout);
        self.give_up_spares();
        {
            let mut queue = self.shared.lock();
            self.shared.retry(&mut queue);
            self.shared.changed.notify_all();
        }
        let has_thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if has_thread {
            self.drain(timeout);
        }
        self.shared.lock().stop = true;
        self.shared.changed.notify_all();
        let handle = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(handle) = handle else { return true };
        let deadline = deadline + Duration::from_millis(100);
        let mut queue = self.shared.lock();
        while !queue.ended && !handle.is_finished() {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                drop(queue);
                *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(handle);
                return false;
            };
            queue = self.shared.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(queue);
        handle.join().is_ok()
    }
}

fn work(shared: &DeleterState) {
    let mut next_retry = Instant::now() + RETRY_INTERVAL;
    loop {
        let trash = {
            let mut queue = shared.lock();
            loop {
                if queue.stop {
                    queue.ended = true;
                    shared.changed.notify_all();
                    return;
                }
                if !queue.held.is_empty() && Instant::now() >= next_retry {
                    shared.retry(&mut queue);
                    next_retry = Instant::now() + RETRY_INTERVAL;
                }
                if let Some(trash) = queue.ready.pop_front() {
                    queue.busy = true;
                    break trash;
                }
                let waiting = if queue.held.is_empty() { Duration::from_secs(3600) } else { RETRY_INTERVAL };
                queue = shared.changed.wait_timeout(queue, waiting).unwrap_or_else(PoisonError::into_inner).0;
            }
        };
        let mut go_on = || {
            if shared.lock().waiting == 0 {
                std::thread::sleep(PAUSE_BETWEEN_FILES);
            }
            !shared.lock().stop
        };
        let result =
            guarded("the deleter", || remove(&*shared.root, &trash.name, shared.is_over(&trash), &mut go_on));
        finish(shared, trash, result.and_then(|removed| removed));
    }
}

/// Records a result under one lock: a caller that finds the thread idle must find the result.
fn finish(shared: &DeleterState, mut trash: Trash, result: stepwell_core::Result<Removed>) {
    let mut queue = shared.lock();
    queue.busy = false;
    match result {
        // It stops only when the thread ends. The next writer deletes the rest.
        Ok(Removed::Gone | Removed::Stopped) => {}
        Ok(Removed::Held) => queue.held.push_back(trash),
        Ok(Removed::Unprotected) => {
            trash.unprotected = true;
            queue.held.push_back(trash);
        }
        Err(error) => {
            tracing::warn!(name = trash.name, %error, "deleting a retired step failed. The next writer tries again");
            queue.failed.push(error);
        }
    }
    shared.changed.notify_all();
}
