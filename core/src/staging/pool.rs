//! The staging pool: memory that is mapped, faulted in and registered once, then reused for the
//! life of the process.
//!
//! One pool serves a process ([`StagingPool::shared`]). Every manager holds it, and the last one
//! frees it. Saves that share it take slots in turn. A capturing thread never holds a slot while it
//! waits for another one. It sends a slot to the flush before it asks for the next. The slot
//! returns only if that flush runs. So the flush of a capture must run, or start without waiting
//! for another capture. A manager captures one save at a time, and its flushes run first in, first
//! out.

use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::helpers::{Helpers, Task};
use super::lease::{Lease, SharedPool};
use super::slot::{Free, Slot};
use crate::deadline::StallTimer;
use crate::sync::{Condvar, Mutex};
use crate::sys::{Birth, Mapping};
use crate::{Error, Result};

/// The default size of a slot in bytes. Captures are equally fast from 2 to 16 MiB. At this size, a
/// few writes in flight keep a disk busy, and the first write starts within a millisecond.
pub const DEFAULT_SLOT_BYTES: usize = 8 << 20;

/// The size of one mapping in bytes. The pool grows by mappings. Engines register them, and allow
/// at most 1 GiB each.
const SEGMENT_BYTES: usize = 256 << 20;

/// The least number of slots: one is filled while the other one is written.
const MIN_SLOTS: usize = 2;

/// The pool of a process while a manager holds it, and the process that created it.
type ProcessPool = Option<(Birth, Weak<StagingPool>)>;
static SHARED: std::sync::Mutex<ProcessPool> = std::sync::Mutex::new(None);

