//! The pool's memory, and the part of it that a slot has borrowed.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use crate::Error;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::sys::Buffer;

/// The part of the pool that slots use. Slots may outlive the pool.
pub(super) struct SharedPool {
    pub(super) state: Mutex<PoolState>,
    pub(super) changed: Condvar,
}

#[derive(Default)]
pub(super) struct PoolState {
    /// Free buffers. The last returned one is lent first: its addresses are still in the TLB.
    pub(super) free: Vec<Buffer>,
    /// Returned buffers that a device may still write to.
    pub(super) parked: Vec<Buffer>,
    /// The number of all buffers.
    pub(super) total: usize,
    /// The tickets of the waiting threads, first in, first out.
    pub(super) queue: VecDeque<u64>,
    pub(super) next_ticket: u64,
    /// The number of buffers that became free so far. Waiting threads take it as progress.
    pub(super) releases: u64,
}

impl PoolState {
    /// Frees parked buffers whose copies have ended.
    pub(super) fn reclaim(&mut self) {
        let mut i = 0;
        while let Some(buffer) = self.parked.get_mut(i) {
            if matches!(buffer.wait_arrived(Instant::now()), Err(Error::Timeout { .. })) {
                i += 1;
            } else {
                self.free.push(self.parked.swap_remove(i));
                self.releases += 1;
            }
        }
    }
}

impl SharedPool {
    pub(super) fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a buffer that a stuck queue keeps permanently. The pool may grow again.
    fn lose(&self) {
        let mut state = self.lock();
        state.total = state.total.saturating_sub(1);
    }

    fn give_back(&self, buffer: Buffer) {
        let mut state = self.lock();
        if buffer.is_arriving() {
            state.parked.push(buffer);
        } else {
            state.free.push(buffer);
            state.releases += 1;
        }
        let has_waiters = !state.queue.is_empty();
        drop(state);
        if has_waiters {
            self.changed.notify_all();
        }
    }
}

/// A buffer lent by the pool. Dropping it returns the buffer.
pub(super) struct Lease {
    /// `None` while a queue has it.
    pub(super) buffer: Option<Buffer>,
    pub(super) pool: Arc<SharedPool>,
}

impl Lease {
    pub(super) fn new(buffer: Buffer, pool: Arc<SharedPool>) -> Self {
        Self { buffer: Some(buffer), pool }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or_default()
    }

    pub(super) fn size(&self) -> usize {
        self.buffer.as_ref().map_or(0, Buffer::size)
    }

    pub(super) fn is_arriving(&self) -> bool {
        self.buffer.as_ref().is_some_and(Buffer::is_arriving)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        match self.buffer.take() {
            Some(buffer) => self.pool.give_back(buffer),
            None => self.pool.lose(),
        }
    }
}
