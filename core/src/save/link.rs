//! The link between the two halves of a save. A half that ends early reports its reason to the
//! other.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, atomic};
use std::time::Duration;

use crate::Error;
use crate::staging::StagingPool;
use crate::sync::{AtomicBool, Mutex};

/// Shared by [`super::Capture`] and [`super::Flush`].
pub(super) struct Link {
    stopped: AtomicBool,
    cause: Mutex<Option<Cause>>,
    /// Set by a caller that cancels the save.
    cancel: Option<Arc<atomic::AtomicBool>>,
    pool: Arc<StagingPool>,
}

enum Cause {
    /// One half ended early.
    Ended(String),
    /// The capture failed. The flush ends with the same error.
    Failed(Arc<Error>),
}

impl Link {
    pub(super) fn new(pool: Arc<StagingPool>, cancel: Option<Arc<atomic::AtomicBool>>) -> Self {
        Self { stopped: AtomicBool::new(false), cause: Mutex::new(None), cancel, pool }
    }

    /// Returns why the capture must stop: [`Link::stopped`], or its caller cancelled it. The flush
    /// does not check this, because it may commit a complete capture.
    pub(super) fn capture_stopped(&self) -> Option<Error> {
        // Called under the pool's lock too, so this must not call `stop`, which takes that lock.
        // The capturing thread that gets this error stops the save.
        let cancelled = self.cancel.as_ref().is_some_and(|cancel| cancel.load(Ordering::Acquire));
        self.stopped().or_else(|| cancelled.then(|| Error::Cancelled("its caller cancelled it".to_owned())))
    }

    /// Returns the longest wait between two calls of [`Link::capture_stopped`]. A caller that
    /// cancels wakes no thread.
    pub(super) fn poll_interval(&self) -> Duration {
        if self.cancel.is_some() { Duration::from_millis(20) } else { Duration::MAX }
    }

    /// Stops both halves. The first cause stays.
    pub(super) fn stop(&self, cause: impl Into<String>) {
        self.stop_by(Cause::Ended(cause.into()));
    }

    /// Stops both halves because the capture failed.
    pub(super) fn fail(&self, error: &Arc<Error>) {
        self.stop_by(Cause::Failed(Arc::clone(error)));
    }

    fn stop_by(&self, cause: Cause) {
        self.cause.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(cause);
        self.stopped.store(true, Ordering::Release);
        self.pool.wake();
    }

    /// Returns why this half must stop. `None` if it may go on.
    pub(super) fn stopped(&self) -> Option<Error> {
        if !self.stopped.load(Ordering::Acquire) {
            return None;
        }
        let cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Error::Cancelled(match &*cause {
            Some(Cause::Ended(why)) => why.clone(),
            Some(Cause::Failed(error)) => format!("the capture failed: {error}"),
            None => String::new(),
        }))
    }

    /// Returns the error of the capture if it stopped the save.
    pub(super) fn capture_error(&self) -> Option<Error> {
        match &*self.cause.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Cause::Failed(error)) => Some(Error::Shared(Arc::clone(error))),
            _ => None,
        }
    }
}
