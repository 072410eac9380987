//! What ties the two halves of a save together: whichever ends early tells the other, with its reason.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::Error;
use crate::staging::StagingPool;

/// Shared by [`super::Capture`] and [`super::Flush`].
pub(super) struct Link {
    stopped: AtomicBool,
    cause: Mutex<Option<String>>,
    pool: Arc<StagingPool>,
}

impl Link {
    pub(super) fn new(pool: Arc<StagingPool>) -> Self {
        Self { stopped: AtomicBool::new(false), cause: Mutex::new(None), pool }
    }

    /// Stops both halves. The first cause stays.
    pub(super) fn stop(&self, cause: impl Into<String>) {
        self.cause.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| cause.into());
        self.stopped.store(true, Ordering::Release);
        self.pool.wake();
    }

    /// Why this half must stop, if it must.
    pub(super) fn cancelled(&self) -> Option<Error> {
        if !self.stopped.load(Ordering::Acquire) {
            return None;
        }
        let cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Error::Cancelled(cause.clone().unwrap_or_default()))
    }
}
