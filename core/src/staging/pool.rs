//! The staging pool: memory that is mapped, faulted in and registered once, then lent and returned
//! for the life of the process.
//!
//! One pool serves a process ([`StagingPool::shared`]). Every manager holds it, and the last one
//! frees it. Saves that share it take slots in turn. A capturing thread holds no slot while it
//! waits for another one: it passes a slot on before it asks for the next. That slot returns only
//! if its flush runs. So a capture needs a flush that runs, or that will run without waiting for
//! another capture. A manager captures one save at a time, and its flushes run first in, first out.

use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::helpers::{Helpers, Task};
use super::lease::{Lease, SharedPool};
use super::slot::{Free, Slot};
use crate::deadline::StallTimer;
use crate::sync::{Condvar, Mutex};
use crate::sys::{Birth, Mapping};
use crate::{Error, Result};

/// Bytes of a slot where nobody asks for another size. From 2 to 16 MiB captures are equally fast;
/// a write of this size keeps a disk busy with few in flight, and the first one starts after a
/// fraction of a millisecond of copying.
pub const DEFAULT_SLOT_BYTES: usize = 8 << 20;

/// Bytes of one mapping: engines register mappings, which may be at most 1 GiB each, and a process
/// grows its pool in steps.
const SEGMENT_BYTES: usize = 256 << 20;

/// A ring with fewer slots cannot fill one while another one is written.
const MIN_SLOTS: usize = 2;

/// The process's pool, for as long as somebody holds it, and the process that made it.
type OfProcess = Option<(Birth, Weak<StagingPool>)>;
static SHARED: std::sync::Mutex<OfProcess> = std::sync::Mutex::new(None);

/// `None` where it is not to be had: in a forked child, a thread that is not there may have it for
/// ever. Everybody else has it for microseconds.
fn shared_by_all() -> Option<std::sync::MutexGuard<'static, OfProcess>> {
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
    /// Mappings in the order in which they were made. Held while growing, so that two users do not
    /// both grow.
    mappings: Mutex<Vec<Arc<Mapping>>>,
    helpers: Helpers,
    /// A forked child has none of the memory.
    birth: Birth,
}

impl StagingPool {
    /// The pool of this process, made (with no memory yet: see [`StagingPool::ensure`]) where
    /// nobody holds one.
    pub fn shared() -> Arc<Self> {
        let Some(mut shared) = shared_by_all() else { return Arc::new(Self::empty(DEFAULT_SLOT_BYTES)) };
        // A forked child sees the parent's pool here, and must not touch it, not even its counts.
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

    /// A pool of its own, with slots of `slot_bytes` (a multiple of 4096) and at least `bytes` in
    /// all (and two slots).
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

    /// Grows to at least `bytes`, rounded up to whole slots, two at the least. Takes the time of
    /// touching the new memory. Nothing makes it shrink but slots that never come back from a
    /// queue.
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

    /// Bytes of all slots, lent or not; without those that never come back.
    pub fn bytes(&self) -> usize {
        self.shared.lock().total * self.slot_bytes
    }

    /// Bytes of one slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Its memory, for registration with an engine.
    pub fn mappings(&self) -> Vec<Arc<Mapping>> {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// True if somebody waits for a slot, or is about to.
    pub fn is_starved(&self) -> bool {
        let state = self.shared.lock();
        !state.queue.is_empty() || state.free.len() < MIN_SLOTS
    }

    /// A slot, if one is free and nobody came first.
    pub fn try_acquire(&self) -> Result<Option<Slot<Free>>> {
        self.birth.check("staging pool")?;
        let mut state = self.shared.lock();
        state.reclaim();
        if !state.queue.is_empty() {
            return Ok(None);
        }
        Ok(state.free.pop().map(|buffer| Slot::lend(Lease::new(buffer, Arc::clone(&self.shared)))))
    }

    /// Waits for a slot, in turn. Returns it, and how long it was waited for, if at all.
    /// [`Error::Timeout`] if no slot of this pool came back for `stall`. `cancelled` is asked after
    /// each [`StagingPool::wake`] and each `poll_interval`. Its error ends the wait.
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
            // Nothing announces the end of a device's copies: parked slots are polled.
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

    /// Makes everybody who waits ask again whether it was cancelled.
    pub fn wake(&self) {
        // The lock orders this after the check of a waiter that is about to sleep.
        drop(self.shared.lock());
        self.shared.changed.notify_all();
    }

    /// Starts a task on up to `count` of the pool's threads, which are made when first needed and
    /// end with the pool.
    pub(crate) fn help(&self, count: usize, task: &Arc<dyn Task>) {
        self.helpers.start(count, task);
    }
}

#[cfg(any(test, feature = "test-support"))]
mod testing;
#[cfg(test)]
mod tests;
