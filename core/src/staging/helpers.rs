//! The pool's helper threads, which help to capture. They start when first needed, and end with
//! the pool.
//!
//! A helper enters a task through its [`Door`], and leaves it after its work. The owner of the task
//! closes the door and waits until all helpers have left. So no helper touches a task, or the
//! memory that it reads, after its owner has returned.

use std::sync::{Arc, PoisonError, Weak};

use crate::sync::{self, Condvar, JoinHandle, Mutex, Receiver, Sender};
use crate::sys::Birth;

/// Work that several threads share. Each calls `work`, which returns when no work is left to start.
pub(crate) trait Task: Send + Sync {
    /// Does a part of the work. Does not panic.
    fn work(&self);

    /// The door that helpers enter and leave.
    fn door(&self) -> &Arc<Door>;
}

/// Counts the helpers inside a task.
#[derive(Debug, Default)]
pub(crate) struct Door {
    state: Mutex<DoorState>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct DoorState {
    closed: bool,
    /// The number of helpers inside.
    inside: usize,
}

impl Door {
    fn enter(self: &Arc<Self>) -> Option<Inside> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.closed {
            return None;
        }
        state.inside += 1;
        Some(Inside(Arc::clone(self)))
    }

    /// Rejects new helpers, and waits until all helpers have left.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.closed = true;
        // The wait is bounded: a helper leaves after its current copy, and its own waits (for slots
        // and fences) end with the stall timeout.
        while state.inside > 0 {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

struct Inside(Arc<Door>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).inside -= 1;
        self.0.left.notify_all();
    }
}

type HelperJob = (Arc<Door>, Weak<dyn Task>);

/// The threads of one pool.
#[derive(Default)]
pub(super) struct Helpers {
    threads: Mutex<Threads>,
}

#[derive(Default)]
struct Threads {
    jobs: Option<(Sender<HelperJob>, Receiver<HelperJob>)>,
    handles: Vec<JoinHandle<()>>,
    /// The process that started the threads: a forked child does not have them.
    birth: Option<Birth>,
}

/// Fewer threads saturate the memory bus of all known machines.
const MAX_HELPERS: usize = 32;

impl Helpers {
    /// Offers the task to `count` threads. Some may be busy, or fail to start. The owner does the
    /// work that they leave.
    pub(super) fn start(&self, count: usize, task: &Arc<dyn Task>) {
        if count == 0 {
            return;
        }
        let count = count.min(MAX_HELPERS);
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.birth.get_or_insert_with(Birth::now);
        let (sender, receiver) = threads.jobs.get_or_insert_with(sync::unbounded::<HelperJob>).clone();
        while threads.handles.len() < count {
            let receiver = receiver.clone();
            let name = format!("stepwell-copy-{}", threads.handles.len());
            let made = sync::spawn(&name, move || {
                while let Ok((door, task)) = receiver.recv() {
                    let Some(_inside) = door.enter() else { continue };
                    // The owner keeps the task until this thread has left, so this is never the
                    // last handle.
                    if let Some(task) = task.upgrade() {
                        task.work();
                    }
                }
            });
            match made {
                Ok(handle) => threads.handles.push(handle),
                Err(error) => {
                    tracing::warn!(%error, "cannot start a capture thread: captures take longer");
                    break;
                }
            }
        }
        for _ in 0..count.min(threads.handles.len()) {
            if sender.send((Arc::clone(task.door()), Arc::downgrade(task))).is_err() {
                break;
            }
        }
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        threads.jobs = None;
        let handles = std::mem::take(&mut threads.handles);
        if threads.birth.is_some_and(|birth| !birth.is_here()) {
            std::mem::forget(handles);
            return;
        }
        // The threads have no jobs: the owner of each task waited until they had left it.
        for handle in handles {
            if handle.join().is_err() {
                tracing::error!("a capture thread panicked");
            }
        }
    }
}
