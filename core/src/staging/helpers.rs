//! The threads that help to capture. They belong to the pool, are made when first needed, and end
//! with it.
//!
//! A helper holds its task only between being let in and leaving; the owner of the task closes the
//! door and waits until all have left. So a task that was given out, and the memory that it reads,
//! is never touched after its owner has returned.

use std::sync::{Arc, PoisonError, Weak};

use crate::sync::{self, Condvar, JoinHandle, Mutex, Receiver, Sender};
use crate::sys::Birth;

/// Work that several threads do together. `work` is called by each and returns when nothing is left
/// to start.
pub(crate) trait Task: Send + Sync {
    /// Does a share of it. Does not panic.
    fn work(&self);

    /// The door that helpers enter and leave.
    fn door(&self) -> &Arc<Door>;
}

/// Counts the helpers inside a task.
#[derive(Debug, Default)]
pub(crate) struct Door {
    state: Mutex<(bool, usize)>,
    left: Condvar,
}

impl Door {
    fn enter(self: &Arc<Self>) -> Option<Inside> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.0 {
            return None;
        }
        state.1 += 1;
        Some(Inside(Arc::clone(self)))
    }

    /// Lets nobody in any more, and waits until all have left.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 = true;
        // Bounded: a helper leaves after the copy that it is at, and what it waits for itself
        // (slots, fences) ends by the stall timeout.
        while state.1 > 0 {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

struct Inside(Arc<Door>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).1 -= 1;
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
    /// When the first thread was made: a forked child has none of them.
    birth: Option<Birth>,
}

/// More threads than this saturate no memory bus that we know.
const MAX_HELPERS: usize = 32;

impl Helpers {
    /// Offers the task to `count` threads. Fewer may come (the others are busy, or cannot be made):
    /// the owner does what they leave.
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
                    // The owner keeps the task until we have left, so this is never the last
                    // handle.
                    if let Some(task) = task.upgrade() {
                        task.work();
                    }
                }
            });
            match made {
                Ok(handle) => threads.handles.push(handle),
                Err(error) => {
                    tracing::warn!(%error, "no thread to help with capture");
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
        // They have no more jobs: the owner of each task has waited until they had left it.
        for handle in handles {
            if handle.join().is_err() {
                tracing::error!("a capture thread panicked");
            }
        }
    }
}
