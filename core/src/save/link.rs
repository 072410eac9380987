//! What ties the two halves of a save together: whichever ends early tells the other, with its reason.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, atomic};
use std::time::Duration;

use crate::Error;
use crate::staging::StagingPool;
use crate::sync::{AtomicBool, Mutex};

/// Shared by [`super::Capture`] and [`super::Flush`].
pub(super) struct Link {
    stopped: AtomicBool,
    cause: Mutex<Option<String>>,
    /// Set by whoever called for the save, when it is wanted no more.
    unwanted: Option<Arc<atomic::AtomicBool>>,
    pool: Arc<StagingPool>,
}

impl Link {
    pub(super) fn new(pool: Arc<StagingPool>, unwanted: Option<Arc<atomic::AtomicBool>>) -> Self {
        Self { stopped: AtomicBool::new(false), cause: Mutex::new(None), unwanted, pool }
    }

    /// Why the capture must stop, if it must: [`Link::cancelled`], and what the caller asked for. The flush does not ask this: what is captured whole may
    /// be committed.
    pub(super) fn unwanted(&self) -> Option<Error> {
        // Asked under the pool's lock too, so that nothing is stopped here: the thread that gets this answer does that.
        let unwanted = self.unwanted.as_ref().is_some_and(|unwanted| unwanted.load(Ordering::Acquire));
        self.cancelled().or_else(|| unwanted.then(|| Error::Cancelled("its caller cancelled it".to_owned())))
    }

    /// How long a wait may last until that is asked again: nothing announces what a caller asked for.
    pub(super) fn patience(&self) -> Duration {
        if self.unwanted.is_some() { Duration::from_millis(20) } else { Duration::MAX }
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
