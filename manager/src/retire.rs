//! Deleting what was taken out of sight: slowly, in the background, and only where no reader holds
//! it.
//!
//! A step comes here after [`retire`](crate::commit::aside::retire) has made its rename durable.
//! The deleter tries the step's lease exclusively. If a reader holds it, the trash waits and is
//! tried again. Without locks, it waits for a grace period, restarted by each writer: no clocks of
//! two machines are compared. The next writer finishes what is left when the process ends.

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

/// Between two tries of a step that readers hold.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Between two files, so that a save that runs at the same time has the disk.
const PAUSE_BETWEEN_FILES: Duration = Duration::from_millis(1);
/// The result of one try.
#[derive(Debug, PartialEq, Eq)]
pub enum Removed {
    /// It is gone.
    Gone,
    /// Readers hold it.
    Held,
    /// There are no locks: readers may hold it.
    Unprotected,
    /// Told to stop.
    Stopped,
}

/// Deletes one trash directory, unless readers hold it. `unprotected`: also where there are no
/// locks, so that nobody knows whether one does.
pub fn remove(
    root: &dyn Dir,
    name: &str,
    unprotected: bool,
    go_on: &mut dyn FnMut() -> bool,
) -> stepwell_core::Result<Removed> {
    let dir = match root.open_dir(name) {
        Ok(dir) => dir,
        Err(error) if error.is_not_found() => return Ok(Removed::Gone),
        // Not a directory: nothing of ours, but under a name of ours.
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
        // A network file system keeps a file that is open under another name, and this is the
        // lock's: it goes when the lock is let go.
        drop(lock);
        deleted = delete(root, name, go_on);
    }
    match deleted {
        Ok(false) => Ok(Removed::Stopped),
        Err(error) if !error.is_not_found() => Err(error),
        // Also where another process has deleted it meanwhile.
        _ => Ok(Removed::Gone),
    }
}

/// Trash.
struct Trash {
    name: String,
    /// When it came here, on the injected clock.
    since: Duration,
    /// There are no locks: it waits for the end of the grace period.
    unprotected: bool,
}

#[derive(Default)]
struct TrashQueue {
    ready: VecDeque<Trash>,
    /// Trash that readers hold, or may hold.
    held: VecDeque<Trash>,
    /// The thread is at one.
    busy: bool,
    /// Calls that wait until all is deleted: then there is no reason to go slowly.
    waiting: usize,
    /// Failed deletions; each is reported once.
    failed: Vec<stepwell_core::Error>,
    stop: bool,
    /// The thread has nothing more to do but to end.
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

    /// Moves to `ready` what is worth another try.
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
    /// An idle deleter. Without locks, it leaves trash alone for `grace`.
    pub fn new(root: Arc<dyn Dir>, clock: Arc<dyn Clock>, grace: Duration) -> Self {
        Self::with_spares(root, clock, grace, None)
    }

    /// The same, which keeps files of so many bytes of the last retired step to be written over.
    pub fn with_spares(
        root: Arc<dyn Dir>,
        clock: Arc<dyn Clock>,
        grace: Duration,
        from_bytes: Option<u64>,
    ) -> Self {
        let spares = Spares::new(Arc::clone(&root), from_bytes);
        let shared = DeleterState { root, clock, grace, queue: Mutex::default(), changed: Condvar::new() };
        Self { shared: Arc::new(shared), spares, thread: Mutex::new(None) }
    }

    /// The files that the next save may write over.
    pub fn spares(&self) -> &Spares {
        &self.spares
    }

    /// Takes over retired steps, oldest first, whose renames are durable: the last, which has these
    /// files, is kept to be written over, where it is worth that.
    pub fn retire(&self, mut names: Vec<String>, files: &[FileEntry]) {
        let last = names.pop().and_then(|last| self.spares.keep(last, files));
        self.enqueue(names.into_iter().chain(last));
    }

    /// Deletes also what was kept to be written over.
    pub fn give_up_spares(&self) {
        self.enqueue(self.spares.give_up());
    }

    /// Takes over trash whose rename is durable.
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
                    // Nobody will take it out again, and nobody is to wait for it.
                    self.shared.lock().ready.clear();
                    tracing::warn!(%error, "no thread to delete with; the next writer finishes the trash");
                }
            }
        }
    }

    /// Deletes everything now, at full speed, because the disk is full, and waits for it. Returns
    /// `false` at the deadline. Trash that readers hold stays.
    pub fn empty_now(&self, timeout: Duration) -> bool {
        self.give_up_spares();
        // Never on this thread: an unlink that hangs in the kernel would block the save
        // permanently.
        self.drain(timeout)
    }

    /// Waits until nothing is left but what readers hold, or until nobody deletes any more; `false`
    /// by the deadline.
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

    /// The names that wait because readers hold them.
    pub fn held(&self) -> Vec<String> {
        self.shared.lock().held.iter().map(|trash| trash.name.clone()).collect()
    }

    /// Deletions that failed since the last question.
    pub fn take_failures(&self) -> Vec<stepwell_core::Error> {
        std::mem::take(&mut self.shared.lock().failed)
    }

    /// Tries once more what readers held, then ends the thread; what is left is the next writer's.
    /// `false`: the thread did not end in time, and may be waited for again.
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

/// In one step: a caller that finds nothing busy must find the result.
fn finish(shared: &DeleterState, mut trash: Trash, result: stepwell_core::Result<Removed>) {
    let mut queue = shared.lock();
    queue.busy = false;
    match result {
        // Stopped only as the thread ends: what is left is the next writer's.
        Ok(Removed::Gone | Removed::Stopped) => {}
        Ok(Removed::Held) => queue.held.push_back(trash),
        Ok(Removed::Unprotected) => {
            trash.unprotected = true;
            queue.held.push_back(trash);
        }
        Err(error) => {
            tracing::warn!(name = trash.name, %error, "a retired step could not be deleted; the next writer tries again");
            queue.failed.push(error);
        }
    }
    shared.changed.notify_all();
}