/// Locks the process's pool. Returns `None` if that fails for 100 ms: in a forked child, a thread
/// that no longer exists may hold the lock permanently. Other threads hold it for microseconds.
fn lock_process_pool() -> Option<std::sync::MutexGuard<'static, ProcessPool>> {
    for _ in 0..100 {
        match SHARED.try_lock() {
            Ok(shared) => return Some(shared),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    None
}

/// See the module documentation.
pub struct StagingPool {
    slot_bytes: usize,
    shared: Arc<SharedPool>,
    /// All mappings. Locked while the pool grows, so that two users do not both grow it.
    mappings: Mutex<Vec<Arc<Mapping>>>,
    helpers: Helpers,
    /// The process that created it. A forked child does not have its memory.
    birth: Birth,
}

impl StagingPool {
    /// Returns the pool of this process. If nobody holds one, creates it without memory: see
    /// [`StagingPool::ensure`].
    pub fn shared() -> Arc<Self> {
        let Some(mut shared) = lock_process_pool() else { return Arc::new(Self::empty(DEFAULT_SLOT_BYTES)) };
        // A forked child finds the parent's pool here. It must not even touch its reference counts.
        let here = shared.as_ref().filter(|(birth, _)| birth.is_here());
        if let Some(pool) = here.and_then(|(_, pool)| pool.upgrade()) {
            return pool;
        }
        let pool = Arc::new(Self::empty(DEFAULT_SLOT_BYTES));
        let before = shared.replace((pool.birth, Arc::downgrade(&pool)));
        if before.as_ref().is_some_and(|(birth, _)| !birth.is_here()) {
            std::mem::forget(before);
        }
        pool
    }

    /// Keeps the pool of this process, with its memory, until the process ends: for callers who
    /// open a manager for each checkpoint.
    pub fn keep() {
        std::mem::forget(Self::shared());
    }

    /// Returns a separate pool with slots of `slot_bytes` (a multiple of 4096). It has at least
    /// `bytes` in all, and at least two slots.
    pub fn new(bytes: usize, slot_bytes: usize) -> Result<Arc<Self>> {
        if slot_bytes == 0 || !slot_bytes.is_multiple_of(4096) || slot_bytes > SEGMENT_BYTES {
            return Err(Error::Misuse(format!(
                "slots of {slot_bytes} bytes: a multiple of 4096 up to {SEGMENT_BYTES} is needed"
            )));
        }
        let pool = Self::empty(slot_bytes);
        pool.ensure(bytes)?;
        Ok(Arc::new(pool))
    }

    fn empty(slot_bytes: usize) -> Self {
        Self {
            slot_bytes,
            shared: Arc::new(SharedPool { state: Mutex::default(), changed: Condvar::new() }),
            mappings: Mutex::default(),
            helpers: Helpers::default(),
            birth: Birth::now(),
        }
    }

    /// Grows to at least `bytes`, rounded up to whole slots, and at least two slots. Touches the
    /// new memory, which takes time. The pool shrinks only by slots that a queue never returns.
    pub fn ensure(&self, bytes: usize) -> Result<()> {
        self.birth.check("staging pool")?;
        let wanted = bytes.div_ceil(self.slot_bytes).max(MIN_SLOTS);
        let mut mappings = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        let mut slots = self.shared.lock().total;
        while slots < wanted {
            let more = (wanted - slots).min((SEGMENT_BYTES / self.slot_bytes).max(1));
            let mut buffers = Mapping::new(more * self.slot_bytes)?.into_buffers(self.slot_bytes)?;
            slots += buffers.len();
            mappings.extend(buffers.first().map(|buffer| Arc::clone(buffer.mapping())));
            let mut state = self.shared.lock();
            state.total += buffers.len();
            state.releases += buffers.len() as u64;
            state.free.append(&mut buffers);
            drop(state);
            self.shared.changed.notify_all();
        }
        Ok(())
    }

    /// Returns the bytes of all slots, lent or free, without those that a queue never returns.
    pub fn bytes(&self) -> usize {
        self.shared.lock().total * self.slot_bytes
    }

    /// Returns the bytes of one slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Returns its mappings, for registration with an engine.
    pub fn mappings(&self) -> Vec<Arc<Mapping>> {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// True if a thread waits for a slot, or will soon.
    pub fn is_starved(&self) -> bool {
        let state = self.shared.lock();
        !state.queue.is_empty() || state.free.len() < MIN_SLOTS
    }

    /// Returns a slot if one is free and no thread waits.
    pub fn try_acquire(&self) -> Result<Option<Slot<Free>>> {
        self.birth.check("staging pool")?;
        let mut state = self.shared.lock();
        state.reclaim();
        if !state.queue.is_empty() {
            return Ok(None);
        }
        Ok(state.free.pop().map(|buffer| Slot::lend(Lease::new(buffer, Arc::clone(&self.shared)))))
    }

    /// Waits for a slot, in turn. Returns it, and the time of the wait if there was one. Calls
    /// `cancelled` after each [`StagingPool::wake`] and each `poll_interval`. Its error ends the
    /// wait. [`Error::Timeout`] if no slot was returned for `stall`.
    pub fn acquire(
        &self,
        stall: Duration,
        poll_interval: Duration,
        cancelled: impl Fn() -> Option<Error>,
    ) -> Result<(Slot<Free>, Option<Duration>)> {
        self.birth.check("staging pool")?;
        let mut state = self.shared.lock();
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.queue.push_back(ticket);
        let started = Instant::now();
        let mut timer = StallTimer::new(stall);
        let mut waited = false;
        let outcome = loop {
            if let Some(error) = cancelled() {
                break Err(error);
            }
            state.reclaim();
            if state.queue.front() == Some(&ticket)
                && let Some(buffer) = state.free.pop()
            {
                break Ok(buffer);
            }
            let left = timer.left(state.releases);
            if left.is_zero() {
                break Err(Error::Timeout {
                    waited_for: format!(
                        "a free staging slot ({} of {} bytes, all in use)",
                        state.total, self.slot_bytes
                    ),
                    seconds: started.elapsed().as_secs_f64(),
                });
            }
            waited = true;
            // The end of a device's copies wakes no thread, so poll the parked buffers.
            let left = left.min(poll_interval);
            let left = if state.parked.is_empty() { left } else { left.min(Duration::from_millis(1)) };
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        state.queue.retain(|&other| other != ticket);
        let next = !state.queue.is_empty();
        drop(state);
        if next {
            self.shared.changed.notify_all();
        }
        let slot = Slot::lend(Lease::new(outcome?, Arc::clone(&self.shared)));
        Ok((slot, waited.then(|| started.elapsed())))
    }

    /// Makes all waiting threads call `cancelled` again.
    pub fn wake(&self) {
        // The lock waits for threads that have checked but not yet slept, so they do not miss this.
        drop(self.shared.lock());
        self.shared.changed.notify_all();
    }

    /// Offers a task to up to `count` of the pool's threads.
    pub(crate) fn help(&self, count: usize, task: &Arc<dyn Task>) {
        self.helpers.start(count, task);
    }
}

#[cfg(any(test, feature = "test-support"))]
mod testing;
#[cfg(test)]
mod tests;
